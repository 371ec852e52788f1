package group

import (
	"errors"
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// open makes a new endpoint for the lane (the link between two NICs, lane.go) and sends the
// endpoint's address to the peer. Only the engine that dialed the session calls open, at the
// beginning and after each break.
func (l *lane) open() {
	if !l.s.Dialed {
		return
	}
	l.mu.Lock()
	if l.stopped || l.cur != nil || l.opening != nil {
		l.mu.Unlock()
		return
	}
	l.epoch++
	epoch := l.epoch
	l.opening = make(chan struct{})
	l.mu.Unlock()
	en, err := l.makeEnd(epoch)
	if l.install(en, err) != nil {
		l.reopen(true)
	}
}

// makeEnd makes an endpoint on the lane's NIC.
func (l *lane) makeEnd(epoch uint32) (*end, error) {
	n := l.s.e.nics[l.nicIndex].Load()
	en := &end{lane: l, nic: n, epoch: epoch, closed: make(chan struct{}), tick: l.s.e.core.Ticks.Load()}
	if err := n.addEnd(en); err != nil {
		return nil, err
	}
	ep, err := n.dom.NewEndpoint(uint64(en.index), l.class)
	if err == nil && len(ep.Local()) > MaxEndpointAddr {
		err = fmt.Errorf("endpoint address of %d bytes, at most %d", len(ep.Local()), MaxEndpointAddr)
		ep.Shut()
		_ = ep.Close()
	}
	if err != nil {
		n.removeEnd(en)
		return nil, err
	}
	en.ep = ep
	depth := min(n.lim.QueueDepth, maxDepth)
	en.records = make([]record, depth)
	en.free = make([]uint32, depth)
	for i := range en.free {
		en.free[i] = uint32(depth - 1 - i)
	}
	if !l.s.e.counted {
		en.okTally, en.arrivedTally = make(map[uint32]uint32), make(map[uint32]uint32)
	}
	return en, nil
}

// maxDepth bounds the Works posted on one endpoint.
const maxDepth = 4096

// install makes en the lane's endpoint and sends its address. err is the error of makeEnd; if err
// is not nil, install only returns it. It returns an error if the session or the NIC has ended in
// the meantime. After an error the lane has no endpoint.
func (l *lane) install(en *end, err error) error {
	l.mu.Lock()
	close(l.opening)
	l.opening = nil
	if err == nil && l.stopped {
		err = rdma.ErrClosed
	}
	if err == nil && en.nic.dead.Load() {
		err = en.nic.reason()
	}
	if err != nil {
		l.why = err
		l.mu.Unlock()
		if en != nil {
			en.ep.Shut()
			_ = en.ep.Close()
			en.nic.removeEnd(en)
		}
		l.settle()
		return err
	}
	l.cur, l.last = en, en
	a := laneAddr{lane: uint16(l.index), epoch: en.epoch, serial: en.nic.serial, addr: en.ep.Local()}
	l.s.ctl.send(func(b []byte) []byte { return a.append(b) })
	l.mu.Unlock()
	// The NIC may have died before this endpoint was in l.cur. The NIC's poller has then not ended
	// the endpoint.
	if en.nic.dead.Load() {
		l.breakEnd(en, en.nic.reason())
	}
	return nil
}

// settle records that the lane has come up at both engines or has failed. Connect returns when all
// lanes have settled.
func (l *lane) settle() {
	l.mu.Lock()
	first := !l.settled
	l.settled = true
	l.mu.Unlock()
	if first {
		l.s.settleOne()
	}
}

// address handles the address of the peer's endpoint. The engine that accepted the session makes
// its own endpoint; the engine that dialed connects the endpoint it has. The session's reader
// calls address.
func (l *lane) address(a laneAddr) error {
	if l.s.Dialed {
		l.mu.Lock()
		en := l.cur
		if en == nil || en.epoch != a.epoch || en.state >= endClosing {
			l.mu.Unlock()
			return nil // this engine has ended that endpoint (epoch) and its report is on the way to the peer
		}
		if en.connecting || en.connected {
			l.mu.Unlock()
			return fmt.Errorf("second address for lane %d, epoch %d: %w", l.index, a.epoch, errFrame)
		}
		l.connectLocked(en, a)
		l.mu.Unlock()
		return nil
	}
	l.mu.Lock()
	if l.stopped {
		l.mu.Unlock()
		return nil
	}
	if l.cur != nil || l.opening != nil || a.epoch <= l.epoch {
		l.mu.Unlock()
		return fmt.Errorf("address for lane %d, epoch %d, during epoch %d: %w", l.index, a.epoch, l.epoch, errFrame)
	}
	l.epoch = a.epoch
	l.opening = make(chan struct{})
	l.mu.Unlock()
	en, err := l.makeEnd(a.epoch)
	if err = l.install(en, err); err != nil {
		d := laneDown{lane: uint16(l.index), epoch: a.epoch}
		l.s.ctl.send(func(b []byte) []byte { return d.append(b) })
		return nil
	}
	l.mu.Lock()
	if en.state == endOpening {
		l.connectLocked(en, a)
	}
	l.mu.Unlock()
	return nil
}

// connectLocked starts to connect en to the peer's endpoint.
func (l *lane) connectLocked(en *end, a laneAddr) {
	l.remoteSerial.Store(a.serial)
	en.connecting = true
	l.s.running.Go(func() {
		err := en.ep.Connect(a.addr)
		l.mu.Lock()
		en.connecting = false
		closing := en.state == endClosing
		if err == nil && !closing {
			en.connected = true
			r := laneReady{lane: uint16(l.index), epoch: en.epoch}
			l.s.ctl.send(func(b []byte) []byte { return r.append(b, frameLaneReady) })
		}
		l.mu.Unlock()
		switch {
		case closing:
			l.progress(en)
		case err != nil:
			l.breakEnd(en, fmt.Errorf("connect: %w", err))
		default:
			l.bringUp(en)
		}
	})
}

// ready handles the peer's report that its endpoint is connected.
func (l *lane) ready(r laneReady) {
	l.mu.Lock()
	en := l.cur
	if en == nil || en.epoch != r.epoch {
		l.mu.Unlock()
		return
	}
	en.peerReady = true
	l.mu.Unlock()
	l.bringUp(en)
}

// peerUp handles the acceptor's report that the lane is up. The goroutine that connected the local
// endpoint may not have called bringUp yet. Without peerUp, Connect could find a lane that is
// settled and not up.
func (l *lane) peerUp(r laneReady) {
	l.mu.Lock()
	en := l.cur
	l.mu.Unlock()
	if en != nil && en.epoch == r.epoch {
		l.bringUp(en)
	}
	l.settle()
}

// bringUp makes en available to operations if the endpoints of both engines are connected.
func (l *lane) bringUp(en *end) {
	l.mu.Lock()
	if en.state != endOpening || !en.connected || !en.peerReady {
		l.mu.Unlock()
		return
	}
	en.state = endUp
	l.why = nil
	l.up.Store(true)
	if l.failures == 0 {
		l.s.ups.Add(1)
	}
	if !l.s.Dialed {
		r := laneReady{lane: uint16(l.index), epoch: en.epoch}
		l.s.ctl.send(func(b []byte) []byte { return r.append(b, frameLaneUp) })
	}
	l.mu.Unlock()
	l.s.placeParked()
}

// breakEnd begins to close an endpoint. Only the reason of the first call is kept. Queued jobs
// move to other lanes immediately. For posted Works, the lane waits until both engines have
// reported which Works arrived. Any goroutine may call breakEnd, including the poller.
func (l *lane) breakEnd(en *end, cause error) {
	if l.beginClose(en, cause) {
		l.shut(en)
	}
}

// breakAfterPoll is breakEnd for an endpoint that its NIC reports broken. It shuts the endpoint
// only after all completions have been polled. An earlier shutdown would lose the completion that
// reports a refused Work, and the Work would be sent again and again.
func (l *lane) breakAfterPoll(en *end, cause error) {
	if l.beginClose(en, cause) {
		en.nic.drain(func() { l.shut(en) })
	}
}

// beginClose takes an endpoint out of use. It returns false if an earlier call has done so.
func (l *lane) beginClose(en *end, cause error) bool {
	l.mu.Lock()
	if en.state >= endClosing {
		l.mu.Unlock()
		return false
	}
	en.state, en.cause = endClosing, cause
	l.up.Store(false)
	l.why = cause
	jobs := append([]job(nil), l.queue[l.head:]...)
	for _, j := range jobs {
		l.load.Add(-j.load())
	}
	clear(l.queue)
	l.queue, l.head, l.ranks = l.queue[:0], 0, [rankBulk]int{}
	silent := l.stopped
	l.mu.Unlock()
	if !silent {
		l.s.e.core.Log.Info(sessions.LogPath, "endpoint ended", "peer", l.s.Peer.String(), "nic", en.nic.name, "why", cause)
	}
	l.settle()
	l.s.redistribute(jobs)
	return true
}

// shut shuts an endpoint after beginClose.
func (l *lane) shut(en *end) {
	en.ep.Shut()
	en.nic.drain(func() {
		l.mu.Lock()
		en.polled = true
		l.mu.Unlock()
		l.progress(en)
	})
}

// failWorks ends the remaining Works of en on a dead NIC. It is needed because a dead NIC returns
// no more completions.
func (l *lane) failWorks(en *end) {
	l.mu.Lock()
	for slot := range en.records {
		if r := en.records[slot]; r.used {
			en.broken = append(en.broken, r)
			l.load.Add(-r.load)
			en.drop(uint32(slot))
		}
	}
	l.mu.Unlock()
	l.progress(en)
}

// progress takes the next step in closing an endpoint. When no Work is in flight, it closes the
// endpoint and reports the arrived immediates to the peer. When the peer's report has arrived too,
// it sends the lost Works again and opens a new endpoint for the lane.
func (l *lane) progress(en *end) {
	l.mu.Lock()
	closes := en.state == endClosing && en.polled && en.inflight == 0 && en.finishing == 0 && !en.connecting
	if closes {
		en.state = endClosed
		en.reported = true
		if !l.stopped {
			l.reportLocked(en)
		}
	}
	resolves := en.state == endClosed && en.downComplete && !en.resolved && !l.stopped
	if resolves {
		// Both engines have sent their reports, so the peer may open the lane's next endpoint
		// (epoch) at any time.
		en.resolved = true
		l.cur = nil
	}
	l.mu.Unlock()
	if closes {
		_ = en.ep.Close()
		en.nic.removeEnd(en)
		close(en.closed)
	}
	if !resolves {
		return
	}
	if err := l.reconcile(en); err != nil {
		l.s.malformed(err)
		return
	}
	if l.s.withdrawn.pending.Load() > 0 {
		l.s.confirm()
	}
	l.reopen(!en.worked && !en.down.worked)
}

// reportLocked reports to the peer which immediates arrived on a closed endpoint.
func (l *lane) reportLocked(en *end) {
	d := laneDown{lane: uint16(l.index), epoch: en.epoch, arrived: en.arrived, worked: en.worked}
	for imm, n := range en.arrivedTally {
		d.tallies = append(d.tallies, tally{imm, n})
		if len(d.tallies) == maxTallies {
			d.more = true
			part := d
			l.s.ctl.send(func(b []byte) []byte { return part.append(b) })
			d.more, d.tallies = false, nil
		}
	}
	l.s.ctl.send(func(b []byte) []byte { return d.append(b) })
}

// talliesMax is the largest number of tallies that a peer may report for one endpoint. The tallies
// count the immediates since the last checkpoint and the immediates in flight at that checkpoint.
const talliesMax = 2*checkpointEvery + maxDepth

// ended handles the peer's report of the immediates that arrived on the peer's closed endpoint.
func (l *lane) ended(d laneDown) error {
	l.mu.Lock()
	en := l.cur
	if en == nil || en.epoch != d.epoch {
		l.mu.Unlock()
		return nil
	}
	if en.downComplete || len(en.down.tallies)+len(d.tallies) > talliesMax {
		l.mu.Unlock()
		return fmt.Errorf("lane %d, epoch %d: closed twice, or with more than %d tallies: %w", l.index, d.epoch, talliesMax, errFrame)
	}
	en.down.arrived, en.down.worked = d.arrived, d.worked
	en.down.tallies = append(en.down.tallies, d.tallies...)
	en.downComplete = !d.more
	l.mu.Unlock()
	if !d.more {
		l.breakEnd(en, errors.New("the peer closed the endpoint"))
		l.progress(en)
	}
	return nil
}

// reopen opens the lane again: immediately if its last endpoint had worked, otherwise after a
// pause that grows with each failure. Only the engine that dialed the session opens lanes.
func (l *lane) reopen(failed bool) {
	l.mu.Lock()
	if !failed {
		l.failures = 0
	} else {
		l.failures++
	}
	n := l.failures
	wait := !l.stopped && l.s.Dialed && n > 0
	if wait {
		l.pause = time.AfterFunc(l.s.e.opts.RetryInterval<<min(n-1, 6), l.open)
	}
	l.mu.Unlock()
	if !wait {
		l.open()
	}
}

// retryNow ends the pause before the next attempt. It is called when the reason of the break is
// known and is no failure of the NICs.
func (l *lane) retryNow() {
	l.mu.Lock()
	hurries := l.pause != nil && l.pause.Stop()
	if hurries {
		l.failures = 0
	}
	l.mu.Unlock()
	if hurries {
		l.open()
	}
}

// stop ends the lane with its session.
func (l *lane) stop(why error) {
	l.mu.Lock()
	l.stopped = true
	if l.pause != nil {
		l.pause.Stop()
	}
	en := l.cur
	l.mu.Unlock()
	if en != nil {
		l.breakEnd(en, why)
		l.progress(en)
	}
}

// awaitClosed waits until the lane has no open endpoint. It must be called after stop.
func (l *lane) awaitClosed() {
	l.mu.Lock()
	opening := l.opening
	l.mu.Unlock()
	if opening != nil {
		<-opening
	}
	l.mu.Lock()
	en := l.last
	l.mu.Unlock()
	if en != nil {
		<-en.closed
	}
}
