package simrdma

import (
	"errors"
	"fmt"
	"math/bits"
	"time"

	"github.com/penstock-kv/penstock/rdma/group"
)

// flight is one Work in transit.
type flight struct {
	// life is incremented at each reuse of the struct, so that events for an earlier use are
	// recognized.
	life     uint32
	from, to *Endpoint
	number   uint64 // number of the Work among those of its endpoint
	work     group.Work
	src      *Memory
	// wire is a copy of the payload of a ghost (a Work whose sender's endpoint has ended), because
	// its source has been returned to its owner.
	wire  []byte
	draws draws

	// dst and off are the destination, set on admission.
	dst *Memory
	off uint64
	// pieces is the number of pieces of the payload. placed has a bit for each piece that was
	// copied to the destination. inPlace is set when all pieces are copied.
	pieces  int
	placed  uint64
	inPlace bool
	// status is the result for the sender. why is the reason as text for logs.
	status group.Status
	why    error
	// The states of a flight at the target:
	// arrived: the Work has reached the target's NIC.
	// accepted: the NIC has checked the key and bounds.
	// over: all pieces are in place, or the Work was refused. The Work is not delivered yet.
	// landed: the Work was delivered, refused or lost, and nothing more happens at the target.
	//
	// ended: the sender's completion has been queued. A ghost is ended before it has landed.
	arrived, accepted, over, landed bool
	ended, ghost                    bool
	// unanswered is the time at which the first packet was lost on a cut link, or noAlarm.
	unanswered time.Duration
}

func (fl *flight) refused() bool { return fl.status != group.StatusOK }

// makeGhost makes the flight a ghost: a Work on the wire whose sender's endpoint has ended. It
// copies the payload, so that the ghost does not refer to its source.
func (fl *flight) makeGhost() {
	fl.ghost = true
	if fl.src != nil {
		fl.wire = append(fl.wire[:0], fl.src.buf[fl.work.SrcOff:fl.work.SrcOff+fl.work.Len]...)
	}
}

// sendLocked starts a Work.
func (e *Endpoint) sendLocked(w *group.Work, now time.Duration) {
	f := e.d.f
	var fl *flight
	if n := len(f.idle); n > 0 {
		fl, f.idle = f.idle[n-1], f.idle[:n-1]
	} else {
		fl = new(flight)
	}
	*fl = flight{life: fl.life, wire: fl.wire[:0], from: e, to: e.peer, number: e.posted, work: *w, unanswered: noAlarm, draws: drawsOf(e.works, e.posted)}
	if w.Len > 0 {
		fl.src = w.Src.(*Memory)
		fl.src.reads++
	}
	e.posted++
	e.unpolled++
	e.flying = append(e.flying, fl)
	f.counts.Works++
	f.counts.Flying++
	at := now + f.delay(&fl.draws)
	if e.d.opts.Ordered || e.d.opts.RefusalBreaks {
		at = max(at, e.lastAdmit)
		e.lastAdmit = at
	}
	f.flyLocked(fl, at, stepAdmit, 0)
}

// flyLocked schedules the next step of a flight (a Work in transit) at the given time.
func (f *Fabric) flyLocked(fl *flight, at time.Duration, s step, piece int) {
	f.scheduleLocked(event{at: at, step: s, piece: uint8(piece), flight: fl, life: fl.life})
}

// lostLocked handles a packet on a cut link, which is sent again until the sender's timeout. It
// reports whether the packet was lost.
func (f *Fabric) lostLocked(fl *flight, e event) bool {
	if f.upLocked(fl.from.d, fl.to.d, fl.ghost) {
		fl.unanswered = noAlarm
		return false
	}
	now := f.now()
	switch {
	case fl.ghost: // the sender of a ghost has ended, so the packet is not sent again
		f.loseGhostLocked(fl)
	case fl.unanswered == noAlarm:
		fl.unanswered = now
		f.flyLocked(fl, now+f.opts.RetryEvery, e.step, int(e.piece))
	case now-fl.unanswered < f.opts.RetryTimeout:
		f.flyLocked(fl, now+f.opts.RetryEvery, e.step, int(e.piece))
	default:
		fl.from.breakLocked(fmt.Errorf("simrdma: %v got no answer from %v in %v", fl.from, fl.to, f.opts.RetryTimeout))
	}
	return true
}

// loseGhostLocked drops a ghost (a Work whose sender's endpoint has ended) and, on an Ordered NIC,
// all later ghosts of the endpoint.
func (f *Fabric) loseGhostLocked(fl *flight) {
	if !fl.from.d.opts.Ordered {
		f.landLocked(fl)
		return
	}
	for _, x := range append([]*flight(nil), fl.from.flying...) {
		if x.number >= fl.number && !x.landed {
			f.landLocked(x)
		}
	}
}

// deadEndLocked handles a packet for an endpoint that accepts no packets: it breaks the sender's
// endpoint. It returns false if the target's endpoint accepts packets.
func (f *Fabric) deadEndLocked(fl *flight) bool {
	if !fl.to.closedToPeerLocked() {
		return false
	}
	fl.status, fl.why = group.StatusBroken, errGone
	f.landLocked(fl)
	if !fl.ended && !fl.from.refusing { // if refusing is set, a refusal is on its way, which has more information
		fl.from.breakSoonLocked(errGone)
	}
	return true
}

// admitLocked handles the arrival of a Work at the target's NIC.
func (f *Fabric) admitLocked(e event) {
	fl := e.flight
	if fl.landed || f.lostLocked(fl, e) || f.deadEndLocked(fl) {
		return
	}
	fl.arrived = true
	if fl.from.d.opts.RefusalBreaks {
		f.advanceLocked(fl.from)
	} else {
		f.acceptLocked(fl)
	}
}

// advanceLocked accepts the next Work of an endpoint if RefusalBreaks is set. Works are accepted
// one at a time, so that no Work after a refused Work is performed.
func (f *Fabric) advanceLocked(from *Endpoint) {
	if from.refusing {
		return
	}
	for _, x := range from.flying {
		if x.landed || x.over {
			continue
		}
		if x.arrived && !x.accepted {
			f.acceptLocked(x)
		}
		return
	}
}

// acceptLocked checks the key at the target's NIC and schedules the placement of the payload.
func (f *Fabric) acceptLocked(fl *flight) {
	fl.accepted = true
	if fl.work.Op != group.OpSend {
		if err := fl.resolveLocked(); err != nil {
			f.refuseLocked(fl, group.StatusRefused, err)
			return
		}
		f.counts.Accepted++
	}
	now := f.now()
	fl.pieces = 1
	if fl.work.Op != group.OpSend && fl.work.Len > 0 {
		fl.pieces = 1 + fl.draws.below(int(min(uint64(f.opts.Pieces), fl.work.Len, 64)))
	}
	for i := range fl.pieces {
		f.flyLocked(fl, now+f.delay(&fl.draws), stepPlace, i)
		if f.opts.RepeatChance > 0 && fl.draws.chance(f.opts.RepeatChance) {
			f.flyLocked(fl, now+f.delay(&fl.draws)+f.delay(&fl.draws), stepRepeat, i)
		}
	}
}

// resolveLocked finds the destination of a write.
func (fl *flight) resolveLocked() error {
	d := fl.to.d
	if fl.work.Len == 0 && d.opts.EmptyUnchecked {
		return nil
	}
	m := d.memories[fl.work.RemoteKey]
	if m == nil {
		return fmt.Errorf("simrdma: %s: key %#x is invalid", d.opts.Name, fl.work.RemoteKey)
	}
	off, ok := m.offset(fl.work.RemoteAddr, fl.work.Len)
	if !ok {
		return fmt.Errorf("simrdma: %s: %d bytes at %#x are outside of key %#x", d.opts.Name, fl.work.Len, fl.work.RemoteAddr, fl.work.RemoteKey)
	}
	fl.dst, fl.off = m, off
	return nil
}

// placeLocked handles the arrival of one piece of the payload, which may be a repetition.
func (f *Fabric) placeLocked(e event) {
	fl := e.flight
	if e.step == stepRepeat && fl.inPlace {
		f.counts.Suppressed++
		return
	}
	if fl.landed || fl.over || f.lostLocked(fl, e) || f.deadEndLocked(fl) {
		return
	}
	if fl.closedLocked() {
		f.refuseLocked(fl, group.StatusRefused, errRevoked)
		return
	}
	bit := uint64(1) << e.piece
	if fl.placed&bit != 0 {
		f.counts.Repeated++
	}
	fl.copyLocked(int(e.piece))
	fl.placed |= bit
	if bits.OnesCount64(fl.placed) < fl.pieces {
		return
	}
	fl.inPlace, fl.over = true, true
	from := fl.from
	f.settleLocked(fl)
	if from.d.opts.RefusalBreaks {
		f.advanceLocked(from)
	}
}

var errRevoked = errors.New("simrdma: the memory was closed while the payload was landing")

// closedLocked reports whether the destination is closed and accepts no payload any more, because
// CloseIsFinal is true.
func (fl *flight) closedLocked() bool {
	if fl.dst == nil || !fl.dst.closed {
		return false
	}
	return fl.to.d.opts.CloseIsFinal
}

// copyLocked copies one piece of a write's payload to its destination. It does nothing for a
// message, because arriveLocked chooses the receive buffer and copies the message.
func (fl *flight) copyLocked(piece int) {
	f := fl.from.d.f
	if fl.work.Len == 0 || fl.work.Op == group.OpSend {
		return
	}
	f.counts.Placements++
	if fl.dst.closed {
		f.counts.LatePieces++
	}
	from, to := fl.work.Len*uint64(piece)/uint64(fl.pieces), fl.work.Len*uint64(piece+1)/uint64(fl.pieces)
	copy(fl.dst.buf[fl.off+from:fl.off+to], fl.payload()[from:to])
}

// payload returns the payload of the Work.
func (fl *flight) payload() []byte {
	switch {
	case fl.work.Len == 0:
		return nil
	case fl.ghost:
		return fl.wire
	}
	return fl.src.buf[fl.work.SrcOff : fl.work.SrcOff+fl.work.Len]
}

// refuseLocked refuses the Work at the target's NIC.
func (f *Fabric) refuseLocked(fl *flight, s group.Status, why error) {
	f.counts.Refused++
	fl.status, fl.why, fl.over = s, why, true
	if fl.from.d.opts.RefusalBreaks {
		fl.from.refusing = true
	}
	f.settleLocked(fl)
}

// settleLocked delivers the Work of fl if the NIC is not Ordered. On an Ordered NIC it delivers the
// Works of the endpoint in the order posted, up to the first one that is neither in place nor
// refused.
func (f *Fabric) settleLocked(fl *flight) {
	if !fl.from.d.opts.Ordered {
		f.deliverLocked(fl)
		return
	}
	from := fl.from
	for i := 0; i < len(from.flying); {
		x := from.flying[i]
		if !x.landed {
			if !x.over {
				return
			}
			f.deliverLocked(x)
			if !x.landed {
				return // delayed
			}
		}
		// deliverLocked may have removed the flight from from.flying.
		if i < len(from.flying) && from.flying[i] == x {
			i++
		}
	}
}

// deliverLocked delivers a Work at the target: an immediate, a message or a refusal.
func (f *Fabric) deliverLocked(fl *flight) {
	to := fl.to
	if to.closedToPeerLocked() {
		f.deadEndLocked(fl)
		return
	}
	if !fl.refused() && fl.closedLocked() {
		f.counts.Refused++
		fl.status, fl.why = group.StatusRefused, errRevoked
	}
	if !fl.refused() {
		if to.d.completions.len() >= to.d.opts.CompletionDepth {
			// The completion queue is full, so piece 0 is placed again later. Its bit is cleared,
			// so that this placement does not count as a repetition.
			fl.placed, fl.inPlace, fl.over = fl.placed&^1, false, false
			f.flyLocked(fl, f.now()+f.opts.RetryEvery, stepPlace, 0)
			return
		}
		f.arriveLocked(fl)
	}
	if fl.refused() && fl.from.d.opts.RefusalBreaks {
		fl.from.refusing = true
		to.breakLocked(fl.why)
	}
	ghost := fl.ghost
	f.landLocked(fl)
	if !ghost {
		f.flyLocked(fl, f.now()+f.delay(&fl.draws), stepAnswer, 0)
	}
}

// arriveLocked queues the target's completion of a Work.
func (f *Fabric) arriveLocked(fl *flight) {
	to := fl.to
	c := completion{ep: to, Completion: group.Completion{Cookie: to.cookie, Len: fl.work.Len}}
	switch fl.work.Op {
	case group.OpWriteImm:
		c.Kind, c.Imm = group.KindImmediate, fl.work.Imm
		to.d.pushLocked(c)
	case group.OpSend:
		i := 0
		for ; i < len(to.d.receives); i++ {
			if uint64(len(to.d.receives[i].buf)) >= fl.work.Len {
				break
			}
		}
		if i == len(to.d.receives) {
			f.counts.Refused++
			fl.status = group.StatusNoBuffer
			fl.why = fmt.Errorf("simrdma: %s has no receive buffer for %d bytes", to.d.opts.Name, fl.work.Len)
			return
		}
		r := to.d.receives[i]
		to.d.receives = append(to.d.receives[:i], to.d.receives[i+1:]...)
		copy(r.buf, fl.payload())
		c.Kind, c.Slot = group.KindMessage, r.slot
		to.d.pushLocked(c)
	}
	f.counts.Delivered++
	if fl.ghost {
		f.counts.Ghosts++
	}
	if last := fl.to.lastLanded; last > fl.number+1 {
		f.counts.Overtaken++
	} else {
		fl.to.lastLanded = fl.number + 1
	}
}

// landLocked marks the flight as landed: nothing more happens at the target.
func (f *Fabric) landLocked(fl *flight) {
	if !fl.landed {
		f.counts.Flying--
	}
	fl.landed = true
	if fl.ended {
		f.freeLocked(fl)
	}
}

// answerLocked handles the arrival of the acknowledgement at the sender's NIC.
func (f *Fabric) answerLocked(e event) {
	fl := e.flight
	if fl.ended || f.lostLocked(fl, e) {
		return
	}
	from, status, why := fl.from, fl.status, fl.why
	f.completeLocked(fl, status, why)
	if status != group.StatusOK && from.d.opts.RefusalBreaks {
		from.breakLocked(why)
	}
}

// completeLocked queues the completion of a Work.
func (f *Fabric) completeLocked(fl *flight, s group.Status, why error) {
	if fl.ended {
		panic("simrdma: a Work completes twice")
	}
	fl.ended = true
	if fl.src != nil {
		fl.src.reads--
	}
	e := fl.from
	c := completion{ep: e, Completion: group.Completion{Kind: group.KindDone, Status: s, Cookie: fl.work.Cookie, Len: fl.work.Len, Err: why}}
	if !e.d.silent {
		e.d.pushLocked(c)
	}
	if fl.landed {
		f.freeLocked(fl)
	}
}

// freeLocked removes a flight that has ended from its endpoint, and keeps the struct for reuse.
func (f *Fabric) freeLocked(fl *flight) {
	line := fl.from.flying
	for i, x := range line {
		if x == fl {
			copy(line[i:], line[i+1:])
			line[len(line)-1] = nil
			fl.from.flying = line[:len(line)-1]
			break
		}
	}
	fl.life++
	f.idle = append(f.idle, fl)
}
