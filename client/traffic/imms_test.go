package traffic

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// lateEngine revokes windows after before has returned. The windows of its regions are late too.
type lateEngine struct {
	rdma.Engine
	before func()
}

func (e *lateEngine) Register(mem []byte, o rdma.RegisterOptions) (rdma.Region, error) {
	r, err := e.Engine.Register(mem, o)
	return lateRegion{r, e}, err
}

type lateRegion struct {
	rdma.Region
	engine *lateEngine
}

func (r lateRegion) WindowSpans(spans []rdma.Span, peers ...rdma.EngineID) (rdma.Window, error) {
	w, err := r.Region.WindowSpans(spans, peers...)
	return lateWindow{w, r.engine}, err
}

type lateWindow struct {
	rdma.Window
	engine *lateEngine
}

func (w lateWindow) Revoke(ctx context.Context) error {
	w.engine.before()
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
	late, expected := &lateEngine{Engine: raw}, &watches{Engine: raw}
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
		late.before = func() {
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
	late.before = func() {}
	if n := raw.Stats().ImmediatesDropped; n != 0 {
		t.Errorf("%d immediates were dropped", n)
	}
}

// stuckEngine is an engine whose regions cannot be closed while stuck is set.
type stuckEngine struct {
	rdma.Engine
	stuck error
}

func (e *stuckEngine) Register(mem []byte, o rdma.RegisterOptions) (rdma.Region, error) {
	r, err := e.Engine.Register(mem, o)
	return stuckRegion{r, e}, err
}

type stuckRegion struct {
	rdma.Region
	engine *stuckEngine
}

func (r stuckRegion) Close(ctx context.Context) error {
	return errors.Join(r.engine.stuck, r.Region.Close(ctx))
}

// TestCloseTwice: each call of Close returns when the buffers have been released, or with the reason why one
// could not be released, also a call that another one precedes.
func TestCloseTwice(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	raw, err := tcp.New(t.Context(), tcp.Options{Listen: "127.0.0.1:0", Token: token})
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	device, err := raw.Register(make([]byte, 1<<20), rdma.RegisterOptions{Local: true})
	if err != nil {
		t.Fatal(err)
	}
	stuck := errors.New("a peer may still write")
	m, err := New(Options{
		Namespace: kv.Namespace{Name: "m", Geometry: geo}, Storage: newAt(s), Compute: &stuckEngine{raw, stuck}, BufferBytes: 1 << 20,
		Device: func() Device {
			d := layerMajor(geo.LayerCount(), 8, uint64(geo.LayerBytes(0)))
			d.Region = device
			return d
		}(),
	})
	if err != nil {
		t.Fatal(err)
	}
	var calls sync.WaitGroup
	for range 3 {
		calls.Go(func() {
			if err := m.Close(); !errors.Is(err, stuck) {
				t.Errorf("close: %v; want %v", err, stuck)
			}
		})
	}
	calls.Wait()
}
