package cluster

import (
	"reflect"
	"testing"

	"github.com/penstock-kv/penstock/lab/emulate"
	"github.com/penstock-kv/penstock/sim/workload"
)

// TestLate: the rounds before the ones that are replayed become one turn of context, and a
// trajectory that is too short begins earlier.
func TestLate(t *testing.T) {
	set := []workload.Trajectory{
		{Rounds: []workload.Round{{Append: 100, Gen: 10}, {Append: 20, Gen: 2}, {Append: 30, Gen: 3}, {Append: 40, Gen: 4}, {Append: 50, Gen: 5}}},
		{Rounds: []workload.Round{{Append: 7, Gen: 1}, {Append: 8, Gen: 2}, {Append: 9, Gen: 3}}},
		{Rounds: []workload.Round{{Append: 6, Gen: 1}}},
	}
	warm, agents := Late("x", set, 2, 2)
	wantWarm := []emulate.Session{
		{Name: "x-0", Turns: []emulate.Turn{{Append: 132}}},
		{Name: "x-1", Turns: []emulate.Turn{{Append: 8}}},
		{Name: "x-2"},
	}
	wantAgents := []emulate.Session{
		{Name: "x-0", Turns: []emulate.Turn{{Append: 162, Output: 3}, {Append: 40, Output: 4}}},
		{Name: "x-1", Turns: []emulate.Turn{{Append: 16, Output: 2}, {Append: 9, Output: 3}}},
		{Name: "x-2", Turns: []emulate.Turn{{Append: 6, Output: 1}}},
	}
	if !reflect.DeepEqual(warm, wantWarm) {
		t.Errorf("the context is %+v, want %+v", warm, wantWarm)
	}
	if !reflect.DeepEqual(agents, wantAgents) {
		t.Errorf("the agents are %+v, want %+v", agents, wantAgents)
	}
	if set[0].Rounds[2].Append != 30 {
		t.Error("Late changed its argument")
	}
}
