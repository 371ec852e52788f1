package netcost

import (
	"fmt"
	"math"
	"time"
)

// Model is what does not depend on the network. The zero value is the paper's
// evaluation: Llama-3-70B at TP=4 (§VI-A), the iteration as its TBT column gives it.
type Model struct {
	// Step and StepPerRequest are a and b of the iteration time a + b β (§III-C).
	// Defaults: 12.3 ms and 0.16 ms.
	Step, StepPerRequest time.Duration
	// MaxBatch is βmax, the requests that decode together. Default 64.
	MaxBatch int
	// Reserve is m_min (§IV-A): bytes of an instance kept for activations and one
	// more step. Default 0.
	Reserve int64
	// InFlightMax caps the scheduler's own transfers in eq. 4 (§V-C). Default 16.
	InFlightMax int
	// CongestionHasOwn: the operator's telemetry counts the scheduler's transfers
	// too, so the count of them is left out (§III-D).
	CongestionHasOwn bool
}

// EnsureDefaults fills what is zero.
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

// Iteration is the time of one step of a batch of n requests, seconds (§III-C).
func (m *Model) Iteration(n int) float64 {
	return m.Step.Seconds() + m.StepPerRequest.Seconds()*float64(n)
}

// Wait is how long a request waits before its first step on an instance with queued
// requests ahead and a batch of that size, seconds (eq. 6): none while there are free
// slots, else one iteration for each that is ahead of it.
func (m *Model) Wait(queued, batch int) float64 {
	return float64(max(0, queued-(m.MaxBatch-batch))) * m.Iteration(batch)
}

// Request is one whose prefill is done, or as good as placed.
type Request[K comparable] struct {
	ID uint64
	// From is the instance that has its KV.
	From K
	// Tokens is the length of the prompt, Bytes the size of its KV (eq. 1).
	Tokens int
	Bytes  int64
	// Priority is for the operator, in the Intent.
	Priority int
}

// Candidate is a decode instance as the scheduler sees it (§III-C).
type Candidate[K comparable] struct {
	ID K
	// Hit is how many leading tokens of the prompt it holds: whole blocks
	// (Prefix).
	Hit int
	// Free is the memory it has left for KV, bytes.
	Free int64
	// Queued are given to it and not in its batch; Batch is the batch's size.
	Queued, Batch int
}

// Validate returns an error if the request contradicts itself.
func (r *Request[K]) Validate() error {
	if r.Tokens <= 0 || r.Bytes < 0 {
		return fmt.Errorf("netcost: request %d has %d tokens and %d bytes of KV; it must have at least one token and no negative size", r.ID, r.Tokens, r.Bytes)
	}
	return nil
}

// missing is what has to be sent to a candidate, bytes (eq. 2).
func (r *Request[K]) missing(hit int) float64 {
	hit = min(max(hit, 0), r.Tokens)
	return float64(r.Bytes) * (1 - float64(hit)/float64(r.Tokens))
}

// KVBytes is the size of the KV of some tokens (eq. 1): keys and values of all
// layers. Llama-3-70B in 16 bits: KVBytes(80, 8, 128, 2, 1) is 320 KiB.
func KVBytes(layers, heads, headSize, elementBytes, tokens int) int64 {
	return 2 * int64(layers) * int64(heads) * int64(headSize) * int64(elementBytes) * int64(tokens)
}

// Prefix is the longest run of leading blocks that a cache holds, in tokens
// (§III-B): λ. blocks are the prompt's chained hashes, of blockTokens each.
func Prefix[H any](blocks []H, blockTokens int, cached func(H) bool) int {
	for i, h := range blocks {
		if !cached(h) {
			return i * blockTokens
		}
	}
	return len(blocks) * blockTokens
}

// Cost is what choosing a candidate costs, in seconds. One that can't be chosen is
// not Feasible, and has the cost it would have.
type Cost struct {
	Transfer, Queue, Decode float64
	Tier                    Tier
	// Bytes are what is sent.
	Bytes    float64
	Feasible bool
}

// Total is C(d) of eq. 5; infinite if the candidate is not feasible.
func (c *Cost) Total() float64 {
	if !c.Feasible {
		return math.Inf(1)
	}
	return c.Transfer + c.Queue + c.Decode
}

// Cost is lines 4 to 11 of Algorithm 1.
func (o *Oracle[K]) Cost(r *Request[K], d *Candidate[K]) Cost {
	return o.cost(r, d, signals{congestion: true, own: true})
}

// cost is Cost with some signals withheld.
func (o *Oracle[K]) cost(r *Request[K], d *Candidate[K], see signals) Cost {
	return o.costOver(o.way(r.From, d.ID, see), r, d)
}

// costOver is cost over a way to the candidate that is known already.
func (o *Oracle[K]) costOver(w way, r *Request[K], d *Candidate[K]) Cost {
	c := Cost{Tier: w.tier, Bytes: r.missing(d.Hit)}
	// A byte is the error of the fraction that is missing.
	c.Feasible = float64(d.Free)+1 > c.Bytes+float64(o.model.Reserve)
	c.Transfer = c.Bytes/w.bandwidth + w.latency
	c.Queue = o.model.Wait(d.Queued, d.Batch)
	c.Decode = o.model.Iteration(d.Batch + 1)
	return c
}
