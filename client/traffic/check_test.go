package traffic

import (
	"errors"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
)

// TestCheck: CheckPrefill and CheckDecode accept a valid job and refuse invalid ones, including
// jobs that would fail only later, because they need more than the buffer.
func TestCheck(t *testing.T) {
	testkit.VerifyNone(t)
	e := newEngine(t, newShelf(), 5, 8, 1<<20)
	ids, parts := make([]kv.BlockID, 8000), []Part{{0, 8000}}
	for name, of := range map[string]struct {
		job PrefillJob
		ok  bool
	}{
		"good":       {PrefillJob{Request: "r", Blocks: 3, Hit: 2, IDs: ids[:2], Pages: []uint32{0, 1, 2}, Parts: []Part{{0, 2}}}, true},
		"no request": {PrefillJob{Blocks: 1, Pages: []uint32{0}}, false},
		"page":       {PrefillJob{Request: "r", Blocks: 1, Pages: []uint32{40}}, false},
		"large":      {PrefillJob{Request: "r", Blocks: 8000, Hit: 8000, IDs: ids, Pages: make([]uint32, 8000), Parts: parts}, false},
	} {
		j := of.job
		if err := e.CheckPrefill(j); errors.Is(err, ErrJob) == of.ok {
			t.Errorf("%s: %v", name, err)
		}
		d := DecodeJob{Request: j.Request, IDs: j.IDs, Blocks: j.Blocks, Hit: j.Hit, Parts: j.Parts, Pages: j.Pages}
		if err := e.CheckDecode(d); errors.Is(err, ErrJob) == of.ok {
			t.Errorf("%s, decode: %v", name, err)
		}
	}
	if err := errors.Join(e.CheckPages(), e.CheckPages(0, 7)); err != nil {
		t.Error(err)
	}
	if err := e.CheckPages(0, 8); !errors.Is(err, ErrJob) {
		t.Errorf("page 8 of 8: %v", err)
	}
}

// TestEnded: the channel is closed when a job is cancelled, and when it has failed.
func TestEnded(t *testing.T) {
	testkit.VerifyNone(t)
	e := newEngine(t, newShelf(), 5, 8, 1<<20)
	for name, end := range map[string]func(p *Prefill){
		"cancelled": (*Prefill).Cancel,
		"failed":    func(p *Prefill) { p.Read(Part{0, 9}) },
	} {
		p, err := e.Prefill(t.Context(), PrefillJob{Request: name, Blocks: 1, Pages: []uint32{0}})
		if err != nil {
			t.Fatal(err)
		}
		select {
		case <-p.Ended():
			t.Errorf("%s: ended at its beginning", name)
		default:
		}
		end(p)
		<-p.Ended()
		p.Cancel()
	}
}
