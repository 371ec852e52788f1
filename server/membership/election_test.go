package membership_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/server/membership"
)

// candidate is a candidate of an election.
type candidate struct {
	*rig
	*membership.Election
	elected chan *membership.Term
}

// candidate returns a candidate with the given address at etcd's endpoints. The test's cleanup closes
// it.
func (r *rig) candidate(addr string, endpoints ...string) *candidate {
	r.Helper()
	e, err := membership.NewElection(membership.ElectionOptions{Endpoints: endpoints, TTL: ttl, Address: addr})
	r.must(err)
	r.Cleanup(func() { r.must(e.Close()) })
	return &candidate{r, e, make(chan *membership.Term, 1)}
}

// campaign campaigns in a goroutine. The test's cleanup ends the campaign and the term.
func (c *candidate) campaign() {
	ctx, cancel := context.WithCancel(c.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if t, err := c.Campaign(ctx); err == nil {
			c.elected <- t
		}
	}()
	c.Cleanup(func() {
		cancel()
		<-done
		select {
		case t := <-c.elected:
			t.Resign()
		default:
		}
	})
}

// term returns the next term of the candidate, which the test's cleanup ends.
func (c *candidate) term() *membership.Term {
	c.Helper()
	select {
	case t := <-c.elected:
		c.Cleanup(t.Resign)
		return t
	case <-c.ctx.Done():
		c.Fatal("not elected")
		return nil
	}
}

// TestElection: one candidate leads. When it resigns, the other one is elected for a later term.
func TestElection(t *testing.T) {
	r := newRig(t, 1)
	a, b := r.candidate("a:7430", r.etcd.Endpoints...), r.candidate("b:7430", r.etcd.Endpoints...)
	a.campaign()
	first := a.term()
	if first.Number() != 1 || !first.Held() {
		t.Errorf("the first term is %d, held %v", first.Number(), first.Held())
	}
	b.campaign()
	r.await("the standby reads the leader", func() bool { return b.Leader().Address == "a:7430" && b.Leader().Term == 1 })
	select {
	case <-b.elected:
		t.Fatal("two candidates lead")
	default:
	}
	first.Resign()
	second := b.term()
	if first.Held() || !isClosed(first.Lost()) || second.Number() != 2 || !second.Held() || b.Leader().Address != "b:7430" {
		t.Errorf("after the leader has resigned, it holds its term: %v; the next term is %d of %+v, held %v", first.Held(), second.Number(), b.Leader(), second.Held())
	}
}

// TestKeep: a term has what an earlier one has kept. A candidate whose term has ended keeps nothing.
func TestKeep(t *testing.T) {
	r := newRig(t, 1)
	g := testetcd.NewGate(t, r.etcd.Endpoints[0])
	a, b := r.candidate("a:7430", g.Addr), r.candidate("b:7430", r.etcd.Endpoints...)
	a.campaign()
	first := a.term()
	kept := func(m *membership.Term, want string) {
		t.Helper()
		if value, err := m.Kept(r.ctx); err != nil || string(value) != want {
			t.Errorf("%q is kept (%v); want %q", value, err, want)
		}
	}
	kept(first, "")
	r.must(first.Keep(r.ctx, []byte("one")))
	r.must(first.Keep(r.ctx, []byte("two")))
	kept(first, "two")
	b.campaign()
	g.Cut()
	second := b.term()
	kept(second, "two")
	r.must(second.Keep(r.ctx, []byte("three")))
	g.Mend()
	if err := first.Keep(r.ctx, []byte("late")); err == nil {
		t.Error("a term that has ended keeps a value")
	}
	kept(second, "three")
}

// TestDeletedNames: a term returns the names of deleted namespaces, whatever their number, and no name that was created again or
// that the cluster does not have.
func TestDeletedNames(t *testing.T) {
	r := newRig(t, 1)
	n := r.join("a")
	c := r.candidate("a:7430", r.etcd.Endpoints...)
	c.campaign()
	term := c.term()
	var names, want []string
	for i := range 2*100 + 3 {
		names = append(names, fmt.Sprint("unknown", i))
		if i%70 != 0 {
			continue
		}
		for what := range 3 { // 0: live, 1: deleted, 2: created again
			name := fmt.Sprint("n", i, "-", what)
			def := kv.Namespace{Name: name, Geometry: geo, Index: kv.IndexTrie}
			names = append(names, name)
			_, err := n.CreateNamespace(r.ctx, def)
			r.must(err)
			if what > 0 {
				_, err = n.DeleteNamespace(r.ctx, name, false)
				r.must(err)
			}
			if what > 1 {
				_, err = n.CreateNamespace(r.ctx, def)
				r.must(err)
			}
			if what == 1 {
				want = append(want, name)
			}
		}
	}
	got, err := term.Deleted(r.ctx, names)
	r.must(err)
	if !slices.Equal(got, want) {
		t.Errorf("%q were deleted; want %q", got, want)
	}
	if got, err := term.Deleted(r.ctx, nil); err != nil || len(got) > 0 {
		t.Errorf("of no names %q were deleted, %v", got, err)
	}
}

// TestElectionWithoutEtcd: a leader that cannot reach etcd does not hold its term when the other
// candidate is elected. A leader without etcd ends its term, and is elected again.
func TestElectionWithoutEtcd(t *testing.T) {
	r := newRig(t, 1)
	g := testetcd.NewGate(t, r.etcd.Endpoints[0])
	a, b := r.candidate("a:7430", g.Addr), r.candidate("b:7430", r.etcd.Endpoints...)
	a.campaign()
	first := a.term()
	b.campaign()
	g.Cut()
	second := b.term()
	if first.Held() {
		t.Error("two candidates hold a term")
	}
	if second.Number() <= first.Number() {
		t.Errorf("term %d follows term %d", second.Number(), first.Number())
	}
	<-first.Lost()
	r.etcd.Pause(0)
	<-second.Lost()
	if second.Held() {
		t.Error("a term is held after its end")
	}
	r.etcd.Resume(0)
	second.Resign()
	b.campaign()
	if again := b.term(); again.Number() <= second.Number() {
		t.Errorf("term %d follows term %d", again.Number(), second.Number())
	}
}

// TestElectionSurpass: a term ends when a client has seen a later one, and the next term is above the
// client's.
func TestElectionSurpass(t *testing.T) {
	r := newRig(t, 1)
	a := r.candidate("a:7430", r.etcd.Endpoints...)
	a.campaign()
	first := a.term()
	a.Surpass(first.Number())
	if !first.Held() {
		t.Error("a term ends because a client has seen the same term")
	}
	a.Surpass(41)
	if first.Held() || !isClosed(first.Lost()) {
		t.Error("a term does not end although a client has seen a later one")
	}
	first.Resign()
	a.campaign()
	if second := a.term(); second.Number() != 42 {
		t.Errorf("the next term is %d; want 42", second.Number())
	}
}

// TestElectionDataLoss: after etcd has lost its data, a new term has a higher number than each term that a
// candidate has read.
func TestElectionDataLoss(t *testing.T) {
	r := newRig(t, 1)
	a, b := r.candidate("a:7430", r.etcd.Endpoints...), r.candidate("b:7430", r.etcd.Endpoints...)
	a.Surpass(6)
	a.campaign()
	first := a.term()
	if first.Number() != 7 {
		t.Errorf("the first term is %d; want 7", first.Number())
	}
	b.campaign()
	r.await("the standby reads the leader", func() bool { return b.Leader().Term == 7 })
	_, err := r.client().Delete(r.ctx, "/penstock/planner/", clientv3.WithPrefix())
	r.must(err)
	second := b.term()
	if second.Number() != 8 {
		t.Errorf("the standby is elected for term %d; want 8", second.Number())
	}
	<-first.Lost()
	second.Resign()
	first.Resign()
	_, err = r.client().Delete(r.ctx, "/penstock/planner/", clientv3.WithPrefix())
	r.must(err)
	b.campaign()
	if again := b.term(); again.Number() != 9 {
		t.Errorf("the earlier leader is elected for term %d; want 9", again.Number())
	}
}

// TestElectionEnds: the end of the context ends a campaign without etcd.
func TestElectionEnds(t *testing.T) {
	r := newRig(t, 1)
	r.etcd.Kill(0)
	a := r.candidate("a:7430", r.etcd.Endpoints...)
	ctx, cancel := context.WithTimeout(r.ctx, 300*time.Millisecond)
	defer cancel()
	if _, err := a.Campaign(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the campaign ended with %v", err)
	}
}
