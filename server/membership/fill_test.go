package membership_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"

	"github.com/penstock-kv/penstock/server/membership"
)

// filling returns the number of members that are filled, as a node lists them.
func (r *rig) filling(n *node) (filled int) {
	r.Helper()
	all, err := n.Members(r.ctx)
	r.must(err)
	for _, m := range all {
		if m.Filling {
			filled++
		}
	}
	return filled
}

// copied makes the record of a member report that it has copied the sequences of an order.
func (r *rig) copied(n *node, order membership.Drain) {
	r.Helper()
	n.move.Store(&membership.Move{Order: order.ID(), Phase: membership.MoveDone})
	n.Moved()
}

// fill orders by n that members be filled, or without names the end of the order, and returns its revision.
func (r *rig) fill(n *node, d membership.Drain, names ...string) int64 {
	r.Helper()
	revision, err := n.FillMembers(r.ctx, names, d)
	r.must(err)
	return revision
}

// lastFill returns the last end of an order, as a node lists it.
func (r *rig) lastFill(n *node) membership.FillEnd {
	r.Helper()
	list, err := n.List(r.ctx)
	r.must(err)
	if list.LastFill == nil {
		return membership.FillEnd{}
	}
	return *list.LastFill
}

func order(second int64) membership.Drain { return membership.Drain{Since: time.Unix(second, 0).UTC()} }

// TestFillsTogether: of several orders at the same time one is left, with its own members.
func TestFillsTogether(t *testing.T) {
	r := newRig(t, 1)
	a := r.join("a")
	r.join("b")
	r.join("c")
	etcd := r.client()
	for round := range int64(20) {
		var g errgroup.Group
		for i, name := range []string{"b", "c"} {
			g.Go(func() error {
				_, err := a.FillMembers(r.ctx, []string{name}, order(2*round+int64(i)+1))
				return err
			})
		}
		r.must(g.Wait())
		resp, err := etcd.Get(r.ctx, "/penstock/fills/", clientv3.WithPrefix())
		r.must(err)
		if len(resp.Kvs) != 1 {
			t.Fatalf("round %d: etcd has %d orders: %v", round, len(resp.Kvs), resp.Kvs)
		}
		r.fill(a, order(1))
		if n := r.filling(a); n != 0 {
			t.Fatalf("after the end of the orders %d members are filled", n)
		}
	}
}

// TestEndFill: an order ends when each node that was a member at the order has copied its sequences. A node that
// is down has not, until it is removed. The removal of the member that is filled ends the order too.
func TestEndFill(t *testing.T) {
	r := newRig(t, 1)
	a, b, c := r.join("a"), r.join("b"), r.join("c")
	first := order(1)
	end := func(want int) {
		t.Helper()
		r.must(a.EndFill(r.ctx, first.ID()))
		if n := r.filling(a); n != want {
			t.Fatalf("%d members are filled; want %d", n, want)
		}
	}
	began := r.fill(a, first, "c")
	r.copied(a, first)
	r.copied(c, first)
	b.leave()
	r.await("the others have copied", func() bool {
		all, err := a.Members(r.ctx)
		r.must(err)
		done := 0
		for _, m := range all {
			if m.Move.Phase == membership.MoveDone {
				done++
			}
		}
		return done == 2 && len(all) == 2
	})
	end(1)
	again := r.begin("b", "b.example:7420", b.store)
	r.joined(again)
	end(1)
	again.leave()
	_, err := a.RemoveMember(r.ctx, "b", true, false)
	r.must(err)
	if last := r.lastFill(a); last.Revision != 0 {
		t.Errorf("before the end of the order the last one that has ended is %+v", last)
	}
	end(0)
	if last := r.lastFill(a); last.Revision <= began || last.Stopped || !slices.Equal(last.Names, []string{"c"}) {
		t.Errorf("after the end of the order of revision %d the last one is %+v", began, last)
	}

	r.join("d")
	r.fill(a, order(2), "c")
	_, err = a.RemoveMember(r.ctx, "c", true, false)
	r.must(err)
	resp, err := r.client().Get(r.ctx, "/penstock/fills/", clientv3.WithPrefix(), clientv3.WithCountOnly())
	r.must(err)
	if resp.Count != 0 {
		t.Errorf("after the removal of the member that is filled etcd has %d orders", resp.Count)
	}
}

// TestFillStopped: the end of an order by a command is recorded with the names of its members. A command without an
// order to end, and an order that replaces another one, leave the record as it is.
func TestFillStopped(t *testing.T) {
	r := newRig(t, 1)
	a := r.join("a")
	r.join("b")
	r.join("c")
	r.fill(a, order(1))
	r.fill(a, order(1), "b")
	began := r.fill(a, order(2), "b", "c")
	if last := r.lastFill(a); last.Revision != 0 {
		t.Errorf("no order has ended, and the last one is %+v", last)
	}
	stopped := r.fill(a, order(3))
	last := r.lastFill(a)
	if last.Revision != stopped || stopped <= began || !last.Stopped || !slices.Equal(last.Names, []string{"b", "c"}) {
		t.Errorf("the order of revision %d was stopped at %d, and the last one is %+v", began, stopped, last)
	}
	r.fill(a, order(4))
	r.fill(a, order(5), "b")
	if again := r.lastFill(a); again.Revision != last.Revision {
		t.Errorf("the record became %+v", again)
	}
}

// TestRemovalsTogether: of two nodes that are removed at the same time, the last that serves is left.
func TestRemovalsTogether(t *testing.T) {
	r := newRig(t, 1)
	for round := range 3 {
		names := []string{fmt.Sprint("a", round), fmt.Sprint("b", round)}
		var nodes []*node
		for _, name := range names {
			nodes = append(nodes, r.join(name))
		}
		errs := make([]error, len(names))
		var g errgroup.Group
		for i, name := range names {
			g.Go(func() error {
				_, errs[i] = nodes[i].RemoveMember(r.ctx, name, true, false)
				return nil
			})
		}
		r.must(g.Wait())
		if errs[0] == nil && errs[1] == nil {
			t.Fatalf("round %d: both nodes are removed, and none serves", round)
		}
		for _, n := range nodes {
			n.leave()
		}
	}
}
