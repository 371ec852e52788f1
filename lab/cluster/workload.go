package cluster

import (
	"fmt"

	"github.com/penstock-kv/penstock/lab/emulate"
	"github.com/penstock-kv/penstock/sim/workload"
)

// Late returns agents that begin in the middle of their trajectories. It returns two sessions for
// each trajectory. The session in warm has one turn, which stores the KV of the first skip rounds.
// The session in agents replays the rounds after these; rounds is the number of rounds that it
// replays. If a trajectory is too short, fewer rounds are skipped, so that all agents replay the
// same number of rounds.
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
	// An agent's tokens depend on its name, so warm and agents have the same context.
	return Sessions(name, first), Sessions(name, rest)
}

// Sessions turns trajectories into agents of a gateway. The tokens depend on the name, so
// two calls with different names share no block.
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
