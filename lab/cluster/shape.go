package cluster

import (
	"context"
	"net"
	"sync/atomic"

	"golang.org/x/time/rate"

	"github.com/penstock-kv/penstock/lab/netlab"
)

// shaper emulates the NIC of a process on loopback. It limits and counts the bytes that all
// connections of the NIC together receive and send; each direction has its own limit. A reader that
// waits for the limit lets the socket's buffer fill up, and so slows the sender down.
type shaper struct {
	in, out        *rate.Limiter
	received, sent atomic.Uint64
}

// shapeBurst is the number of bytes that may pass at once after a pause, and the largest number of
// bytes of one Read or one part of a Write.
const shapeBurst = 128 << 10

// newShaper limits each direction to bits per second; 0: no limit.
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

// counters returns the bytes that the shaper has received and sent.
func (s *shaper) counters() netlab.Counters {
	return netlab.Counters{ReceivedBytes: s.received.Load(), SentBytes: s.sent.Load()}
}

// wrap implements tcp.Options.Wrap.
func (s *shaper) wrap(nc net.Conn) net.Conn { return &shapedConn{nc, s} }

// shapedConn is a connection that passes through a shaper.
type shapedConn struct {
	net.Conn
	s *shaper
}

// NetConn returns the socket.
func (c *shapedConn) NetConn() net.Conn { return c.Conn }

// Read reads available bytes and then waits until a NIC of the set rate would have received them.
func (c *shapedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b[:min(len(b), shapeBurst)])
	if n > 0 {
		c.s.received.Add(uint64(n))
		_ = c.s.in.WaitN(context.Background(), n) // n is at most the burst, and the context never ends
	}
	return n, err
}

// Write writes at the set rate.
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
