package sessions

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sources"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// fakeOp is an op without a provider.
type fakeOp struct{ Op }

// fakeSession is a session without a provider.
type fakeSession struct {
	Session[*fakeOp]
	limited, taken int
}

func (s *fakeSession) Fail(why error) {
	s.Mu.Lock()
	first := s.FailLocked(why)
	s.Mu.Unlock()
	if first {
		close(s.Dying)
	}
}

// newFake returns a session with room for ops operations of bytes in total, and for limited
// operations of the queue Limited.
func newFake(c *Counters, ops int, bytes int64, limited int) *fakeSession {
	s := &fakeSession{limited: limited}
	s.Init(rdma.EngineID{7}, true, c, Rules[*fakeOp]{
		Ops: ops, Bytes: bytes, New: func() *fakeOp { return &fakeOp{} },
		Gone:    func(why error) error { return fmt.Errorf("gone: %w", why) },
		Room:    func() bool { return s.taken < s.limited },
		Started: func(o *fakeOp) { s.taken++; o.Class = 1 },
		Ended:   func(o *fakeOp) { s.taken -= int(o.Class) },
	})
	return s
}

// end ends a reserved operation.
func (s *fakeSession) end(o *fakeOp, err error) {
	s.Mu.Lock()
	x := s.EndLocked(o, false, err)
	s.Mu.Unlock()
	CallAll([]Ended{x})
}

// TestReserveOrder: waiting submitters are granted in order within a queue, each when its bytes
// fit, and the two queues do not wait for each other.
func TestReserveOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Counters
		s := newFake(&c, 3, 100, 1)
		type got struct {
			name string
			op   *fakeOp
		}
		in := make(chan got, 8)
		reserve := func(name string, queue int, n uint64) {
			go func() {
				o, err := s.Reserve(t.Context(), queue, n, false)
				if err != nil {
					t.Error(err)
				}
				in <- got{name, o}
			}()
			synctest.Wait()
		}
		next := func() (names []string, ops []*fakeOp) {
			synctest.Wait()
			for len(in) > 0 {
				g := <-in
				names, ops = append(names, g.name), append(ops, g.op)
			}
			return names, ops
		}
		reserve("a", Plain, 60)
		reserve("m", Limited, 10)
		_, ops := next()
		a, m := ops[0], ops[1]
		reserve("b", Plain, 50)   // does not fit
		reserve("c", Plain, 1)    // would fit, but is behind b
		reserve("n", Limited, 10) // fits, but exceeds Room
		if names, _ := next(); len(names) != 0 {
			t.Fatalf("%v did not wait", names)
		}
		if _, err := s.Reserve(t.Context(), Plain, 1, true); !errors.Is(err, rdma.ErrBusy) {
			t.Errorf("NoWait behind waiters: %v", err)
		}
		s.end(m, nil)
		if names, _ := next(); !slices.Equal(names, []string{"n"}) {
			t.Errorf("%v came in when the limited one ended, want n", names)
		}
		s.end(a, errors.New("refused"))
		names, _ := next()
		if slices.Sort(names); !slices.Equal(names, []string{"b", "c"}) {
			t.Errorf("%v came in when 60 bytes were free, want b and c", names)
		}
		if len(s.Ops) != 3 || s.Active != 3 || s.FreeBytes != 49 {
			t.Errorf("%d ops, %d active, %d bytes free; want 3, 3, 49", len(s.Ops), s.Active, s.FreeBytes)
		}
		if c.WritesOut.Load() != 1 || c.WriteFailuresOut.Load() != 1 {
			t.Errorf("counted %d writes and %d failures, want 1 and 1", c.WritesOut.Load(), c.WriteFailuresOut.Load())
		}
	})
}

// TestLimitedPassesPlain: messages (the queue Limited) start when writes have the whole budget and wait for
// more, and writes have the whole budget when messages are in flight.
func TestLimitedPassesPlain(t *testing.T) {
	s := newFake(new(Counters), 2, 100, 3)
	reserve := func(queue int, n uint64, want error) (o *fakeOp) {
		t.Helper()
		o, err := s.Reserve(t.Context(), queue, n, true)
		if !errors.Is(err, want) {
			t.Fatalf("%d bytes in queue %d: %v, want %v", n, queue, err, want)
		}
		return o
	}
	reserve(Limited, 1000, nil)
	first := reserve(Plain, 100, nil)
	reserve(Limited, 1000, nil)
	reserve(Plain, 1, rdma.ErrBusy) // no bytes
	s.end(first, nil)
	reserve(Plain, 1, nil)
	reserve(Plain, 1, nil)
	reserve(Plain, 1, rdma.ErrBusy) // no operation
	reserve(Limited, 1, nil)
	reserve(Limited, 1, rdma.ErrBusy) // Room
	if s.Active != 5 || s.Limited != 3 || s.FreeBytes != 98 {
		t.Errorf("%d operations, %d of them messages, and %d bytes free; want 5, 3, 98", s.Active, s.Limited, s.FreeBytes)
	}
}

// TestReserveAfterCancelled: when the first submitter of a queue gives up, the submitters behind it are granted
// at once if there is room for them. They do not wait for the end of another operation.
func TestReserveAfterCancelled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFake(new(Counters), 8, 100, 0)
		if _, err := s.Reserve(t.Context(), Plain, 10, false); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		large, small := make(chan error, 1), make(chan error, 2)
		go func() {
			_, err := s.Reserve(ctx, Plain, 100, false)
			large <- err
		}()
		synctest.Wait()
		for range 2 {
			go func() {
				_, err := s.Reserve(t.Context(), Plain, 10, false)
				small <- err
			}()
		}
		synctest.Wait()
		if len(small) > 0 {
			t.Fatal("a small operation passed the large one")
		}
		cancel()
		synctest.Wait()
		if err := <-large; !errors.Is(err, context.Canceled) {
			t.Errorf("the large operation: %v", err)
		}
		if len(small) != 2 {
			t.Fatalf("%d of 2 small operations were granted after the large one had given up", len(small))
		}
		for range 2 {
			if err := <-small; err != nil {
				t.Error(err)
			}
		}
		if s.Active != 3 || s.FreeBytes != 70 {
			t.Errorf("%d operations, %d bytes free; want 3, 70", s.Active, s.FreeBytes)
		}
	})
}

// TestReserveEnds: the wait for room ends with the submitter's context, and with the session.
// Nothing is reserved or begun after that.
func TestReserveEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFake(new(Counters), 1, 10, 0)
		o, err := s.Reserve(t.Context(), Plain, 1<<40, false) // is charged the whole budget
		if err != nil || s.FreeBytes != 0 {
			t.Fatalf("%v, %d bytes free", err, s.FreeBytes)
		}
		ctx, cancel := context.WithCancel(t.Context())
		canceled, ended := make(chan error, 1), make(chan error, 1)
		wait := func(ctx context.Context, to chan error) {
			_, err := s.Reserve(ctx, Plain, 1, false)
			to <- err
		}
		go wait(ctx, canceled)
		synctest.Wait()
		go wait(t.Context(), ended)
		synctest.Wait()
		cancel()
		if err := <-canceled; !errors.Is(err, context.Canceled) {
			t.Errorf("a submitter whose context ended: %v", err)
		}
		s.Fail(rdma.ErrPeerDied)
		s.Fail(rdma.ErrClosed) // only the first reason is kept
		if err := <-ended; !errors.Is(err, rdma.ErrPeerDied) {
			t.Errorf("a submitter whose session ended: %v", err)
		}
		s.Mu.Lock()
		begun := s.BeginLocked(o, 1)
		s.Mu.Unlock()
		_, late := s.Reserve(t.Context(), Plain, 1, false)
		if !errors.Is(begun, rdma.ErrPeerDied) || !errors.Is(late, rdma.ErrPeerDied) || !s.Dead() {
			t.Errorf("in a session that ended: begin %v, reserve %v", begun, late)
		}
		s.Unreserve(o)
		if s.Active != 0 || s.FreeBytes != 10 {
			t.Errorf("%d operations, %d bytes free at the end", s.Active, s.FreeBytes)
		}
	})
}

// TestSource: an operation keeps its region from being closed until its Done has returned, or
// until it was unreserved.
func TestSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFake(new(Counters), 4, 10, 0)
		var region sources.Readers
		var order []string
		hold := func() *fakeOp {
			o, err := s.Reserve(t.Context(), Plain, 1, false)
			if err == nil {
				err = o.Hold(&region)
			}
			if err != nil {
				t.Fatal(err)
			}
			return o
		}
		one, two := hold(), hold()
		one.Done = func(error) { order = append(order, "done") }
		region.Close()
		closed := make(chan struct{})
		go func() {
			if err := region.Wait(t.Context()); err != nil {
				t.Error(err)
			}
			order = append(order, "closed")
			close(closed)
		}()
		synctest.Wait()
		s.Unreserve(two)
		synctest.Wait()
		s.end(one, nil)
		<-closed
		if !slices.Equal(order, []string{"done", "closed"}) {
			t.Errorf("in this order: %v", order)
		}
		o, err := s.Reserve(t.Context(), Plain, 1, false)
		if err != nil {
			t.Fatal(err)
		}
		if err := o.Hold(&region); !errors.Is(err, rdma.ErrClosed) {
			t.Errorf("a source that is closed: %v", err)
		}
	})
}

// TestNumbers: a reused op has another number, and keeps nothing of its previous use except the
// memory for runs.
func TestNumbers(t *testing.T) {
	s := newFake(new(Counters), 2, 10, 1)
	r := rand.New(rand.NewPCG(1, 2))
	seen := map[uint64]bool{}
	for range 100 {
		o, err := s.Reserve(t.Context(), r.IntN(2), 1, true)
		if err != nil {
			t.Fatal(err)
		}
		if seen[o.ID()] || o.Generation == 0 || len(o.Runs) != 0 || o.Done != nil || o.Submitted {
			t.Fatalf("op %+v is not new", o.Op)
		}
		seen[o.ID()] = true
		o.Runs = append(o.Runs, Run{N: 1})
		o.Done = func(error) {}
		s.Mu.Lock()
		if err := s.BeginLocked(o, 5); err != nil {
			t.Fatal(err)
		}
		s.Mu.Unlock()
		if s.Overdue(7, 2) || !s.Overdue(8, 2) || s.Overdue(2, 2) {
			t.Fatal("an operation of tick 5 is overdue after 2 rounds at 8, and not before")
		}
		s.end(o, nil)
		if s.Overdue(8, 2) {
			t.Fatal("an operation that has ended is overdue")
		}
	}
	if len(s.Ops) != 1 {
		t.Errorf("%d ops for one operation at a time", len(s.Ops))
	}
}

// TestEngine: a session is found from Activate until it begins to end, although it stays in the
// table for a short time. A second session of the same peer waits for the end of the first.
// Connect dials only if no session is alive.
func TestEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var e Engine[*fakeSession]
		var events []string
		e.Init(Options{
			Name: "fake", InFlightBytes: 10, EarlyImmediates: 1, Logger: slog.New(slog.DiscardHandler),
			OnPeerUp:   func(rdma.EngineID) { events = append(events, "up") },
			OnPeerDown: func(rdma.EngineID, error) { events = append(events, "down") },
		})
		peer := rdma.EngineID{7}
		one, two := newFake(&e.Counters, 2, 10, 0), newFake(&e.Counters, 2, 10, 0)
		where, token := []rdma.NetAddr{"a", "b"}, rdma.Token("0123456789abcdef")
		one.Where, one.Token, two.Where, two.Token = where, token, where, token
		if err := e.Activate(one); err != nil || !e.Alive(peer) {
			t.Fatalf("%v, alive %v", err, e.Alive(peer))
		}
		never := func(context.Context) (rdma.EngineID, error) { return rdma.EngineID{}, errors.New("dialed") }
		for _, id := range []rdma.EngineID{peer, {}} {
			if got, err := e.Connect(t.Context(), id, where, token, never); err != nil || got != peer {
				t.Errorf("Connect to %v, with a session: %v, %v", id, got, err)
			}
		}
		one.Fail(rdma.ErrPeerDied)
		if _, err := e.Session(peer); err != nil || e.Alive(peer) {
			t.Errorf("a session that has begun to end: %v, alive %v", err, e.Alive(peer))
		}
		again := make(chan error, 1)
		go func() {
			_, err := e.Connect(t.Context(), peer, where, token, func(context.Context) (rdma.EngineID, error) { return peer, e.Activate(two) })
			again <- err
		}()
		synctest.Wait()
		if len(again) != 0 || len(e.Unremoved()) != 1 {
			t.Fatal("the second session did not wait for the first")
		}
		e.Drop(one)
		e.Remove(one)
		if err := <-again; err != nil || !slices.Equal(events, []string{"up", "down", "up"}) {
			t.Errorf("%v, events %v", err, events)
		}
		e.Drop(one) // one was removed, and is not the peer's session
		if s, err := e.Session(peer); err != nil || s != two {
			t.Errorf("found %p, %v; want the second session", s, err)
		}
		if p := e.Peers(); len(p) != 1 || p[0].ID != peer || !p[0].Dialed || e.Stats().SessionsOpened != 2 || e.Stats().SessionsClosed != 1 {
			t.Errorf("peers %+v, stats %+v", p, e.Stats())
		}
		if !e.BeginClose() {
			t.Fatal("closed before")
		}
		e.Cancel()
		go func() {
			<-two.Dying
			e.Drop(two)
			e.Remove(two)
		}()
		e.EndAll(e.Unremoved())
		close(e.Closed)
		if e.BeginClose() {
			t.Error("Close began twice")
		}
		if err := e.Activate(newFake(&e.Counters, 1, 1, 0)); !errors.Is(err, rdma.ErrClosed) {
			t.Errorf("a session of a closed engine: %v", err)
		}
		for _, err := range []error{e.Open(), func() error { _, err := e.Session(peer); return err }(), func() error { _, err := e.Connect(t.Context(), peer, where, token, never); return err }()} {
			if !errors.Is(err, rdma.ErrClosed) {
				t.Errorf("a closed engine: %v", err)
			}
		}
	})
}
