package emulate

import (
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/dualpath/batch"
)

// Model gives the emulated compute times.
type Model struct {
	// Layers is the number of layers of the model.
	Layers int
	// Attention is the fitted attention time of a batch over all layers. Linear is the
	// remaining compute time, in seconds per token over all layers.
	Attention batch.Model
	Linear    float64
	// One decode step takes Base plus PerRequest for each request in it.
	Base, PerRequest time.Duration
	// Quota limits the attention time of a prefill batch. Default batch.DefaultQuota.
	Quota time.Duration
}

// EnsureDefaults sets each field that is zero to its default.
func (m *Model) EnsureDefaults() {
	if m.Quota == 0 {
		m.Quota = batch.DefaultQuota
	}
}

// Validate returns an error that names the invalid setting.
func (m *Model) Validate() error {
	if m.Layers < 1 {
		return fmt.Errorf("emulate: model of %d layers; at least 1 is needed", m.Layers)
	}
	if m.Linear < 0 || m.Base < 0 || m.PerRequest < 0 || m.Quota < 0 {
		return fmt.Errorf("emulate: negative time: linear %v, decode step %v and %v a request, quota %v; all must be at least 0", m.Linear, m.Base, m.PerRequest, m.Quota)
	}
	return nil
}

// Layer returns the time that one layer of a prefill batch takes.
func (m *Model) Layer(items []batch.Item) time.Duration {
	s := 0.0
	for _, it := range items {
		s += m.Attention.Seconds(it.Cached, it.Compute) + m.Linear*float64(it.Compute)
	}
	return time.Duration(s / float64(m.Layers) * float64(time.Second))
}

// DecodeStep returns the time that one decode step of n requests takes.
func (m *Model) DecodeStep(n int) time.Duration { return m.Base + time.Duration(n)*m.PerRequest }

// take returns the next batch: requests from the head of the queue up to the quota, and at least
// one token. With cut, the last request may be split (dualpath/batch). Without cut, requests are
// not split, and a request that exceeds the quota is a batch of its own. The result reuses the
// memory of into.
func (m *Model) take(queue []batch.Item, cut bool, into []batch.Chunk) []batch.Chunk {
	into = batch.Pack(queue, m.Quota, m.Attention, into)
	if n := len(into) - 1; !cut && n >= 0 && into[n].Compute < queue[into[n].Index].Compute {
		into = into[:n]
	}
	if len(into) > 0 || len(queue) == 0 {
		return into
	}
	whole := queue[0].Compute
	if cut {
		whole = min(whole, 1)
	}
	return append(into, batch.Chunk{Index: 0, Compute: whole})
}
