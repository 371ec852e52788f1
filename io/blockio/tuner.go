package blockio

import "time"

// The rule by which a Budget follows its device. By Little's law
//
//	bytes in flight = throughput × mean latency
//
// so while the budget is what callers wait for, raising it either raises the
// throughput or, once the device is saturated, raises only the latency. The
// tuner measures throughput X in windows and compares neighbouring ones:
//
//	base   X₀ at limit B
//	up     X₁ at 2·B      keep if X₁ ≥ 1.05·X₀, else back to B
//	down   X₁ at ¾·B      keep if X₁ ≥ 0.98·X₀, else back to B
//
// A limit that passed is the next base, and its direction is tried again. When
// neither direction pays, B is held for 4 windows, then 8, and so on to 64,
// before both are tried again; a throughput that drifts by a quarter from X₀ ends
// the hold at once. Up asks for more than noise, down accepts noise: on the flat
// part of the curve the limit drifts down to the knee, but not below two of the
// largest requests.
//
// A window counts only if the budget was used (callers waiting, or three
// quarters taken) at each completion: else the limit is not what decides, and
// nothing can be learnt about it. A trial upward counts in any case: that the
// callers do not fill the doubled limit is an answer too.
const (
	upGain   = 1.05
	downLoss = 0.98
	drift    = 0.25

	// A window has at least so many completions and so long: a device that
	// completes its queue in batches (virtio does) is seen over several.
	windowCount = 32
	windowMin   = 20 * time.Millisecond

	holdMin, holdMax = 4, 64

	// The limit admits at least so many of the largest requests at a time. With
	// one the device idles from each completion until its caller has run and the
	// next one is submitted, which is long when the CPUs are busy, and windows
	// measure the callers, not the device.
	requestsMin = 2
)

type phase uint8

const (
	phaseBase phase = iota // measures X₀ at base
	phaseUp                // measures X₁ at 2·base
	phaseDown              // measures X₁ at ¾·base
	phaseHold              // keeps base, watches for drift
)

// tuner decides the limit. It is pure: time comes in with each observation.
type tuner struct {
	opts  BudgetOptions
	limit int64 // in force now
	base  int64 // the limit that trials are compared with

	phase phase
	// next is the direction that follows the base window; tried tells whether
	// the other one has just been refused.
	next    phase
	refused bool
	x0      float64 // bytes per second at base
	hold    int     // windows left to hold
	patient int     // length of the next hold

	// The present window.
	from    time.Duration
	count   int
	bytes   int64
	largest int64
	// floor is the largest request of the last window.
	floor int64
}

func newTuner(opts BudgetOptions) tuner {
	return tuner{opts: opts, limit: opts.StartBytes, base: opts.StartBytes, next: phaseUp, patient: holdMin}
}

// observe takes note of one completion, at time now, of a request of so many
// bytes; used says whether the budget was.
func (t *tuner) observe(now time.Duration, bytes int64, used bool) {
	if !used && t.phase != phaseUp {
		t.count = 0 // the next completion that counts starts a window
		return
	}
	if t.count == 0 {
		// The window starts with this completion, whose own bytes were moved
		// before it.
		t.from, t.bytes, t.largest, t.count = now, 0, bytes, 1
		return
	}
	t.count++
	t.bytes += bytes
	t.largest = max(t.largest, bytes)
	if elapsed := now - t.from; t.count > windowCount && elapsed >= windowMin {
		t.window(float64(t.bytes) / elapsed.Seconds())
		t.floor = t.largest
		t.count = 0
	}
}

// window takes the throughput of one whole window and moves on.
func (t *tuner) window(x float64) {
	switch t.phase {
	case phaseBase:
		if least := t.bounded(t.base); least > t.base {
			t.base, t.limit = least, least // requests have become larger
			return
		}
		t.x0 = x
		t.try(t.next)
	case phaseUp:
		t.judge(x >= upGain*t.x0, x)
	case phaseDown:
		t.judge(x >= downLoss*t.x0, x)
	case phaseHold:
		t.hold--
		if x > (1+drift)*t.x0 || x < (1-drift)*t.x0 {
			t.hold, t.patient = 0, holdMin
		}
		if t.hold <= 0 {
			t.phase = phaseBase
		}
	}
}

// try sets the limit of a trial, or refuses it where the bounds leave no room.
func (t *tuner) try(direction phase) {
	limit := 2 * t.base
	if direction == phaseDown {
		limit = t.base * 3 / 4
	}
	limit = t.bounded(limit)
	if limit == t.base {
		t.refuse(direction)
		return
	}
	t.phase, t.limit = direction, limit
}

func (t *tuner) bounded(limit int64) int64 {
	floor := min(max(t.opts.MinBytes, requestsMin*max(t.floor, t.largest)), t.opts.MaxBytes)
	return min(max(limit, floor), t.opts.MaxBytes)
}

// judge ends a trial: x becomes the new base, or the old limit is restored.
func (t *tuner) judge(passed bool, x float64) {
	if !passed {
		t.refuse(t.phase)
		return
	}
	t.next, t.refused = t.phase, false
	t.base, t.x0, t.patient = t.limit, x, holdMin
	t.try(t.next)
}

// refuse goes back to the base limit and turns to the other direction, or holds
// if that has been refused as well.
func (t *tuner) refuse(direction phase) {
	t.limit = t.base
	t.next = phaseUp
	if direction == phaseUp {
		t.next = phaseDown
	}
	if !t.refused {
		t.refused = true
		t.phase = phaseBase
		return
	}
	t.refused = false
	t.phase, t.hold = phaseHold, t.patient
	t.patient = min(2*t.patient, holdMax)
}
