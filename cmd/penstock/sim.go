package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/internal/chart"
	"github.com/penstock-kv/penstock/lab/reproduce"
)

func newSimCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "sim",
		Short: "Run the planner in virtual time, and reproduce the papers",
	}
	return noun(cmd, newSimRun(w), newSimList(), newSimCompare(w), newSimReproduce(w))
}

// reproduction has the flags of `penstock sim reproduce`.
type reproduction struct {
	out     string
	page    string
	workers int
	quick   bool
}

func newSimReproduce(w world) *cobra.Command {
	var f reproduction
	cmd := &cobra.Command{
		Use:   "reproduce [SUITE…]",
		Short: "The papers' tables beside ours, with the deviation of each cell",
		Long: `Run the simulators and the closed forms behind the papers' tables and print each number
beside the published one, with its deviation and its accepted range. Each number is
predicted, fitted, derived, or a check without a published value; the totals count
predictions only. A suite is one paper: ` + strings.Join(suiteNames(), ", ") + `;
without a name all are run.

The exit code is 1 if a number is out of its range, deviates from the paper without a
note, or could not be computed. Some suites need traces, which are read from
$PENSTOCK_TRACES or from shared/traces in or beside this directory.

Everything happens in virtual time, and every seed is fixed: two runs give the same
numbers, on any machine.`,
		Example: `  penstock sim reproduce prfaas
  penstock sim reproduce --quick
  penstock sim reproduce --out results --write docs/reproduction.md`,
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return suiteNames(), cobra.ShellCompDirectiveNoFileComp
		},
	}
	cmd.Flags().StringVar(&f.out, "out", "", "directory for results.json and each figure as PNG and SVG; made if it does not exist")
	cmd.Flags().StringVar(&f.page, "write", "", "page to write, as markdown: the tables of the suites that were run; figures go to a directory beside it")
	cmd.Flags().BoolVar(&f.quick, "quick", false, "omit the longest simulations and all seeds but the first, and list what was omitted; the accepted ranges stay the same")
	cmd.Flags().IntVar(&f.workers, "workers", runtime.GOMAXPROCS(0), "concurrent simulations")
	cmd.Flag("workers").DefValue = "one a core"
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		suites, err := reproduce.Find(names)
		if err != nil {
			return usageError{err}
		}
		if f.workers < 1 {
			return usagef("--workers %d: it must be at least 1", f.workers)
		}
		return f.run(cmd, w, suites)
	}
	return cmd
}

func suiteNames() []string {
	var names []string
	for _, s := range reproduce.Suites() {
		names = append(names, s.Name)
	}
	return names
}

func (f reproduction) run(cmd *cobra.Command, w world, suites []reproduce.Suite) error {
	results, err := reproduceSuites(cmd.Context(), w, suites, f.workers, f.quick)
	if err != nil {
		return err
	}
	if err := f.write(results); err != nil {
		return err
	}
	out := outputOf(cmd)
	if out.json {
		err = out.emitJSON(reproduce.JSON(results), "  ")
	} else {
		err = reproduce.WriteText(out.w, results)
	}
	if err != nil {
		return err
	}
	for _, r := range results {
		if !r.Summarize().OK() {
			return errReported
		}
	}
	return nil
}

// reproduceSuites runs the suites with one progress bar.
func reproduceSuites(ctx context.Context, w world, suites []reproduce.Suite, workers int, quick bool) ([]reproduce.Result, error) {
	bar := newProgress(w, "reproduce", unitRuns)
	defer bar.finish()
	var mu sync.Mutex
	type part struct{ suite, what string }
	done, total := make(map[part]int), make(map[part]int)
	return reproduce.Run(ctx, suites, reproduce.Options{
		Workers: workers,
		Quick:   quick,
		Traces:  traceDirs(w.env("PENSTOCK_TRACES")),
		Progress: func(suite string, n, of int, what string) {
			mu.Lock()
			p := part{suite, what}
			done[p], total[p] = max(done[p], n), of
			var d, t int
			for p := range total {
				d, t = d+done[p], t+total[p]
			}
			mu.Unlock()
			bar.note(int64(d), int64(t), suite+": "+what)
		},
	})
}

// write saves the files of --out and --write.
func (f reproduction) write(results []reproduce.Result) error {
	if f.out != "" {
		if _, err := reproduce.SaveFigures(f.out, results); err != nil {
			return fmt.Errorf("--out: %w", err)
		}
		if err := os.MkdirAll(f.out, 0o755); err != nil {
			return fmt.Errorf("--out: %w", err)
		}
		if err := writeTo(filepath.Join(f.out, "results.json"), func(file *os.File) error { return reproduce.WriteJSON(file, results) }); err != nil {
			return fmt.Errorf("--out: %w", err)
		}
	}
	if f.page != "" {
		if err := f.writePage(results); err != nil {
			return fmt.Errorf("--write: %w", err)
		}
	}
	return nil
}

// writePage writes the page. It writes the figures as SVG into a directory with the name of the
// page without its extension.
func (f reproduction) writePage(results []reproduce.Result) error {
	dir := strings.TrimSuffix(f.page, filepath.Ext(f.page))
	for _, r := range results {
		for _, fig := range r.Figures {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return err
			}
			if err := writeTo(filepath.Join(dir, fig.Name+".svg"), func(file *os.File) error { return fig.Chart.Write(file, chart.SVG) }); err != nil {
				return err
			}
		}
	}
	return writeTo(f.page, func(file *os.File) error {
		return reproduce.WriteMarkdown(file, results, func(fig reproduce.Figure) string {
			return filepath.Base(dir) + "/" + fig.Name + ".svg"
		})
	})
}

// writeTo makes or replaces a file.
func writeTo(path string, write func(*os.File) error) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	if err := write(file); err != nil {
		file.Close()
		return err
	}
	return file.Close()
}

// traceDirs returns the directories that are searched for traces.
func traceDirs(named string) []string {
	dirs := []string{filepath.Join("shared", "traces"), filepath.Join("..", "shared", "traces")}
	if named != "" {
		dirs = append([]string{named}, dirs...)
	}
	return dirs
}
