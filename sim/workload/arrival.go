package workload

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/internal/trace"
)

// Arrival is one request of an open loop.
type Arrival struct {
	At time.Duration
	// Input and Output are numbers of tokens.
	Input, Output int
	// Session is the number of the request's conversation, in trace formats with conversations.
	Session uint64
}

// ReadArrivals reads the requests of a trace with their times, in order.
func ReadArrivals(path string) ([]Arrival, error) {
	r, err := trace.Open(path, trace.Options{})
	if err != nil {
		return nil, err
	}
	defer r.Close()
	var out []Arrival
	for q, err := range r.All() {
		if err != nil {
			return nil, err
		}
		out = append(out, Arrival{q.Time, q.InputTokens, q.OutputTokens, q.Session})
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("workload: %s holds no request: %w", path, errEmpty)
	}
	return out, nil
}

// Profile is one of NetKV's three workloads (section VI-A): a filter of a trace, the probability
// that a request shares a prefix, and the objective for the time to first token.
type Profile struct {
	Name string
	// MinInput and MaxInput bound the input in tokens, inclusive; MaxInput 0 means no bound.
	MinInput, MaxInput int
	Share              float64
	SLO                time.Duration
}

// Profiles returns chatbot, rag and long-context.
func Profiles() []Profile {
	return []Profile{
		{"chatbot", 0, 8 << 10, 0.3, 2 * time.Second},
		{"rag", 4 << 10, 64 << 10, 0.7, 5 * time.Second},
		{"long-context", 16<<10 + 1, 0, 0.1, 10 * time.Second},
	}
}

// ProfileNamed returns the profile with that name.
func ProfileNamed(name string) (Profile, error) {
	for _, p := range Profiles() {
		if p.Name == name {
			return p, nil
		}
	}
	return Profile{}, fmt.Errorf("workload: no profile %q; there are chatbot, rag and long-context", name)
}

// Filter returns the arrivals within the profile's bounds.
func (p Profile) Filter(all []Arrival) []Arrival {
	var out []Arrival
	for _, a := range all {
		if a.Input >= p.MinInput && (p.MaxInput == 0 || a.Input <= p.MaxInput) {
			out = append(out, a)
		}
	}
	return out
}

// ScaleInputs multiplies all inputs by factor, rounded, with a minimum of 1 token.
func ScaleInputs(all []Arrival, factor float64) []Arrival {
	out := slices.Clone(all)
	for i := range out {
		out[i].Input = times(out[i].Input, factor)
	}
	return out
}

// Rate returns the mean rate of the arrivals in requests per second: the number of arrivals divided
// by the time from the first arrival to the last.
func Rate(all []Arrival) float64 {
	if len(all) < 2 {
		return 0
	}
	return float64(len(all)) / (all[len(all)-1].At - all[0].At).Seconds()
}

// Compress multiplies all times by one factor so that the mean rate is rate, and moves the first
// arrival to 0: NetKV section VI-A. Simultaneous arrivals stay simultaneous.
func Compress(all []Arrival, rate float64) ([]Arrival, error) {
	have := Rate(all)
	if !(rate > 0) || math.IsInf(rate, 0) || !(have > 0) || math.IsInf(have, 0) {
		return nil, fmt.Errorf("workload: %d requests at %v a second cannot be compressed to %v a second: both rates must be positive", len(all), have, rate)
	}
	out := slices.Clone(all)
	for i := range out {
		out[i].At = time.Duration(float64(all[i].At-all[0].At) * have / rate)
	}
	return out, nil
}

// Window returns the arrivals with from <= At < to. The arrivals must be in order of time.
func Window(all []Arrival, from, to time.Duration) []Arrival {
	at := func(t time.Duration) int {
		i, _ := slices.BinarySearchFunc(all, t, func(a Arrival, t time.Duration) int { return cmp.Compare(a.At, t) })
		return i
	}
	return all[at(from):max(at(from), at(to))]
}

// Poisson returns n arrival times of a Poisson process with the given rate per second.
func Poisson(n int, rate float64, rng *rand.Rand) []time.Duration {
	out := make([]time.Duration, n)
	at := 0.0
	for i := range out {
		at += rng.ExpFloat64() / rate
		out[i] = time.Duration(at * float64(time.Second))
	}
	return out
}
