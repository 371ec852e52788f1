package storage

import (
	"context"
	"errors"
	"time"
)

// rewritePause is the time between two passes over a volume if the earlier pass left blocks of older keys.
const rewritePause = time.Minute

// A rewriter writes the blocks of one volume anew that are encrypted with an older key than new blocks, or are plain although
// new blocks are encrypted. It moves them as a mover does, so a block is served meanwhile, and a crash leaves the old slot
// or the new one. Unlike a draining it evicts if there is no free slot for the first batch. The slots that each batch leaves have room
// for the next one. A volume that drains is not rewritten: its blocks get the newest key on the other volumes.
type rewriter struct {
	// logged is the text of the last error that run has logged. The same text is not logged again.
	logged string
}

// rewrites reports whether blocks of the volume are to be rewritten.
func (m *mover) rewrites() bool {
	return m.rewriteRate() > 0 && m.node.store.OutdatedSlots(m.volume) > 0
}

// rewriteRate returns the bytes per second that the mover may rewrite, 0 while the volume drains.
func (m *mover) rewriteRate() int64 {
	if m.draining() {
		return 0
	}
	return m.node.limits.Load().RewriteBytesPerSecond
}

// run makes one pass. It returns the time of the next one, or nil if no block is left.
func (w *rewriter) run(m *mover) (again <-chan time.Time) {
	n := m.node
	p := m.newPass()
	p.rewrite = true
	done := int64(0)
	p.run(n.stopped, func() bool {
		moved := p.moved - done
		done = p.moved
		rate := m.rewriteRate()
		return rate > 0 && m.pace(n.stopped, moved, rate)
	})
	if n.stopped.Err() != nil {
		return nil
	}
	left := n.store.OutdatedSlots(m.volume)
	if left == 0 {
		n.opts.Logger.Info("no block of the volume needs an older encryption key", "volume", m.volume)
		w.logged = ""
		return nil
	}
	if text := p.stalled.Error(); text != w.logged && !errors.Is(p.stalled, errNotMatchable) {
		n.opts.Logger.Warn("some blocks keep an older encryption key, or are plain; they are tried again", "volume", m.volume, "blocks", left, "err", p.stalled)
		w.logged = text
	}
	return time.After(rewritePause)
}

// pace waits for the time that movedBytes take at the rate bytesPerSecond. It returns false if the node stops or if another
// goroutine has woken the mover: the volume may drain now, or the rate may have changed.
func (m *mover) pace(ctx context.Context, movedBytes, bytesPerSecond int64) bool {
	if movedBytes == 0 {
		return true
	}
	wait := time.NewTimer(time.Duration(float64(movedBytes) / float64(bytesPerSecond) * float64(time.Second)))
	defer wait.Stop()
	select {
	case <-wait.C:
		return true
	case <-m.kick:
		m.wake()
		return false
	case <-ctx.Done():
		return false
	}
}

// encryptable returns the blocks that have no more layers than an encrypted slot can have. The others stay plain.
func (p *pass) encryptable(blocks []moving) (left []moving) {
	for _, b := range blocks {
		if _, err := p.mover.node.store.SlotLayout(b.key.PayloadBytes, b.key.Layers); err != nil {
			p.stall(err)
			continue
		}
		left = append(left, b)
	}
	return left
}

// wakeMovers wakes all movers. Each then checks whether its volume drains or has blocks to rewrite.
func (n *Node) wakeMovers() {
	for _, m := range n.movers {
		m.wake()
	}
}
