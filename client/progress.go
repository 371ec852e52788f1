package client

import (
	"sync"
	"sync/atomic"
)

// ReadProgress is how far a Read has come.
type ReadProgress struct {
	// Blocks is what ReadResult.Blocks will be at least: every block before it is in
	// memory and verified.
	Blocks int
	// Bytes of the pieces have arrived, verified or not. It says how fast a Read is,
	// not what can be used.
	Bytes int64
}

// progress calls a Read's Progress.
type progress struct {
	tell func(ReadProgress)
	// total is what the pieces have, step how many bytes are worth a call: those of
	// the smallest piece.
	total, step int64
	landed      atomic.Int64

	// mu makes one call at a time.
	mu     sync.Mutex
	told   ReadProgress
	blocks int
}

// newProgress returns nil if the caller does not ask for progress.
func (r *reading) newProgress() *progress {
	if r.req.Progress == nil || len(r.pieces) == 0 {
		return nil
	}
	p := &progress{tell: r.req.Progress, step: r.pieceBytes(r.pieces[0].Group)}
	for _, x := range r.pieces {
		n := r.pieceBytes(x.Group)
		p.total += n
		p.step = min(p.step, n)
	}
	return p
}

// add counts n bytes that have landed; n is negative where they are to come again.
func (p *progress) add(n int64) {
	if sum := p.landed.Add(n); sum/p.step != (sum-n)/p.step {
		p.report()
	}
}

// attemptBytes are what landed in one attempt. A nil one does nothing.
type attemptBytes struct {
	progress *progress
	landed   atomic.Int64
}

// attempt begins to count.
func (p *progress) attempt() *attemptBytes {
	if p == nil {
		return nil
	}
	return &attemptBytes{progress: p}
}

func (a *attemptBytes) add(n int64) {
	a.landed.Add(n)
	a.progress.add(n)
}

// end is called when nothing lands any more: what was delivered counts, neither
// what failed nor what came twice.
func (a *attemptBytes) end(delivered int64) {
	if a != nil {
		a.progress.add(delivered - a.landed.Load())
	}
}

// verified notes the length of the verified prefix.
func (p *progress) verified(blocks int) {
	p.mu.Lock()
	p.blocks = max(p.blocks, blocks)
	p.mu.Unlock()
	p.report()
}

// report calls the caller, if there is something new to say.
func (p *progress) report() {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := ReadProgress{Blocks: p.blocks, Bytes: max(p.told.Bytes, min(p.landed.Load(), p.total))}
	if now != p.told {
		p.told = now
		p.tell(now)
	}
}

// prefix is how many blocks from the first on are verified, of which each piece
// that was asked for has arrived.
func (r *reading) prefix() int {
	n := len(r.ids)
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.states {
		if !r.states[i].delivered {
			n = min(n, r.pieces[i].Block)
		}
	}
	return n
}

// delivered is how many bytes of the task have arrived.
func (r *reading) delivered(t *readTask) (n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, i := range t.pieces {
		if r.states[i].delivered {
			n += r.pieceBytes(r.pieces[i].Group)
		}
	}
	return n
}
