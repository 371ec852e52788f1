package profile

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/dualpath/batch"
)

// Compute is what a prefill engine does.
type Compute struct {
	// Forwards that were given, Tokens and Seconds of all.
	Forwards int     `json:"forwards"`
	Tokens   int64   `json:"tokens"`
	Seconds  float64 `json:"seconds"`
	// Rate is Tokens/Seconds: what the engine computes at the mix of the log.
	Rate float64 `json:"tokens_per_second"`
	// PerToken and PerPair are the fitted attention model, in seconds; MAPE is its
	// mean absolute relative error, 0.03 is 3 %.
	PerToken float64 `json:"attention_seconds_per_token"`
	PerPair  float64 `json:"attention_seconds_per_pair"`
	MAPE     float64 `json:"attention_mape"`
	// Whole: the log does not tell attention from the rest, so that the model is of
	// whole passes.
	Whole bool `json:"attention_is_whole_pass"`
	// NoModel says why there is no attention model; "": there is one.
	NoModel string `json:"no_attention_model,omitempty"`
	// Context is the median one; FromNothing and AtContext are how many tokens of
	// one request fill Quota.
	Context     int     `json:"median_context"`
	Quota       float64 `json:"quota_seconds"`
	FromNothing int     `json:"quota_tokens_from_nothing"`
	AtContext   int     `json:"quota_tokens_at_median_context"`
}

// Model is the attention model.
func (c Compute) Model() batch.Model {
	return batch.Model{PerToken: c.PerToken, PerPair: c.PerPair}
}

// quotaMost bounds the tokens that are tried against a quota.
const quotaMost = 1 << 24

// Fit is what the forward passes say of an engine. The passes should be as the
// engine makes them in service: Rate is over all of them. They have to differ in
// tokens and in context, or there is no attention model.
func Fit(forwards []Forward, quota time.Duration) (Compute, error) {
	if len(forwards) == 0 {
		return Compute{}, fmt.Errorf("profile: no forward pass")
	}
	if quota <= 0 {
		return Compute{}, fmt.Errorf("profile: a quota of %v; it must be positive", quota)
	}
	c := Compute{Forwards: len(forwards), Quota: quota.Seconds()}
	contexts := make([]int, 0, len(forwards))
	samples := make([]batch.Sample, 0, len(forwards))
	for _, f := range forwards {
		if err := f.check(); err != nil {
			return Compute{}, fmt.Errorf("profile: %w", err)
		}
		c.Tokens += int64(f.Tokens)
		c.Seconds += f.Seconds
		contexts = append(contexts, f.Context)
		c.Whole = c.Whole || f.Attention == 0
	}
	for _, f := range forwards {
		t := f.Attention
		if c.Whole {
			t = f.Seconds
		}
		samples = append(samples, batch.Sample{Cached: f.Context, Compute: f.Tokens, Took: time.Duration(t * 1e9)})
	}
	c.Rate = float64(c.Tokens) / c.Seconds
	slices.Sort(contexts)
	c.Context = contexts[len(contexts)/2]
	m, err := batch.Fit(samples)
	if err != nil {
		c.NoModel = err.Error()
		return c, nil
	}
	c.PerToken, c.PerPair = m.PerToken, m.PerPair
	for _, s := range samples {
		c.MAPE += math.Abs(m.Seconds(s.Cached, s.Compute)/s.Took.Seconds()-1) / float64(len(samples))
	}
	fill := func(context int) int {
		chunks := batch.Pack([]batch.Item{{Cached: context, Compute: quotaMost}}, quota, m, nil)
		if len(chunks) == 0 {
			return 0
		}
		return chunks[0].Compute
	}
	c.FromNothing, c.AtContext = fill(0), fill(c.Context)
	return c, nil
}
