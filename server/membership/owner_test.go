package membership_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/server/membership"
)

const storeID = "00112233445566778899aabbccddeeff"

// owner returns an Owner of the volumes of node in the process of by. The test's cleanup closes it.
func (r *rig) owner(node, by string) *membership.Owner {
	r.Helper()
	w, err := membership.NewOwner(membership.OwnerOptions{
		Endpoints: r.etcd.Endpoints, TTL: ttl, Node: node, By: by, Identity: "process of " + by, Dirs: []string{"/mnt/" + node}, CapacityBytes: 1 << 30,
	})
	r.must(err)
	r.Cleanup(func() { _ = w.Close(context.Background()) }) // some tests have closed it
	return w
}

// fence acquires the store and returns the fencing number.
func (r *rig) fence(w *membership.Owner, last uint32) uint32 {
	r.Helper()
	r.must(w.Acquire(r.ctx, storeID))
	n, err := w.Fence(r.ctx, last)
	r.must(err)
	r.must(w.Held())
	return n
}

// endLease ends the lease of the store's owner, as if it had not been renewed.
func (r *rig) endLease() {
	r.Helper()
	etcd := r.client()
	resp, err := etcd.Get(r.ctx, "/penstock/stores/"+storeID+"/owner")
	r.must(err)
	_, err = etcd.Revoke(r.ctx, clientv3.LeaseID(resp.Kvs[0].Lease))
	r.must(err)
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// TestOwner: one process at a time owns a store, with a fencing number that rises, also above that on
// the volumes. A store's own node gets the store back from a node that has adopted it.
func TestOwner(t *testing.T) {
	r := newRig(t, 1)
	a, b := r.owner("a", "a"), r.owner("a", "b")
	if n := r.fence(a, 0); n != 1 {
		t.Errorf("the first fencing number is %d", n)
	}
	var owned *membership.OwnedError
	if err := b.Acquire(r.ctx, storeID); !errors.As(err, &owned) || owned.Owner.By != "a" {
		t.Errorf("a second owner: %v", err)
	}
	if b.Held() == nil {
		t.Error("Held returns nil for a process that is not the owner")
	}
	if _, err := b.Fence(r.ctx, 0); !errors.Is(err, membership.ErrTaken) {
		t.Errorf("a fencing number for a process that is not the owner: %v", err)
	}
	r.must(a.Close(r.ctx))
	if a.Held() == nil {
		t.Error("Held returns nil after Close")
	}
	if n := r.fence(b, 7); n != 8 {
		t.Errorf("the fencing number above 7 is %d", n)
	}
	if isClosed(b.Wanted()) {
		t.Error("the store is wanted, and its node does not wait")
	}
	again := r.owner("a", "a")
	back := make(chan error, 1)
	go func() { back <- again.Acquire(r.ctx, storeID) }()
	<-b.Wanted()
	r.must(b.Close(r.ctx))
	r.must(<-back)
	n, err := again.Fence(r.ctx, 0)
	r.must(err)
	if n != 9 {
		t.Errorf("the next fencing number is %d; want 9", n)
	}
}

// TestOwnerLease: after the end of its lease a process is the owner again if no other process got a
// fencing number. Otherwise Lost is closed, and Held never returns nil again.
func TestOwnerLease(t *testing.T) {
	r := newRig(t, 1)
	a := r.owner("a", "a")
	r.fence(a, 0)
	r.etcd.Pause(0)
	r.await("the owner without etcd is uncertain", func() bool { return a.Held() != nil })
	r.etcd.Resume(0)
	r.await("it is the owner again", func() bool { return a.Held() == nil })
	if isClosed(a.Lost()) {
		t.Fatal("the store is lost, and no other process has it")
	}
	b := r.owner("a", "b")
	r.await("another process is the owner", func() bool {
		r.endLease()
		return b.Acquire(r.ctx, storeID) == nil
	})
	n, err := b.Fence(r.ctx, 0)
	r.must(err)
	if n != 2 {
		t.Errorf("fencing number %d; want 2", n)
	}
	<-a.Lost()
	if a.Held() == nil {
		t.Error("two processes hold the store")
	}
	r.must(b.Held())
}

// TestNotHeld: a member that may not own its shared volumes is not admitted, although it has its lease.
func TestNotHeld(t *testing.T) {
	r := newRig(t, 1)
	var lost atomic.Bool
	c, err := membership.Join(membership.Options{
		Endpoints: r.etcd.Endpoints, TTL: ttl, Member: membership.Member{Name: "a", Addr: "a:1", Store: storeID}, Node: r.store(),
		Held: func() error {
			if lost.Load() {
				return errors.New("the lease has ended")
			}
			return nil
		},
	})
	r.must(err)
	t.Cleanup(func() {
		if err := c.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	r.await("the member is admitted", func() bool { return c.Admit("") == nil })
	lost.Store(true)
	if err := c.Admit(""); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a member without its volumes: %v", err)
	}
	lost.Store(false)
	r.await("the member is admitted again", func() bool { return c.Admit("") == nil })
}

// TestNotHeldDoesNotClaim: a member that may not own its shared volumes leaves the record of its name in
// the list of members to the process that owns them. If it replaced that record, a change of a namespace
// would not wait for the process that serves the volumes.
func TestNotHeldDoesNotClaim(t *testing.T) {
	r := newRig(t, 1)
	join := func(addr string, held func() error, log *slog.Logger) *membership.Cluster {
		c, err := membership.Join(membership.Options{
			Endpoints: r.etcd.Endpoints, TTL: ttl, Member: membership.Member{Name: "a", Addr: addr, Store: storeID}, Node: r.store(), Held: held, Logger: log,
		})
		r.must(err)
		t.Cleanup(func() { _ = c.Close(context.Background()) }) // its lease may have ended
		return c
	}
	owner := join("owner:1", nil, nil)
	r.await("the owner is admitted", func() bool { return owner.Admit("") == nil })
	var holds atomic.Bool
	var log testkit.Log
	join("other:1", func() error {
		if !holds.Load() {
			return errors.New("the lease has ended")
		}
		return nil
	}, slog.New(slog.NewTextHandler(&log, nil)))
	addr := func() string {
		all, err := owner.Members(r.ctx)
		if err != nil || len(all) != 1 {
			return ""
		}
		return all[0].Addr
	}
	at := ""
	r.await("the other process has tried to join", func() bool {
		at = addr()
		return at == "other:1" || at == "owner:1" && strings.Contains(log.String(), "not a member of the cluster")
	})
	if at != "owner:1" {
		t.Errorf("the member is at %s; want the address of the owner", at)
	}
	holds.Store(true)
	r.await("the other process joins when it owns the volumes", func() bool { return addr() == "other:1" })
}
