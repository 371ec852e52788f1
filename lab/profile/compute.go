package profile

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/dualpath/batch"
)

// Compute is the measured performance of a prefill engine.
type Compute struct {
	// Forwards is the number of forward passes in the log. Tokens and Seconds are sums over all
	// passes.
	Forwards int     `json:"forwards"`
	Tokens   int64   `json:"tokens"`
	Seconds  float64 `json:"seconds"`
	// Rate is Tokens/Seconds: the rate of the engine for the mix of requests in the log.
	Rate float64 `json:"tokens_per_second"`
	// PerToken and PerPair are the coefficients of the fitted attention model, in seconds. MAPE is
	// the mean absolute relative error of the model: 0.03 is 3 %.
	PerToken float64 `json:"attention_seconds_per_token"`
	PerPair  float64 `json:"attention_seconds_per_pair"`
	MAPE     float64 `json:"attention_mape"`
	// Whole is set if the log has no attention times. The model then gives the time of whole
	// passes.
	Whole bool `json:"attention_is_whole_pass"`
	// NoModel is the reason why there is no attention model; empty if there is one.
	NoModel string `json:"no_attention_model,omitempty"`
	// Context is the median context in tokens. FromNothing and AtContext are the numbers of tokens
	// of one request that fill Quota, without context and after Context tokens.
	Context     int     `json:"median_context"`
	Quota       float64 `json:"quota_seconds"`
	FromNothing int     `json:"quota_tokens_from_nothing"`
	AtContext   int     `json:"quota_tokens_at_median_context"`
}

// Model is the attention model.
func (c Compute) Model() batch.Model {
	return batch.Model{PerToken: c.PerToken, PerPair: c.PerPair}
}

// quotaTokensMax is the upper bound of FromNothing and AtContext, in tokens.
const quotaTokensMax = 1 << 24

// Fit computes the performance of an engine from its forward passes. The passes should have the mix
// of the real load, because Rate is the mean over all passes. Tokens and context must vary between
// passes; otherwise there is no attention model.
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
		chunks := batch.Pack([]batch.Item{{Cached: context, Compute: quotaTokensMax}}, quota, m, nil)
		if len(chunks) == 0 {
			return 0
		}
		return chunks[0].Compute
	}
	c.FromNothing, c.AtContext = fill(0), fill(c.Context)
	return c, nil
}
