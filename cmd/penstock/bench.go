package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/pprof"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/lab/bench"
	"github.com/penstock-kv/penstock/lab/bench/suite"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// newBenchCommand returns the command bench. Each of its subcommands runs one suite.
func newBenchCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure this machine and this node, as ratios taken in one run",
		Long: `Compare this node with other programs for the same work on this machine. Contenders
take turns in shuffled order, the ratio is formed within each round, and its median
and spread are printed with the target of the design. Contenders that cannot run are
listed with the reason. docs/benchmarks.md has the last run.

Progress goes to standard error, the result to standard output.`,
	}
	f := addBenchFlags(cmd)
	return noun(cmd,
		newBenchStore(w, f), newBenchIndex(w, f), newBenchServer(w, f), newBenchLocal(w, f), newBenchPolicy(w, f), newBenchRDMA(w, f), newBenchCluster(w, f), newBenchEngines(w, f), newBenchReport(w), newBenchChild(w))
}

// benchFlags are the flags of every suite.
type benchFlags struct {
	data    string
	rounds  int
	seconds float64
	only    string
	among   string
	save    string
	seed    uint64
	profile string
}

func addBenchFlags(cmd *cobra.Command) *benchFlags {
	f := &benchFlags{}
	flags := cmd.PersistentFlags()
	flags.StringVar(&f.data, "data", os.TempDir(), "directory on the disk to be measured; its files are removed at the end")
	flags.IntVar(&f.rounds, "rounds", 5, "turns of each contender")
	flags.Float64Var(&f.seconds, "seconds", 1, "length of one turn")
	flags.StringVar(&f.only, "only", "", "run only the comparisons whose name matches this regular expression")
	flags.StringVar(&f.among, "contenders", "", "run only the contenders whose name matches this regular expression")
	flags.StringVar(&f.save, "save", "", "also write the results to this file, as JSON; with --only they replace the results of the same name in it")
	flags.Uint64Var(&f.seed, "seed", 0, "seed of the order of contenders and of offsets; 0: random")
	flags.StringVar(&f.profile, "cpuprofile", "", "write a CPU profile of this process (not of its children) to this file")
	return f
}

// suiteWorld returns the environment of a suite.
func (f *benchFlags) suiteWorld(w world) (suite.World, error) {
	switch {
	case f.rounds < 1 || f.rounds > 1000:
		return suite.World{}, usagef("--rounds %d: want 1 to 1000", f.rounds)
	case !(f.seconds >= 0.05 && f.seconds <= 3600):
		return suite.World{}, usagef("--seconds %v: want 0.05 to 3600", f.seconds)
	}
	only, err := optionalRegexp("--only", f.only)
	if err != nil {
		return suite.World{}, err
	}
	among, err := optionalRegexp("--contenders", f.among)
	if err != nil {
		return suite.World{}, err
	}
	exe, err := os.Executable()
	if err != nil {
		return suite.World{}, err
	}
	if err := os.MkdirAll(f.data, 0o700); err != nil {
		return suite.World{}, fmt.Errorf("--data: %w", err)
	}
	seed := f.seed
	if seed == 0 {
		seed = rand.Uint64()
	}
	return suite.World{
		Dir: f.data, Rounds: f.rounds, Turn: time.Duration(f.seconds * float64(time.Second)), Only: only, Contenders: among, Seed: seed, Exe: exe,
		Progress: func(text string) { fmt.Fprintln(w.err, text) },
		OpenDevice: func(dir, how string, memory []byte) (blockio.Device, error) {
			d, err := openDevice(dir, how, memory)
			return d.Device, err
		},
		NewEngine: func(ctx context.Context, conns int) (rdma.Engine, error) {
			return tcp.New(ctx, tcp.Options{Conns: conns, ZeroCopy: true})
		},
	}, nil
}

func optionalRegexp(flag, text string) (*regexp.Regexp, error) {
	if text == "" {
		return nil, nil
	}
	r, err := regexp.Compile(text)
	if err != nil {
		return nil, usagef("%s: %w", flag, err)
	}
	return r, nil
}

// run runs a suite, prints its report and saves it.
func (f *benchFlags) run(cmd *cobra.Command, w world, do func(context.Context, suite.World) (bench.Report, error)) error {
	sw, err := f.suiteWorld(w)
	if err != nil {
		return err
	}
	stop, err := f.startProfile()
	if err != nil {
		return err
	}
	report, err := do(cmd.Context(), sw)
	if err := errors.Join(err, stop()); err != nil {
		return err
	}
	if f.only != "" && report.Empty() && len(report.Sections) == 0 {
		return usagef("--only %q matches no comparison of %s", f.only, cmd.CommandPath())
	}
	report.Ran(suite.Machine(f.data), commitName(), benchCommandLine(cmd))
	if f.save != "" {
		if err := saveReport(f.save, report); err != nil {
			return err
		}
	}
	out := outputOf(cmd)
	if out.json {
		return report.WriteJSON(out.w)
	}
	_, err = fmt.Fprintf(out.w, "%s\n\n%s", report.Machine, report.Markdown())
	return err
}

// startProfile starts the profile that the flags request.
func (f *benchFlags) startProfile() (stop func() error, err error) {
	if f.profile == "" {
		return func() error { return nil }, nil
	}
	out, err := os.Create(f.profile)
	if err != nil {
		return nil, fmt.Errorf("--cpuprofile: %w", err)
	}
	if err := pprof.StartCPUProfile(out); err != nil {
		return nil, errors.Join(err, out.Close())
	}
	return func() error {
		pprof.StopCPUProfile()
		return out.Close()
	}, nil
}

// benchCommandLine returns the command line that repeats the run, with the relevant flags.
func benchCommandLine(cmd *cobra.Command) string {
	line := []string{cmd.CommandPath()}
	names := []string{"provider", "size", "blocks", "rounds", "seconds", "engine-rounds", "sessions", "prompt"}
	switch {
	case cmd.Name() == "policy": // it has no turns
		names = nil
	case cmd.Name() == "cluster":
		names = []string{"engines", "agents", "rate", "rounds"}
		if kind := cmd.Flags().Lookup("engines").Value.String(); kind == emulatedEngines {
			names = append(names, "turns", "skip", "divide")
		} else {
			names = append(names, "prompt")
		}
	}
	for _, name := range names {
		if f := cmd.Flags().Lookup(name); f != nil {
			line = append(line, "--"+name, strings.ReplaceAll(f.Value.String(), " ", ""))
		}
	}
	return strings.Join(line, " ")
}

// commitName returns the commit of this program, from the linker or from git in the build tree.
func commitName() string {
	if b := readBuildInfo(); b.Revision != "" {
		return shortCommit(b.Revision)
	}
	out, err := exec.Command("git", "describe", "--always", "--dirty", "--abbrev=12").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(out))
}

func shortCommit(c string) string {
	const digits = 12
	if len(c) > digits {
		return c[:digits]
	}
	return c
}

// saveReport writes the report to the file path. If the file has a report of the same suite,
// saveReport merges the new report into it.
func saveReport(path string, report bench.Report) error {
	if old, err := os.Open(path); err == nil {
		before, err := bench.ReadReport(old)
		old.Close()
		if err == nil && before.Suite == report.Suite {
			report = before.Merge(report)
		}
	}
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("--save: %w", err)
	}
	return errors.Join(report.WriteJSON(f), f.Close())
}

// sized makes cmd run a suite by calling do. The flag --size sets *bytes; a value below least is a
// usage error.
func (f *benchFlags) sized(cmd *cobra.Command, w world, bytes *int64, least int64, do func(context.Context, suite.World) (bench.Report, error)) *cobra.Command {
	cmd.Args = args(cobra.NoArgs)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *bytes < least {
			return usagef("--size %s: want at least %s", size(*bytes), size(least))
		}
		return f.run(cmd, w, do)
	}
	return cmd
}

func newBenchStore(w world, f *benchFlags) *cobra.Command {
	o := suite.StoreOptions{SizeBytes: 2 << 30}
	cmd := &cobra.Command{Use: "store", Short: "Verified reads and writes against fio, ReadAt and a file per block"}
	cmd.Flags().Var(sizeFlag{&o.SizeBytes}, "size", "size of the files that are read")
	return f.sized(cmd, w, &o.SizeBytes, 256<<20, func(ctx context.Context, sw suite.World) (bench.Report, error) {
		return suite.Store(ctx, sw, o)
	})
}

func newBenchIndex(w world, f *benchFlags) *cobra.Command {
	var o suite.IndexOptions
	cmd := &cobra.Command{
		Use:   "index",
		Short: "Prefix matches, commits, bytes for each block, recovery after kill -9",
		Args:  args(cobra.NoArgs),
	}
	cmd.Flags().IntVar(&o.Blocks, "blocks", 2_000_000, "blocks in the index")
	cmd.Flags().IntVar(&o.NodeBlocks, "node-blocks", 2_000_000, "blocks of the node that is killed and recovered, 8 KiB of disk each; 0 leaves that out")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if o.Blocks < 1<<15 || o.NodeBlocks < 0 {
			return usagef("--blocks %d: want at least %d; --node-blocks %d: want at least 0", o.Blocks, 1<<15, o.NodeBlocks)
		}
		return f.run(cmd, w, func(ctx context.Context, sw suite.World) (bench.Report, error) { return suite.Index(ctx, sw, o) })
	}
	return cmd
}

func newBenchServer(w world, f *benchFlags) *cobra.Command {
	o := suite.ServerOptions{DiskBytes: 4 << 30}
	cmd := &cobra.Command{Use: "server", Short: "Reads from another process against iperf3, a gRPC stream, Redis and fio"}
	cmd.Flags().Var(sizeFlag{&o.DiskBytes}, "size", "size of the set that is read from disk, more than the node can keep in memory")
	return f.sized(cmd, w, &o.DiskBytes, 1<<30, func(ctx context.Context, sw suite.World) (bench.Report, error) {
		return suite.Server(ctx, sw, o)
	})
}

func newBenchEngines(w world, f *benchFlags) *cobra.Command {
	o := suite.EnginesOptions{AreaBytes: 128 << 20, Turns: suite.TurnsOptions{Rounds: 2, Sessions: 4, PromptTokens: 1536}}
	cmd := &cobra.Command{
		Use:   "engines",
		Short: "Penstock under vLLM, and its Python client, against other stores of inference engines",
		Long: `The suite has two parts. The first part puts and gets values of 1 and 4 MiB, by 1 and 4
threads, one at a time and in batches of 8. It compares Penstock's Python client, Mooncake
Store over TCP, LMCache's file system adapters, SGLang's HiCacheFile, Redis and a file for
each value. iperf3 and fio measure the limits of network and disk.

The second part serves agent sessions with vLLM on the CPU, with a model of random weights
that it makes. It compares vLLM alone, with its tier of files, with its offloading to disk,
with LMCache's disk, with PenstockTier and with PenstockConnector, which loads whole blocks
before the request runs, or layer by layer. It measures the time to the first token, and
counts the tokens that are computed again, in a first turn and in the last turn of a session
in a fresh engine. Its comparisons are named "first token, …". The sessions are those of
$PENSTOCK_TRACES or of a built-in trace.

Each store and each engine runs in a Python process. --python names the interpreters
whose packages may be used; .ci/python-venv prints the directory of an environment that it
installs from a lock file. A store or an engine without a package in these interpreters is
not run, and the report names it.`,
		Example: `  penstock bench engines --python "$(.ci/python-venv engines/stores.lock)/bin/python" --only "get 1 MiB"
  penstock bench engines --python "$(.ci/python-venv engines/vllm.lock)/bin/python" --only "first token"`,
	}
	cmd.Flags().StringArrayVar(&o.Pythons, "python", []string{"python3"}, "interpreter whose packages may be used; may be repeated")
	cmd.Flags().Var(sizeFlag{&o.AreaBytes}, "size", "size of the values that one pass puts or gets")
	cmd.Flags().IntVar(&o.Turns.Rounds, "engine-rounds", o.Turns.Rounds, "rounds of the engines; each starts two engines of a kind and serves sessions of its own")
	cmd.Flags().IntVar(&o.Turns.Sessions, "sessions", o.Turns.Sessions, "agent sessions of a round")
	cmd.Flags().IntVar(&o.Turns.PromptTokens, "prompt", o.Turns.PromptTokens, "tokens of the longest prompt of a session, at most")
	return f.sized(cmd, w, &o.AreaBytes, 128<<20, func(ctx context.Context, sw suite.World) (bench.Report, error) {
		if o.AreaBytes%(128<<20) != 0 { // one batch of each of 4 threads: 8 values of 4 MiB
			return bench.Report{}, usagef("--size %s: want a multiple of 128 MiB", size(o.AreaBytes))
		}
		if err := o.Turns.Validate(); err != nil {
			return bench.Report{}, usagef("%w", err)
		}
		o.Turns.Traces = w.env("PENSTOCK_TRACES")
		return suite.Engines(ctx, sw, o)
	})
}

func newBenchLocal(w world, f *benchFlags) *cobra.Command {
	return &cobra.Command{
		Use:   "local",
		Short: "Blocks handed over in the shared arena against blocks moved over TCP",
		Args:  args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.run(cmd, w, suite.Local)
		},
	}
}

func newBenchPolicy(w world, f *benchFlags) *cobra.Command {
	return &cobra.Command{
		Use:   "policy [TRACE…]",
		Short: "Hit ratios of the eviction policies on request traces",
		Long: `Simulate each eviction policy on request traces, at five capacities, and print the
share of the prompts' tokens that it would have found. Without arguments the traces are
read from $PENSTOCK_TRACES or from shared/traces in or beside this directory; a
small trace is built in.`,
		RunE: func(cmd *cobra.Command, files []string) error {
			if len(files) == 0 {
				files = sharedTraces(w.env("PENSTOCK_TRACES"))
			}
			return f.run(cmd, w, func(ctx context.Context, sw suite.World) (bench.Report, error) {
				return suite.Policy(ctx, sw, suite.PolicyOptions{Files: files})
			})
		},
	}
}

// sharedTraces searches for three traces that compare eviction policies: dense prefixes, sequential
// conversations, and agents. It uses the first directory that has any of the three, and returns the
// paths of the traces there.
func sharedTraces(dir string) (found []string) {
	for _, d := range []string{dir, filepath.Join("shared", "traces"), filepath.Join("..", "shared", "traces")} {
		if d == "" {
			continue
		}
		for _, name := range []string{"mooncake_conversation_trace.jsonl.gz", "mooncake_synthetic_trace.jsonl.gz", "kv_cache_tester_agentic.jsonl.gz"} {
			if path := filepath.Join(d, name); fileExists(path) {
				found = append(found, path)
			}
		}
		if len(found) > 0 {
			return found
		}
	}
	return nil
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// newBenchReport returns the command that writes saved results into pages.
func newBenchReport(w world) *cobra.Command {
	var into string
	cmd := &cobra.Command{
		Use:   "report FILE.json… --into PAGE.md",
		Short: "Put saved results into a page and the pages in its folder, between their markers",
		Args:  args(cobra.MinimumNArgs(1)),
	}
	cmd.Flags().StringVar(&into, "into", filepath.Join("docs", "benchmarks.md"),
		"page of the summary; the tables go to it or to a page in the folder of the same name, which has the lines <!-- SUITE --> and <!-- /SUITE -->")
	cmd.RunE = func(_ *cobra.Command, files []string) error {
		pages, err := readPages(into)
		if err != nil {
			return err
		}
		before := maps.Clone(pages)
		for _, name := range files {
			report, err := readReport(name)
			if err != nil {
				return err
			}
			if err := pages.Put(report); err != nil {
				return err
			}
		}
		for _, page := range slices.Sorted(maps.Keys(pages)) {
			if pages[page] == before[page] {
				continue
			}
			if err := os.WriteFile(page, []byte(pages[page]), 0o644); err != nil {
				return err
			}
			if _, err := fmt.Fprintf(w.out, "wrote %s\n", page); err != nil {
				return err
			}
		}
		return nil
	}
	return cmd
}

// readPages returns a summary page, such as docs/benchmarks.md, and all pages in the folder
// docs/benchmarks.
func readPages(summary string) (bench.Pages, error) {
	text, err := os.ReadFile(summary)
	if err != nil {
		return nil, fmt.Errorf("--into: %w", err)
	}
	pages := bench.Pages{summary: string(text)}
	others, err := filepath.Glob(filepath.Join(strings.TrimSuffix(summary, filepath.Ext(summary)), "*.md"))
	if err != nil {
		return nil, fmt.Errorf("--into: %w", err)
	}
	for _, name := range others {
		if text, err = os.ReadFile(name); err != nil {
			return nil, err
		}
		pages[name] = string(text)
	}
	return pages, nil
}

func readReport(name string) (bench.Report, error) {
	in, err := os.Open(name)
	if err != nil {
		return bench.Report{}, err
	}
	defer in.Close()
	report, err := bench.ReadReport(in)
	if err != nil {
		return report, fmt.Errorf("%s: %w", name, err)
	}
	return report, nil
}
