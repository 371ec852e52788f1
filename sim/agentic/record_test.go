package agentic

import (
	"bytes"
	"testing"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/dualpath/record"
	"github.com/penstock-kv/penstock/internal/testkit"
)

// TestRecordedJob: a planner takes the same decisions from a record of the events of a simulated
// job, in the format of a planner node's record.
func TestRecordedJob(t *testing.T) {
	testkit.Long(t, "simulates a whole job")
	t.Parallel()
	for s := Basic; s <= Oracle; s++ {
		o := Options{System: s, Model: DeepSeek660B(), PrefillNodes: 2, DecodeNodes: 2, PrefillGroup: 1, DecodeGroup: 1, Agents: agents64K(3)}
		o.ensureDefaults()
		file, err := record.AppendHeader(nil, record.Header{Options: o.plannerOptions()})
		if err != nil {
			t.Fatal(err)
		}
		events := 0
		o.Record = func(ev dualpath.Event, actions []dualpath.Action) {
			events++
			if file, err = record.AppendStep(file, ev, actions); err != nil {
				t.Error(err)
			}
		}
		res := run(t, o)
		r, err := record.NewReader(bytes.NewReader(file))
		if err != nil {
			t.Fatal(err)
		}
		sum, err := record.Replay(r)
		if err != nil {
			t.Fatal(err)
		}
		if sum.Events != events || sum.Kinds["Submit"] != res.Rounds || sum.Stats.Finished != uint64(res.Rounds) {
			t.Errorf("%v: replayed %d events of %d, %+v; %d rounds", s, sum.Events, events, sum.Stats, res.Rounds)
		}
	}
}
