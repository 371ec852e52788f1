package traffic

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// wrapping is an engine that wraps its regions.
type wrapping struct {
	rdma.Engine
	wrap func(rdma.Region) rdma.Region
}

func (e wrapping) Register(mem []byte, o rdma.RegisterOptions) (rdma.Region, error) {
	r, err := e.Engine.Register(mem, o)
	if err != nil {
		return nil, err
	}
	return e.wrap(r), nil
}

// lateRegion revokes its windows after before has returned.
type lateRegion struct {
	rdma.Region
	before *func()
}

func (r lateRegion) WindowSpans(spans []rdma.Span, peers ...rdma.EngineID) (rdma.Window, error) {
	w, err := r.Region.WindowSpans(spans, peers...)
	return lateWindow{w, r.before}, err
}

type lateWindow struct {
	rdma.Window
	before *func()
}

func (w lateWindow) Revoke(ctx context.Context) error {
	(*w.before)()
	return w.Window.Revoke(ctx)
}

// heldEngine holds paged writes until open is closed. entered gets an element for each.
type heldEngine struct {
	rdma.Engine
	open, entered chan struct{}
}

func (e *heldEngine) WritePaged(ctx context.Context, w rdma.PagedWrite) error {
	e.entered <- struct{}{}
	<-e.open
	return e.Engine.WritePaged(context.WithoutCancel(ctx), w)
}

// TestImmediatesOfEndedJobs: the immediates of writes that arrive when a job has been cancelled, and its windows
// are open still, do not stay in the engine, which keeps only some that no job expects.
func TestImmediatesOfEndedJobs(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	raw, err := tcp.New(ctx, tcp.Options{Listen: "127.0.0.1:0", Token: token, EarlyImmediates: 2 * geo.LayerCount()})
	if err != nil {
		t.Fatal(err)
	}
	var held *heldEngine
	var revoking func() // before a window of the prefill side is revoked
	late := wrapping{raw, func(r rdma.Region) rdma.Region { return lateRegion{r, &revoking} }}
	expected := &watches{Engine: raw}
	pe := newEngineOn(t, s, newAt(s), geo.LayerCount(), 512, 4<<20, nil, late, expected)
	de := newEngineOver(t, s, geo.LayerCount(), 512, 4<<20, nil, func(r rdma.Engine) rdma.Engine {
		held = &heldEngine{Engine: r, entered: make(chan struct{}, 1000)}
		return held
	})
	const jobs, blocks, hit = 40, 8, 6
	for i := range jobs {
		held.open = make(chan struct{})
		s.put(i, hit)
		r := newRequest(t, pe, de, i, blocks, hit)
		p, d, _, _ := r.both(ctx, 0)
		before := raw.Stats().ImmediatesIn
		revoking = func() {
			for expected.open.Load() > 0 && ctx.Err() == nil {
				runtime.Gosched()
			}
			close(held.open)
			for raw.Stats().ImmediatesIn == before && ctx.Err() == nil {
				runtime.Gosched()
			}
		}
		select {
		case <-held.entered:
		case <-ctx.Done():
			t.Fatal("the decode side does not write")
		}
		p.Cancel()
		d.Cancel()
		for len(held.entered) > 0 {
			<-held.entered
		}
	}
	revoking = func() {}
	if n := raw.Stats().ImmediatesDropped; n != 0 {
		t.Errorf("%d immediates were dropped", n)
	}
}
