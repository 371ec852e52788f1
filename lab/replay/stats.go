package replay

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dustin/go-humanize"
)

// Result has the counts of a replay.
type Result struct {
	// Requests is the number of replayed requests, InputTokens the number of their prompt tokens.
	// AskedTokens is the number of prompt tokens in whole blocks: only these can be cached.
	Requests    int64
	InputTokens int64
	AskedTokens int64
	// MatchedTokens is the number of tokens that matches reported as cached. HitTokens is the number
	// of these that arrived and were correct. IdealTokens is the number of tokens that a cache
	// without eviction would have.
	MatchedTokens, HitTokens, IdealTokens int64

	// ReadBytes is the number of bytes that arrived; all were compared. MismatchedBlocks counts the
	// blocks with wrong bytes. Mismatch describes the first of them.
	ReadBytes        int64
	MismatchedBlocks int64
	Mismatch         string
	// LostBlocks is the number of blocks that matched but did not arrive, because they were evicted
	// or dropped between match and read.
	LostBlocks int64

	// StoredBlocks and WrittenBytes are the numbers of blocks and bytes that this replay stored.
	// ExistedBlocks is the number of blocks that were stored before. RefusedBlocks is the number of
	// refused blocks, by reason.
	StoredBlocks, ExistedBlocks, WrittenBytes int64
	RefusedBlocks                             map[string]int64
	// BusyMatches, BusyReads and BusyWrites count the calls refused for lack of room, MissedCalls
	// the calls that no node answered.
	BusyMatches, BusyReads, BusyWrites, MissedCalls int64

	// Elapsed is the time from the first request to the end of the last.
	Elapsed time.Duration
	// Match is the distribution of the durations of matches. Load is the distribution of the times
	// to load a matched prefix; the comparison of the bytes is not included.
	Match, Load Latency
}

// Latency is the distribution of a duration.
type Latency struct {
	Count         int
	P50, P99, Max time.Duration
}

// HitRatio returns the share of the tokens in whole blocks that came from the cache.
func (r Result) HitRatio() float64 { return ratio(r.HitTokens, r.AskedTokens) }

// IdealRatio returns the HitRatio of a cache without eviction.
func (r Result) IdealRatio() float64 { return ratio(r.IdealTokens, r.AskedTokens) }

func ratio(part, whole int64) float64 {
	if whole == 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

// BytesPerSecond returns the bytes read and written per second over the whole replay.
func (r Result) BytesPerSecond() float64 {
	if r.Elapsed <= 0 {
		return 0
	}
	return float64(r.ReadBytes+r.WrittenBytes) / r.Elapsed.Seconds()
}

// String prints the counts that do not depend on the machine.
func (r Result) String() string {
	var refused []string
	for _, reason := range slices.Sorted(maps.Keys(r.RefusedBlocks)) {
		refused = append(refused, fmt.Sprintf("%s=%d", reason, r.RefusedBlocks[reason]))
	}
	return fmt.Sprintf("requests=%d asked_tokens=%d hit_tokens=%d ideal_tokens=%d read=%s written=%s stored=%d existed=%d lost=%d mismatched=%d refused=[%s]",
		r.Requests, r.AskedTokens, r.HitTokens, r.IdealTokens, humanize.IBytes(uint64(r.ReadBytes)), humanize.IBytes(uint64(r.WrittenBytes)),
		r.StoredBlocks, r.ExistedBlocks, r.LostBlocks, r.MismatchedBlocks, strings.Join(refused, " "))
}

// stats collects a Result from several workers.
type stats struct {
	mu          sync.Mutex
	r           Result
	match, load []time.Duration
}

// add changes the counts under the lock and returns a copy of them.
func (s *stats) add(f func(r *Result)) Result {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.r)
	return s.r
}

func (s *stats) matched(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.match = append(s.match, d)
}

func (s *stats) loaded(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.load = append(s.load, d)
}

// result completes the Result.
func (s *stats) result(elapsed time.Duration) Result {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.r
	r.RefusedBlocks = maps.Clone(r.RefusedBlocks)
	r.Elapsed = elapsed
	r.Match, r.Load = latency(s.match), latency(s.load)
	return r
}

// latency sorts d and computes the quantiles by nearest rank.
func latency(d []time.Duration) Latency {
	if len(d) == 0 {
		return Latency{}
	}
	slices.Sort(d)
	rank := func(percent int) time.Duration { return d[max(0, (len(d)*percent+99)/100-1)] }
	return Latency{Count: len(d), P50: rank(50), P99: rank(99), Max: d[len(d)-1]}
}
