package simrdma

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// Addr is the address of a host, or of one end of a control connection.
type Addr string

// Network returns "sim".
func (Addr) Network() string { return "sim" }

// String returns the address.
func (a Addr) String() string { return string(a) }

// listener accepts control connections to a host.
type listener struct {
	f    *Fabric
	addr Addr
	// The fields below are guarded by the fabric's lock.
	waiting []net.Conn
	closed  bool
	arrived sync.Cond
}

// acceptMax is the largest number of connections that wait for Accept.
const acceptMax = 128

// Listen accepts control connections to host. They are streams of bytes that ControlDelay delays.
// Part holds their bytes back, and after KillHost no bytes arrive.
func (f *Fabric) Listen(host string) (net.Listener, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.listeners[host] != nil {
		return nil, fmt.Errorf("simrdma: %s listens already", host)
	}
	l := &listener{f: f, addr: Addr(host), arrived: sync.Cond{L: &f.mu}}
	f.listeners[host] = l
	return l, nil
}

// Dial opens a control connection between two hosts.
func (f *Fabric) Dial(ctx context.Context, from, to string) (net.Conn, error) {
	f.mu.Lock()
	dead := f.deadHosts[to] || f.deadHosts[from]
	f.mu.Unlock()
	if dead { // no answer
		<-ctx.Done()
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("simrdma: dial %s: %w", to, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	l := f.listeners[to]
	if l == nil || l.closed || len(l.waiting) >= acceptMax {
		return nil, fmt.Errorf("simrdma: dial %s: connection refused", to)
	}
	out, back := f.newPipe(from, to), f.newPipe(to, from)
	dialed := &conn{f: f, in: back, out: out, local: Addr(from), remote: Addr(to)}
	accepted := &conn{f: f, in: out, out: back, local: Addr(to), remote: Addr(from)}
	l.waiting = append(l.waiting, accepted)
	l.arrived.Signal()
	return dialed, nil
}

// Accept returns the next connection.
func (l *listener) Accept() (net.Conn, error) {
	l.f.mu.Lock()
	defer l.f.mu.Unlock()
	for len(l.waiting) == 0 && !l.closed {
		l.arrived.Wait()
	}
	if l.closed {
		return nil, fmt.Errorf("simrdma: accept on %s: %w", l.addr, net.ErrClosed)
	}
	c := l.waiting[0]
	l.waiting = append(l.waiting[:0], l.waiting[1:]...)
	return c, nil
}

// Close ends the listener and closes the connections that were not accepted.
func (l *listener) Close() error {
	l.f.mu.Lock()
	waiting := l.waiting
	first := !l.closed
	l.closed, l.waiting = true, nil
	if l.f.listeners[string(l.addr)] == l {
		delete(l.f.listeners, string(l.addr))
	}
	l.arrived.Broadcast()
	l.f.mu.Unlock()
	for _, c := range waiting {
		_ = c.Close()
	}
	if !first {
		return fmt.Errorf("simrdma: close %s: %w", l.addr, net.ErrClosed)
	}
	return nil
}

// Addr returns the host's address.
func (l *listener) Addr() net.Addr { return l.addr }

// pipe is one direction of a control connection. Its fields are guarded by the fabric's lock.
type pipe struct {
	f        *Fabric
	from, to string
	draws    draws
	// sent are the chunks in transit. readable are the bytes that have arrived and were not read.
	sent     []chunk
	readable []byte
	held     bool // by Part
	last     time.Duration
	// bytes is the number of bytes in sent and readable. Invariant: bytes <= ControlBuffer.
	bytes int
	// eof: the writer has closed the connection, and all its bytes have arrived. readerClosed: the
	// reader has closed it.
	eof, readerClosed bool
	changed           sync.Cond
}

// chunk is the data of one Write. A chunk with nil data is the end of the stream.
type chunk struct {
	at   time.Duration
	data []byte
}

func (f *Fabric) newPipe(from, to string) *pipe {
	return &pipe{f: f, from: from, to: to, draws: drawsOf(f.seed, hash("pipe"), hash(from), hash(to)), changed: sync.Cond{L: &f.mu}}
}

// sendLocked sends a chunk, which arrives after all earlier chunks.
func (p *pipe) sendLocked(data []byte) {
	p.last = max(p.f.now()+p.draws.within(p.f.opts.ControlDelay), p.last)
	p.sent = append(p.sent, chunk{at: p.last, data: data})
	p.bytes += len(data)
	p.f.scheduleLocked(event{at: p.last, step: stepPipe, pipe: p})
}

// arriveLocked makes chunks readable whose time has come. While the connection is held back by
// Part or a host is dead, it does nothing.
func (p *pipe) arriveLocked() {
	if p.f.deadHosts[p.from] || p.f.deadHosts[p.to] {
		return // the bytes stay in sent
	}
	if p.f.parted[pairOf(p.from, p.to)] {
		if !p.held {
			p.held = true
			p.f.held = append(p.f.held, p)
		}
		return
	}
	p.pumpLocked()
}

// pumpLocked makes chunks readable whose time has come.
func (p *pipe) pumpLocked() {
	now := p.f.now()
	for len(p.sent) > 0 && p.sent[0].at <= now {
		c := p.sent[0]
		p.sent = append(p.sent[:0], p.sent[1:]...)
		if c.data == nil {
			p.eof = true
		} else if p.readerClosed {
			p.bytes -= len(c.data)
		} else {
			p.readable = append(p.readable, c.data...)
		}
	}
	p.changed.Broadcast()
}

// conn is one end of a control connection.
type conn struct {
	f             *Fabric
	in, out       *pipe
	local, remote Addr
	// The fields below are guarded by the fabric's lock.
	closed      bool
	read, write deadline
}

var _ net.Conn = (*conn)(nil)

// deadline is the deadline of reads or of writes. Its timer wakes calls that wait.
type deadline struct {
	at    time.Time
	timer *time.Timer
}

func (d *deadline) passed() bool { return !d.at.IsZero() && !time.Now().Before(d.at) }

// setLocked moves the deadline.
func (d *deadline) setLocked(p *pipe, at time.Time) {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	d.at = at
	if wait := time.Until(at); !at.IsZero() && wait > 0 {
		d.timer = time.AfterFunc(wait, func() {
			p.f.mu.Lock()
			defer p.f.mu.Unlock()
			p.changed.Broadcast()
		})
	}
	p.changed.Broadcast()
}

var errReset = errors.New("connection reset by peer")

// Read reads bytes that have arrived.
func (c *conn) Read(b []byte) (int, error) {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	p := c.in
	for {
		switch {
		case c.closed:
			return 0, c.failed("read", net.ErrClosed)
		case c.read.passed():
			return 0, c.failed("read", os.ErrDeadlineExceeded)
		case len(b) == 0:
			return 0, nil
		case len(p.readable) > 0:
			n := copy(b, p.readable)
			p.readable = append(p.readable[:0], p.readable[n:]...)
			p.bytes -= n
			p.changed.Broadcast()
			return n, nil
		case p.eof:
			return 0, io.EOF
		}
		p.changed.Wait()
	}
}

// Write sends all of b and waits for room if needed.
func (c *conn) Write(b []byte) (int, error) {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	p := c.out
	for n := 0; ; {
		switch room := c.f.opts.ControlBuffer - p.bytes; {
		case c.closed:
			return n, c.failed("write", net.ErrClosed)
		case c.write.passed():
			return n, c.failed("write", os.ErrDeadlineExceeded)
		case p.readerClosed:
			return n, c.failed("write", errReset)
		case n == len(b):
			return n, nil
		case room > 0:
			part := b[n:min(n+room, len(b))]
			p.sendLocked(append([]byte{}, part...))
			n += len(part)
			continue
		}
		p.changed.Wait()
	}
}

// failed wraps an error as the connections of package net do.
func (c *conn) failed(op string, err error) error {
	return &net.OpError{Op: op, Net: "sim", Source: c.local, Addr: c.remote, Err: err}
}

// Close closes both directions. The peer can still read the bytes that were sent, and then gets
// EOF.
func (c *conn) Close() error {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	if c.closed {
		return c.failed("close", net.ErrClosed)
	}
	c.closed = true
	c.read.setLocked(c.in, time.Time{})
	c.write.setLocked(c.out, time.Time{})
	c.out.sendLocked(nil)
	if !c.f.deadHosts[c.in.from] && !c.f.deadHosts[c.in.to] {
		c.in.readerClosed = true
		c.in.bytes -= len(c.in.readable)
		c.in.readable = nil
	}
	c.in.changed.Broadcast()
	c.out.changed.Broadcast()
	return nil
}

// LocalAddr returns the host of this end.
func (c *conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr returns the host of the other end.
func (c *conn) RemoteAddr() net.Addr { return c.remote }

// SetDeadline is SetReadDeadline and SetWriteDeadline.
func (c *conn) SetDeadline(t time.Time) error {
	if err := c.SetReadDeadline(t); err != nil {
		return err
	}
	return c.SetWriteDeadline(t)
}

// SetReadDeadline ends reads at t.
func (c *conn) SetReadDeadline(t time.Time) error {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	if c.closed {
		return c.failed("set", net.ErrClosed)
	}
	c.read.setLocked(c.in, t)
	return nil
}

// SetWriteDeadline ends writes at t.
func (c *conn) SetWriteDeadline(t time.Time) error {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	if c.closed {
		return c.failed("set", net.ErrClosed)
	}
	c.write.setLocked(c.out, t)
	return nil
}
