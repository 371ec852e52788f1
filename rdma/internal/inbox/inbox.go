// Package inbox holds the receive buffers of an engine and runs its handler in one goroutine.
// It does not queue a message for which no buffer is free: the caller refuses it.
//
//	reader ─ Take ─► buffer ─ filled ─ Deliver ─► full ─► Run: handler ─► free ─┐
//	  ▲ nil: refuse                                                             │
//	  └──────────────────────────────────────────────────────────────────────◄─┘
//
// Lock order: there is no lock; the buffers are passed through two channels.
package inbox

import (
	"context"
	"fmt"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/rdma"
)

// Limits of New: the number of buffers, the size of a buffer, and the bytes of all buffers, which
// New allocates at once.
const (
	MaxCount = 1 << 16
	MaxSize  = 1 << 20
	maxBytes = 1 << 30
)

// Inbox is the pool of buffers.
type Inbox struct {
	size int
	// Invariant: each buffer is in free, in full, being filled by a reader, or with the handler.
	// Each channel has capacity for all buffers, so no send to a channel blocks.
	free chan []byte
	full chan message
}

// message is a message in a receive buffer that waits for the handler.
type message struct {
	from rdma.EngineID
	msg  []byte
}

// New returns an inbox with count buffers of sizeBytes each.
func New(count, sizeBytes int) (*Inbox, error) {
	if count < 1 || count > MaxCount || sizeBytes < 1 || sizeBytes > MaxSize || count*sizeBytes > maxBytes {
		return nil, fmt.Errorf("rdma: %d receive buffers of %d bytes; 1 to %d of 1 to %d bytes, %d in all: %w", count, sizeBytes, MaxCount, MaxSize, maxBytes, rdma.ErrRange)
	}
	p := &Inbox{size: sizeBytes, free: make(chan []byte, count), full: make(chan message, count)}
	arena := make([]byte, count*sizeBytes)
	for i := range count {
		p.free <- arena[i*sizeBytes : (i+1)*sizeBytes : (i+1)*sizeBytes]
	}
	return p, nil
}

// Size returns the size of a buffer in bytes.
func (p *Inbox) Size() int { return p.size }

// Run runs handler on one message at a time until ctx ends. A message is not valid after its
// handler has returned.
func (p *Inbox) Run(ctx context.Context, handler func(from rdma.EngineID, msg []byte)) {
	for {
		select {
		case m := <-p.full:
			handler(m.from, m.msg)
			p.Give(m.msg)
		case <-ctx.Done():
			return
		}
	}
}

// Take returns a free buffer, or nil if none is free. The caller then passes the buffer either to
// the handler, with Deliver, or back to the pool, with Give.
func (p *Inbox) Take() []byte {
	select {
	case b := <-p.free:
		return b
	default:
		return nil
	}
}

// Give returns a buffer to the pool. In tests the buffer's bytes are overwritten first, so that a
// handler that kept the message reads invalid data.
func (p *Inbox) Give(b []byte) {
	b = b[:p.size]
	invariants.Mangle(b)
	p.free <- b
}

// Deliver passes a message to the handler. msg is the beginning of a buffer that Take returned.
func (p *Inbox) Deliver(from rdma.EngineID, msg []byte) { p.full <- message{from, msg} }
