package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/internal/top"
	"github.com/penstock-kv/penstock/internal/top/screen"
)

// topFlags are the flags of top and ns top.
type topFlags struct {
	interval, answerTimeout time.Duration
	view, sort              string
	reverse                 bool
	limit, count            int
	once                    bool
}

// topIntervalMin is the shortest interval of samples. Shorter ones would load the nodes.
const topIntervalMin = 100 * time.Millisecond

// topHelp is the part of the help that top and ns top have in common.
const topHelp = `On a terminal the table is redrawn until q is pressed; h shows the keys. Elsewhere, and
with --once, --count or --format json, the command prints plain lines: a table, or one
object in JSON, after each interval. A rate is the growth of a counter per second since
the sample before; "-" (null) is a rate that is unknown, for example because the node has
just started. A node that does not answer has a row with the reason. The exit code is 1 if
no node answered the last sample.`

func newTopCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Watch the load of nodes, namespaces, NICs and volumes",
		Long: `Watch several nodes: their state, fill, reads and writes, hit rate in tokens, evictions,
queues and volumes; or their namespaces, NICs or volumes. --server lists the nodes.

` + topHelp,
		Example: `  penstock top --server a:7420,b:7420,c:7420
  penstock top --view nics --sort sent --interval 1s
  penstock top --once --view namespaces --limit 10
  penstock top --format json --count 60 > load.jsonl`,
	}
	c := addConnectionFlags(cmd, w)
	c.waitForever(cmd)
	f := addTopFlags(cmd)
	cmd.Flags().StringVar(&f.view, "view", screen.Nodes.String(), "the table at the start: "+alternatives(screen.Names()))
	completeValues(cmd, "view", screen.Names()...)
	return f.runs(cmd, c, w)
}

func newNamespaceTop(c *connection, w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Watch the load of the namespaces: epochs, hit rates, reads, evictions, quotas",
		Long: `Watch the namespaces of several nodes: penstock top with its table of namespaces. A
namespace has one row, with the sums over the nodes. An epoch like 7..8 means that some
node is at epoch 7 still. OLD is the size of the blocks of older epochs, until they are
freed.

` + topHelp,
		Example: `  penstock ns top --server a:7420,b:7420
  penstock ns top --once --sort old --limit 10`,
	}
	f := addTopFlags(cmd)
	f.view = screen.Namespaces.String()
	return f.runs(cmd, c, w)
}

func addTopFlags(cmd *cobra.Command) *topFlags {
	f := &topFlags{}
	cmd.Flags().DurationVar(&f.interval, "interval", 2*time.Second, "time between two samples")
	cmd.Flags().DurationVar(&f.answerTimeout, "answer-timeout", 0, "time that a node has for its answer; 0: --interval, but at least 1s and at most 10s")
	cmd.Flags().StringVar(&f.sort, "sort", "", "sort key, a column of the table; an unknown one lists them")
	annotate(cmd, "sort", emptyAllowed) // the default of the view
	cmd.Flags().BoolVar(&f.reverse, "reverse", false, "reverse the order")
	cmd.Flags().IntVar(&f.limit, "limit", 0, "print at most this many rows; 0: all")
	cmd.Flags().IntVarP(&f.count, "count", "n", 0, "print this many samples and stop; 0: until interrupted")
	cmd.Flags().BoolVar(&f.once, "once", false, "print one sample, after one interval, and stop")
	cmd.MarkFlagsMutuallyExclusive("count", "once")
	completeFlag(cmd, "sort", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		v, err := screen.Parse(f.view)
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		return v.Keys(), cobra.ShellCompDirectiveNoFileComp
	})
	return f
}

func (f *topFlags) runs(cmd *cobra.Command, c *connection, w world) *cobra.Command {
	cmd.Args = args(cobra.NoArgs)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		state, err := f.state()
		if err != nil {
			return err
		}
		observed, err := c.observe()
		if err != nil {
			return err
		}
		defer observed.close()
		observed.answerTimeout = f.answerTimeout
		if f.once {
			f.count = 1
		}
		ctx, cancel := c.limitMove(cmd)
		defer cancel()
		out := outputOf(cmd)
		in, screenFile, ok := w.terminal()
		if ok && f.count == 0 && !out.json {
			observed.namespaces = true // the user may select any view
			err = watch(ctx, observed, state, in, screenFile, w.env("NO_COLOR") == "")
		} else {
			observed.namespaces = state.View == screen.Namespaces
			err = f.print(ctx, observed, state, out)
		}
		if err != nil && errors.Is(over(ctx), context.DeadlineExceeded) {
			return fmt.Errorf("--timeout %v ended the command", c.timeout)
		}
		return err
	}
	return cmd
}

// state checks the flags, and returns the state of the screen at the start.
func (f *topFlags) state() (screen.State, error) {
	view, err := screen.Parse(f.view)
	if err != nil {
		return screen.State{}, usagef("--view: %w", err)
	}
	if f.interval < topIntervalMin {
		return screen.State{}, usagef("--interval %v: want at least %v", f.interval, topIntervalMin)
	}
	if f.answerTimeout < 0 {
		return screen.State{}, usagef("--answer-timeout %v: must not be negative", f.answerTimeout)
	}
	if f.sort != "" && !slices.Contains(view.Keys(), f.sort) {
		return screen.State{}, usagef("--sort %q: unknown key; want one of %s", f.sort, strings.Join(view.Keys(), ", "))
	}
	return screen.New(view, screen.Order{Key: f.sort, Reverse: f.reverse}, f.limit, f.interval), nil
}

// terminal returns the terminal of the command, if input and output are one that can move its
// cursor.
func (w world) terminal() (in, out *os.File, ok bool) {
	if !isTerminal(w.in) || !isTerminal(w.out) || w.env("TERM") == "dumb" {
		return nil, nil, false
	}
	in, _ = w.in.(*os.File) // isTerminal has checked the types
	out, _ = w.out.(*os.File)
	return in, out, true
}

// topLine is one sample in JSON.
type topLine struct {
	Time            string  `json:"time"`
	IntervalSeconds float64 `json:"interval_seconds"`
	View            string  `json:"view"`
	top.Frame
}

// print prints the samples as plain tables or lines of JSON. The first sample is not printed,
// because it has no rates.
func (f *topFlags) print(ctx context.Context, o *observed, state screen.State, out output) error {
	var meter top.Meter
	view, order := state.View, state.Orders[state.View]
	started := time.Now()
	for n := 0; ; n++ {
		sample, err := o.sample(ctx, f.interval)
		if err != nil {
			return err
		}
		taken := time.Now()
		if frame := meter.Add(sample); n > 0 {
			switch {
			case out.json:
				line := topLine{
					Time: taken.UTC().Format(time.RFC3339Nano), IntervalSeconds: f.interval.Seconds(), View: view.String(),
					Frame: screen.Sorted(view, frame, order, f.limit, taken),
				}
				err = out.emitLine(line)
			default:
				lines := screen.Table(view, frame, order, f.limit, taken)
				if n > 1 {
					lines = append([]string{""}, lines...)
				}
				_, err = fmt.Fprintln(out.w, strings.Join(lines, "\n"))
			}
			if err != nil {
				return err
			}
			if n == f.count {
				if frame.Total.Answering == 0 {
					return errReported
				}
				return nil
			}
		}
		if !pause(ctx, untilTick(started, f.interval, time.Now())) {
			return over(ctx)
		}
	}
}

// untilTick returns the time until the next multiple of the interval since the start. Multiples
// that have passed are skipped.
func untilTick(started time.Time, interval time.Duration, now time.Time) time.Duration {
	return interval - now.Sub(started)%interval
}
