package tcp

import (
	"errors"
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/handshake"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// railState is where a rail is in its life.
type railState uint8

const (
	// railDown: it has no connections.
	railDown railState = iota
	// railDialing: its dialer is opening connections.
	railDialing
	// railUp: its connections carry frames.
	railUp
	// railDying: its connections are closed, and a reader or writer may still be
	// in the middle of something.
	railDying
)

// String returns a word for people.
func (x railState) String() string {
	return [...]string{"down", "connecting", "up", "being taken down"}[x]
}

// rail is a NIC of ours and a NIC of the peer, and the connections between
// them. It goes down as a whole and comes up again under a new generation. All
// fields are guarded by session.Mu, but for those that never change.
type rail struct {
	s         *session
	index     int
	connsEach int // in each lane, the control connection included

	// nic is ours: of the side that dialed for good, otherwise the one that the
	// latest generation came in by.
	nic *nic

	state      railState
	generation uint32
	// conns of this generation, lane after lane; empty unless up or dying.
	conns []*conn
	// resetting are connections of an earlier generation whose packets may not all have
	// left this host, until the peer cannot place them any more.
	resetting []*conn
	// running counts their readers and writers, ends those whose stream has ended.
	running, ends int
	// why the rail is not up.
	why error
	// peerDown is the last generation of which the peer said that nothing of it
	// is left on its side. fenced is set once that is so of our generation and on
	// our side too: what was sent on the rail and not acked may then be sent over
	// others, as no piece of it can land any more.
	peerDown uint32
	fenced   bool
	// assembly collects accepted connections of the next generation.
	assembly *assembly
}

// assembly is a generation of a rail of which connections have been accepted.
type assembly struct {
	generation uint32
	conns      []*conn
	joined     int
	// done is closed when the rail is up, or when err says why it will not be.
	done chan struct{}
	err  error
}

// errPeerDropped is why a rail goes down that the peer took down.
var errPeerDropped = errors.New("the peer took it down")

// errRailLater: the acceptor has not seen the end of the rail's last
// generation.
var errRailLater = errors.New("not yet free on this side")

// attach puts the connections of a new generation into service. It counts two
// goroutines for each, which start begins or abandon takes back.
func (r *rail) attach(generation uint32, conns []*conn) error {
	s := r.s
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if s.Why != nil {
		return s.GoneLocked()
	}
	if r.peerDown >= generation || r.generation > generation || r.state == railUp || r.state == railDying {
		return fmt.Errorf("generation %d of rail %d: %w", generation, r.index, errPeerDropped)
	}
	r.state, r.generation, r.fenced, r.why = railUp, generation, false, nil
	r.conns = conns
	r.forgetLocked() // the peer has nothing left of an earlier generation
	r.running, r.ends = 2*len(conns), 0
	s.running.Add(r.running)
	s.up++
	for _, c := range conns {
		c.rail, c.generation, c.lane = r, generation, s.lanes[c.laneIndex]
		c.control = r.connsEach > 1 && c == r.controlConn()
		if !c.control {
			c.lane.add(c)
		}
	}
	if s.messenger == nil {
		s.messenger = r.controlConn()
	}
	if s.Remote == "" {
		s.Remote = conns[0].nc.RemoteAddr().String()
	}
	return nil
}

// start begins the reader and the writer of a connection that attach counted.
func (c *conn) start() {
	go func() {
		defer c.left(1)
		c.read()
	}()
	go func() {
		defer c.left(1)
		c.write()
	}()
}

// abandon takes back what attach counted for a connection that is not started.
func (c *conn) abandon(why error) {
	c.s.drop(c.rail, c.generation, why)
	c.left(2)
}

// left notes that n goroutines of a connection have ended. With the last one
// the rail is down on our side.
func (c *conn) left(n int) {
	s, r := c.s, c.rail
	s.Mu.Lock()
	r.running -= n
	if r.running == 0 && r.state == railDying && s.Why == nil {
		s.layDownLocked(r)
	}
	s.Mu.Unlock()
	for range n {
		s.running.Done()
	}
}

// drop takes a generation of a rail out of service; with the last rail the
// session ends.
func (s *session) drop(r *rail, generation uint32, why error) {
	s.Mu.Lock()
	if s.Why != nil || r.state != railUp || r.generation != generation {
		s.Mu.Unlock()
		return
	}
	hungUp := errors.Is(why, sessions.ErrHungUp)
	s.quiet = s.quiet || hungUp
	if s.up == 1 {
		if s.quiet && !hungUp && s.idleLocked() {
			why = fmt.Errorf("rdma: %v %w: %w", s.Peer, sessions.ErrHungUp, rdma.ErrPeerDied)
		}
		conns, first := s.condemnLocked(why)
		s.Mu.Unlock()
		if first {
			s.failed(conns)
		}
		return
	}
	unacked := s.Active > 0
	if !hungUp {
		s.e.railsLost.Add(1)
	}
	s.up--
	r.state, r.why = railDying, why
	for _, c := range r.conns {
		c.lane.remove(c)
		close(c.gone)
	}
	conns := r.conns
	s.electLocked()
	for _, l := range s.lanes {
		l.wake() // what the dead connections had been woken for
	}
	s.Mu.Unlock()
	for _, c := range conns {
		c.hangUp(unacked)
	}
	s.e.logRail(r, conns[0].nic, why, hungUp)
}

// controlConn is the connection of messages and acks, and of nothing else where the
// rail has several: they would wait behind all that a slow NIC has in its socket's
// queue. It belongs to the highest class. The rail is up or dying.
func (r *rail) controlConn() *conn { return r.conns[(len(r.s.lanes)-1)*r.connsEach] }

// electLocked chooses the connection for messages.
func (s *session) electLocked() {
	s.messenger = s.controlLocked()
	if s.messenger != nil && !s.messages.empty() {
		s.messenger.signal()
	}
}

// controlLocked returns the control connection of a rail that is up, or nil.
func (s *session) controlLocked() *conn {
	for _, r := range s.rails {
		if r.state == railUp {
			return r.controlConn()
		}
	}
	return nil
}

// layDownLocked is the end of a rail on our side: no reader or writer of it is
// left. The peer is told, after the acks that may have been lost with it.
func (s *session) layDownLocked(r *rail) {
	r.state = railDown
	for _, c := range r.conns {
		s.acksOwed -= len(c.acks)
	}
	r.resetting, r.conns = r.conns, nil
	if to := s.controlLocked(); to != nil {
		s.reackLocked(r, to)
		s.tellDownLocked(to)
		s.fenceLocked(r)
	}
}

// tellDownLocked tells the peer which rails are down here: all of them each
// time, as what was told before may have been lost with another rail.
func (s *session) tellDownLocked(to *conn) {
	if to == nil {
		return
	}
	for _, r := range s.rails {
		if r.state == railDown && r.generation > 0 {
			to.downs = append(to.downs, down{uint32(r.index), r.generation})
		}
	}
	to.signal()
}

// peerTookDown takes the peer's word that nothing is left of a generation of a
// rail on its side.
func (s *session) peerTookDown(index, generation uint32) error {
	if int(index) >= len(s.rails) {
		return fmt.Errorf("rail %d of %d is down: %w", index, len(s.rails), errFrame)
	}
	r := s.rails[index]
	s.Mu.Lock()
	r.peerDown = max(r.peerDown, generation)
	if r.state == railUp && r.generation <= generation {
		now := r.generation
		s.Mu.Unlock()
		s.drop(r, now, fmt.Errorf("rdma: rail %d to %v: %w", index, s.Peer, errPeerDropped))
		return nil
	}
	s.fenceLocked(r)
	s.Mu.Unlock()
	return nil
}

// forgetLocked forgets the connections whose packets the peer cannot place any more.
func (r *rail) forgetLocked() {
	for _, c := range r.resetting {
		if c.w.splicer != nil {
			c.w.splicer.forget()
		}
	}
	r.resetting = nil
}

// fenceLocked, once a rail is down on both sides, sends what was given to it
// over the others, and lets the side that dialed try it again.
func (s *session) fenceLocked(r *rail) {
	if s.Why != nil || r.state != railDown || r.fenced || r.peerDown < r.generation {
		return
	}
	r.fenced = true
	r.forgetLocked()
	for _, o := range s.Ops {
		if !o.Submitted || o.acked {
			continue
		}
		for i, via := range o.via {
			if int(via) != r.index {
				continue
			}
			o.via[i] = unsentRail
			o.unsent++
			if o.kind == frameMessage {
				s.messages.push(o.frame(0))
				s.messenger.signal()
			} else {
				s.lane(o.Class).push(o.frame(uint32(i)))
			}
			s.e.framesResent.Add(1)
		}
	}
	for _, l := range s.lanes {
		l.wake()
	}
	if s.Dialed {
		s.mendLocked(r, mendFirst, nil)
	}
}

// Pauses between attempts to bring a rail up again.
const (
	mendFirst = 100 * time.Millisecond
	mendMax   = 5 * time.Second
)

// mendLocked starts the goroutine that brings a rail of a dialed session up,
// first after pause. told, if set, is given the outcome of the first attempt.
func (s *session) mendLocked(r *rail, pause time.Duration, told chan<- error) {
	s.running.Add(1)
	go func() {
		defer s.running.Done()
		s.mend(r, pause, told)
	}()
}

// mend dials until the rail is up or the session ends.
func (s *session) mend(r *rail, pause time.Duration, told chan<- error) {
	for {
		if pause > 0 {
			t := time.NewTimer(pause)
			select {
			case <-t.C:
			case <-s.Dying:
				t.Stop()
				return
			}
		}
		err := s.raise(r)
		if told != nil {
			told <- err
			told = nil
		}
		if err == nil || s.Dead() {
			return
		}
		if errors.Is(err, handshake.ErrGone) {
			s.Fail(fmt.Errorf("rdma: %v has ended the session: %w", s.Peer, rdma.ErrPeerDied))
			return
		}
		pause = min(max(2*pause, mendFirst), mendMax)
	}
}

// raise is one attempt to bring a rail up from the dialing side.
func (s *session) raise(r *rail) error {
	s.Mu.Lock()
	if s.Why != nil {
		s.Mu.Unlock()
		return s.Why
	}
	r.state = railDialing
	r.generation++
	generation := r.generation
	s.Mu.Unlock()
	conns, err := s.e.dialRail(s.ctx, s, r, generation)
	if err == nil {
		if err = r.attach(generation, conns); err == nil {
			err = s.activate()
			for _, c := range conns {
				c.start() // also where the session has ended: it waits for them
			}
			if err == nil {
				s.e.logRailUp(conns[0])
			}
			return err
		}
		for _, c := range conns {
			_ = c.nc.Close()
		}
	}
	s.Mu.Lock()
	r.state, r.why, r.fenced = railDown, err, true
	if s.Why == nil {
		s.tellDownLocked(s.controlLocked())
	}
	s.Mu.Unlock()
	return err
}

// activate makes the session known to the engine, with its first rail.
func (s *session) activate() (err error) {
	s.activating.Do(func() {
		if err = s.e.core.Activate(s); err != nil {
			s.Fail(err)
		}
	})
	return err
}
