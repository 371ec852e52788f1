package tcp

import (
	"fmt"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/rdma"
)

// message is one that waits for its handler, in a receive buffer.
type message struct {
	from rdma.EngineID
	msg  []byte
}

// inbox is the rotating pool of receive buffers.
type inbox struct {
	size int
	// Invariant: each buffer is in free, in full, being filled by a reader, or
	// with the handler; both channels hold all of them, so no send blocks.
	free chan []byte
	full chan message
}

// Limits of Recv: their product is allocated at once.
const (
	maxRecvCount = 1 << 16
	maxRecvBytes = 1 << 30
)

// Recv implements rdma.Engine.
func (e *Engine) Recv(count, sizeBytes int, handler func(from rdma.EngineID, msg []byte)) error {
	if count < 1 || count > maxRecvCount || sizeBytes < 1 || sizeBytes > maxMessage || count*sizeBytes > maxRecvBytes || handler == nil {
		return fmt.Errorf("tcp: %d receive buffers of %d bytes; 1 to %d of 1 to %d bytes, %d in all, and a handler: %w",
			count, sizeBytes, maxRecvCount, maxMessage, maxRecvBytes, rdma.ErrRange)
	}
	p := &inbox{size: sizeBytes, free: make(chan []byte, count), full: make(chan message, count)}
	arena := make([]byte, count*sizeBytes)
	for i := range count {
		p.free <- arena[i*sizeBytes : (i+1)*sizeBytes : (i+1)*sizeBytes]
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closing {
		return fmt.Errorf("tcp: recv: %w", rdma.ErrClosed)
	}
	if !e.inbox.CompareAndSwap(nil, p) {
		return fmt.Errorf("tcp: receive buffers: %w", rdma.ErrExists)
	}
	e.running.Go(func() { e.handle(p, handler) })
	return nil
}

// handle runs the handler on one message after the other.
func (e *Engine) handle(p *inbox, handler func(rdma.EngineID, []byte)) {
	for {
		select {
		case m := <-p.full:
			handler(m.from, m.msg)
			p.give(m.msg)
		case <-e.ctx.Done():
			return
		}
	}
}

// take returns a free buffer, or nil.
func (p *inbox) take() []byte {
	select {
	case b := <-p.free:
		return b
	default:
		return nil
	}
}

// give posts a buffer again. Under test its bytes are overwritten first, so that
// a handler that kept the message reads nonsense.
func (p *inbox) give(b []byte) {
	b = b[:p.size]
	invariants.Mangle(b)
	p.free <- b
}

// deliver hands a message, in a buffer that take returned, to the handler.
func (p *inbox) deliver(from rdma.EngineID, msg []byte) { p.full <- message{from, msg} }
