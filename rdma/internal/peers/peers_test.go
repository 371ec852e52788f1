package peers

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestTable: the dialed session is found before the accepted one, and Drop removes only the
// given session.
func TestTable(t *testing.T) {
	var table Table[*int]
	peer, one, two := rdma.EngineID{1}, new(int), new(int)
	if _, ok := table.Find(peer); ok || len(table.All()) != 0 {
		t.Error("an empty table has sessions")
	}
	table.Put(Key{peer, false}, one)
	if s, ok := table.Find(peer); !ok || s != one {
		t.Errorf("found %v, %v; want the accepted session", s, ok)
	}
	table.Put(Key{peer, true}, two)
	if s, _ := table.Find(peer); s != two {
		t.Error("the dialed session is not found first")
	}
	table.Drop(Key{peer, true}, one)
	if s, ok := table.At(Key{peer, true}); !ok || s != two || len(table.All()) != 2 {
		t.Error("a session was dropped for another")
	}
	table.Drop(Key{peer, true}, two)
	if s, ok := table.Find(peer); !ok || s != one {
		t.Errorf("found %v, %v; want the one that is left", s, ok)
	}
}

// TestTurns: one caller at a time for each key. A caller whose context ends while it waits does
// not block others.
func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var turns Turns[string]
		first, err := turns.Take(t.Context(), "a")
		other, err2 := turns.Take(t.Context(), "b")
		if err := errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		other()
		ctx, cancel := context.WithCancel(t.Context())
		gone, got := make(chan error, 1), make(chan func(), 1)
		go func() {
			_, err := turns.Take(ctx, "a")
			gone <- err
		}()
		go func() {
			giveUp, err := turns.Take(t.Context(), "a")
			if err != nil {
				t.Error(err)
			}
			got <- giveUp
		}()
		synctest.Wait()
		cancel()
		if err := <-gone; !errors.Is(err, context.Canceled) {
			t.Errorf("the caller whose context ended: %v", err)
		}
		if len(got) != 0 {
			t.Error("two have the same turn")
		}
		first()
		first() // a second call has no effect
		(<-got)()
		if _, err := turns.Take(ctx, "a"); !errors.Is(err, context.Canceled) {
			t.Errorf("a free turn, and a context that has ended: %v", err)
		}
		if len(turns.busy) != 0 {
			t.Errorf("%d turns are left", len(turns.busy))
		}
	})
}

// TestAccept: at most HandshakesMax connections are admitted before one has proved the token. A
// failed Accept is repeated, and the end closes the remaining connections.
func TestAccept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &listener{conns: make(chan net.Conn), fails: 3}
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		var mu sync.Mutex
		var inside []func()
		failures := 0
		ended := make(chan struct{})
		release := make(chan struct{})
		go func() {
			defer close(ended)
			Accept(ctx, l, &running, func(error) { failures++ }, func(nc net.Conn, proved func()) {
				mu.Lock()
				inside = append(inside, proved)
				mu.Unlock()
				<-release
				nc.Close()
			})
		}()
		for range HandshakesMax + 1 {
			a, b := net.Pipe()
			defer a.Close()
			l.conns <- b
		}
		synctest.Wait()
		if len(inside) != HandshakesMax || failures != 3 {
			t.Fatalf("%d admitted at once after %d failures, want %d after 3", len(inside), failures, HandshakesMax)
		}
		inside[0]()
		synctest.Wait()
		if len(inside) != HandshakesMax+1 {
			t.Errorf("%d admitted when one had proved itself", len(inside))
		}
		a, b := net.Pipe()
		defer a.Close()
		l.conns <- b
		synctest.Wait()
		cancel()
		<-ended
		if _, err := b.Write([]byte{0}); !errors.Is(err, net.ErrClosed) && err == nil {
			t.Errorf("the connection that waited was not closed: %v", err)
		}
		close(release)
		running.Wait()
	})
}

// listener fails a few times and then returns its connections.
type listener struct {
	net.Listener
	conns chan net.Conn
	fails int
}

func (l *listener) Accept() (net.Conn, error) {
	if l.fails > 0 {
		l.fails--
		return nil, errors.New("too many open files")
	}
	return <-l.conns, nil
}

// TestGroup: a group finds the sessions of its peers, is valid for its owner only, and fails
// after one of them has ended.
func TestGroup(t *testing.T) {
	type session struct{ over bool }
	a, b, stranger := rdma.EngineID{1}, rdma.EngineID{2}, rdma.EngineID{3}
	known := map[rdma.EngineID]*session{a: {}, b: {}}
	find := func(p rdma.EngineID) (*session, error) {
		if s := known[p]; s != nil {
			return s, nil
		}
		return nil, rdma.ErrNoPeer
	}
	ended := func(s *session) bool { return s.over }
	owner, other := &engine{}, &engine{}
	if _, err := NewGroup(owner, []rdma.EngineID{a, stranger}, find); !errors.Is(err, rdma.ErrNoPeer) {
		t.Errorf("a group with a stranger: %v", err)
	}
	g, err := NewGroup(owner, []rdma.EngineID{a, b}, find)
	if err != nil || !slices.Equal(g.Peers(), []rdma.EngineID{a, b}) {
		t.Fatalf("group %+v, %v", g, err)
	}
	if _, err := Resolve(other, g, find, ended); !errors.Is(err, rdma.ErrForeign) {
		t.Errorf("another engine's group: %v", err)
	}
	in, err := Resolve(owner, g, find, ended)
	if err != nil {
		t.Fatal(err)
	}
	var to []*session
	write := func(_ context.Context, s *session, w *rdma.Write) error {
		to = append(to, s)
		w.Done(nil)
		return nil
	}
	dst := func(p rdma.EngineID) rdma.ScatterDst { return rdma.ScatterDst{Dst: rdma.Desc{Engine: p}} }
	f := rdma.NewFlag()
	err = Scatter(t.Context(), rdma.Scatter{Dsts: []rdma.ScatterDst{dst(b), dst(a)}, Done: f.Set}, in, write)
	if set, end := f.Poll(); err != nil || !set || end != nil || !slices.Equal(to, []*session{known[b], known[a]}) {
		t.Errorf("scatter: %v, %v, %v, to %v", err, set, end, to)
	}
	err = Scatter(t.Context(), rdma.Scatter{Dsts: []rdma.ScatterDst{dst(b), dst(stranger)}}, in, write)
	if !errors.Is(err, rdma.ErrRange) || len(to) != 2 {
		t.Errorf("scatter to a peer that is not in the group: %v, %d writes", err, len(to))
	}
	known[b].over = true
	if _, err := Resolve(owner, g, find, ended); !errors.Is(err, rdma.ErrPeerDied) {
		t.Errorf("a group whose peer has died: %v", err)
	}
	g.Close()
}

// engine is an engine that differs from others by its address.
type engine struct {
	rdma.Engine
	_ byte
}
