package trace

import (
	"cmp"
	"container/heap"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"time"
)

const (
	agenticBlockTokens = 64
	// dualPathBlockTokens is the number of tokens per block. The value is arbitrary, because the
	// format has lengths in tokens and no blocks.
	dualPathBlockTokens = 64
	// dualPathRound is the assumed time between two rounds of a trajectory. The format has no
	// times. The assumed time only determines the order of the requests of different sessions.
	dualPathRound = time.Second
	// maxLocalID is the maximum block id inside one session; see blockID.
	maxLocalID = 1<<32 - 1
)

// blockID returns an id that is unique in the file for the block id local, which is unique only
// within its session.
func blockID(session, local uint64) uint64 { return session<<32 | local }

// run is a run of count consecutive block ids of a session, starting at first.
type run struct {
	first, count uint64
}

// turn is one request of a session in compact form: an agentic prompt has thousands of blocks in a
// few runs of consecutive ids.
type turn struct {
	at            time.Duration // since the session's start
	agent         uint32
	input, output int
	runs          []run
}

// session is one line of a file of sessions. Its turns are in time order.
type session struct {
	number uint64
	start  time.Duration // time at which it was opened
	turns  []turn        // the remaining turns
}

func (s *session) nextAt() time.Duration { return s.start + s.turns[0].at }

// sessions merges the sessions of a file by time. At most limit sessions are open. When a session
// ends, the next line is read, and its session starts at that time.
//
// Invariant: every session in open has a remaining turn.
type sessions struct {
	lines       *lines
	blockTokens int
	parse       func(line []byte) ([]turn, error)
	limit       int
	count       uint64
	open        byTime
	now         time.Duration
	eof         bool
	blocks      []uint64
}

func newSessions(l *lines, blockTokens int, parse func([]byte) ([]turn, error), limit int) *sessions {
	if limit == 0 {
		limit = math.MaxInt
	}
	return &sessions{lines: l, blockTokens: blockTokens, parse: parse, limit: limit}
}

func (s *sessions) next() (Request, error) {
	for len(s.open) < s.limit && !s.eof {
		if err := s.openOne(); err != nil {
			return Request{}, err
		}
	}
	if len(s.open) == 0 {
		return Request{}, io.EOF
	}
	se := s.open[0]
	s.now = se.nextAt()
	t := se.turns[0]
	if se.turns = se.turns[1:]; len(se.turns) == 0 {
		heap.Pop(&s.open)
	} else {
		heap.Fix(&s.open, 0)
	}
	s.blocks = s.blocks[:0]
	for _, r := range t.runs {
		for i := range r.count {
			s.blocks = append(s.blocks, blockID(se.number, r.first+i))
		}
	}
	return Request{
		Time:         s.now,
		Session:      se.number,
		Agent:        t.agent,
		InputTokens:  t.input,
		OutputTokens: t.output,
		BlockTokens:  s.blockTokens,
		Blocks:       s.blocks,
	}, nil
}

// openOne reads one session and opens it at the current time.
func (s *sessions) openOne() error {
	line, err := s.lines.next()
	if errors.Is(err, io.EOF) {
		s.eof = true
		return nil
	}
	if err != nil {
		return err
	}
	turns, err := s.parse(line)
	if err != nil {
		return s.lines.errorf("%w", err)
	}
	if s.count > maxLocalID {
		return s.lines.errorf("more than %d sessions; split the file", uint64(maxLocalID))
	}
	number := s.count
	s.count++
	if len(turns) > 0 {
		heap.Push(&s.open, &session{number: number, start: s.now, turns: turns})
	}
	return nil
}

// byTime is a heap of open sessions by the time of their next request. If two sessions have equal
// times, the session of the earlier line is first.
type byTime []*session

func (h byTime) Len() int { return len(h) }
func (h byTime) Less(i, j int) bool {
	if c := cmp.Compare(h[i].nextAt(), h[j].nextAt()); c != 0 {
		return c < 0
	}
	return h[i].number < h[j].number
}
func (h byTime) Swap(i, j int) { h[i], h[j] = h[j], h[i] }

// Push implements heap.Interface.
func (h *byTime) Push(x any) { *h = append(*h, x.(*session)) }

// Pop implements heap.Interface.
func (h *byTime) Pop() any {
	old := *h
	last := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return last
}

// agenticTurn is [agent, t, in, out, api_time, think_time, runs] of one request.
type agenticTurn struct {
	agent         string
	t             float64 // s, from the agent's start
	input, output int64
	runs          []uint64
}

// UnmarshalJSON reads the array form.
func (a *agenticTurn) UnmarshalJSON(b []byte) error {
	var f []json.RawMessage
	if err := json.Unmarshal(b, &f); err != nil {
		return err
	}
	if len(f) != 7 {
		return fmt.Errorf("a request of %d fields; want 7: agent, t, in, out, api_time, think_time, runs", len(f))
	}
	for _, field := range []struct {
		name string
		at   int
		into any
	}{{"agent", 0, &a.agent}, {"t", 1, &a.t}, {"in", 2, &a.input}, {"out", 3, &a.output}, {"runs", 6, &a.runs}} {
		if err := json.Unmarshal(f[field.at], field.into); err != nil {
			return fmt.Errorf("%s of a request: %w", field.name, err)
		}
	}
	return nil
}

// parseAgentic decodes one session of an Agentic file.
func parseAgentic(line []byte) ([]turn, error) {
	var v struct {
		BlockSize int           `json:"block_size"`
		Reqs      []agenticTurn `json:"reqs"`
	}
	if err := json.Unmarshal(line, &v); err != nil {
		return nil, fmt.Errorf("%v; want one JSON object with id, block_size, reqs", err)
	}
	if v.BlockSize != agenticBlockTokens {
		return nil, fmt.Errorf("block_size %d; this format has blocks of %d tokens", v.BlockSize, agenticBlockTokens)
	}
	turns := make([]turn, 0, len(v.Reqs))
	starts := map[uint32]time.Duration{0: 0}
	var mainAt time.Duration
	for i := range v.Reqs {
		t, err := v.Reqs[i].turn()
		if err != nil {
			return nil, fmt.Errorf("request %d: %w", i, err)
		}
		// The times of a sub-agent's requests are relative to the sub-agent's start. A sub-agent is
		// assumed to start at the time of the main agent's last request before it in the session.
		start, known := starts[t.agent]
		if !known {
			start = mainAt
			starts[t.agent] = start
		}
		t.at += start
		if t.agent == 0 {
			mainAt = t.at
		}
		turns = append(turns, t)
	}
	slices.SortStableFunc(turns, func(a, b turn) int { return cmp.Compare(a.at, b.at) })
	return turns, nil
}

// turn checks one request and converts it to a turn.
func (a *agenticTurn) turn() (turn, error) {
	var t turn
	if bad := checkLengths(a.input, a.output); bad != "" {
		return t, errors.New(bad)
	}
	agent, err := agentNumber(a.agent)
	if err != nil {
		return t, err
	}
	if !(a.t >= 0 && a.t <= maxTime.Seconds()) {
		return t, fmt.Errorf("t = %v s; want 0 to %v", a.t, maxTime.Seconds())
	}
	runs, blocks, err := pairRuns(a.runs)
	if err != nil {
		return t, err
	}
	if want := uint64(a.input) / agenticBlockTokens; blocks != want {
		return t, fmt.Errorf("runs hold %d blocks for %d tokens; want %d", blocks, a.input, want)
	}
	at := time.Duration(a.t * float64(time.Second))
	return turn{at: at, agent: agent, input: int(a.input), output: int(a.output), runs: runs}, nil
}

// agentNumber reads "" as 0 and "/k" as k.
func agentNumber(s string) (uint32, error) {
	if s == "" {
		return 0, nil
	}
	if s[0] == '/' {
		if n, err := strconv.ParseUint(s[1:], 10, 32); err == nil && n > 0 {
			return uint32(n), nil
		}
	}
	return 0, fmt.Errorf("agent %q; want \"\" or \"/\" and a number from 1", s)
}

// pairRuns turns [first, count, …] into runs and counts their blocks.
func pairRuns(flat []uint64) (runs []run, blocks uint64, err error) {
	if len(flat)%2 != 0 {
		return nil, 0, fmt.Errorf("%d numbers in runs; want pairs of first and count", len(flat))
	}
	runs = make([]run, 0, len(flat)/2)
	for i := 0; i < len(flat); i += 2 {
		r := run{first: flat[i], count: flat[i+1]}
		if r.first > maxLocalID || r.count > MaxInputTokens || r.first+r.count > maxLocalID {
			return nil, 0, fmt.Errorf("run of %d blocks from %d; ids go to %d", r.count, r.first, uint64(maxLocalID))
		}
		runs = append(runs, r)
		blocks += r.count
	}
	return runs, blocks, nil
}

// parseDualPath decodes one trajectory of a DualPath file. The prompt of a round consists of all
// earlier prompts and answers, and of the tokens that the round appends.
func parseDualPath(line []byte) ([]turn, error) {
	var v struct {
		Rounds [][]int64 `json:"rounds"`
	}
	if err := json.Unmarshal(line, &v); err != nil {
		return nil, fmt.Errorf("%v; want one JSON object with id and rounds", err)
	}
	turns := make([]turn, 0, len(v.Rounds))
	var context int64
	for i, r := range v.Rounds {
		if len(r) != 2 {
			return nil, fmt.Errorf("round %d has %d numbers; want append and gen", i, len(r))
		}
		if bad := checkLengths(r[0], r[1]); bad != "" {
			return nil, fmt.Errorf("round %d: %s", i, bad)
		}
		input := context + r[0]
		if bad := checkLengths(input, r[1]); bad != "" {
			return nil, fmt.Errorf("round %d with its context: %s", i, bad)
		}
		context = input + r[1]
		turns = append(turns, turn{
			at:     time.Duration(i) * dualPathRound,
			input:  int(input),
			output: int(r[1]),
			runs:   []run{{first: 0, count: uint64(input) / dualPathBlockTokens}},
		})
	}
	return turns, nil
}

var _ source = (*sessions)(nil)
