package verbs

import (
	"math/rand/v2"
	"testing"
	"time"
)

// TestSpinner: it polls while things come fast, stops when they do not, begins
// again after a few, and never polls where it may not.
func TestSpinner(t *testing.T) {
	const most = 50 * time.Microsecond
	s := spinner{max: most}
	feed := func(n int, d time.Duration) {
		for range n {
			s.note(d)
		}
	}
	if !s.worth() {
		t.Error("does not poll at first")
	}
	feed(100, most/2)
	if !s.worth() {
		t.Errorf("does not poll where something comes after %v", most/2)
	}
	feed(1, time.Hour)
	if s.worth() {
		t.Error("polls after a pause")
	}
	feed(3, most/5)
	if !s.worth() {
		t.Errorf("does not poll again after three short waits: typical %v", s.typical)
	}
	feed(100, 2*most)
	if s.worth() {
		t.Errorf("polls where something comes after %v only", 2*most)
	}
	if off := (spinner{}); off.worth() {
		t.Error("polls with max 0")
	}
}

// TestSpinnerGivesUp: where hardly anything comes in time, hardly any time goes into
// polling.
func TestSpinnerGivesUp(t *testing.T) {
	const most = 50 * time.Microsecond
	r := rand.New(rand.NewPCG(1, 2))
	s := spinner{max: most}
	var spent, always time.Duration
	for range 10000 {
		d := time.Duration(r.Int64N(int64(200 * most)))
		always += min(d, most)
		if s.worth() {
			spent += min(d, most)
		}
		s.note(d)
	}
	if spent > always/100 {
		t.Errorf("polled for %v of the %v that polling before each sleep takes", spent, always)
	}
}
