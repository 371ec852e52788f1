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

// Result is what a replay saw.
type Result struct {
	// Requests were replayed; of InputTokens, those in whole blocks could have
	// been found: AskedTokens.
	Requests    int64
	InputTokens int64
	AskedTokens int64
	// MatchedTokens were said to be cached, HitTokens arrived and were right.
	// IdealTokens would have been hits of a cache that forgets nothing.
	MatchedTokens, HitTokens, IdealTokens int64

	// ReadBytes arrived, every one of them compared; MismatchedBlocks were not
	// what had been stored, the first of them described in Mismatch.
	ReadBytes        int64
	MismatchedBlocks int64
	Mismatch         string
	// LostBlocks matched and did not arrive: evicted or dropped in between.
	LostBlocks int64

	// StoredBlocks and WrittenBytes were stored by this replay, ExistedBlocks were
	// there. RefusedBlocks are the others, by reason.
	StoredBlocks, ExistedBlocks, WrittenBytes int64
	RefusedBlocks                             map[string]int64
	// BusyMatches, BusyReads and BusyWrites were refused for lack of room,
	// MissedCalls answered by no node.
	BusyMatches, BusyReads, BusyWrites, MissedCalls int64

	// Elapsed is the time from the first request to the end of the last.
	Elapsed time.Duration
	// Match is the time of each match, Load that of loading a matched prefix,
	// comparing not included.
	Match, Load Latency
}

// Latency is the distribution of a duration.
type Latency struct {
	Count         int
	P50, P99, Max time.Duration
}

// HitRatio is the share of the tokens in whole blocks that came from the cache.
func (r Result) HitRatio() float64 { return ratio(r.HitTokens, r.AskedTokens) }

// IdealRatio is what HitRatio would be if nothing were ever evicted.
func (r Result) IdealRatio() float64 { return ratio(r.IdealTokens, r.AskedTokens) }

func ratio(part, whole int64) float64 {
	if whole == 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

// BytesPerSecond is the bytes read and written over the whole replay.
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

// result closes the books.
func (s *stats) result(elapsed time.Duration) Result {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.r
	r.RefusedBlocks = maps.Clone(r.RefusedBlocks)
	r.Elapsed = elapsed
	r.Match, r.Load = latency(s.match), latency(s.load)
	return r
}

// latency sorts d and takes the quantiles by nearest rank.
func latency(d []time.Duration) Latency {
	if len(d) == 0 {
		return Latency{}
	}
	slices.Sort(d)
	rank := func(percent int) time.Duration { return d[max(0, (len(d)*percent+99)/100-1)] }
	return Latency{Count: len(d), P50: rank(50), P99: rank(99), Max: d[len(d)-1]}
}
