package tcp

import (
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/rdma"
)

// watchState is what the watch remembers of a connection between its rounds.
type watchState struct {
	lastRx, lastTx         uint64
	silentTicks, idleTicks uint64
}

// ticksPerHeartbeat is how many rounds of the watch fit in a heartbeat.
const ticksPerHeartbeat = 4

// watch is the goroutine that sends heartbeats and declares peers dead. Time is
// counted in rounds, not read from a clock: when this process stands still
// (suspended, starved), its peers do not age.
func (e *Engine) watch() {
	interval := e.interval()
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	silence := ceilDiv(e.opts.IdleTimeout, interval)
	railSilence := ceilDiv(e.opts.NICTimeout, interval)
	transfer := ceilDiv(e.opts.TransferTimeout, interval)
	for {
		select {
		case <-ticker.C:
		case <-e.ctx.Done():
			return
		}
		now := e.ticks.Add(1)
		for _, s := range e.sessions() {
			s.watch(railSilence, silence)
			if now > transfer && s.overdue(now-transfer) {
				e.stats.PeersTimedOut.Add(1)
				s.fail(fmt.Errorf("rdma: %v did not end an operation in %v: %w", s.peer, e.opts.TransferTimeout, rdma.ErrPeerDied))
			}
		}
	}
}

// interval is the time between two rounds of the watch.
func (e *Engine) interval() time.Duration { return e.opts.HeartbeatInterval / ticksPerHeartbeat }

// watchLink looks at the interface of a NIC once a round. It has a goroutine of its own: the kernel
// answers late while interfaces are made or removed elsewhere on the host (its rtnl lock), and
// the peers must have their heartbeats meanwhile.
func (e *Engine) watchLink(n *nic) {
	ticker := time.NewTicker(e.interval())
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			n.look()
		case <-e.ctx.Done():
			return
		}
	}
}

// ceilDiv returns how many intervals cover d.
func ceilDiv(d, interval time.Duration) uint64 { return uint64((d + interval - 1) / interval) }

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
	s.mu.Lock()
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
	s.mu.Unlock()
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
		s.mu.Lock()
		last := s.up == 1
		s.mu.Unlock()
		if last { // counted first, as OnPeerDown may look
			s.e.stats.PeersTimedOut.Add(1)
		}
		s.drop(h.r, h.generation, fmt.Errorf("rdma: %v silent for %v: %w", s.peer, timeout, rdma.ErrPeerDied))
	}
}

// watch returns for how many rounds nothing has come on the connection, and
// sends a heartbeat on it where nothing has gone; the caller holds the session's
// mu.
func (c *conn) watch() (silentTicks uint64) {
	if rx := c.rx.Load(); rx != c.lastRx {
		c.lastRx, c.silentTicks = rx, 0
	} else {
		c.silentTicks++
	}
	if tx := c.tx.Load(); tx != c.lastTx {
		c.lastTx, c.idleTicks = tx, 0
	} else if c.idleTicks++; c.idleTicks >= ticksPerHeartbeat-1 {
		c.idleTicks = 0
		c.beat = true
		c.signal()
	}
	return c.silentTicks
}
