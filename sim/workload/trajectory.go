package workload

import (
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/penstock-kv/penstock/internal/trace"
)

// Round is one turn of an agent: Append tokens are added to its context (by a tool or a user), then
// Gen tokens are generated.
type Round struct{ Append, Gen int }

// Trajectory has the rounds of one agent, from the first to the last.
type Trajectory struct {
	ID     int
	Rounds []Round
}

// Total returns the length of the context after the last round, in tokens.
func (t *Trajectory) Total() int {
	sum := 0
	for _, r := range t.Rounds {
		sum += r.Append + r.Gen
	}
	return sum
}

// Turn is one request of an agent.
type Turn struct {
	// Context has the tokens of earlier rounds, Append the tokens that this round adds: the prompt
	// consists of both. Gen tokens are generated.
	Context, Append, Gen int
}

// Prompt returns the length of the prompt in tokens.
func (t Turn) Prompt() int { return t.Context + t.Append }

// Hit returns the number of tokens of the context that a cache of blocks of blockTokens tokens can
// hold. No cache is simulated for this, because nothing is evicted (section A.4 of the DualPath
// paper).
func (t Turn) Hit(blockTokens int) int { return t.Context / blockTokens * blockTokens }

// Turns calls f for each round with its context, until f returns false.
func (t *Trajectory) Turns(f func(round int, turn Turn) bool) {
	context := 0
	for i, r := range t.Rounds {
		if !f(i, Turn{context, r.Append, r.Gen}) {
			return
		}
		context += r.Append + r.Gen
	}
}

// truncate drops the rounds that do not fit into maxLen tokens. A first round that is too long is
// shortened, so that every agent has a round.
func truncate(rounds []Round, maxLen int) []Round {
	sum := 0
	for i, r := range rounds {
		if sum+r.Append+r.Gen > maxLen {
			if i == 0 {
				gen := min(r.Gen, max(maxLen/2, 1))
				return []Round{{max(maxLen-gen, 1), gen}}
			}
			return rounds[:i]
		}
		sum += r.Append + r.Gen
	}
	return rounds
}

// prependTokens is the length of the round that is put in front of a trajectory to make a further
// agent: one block, so that the two agents have no block in common. The paper gives no length.
const prependTokens = 64

// Agents returns n agents of a set. The first len(set) agents are the set. Each further agent is a
// trajectory of the set with an additional first round of random tokens that generates one token
// (section A.3 of the DualPath paper), cut at maxLen. No trajectory is drawn again before all
// others have been drawn. The result may share its slices of rounds with set.
func Agents(set []Trajectory, n, maxLen int, seed uint64) []Trajectory {
	if len(set) == 0 || n <= 0 {
		return nil
	}
	out := make([]Trajectory, 0, n)
	for i := range set[:min(n, len(set))] {
		out = append(out, Trajectory{ID: i, Rounds: set[i].Rounds})
	}
	rng := rand.New(rand.NewPCG(seed, streamAgents))
	var lap []int
	for len(out) < n {
		if len(lap) == 0 {
			lap = rng.Perm(len(set))
		}
		from := &set[lap[0]]
		lap = lap[1:]
		rounds := make([]Round, 0, len(from.Rounds)+1)
		rounds = append(rounds, Round{prependTokens, 1})
		rounds = append(rounds, from.Rounds...)
		out = append(out, Trajectory{ID: len(out), Rounds: truncate(rounds, maxLen)})
	}
	return out
}

// ScaleAppend multiplies the append length of each round and cuts the trajectories at maxLen: the
// paper's Figure 9.
func ScaleAppend(set []Trajectory, factor float64, maxLen int) []Trajectory {
	return scaled(set, maxLen, func(r Round) Round { return Round{times(r.Append, factor), r.Gen} })
}

// ScaleGen multiplies the generated length of each round and cuts the trajectories at maxLen.
func ScaleGen(set []Trajectory, factor float64, maxLen int) []Trajectory {
	return scaled(set, maxLen, func(r Round) Round { return Round{r.Append, times(r.Gen, factor)} })
}

// Scale reduces a set, for single machines.
type Scale struct {
	// Rounds is the number of rounds at the beginning of each agent that are kept; 0 means all.
	Rounds int
	// Tokens multiplies all lengths; 0 means 1. No length falls below 1 token.
	Tokens float64
	// Multiple is a number of tokens: each length is rounded up to a multiple of Multiple. 0 means
	// 1.
	Multiple int
	// MaxLen is the length in tokens at which trajectories are cut after the other changes; 0 means
	// no cut.
	MaxLen int
}

// Apply returns the set at this scale. It does not change the set itself.
func (s Scale) Apply(set []Trajectory) []Trajectory {
	if s.Tokens == 0 {
		s.Tokens = 1
	}
	m := max(s.Multiple, 1)
	size := func(n int) int { return (times(n, s.Tokens) + m - 1) / m * m }
	maxLen := s.MaxLen
	if maxLen == 0 {
		maxLen = 1 << 40
	}
	short := make([]Trajectory, len(set))
	for i, t := range set {
		if s.Rounds > 0 {
			t.Rounds = t.Rounds[:min(s.Rounds, len(t.Rounds))]
		}
		short[i] = t
	}
	return scaled(short, maxLen, func(r Round) Round { return Round{size(r.Append), size(r.Gen)} })
}

// scaled maps every round and cuts at maxLen.
func scaled(set []Trajectory, maxLen int, f func(Round) Round) []Trajectory {
	out := make([]Trajectory, len(set))
	for i, t := range set {
		rounds := make([]Round, len(t.Rounds))
		for j, r := range t.Rounds {
			rounds[j] = f(r)
		}
		out[i] = Trajectory{ID: t.ID, Rounds: truncate(rounds, maxLen)}
	}
	return out
}

// times returns n*factor, rounded to an integer and at least 1.
func times(n int, factor float64) int { return max(1, int(float64(n)*factor+0.5)) }

// ReadTrajectories reads the sessions of a file in the dualpath or agentic format as trajectories.
// Of an agentic session only the main agent is read. A prompt that is shorter than the context so
// far begins a new trajectory, because the context was reset.
func ReadTrajectories(path string) ([]Trajectory, error) {
	r, err := trace.Open(path, trace.Options{Concurrency: 1})
	if err != nil {
		return nil, err
	}
	defer r.Close()
	if f := r.Format(); f != trace.DualPath && f != trace.Agentic {
		return nil, fmt.Errorf("workload: %s is a %v trace, which has no sessions; agents need the dualpath or agentic format", path, f)
	}
	var (
		out     []Trajectory
		session = ^uint64(0)
		context int
	)
	for q, err := range r.All() {
		if err != nil {
			return nil, err
		}
		if q.Agent != 0 {
			continue
		}
		if q.Session != session || q.InputTokens <= context {
			session, context = q.Session, 0
			out = append(out, Trajectory{ID: len(out)})
		}
		t := &out[len(out)-1]
		t.Rounds = append(t.Rounds, Round{q.InputTokens - context, q.OutputTokens})
		context = q.InputTokens + q.OutputTokens
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("workload: %s holds no session: %w", path, errEmpty)
	}
	return out, nil
}

var errEmpty = errors.New("nothing to replay")

// Means are the values of Table 2 of the DualPath paper for a set.
type Means struct {
	// Each of these is computed for every trajectory; the field is the mean over all trajectories.
	// Turns is the number of rounds, and Total the final length in tokens. Append, Gen and Context are
	// the appended tokens, the generated tokens and the tokens before the round, on average over the
	// rounds of the trajectory.
	Turns, Append, Gen, Total, Context float64
	// AppendPooled, GenPooled and ContextPooled are means over all rounds.
	AppendPooled, GenPooled, ContextPooled float64
	// HitPooled is the sum of contexts divided by the sum of prompts.
	HitPooled float64
	// Longest is the largest Total.
	Longest int
}

// Measure returns the means of a set.
func Measure(set []Trajectory) Means {
	var m Means
	var rounds, appended, generated, contexts float64
	n := float64(len(set))
	for i := range set {
		t := &set[i]
		var a, g, c float64
		t.Turns(func(_ int, u Turn) bool {
			a, g, c = a+float64(u.Append), g+float64(u.Gen), c+float64(u.Context)
			return true
		})
		k := float64(len(t.Rounds))
		m.Turns += k / n
		m.Append += a / k / n
		m.Gen += g / k / n
		m.Context += c / k / n
		m.Total += (a + g) / n
		m.Longest = max(m.Longest, t.Total())
		rounds, appended, generated, contexts = rounds+k, appended+a, generated+g, contexts+c
	}
	m.AppendPooled, m.GenPooled, m.ContextPooled = appended/rounds, generated/rounds, contexts/rounds
	m.HitPooled = contexts / (contexts + appended)
	return m
}
