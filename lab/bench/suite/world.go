package suite

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/sys"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/lab/bench"
	"github.com/penstock-kv/penstock/lab/bench/peer"
	"github.com/penstock-kv/penstock/rdma"
)

// World is the environment that the command passes to a suite.
type World struct {
	// Dir is the directory for data; it is on the disk to be measured.
	Dir string
	// Rounds is the number of rounds per comparison, Turn the duration of one contender's turn.
	Rounds int
	Turn   time.Duration
	// Only, if set, selects comparisons by name.
	Only *regexp.Regexp
	// Contenders, if set, selects contenders by name, for example to run only one.
	Contenders *regexp.Regexp
	// Seed makes the order of contenders and the offsets repeatable.
	Seed uint64
	// Progress is called with a description of the current work.
	Progress func(text string)

	// Exe is the path of this program, for child processes.
	Exe string
	// OpenDevice opens a device for the directory dir with the given backend (uring or posix).
	// memory is the memory into which the device reads.
	OpenDevice func(dir, how string, memory []byte) (blockio.Device, error)
	// NewEngine makes a client's transfer engine with conns connections to each peer.
	NewEngine func(ctx context.Context, conns int) (rdma.Engine, error)
}

// suiteRun collects the results of one suite.
type suiteRun struct {
	World
	report bench.Report
	rng    *rand.Rand
}

func newRun(w World, suite string) *suiteRun {
	return &suiteRun{World: w, report: bench.Report{Suite: suite}, rng: rand.New(rand.NewPCG(w.Seed, 1))}
}

// wants reports whether one of the comparisons was selected. A suite skips the setup of comparisons
// that were not selected.
func (s *suiteRun) wants(names ...string) bool {
	if s.Only == nil {
		return true
	}
	for _, n := range names {
		if s.Only.MatchString(n) {
			return true
		}
	}
	return false
}

// compare runs a comparison, if it was selected, with one warm-up round.
func (s *suiteRun) compare(ctx context.Context, c bench.Comparison) error {
	return s.compareAfter(ctx, c, 1)
}

// compareAfter runs a comparison, if it was selected, with warmup warm-up rounds.
func (s *suiteRun) compareAfter(ctx context.Context, c bench.Comparison, warmup int) error {
	if !s.wants(c.Name) {
		return nil
	}
	if s.Contenders != nil {
		c.Contenders = slices.DeleteFunc(c.Contenders, func(k bench.Contender) bool { return !s.Contenders.MatchString(k.Name) })
	}
	res, err := bench.Run(ctx, c, bench.RunOptions{Rounds: s.Rounds, Warmup: warmup, Rand: s.rng, Progress: s.Progress})
	if err != nil {
		return err
	}
	s.report.Results = append(s.report.Results, res)
	return nil
}

// step is a part of a suite that can fail on its own.
type step struct {
	name string
	do   func(context.Context) error
}

// all runs the steps in order. If a step fails, the report names the step, and the next step runs.
func (s *suiteRun) all(ctx context.Context, steps ...step) error {
	for _, p := range steps {
		err := p.do(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			s.report.NotRun = append(s.report.NotRun, bench.Missing{What: p.name, Why: err.Error()})
		}
	}
	return nil
}

// setup adds a note about the whole suite to the report.
func (s *suiteRun) setup(format string, args ...any) {
	s.report.Setup = append(s.report.Setup, fmt.Sprintf(format, args...))
}

// tempDir makes a directory below Dir and returns a function that removes it.
func (s *suiteRun) tempDir(name string) (string, func(), error) {
	dir, err := os.MkdirTemp(s.Dir, "penstock-bench-"+name+"-")
	if err != nil {
		return "", nil, err
	}
	return dir, func() { _ = os.RemoveAll(dir) }, nil
}

// needSpace returns an error if the disk has less than the given number of free bytes.
func (s *suiteRun) needSpace(bytes int64) error {
	_, free, err := sys.Space(s.Dir)
	if err != nil {
		return err
	}
	if free < bytes+bytes/8 {
		return fmt.Errorf("%s has %.1f GiB free and %.1f GiB are needed: choose another --data directory or a smaller size", s.Dir, gib(free), gib(bytes+bytes/8))
	}
	return nil
}

// newArena makes an arena with the options of the product.
func newArena(bytes int64) (*arena.Arena, error) { return arena.New(arena.Options{SizeBytes: bytes}) }

// pages returns a description of an arena's pages.
func pages(a *arena.Arena) string {
	switch a.Kind() {
	case arena.THP:
		return "transparent huge pages"
	case arena.HugeTLB:
		return "reserved huge pages"
	}
	return "4 KiB pages, which halve the bandwidth"
}

// drive starts callers goroutines, each of which calls f at least once and until d has elapsed. f
// returns the number of bytes that it moved. drive returns the rate in units of unitBytes per
// second, and the processor time of this process and of others.
func drive(ctx context.Context, d time.Duration, callers int, unitBytes float64, others []*peer.Process, f func(caller int) (int64, error)) (bench.Sample, error) {
	meter, err := startMeter(others)
	if err != nil {
		return nil, err
	}
	var moved atomic.Int64
	errs := make([]error, callers)
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			for once := true; ctx.Err() == nil && (once || time.Since(meter.start) < d); once = false {
				n, err := f(i)
				if err != nil {
					errs[i] = err
					return
				}
				moved.Add(n)
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return meter.stop(moved.Load(), unitBytes)
}

// meter measures elapsed time and processor time.
type meter struct {
	start  time.Time
	cpu    time.Duration
	others []*peer.Process
}

func startMeter(others []*peer.Process) (meter, error) {
	cpu, err := cpuOf(others)
	return meter{time.Now(), cpu, others}, err
}

// cpuOf returns the processor time of this process and of others.
func cpuOf(others []*peer.Process) (time.Duration, error) {
	total := peer.SelfCPU()
	for _, p := range others {
		cpu, err := p.CPU()
		if err != nil {
			return 0, err
		}
		total += cpu
	}
	return total, nil
}

func (m meter) stop(bytes int64, unitBytes float64) (bench.Sample, error) {
	took := time.Since(m.start)
	cpu, err := cpuOf(m.others)
	if err != nil {
		return nil, err
	}
	return bench.Sample{
		bench.Rate: float64(bytes) / unitBytes / took.Seconds(),
		bench.CPU:  (cpu - m.cpu).Seconds() * 1e3 / gib(bytes),
	}, nil
}

const (
	mib = 1 << 20
	gi  = 1 << 30
)

func gib(bytes int64) float64 { return float64(bytes) / gi }

// sizeName returns the name of a size that is a power of two, for example 4 MiB.
func sizeName(bytes int64) string {
	if bytes >= mib {
		return fmt.Sprintf("%d MiB", bytes/mib)
	}
	return fmt.Sprintf("%d KiB", bytes>>10)
}

// Machine returns a one-line description of the machine on which a run took place.
func Machine(dir string) string {
	read := func(path string) string {
		b, err := os.ReadFile(path)
		if err != nil {
			return ""
		}
		return strings.TrimSpace(string(b))
	}
	model, cores := "unknown CPU", 0
	for line := range strings.Lines(read("/proc/cpuinfo")) {
		name, value, _ := strings.Cut(line, ":")
		switch strings.TrimSpace(name) {
		case "processor":
			cores++
		case "model name":
			model = strings.TrimSpace(value)
		}
	}
	memory := ""
	for line := range strings.Lines(read("/proc/meminfo")) {
		var kb int64
		if n, _ := fmt.Sscanf(line, "MemTotal: %d kB", &kb); n == 1 {
			memory = fmt.Sprintf("%.0f GiB", gib(kb<<10))
		}
	}
	return fmt.Sprintf("%d × %s, %s, Linux %s, %s", cores, model, memory, read("/proc/sys/kernel/osrelease"), fileSystem(dir))
}

// fileSystem returns the name of the file system of dir.
func fileSystem(dir string) string {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "unknown file system"
	}
	b, err := os.ReadFile("/proc/mounts")
	if err != nil {
		return "unknown file system"
	}
	best, found := -1, "unknown file system"
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) > 3 && len(f[1]) > best && (abs == f[1] || strings.HasPrefix(abs, strings.TrimSuffix(f[1], "/")+"/")) {
			best, found = len(f[1]), fmt.Sprintf("%s on %s", f[2], f[0])
		}
	}
	return found
}
