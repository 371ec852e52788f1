package simrdma

import "time"

// step is the kind of an event.
type step uint8

const (
	stepAdmit step = iota
	stepPlace
	stepRepeat // place again
	stepAnswer // the sender's completion
	stepBreak  // an endpoint breaks
	stepPipe   // bytes of a control connection arrive
)

// event is a scheduled event. It holds its parameters by value, so that scheduling allocates no
// memory.
type event struct {
	at    time.Duration
	order uint64
	step  step
	piece uint8
	// life is flight.life at the time when the event was made. If they differ later, the flight
	// has been reused, and the event is ignored.
	life   uint32
	flight *flight
	ep     *Endpoint
	pipe   *pipe
}

// events is a heap, ordered by time.
type events []event

func (h events) less(i, j int) bool {
	if h[i].at != h[j].at {
		return h[i].at < h[j].at
	}
	return h[i].order < h[j].order
}

func (h *events) push(e event) {
	*h = append(*h, e)
	for i := len(*h) - 1; i > 0; {
		up := (i - 1) / 2
		if !h.less(i, up) {
			return
		}
		(*h)[i], (*h)[up] = (*h)[up], (*h)[i]
		i = up
	}
}

func (h *events) pop() event {
	s := *h
	top, last := s[0], len(s)-1
	s[0], s[last] = s[last], event{}
	*h = s[:last]
	for i := 0; ; {
		least := i
		for k := 2*i + 1; k <= 2*i+2 && k < last; k++ {
			if h.less(k, least) {
				least = k
			}
		}
		if least == i {
			return top
		}
		s[i], s[least] = s[least], s[i]
		i = least
	}
}

// now returns the time since the fabric was made.
func (f *Fabric) now() time.Duration { return time.Since(f.start) }

// scheduleLocked schedules e.
func (f *Fabric) scheduleLocked(e event) {
	e.order = f.order
	f.order++
	f.events.push(e)
	f.armLocked()
}

// armLocked sets the timer to the time of the next event.
func (f *Fabric) armLocked() {
	if len(f.events) == 0 || f.running {
		return
	}
	at := f.events[0].at
	if f.alarm != noAlarm && f.alarm <= at {
		return
	}
	f.alarm = at
	wait := max(at-f.now(), 0)
	if f.timer == nil {
		f.timer = time.AfterFunc(wait, f.run)
		return
	}
	f.timer.Reset(wait)
}

// run performs the events that are due.
func (f *Fabric) run() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.alarm, f.running = noAlarm, true
	now := f.now()
	for len(f.events) > 0 && f.events[0].at <= now {
		f.doLocked(f.events.pop())
	}
	f.running = false
	f.armLocked()
	f.stepped.Broadcast()
}

// doLocked performs one event.
func (f *Fabric) doLocked(e event) {
	if e.flight != nil && e.flight.life != e.life {
		if e.step == stepRepeat {
			f.counts.Suppressed++
		}
		return
	}
	switch e.step {
	case stepAdmit:
		f.admitLocked(e)
	case stepPlace, stepRepeat:
		f.placeLocked(e)
	case stepAnswer:
		f.answerLocked(e)
	case stepBreak:
		e.ep.breakLocked(e.ep.why)
	case stepPipe:
		e.pipe.arriveLocked()
	}
}
