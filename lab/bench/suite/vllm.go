package suite

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/lab/bench"
	"github.com/penstock-kv/penstock/lab/bench/peer"
	"github.com/penstock-kv/penstock/python/engines"
)

// VLLMOptions configures the suite of clusters of vLLM's engines.
type VLLMOptions struct {
	// Pythons are paths of Python interpreters. The suite uses the first that has vLLM and
	// Penstock's Python package.
	Pythons []string
	// Agents is the number of agents. All of them send one prompt of at most PromptTokens tokens at
	// the same time.
	Agents, PromptTokens int
	// RateBits is the rate of an engine's storage NIC, in bits per second.
	RateBits uint64
	// Traces is a directory with the agents' trace. If the trace is missing, the built-in trace is
	// used.
	Traces string
}

// Validate returns an error if the suite cannot use a value.
func (o VLLMOptions) Validate() error {
	switch {
	case o.Agents < 1 || o.Agents > 1000:
		return fmt.Errorf("--agents %d: must be 1 to 1000 with --engines vllm", o.Agents)
	case o.PromptTokens < 128 || o.PromptTokens > 8192:
		return fmt.Errorf("--prompt %d: must be 128 to 8192", o.PromptTokens)
	case o.RateBits < 1e6 || o.RateBits > 1e9:
		return fmt.Errorf("--rate %d: must be 1 to 1000 with --engines vllm", o.RateBits/1e6)
	}
	return nil
}

// vllmSection is the name of the suite in the report.
const vllmSection = "cluster-vllm"

// endMetric is the name of the metric that has the median time from a request's first token to its
// last token.
const endMetric = "end of turn p50 ms"

// vllmSuite is one run of the suite.
type vllmSuite struct {
	*suiteRun
	opts   VLLMOptions
	driver *peer.Driver
	seed   int
}

// ClusterVLLM compares reads by prefill nodes only (basic) with dual path, on clusters of vLLM's
// servers. All replays of a cluster use the same engines and the same node. A section of the report
// compares loads of whole prompts with loads layer by layer.
func ClusterVLLM(ctx context.Context, w World, o VLLMOptions) (_ bench.Report, err error) {
	s := &vllmSuite{suiteRun: newRun(w, vllmSection), opts: o}
	dir, remove, err := s.tempDir("vllm")
	if err != nil {
		return s.report, err
	}
	defer remove()
	found, err := peer.NewStores(filepath.Join(dir, "find"), o.Pythons)
	if err != nil {
		return s.report, err
	}
	python, err := found.Python(ctx, fromVLLM+", and "+fromWheel, "vllm", "penstock")
	if err != nil {
		return s.report, err
	}
	traces, err := s.traces(o.Traces, dir)
	if err != nil {
		return s.report, err
	}
	s.Progress("importing vLLM")
	s.driver, err = peer.StartDriver(ctx, python, engines.Files, filepath.Join(dir, "drivers"), "dualpath_driver.py", "PENSTOCK_TRACES="+traces, "TMPDIR="+dir)
	if err != nil {
		return s.report, err
	}
	defer func() { err = errors.Join(err, s.driver.Close()) }()
	s.setup("vLLM's servers on the CPU in network namespaces; storage NICs of %d Mbit/s each way, compute NICs without a limit", o.RateBits/1e6)
	s.setup("%d agents, prompts of %d tokens at most, which storage has, and %d new tokens each; every token of the output is compared with one vLLM's", o.Agents, o.PromptTokens, lmcacheBlock)
	return s.report, s.all(ctx,
		step{"1P1D", func(ctx context.Context) error { return s.shape(ctx, 1, 1) }},
		step{"1P2D", func(ctx context.Context) error { return s.shape(ctx, 1, 2) }},
		step{"loads", s.loads},
	)
}

// shape compares reads by prefill nodes only (basic) with dual path on one cluster.
func (s *vllmSuite) shape(ctx context.Context, prefill, decode int) (err error) {
	name := fmt.Sprintf("%dP%dD of vLLM where storage is the limit", prefill, decode)
	if !s.wants(name) {
		return nil
	}
	s.Progress(fmt.Sprintf("starting %dP%dD and storing the prompts", prefill, decode))
	var started struct {
		KVBytes float64 `json:"kv_bytes"`
	}
	err = s.driver.Call(ctx, "start", map[string]any{
		"prefill": prefill, "decode": decode, "bits": s.opts.RateBits, "agents": s.opts.Agents, "tokens": s.opts.PromptTokens,
	}, &started)
	defer func() { err = errors.Join(err, s.driver.Call(context.WithoutCancel(ctx), "stop", struct{}{}, nil)) }()
	if err != nil {
		return err
	}
	const basic, dual, summed = "basic", "dualpath", "basic, summed rate"
	bound := float64(prefill+decode) / float64(prefill)
	// The prefill NICs of the contender summed have the rates of all NICs together. Requests reach
	// decode as fast as with dual path, so the engines have as much to compute in the same time.
	// This separates the end of a turn under dual path from that of more requests per second.
	rate := s.opts.RateBits
	return s.compareAfter(ctx, bench.Comparison{
		Name: name,
		Contenders: []bench.Contender{
			s.contender(basic, dualpath.PrefillOnly, rate),
			s.contender(dual, dualpath.Split, rate),
			s.contender(summed, dualpath.PrefillOnly, uint64(float64(rate)*bound)),
		},
		Measures: []bench.Measure{
			{Name: fmt.Sprintf("x of the bound %.2g", bound), Target: bench.AtLeast(0.85), Of: func(r bench.Round) (float64, bool) {
				x, ok := quotient(r, basic, dual)
				return x / bound, ok
			}},
			bench.Ratio("first token, dualpath / basic", tokenMetric, dual, basic, bench.Target{}),
			bench.Ratio("end of turn, dualpath / basic", endMetric, dual, basic, bench.AtMost(1.2)),
			bench.Ratio("end of turn, dualpath / basic with the summed rate", endMetric, dual, summed, bench.Target{}),
			bench.Figure("share of the decode side", "%", decodeMetric, dual, bench.Target{}),
			bench.Figure("basic: failed requests", "", failedMetric, basic, bench.AtMost(0)),
			bench.Figure("dualpath: failed requests", "", failedMetric, dual, bench.AtMost(0)),
			bench.Figure("basic with the summed rate: failed requests", "", failedMetric, summed, bench.AtMost(0)),
		},
		Notes: []string{
			fmt.Sprintf("%.2f MiB of KV for each prompt; the bound (P+D)/P is what the number of storage NICs allows (DualPath, section 4.2)", started.KVBytes/(1<<20)),
			fmt.Sprintf("summed rate: each prefill NIC has %.2g times the rate, as much as all NICs of dualpath together", bound),
		},
	}, 0)
}

// contender returns a contender whose turn replays all prompts; policy determines whether prefill
// nodes, decode nodes or both read. A storage NIC has a rate of rateBits per second.
func (s *vllmSuite) contender(name string, policy dualpath.ReadPolicy, rateBits uint64) bench.Contender {
	return bench.Contender{Name: name, Turn: func(ctx context.Context) (bench.Sample, error) {
		s.seed++
		var r struct {
			Completion float64
			First      float64 `json:"first_token"`
			End        float64 `json:"end_of_turn"`
			Failed     float64
			Bytes      map[string]float64
		}
		if err := s.driver.Call(ctx, "replay", map[string]any{"policy": policy.String(), "seed": s.seed, "bits": rateBits}, &r); err != nil {
			return nil, err
		}
		var decode, whole float64
		for engine, bytes := range r.Bytes {
			whole += bytes
			if engine[0] == 'd' {
				decode += bytes
			}
		}
		return bench.Sample{
			completionMetric: r.Completion, tokenMetric: r.First * 1e3, endMetric: r.End * 1e3, failedMetric: r.Failed,
			decodeMetric: 100 * decode / max(whole, 1), usageMetric: 100 * usage(whole, r.Completion, r.Bytes, policy, rateBits),
		}, nil
	}}
}

// usage returns the used share, 0 to 1, of the capacity of the storage NICs that may read under the
// policy. A NIC has a rate of rateBits per second.
func usage(whole, seconds float64, engines map[string]float64, policy dualpath.ReadPolicy, rateBits uint64) float64 {
	nics := 0
	for engine := range engines {
		if engine[0] == 'p' || policy != dualpath.PrefillOnly {
			nics++
		}
	}
	return whole * 8 / (float64(rateBits) * float64(nics) * max(seconds, time.Millisecond.Seconds()))
}
