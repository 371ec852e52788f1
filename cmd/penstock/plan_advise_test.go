package main

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/penstock-kv/penstock/sim/workload"
)

// TestAdvisor: the prediction agrees with a simulation, from an idle cluster to one limited by
// storage or compute. The recommended division is better than the others.
func TestAdvisor(t *testing.T) {
	spec, err := workload.Table2Set("32K")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	trace := filepath.Join(dir, "agents.jsonl")
	var lines []byte
	for _, a := range spec.Generate(120, 1) {
		var rounds [][2]int
		for _, r := range a.Rounds {
			rounds = append(rounds, [2]int{r.Append, r.Gen})
		}
		line, err := json.Marshal(map[string]any{"id": a.ID, "rounds": rounds})
		if err != nil {
			t.Fatal(err)
		}
		lines = append(append(lines, line...), '\n')
	}
	if err := os.WriteFile(trace, lines, 0o600); err != nil {
		t.Fatal(err)
	}
	ask := func(p, d, agents int, profile, reads string) advice {
		t.Helper()
		cluster := filepath.Join(dir, "cluster.yaml")
		text := fmt.Sprintf("prefill_nodes: %d\ndecode_nodes: %d\nstorage_gbps: 400\ncompute_gbps: 400\nmemory_gbps: 4000\nagents: %d\nprofile: %s\nreads: %s\n", p, d, agents, profile, reads)
		if err := os.WriteFile(cluster, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return decode[advice](t, penstock(t, "", nil, "plan", "advise", "--format", "json", "--trace", trace, "--cluster", cluster))
	}
	for _, c := range []struct {
		p, d, agents   int
		profile, reads string
	}{{1, 1, 8, "ds-27b", "both"}, {1, 1, 120, "ds-27b", "both"}, {1, 2, 500, "ds-27b", "both"}, {1, 2, 500, "ds-27b", "prefill"}, {1, 2, 120, "ds-660b", "both"}} {
		a := ask(c.p, c.d, c.agents, c.profile, c.reads)
		if e := *a.ErrorPercent; math.Abs(e) > 8 {
			t.Errorf("%+v: predicted %v s, simulated %v s: %+.1f %%", c, a.Predicted.Seconds, a.Simulated.Seconds, e)
		}
		if math.Abs(a.Predicted.PrefillReads-a.Simulated.PrefillReads) > 0.08 {
			t.Errorf("%+v: the prefill side reads %v, predicted %v", c, a.Simulated.PrefillReads, a.Predicted.PrefillReads)
		}
	}
	a := ask(2, 2, 120, "ds-660b", "both")
	best, simulated := "", math.Inf(1)
	for _, d := range a.Divisions {
		s := ask(d.Prefill, d.Decode, 120, "ds-660b", "both").Simulated.Seconds
		if s < simulated {
			best, simulated = fmt.Sprintf("%dP%dD", d.Prefill, d.Decode), s
		}
	}
	if named := fmt.Sprintf("%dP%dD", a.Best.Prefill, a.Best.Decode); named != best {
		t.Errorf("%s is called the best division; simulated, %s is", named, best)
	}
}
