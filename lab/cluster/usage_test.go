package cluster

import (
	"math"
	"testing"
	"time"
)

// TestUse: two storage NICs of 8 Mbit/s start late, are busy together, and one of them ends
// early. The bytes of a third NIC and of the compute NICs do not count.
func TestUse(t *testing.T) {
	nics := []NIC{{"P0", true}, {"P0", false}, {"D0", true}, {"D1", true}}
	const full = 1_000_000 // bytes a second
	var samples []Sample
	var p, d uint64
	for i := 1; i <= 40; i++ { // ten seconds, in quarters of a second
		switch {
		case i <= 8: // two seconds at a tenth of the rate
			p, d = p+full/40, d+full/40
		case i <= 32: // six seconds at almost the full rate
			p, d = p+full/4, d+full*9/40
		default: // two seconds with one NIC at half of its rate
			p += full / 8
		}
		samples = append(samples, Sample{At: time.Duration(i) * time.Second / 4, Received: []uint64{p, 77 * p, d, 99 * p}, Sent: make([]uint64, 4)})
	}
	reads := func(n NIC) bool { return n.Storage && n.Node != "D1" }
	got := use(nics, samples, 10*time.Second, 8*full, reads)
	want := Usage{Whole: (2*0.1*2 + 6*1.9 + 2*0.5) / 20, Middle: 0.95, Head: 2 * time.Second, Tail: 2 * time.Second}
	if math.Abs(got.Whole-want.Whole) > 1e-9 || math.Abs(got.Middle-want.Middle) > 1e-9 || got.Head != want.Head || got.Tail != want.Tail {
		t.Errorf("%+v, want %+v", got, want)
	}
	for name, u := range map[string]Usage{
		"no limit": use(nics, samples, 10*time.Second, 0, reads), "no NIC may read": use(nics, samples, 10*time.Second, 8*full, func(NIC) bool { return false }),
		"no samples": use(nics, nil, 10*time.Second, 8*full, reads),
	} {
		if u != (Usage{}) {
			t.Errorf("%s: %+v", name, u)
		}
	}
	idle := []Sample{{At: time.Second, Received: make([]uint64, 4)}}
	if u := use(nics, idle, time.Second, 8*full, reads); u.Whole != 0 || u.Head != time.Second || u.Tail != 0 {
		t.Errorf("NICs that carry nothing: %+v", u)
	}
}
