package batch

import (
	"errors"
	"fmt"
	"math"
	"sort"
	"time"
)

// DefaultQuota is the compute quota of DualPath section A.4.
const DefaultQuota = 300 * time.Millisecond

// Item is one request of a queue: the KV of the first Cached tokens exists, and the next Compute
// tokens must be computed.
type Item struct{ Cached, Compute int }

// Chunk is a part of a batch: the first Compute uncached tokens of item number Index of the queue.
type Chunk struct{ Index, Compute int }

// Model predicts the attention time of a batch, in seconds over all layers. An item with n tokens
// to compute takes PerToken n + PerPair n (cached + n/2), because each of the n tokens attends to
// all tokens before it. So the formula follows the number of operations of causal attention. The
// DualPath paper fits the constants by profiling (section 6.2).
type Model struct {
	// PerToken is in seconds, PerPair in seconds for each pair of a query and a
	// key.
	PerToken, PerPair float64
}

// Validate returns an error that names the constant out of its range.
func (m Model) Validate() error {
	if !(m.PerToken >= 0) || !(m.PerPair >= 0) || m.PerToken+m.PerPair == 0 || math.IsInf(m.PerToken+m.PerPair, 0) {
		return fmt.Errorf("batch: model of %v s a token and %v s a pair: both must be positive or zero, and not both zero", m.PerToken, m.PerPair)
	}
	return nil
}

// Seconds returns the predicted attention time of n tokens that follow the cached tokens.
func (m Model) Seconds(cached, n int) float64 {
	return float64(n) * (m.PerToken + m.PerPair*(float64(cached)+float64(n)/2))
}

// Pack returns the next batch: items from the head of the queue, as long as the predicted attention
// time of the batch is within quota. The last item is cut if it would exceed the quota. No item is
// skipped. An item without tokens to compute takes no time and is packed with 0. The result reuses
// the memory of into, which may be nil.
func Pack(queue []Item, quota time.Duration, m Model, into []Chunk) []Chunk {
	into = into[:0]
	left := quota.Seconds()
	for i, it := range queue {
		if t := m.Seconds(it.Cached, it.Compute); t <= left {
			into = append(into, Chunk{i, it.Compute})
			left -= t
			continue
		}
		// n is the largest number of tokens that fits, because Seconds grows with n.
		n := sort.Search(it.Compute, func(n int) bool { return m.Seconds(it.Cached, n+1) > left })
		if n > 0 {
			into = append(into, Chunk{i, n})
		}
		break
	}
	return into
}

// Sample is one measured batch of a single item.
type Sample struct {
	Cached, Compute int
	Took            time.Duration
}

// Fit returns the model with the least squared relative error over the samples. It needs at least
// two samples with different cached lengths.
func Fit(samples []Sample) (Model, error) {
	// Minimise sum((a x_i + b y_i - 1)^2) for a = PerToken and b = PerPair, with x = n/t and
	// y = n (cached + n/2)/t for a sample of n tokens that took t seconds.
	var xx, xy, yy, x1, y1 float64
	for _, s := range samples {
		t := s.Took.Seconds()
		if t <= 0 || s.Compute <= 0 || s.Cached < 0 {
			return Model{}, fmt.Errorf("batch: sample of %d tokens after %d in %v cannot be fitted", s.Compute, s.Cached, s.Took)
		}
		n := float64(s.Compute)
		x, y := n/t, n*(float64(s.Cached)+n/2)/t
		xx, xy, yy, x1, y1 = xx+x*x, xy+x*y, yy+y*y, x1+x, y1+y
	}
	det := xx*yy - xy*xy
	if len(samples) < 2 || det <= 1e-9*xx*yy {
		return Model{}, errors.New("batch: the samples do not distinguish the cost of a token from that of a pair: vary the cached length")
	}
	m := Model{PerToken: (x1*yy - y1*xy) / det, PerPair: (y1*xx - x1*xy) / det}
	// Noise can make a constant negative. That constant is set to 0, and the other constant is
	// fitted alone.
	switch {
	case m.PerToken < 0:
		m = Model{PerPair: y1 / yy}
	case m.PerPair < 0:
		m = Model{PerToken: x1 / xx}
	}
	return m, m.Validate()
}
