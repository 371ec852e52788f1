package agentic

import (
	"fmt"
	"math"
	"time"

	"github.com/penstock-kv/penstock/dualpath/batch"
)

// Model is a language model on one kind of GPU.
type Model struct {
	Name string
	// KVBytes is the size of a token's KV over all layers.
	KVBytes int64
	// Linear is the work per token outside of attention, in FLOP. AttentionFixed is the attention
	// work per token, independent of the context; AttentionPerContext is the additional work for
	// each token of context.
	Linear, AttentionFixed, AttentionPerContext float64
	// FLOPS is the rate that one GPU achieves in prefill, per second.
	FLOPS float64
	// A decode step takes StepBase + StepPer*batch.
	StepBase, StepPer time.Duration
	// PrefillHBM and DecodeHBM are the capacities of an engine for KV, in tokens. Layerwise prefill
	// does not use PrefillHBM.
	PrefillHBM, DecodeHBM int
}

// DeepSeek660B is DeepSeek-V3.2, "DS 660B": 37 billion active parameters, sparse attention over
// 2048 tokens chosen by an indexer that looks at all tokens (DualPath Table 1). A token's KV has 61
// layers of 1280 bytes: the latent with 16 bits per value, and the indexer's key with 8 bits per
// value. The job times in the paper imply this size. The paper does not print FLOPS and step times;
// their values here were fitted to its Figures 7 and 10.
func DeepSeek660B() Model {
	return Model{
		Name: "DS 660B", KVBytes: 61 * 1280,
		Linear: 74e9, AttentionFixed: 2 * 61 * 128 * 1088 * 2048, AttentionPerContext: 2 * 61 * 64 * 128,
		FLOPS: 163e12, StepBase: 18 * time.Millisecond, StepPer: 700 * time.Microsecond,
		PrefillHBM: 260_000, DecodeHBM: 600_000,
	}
}

// DeepSeek27B is the paper's scaled-down model, "DS 27B" (section A.2): 30 layers,
// 8 of 74 experts, 4 billion active parameters, sparse attention over 1024 tokens.
func DeepSeek27B() Model {
	const (
		layers, hidden, heads = 30, 2560, 32
		latent, rope, nope, v = 512, 64, 128, 128
		indexHeads, indexDim  = 32, 64
		topK                  = 1024
	)
	attention := layers * (hidden*heads*(nope+rope) + hidden*(latent+rope) + latent*heads*(nope+v) + heads*v*hidden +
		hidden*indexHeads*indexDim + hidden*indexDim + hidden*indexHeads)
	experts := 29*3*hidden*1536*(6+2) + 3*hidden*12288
	return Model{
		Name: "DS 27B", KVBytes: layers * 1216,
		Linear: 2 * float64(attention+experts), AttentionFixed: 2 * layers * heads * (2*latent + rope) * topK, AttentionPerContext: 2 * layers * indexHeads * indexDim,
		FLOPS: 62e12, StepBase: 10 * time.Millisecond, StepPer: 100 * time.Microsecond,
		PrefillHBM: 600_000, DecodeHBM: 1_400_000,
	}
}

// Validate returns an error that names the first value out of its range.
func (m Model) Validate() error {
	for _, f := range []struct {
		name  string
		value float64
	}{
		{"KV bytes of a token", float64(m.KVBytes)}, {"linear work", m.Linear}, {"FLOP/s", m.FLOPS},
		{"decode step", float64(m.StepBase)}, {"decode HBM", float64(m.DecodeHBM)}, {"prefill HBM", float64(m.PrefillHBM)},
	} {
		if !(f.value > 0) || math.IsInf(f.value, 0) {
			return fmt.Errorf("agentic: model %s: %s is %v; it must be positive", m.Name, f.name, f.value)
		}
	}
	for _, v := range []float64{m.AttentionFixed, m.AttentionPerContext, float64(m.StepPer)} {
		if !(v >= 0) || math.IsInf(v, 0) {
			return fmt.Errorf("agentic: model %s: attention work and step time of a request must be 0 or more; one is %v", m.Name, v)
		}
	}
	return nil
}

// Attention returns the model of one engine's attention time that dualpath/batch takes.
func (m Model) Attention() batch.Model {
	return batch.Model{PerToken: m.AttentionFixed / m.FLOPS, PerPair: m.AttentionPerContext / m.FLOPS}
}

// Work returns the FLOP that the prefill of n tokens takes after cached tokens.
func (m Model) Work(cached, n int) float64 {
	return float64(n) * (m.Linear + m.AttentionFixed + m.AttentionPerContext*(float64(cached)+float64(n)/2))
}
