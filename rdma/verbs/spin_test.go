package verbs

import (
	"math/rand/v2"
	"testing"
	"time"
)

// TestSpinner: a spinner polls while completions come fast, stops after a long wait, polls again
// after a few short waits, and never polls with max 0.
func TestSpinner(t *testing.T) {
	const limit = 50 * time.Microsecond
	s := spinner{max: limit}
	feed := func(n int, d time.Duration) {
		for range n {
			s.note(d)
		}
	}
	if !s.worth() {
		t.Error("does not poll at first")
	}
	feed(100, limit/2)
	if !s.worth() {
		t.Errorf("does not poll with waits of %v", limit/2)
	}
	feed(1, time.Hour)
	if s.worth() {
		t.Error("polls after a pause")
	}
	feed(3, limit/5)
	if !s.worth() {
		t.Errorf("does not poll again after three short waits: typical %v", s.typical)
	}
	feed(100, 2*limit)
	if s.worth() {
		t.Errorf("polls with waits of %v", 2*limit)
	}
	if off := (spinner{}); off.worth() {
		t.Error("polls with max 0")
	}
}

// TestSpinnerStops: if few completions come within max, the spinner spends little time with
// polling.
func TestSpinnerStops(t *testing.T) {
	const limit = 50 * time.Microsecond
	r := rand.New(rand.NewPCG(1, 2))
	s := spinner{max: limit}
	var spent, always time.Duration
	for range 10000 {
		d := time.Duration(r.Int64N(int64(200 * limit)))
		always += min(d, limit)
		if s.worth() {
			spent += min(d, limit)
		}
		s.note(d)
	}
	if spent > always/100 {
		t.Errorf("polled for %v of the %v that polling before each sleep takes", spent, always)
	}
}
