package client

import (
	"math"
	"sync"
	"sync/atomic"
)

// ReadProgress is the progress of a Read.
type ReadProgress struct {
	// Blocks is a lower bound of the final ReadResult.Blocks: every block before it is in memory
	// and verified.
	Blocks int
	// Bytes is the number of bytes of the pieces that have arrived, verified or not. It measures
	// the speed of a Read. It does not show which blocks can be used.
	Bytes int64
}

// progress makes the calls of a Read's Progress function.
type progress struct {
	onProgress func(ReadProgress)
	// total is the size of all pieces in bytes. step is the size of the smallest piece in bytes. A
	// call is made each time landed passes a multiple of step.
	total, step int64
	landed      atomic.Int64

	// mu serialises the calls.
	mu       sync.Mutex
	reported ReadProgress
	blocks   int
}

// newProgress returns the progress of the Read, or nil if the caller does not request progress.
func (r *reading) newProgress() *progress {
	if r.req.Progress == nil || len(r.pieces) == 0 {
		return nil
	}
	p := &progress{onProgress: r.req.Progress, step: r.pieceBytes(r.pieces[0].Group)}
	for _, x := range r.pieces {
		n := r.pieceBytes(x.Group)
		p.total += n
		p.step = min(p.step, n)
	}
	return p
}

// add counts n landed bytes. n is negative for bytes that will be sent again.
func (p *progress) add(n int64) {
	if sum := p.landed.Add(n); sum/p.step != (sum-n)/p.step {
		p.report()
	}
}

// attemptBytes counts the bytes that landed in one attempt. A nil attemptBytes counts nothing.
type attemptBytes struct {
	progress *progress
	landed   atomic.Int64
}

// attempt returns a new counter for an attempt; nil if p is nil.
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

// end is called when no more bytes arrive. It replaces the number of the attempt's landed bytes by
// delivered, which counts neither failed pieces nor bytes that arrived twice.
func (a *attemptBytes) end(delivered int64) {
	if a != nil {
		a.progress.add(delivered - a.landed.Load())
	}
}

// verified records the length of the verified prefix.
func (p *progress) verified(blocks int) {
	p.mu.Lock()
	p.blocks = max(p.blocks, blocks)
	p.mu.Unlock()
	p.report()
}

// report calls the caller's function if the progress has changed.
func (p *progress) report() {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := ReadProgress{Blocks: p.blocks, Bytes: max(p.reported.Bytes, min(p.landed.Load(), p.total))}
	if now != p.reported {
		p.reported = now
		p.onProgress(now)
	}
}

// prefix returns the number of blocks, up to the last one that is read, whose requested pieces have
// all arrived and are verified. If a missing piece makes all pieces useless (allOrNothing), it
// returns 0 until no piece is missing.
func (r *reading) prefix() int {
	missing, last := math.MaxInt, -1
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, p := range r.pieces {
		last = max(last, p.Block)
		if !r.states[i].delivered {
			missing = min(missing, p.Block)
		}
	}
	if missing <= last && r.allOrNothing() {
		return 0
	}
	return min(missing, last+1)
}

// delivered returns the number of bytes of the task's pieces that have arrived and are verified.
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
