package emulate

import (
	"bytes"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/server/planner"
)

// stall is a NIC that receives a given number of bytes and then none.
type stall struct{ left atomic.Int64 }

// stallingConn is a socket of a stall.
type stallingConn struct {
	net.Conn
	nic    *stall
	closed chan struct{}
	once   sync.Once

	mu       sync.Mutex
	deadline time.Time
	changed  chan struct{} // closed when the deadline changes
}

func (s *stall) wrap(c net.Conn) net.Conn {
	return &stallingConn{Conn: c, nic: s, closed: make(chan struct{}), changed: make(chan struct{})}
}

func (c *stallingConn) NetConn() net.Conn { return c.Conn }

func (c *stallingConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

func (c *stallingConn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	c.deadline = t
	close(c.changed)
	c.changed = make(chan struct{})
	c.mu.Unlock()
	return c.Conn.SetReadDeadline(t)
}

func (c *stallingConn) Read(b []byte) (int, error) {
	for c.nic.left.Load() <= 0 {
		c.mu.Lock()
		deadline, changed := c.deadline, c.changed
		c.mu.Unlock()
		if !deadline.IsZero() && !time.Now().Before(deadline) {
			return 0, os.ErrDeadlineExceeded
		}
		select {
		case <-changed:
		case <-c.closed:
			return 0, net.ErrClosed
		}
	}
	n, err := c.Conn.Read(b[:min(len(b), 16<<10)])
	c.nic.left.Add(-int64(n))
	return n, err
}

// TestSlowSide: the storage NIC of a prefill engine stops in the middle of a part.
// The planner hears how much of it has come while the part is read, and cuts that
// side; the decode side reads the rest, and no byte is wrong.
func TestSlowSide(t *testing.T) {
	testkit.VerifyNone(t)
	var file bytes.Buffer
	var nic stall
	nic.left.Store(1 << 40)
	c := (&cluster{t: t, record: &planner.Record{To: &file}, wrap: nic.wrap}).start(1, 1)
	c.gateway.Done = func(TurnResult) { nic.left.Store(300 << 10) } // of some 750 KiB
	work := []Session{{Name: "agent", Turns: []Turn{{Append: 1600, Output: 20}, {Append: 20, Output: 20}}}}
	c.check(c.gateway.Run(t.Context(), work, 1), 2)
	r := c.recorded(&file)
	p, err := dualpath.New(r.Header().Options)
	if err != nil {
		t.Fatal(err)
	}
	part, landed, cut := 0, 0, false
	for {
		ev, _, err := r.Next()
		if err != nil {
			break
		}
		if e, ok := ev.(dualpath.Progress); ok && e.Side == dualpath.Prefill && !cut {
			landed = max(landed, e.Landed)
		}
		for _, a := range p.Step(ev) {
			switch {
			case a.Kind == dualpath.Start && a.NParts == 2:
				part = a.Parts[0].Len()
			case a.Kind == dualpath.Cut && a.Side == dualpath.Prefill:
				cut = true
			}
		}
	}
	if !cut || landed == 0 || landed >= part {
		t.Errorf("the prefill side was cut: %v; it had read %d of %d tokens by then", cut, landed, part)
	}
}
