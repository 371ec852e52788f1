package suite

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/penstock-kv/penstock/internal/trace"
	"github.com/penstock-kv/penstock/lab/bench"
	"github.com/penstock-kv/penstock/lab/hitsim"
	"github.com/penstock-kv/penstock/trie/evict"
)

// PolicyOptions configures the policy suite.
type PolicyOptions struct {
	// Files are the traces; none: the small built-in trace.
	Files []string
}

// Policy compares the eviction policies on traces. No time is measured, so the same trace gives the
// same table on every machine.
func Policy(ctx context.Context, w World, o PolicyOptions) (bench.Report, error) {
	s := newRun(w, "policy")
	s.setup("token hit ratio in percent; capacity in percent of the trace's distinct blocks; belady uses the later requests and is the bound")
	files := o.Files
	if len(files) == 0 {
		files = []string{""}
		s.report.NotRun = append(s.report.NotRun, bench.Missing{What: "whole traces", Why: "none was named or found; the built-in sample stands in"})
	}
	var reports []*hitsim.Report
	for _, file := range files {
		r, err := s.policies(ctx, file)
		if err != nil {
			return s.report, err
		}
		reports = append(reports, r)
		s.report.Text = append(s.report.Text, r.String())
	}
	s.setup("winner over all of them: %s; the default is %v", hitsim.Winner(reports...), evict.Default)
	return s.report, nil
}

// policies simulates one trace; "" is the built-in sample.
func (s *suiteRun) policies(ctx context.Context, file string) (*hitsim.Report, error) {
	in, err := trace.Sample(trace.Options{})
	if file != "" {
		in, err = trace.Open(file, trace.Options{})
	}
	if err != nil {
		return nil, err
	}
	defer in.Close()
	t, err := hitsim.Load(in, hitsim.LoadOptions{})
	if err != nil {
		return nil, err
	}
	if file != "" {
		// Drop the directory: it depends only on this machine.
		t.Name = strings.TrimSuffix(strings.TrimSuffix(filepath.Base(file), ".gz"), ".jsonl")
	}
	return hitsim.Run(ctx, t, hitsim.Options{Progress: func(done, total int) {
		s.Progress(fmt.Sprintf("%s: simulation %d of %d", t.Name, done, total))
	}})
}
