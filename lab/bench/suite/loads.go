package suite

import (
	"context"
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/lab/bench"
)

// loadsSection is the name of the section with the comparisons of loads.
const loadsSection = "cluster-vllm-loads"

// Names of contenders, and the values of the connector's option load.
const (
	wholePrompts, loadAsync = "whole prompts", "async"
	layerByLayer, loadLayer = "layers", "layers"
)

// receivedMetric is the name of the metric that has the bytes received by the engine's storage NIC.
const receivedMetric = "received MB"

// loadShape is a comparison of loads. The storage NIC takes times the computation of the new tokens
// to carry the KV of a prompt. Requests are served one by one, or all at once.
type loadShape struct {
	name   string
	times  float64
	atOnce bool
}

var loadShapes = []loadShape{
	{"loads of vLLM where storage is the limit, one by one", 4, false},
	{"loads of vLLM where storage is the limit, at once", 4, true},
	{"loads of vLLM where storage and compute are balanced, one by one", 1, false},
	{"loads of vLLM where storage and compute are balanced, at once", 1, true},
}

// loadsSuite is one run of the section.
type loadsSuite struct {
	*vllmSuite
	// kvBytes is the mean size of a prompt's cached KV. compute is the median time to the first
	// token, in seconds, with a storage NIC that takes almost none of it.
	kvBytes, compute float64
}

// loads compares loads of whole prompts with loads layer by layer, under PenstockConnector. Both
// engines have the same node. Prefill engines of PenstockDualPath have no such choice: they wait for
// storage before the forward pass, and for the other engine in each layer.
func (s *vllmSuite) loads(ctx context.Context) (err error) {
	var names []string
	for _, shape := range loadShapes {
		names = append(names, shape.name)
	}
	if !s.wants(names...) {
		return nil
	}
	section := &loadsSuite{vllmSuite: &vllmSuite{suiteRun: newRun(s.World, loadsSection), opts: s.opts, driver: s.driver}}
	s.Progress("starting vLLM with PenstockConnector and storing the prompts")
	var started struct {
		CachedTokens float64 `json:"cached_tokens"`
		NewTokens    int     `json:"new_tokens"`
		Compute      float64
	}
	err = s.driver.Call(ctx, "start_loads", map[string]any{
		"agents": s.opts.Agents, "tokens": s.opts.PromptTokens, "hidden": modelHidden, "layers": modelLayers,
	}, &started)
	defer func() { err = errors.Join(err, s.driver.Call(context.WithoutCancel(ctx), "stop", struct{}{}, nil)) }()
	if err != nil {
		return err
	}
	section.kvBytes, section.compute = started.CachedTokens*kvTokenBytes, started.Compute
	section.setup("vLLM's servers with PenstockConnector on the CPU in network namespaces; a Llama model of random weights: hidden size %d, %d layers, float32, %d KiB of KV a token", modelHidden, modelLayers, kvTokenBytes>>10)
	section.setup("%d requests: cached prompts of %d tokens at most, %.1f MiB of KV on average, and %d new tokens each; every token of the output is compared with one vLLM's", s.opts.Agents, s.opts.PromptTokens, section.kvBytes/(1<<20), started.NewTokens)
	section.setup("with a storage NIC of 10 Gbit/s the first token of a request came after %.0f ms, which stands for its computation", 1e3*section.compute)
	defer func() { s.report.Sections = append(s.report.Sections, section.report) }()
	for _, shape := range loadShapes {
		if err := section.compareAfter(ctx, section.comparison(shape), 1); err != nil {
			return err
		}
	}
	return nil
}

// rateBits returns the rate of the storage NIC at which the KV of a prompt takes times the
// computation.
func (s *loadsSuite) rateBits(times float64) int64 {
	return int64(8 * s.kvBytes / (times * s.compute))
}

func (s *loadsSuite) comparison(shape loadShape) bench.Comparison {
	bits := s.rateBits(shape.times)
	return bench.Comparison{
		Name:       shape.name,
		Contenders: []bench.Contender{s.loader(wholePrompts, loadAsync, bits, shape.atOnce), s.loader(layerByLayer, loadLayer, bits, shape.atOnce)},
		Measures: []bench.Measure{
			bench.Ratio("first token, layers / whole prompts", tokenMetric, layerByLayer, wholePrompts, bench.Target{}),
			bench.Ratio("completion, layers / whole prompts", completionMetric, layerByLayer, wholePrompts, bench.Target{}),
			bench.Figure("whole prompts: failed requests", "", failedMetric, wholePrompts, bench.AtMost(0)),
			bench.Figure("layers: failed requests", "", failedMetric, layerByLayer, bench.AtMost(0)),
		},
		Notes: []string{fmt.Sprintf("a storage NIC of %.0f Mbit/s, which carries the KV of a prompt in %.0f ms", float64(bits)/1e6, 1e3*shape.times*s.compute)},
	}
}

// loader returns a contender whose turn serves all prompts at the engine with that option load.
// A turn fails if the storage NIC has not carried the KV of all prompts.
func (s *loadsSuite) loader(name, load string, bits int64, atOnce bool) bench.Contender {
	return bench.Contender{Name: name, Turn: func(ctx context.Context) (bench.Sample, error) {
		s.seed++
		var r struct {
			Completion, Failed, Bytes float64
			First                     float64 `json:"first_token"`
		}
		if err := s.driver.Call(ctx, "load", map[string]any{"load": load, "bits": bits, "seed": s.seed, "at_once": atOnce}, &r); err != nil {
			return nil, err
		}
		if whole := s.kvBytes * float64(s.opts.Agents); r.Bytes < whole {
			return nil, fmt.Errorf("the storage NIC received %.0f bytes, less than the %.0f bytes of the cached prompts", r.Bytes, whole)
		}
		return bench.Sample{
			completionMetric: r.Completion, tokenMetric: 1e3 * r.First, failedMetric: r.Failed, receivedMetric: r.Bytes / 1e6,
		}, nil
	}}
}
