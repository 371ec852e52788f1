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
	interval := e.opts.HeartbeatInterval / ticksPerHeartbeat
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	silence := ceilDiv(e.opts.IdleTimeout, interval)
	transfer := ceilDiv(e.opts.TransferTimeout, interval)
	for {
		select {
		case <-ticker.C:
		case <-e.ctx.Done():
			return
		}
		now := e.ticks.Add(1)
		for _, s := range e.sessions() {
			if c := s.watch(silence); c != nil {
				e.stats.peersTimedOut.Add(1)
				s.fail(fmt.Errorf("rdma: %v silent for %v: %w", s.peer, e.opts.IdleTimeout, rdma.ErrPeerDied))
			} else if now > transfer && s.overdue(now-transfer) {
				e.stats.peersTimedOut.Add(1)
				s.fail(fmt.Errorf("rdma: %v did not end an operation in %v: %w", s.peer, e.opts.TransferTimeout, rdma.ErrPeerDied))
			}
		}
	}
}

// ceilDiv returns how many intervals cover d.
func ceilDiv(d, interval time.Duration) uint64 { return uint64((d + interval - 1) / interval) }

// watch looks at each connection once; it returns one that has been silent for
// too long.
func (s *session) watch(silence uint64) *conn {
	for _, c := range s.conns {
		if rx := c.rx.Load(); rx != c.lastRx {
			c.lastRx, c.silentTicks = rx, 0
		} else if c.silentTicks++; c.silentTicks > silence {
			return c
		}
		if tx := c.tx.Load(); tx != c.lastTx {
			c.lastTx, c.idleTicks = tx, 0
		} else if c.idleTicks++; c.idleTicks >= ticksPerHeartbeat-1 {
			c.idleTicks = 0
			c.pushBeat()
		}
	}
	return nil
}
