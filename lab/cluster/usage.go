package cluster

import "time"

// Usage shows how much of the capacity of the storage NICs was used, and when. It explains why a
// replay takes longer than its lower bound, in which all NICs are busy from the first request to
// the last.
type Usage struct {
	// Whole is the share of the NICs' capacity, 0 to 1, that was used over the whole replay. Middle
	// is the share between Head and Tail.
	Whole  float64 `json:"whole"`
	Middle float64 `json:"middle"`
	// Head is the time until the NICs are busy for the first time; the first turns have no cached
	// KV to read. Tail is the time after the NICs were busy for the last time; then few agents
	// remain, with one request each.
	Head time.Duration `json:"head_ns"`
	Tail time.Duration `json:"tail_ns"`
}

// busyShare defines a busy window: its rate is at least this share of the rate of the busiest
// window.
const busyShare = 0.9

// use computes the Usage of the storage NICs that may read, over windows of one second (the last
// window may be shorter). It returns the zero value if the replay has no window.
func use(nics []NIC, samples []Sample, took time.Duration, rateBits uint64, reads func(NIC) bool) Usage {
	const window = time.Second
	type piece struct {
		from, to time.Duration
		bytes    float64
	}
	n, total := 0, func(s *Sample) float64 {
		sum := 0.0
		for i, nic := range nics {
			if reads(nic) {
				sum += float64(s.Received[i])
			}
		}
		return sum
	}
	for _, nic := range nics {
		if reads(nic) {
			n++
		}
	}
	var pieces []piece
	at, had := time.Duration(0), 0.0
	for i := range samples {
		s := &samples[i]
		if s.At > took {
			break
		}
		if s.At-at >= window || i == len(samples)-1 && s.At > at {
			got := total(s)
			pieces = append(pieces, piece{at, s.At, got - had})
			at, had = s.At, got
		}
	}
	if n == 0 || len(pieces) == 0 || rateBits == 0 {
		return Usage{}
	}
	limit := float64(n) * float64(rateBits) / 8 // bytes per second
	rate := func(p piece) float64 { return p.bytes / (p.to - p.from).Seconds() }
	best := 0.0
	for _, p := range pieces {
		best = max(best, rate(p))
	}
	first, last := -1, -1
	for i, p := range pieces {
		if best > 0 && rate(p) >= busyShare*best {
			last = i
			if first < 0 {
				first = i
			}
		}
	}
	u := Usage{Whole: had / limit / took.Seconds(), Head: took}
	if first < 0 {
		return u
	}
	bytes := 0.0
	for _, p := range pieces[first : last+1] {
		bytes += p.bytes
	}
	u.Head, u.Tail = pieces[first].from, took-pieces[last].to
	u.Middle = bytes / limit / (pieces[last].to - pieces[first].from).Seconds()
	return u
}
