package tcp

import (
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// watch is the goroutine that sends heartbeats and declares peers dead.
func (e *Engine) watch() {
	rounds := func(d time.Duration) uint64 { return sessions.Rounds(d, e.opts.HeartbeatInterval) }
	silence, railSilence, transfer := rounds(e.opts.IdleTimeout), rounds(e.opts.NICTimeout), rounds(e.opts.TransferTimeout)
	e.core.Watch(e.opts.HeartbeatInterval, e.opts.IdleTimeout, func(now uint64) {
		for _, s := range e.core.Sessions() {
			s.watch(railSilence, silence)
			if s.Overdue(now, transfer) {
				e.core.PeersTimedOut.Add(1)
				s.Fail(fmt.Errorf("rdma: %v did not end an operation in %v: %w", s.Peer, e.opts.TransferTimeout, rdma.ErrPeerDied))
			}
		}
	})
}

// watchLink checks the interface of a NIC once a round. It has its own goroutine because the
// kernel answers late while interfaces are created or removed on the host (its rtnl lock).
// Heartbeats must continue in the meantime.
func (e *Engine) watchLink(n *nic) {
	ticker := time.NewTicker(sessions.WatchInterval(e.opts.HeartbeatInterval))
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			n.look()
		case <-e.core.Ctx.Done():
			return
		}
	}
}

// watch checks each rail once. It takes down a rail whose NIC has no link, and a rail on which
// nothing has arrived for too long. The limit is railSilence while another rail of the session
// receives. For the last rail the limit is silence, after which the session ends.
func (s *session) watch(railSilence, silence uint64) {
	type heard struct {
		r          *rail
		nic        *nic
		generation uint32
		ticks      uint64
	}
	var rails []heard
	least := ^uint64(0)
	s.Mu.Lock()
	for _, r := range s.rails {
		if r.state != railUp {
			continue
		}
		ticks := uint64(0)
		for _, c := range r.conns {
			ticks = max(ticks, c.watch())
		}
		least = min(least, ticks)
		rails = append(rails, heard{r, r.nic, r.generation, ticks})
	}
	s.Mu.Unlock()
	for _, h := range rails {
		if why := h.nic.fault(); why != nil && len(rails) > 1 {
			s.drop(h.r, h.generation, why)
			continue
		}
		limit, timeout := silence, s.e.opts.IdleTimeout
		if least < railSilence {
			limit, timeout = railSilence, s.e.opts.NICTimeout
		}
		if h.ticks <= limit {
			continue
		}
		s.Mu.Lock()
		last := s.up == 1
		s.Mu.Unlock()
		if last { // counted first: OnPeerDown may read the counter
			s.e.core.PeersTimedOut.Add(1)
		}
		s.drop(h.r, h.generation, fmt.Errorf("rdma: %v silent for %v: %w", s.Peer, timeout, rdma.ErrPeerDied))
	}
}

// watch returns the number of rounds in which nothing has arrived on the connection. It sends a
// heartbeat if nothing was sent. The caller holds the session's mu.
func (c *conn) watch() (silentTicks uint64) {
	silent, beat := c.silence.Look(c.rx.Load(), c.tx.Load())
	if beat {
		c.beat = true
		c.signal()
	}
	return silent
}
