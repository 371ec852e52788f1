package cluster

import (
	"context"
	"net"
	"sync/atomic"

	"golang.org/x/time/rate"

	"github.com/penstock-kv/penstock/lab/netlab"
)

// shaper is a NIC where there is no network of our own: it limits what all its
// connections together receive and send, each direction, and counts it. A reader
// that is held back fills the socket's buffer, and so holds back the sender.
type shaper struct {
	in, out        *rate.Limiter
	received, sent atomic.Uint64
}

// shapeBurst is what may go at once after a pause, and the most that one Read or
// Write waits for.
const shapeBurst = 128 << 10

// newShaper limits to so many bits a second; 0: not at all.
func newShaper(bits uint64) *shaper {
	limit := rate.Inf
	if bits > 0 {
		limit = rate.Limit(bits / 8)
	}
	return &shaper{in: rate.NewLimiter(limit, shapeBurst), out: rate.NewLimiter(limit, shapeBurst)}
}

// setRate changes the limit.
func (s *shaper) setRate(bits uint64) {
	s.in.SetLimit(rate.Limit(bits / 8))
	s.out.SetLimit(rate.Limit(bits / 8))
}

// counters are what it has carried.
func (s *shaper) counters() netlab.Counters {
	return netlab.Counters{ReceivedBytes: s.received.Load(), SentBytes: s.sent.Load()}
}

// wrap is tcp.Options.Wrap.
func (s *shaper) wrap(nc net.Conn) net.Conn { return &shapedConn{nc, s} }

// shapedConn is a connection over a shaper.
type shapedConn struct {
	net.Conn
	s *shaper
}

// NetConn returns the socket.
func (c *shapedConn) NetConn() net.Conn { return c.Conn }

// Read reads what has come and waits until the NIC would have brought it.
func (c *shapedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b[:min(len(b), shapeBurst)])
	if n > 0 {
		c.s.received.Add(uint64(n))
		_ = c.s.in.WaitN(context.Background(), n) // n is within the burst, and nothing ends the wait
	}
	return n, err
}

// Write writes as the NIC would take it.
func (c *shapedConn) Write(b []byte) (int, error) {
	done := 0
	for done < len(b) {
		piece := b[done:min(done+shapeBurst, len(b))]
		_ = c.s.out.WaitN(context.Background(), len(piece)) // as in Read
		n, err := c.Conn.Write(piece)
		c.s.sent.Add(uint64(n))
		done += n
		if err != nil {
			return done, err
		}
	}
	return done, nil
}
