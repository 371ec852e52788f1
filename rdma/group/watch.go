package group

import (
	"errors"
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// watchState is the state of a session that the watch goroutine keeps between its rounds.
type watchState struct {
	silence   sessions.Silence
	lastUps   uint32
	downTicks uint64
}

// watch is the goroutine that sends heartbeats, declares peers dead, and breaks endpoints on which
// a Work does not complete.
func (e *Engine) watch() {
	rounds := func(d time.Duration) uint64 { return sessions.Rounds(d, e.opts.HeartbeatInterval) }
	silence, transfer := rounds(e.opts.IdleTimeout), rounds(e.opts.TransferTimeout)
	stall, opening := rounds(e.opts.StallTimeout), rounds(e.opts.HandshakeTimeout)
	e.core.Watch(e.opts.HeartbeatInterval, e.opts.IdleTimeout, func(now uint64) {
		for _, s := range e.core.Sessions() {
			why := s.watch(silence)
			if why == nil && s.Overdue(now, transfer) {
				why = fmt.Errorf("rdma: %v did not end an operation in %v: %w", s.Peer, e.opts.TransferTimeout, rdma.ErrPeerDied)
			}
			if why != nil {
				e.core.PeersTimedOut.Add(1)
				s.Fail(why)
				continue
			}
			for _, l := range s.lanes {
				l.watch(now, stall, opening)
			}
		}
	})
}

// watch checks a session once. If the peer is dead, it returns the reason.
func (s *session) watch(silence uint64) error {
	silent, beat := s.silence.Look(s.ctl.rx.Load(), s.ctl.tx.Load())
	if silent > silence {
		return fmt.Errorf("rdma: %v silent for %v: %w", s.Peer, s.e.opts.IdleTimeout, rdma.ErrPeerDied)
	}
	if beat {
		s.ctl.heartbeat()
	}
	if ups := s.ups.Load(); ups != s.lastUps || s.healthy() {
		s.lastUps, s.downTicks = ups, 0
	} else if s.downTicks++; s.downTicks > silence {
		return fmt.Errorf("rdma: no NIC reached %v for %v (%w): %w", s.Peer, s.e.opts.IdleTimeout, s.downReason(), rdma.ErrPeerDied)
	}
	return nil
}

// healthy reports whether a lane is up and either the session is idle, or the lane's last attempt
// did not fail, or the target has answered a Work on the lane's endpoint. A lane that keeps coming
// up while the target answers none of its Works is not healthy.
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

// downReason returns why a lane is down.
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

// watch breaks the lane's endpoint if a Work on it has not completed for stall rounds, or if the
// endpoint has been opening for longer than opening rounds.
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
