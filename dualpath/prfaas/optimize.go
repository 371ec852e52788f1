package prfaas

import (
	"fmt"
	"sort"
)

// StepsDefault is the default number of steps into which the search divides the range of the
// threshold, from the shortest to the longest prompt.
const StepsDefault = 100

// stepsMax is the largest number of steps of a search. With prompts of up to 1M tokens, one step is
// then less than a token.
const stepsMax = 1 << 20

// plansMax is the largest number of plans in an exhaustive search. The largest search takes half a
// minute on one core.
const plansMax = 1 << 30

// Optimize finds the plan with the highest throughput (PrfaaS, section 3.4.2). A plan is a
// threshold and a division of the PD cluster into prefill and decode instances. The search covers
// steps+1 thresholds and all divisions with at least one decode instance. The result is that of
// Exhaustive. In the paper, a higher threshold raises the throughput of the PrfaaS clusters and
// lowers the prefill throughput of the PD cluster. In this case Optimize finds the threshold at
// which the two are equal, for each division, by bisection, in O(steps + N log steps). Otherwise it
// searches exhaustively.
func Optimize(s System, steps int) (Throughput, error) {
	g, err := newGrid(s, steps)
	if err != nil {
		return Throughput{}, err
	}
	if !g.crossing() {
		return g.exhaustive(), nil
	}
	var best candidate
	for n := range s.LocalInstances {
		// i is the first threshold at which the PD cluster limits the prefill rate. The best
		// threshold is i or i-1.
		i := sort.Search(len(g.splits), func(i int) bool { return g.remote[i] >= g.local(i, n) })
		for _, j := range []int{i - 1, i} {
			if j >= 0 && j < len(g.splits) {
				best = g.better(best, j, n)
			}
		}
	}
	// Of equally good thresholds the last one is chosen, as in Exhaustive.
	for best.at+1 < len(g.splits) && g.equal(best, best.at+1) {
		best.at++
	}
	return g.throughput(best), nil
}

// Exhaustive returns the highest throughput over every threshold and every division of the PD
// cluster. The search covers the same plans as Optimize.
func Exhaustive(s System, steps int) (Throughput, error) {
	g, err := newGrid(s, steps)
	if err != nil {
		return Throughput{}, err
	}
	return g.exhaustive(), nil
}

// grid has, for each threshold of the search, the values that do not depend on the division of the
// PD cluster.
type grid struct {
	sys        System
	thresholds []float64
	splits     []split
	// remote is Theta_prfaas/p at each threshold: the request rate at which the PrfaaS clusters are
	// saturated.
	remote []float64
}

func newGrid(s System, steps int) (*grid, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	if steps < 1 || steps > stepsMax {
		return nil, fmt.Errorf("prfaas: %d steps of the threshold; from 1 to %d", steps, stepsMax)
	}
	if n := s.LocalInstances * steps; n > plansMax {
		return nil, fmt.Errorf("prfaas: %d instances with %d steps of the threshold are %d plans; take fewer steps, so that they are at most %d", s.LocalInstances, steps, n, plansMax)
	}
	least, greatest := s.Lengths.Bounds()
	g := &grid{sys: s}
	for i := range steps + 1 {
		t := least + (greatest-least)*float64(i)/float64(steps)
		x := s.split(t)
		g.thresholds = append(g.thresholds, t)
		g.splits = append(g.splits, x)
		g.remote = append(g.remote, over(min(x.remoteCompute, x.egress), x.offloaded))
	}
	return g, nil
}

// local returns Theta_pd-p/(1-p) at threshold number at: the request rate at which n prefill
// instances of the PD cluster are saturated.
func (g *grid) local(at, n int) float64 {
	x := g.splits[at]
	return over(times(n, x.local), 1-x.offloaded)
}

// crossing reports whether a higher threshold of the grid never lowers the rate of the PrfaaS
// clusters and never raises the prefill rate of the PD cluster.
func (g *grid) crossing() bool {
	for i := 1; i < len(g.splits); i++ {
		if g.remote[i] < g.remote[i-1] || g.local(i, 1) > g.local(i-1, 1) {
			return false
		}
	}
	return true
}

// candidate is a plan with threshold number at and n prefill instances. max is the throughput of
// the plan, and prod the prefill rate of both clusters together. The better of two candidates is
// the one with the higher throughput; among equals, with the higher prod, then with fewer prefill
// instances, then with the higher threshold, which loads the link less.
type candidate struct {
	set       bool
	at, n     int
	max, prod float64
}

func (g *grid) candidate(at, n int) candidate {
	prod := min(g.remote[at], g.local(at, n))
	decode := float64(g.sys.LocalInstances-n) * g.sys.DecodeBatch / (g.sys.StepSeconds * g.sys.OutputTokens)
	return candidate{true, at, n, min(prod, decode), prod}
}

// better returns the better of best and the candidate for threshold at and n prefill instances.
func (g *grid) better(best candidate, at, n int) candidate {
	c := g.candidate(at, n)
	switch {
	case !best.set || c.max > best.max:
		return c
	case c.max < best.max || c.prod < best.prod:
		return best
	case c.prod > best.prod || c.n < best.n || c.n == best.n && c.at > best.at:
		return c
	}
	return best
}

func (g *grid) equal(c candidate, at int) bool {
	d := g.candidate(at, c.n)
	return d.max == c.max && d.prod == c.prod
}

func (g *grid) exhaustive() Throughput {
	var best candidate
	for n := range g.sys.LocalInstances {
		for at := range g.splits {
			best = g.better(best, at, n)
		}
	}
	return g.throughput(best)
}

func (g *grid) throughput(c candidate) Throughput {
	return g.sys.combine(g.splits[c.at], Plan{Threshold: g.thresholds[c.at], Prefill: c.n, Decode: g.sys.LocalInstances - c.n})
}

// Homogeneous returns the throughput of the best division of a PD cluster with the given number of
// instances and without a PrfaaS cluster: PrfaaS, Table 6, third column.
func Homogeneous(s System, instances int) (Throughput, error) {
	s.RemoteInstances, s.LocalInstances = 0, instances
	if err := s.Validate(); err != nil {
		return Throughput{}, err
	}
	_, greatest := s.Lengths.Bounds()
	var best Throughput
	for n := range instances {
		if t := s.Evaluate(Plan{Threshold: greatest, Prefill: n, Decode: instances - n}); t.Max > best.Max {
			best = t
		}
	}
	if best.Max == 0 {
		return best, fmt.Errorf("prfaas: %d instances cannot both prefill and decode; at least 2 are needed", instances)
	}
	return best, nil
}

// Naive returns the throughput if every prefill is offloaded and the whole PD cluster decodes:
// PrfaaS, Table 6, fourth column.
func Naive(s System) (Throughput, error) {
	if err := s.Validate(); err != nil {
		return Throughput{}, err
	}
	if s.RemoteInstances == 0 {
		return Throughput{}, fmt.Errorf("prfaas: a PrfaaS cluster of 0 instances cannot take every prefill")
	}
	least, _ := s.Lengths.Bounds()
	return s.Evaluate(Plan{Threshold: least, Prefill: 0, Decode: s.LocalInstances}), nil
}

// Balance returns the threshold, in tokens, at which the PrfaaS clusters and n prefill instances of
// the PD cluster saturate at the same request rate (equation 7). The result lies between the
// lengths of the shortest and the longest prompt. It equals one of these lengths if the same
// cluster saturates first at every threshold.
func Balance(s System, n int) float64 {
	least, greatest := s.Lengths.Bounds()
	return bisect(least, greatest, func(t float64) bool {
		x := s.split(t)
		return over(min(x.remoteCompute, x.egress), x.offloaded) < over(times(n, x.local), 1-x.offloaded)
	})
}
