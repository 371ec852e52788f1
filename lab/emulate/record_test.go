package emulate

import (
	"bytes"
	"io"
	"sync"
	"testing"

	"github.com/penstock-kv/penstock/dualpath/record"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/server/planner"
)

// TestRecordedRun: a cluster with real bytes is recorded while a node leaves it; given
// the same events, another planner decides the same.
func TestRecordedRun(t *testing.T) {
	testkit.VerifyNone(t)
	var file bytes.Buffer
	c := newRecordedCluster(t, 2, 2, &planner.Record{To: &file})
	turns := 0
	var left sync.WaitGroup
	c.gateway.Done = func(TurnResult) {
		if turns++; turns == 5 {
			left.Go(c.stops[3])
		}
	}
	c.check(c.gateway.Run(t.Context(), sessions(6, 5), 4), 30)
	left.Wait()
	r := c.recorded(&file)
	sum, err := record.Replay(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"GroupUp", "Submit", "Fetch", "Progress", "Finished", "GroupDown"} {
		if sum.Kinds[kind] == 0 {
			t.Errorf("no %s among the recorded events: %v", kind, sum.Kinds)
		}
	}
	if sum.Stats.Finished != 30 || sum.Actions < 3*30 {
		t.Errorf("%d requests finished with %d actions; want 30", sum.Stats.Finished, sum.Actions)
	}
	t.Logf("%d events in %v, %d actions: %v", sum.Events, sum.Span, sum.Actions, sum.Kinds)
}

// recorded stops the engines and the planner and reads what the planner recorded.
func (c *cluster) recorded(file io.Reader) *record.Reader {
	c.t.Helper()
	for _, stop := range c.stops {
		stop()
	}
	c.close()
	r, err := record.NewReader(file)
	c.must(err)
	return r
}
