package move

import (
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/server/storage"
)

// Phase is the phase of a Mover.
type Phase string

const (
	// Copying: blocks are compared and copied.
	Copying Phase = "copying"
	// Waiting: blocks are left that could not be copied. They are tried again.
	Waiting Phase = "waiting"
	// Done: every block was copied, or its new nodes had it. They may have evicted or lost some of them meanwhile, which are not
	// copied again: CopiedBlocks is the number of blocks that they had at the time Checked.
	Done Phase = "done"
)

// Progress is the state of a Mover.
type Progress struct {
	// Phase is empty if Run does not run.
	Phase Phase
	// Blocks and Bytes are the blocks that the node has, and Copied those of them that other members
	// have, as far as they were compared since Run began.
	Blocks, Bytes, CopiedBlocks, CopiedBytes int64
	// BytesPerSecond is the rate of the last seconds, and Rest the time that the rest takes at this
	// rate; 0: unknown.
	BytesPerSecond int64
	Rest           time.Duration
	// Left is the number of blocks that could not be copied in the last complete pass, and Reason why
	// the first of them was not. A block that several sequences have may count several times.
	Left   int64
	Reason string
	// Checked is the end of the last check, in which the other members were asked for all blocks after the copies; zero: there was none. CopiedBlocks is then
	// the number of blocks that they had, and of blocks that were copied later.
	Checked time.Time
}

// Totals are counters of copies. Several Movers, one after the other, may have the same Totals.
type Totals struct {
	// Blocks and Bytes count the blocks that were copied, and their payload.
	Blocks, Bytes atomic.Int64
	// Failures counts the blocks that could not be copied, once in each pass.
	Failures atomic.Int64
}

// Progress returns the present state.
func (m *Mover) Progress() Progress {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.progress
	p.CopiedBlocks, p.CopiedBytes = min(p.CopiedBlocks, p.Blocks), min(p.CopiedBytes, p.Bytes)
	if p.Phase != Copying {
		return p
	}
	p.BytesPerSecond = m.rate.perSecond(time.Now())
	if p.BytesPerSecond > 0 {
		p.Rest = time.Duration(float64(p.Bytes-p.CopiedBytes) / float64(p.BytesPerSecond) * float64(time.Second)).Round(time.Second)
	}
	return p
}

// setPhase records the phase.
func (m *Mover) setPhase(phase Phase) { m.set(func(p *Progress) { p.Phase = phase }) }

// set changes the progress.
func (m *Mover) set(change func(*Progress)) {
	m.mu.Lock()
	was := m.progress.Phase
	change(&m.progress)
	changed := m.progress.Phase != was
	m.mu.Unlock()
	if changed {
		m.opts.Changed()
	}
}

// begin begins a pass over blocks of which any, or none, are to be copied or compared. A pass over none does not change the phase. The
// phase and the number of blocks change together: Done is never shown with blocks that were not copied yet.
func (p *pass) begin(any bool, total storage.Removed) {
	p.set(func(now *Progress) {
		now.Blocks, now.Bytes = total.Blocks, total.Bytes
		if any {
			now.Phase = Copying
		}
	})
}

// endPass records the result of a pass.
func (m *Mover) endPass(p *pass) {
	m.mu.Lock()
	m.progress.Left, m.progress.Reason = p.left, p.reason
	blocks := m.progress.Blocks
	m.mu.Unlock()
	if p.left > 0 {
		m.log.Warn("blocks could not be copied to other nodes; they are tried again", "blocks", p.left, "of", blocks, "reason", p.reason)
		m.setPhase(Waiting)
		return
	}
	if now := m.Progress(); now.Phase != Done && now.CopiedBlocks < blocks {
		m.log.Warn("other nodes have evicted or lost blocks that were copied to them", "blocks", blocks-now.CopiedBlocks, "of", blocks)
	} else if now.Phase != Done {
		m.log.Info("other nodes have all blocks of this node", "blocks", blocks)
	}
	m.setPhase(Done)
}

// bits is a set of small numbers.
type bits []uint64

// add adds n, and reports whether it was absent.
func (b *bits) add(n uint32) bool {
	for int(n/64) >= len(*b) {
		*b = append(*b, make([]uint64, max(1024, len(*b)))...)
	}
	w := &(*b)[n/64]
	was := *w
	*w |= 1 << (n % 64)
	return was != *w
}

// window is the time over which a rate is computed.
const window = 10 * time.Second

// meter computes the rate of the bytes of the last window.
type meter struct {
	began  time.Time
	recent []sample
	bytes  int64
}

type sample struct {
	at    time.Time
	bytes int64
}

func (m *meter) add(now time.Time, bytes int64) {
	if m.began.IsZero() {
		m.began = now
	}
	m.recent = append(m.recent, sample{now, bytes})
	m.bytes += bytes
	m.expire(now)
}

func (m *meter) expire(now time.Time) {
	n := 0
	for n < len(m.recent) && now.Sub(m.recent[n].at) > window {
		m.bytes -= m.recent[n].bytes
		n++
	}
	m.recent = m.recent[n:]
}

func (m *meter) perSecond(now time.Time) int64 {
	m.expire(now)
	over := min(window, now.Sub(m.began))
	if m.began.IsZero() || over <= 0 {
		return 0
	}
	return int64(float64(m.bytes) / max(over.Seconds(), 1))
}
