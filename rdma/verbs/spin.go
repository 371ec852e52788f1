package verbs

import "time"

// spinner decides, from recent waiting times, whether the poller continues to poll or sleeps.
// Waking up takes time too, so polling is better if completions arrive sooner than a sleeping
// poller wakes up. If they arrive later, polling wastes a processor. Only one goroutine may use a
// spinner.
//
//	      wait began                       completion arrived
//	          ▼                                  ▼
//	──────────┼──────── polls ───────┬─ sleeps ──┼────
//	          0                     max        sample → typical, half and half
//
// If the average waiting time exceeds max, the poller does not poll before it sleeps. Samples
// continue to be taken while it sleeps, and a few short samples start polling again. Before each
// sleep, polling takes at most max, so an idle port costs nothing.
type spinner struct {
	max     time.Duration // 0: never poll
	typical time.Duration
}

// spinSamples is the largest value of a sample, in units of max. It makes a few short samples
// after a pause start polling again: 8 times max is halved to max in 3 steps.
const spinSamples = 8

// worth reports whether to continue polling.
func (s *spinner) worth() bool { return s.max > 0 && s.typical <= s.max }

// note adds a sample: the time from the begin of a wait until a completion arrived.
func (s *spinner) note(d time.Duration) {
	s.typical = (s.typical + min(d, spinSamples*s.max)) / 2
}
