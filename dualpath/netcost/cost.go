package netcost

import (
	"fmt"
	"math"
	"time"
)

// Model has the parameters of the cost that do not depend on the network. The zero value selects
// those of the NetKV paper's evaluation: Llama-3-70B on 4 tensor-parallel GPUs (§VI-A). The time of
// a step is from the column with the times between tokens in the paper's results.
type Model struct {
	// Step and StepPerRequest are a and b in the time a + b β of a decode step of β requests
	// (§III-C). Defaults: 12.3 ms and 0.16 ms.
	Step, StepPerRequest time.Duration
	// MaxBatch is βmax, the largest number of requests in a decode batch. Default 64.
	MaxBatch int
	// Reserve is the memory of an instance, in bytes, that is kept free for activations and one
	// more step (m_min in §IV-A). Default 0.
	Reserve int64
	// InFlightMax is the largest number of the scheduler's own transfers that counts in eq. 4
	// (§V-C). Default 16.
	InFlightMax int
	// CongestionHasOwn is set if the operator's telemetry includes the scheduler's own transfers.
	// The cost then does not count these transfers again (§III-D).
	CongestionHasOwn bool
}

// EnsureDefaults fills the fields that are zero.
func (m *Model) EnsureDefaults() {
	if m.Step == 0 && m.StepPerRequest == 0 {
		m.Step, m.StepPerRequest = 12300*time.Microsecond, 160*time.Microsecond
	}
	if m.MaxBatch == 0 {
		m.MaxBatch = 64
	}
	if m.InFlightMax == 0 {
		m.InFlightMax = 16
	}
}

// Validate returns an error that names the first value out of its range.
func (m *Model) Validate() error {
	for _, v := range []struct {
		name       string
		value, min int64
	}{
		{"Step", int64(m.Step), 0}, {"StepPerRequest", int64(m.StepPerRequest), 0}, {"MaxBatch", int64(m.MaxBatch), 1},
		{"Reserve", m.Reserve, 0}, {"InFlightMax", int64(m.InFlightMax), 1},
	} {
		if v.value < v.min {
			return fmt.Errorf("netcost: model: %s is %d; it must be at least %d", v.name, v.value, v.min)
		}
	}
	return nil
}

// Iteration returns the time of one step of a batch of n requests, in seconds (§III-C).
func (m *Model) Iteration(n int) float64 {
	return m.Step.Seconds() + m.StepPerRequest.Seconds()*float64(n)
}

// Wait returns the time that a request waits before its first step on an instance with the given
// number of queued requests and batch size, in seconds (eq. 6): 0 if the batch has a free slot for
// it, otherwise one iteration for each request ahead of it.
func (m *Model) Wait(queued, batch int) float64 {
	return float64(max(0, queued-(m.MaxBatch-batch))) * m.Iteration(batch)
}

// Request is a request whose prefill has ended or will end soon.
type Request[K comparable] struct {
	ID uint64
	// From is the instance that has computed the request's KV.
	From K
	// Tokens is the length of the prompt, Bytes the size of its KV (eq. 1).
	Tokens int
	Bytes  int64
	// Priority is passed on to the operator in the Intent.
	Priority int
}

// Candidate is the scheduler's view of a decode instance (§III-C).
type Candidate[K comparable] struct {
	ID K
	// Hit is the number of leading prompt tokens that the instance holds, in whole blocks (Prefix).
	Hit int
	// Free is the instance's free memory for KV, in bytes.
	Free int64
	// Batch is the number of requests in the instance's decode batch, Queued the number that wait
	// for the batch.
	Queued, Batch int
}

// Validate returns an error if the request is inconsistent.
func (r *Request[K]) Validate() error {
	if r.Tokens <= 0 || r.Bytes < 0 {
		return fmt.Errorf("netcost: request %d has %d tokens and %d bytes of KV; it must have at least one token and no negative size", r.ID, r.Tokens, r.Bytes)
	}
	return nil
}

// missing returns the number of bytes that must be sent to a candidate with the given Hit (eq. 2).
func (r *Request[K]) missing(hit int) float64 {
	hit = min(max(hit, 0), r.Tokens)
	return float64(r.Bytes) * (1 - float64(hit)/float64(r.Tokens))
}

// KVBytes returns the size of the KV of the given number of tokens (eq. 1): keys and values of all
// layers. Llama-3-70B in 16 bits: KVBytes(80, 8, 128, 2, 1) is 320 KiB.
func KVBytes(layers, heads, headSize, elementBytes, tokens int) int64 {
	return 2 * int64(layers) * int64(heads) * int64(headSize) * int64(elementBytes) * int64(tokens)
}

// Prefix returns the length in tokens of the longest run of leading blocks in a cache (§III-B): λ.
// blocks are the chained hashes of the prompt's blocks, of blockTokens tokens each.
func Prefix[H any](blocks []H, blockTokens int, cached func(H) bool) int {
	for i, h := range blocks {
		if !cached(h) {
			return i * blockTokens
		}
	}
	return len(blocks) * blockTokens
}

// Cost is the cost of a candidate, in seconds. Feasible is set if the candidate has enough memory;
// only then can it be chosen. The other fields are always set.
type Cost struct {
	Transfer, Queue, Decode float64
	Tier                    Tier
	// Bytes is the number of bytes to send.
	Bytes    float64
	Feasible bool
}

// Total returns C(d) of eq. 5, the sum of the three times. It is infinite if the candidate is not
// feasible.
func (c *Cost) Total() float64 {
	if !c.Feasible {
		return math.Inf(1)
	}
	return c.Transfer + c.Queue + c.Decode
}

// Cost returns the cost of candidate d for request r by lines 4 to 11 of Algorithm 1.
func (o *Oracle[K]) Cost(r *Request[K], d *Candidate[K]) Cost {
	return o.cost(r, d, signals{congestion: true, own: true})
}

// cost is Cost with only the inputs that see selects.
func (o *Oracle[K]) cost(r *Request[K], d *Candidate[K], see signals) Cost {
	return o.costOver(o.way(r.From, d.ID, see), r, d)
}

// costOver is cost for a known bandwidth and latency to the candidate: w.
func (o *Oracle[K]) costOver(w way, r *Request[K], d *Candidate[K]) Cost {
	c := Cost{Tier: w.tier, Bytes: r.missing(d.Hit)}
	// One byte is the tolerance for the rounding in missing.
	c.Feasible = float64(d.Free)+1 > c.Bytes+float64(o.model.Reserve)
	c.Transfer = c.Bytes/w.bandwidth + w.latency
	c.Queue = o.model.Wait(d.Queued, d.Batch)
	c.Decode = o.model.Iteration(d.Batch + 1)
	return c
}
