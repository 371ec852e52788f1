package tcp

import (
	"errors"
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/handshake"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// railState is the state of a rail.
type railState uint8

const (
	// railDown: the rail has no connections.
	railDown railState = iota
	// railDialing: the engine that dialed the session is opening connections.
	railDialing
	// railUp: the connections carry frames.
	railUp
	// railDying: the connections are closed, but readers or writers are still running.
	railDying
)

// String returns the name of the state for logs.
func (x railState) String() string {
	return [...]string{"down", "connecting", "up", "being taken down"}[x]
}

// rail is a local NIC, a NIC of the peer, and the connections between the two NICs. A rail fails
// as a whole and comes up again under a new generation. Fields that change are guarded by
// session.Mu.
type rail struct {
	s         *session
	index     int
	connsEach int // in each lane, including the control connection

	// nic is the local NIC. At the engine that dialed the session it is fixed. At the engine that
	// accepted the session it is the NIC that accepted the latest generation.
	nic *nic

	state      railState
	generation uint32
	// conns are the connections of this generation, lane after lane; empty unless up or dying.
	conns []*conn
	// resetting are connections of an earlier generation with packets that may still be in a queue
	// of this host. They are kept until the peer cannot place these packets.
	resetting []*conn
	// running is the number of running readers and writers of conns. ends is the number of
	// connections whose incoming stream has ended.
	running, ends int
	// why is the reason why the rail is not up.
	why error
	// peerDown is the last generation that the peer has reported as down. fenced: peerDown
	// includes the rail's generation, and the rail is down at this engine too. Then no piece that
	// was sent on the rail can land any more, and unacked pieces may be sent over other rails.
	peerDown uint32
	fenced   bool
	// assembly collects accepted connections of the next generation.
	assembly *assembly
}

// assembly is the set of accepted connections of a rail's next generation.
type assembly struct {
	generation uint32
	conns      []*conn
	joined     int
	// done is closed when the rail is up, or when it cannot come up because of err.
	done chan struct{}
	err  error
}

// errPeerDropped is the reason of a rail that the peer took down.
var errPeerDropped = errors.New("the peer took it down")

// errRailBusy: at the accepting engine, the last generation of the rail has not ended yet.
var errRailBusy = errors.New("not yet free on this side")

// attach puts the connections of a new generation into service. It adds two to running for each
// connection, for its reader and writer. start starts these goroutines; abandon subtracts them
// again.
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
	r.forgetLocked() // the peer has closed all earlier generations
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

// start starts the reader and the writer of a connection, which attach has counted.
func (c *conn) start() {
	go func() {
		defer c.goroutinesEnded(1)
		c.read()
	}()
	go func() {
		defer c.goroutinesEnded(1)
		c.write()
	}()
}

// abandon subtracts the goroutines that attach counted, for a connection that is not started.
func (c *conn) abandon(why error) {
	c.s.drop(c.rail, c.generation, why)
	c.goroutinesEnded(2)
}

// goroutinesEnded records that n goroutines of a connection have ended. After the last goroutine
// of a failed rail, the rail is down at this engine.
func (c *conn) goroutinesEnded(n int) {
	s, r := c.s, c.rail
	s.Mu.Lock()
	r.running -= n
	if r.running == 0 && r.state == railDying && s.Why == nil {
		s.railDownLocked(r)
	}
	s.Mu.Unlock()
	for range n {
		s.running.Done()
	}
}

// drop takes a generation of a rail out of service. The session ends with its last rail.
func (s *session) drop(r *rail, generation uint32, why error) {
	s.Mu.Lock()
	if s.Why != nil || r.state != railUp || r.generation != generation {
		s.Mu.Unlock()
		return
	}
	closed := errors.Is(why, sessions.ErrPeerClosed)
	s.peerClosed = s.peerClosed || closed
	if s.up == 1 {
		if s.peerClosed && !closed && s.idleLocked() {
			why = fmt.Errorf("rdma: %v %w: %w", s.Peer, sessions.ErrPeerClosed, rdma.ErrPeerDied)
		}
		conns, first := s.beginEndLocked(why)
		s.Mu.Unlock()
		if first {
			s.finishEnd(conns)
		}
		return
	}
	unacked := s.Active > 0
	if !closed {
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
		l.wake() // other connections replace the woken connections that have failed
	}
	s.Mu.Unlock()
	for _, c := range conns {
		c.close(unacked)
	}
	s.e.logRail(r, conns[0].nic, why, closed)
}

// controlConn returns the rail's connection for messages and acks, which is in the lane of the
// highest class. If the rail has several connections, this connection carries nothing else, because
// messages would wait behind the payload in a slow NIC's socket queue. The rail must be up or
// dying.
func (r *rail) controlConn() *conn { return r.conns[(len(r.s.lanes)-1)*r.connsEach] }

// electLocked chooses the rail whose control connection carries the session's messages.
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

// railDownLocked marks a rail as down at this engine, after its last reader and writer have ended.
// It repeats the acks that may have been lost with the rail, and then reports to the peer that the
// rail is down.
func (s *session) railDownLocked(r *rail) {
	r.state = railDown
	for _, c := range r.conns {
		s.acksOwed -= len(c.acks)
	}
	r.resetting, r.conns = r.conns, nil
	if to := s.controlLocked(); to != nil {
		s.reackLocked(r, to)
		s.reportDownLocked(to)
		s.fenceLocked(r)
	}
}

// reportDownLocked reports to the peer all rails that are down at this engine. It includes rails
// that it has reported before, because an earlier report may have been lost with another rail.
func (s *session) reportDownLocked(to *conn) {
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

// peerTookDown handles the peer's report that it has closed a generation of a rail.
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

// forgetLocked releases the connections in resetting. It is called once the peer cannot place their
// packets any more.
func (r *rail) forgetLocked() {
	for _, c := range r.resetting {
		if c.w.splicer != nil {
			c.w.splicer.forget()
		}
	}
	r.resetting = nil
}

// fenceLocked does nothing until a rail is down at both engines. It then sends the rail's unacked
// frames over the other rails, and makes the engine that dialed the session dial the rail again.
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
		s.redialLocked(r, redialPauseMin, nil)
	}
}

// Pauses between attempts to dial a rail again.
const (
	redialPauseMin = 100 * time.Millisecond
	redialPauseMax = 5 * time.Second
)

// redialLocked starts the goroutine that dials a rail again in a session that this engine dialed.
// The first attempt is made after pause. result, if set, receives the result of the first attempt.
func (s *session) redialLocked(r *rail, pause time.Duration, result chan<- error) {
	s.running.Add(1)
	go func() {
		defer s.running.Done()
		s.redial(r, pause, result)
	}()
}

// redial dials until the rail is up or the session ends.
func (s *session) redial(r *rail, pause time.Duration, result chan<- error) {
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
		err := s.bringUp(r)
		if result != nil {
			result <- err
			result = nil
		}
		if err == nil || s.Dead() {
			return
		}
		if errors.Is(err, handshake.ErrGone) {
			s.Fail(fmt.Errorf("rdma: %v has ended the session: %w", s.Peer, rdma.ErrPeerDied))
			return
		}
		pause = min(max(2*pause, redialPauseMin), redialPauseMax)
	}
}

// bringUp makes one attempt to dial a rail.
func (s *session) bringUp(r *rail) error {
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
				c.start() // also if the session has ended: the session waits for these goroutines
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
		s.reportDownLocked(s.controlLocked())
	}
	s.Mu.Unlock()
	return err
}

// activate adds the session to the engine when its first rail is up.
func (s *session) activate() (err error) {
	s.activating.Do(func() {
		if err = s.e.core.Activate(s); err != nil {
			s.Fail(err)
		}
	})
	return err
}
