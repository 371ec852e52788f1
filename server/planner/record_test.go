package planner

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/dualpath/record"
	"github.com/penstock-kv/penstock/internal/testkit"
)

func logTo(l *testkit.Log) *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// serveSome registers two groups and serves requests on them.
func (h *host) serveSome(ids ...string) {
	pe, de := h.lead("P", pb.Side_SIDE_PREFILL), h.lead("D", pb.Side_SIDE_DECODE)
	for _, id := range ids {
		gw := h.submit(id)
		pe.fetch(0)
		pe.want(pb.LeaderAction_KIND_ASSIGN, id, "P/0")
		de.fetch(0)
		de.want(pb.LeaderAction_KIND_ASSIGN, id, "D/0")
		pe.want(pb.LeaderAction_KIND_START, id, "P/0")
		de.want(pb.LeaderAction_KIND_START, id, "D/0")
		gw.want(pb.RequestUpdate_KIND_STARTED)
		pe.send(finished(id, pb.Side_SIDE_PREFILL))
		gw.want(pb.RequestUpdate_KIND_PREFILLED)
		de.send(finished(id, pb.Side_SIDE_DECODE))
		gw.want(pb.RequestUpdate_KIND_FINISHED)
	}
}

// TestRecord: a replay of the record on another planner gives the same actions.
func TestRecord(t *testing.T) {
	var file bytes.Buffer
	h := newHost(t, Options{Record: &Record{To: &file}})
	h.serveSome("r1")
	h.close()
	r, err := record.NewReader(&file)
	if err != nil {
		t.Fatal(err)
	}
	sum, err := record.Replay(r)
	if err != nil {
		t.Fatal(err)
	}
	if sum.Kinds["Submit"] != 1 || sum.Kinds["GroupUp"] != 2 || sum.Kinds["Fetch"] != 2 || sum.Stats.Finished != 1 {
		t.Errorf("replayed %+v", sum)
	}
}

// TestRecordIsFull: a record ends at its limit and the planner continues. The written part can be
// replayed.
func TestRecordIsFull(t *testing.T) {
	var whole, file bytes.Buffer
	var log testkit.Log
	h := newHost(t, Options{Record: &Record{To: &whole}})
	h.serveSome("r1")
	h.close()
	limit := whole.Len() * 3 / 4
	h = newHost(t, Options{Record: &Record{To: &file, Bytes: int64(limit)}, Logger: logTo(&log)})
	h.serveSome("r1")
	h.close()
	if file.Len() == 0 || file.Len() > limit {
		t.Errorf("%d bytes were recorded of at most %d", file.Len(), limit)
	}
	if !strings.Contains(log.String(), errRecordFull.Error()) {
		t.Errorf("the log does not have the reason why the record ended: %s", log.String())
	}
	r, err := record.NewReader(&file)
	if err != nil {
		t.Fatal(err)
	}
	if sum, err := record.Replay(r); err != nil || sum.Events == 0 {
		t.Errorf("replayed %+v, %v", sum, err)
	}
}

// failing is a file whose writes block until wait is closed, and then return err.
type failing struct {
	err  error
	wait chan struct{}
}

func (f failing) Write(p []byte) (int, error) {
	<-f.wait
	if f.err != nil {
		return 0, f.err
	}
	return len(p), nil
}

// TestRecordFails: a failing disk ends the record and not the planner.
func TestRecordFails(t *testing.T) {
	open := make(chan struct{})
	close(open)
	var log testkit.Log
	h := newHost(t, Options{Record: &Record{To: failing{errors.New("no space left on device"), open}}, Logger: logTo(&log)})
	h.serveSome("r1")
	h.close()
	if n := strings.Count(log.String(), "no space left on device"); n != 1 {
		t.Errorf("the log has the error %d times; want 1: %s", n, log.String())
	}
}

// TestRecordFallsBehind: while writes block, the recorder holds at most its backlog.
func TestRecordFallsBehind(t *testing.T) {
	wait := make(chan struct{})
	var log testkit.Log
	rec, err := newRecorder(&Record{To: failing{wait: wait}, Bytes: 1 << 40}, dualpath.Options{}, logTo(&log))
	if err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 1<<20)
	for range recordBacklog>>20 + 2 {
		rec.put(line)
	}
	if !rec.over || rec.backlog.Load() > recordBacklog || !strings.Contains(log.String(), errRecordBehind.Error()) {
		t.Errorf("over %v with a backlog of %d: %s", rec.over, rec.backlog.Load(), log.String())
	}
	rec.put(line) // nothing is recorded after the end
	close(wait)
	<-rec.done
}
