package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// A Sample holds the measurements of one turn (one run) of one contender (one way to do the work).
// It maps the name of a metric to the value.
type Sample map[string]float64

// Names of metrics that suites share. A suite may use other names.
const (
	// Rate is the work done per second, in the comparison's Unit.
	Rate = "rate"
	// CPU is the processor time of all processes that take part, in milliseconds per GiB moved.
	CPU = "cpu"
)

// A Contender is one way to do the work.
type Contender struct {
	Name string
	// Turn does the work once and returns the measurements.
	Turn func(ctx context.Context) (Sample, error)
	// NotRun, if not empty, is the reason why the contender cannot run. Turn is then not called.
	NotRun string
}

// A Round maps the name of a contender to the contender's sample in one round. Contenders that
// could not run are missing.
type Round map[string]Sample

// Get returns the value of a metric of a contender, and false if that metric was not measured.
func (r Round) Get(contender, metric string) (float64, bool) {
	v, ok := r[contender][metric]
	return v, ok
}

// A Measure is a figure that is computed for each round; the report shows its median over the
// rounds.
type Measure struct {
	Name string
	// Unit is empty for a ratio.
	Unit string
	// Of computes the figure from one round. It returns false if a contender is missing.
	Of func(r Round) (float64, bool)
	// Target is the bound that the design sets for the figure.
	Target Target
}

// Ratio returns a measure: the metric of one contender (over) divided by the same metric of another
// (under), in one round.
func Ratio(name, metric, over, under string, t Target) Measure {
	return Measure{Name: name, Target: t, Of: func(r Round) (float64, bool) {
		a, ok := r.Get(over, metric)
		b, ok2 := r.Get(under, metric)
		return a / b, ok && ok2 && b > 0
	}}
}

// Figure returns a measure that is one metric of one contender, without a comparison.
func Figure(name, unit, metric, contender string, t Target) Measure {
	return Measure{Name: name, Unit: unit, Target: t, Of: func(r Round) (float64, bool) { return r.Get(contender, metric) }}
}

// A Target is a bound on a measure. The zero value has no bound.
type Target struct {
	// Kind is "", "min" or "max".
	Kind  string  `json:"kind,omitempty"`
	Bound float64 `json:"bound,omitempty"`
}

// AtLeast is the target of a measure that must not be below v.
func AtLeast(v float64) Target { return Target{Kind: "min", Bound: v} }

// AtMost is the target of a measure that must not be above v.
func AtMost(v float64) Target { return Target{Kind: "max", Bound: v} }

// Met reports whether v is within the target.
func (t Target) Met(v float64) bool {
	switch t.Kind {
	case "min":
		return v >= t.Bound
	case "max":
		return v <= t.Bound
	}
	return true
}

// String returns "≥ 0.95", "≤ 5" or "".
func (t Target) String() string {
	switch t.Kind {
	case "min":
		return "≥ " + number(t.Bound)
	case "max":
		return "≤ " + number(t.Bound)
	}
	return ""
}

// A Comparison names a piece of work, the contenders that do the work, and the measures to compute.
type Comparison struct {
	// Name describes the work. It is unique in a suite.
	Name string
	// Unit is the unit of the contenders' Rate, such as "MiB/s".
	Unit       string
	Contenders []Contender
	Measures   []Measure
	// Rounds, if not 0, replaces RunOptions.Rounds.
	Rounds int
	// Notes are printed below the results.
	Notes []string
}

// RunOptions are the options of a run.
type RunOptions struct {
	// Rounds is the number of turns of each contender.
	Rounds int
	// Warmup is the number of discarded rounds before the measured ones.
	Warmup int
	// Rand shuffles the order of each round.
	Rand *rand.Rand
	// Progress, if not nil, is called with the name of the running contender.
	Progress func(text string)
}

// Run lets the contenders take turns. A contender that fails does not take part in later rounds,
// and the result has the reason. Run returns an error only if ctx ends.
func Run(ctx context.Context, c Comparison, o RunOptions) (Result, error) {
	if c.Rounds > 0 {
		o.Rounds = c.Rounds
	}
	progress := o.Progress
	if progress == nil {
		progress = func(string) {}
	}
	res := Result{Name: c.Name, Unit: c.Unit, Notes: c.Notes}
	var able []Contender
	for _, k := range c.Contenders {
		if k.NotRun != "" {
			res.NotRun = append(res.NotRun, Missing{k.Name, k.NotRun})
			continue
		}
		able = append(able, k)
	}
	var rounds []Round
	start := time.Now()
	for n := range o.Warmup + o.Rounds {
		round := make(Round)
		o.Rand.Shuffle(len(able), func(i, j int) { able[i], able[j] = able[j], able[i] })
		for i := 0; i < len(able); i++ {
			k := able[i]
			progress(fmt.Sprintf("%s: round %d of %d, %s", c.Name, n+1, o.Warmup+o.Rounds, k.Name))
			s, err := k.Turn(ctx)
			if ctx.Err() != nil {
				return Result{}, fmt.Errorf("bench %s: %w", c.Name, ctx.Err())
			}
			if err != nil {
				res.NotRun = append(res.NotRun, Missing{k.Name, err.Error()})
				able = slices.Delete(able, i, i+1)
				i--
				continue
			}
			round[k.Name] = s
		}
		if n >= o.Warmup {
			rounds = append(rounds, round)
		}
	}
	res.Rounds = len(rounds)
	res.Took = time.Since(start).Seconds()
	res.Measures = measure(c.Measures, rounds)
	res.Absolute = absolutes(c.Contenders, rounds)
	return res, nil
}

func measure(measures []Measure, rounds []Round) (out []Measured) {
	for _, m := range measures {
		var values []float64
		for _, r := range rounds {
			if v, ok := m.Of(r); ok {
				values = append(values, v)
			}
		}
		if len(values) == 0 {
			continue
		}
		s := Summarize(values)
		out = append(out, Measured{Name: m.Name, Unit: m.Unit, Target: m.Target, Summary: s, Met: m.Target.Met(s.Median)})
	}
	return out
}

func absolutes(contenders []Contender, rounds []Round) (out []Absolute) {
	for _, k := range contenders {
		values := make(map[string][]float64)
		for _, r := range rounds {
			for metric, v := range r[k.Name] {
				values[metric] = append(values[metric], v)
			}
		}
		if len(values) == 0 {
			continue
		}
		a := Absolute{Contender: k.Name, Metrics: make(map[string]Summary, len(values))}
		for metric, v := range values {
			a.Metrics[metric] = Summarize(v)
		}
		out = append(out, a)
	}
	return out
}

// Summary summarises the values of several rounds.
type Summary struct {
	Median float64 `json:"median"`
	// Low and High are the least and the greatest value.
	Low  float64 `json:"low"`
	High float64 `json:"high"`
}

// Summarize returns the median and the spread of v, which is not empty. The
// median of an even number of values is the mean of the two in the middle.
func Summarize(v []float64) Summary {
	s := slices.Sorted(slices.Values(v))
	n := len(s)
	return Summary{Median: (s[(n-1)/2] + s[n/2]) / 2, Low: s[0], High: s[n-1]}
}

// Quantile sorts d and returns its q-quantile, q from 0 to 1, or 0 if d is empty.
func Quantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	slices.Sort(d)
	return d[min(len(d)-1, int(q*float64(len(d))))]
}

// Result is the outcome of a comparison.
type Result struct {
	Name   string `json:"name"`
	Unit   string `json:"unit,omitempty"`
	Rounds int    `json:"rounds"`
	// Took is the duration of all rounds in seconds.
	Took     float64    `json:"took_seconds"`
	Measures []Measured `json:"measures,omitempty"`
	Absolute []Absolute `json:"absolute,omitempty"`
	NotRun   []Missing  `json:"not_run,omitempty"`
	Notes    []string   `json:"notes,omitempty"`
}

// Measured has the median and the range of a measure over all rounds.
type Measured struct {
	Name   string `json:"name"`
	Unit   string `json:"unit,omitempty"`
	Target Target `json:"target"`
	Summary
	Met bool `json:"met"`
}

// Absolute has the metrics of one contender over all rounds.
type Absolute struct {
	Contender string             `json:"contender"`
	Metrics   map[string]Summary `json:"metrics"`
}

// Missing names a contender, or a whole suite, that did not run, with the reason.
type Missing struct {
	What string `json:"what"`
	Why  string `json:"why"`
}
