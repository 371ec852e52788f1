package blockio

import "time"

// These are the constants of the rule by which a Budget adapts its limit to its device. By Little's
// law
//
//	bytes in flight = throughput × mean latency
//
// So while callers wait for the budget, there are two cases. Below saturation of the device, a
// higher limit increases the throughput. Above, it increases only the latency. The tuner measures
// the throughput X in windows of time and compares consecutive windows:
//
//	base   X₀ at limit B
//	up     X₁ at 2·B      keep if X₁ ≥ 1.05·X₀, else back to B
//	down   X₁ at ¾·B      keep if X₁ ≥ 0.98·X₀, else back to B
//
// A tried limit that is kept becomes the next base, and the same direction is tried again. If the
// limit goes back to B in both directions, it stays at B for 4 windows before both directions are
// tried again; after the next such failure for 8 windows, and so on up to 64. If the throughput
// differs from X₀ by a quarter, the next trial begins at once. The trial upward requires a gain
// above the noise, and the trial downward tolerates a loss within the noise. So on the flat part of
// the curve the limit decreases to the knee, but not below two of the largest requests.
//
// A window counts only if at each of its completions callers waited or three quarters of the budget
// were taken. Otherwise the limit did not determine the throughput, and the window has no
// information about the limit. The window of a trial upward always counts: if the callers do not
// fill the doubled limit, that is a result too.
const (
	upGain   = 1.05
	downLoss = 0.98
	drift    = 0.25

	// A window lasts at least windowMin and has at least windowCount completions. So a device that
	// completes its queue in batches, as virtio does, is measured over several batches.
	windowCount = 32
	windowMin   = 20 * time.Millisecond

	holdMin, holdMax = 4, 64

	// The limit admits at least requestsMin of the largest requests. With only one request, the
	// device idles from each completion until the caller has run and submitted its next request.
	// That takes long when the CPUs are busy, and the windows would then measure the callers and
	// not the device.
	requestsMin = 2
)

type phase uint8

const (
	phaseBase phase = iota // measures X₀ at base
	phaseUp                // measures X₁ at 2·base
	phaseDown              // measures X₁ at ¾·base
	phaseHold              // keeps base, watches for drift
)

// tuner decides the limit. It is pure: time is an argument of each observation.
type tuner struct {
	opts  BudgetOptions
	limit int64 // in force now
	base  int64 // the limit B to which a trial goes back

	phase phase
	// next is the direction (up or down) of the trial after the base window. refused is set if the
	// trial of the other direction has just failed.
	next     phase
	refused  bool
	x0       float64 // bytes per second at base
	hold     int     // windows left to hold
	nextHold int     // length of the next hold, in windows

	// from is the start of the current window. count is the number of completions in the window,
	// bytes the total size of their requests, and largest the size of the largest of these
	// requests.
	from    time.Duration
	count   int
	bytes   int64
	largest int64
	// floor is the size of the largest request of the last window, in bytes.
	floor int64
}

func newTuner(opts BudgetOptions) tuner {
	return tuner{opts: opts, limit: opts.StartBytes, base: opts.StartBytes, next: phaseUp, nextHold: holdMin}
}

// observe records one completion, at time now, of a request of the given bytes. used is set if
// callers waited or three quarters of the budget were taken.
func (t *tuner) observe(now time.Duration, bytes int64, used bool) {
	if !used && t.phase != phaseUp {
		t.count = 0 // the next completion that counts starts a window
		return
	}
	if t.count == 0 {
		// The window starts with this completion. The bytes of this completion were moved before
		// the window.
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

// window uses the throughput of one whole window and advances to the next phase.
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
			t.hold, t.nextHold = 0, holdMin
		}
		if t.hold <= 0 {
			t.phase = phaseBase
		}
	}
}

// try starts a trial in the given direction, or refuses it if the bounds leave no room.
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

// judge ends a trial. If it passed, the tried limit becomes the base and x its throughput.
// Otherwise the old limit is restored.
func (t *tuner) judge(passed bool, x float64) {
	if !passed {
		t.refuse(t.phase)
		return
	}
	t.next, t.refused = t.phase, false
	t.base, t.x0, t.nextHold = t.limit, x, holdMin
	t.try(t.next)
}

// refuse restores the base limit. It then tries the other direction, or holds the limit if that
// direction has failed as well.
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
	t.phase, t.hold = phaseHold, t.nextHold
	t.nextHold = min(2*t.nextHold, holdMax)
}
