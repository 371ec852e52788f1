package netkv

import (
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/dualpath/netcost"
	"github.com/penstock-kv/penstock/sim/workload"
)

// Workload is one of the paper's three workloads, applied to the trace.
type Workload struct {
	workload.Profile
	// Scale multiplies the trace's input lengths before they are filtered.
	Scale float64
	// Capacity is the rate that counts as 100 %, in requests per second.
	Capacity float64
	// Weights are the result of the paper's grid search for the policy CLA*; zero means (1, 1).
	Weights netcost.Weights
}

// Requests returns the numbers of measured and warm-up requests of a run: the arrivals of 15 s and
// of 5 s at 100 % load. They are the same at every load.
func (w Workload) Requests() (measured, warmup int) {
	return int(w.Capacity*15 + 0.5), int(w.Capacity*5 + 0.5)
}

// Take returns the requests of the window of the trace that begins at from. Their times are
// compressed so that the rate is load times the capacity.
func (w Workload) Take(trace []workload.Arrival, from time.Duration, load float64) ([]workload.Arrival, error) {
	all := w.Filter(workload.ScaleInputs(trace, w.Scale))
	measured, warmup := w.Requests()
	rest := workload.Window(all, from, 1<<62)
	if len(rest) < measured+warmup {
		return nil, fmt.Errorf("netkv: %d requests of %s from %v on; %d are needed: begin earlier", len(rest), w.Name, from, measured+warmup)
	}
	return workload.Compress(rest[:measured+warmup], w.Capacity*load)
}
