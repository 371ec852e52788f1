package membership_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/membership"
)

// hostClock is the clock of a host that can be suspended.
type hostClock struct {
	began     time.Time
	suspended atomic.Int64
}

func newHostClock() *hostClock { return &hostClock{began: time.Now()} }

func (h *hostClock) now() time.Duration {
	return time.Since(h.began) + time.Duration(h.suspended.Load())
}

// suspend is the effect of a suspension for d on a process: CLOCK_BOOTTIME advances, and the clock of package time does not.
func (h *hostClock) suspend(d time.Duration) { h.suspended.Add(int64(d)) }

// TestSuspendedHost: a host is suspended for longer than the TTL, and etcd does not answer when it goes on. The node
// refuses all calls from its first moment on, the process writes nothing to shared volumes, and the planner does
// not lead, although the clock of package time has not advanced. When etcd answers, all three go on.
func TestSuspendedHost(t *testing.T) {
	r := newRig(t, 1)
	host := newHostClock()
	store := r.store()
	c, err := membership.Join(membership.Options{
		Endpoints: r.etcd.Endpoints, TTL: ttl, Node: store, Clock: host.now,
		Member: membership.Member{Name: "a", Addr: "a.example:7420", Store: "a", Version: "v0"},
	})
	r.must(err)
	r.Cleanup(func() { _ = c.Close(context.Background()) })
	r.joined(&node{Cluster: c})
	_, err = c.CreateNamespace(r.ctx, kv.Namespace{Name: "m", Geometry: geo, Index: kv.IndexTrie})
	r.must(err)
	w, err := membership.NewOwner(membership.OwnerOptions{Endpoints: r.etcd.Endpoints, TTL: ttl, Node: "a", By: "a", Identity: "a", Dirs: []string{"/mnt/a"}, Clock: host.now})
	r.must(err)
	r.Cleanup(func() { _ = w.Close(context.Background()) })
	r.fence(w, 0)
	e, err := membership.NewElection(membership.ElectionOptions{Endpoints: r.etcd.Endpoints, TTL: ttl, Address: "a", Clock: host.now})
	r.must(err)
	r.Cleanup(func() { r.must(e.Close()) })
	term, err := e.Campaign(r.ctx)
	r.must(err)
	r.Cleanup(term.Resign)
	r.await("all leases hold", func() bool { return c.Admit("m") == nil && w.Held() == nil && term.Held() })

	r.etcd.Pause(0)
	host.suspend(time.Hour)
	for _, ns := range []string{"m", ""} {
		if err := c.Admit(ns); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("after the suspension, Admit(%q) returns %v", ns, err)
		}
	}
	if w.Held() == nil {
		t.Error("after the suspension the process owns the shared volumes")
	}
	if term.Held() {
		t.Error("after the suspension the planner leads")
	}
	r.etcd.Resume(0)
	r.await("the node serves, and the process owns its volumes", func() bool { return c.Admit("m") == nil && w.Held() == nil })
	r.await("the planner leads, or its term has ended", func() bool { return term.Held() || isClosed(term.Lost()) })
}
