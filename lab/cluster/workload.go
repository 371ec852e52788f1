package cluster

import (
	"fmt"

	"github.com/penstock-kv/penstock/lab/emulate"
	"github.com/penstock-kv/penstock/sim/workload"
)

// Late returns agents that are in the middle of their work: the first skip rounds of
// each trajectory are its context (warm stores it, in one turn), and rounds many
// follow. A trajectory with fewer begins so much earlier, so that all have as many.
func Late(name string, set []workload.Trajectory, skip, rounds int) (warm, agents []emulate.Session) {
	first, rest := make([]workload.Trajectory, len(set)), make([]workload.Trajectory, len(set))
	for i, t := range set {
		from := max(0, min(skip, len(t.Rounds)-rounds))
		past := 0
		for _, r := range t.Rounds[:from] {
			past += r.Append + r.Gen
		}
		rest[i].Rounds = append([]workload.Round(nil), t.Rounds[from:min(from+rounds, len(t.Rounds))]...)
		if past > 0 {
			first[i].Rounds = []workload.Round{{Append: past}}
			rest[i].Rounds[0].Append += past
		}
	}
	// The tokens of an agent's context follow from its name: both have the same.
	return Sessions(name, first), Sessions(name, rest)
}

// Sessions turns trajectories into agents of a gateway. The name makes the tokens,
// so that two calls with different names share no block.
func Sessions(name string, set []workload.Trajectory) []emulate.Session {
	out := make([]emulate.Session, len(set))
	for i, t := range set {
		out[i].Name = fmt.Sprintf("%s-%d", name, i)
		for _, r := range t.Rounds {
			out[i].Turns = append(out[i].Turns, emulate.Turn{Append: r.Append, Output: r.Gen})
		}
	}
	return out
}
