package emulate

import (
	"bytes"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/dualpath/record"
	"github.com/penstock-kv/penstock/server/planner"
)

// TestRecordedRun: a cluster with real bytes is recorded, one of its nodes leaving on
// the way; given the same events, another planner decides the same.
func TestRecordedRun(t *testing.T) {
	var file bytes.Buffer
	c := newRecordedCluster(t, 2, 2, &planner.Record{To: &file})
	c.run(6, 4)
	c.stops[3]()
	c.run(3, 3)
	c.close()
	r, err := record.NewReader(&file)
	if err != nil {
		t.Fatal(err)
	}
	sum, err := record.Replay(r)
	if err != nil {
		t.Fatal(err)
	}
	if sum.Kinds["Submit"] < 6*4+3*3 || sum.Kinds["Fetch"] == 0 || sum.Kinds["Progress"] == 0 || sum.Kinds["Tick"] == 0 || sum.Kinds["GroupUp"] < 4 {
		t.Errorf("recorded %v", sum.Kinds)
	}
	if sum.Stats.Finished == 0 || sum.Actions < 3*int(sum.Stats.Finished) || sum.Span < 10*time.Millisecond {
		t.Errorf("replayed %+v", sum)
	}
	t.Logf("%d events in %v, %d actions: %v", sum.Events, sum.Span, sum.Actions, sum.Kinds)
}
