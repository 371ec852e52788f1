package cluster

import (
	"fmt"

	"github.com/penstock-kv/penstock/internal/emulate"
	"github.com/penstock-kv/penstock/sim/workload"
)

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
