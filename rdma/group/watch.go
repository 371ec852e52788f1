package group

import (
	"errors"
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/rdma"
)

// watchState is what the watch remembers of a session between its rounds.
type watchState struct {
	lastRx, lastTx                    uint64
	lastUps                           uint32
	silentTicks, idleTicks, downTicks uint64
}

// ticksPerHeartbeat is how many rounds of the watch fit in a heartbeat.
const ticksPerHeartbeat = 4

// watch is the goroutine that sends heartbeats, declares peers dead and gives up
// endpoints that stall. Time is counted in rounds, not read from a clock: when
// this process stands still (suspended, starved), its peers do not age.
func (e *Engine) watch() {
	interval := e.opts.HeartbeatInterval / ticksPerHeartbeat
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	silence := ceilDiv(e.opts.IdleTimeout, interval)
	transfer := ceilDiv(e.opts.TransferTimeout, interval)
	stall := ceilDiv(e.opts.StallTimeout, interval)
	opening := ceilDiv(e.opts.HandshakeTimeout, interval)
	for {
		select {
		case <-ticker.C:
		case <-e.ctx.Done():
			return
		}
		now := e.ticks.Add(1)
		for _, s := range e.sessions() {
			why := s.watch(silence)
			if why == nil && now > transfer && s.overdue(now-transfer) {
				why = fmt.Errorf("rdma: %v did not end an operation in %v: %w", s.peer, e.opts.TransferTimeout, rdma.ErrPeerDied)
			}
			if why != nil {
				e.stats.PeersTimedOut.Add(1)
				s.fail(why)
				continue
			}
			for _, l := range s.lanes {
				l.watch(now, stall, opening)
			}
		}
	}
}

// ceilDiv returns how many intervals cover d.
func ceilDiv(d, interval time.Duration) uint64 { return uint64((d + interval - 1) / interval) }

// watch looks at a session once; it returns why it is dead, if it is.
func (s *session) watch(silence uint64) error {
	c := s.ctl
	if rx := c.rx.Load(); rx != s.lastRx {
		s.lastRx, s.silentTicks = rx, 0
	} else if s.silentTicks++; s.silentTicks > silence {
		return fmt.Errorf("rdma: %v silent for %v: %w", s.peer, s.e.opts.IdleTimeout, rdma.ErrPeerDied)
	}
	if tx := c.tx.Load(); tx != s.lastTx {
		s.lastTx, s.idleTicks = tx, 0
	} else if s.idleTicks++; s.idleTicks >= ticksPerHeartbeat-1 {
		s.idleTicks = 0
		c.heartbeat()
	}
	if ups := s.ups.Load(); ups != s.lastUps || s.healthy() {
		s.lastUps, s.downTicks = ups, 0
	} else if s.downTicks++; s.downTicks > silence {
		return fmt.Errorf("rdma: no NIC reached %v for %v (%w): %w", s.peer, s.e.opts.IdleTimeout, s.downReason(), rdma.ErrPeerDied)
	}
	return nil
}

// healthy reports whether a lane is up that carries something, or would: one that
// came up again and again, and answered nothing that is in flight, does not.
func (s *session) healthy() bool {
	idle := s.idle()
	for _, l := range s.lanes {
		l.mu.Lock()
		ok := l.cur != nil && l.cur.state == endUp && (idle || l.failures == 0 || l.cur.worked)
		l.mu.Unlock()
		if ok {
			return true
		}
	}
	return false
}

// anyUp reports whether a lane is up.
func (s *session) anyUp() bool {
	for _, l := range s.lanes {
		if l.up.Load() {
			return true
		}
	}
	return false
}

// downReason says why lanes are down.
func (s *session) downReason() error {
	for _, l := range s.lanes {
		l.mu.Lock()
		why := l.why
		l.mu.Unlock()
		if why != nil {
			return why
		}
	}
	return errors.New("no endpoint was connected")
}

// watch gives up an endpoint on which a Work has not completed for stall rounds,
// or that has been opening for too long.
func (l *lane) watch(now, stall, opening uint64) {
	l.mu.Lock()
	en := l.cur
	var why error
	switch {
	case en == nil:
	case en.state == endOpening && en.tick+opening < now:
		why = fmt.Errorf("not connected in %v", l.s.e.opts.HandshakeTimeout)
	case en.state == endUp && en.inflight > 0:
		for i := range en.records {
			if r := &en.records[i]; r.used && r.tick+stall < now {
				why = fmt.Errorf("a work did not complete in %v", l.s.e.opts.StallTimeout)
				break
			}
		}
	}
	l.mu.Unlock()
	if why != nil {
		l.breakEnd(en, why)
	}
}
