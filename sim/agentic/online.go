package agentic

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/penstock-kv/penstock/internal/options"
	"github.com/penstock-kv/penstock/sim/workload"
)

// SLO is the objective of an online service: upper bounds for the mean TTFT and the mean TPOT over
// a window.
type SLO struct{ TTFT, TPOT time.Duration }

// PaperSLO returns the SLO in section 7.4 of the DualPath paper.
func PaperSLO() SLO { return SLO{TTFT: 4 * time.Second, TPOT: 50 * time.Millisecond} }

// sloWindow is the window over which latencies are compared with the SLO: the paper's sliding
// window.
const sloWindow = 150 * time.Second

// exceeds reports whether the mean TTFT or TPOT of the sloWindow before now exceeds the SLO.
func (s SLO) exceeds(r *Result, now time.Duration) bool {
	w := r.Between(now-sloWindow, now)
	if w.Rounds == 0 {
		return false
	}
	return w.MeanTTFT() > s.TTFT.Seconds() || (w.Second > 0 && w.MeanTPOT() > s.TPOT.Seconds())
}

// Online are the options of an open loop: agents arrive at a given rate, whether or not earlier
// agents are done.
type Online struct {
	// Set has the trajectories of the arriving agents. MaxLen is the maximum length of a
	// trajectory, in tokens.
	Set    []workload.Trajectory
	MaxLen int
	// APS is the number of agents that arrive per second, by a Poisson process.
	APS float64
	// Horizon is the duration of the run, default 90 minutes, because the longest trajectories take
	// more than an hour. The last third counts as steady.
	Horizon time.Duration
	// SLO is the objective; the run ends when the means of a window exceed it. Zero means that no
	// objective is checked.
	SLO SLO
}

// DefaultHorizon is Online.Horizon's default.
const DefaultHorizon = 90 * time.Minute

// RunOnline runs an open loop on the cluster of opts. It sets opts.Agents and opts.Arrivals.
// Result.Exceeded reports whether the run exceeded the SLO.
func RunOnline(ctx context.Context, opts Options, on Online) (*Result, error) {
	options.SetDefault(&on.Horizon, DefaultHorizon)
	if !(on.APS > 0) || math.IsInf(on.APS, 0) || len(on.Set) == 0 {
		return nil, fmt.Errorf("agentic: %v agents a second of a set of %d; both must be positive", on.APS, len(on.Set))
	}
	rng := rand.New(rand.NewPCG(opts.Seed, 0xA95))
	n := int(on.APS*on.Horizon.Seconds()*1.2) + 20
	opts.Agents = workload.Agents(on.Set, n, on.MaxLen, opts.Seed)
	// The order of the set has no meaning, so the agents arrive in random order.
	rng.Shuffle(n, func(i, j int) { opts.Agents[i], opts.Agents[j] = opts.Agents[j], opts.Agents[i] })
	opts.Arrivals = workload.Poisson(n, on.APS, rng)
	opts.Until = on.Horizon
	c, err := New(opts)
	if err != nil {
		return nil, err
	}
	if on.SLO != (SLO{}) {
		c.watch(on.SLO)
	}
	return c.Run(ctx)
}

// watch ends the run when a window exceeds the SLO.
func (c *Cluster) watch(s SLO) {
	var look func()
	look = func() {
		if s.exceeds(&c.result, c.k.Now()) {
			c.result.Exceeded = true
			c.k.Stop()
			return
		}
		c.k.After(SeriesWindow, look)
	}
	c.k.At(sloWindow, look)
}

// Steady returns the sums over the last third of a run with the given horizon.
func (r *Result) Steady(horizon time.Duration) Window {
	return r.Between(horizon-horizon/3, horizon)
}

// Capacity returns the highest arrival rate, in agents per second, at which no window of a run
// exceeds the SLO. It searches the multiples of step up to most by bisection, and returns 0 if no
// rate is sustained. progress, if not nil, is called with each rate and whether the rate was
// sustained.
func Capacity(ctx context.Context, opts Options, on Online, step, most float64, progress func(aps float64, ok bool)) (float64, error) {
	lo, hi := 0, int(most/step+1e-9)+1 // lo is sustained, hi is not
	for hi-lo > 1 {
		mid := (lo + hi) / 2
		on.APS = float64(mid) * step
		r, err := RunOnline(ctx, opts, on)
		if err != nil {
			return 0, err
		}
		if progress != nil {
			progress(on.APS, !r.Exceeded)
		}
		if r.Exceeded {
			hi = mid
		} else {
			lo = mid
		}
	}
	return float64(lo) * step, nil
}
