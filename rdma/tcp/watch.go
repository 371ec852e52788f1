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
	e.core.Watch(e.opts.HeartbeatInterval, func(now uint64) {
		for _, s := range e.core.Sessions() {
			s.watch(railSilence, silence)
			if s.Overdue(now, transfer) {
				e.core.PeersTimedOut.Add(1)
				s.Fail(fmt.Errorf("rdma: %v did not end an operation in %v: %w", s.Peer, e.opts.TransferTimeout, rdma.ErrPeerDied))
			}
		}
	})
}

// watchLink looks at the interface of a NIC once a round. It has a goroutine of its own: the kernel
// answers late while interfaces are made or removed elsewhere on the host (its rtnl lock), and
// the peers must have their heartbeats meanwhile.
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

// watch looks at each rail once, and takes down those that have been silent for
// too long or whose NIC has no link. While another rail is heard of, that is
// railSilence; the last one is given silence, which is then the session's end.
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
		if last { // counted first, as OnPeerDown may look
			s.e.core.PeersTimedOut.Add(1)
		}
		s.drop(h.r, h.generation, fmt.Errorf("rdma: %v silent for %v: %w", s.Peer, timeout, rdma.ErrPeerDied))
	}
}

// watch returns for how many rounds nothing has come on the connection, and
// sends a heartbeat on it where nothing has gone; the caller holds the session's
// mu.
func (c *conn) watch() (silentTicks uint64) {
	silent, beat := c.silence.Look(c.rx.Load(), c.tx.Load())
	if beat {
		c.beat = true
		c.signal()
	}
	return silent
}
