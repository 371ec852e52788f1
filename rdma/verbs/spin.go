package verbs

import "time"

// spinner decides whether to poll on or to sleep, from how long it took lately
// until something came: to be woken takes a while too, so that what comes sooner is
// better polled for, and what comes later is not worth a processor. It belongs to
// one goroutine.
//
//	      wait began                       something came
//	          ▼                                  ▼
//	──────────┼──────── polls ───────┬─ sleeps ──┼────
//	          0                     max        sample → typical, half and half
//
// Once what comes is further apart than max, on average, it does not poll at all;
// the samples go on while it sleeps, and a few short ones bring polling back.
// Before each sleep it polls for max at most, so that a port on which nothing
// comes costs nothing.
type spinner struct {
	max     time.Duration // 0: never
	typical time.Duration
}

// spinSamples bounds a sample, in units of max, so that after a pause a few short
// ones bring polling back: 3 halvings of 8 times max are max.
const spinSamples = 8

// worth reports whether to poll on.
func (s *spinner) worth() bool { return s.max > 0 && s.typical <= s.max }

// note takes a sample: how long it was until something came.
func (s *spinner) note(d time.Duration) {
	s.typical = (s.typical + min(d, spinSamples*s.max)) / 2
}
