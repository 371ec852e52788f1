package storage

import (
	"fmt"
	"sync"
)

// A loanBook counts the arena memory that readers on this host keep after their Load, and enforces
// a maximum for it, because transfers cannot use that memory.
type loanBook struct {
	mu  sync.Mutex
	max int64
	// bytes is the size of the buffers with a loan. A buffer counts once and in full, because it is
	// freed only when its last piece is returned. Invariant: bytes <= max, unless setMax has lowered
	// max since the loans were taken.
	bytes int64
	loans int
}

// room returns ErrBusy if a further loan of sizeBytes would exceed max.
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

// setMax sets the maximum size of the lent memory. Existing loans stay.
func (b *loanBook) setMax(max int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.max = max
}

// take records that a reader keeps a part of h.
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

// give records that a reader has returned its part of h.
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

// Keep lends the part to a reader on this host. The bytes of the part stay unchanged until release
// is called, even after Done, after the eviction of the block and after the end of its epoch. Keep
// must be called before Done. release must be called once, from any goroutine, before the Node is
// closed. Keep returns ErrBusy if Options.LoanBytesMax would be exceeded.
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
