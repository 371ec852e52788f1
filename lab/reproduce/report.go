package reproduce

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// Suite is the reproduction of one paper.
type Suite struct {
	// Name is the suite's name, such as "netkv".
	Name string
	// Paper is the title of the paper.
	Paper string
	// Drives names the production code that the suite runs, and the server (if any) that runs the
	// same code.
	Drives string
	// Run reports tables and figures. An error ends only this suite.
	Run func(ctx context.Context, r *Report) error
}

// Options are the options for running suites.
type Options struct {
	// Workers is the number of concurrent jobs of Each, over all suites; 0 means 1.
	Workers int
	// Quick skips the longest simulations and runs the others with one seed.
	Quick bool
	// Traces are the directories that Trace searches, in this order.
	Traces []string
	// Progress, if not nil, is called as work is completed, from several goroutines.
	Progress func(suite string, done, total int, what string)
}

// Report collects the results of one suite. Its methods may be called from several goroutines.
type Report struct {
	suite string
	opts  Options
	slots chan struct{} // has Workers slots; each running job of Each holds one

	mu      sync.Mutex
	tables  []Table
	figures []Figure
	missing []Omission
	leftOut []Omission
	faults  []error // reported results that are not valid
}

// Result is the result of one suite.
type Result struct {
	Suite   string   `json:"suite"`
	Paper   string   `json:"paper"`
	Tables  []Table  `json:"tables"`
	Figures []Figure `json:"figures,omitempty"`
	Drives  string   `json:"drives,omitempty"`
	// Missing lists results of the paper that are not reproduced, LeftOut the simulations that a
	// quick run skipped.
	Missing []Omission `json:"not_reproduced,omitempty"`
	LeftOut []Omission `json:"left_out,omitempty"`
	// Err is the reason why the suite ended early, or nil.
	Err error `json:"-"`
	// Elapsed is the run time of the suite on this machine.
	Elapsed time.Duration `json:"-"`
}

// Run runs the suites concurrently and returns their results in the given order. The returned error
// is about ctx or the options; the error of a suite is in the suite's result.
func Run(ctx context.Context, suites []Suite, opts Options) ([]Result, error) {
	if opts.Workers < 0 {
		return nil, fmt.Errorf("reproduce: %d workers; at least 1 is needed", opts.Workers)
	}
	slots := make(chan struct{}, max(1, opts.Workers))
	results := make([]Result, len(suites))
	var wg sync.WaitGroup
	for i, s := range suites {
		r := &Report{suite: s.Name, opts: opts, slots: slots}
		wg.Go(func() {
			start := time.Now()
			err := s.Run(ctx, r)
			r.mu.Lock()
			defer r.mu.Unlock()
			results[i] = Result{
				Suite: s.Name, Paper: s.Paper, Drives: s.Drives, Tables: r.tables, Figures: r.figures, Missing: r.missing, LeftOut: r.leftOut,
				Err: errors.Join(slices.Concat([]error{err}, r.faults)...), Elapsed: time.Since(start),
			}
		})
	}
	wg.Wait()
	return results, ctx.Err()
}

// Table reports one table.
func (r *Report) Table(t Table) {
	var faults []error
	if t.Title == "" || t.Source == "" {
		faults = append(faults, fmt.Errorf("reproduce: table %q of source %q: both must be given", t.Title, t.Source))
	}
	if len(t.Cells) == 0 {
		faults = append(faults, fmt.Errorf("reproduce: table %q has no cells", t.Title))
	}
	seen := make(map[string]bool)
	t.Cells = slices.Clone(t.Cells)
	for i := range t.Cells {
		c := &t.Cells[i]
		if c.Kind == 0 {
			c.Kind = t.Kind
		}
		if err := c.validate(); err != nil {
			faults = append(faults, fmt.Errorf("reproduce: table %q: %w", t.Title, err))
		}
		if seen[c.Name] {
			faults = append(faults, fmt.Errorf("reproduce: table %q has two cells %q", t.Title, c.Name))
		}
		seen[c.Name] = true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tables = append(r.tables, t)
	r.faults = append(r.faults, faults...)
}

// Missing reports a result of the paper that is not reproduced, with the reason.
func (r *Report) Missing(what, why string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.missing = append(r.missing, Omission{what, why})
}

// Quick reports whether the suite must skip its longest simulations. The suite reports the skipped
// simulations with LeftOut.
func (r *Report) Quick() bool { return r.opts.Quick }

// LeftOut reports that this quick run skipped a simulation, with the reason.
func (r *Report) LeftOut(what, why string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.leftOut = append(r.leftOut, Omission{what, why})
}

// Figure reports one figure.
func (r *Report) Figure(f Figure) {
	err := f.Chart.Validate()
	if err == nil && (f.Name == "" || filepath.Base(f.Name) != f.Name) {
		err = fmt.Errorf("reproduce: figure %q: its name must be that of a file without extension", f.Name)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil && slices.ContainsFunc(r.figures, func(g Figure) bool { return g.Name == f.Name }) {
		err = fmt.Errorf("reproduce: two figures are called %q", f.Name)
	}
	if err != nil {
		r.faults = append(r.faults, err)
		return
	}
	r.figures = append(r.figures, f)
}

// Progress reports that done of total parts are complete; what names the work.
func (r *Report) Progress(done, total int, what string) {
	if r.opts.Progress != nil {
		r.opts.Progress(r.suite, done, total, what)
	}
}

// Trace returns the path of a trace file, or an error that lists the searched directories.
func (r *Report) Trace(name string) (string, error) {
	for _, dir := range r.opts.Traces {
		path := filepath.Join(dir, name)
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	if len(r.opts.Traces) == 0 {
		return "", fmt.Errorf("reproduce: trace %s: no trace directory is set; set PENSTOCK_TRACES to one", name)
	}
	return "", fmt.Errorf("reproduce: trace %s is in none of %q; set PENSTOCK_TRACES to its directory", name, r.opts.Traces)
}

// Each calls f for 0 to n-1, concurrently on the workers that all suites share, and reports
// progress. After the first error no further calls begin, and Each waits for the running calls.
// Each must not be called from within f.
func (r *Report) Each(ctx context.Context, what string, n int, f func(ctx context.Context, i int) error) error {
	g, ctx := errgroup.WithContext(ctx)
	var mu sync.Mutex
	done := 0
	r.Progress(0, n, what)
	for i := range n {
		select {
		case r.slots <- struct{}{}:
		case <-ctx.Done():
			if err := g.Wait(); err != nil {
				return err
			}
			return ctx.Err()
		}
		g.Go(func() error {
			defer func() { <-r.slots }()
			if err := f(ctx, i); err != nil {
				return fmt.Errorf("reproduce: %s, part %d of %d: %w", what, i+1, n, err)
			}
			mu.Lock()
			done++
			d := done
			mu.Unlock()
			r.Progress(d, n, what)
			return nil
		})
	}
	return g.Wait()
}
