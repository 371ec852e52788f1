package testetcd

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
)

// Gate is a connection between a process and etcd that a test can cut.
type Gate struct {
	// Addr is the address to which the process connects.
	Addr string

	to  string
	cut atomic.Bool

	mu    sync.Mutex
	conns map[net.Conn]bool
	wg    sync.WaitGroup
}

// NewGate returns a gate to an endpoint of etcd. It ends with the test.
func NewGate(t testing.TB, to string) *Gate {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := &Gate{Addr: l.Addr().String(), to: to, conns: make(map[net.Conn]bool)}
	g.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			g.wg.Go(func() { g.forward(c) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		g.reset()
		g.wg.Wait()
	})
	return g
}

// Cut makes etcd unreachable, without an end of the connections.
func (g *Gate) Cut() { g.cut.Store(true) }

// Mend ends a cut. The connections have lost bytes, so they end too.
func (g *Gate) Mend() {
	g.cut.Store(false)
	g.reset()
}

// forward copies the bytes of a connection in both directions. While the gate is cut it discards
// them, so that neither end sees the connection end.
func (g *Gate) forward(a net.Conn) {
	b, err := net.Dial("tcp", g.to)
	if err != nil {
		_ = a.Close()
		return
	}
	g.mu.Lock()
	g.conns[a], g.conns[b] = true, true
	g.mu.Unlock()
	var wg sync.WaitGroup
	pipe := func(dst, src net.Conn) {
		_, _ = io.Copy(writer{g, dst}, src)
		_ = dst.Close()
		_ = src.Close()
	}
	wg.Go(func() { pipe(a, b) })
	wg.Go(func() { pipe(b, a) })
	wg.Wait()
	g.mu.Lock()
	delete(g.conns, a)
	delete(g.conns, b)
	g.mu.Unlock()
}

// reset ends all connections.
func (g *Gate) reset() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for c := range g.conns {
		_ = c.Close()
	}
}

// writer writes to dst, or discards the bytes while the gate is cut.
type writer struct {
	g   *Gate
	dst net.Conn
}

func (w writer) Write(b []byte) (int, error) {
	if w.g.cut.Load() {
		return len(b), nil
	}
	return w.dst.Write(b)
}
