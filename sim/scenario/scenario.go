package scenario

import (
	"context"
	"embed"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/penstock-kv/penstock/internal/yamlfile"
)

//go:embed scenarios/*.yaml
var builtIn embed.FS

// Scenario is one checked file.
type Scenario struct {
	Name, About, Simulator string
	// Seeds are the seeds to run.
	Seeds []uint64
	// run executes one run; it may be called from several goroutines.
	run func(ctx context.Context, seed uint64) (run, error)
}

// run is the result of one seed.
type run struct {
	metrics []Metric // one value each
	digest  uint64
}

// file is the YAML form of a scenario.
type file struct {
	Name      string `yaml:"name"`
	About     string `yaml:"about"`
	Simulator string `yaml:"simulator"`
	// Seeds is the number of runs; the first has the seed Seed.
	Seeds       int              `yaml:"seeds"`
	Seed        int64            `yaml:"seed"`
	Agentic     *agenticFile     `yaml:"agentic"`
	NetKV       *netkvFile       `yaml:"netkv"`
	Datacenters *datacentersFile `yaml:"datacenters"`
}

// seedsMax bounds the runs of a scenario.
const seedsMax = 1000

// Options has the directories of a scenario's files.
type Options struct {
	// Traces are the directories that are searched for traces after the scenario's own directory.
	Traces []string
}

// Find loads a scenario: a built-in one by its name, or a file by its path, which contains a dot or
// a slash.
func Find(name string, opts Options) (*Scenario, error) {
	if raw, err := fs.ReadFile(builtIn, path.Join("scenarios", path.Base(name)+".yaml")); err == nil && path.Base(name) == name {
		return Load("scenarios/"+name+".yaml", raw, opts)
	}
	raw, err := os.ReadFile(name)
	if err != nil {
		if !strings.ContainsAny(name, "./") {
			return nil, fmt.Errorf("no scenario is called %q; built in are %s; a file is named with its path", name, strings.Join(Names(), ", "))
		}
		return nil, err
	}
	return Load(name, raw, opts)
}

// Names returns the names of the built-in scenarios, in alphabetical order.
func Names() []string {
	files, _ := fs.ReadDir(builtIn, "scenarios") // the directory is embedded, so this cannot fail
	var names []string
	for _, f := range files {
		names = append(names, strings.TrimSuffix(f.Name(), ".yaml"))
	}
	slices.Sort(names)
	return names
}

// Source returns the text of a built-in scenario.
func Source(name string) ([]byte, error) {
	return fs.ReadFile(builtIn, path.Join("scenarios", path.Base(name)+".yaml"))
}

// Head has the name, the description and the simulator of a scenario.
type Head struct{ Name, About, Simulator string }

// Heads returns the heads of the built-in scenarios. It does not read their traces.
func Heads() ([]Head, error) {
	var out []Head
	for _, name := range Names() {
		raw, err := Source(name)
		if err != nil {
			return nil, err
		}
		_, c, err := parse("scenarios/"+name+".yaml", raw)
		if err != nil {
			return nil, err
		}
		out = append(out, Head{c.Name, c.About, c.Simulator})
	}
	return out, nil
}

func parse(name string, raw []byte) (*yamlfile.File, file, error) {
	f, err := yamlfile.Parse(name, raw)
	if err != nil {
		return nil, file{}, err
	}
	c := file{Seeds: 1, Seed: 1}
	err = f.Decode(&c)
	return f, c, err
}

// Load reads a scenario. name is its path: errors contain it, and traces are searched first in its
// directory.
func Load(name string, raw []byte, opts Options) (*Scenario, error) {
	f, c, err := parse(name, raw)
	if err != nil {
		return nil, err
	}
	switch {
	case c.Name == "":
		return nil, f.Errorf("name", "is missing; name the scenario")
	case c.Seeds < 1 || c.Seeds > seedsMax:
		return nil, f.Errorf("seeds", "is %d; from 1 to %d runs", c.Seeds, seedsMax)
	case c.Seed < 0:
		return nil, f.Errorf("seed", "is %d; 0 or above", c.Seed)
	}
	s := &Scenario{Name: c.Name, About: c.About, Simulator: c.Simulator}
	for i := range c.Seeds {
		s.Seeds = append(s.Seeds, uint64(c.Seed)+uint64(i))
	}
	at := source{f: f, dir: filepath.Dir(name), opts: opts}
	sections := map[string]bool{"agentic": c.Agentic != nil, "netkv": c.NetKV != nil, "datacenters": c.Datacenters != nil}
	given, known := sections[c.Simulator]
	if !known {
		return nil, f.Errorf("simulator", "is %q; it is agentic, netkv or datacenters", c.Simulator)
	}
	if !given {
		return nil, f.Errorf("simulator", "is %s, and there is no section %s; add one", c.Simulator, c.Simulator)
	}
	for section, there := range sections {
		if there && section != c.Simulator {
			return nil, f.Errorf(section, "is of another simulator than %s; remove it", c.Simulator)
		}
	}
	switch c.Simulator {
	case "agentic":
		s.run, err = c.Agentic.runner(at)
	case "netkv":
		s.run, err = c.NetKV.runner(at)
	default:
		s.run, err = c.Datacenters.runner(at)
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

// SetSeeds sets the number of runs to n, from the scenario's first seed on.
func (s *Scenario) SetSeeds(n int) {
	first := s.Seeds[0]
	s.Seeds = nil
	for i := range min(n, seedsMax) {
		s.Seeds = append(s.Seeds, first+uint64(i))
	}
}

// source is the YAML file of a section, with the directories in which its traces are searched.
type source struct {
	f    *yamlfile.File
	dir  string
	opts Options
}

// bound is the value of a key and the range in which the value must be.
type bound struct {
	path      string
	value     float64
	low, high float64
}

// check returns an error for the first key out of its range.
func (s source) check(bounds ...bound) error {
	for _, b := range bounds {
		if !(b.value >= b.low && b.value <= b.high) {
			if math.IsInf(b.high, 1) {
				return s.f.Errorf(b.path, "is %v; at least %v", b.value, b.low)
			}
			return s.f.Errorf(b.path, "is %v; from %v to %v", b.value, b.low, b.high)
		}
	}
	return nil
}

// refuse converts an error of a simulator to an error about a section of the file.
func (s source) refuse(section string, err error) error {
	return s.f.Errorf(section, "%v", err)
}

// trace finds a trace file: by its path, beside the scenario, or in the directories of
// Options.Traces.
func (s source) trace(key, name string) (string, error) {
	if name == "" {
		return "", s.f.Errorf(key, "is missing; name a trace file")
	}
	tried := []string{name}
	if !filepath.IsAbs(name) {
		tried = append(tried, filepath.Join(s.dir, name))
		for _, d := range s.opts.Traces {
			tried = append(tried, filepath.Join(d, name))
		}
	}
	for _, p := range tried {
		if st, err := os.Stat(p); err == nil && !st.IsDir() {
			return p, nil
		}
	}
	return "", s.f.Errorf(key, "%s is not there; looked for %s; name its directory by PENSTOCK_TRACES", name, strings.Join(tried, ", "))
}

// Metric is one number of a result.
type Metric struct {
	Name string `json:"name"`
	Unit string `json:"unit,omitempty"`
	// Mean and Std are over the seeds; Values are in the order of the seeds.
	Mean   float64   `json:"mean"`
	Std    float64   `json:"std"`
	Values []float64 `json:"values"`
}

// Result is the result of a scenario.
type Result struct {
	Scenario  string   `json:"scenario"`
	About     string   `json:"about,omitempty"`
	Simulator string   `json:"simulator"`
	Seeds     []uint64 `json:"seeds"`
	// Digests has the digest of each run; equal digests mean equal runs.
	Digests []string `json:"digests"`
	Metrics []Metric `json:"metrics"`
}

// RunOptions are the options for running a scenario.
type RunOptions struct {
	// Workers is the number of seeds that run concurrently; 0 means 1.
	Workers int
	// Progress, if not nil, is called at the end of each run, from several goroutines.
	Progress func(done, total int)
}

// Run runs every seed and combines the results.
func (s *Scenario) Run(ctx context.Context, o RunOptions) (*Result, error) {
	runs := make([]run, len(s.Seeds))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(max(o.Workers, 1))
	var mu sync.Mutex
	done := 0
	for i, seed := range s.Seeds {
		g.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			r, err := s.run(ctx, seed)
			if err != nil {
				return fmt.Errorf("scenario %s, seed %d: %w", s.Name, seed, err)
			}
			runs[i] = r
			mu.Lock()
			done++
			d := done
			mu.Unlock()
			if o.Progress != nil {
				o.Progress(d, len(s.Seeds))
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	return s.sum(runs), nil
}

// sum combines the runs, which have the same metrics in the same order.
func (s *Scenario) sum(runs []run) *Result {
	r := &Result{Scenario: s.Name, About: s.About, Simulator: s.Simulator, Seeds: s.Seeds}
	for i, m := range runs[0].metrics {
		m.Values = nil
		for _, x := range runs {
			m.Values = append(m.Values, x.metrics[i].Mean)
		}
		m.Mean, m.Std = deviation(m.Values)
		r.Metrics = append(r.Metrics, m)
	}
	for _, x := range runs {
		r.Digests = append(r.Digests, fmt.Sprintf("%016x", x.digest))
	}
	return r
}

// deviation returns the mean and the sample standard deviation, which is 0 for a single value.
func deviation(v []float64) (mean, std float64) {
	for _, x := range v {
		mean += x / float64(len(v))
	}
	if len(v) < 2 {
		return mean, 0
	}
	for _, x := range v {
		std += (x - mean) * (x - mean) / float64(len(v)-1)
	}
	return mean, math.Sqrt(std)
}

// value returns a metric of one run. NaN or infinity, such as the mean of no values, becomes 0.
func value(name, unit string, v float64) Metric {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		v = 0
	}
	return Metric{Name: name, Unit: unit, Mean: v}
}
