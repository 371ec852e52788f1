package storage

import (
	"fmt"
	"sync"
)

// A loanBook counts the arena memory that readers on this host keep beyond their
// Load, and bounds it: what they hold, no transfer can use.
type loanBook struct {
	max int64

	mu sync.Mutex
	// bytes of buffers with a loan on them. A buffer counts whole, and once,
	// however many of its pieces are lent: none of it comes back before the last.
	// Invariant: bytes <= max.
	bytes int64
	loans int
}

// room reports whether sizeBytes more could be lent now.
func (b *loanBook) room(sizeBytes int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.roomLocked(sizeBytes)
}

func (b *loanBook) roomLocked(sizeBytes int64) error {
	if sizeBytes > b.max-b.bytes {
		return fmt.Errorf("%w: readers on this host may keep %d bytes of the arena (limits.loan_bytes), and too little of that is free", ErrBusy, b.max)
	}
	return nil
}

// take enters a loan of h.
func (b *loanBook) take(h *hold) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if h.lent == 0 {
		size := int64(h.buf.Len())
		if err := b.roomLocked(size); err != nil {
			return err
		}
		b.bytes += size
	}
	h.lent++
	b.loans++
	return nil
}

// give ends a loan of h.
func (b *loanBook) give(h *hold) {
	b.mu.Lock()
	defer b.mu.Unlock()
	h.lent--
	b.loans--
	if h.lent == 0 {
		b.bytes -= int64(h.buf.Len())
	}
}

func (b *loanBook) stats() (bytes int64, loans int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.bytes, b.loans
}

// Keep lends the part to a reader on this host: its bytes stay as they are until
// release, also after Done, also when the block is evicted or its epoch ends. It
// is called before Done; release is called once, from any goroutine, before the
// Node is closed. The error is ErrBusy if as much is lent as Options.LoanBytesMax
// allows.
func (p *Part) Keep() (release func(), err error) {
	h, book := p.hold, &p.load.node.loans
	if err := book.take(h); err != nil {
		return nil, err
	}
	h.retain()
	return func() {
		book.give(h)
		h.release()
	}, nil
}
