package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/dualpath/batch"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/emulate"
	"github.com/penstock-kv/penstock/lab/profile"
	"github.com/penstock-kv/penstock/server/config"
)

// profiling has the flags of `penstock profile`.
type profiling struct {
	namespace, samples, write string
	duration, quota           time.Duration
	parallel                  int
	window                    int64
	emulated                  []float64
	seed                      uint64
}

func newProfileCommand(w world) *cobra.Command {
	p := profiling{duration: 10 * time.Second, quota: batch.DefaultQuota, parallel: 8, window: 16 << 20, seed: 1}
	cmd := &cobra.Command{
		Use:   "profile [--namespace NS] [--samples FILE]",
		Short: "Measure the constants that the planner decides by",
		Long: `Measure the values of the planner's section schedule and print them; --write puts them
into a configuration file, whose other keys and comments stay.

With --namespace the blocks of a namespace are read from a running storage node, as an
engine reads them, each once and then again until --duration is over: read_rate is how
many tokens one storage NIC reads in a second, alpha in three. Run it on the engine's
machine, over the network that its storage NIC is on, with more blocks than the node
keeps in memory. penstock trace replay --keep fills a namespace.

With --samples the log of a prefill engine is read: forward passes over one request
each, as CSV with the columns tokens (computed), context (cached before), seconds and,
if it is known, attention_seconds, or as JSON with these keys. prefill_rate is how many
tokens it computes in a second over all of them, beta in five; the attention times are
fitted, so that the compute quota can be given in tokens. --emulated replaces the log by
an emulated engine: seconds per token and seconds per pair of query and key in attention, and
seconds per token in the rest.`,
		Example: `  penstock profile --namespace llama-3-70b --duration 30s
  penstock profile --namespace llama-3-70b --samples forwards.csv --write planner.yaml`,
		Args: args(cobra.NoArgs),
	}
	c := addConnectionFlags(cmd, w)
	f := cmd.Flags()
	f.StringVar(&p.namespace, "namespace", "", "namespace whose blocks are read")
	c.completeNamespaceFlag(cmd)
	f.StringVar(&p.samples, "samples", "", "log of a prefill engine's forward passes (CSV or JSON; - reads standard input)")
	f.Float64SliceVar(&p.emulated, "emulated", nil, "seconds per token, per pair, and per token in the rest, of an emulated engine")
	f.StringVar(&p.write, "write", "", "planner configuration file (YAML) for the section schedule; made if it does not exist")
	f.DurationVar(&p.duration, "duration", p.duration, "how long to read")
	f.IntVar(&p.parallel, "parallel", p.parallel, "concurrent reads")
	f.Var(sizeFlag{&p.window}, "window", "memory of each")
	f.DurationVar(&p.quota, "quota", p.quota, "maximum attention time of a forward pass")
	f.Uint64Var(&p.seed, "seed", p.seed, "seed of the order in which blocks are read")
	cmd.MarkFlagsMutuallyExclusive("samples", "emulated")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := p.check(); err != nil {
			return usageError{err}
		}
		r, err := p.run(cmd, w, c)
		if err != nil {
			return err
		}
		if p.write != "" {
			if err := p.save(r.Settings); err != nil {
				return err
			}
		}
		if err := outputOf(cmd).emit(r, func(t *table) { r.print(t) }); err != nil {
			return err
		}
		if p.write == "" {
			fmt.Fprintln(w.err, "nothing was written; --write FILE puts this into the planner's configuration")
		}
		return nil
	}
	return cmd
}

// check returns an error for an invalid command line.
func (p profiling) check() error {
	switch {
	case p.namespace == "" && p.samples == "" && p.emulated == nil:
		return errors.New("nothing to measure: give --namespace, --samples or both")
	case p.duration <= 0:
		return fmt.Errorf("--duration %v: it must be positive", p.duration)
	case p.quota <= 0:
		return fmt.Errorf("--quota %v: it must be positive", p.quota)
	case p.parallel < 1 || p.parallel > 1024:
		return fmt.Errorf("--parallel %d: it must be between 1 and 1024", p.parallel)
	case p.window < 1 || p.window > 1<<30:
		return fmt.Errorf("--window %s: it must be positive and at most 1 GiB", size(p.window))
	case p.emulated != nil && len(p.emulated) != 3:
		return fmt.Errorf("--emulated: %d numbers; give three", len(p.emulated))
	}
	return nil
}

// profileResult is the output of the command.
type profileResult struct {
	Namespace string            `json:"namespace,omitempty"`
	Read      *profile.Read     `json:"read,omitempty"`
	Compute   *profile.Compute  `json:"compute,omitempty"`
	Settings  []profile.Setting `json:"schedule"`
	Wrote     string            `json:"wrote,omitempty"`
}

func (p profiling) run(cmd *cobra.Command, w world, c *connection) (r profileResult, err error) {
	var readRate, prefillRate float64
	forwards, err := p.forwards(w)
	if err != nil {
		return r, err
	}
	if len(forwards) > 0 {
		compute, err := profile.Fit(forwards, p.quota)
		if err != nil {
			return r, err
		}
		r.Compute, prefillRate = &compute, compute.Rate
	}
	if p.namespace != "" {
		read, err := p.read(cmd, w, c)
		if err != nil {
			return r, err
		}
		r.Namespace, r.Read, readRate = p.namespace, &read, read.TokensPerSecond
	}
	r.Settings, r.Wrote = profile.Settings(readRate, prefillRate), p.write
	return r, nil
}

// forwards returns the forward passes of the log or of the emulated engine; none if neither is
// given.
func (p profiling) forwards(w world) (_ []profile.Forward, err error) {
	switch {
	case p.emulated != nil:
		return emulatedForwards(p.emulated)
	case p.samples == "":
		return nil, nil
	}
	name, f, err := openInput(w, p.samples)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return profile.ReadForwards(name, f)
}

// emulatedForwards returns forward passes of an emulated engine over prompts and contexts of agents
// (Table 2 of the DualPath paper). numbers are the coefficients of the engine's compute time: per
// token and per pair of tokens in attention, and per token in the other layers.
func emulatedForwards(numbers []float64) (out []profile.Forward, err error) {
	m := emulate.Model{Layers: 1, Attention: batch.Model{PerToken: numbers[0], PerPair: numbers[1]}, Linear: numbers[2]}
	if err := errors.Join(m.Validate(), m.Attention.Validate()); err != nil {
		return nil, fmt.Errorf("--emulated: %w", err)
	}
	for _, context := range []int{0, 4096, 16_384, 32_768} {
		for _, tokens := range []int{64, 429, 2048, 4096} {
			pass := m.Layer([]batch.Item{{Cached: context, Compute: tokens}}).Seconds()
			out = append(out, profile.Forward{Tokens: tokens, Context: context, Seconds: pass, Attention: m.Attention.Seconds(context, tokens)})
			if last := &out[len(out)-1]; last.Attention > last.Seconds { // they differ by rounding
				last.Attention = last.Seconds
			}
		}
	}
	return out, nil
}

// read measures the storage node.
func (p profiling) read(cmd *cobra.Command, w world, c *connection) (out profile.Read, err error) {
	var links []profile.Link
	if err := c.admin(cmd, func(ctx context.Context, a admin) error {
		links, err = a.links(ctx, p.namespace)
		return err
	}); err != nil {
		return out, err
	}
	if len(links) == 0 {
		return out, fmt.Errorf("namespace %q holds no blocks: store some first (penstock trace replay --namespace %s FILE): %w", p.namespace, p.namespace, errMiss)
	}
	err = c.data(cmd, func(ctx context.Context, s *client.Store) error {
		ns, err := s.Namespace(ctx, p.namespace)
		if err != nil {
			return err
		}
		rng := rand.New(rand.NewPCG(p.seed, 1))
		var runs []profile.Run
		if ns.Index == kv.IndexFlat {
			keys := make([]kv.BlockID, len(links))
			for i, l := range links {
				keys[i] = l.ID
			}
			runs = profile.FlatRuns(keys, int(max(1, p.window/ns.Geometry.BlockBytes())), rng)
		} else {
			runs = profile.Runs(links, rng)
		}
		bar := newProgress(w, "reading", unitBytes)
		defer bar.finish()
		out, err = profile.MeasureRead(ctx, profile.ReadOptions{
			Store: s, Namespace: ns, Runs: runs, For: p.duration, Parallel: p.parallel, WindowBytes: p.window,
			Progress: func(elapsed time.Duration, bytes int64) {
				bar.note(bytes, 0, fmt.Sprintf("%v of %v", elapsed.Round(time.Second), p.duration))
			},
		})
		return err
	})
	return out, err
}

// linksMax is the number of blocks after which listing stops.
const linksMax = 1 << 20

// links returns blocks of a namespace with their parents.
func (a admin) links(ctx context.Context, name string) ([]profile.Link, error) {
	var out []profile.Link
	var cursor []byte
	for {
		resp, err := a.ListBlocks(ctx, &pb.ListBlocksRequest{Namespace: name, Cursor: cursor, Limit: listPage})
		if err != nil {
			return nil, err
		}
		for _, b := range resp.GetBlocks() {
			var l profile.Link
			copy(l.ID[:], b.GetId())
			copy(l.Parent[:], b.GetParent())
			out = append(out, l)
		}
		if cursor = resp.GetCursor(); len(cursor) == 0 || len(out) >= linksMax {
			return out, nil
		}
	}
}

// save writes the settings into the planner's configuration file p.write, if the result is a valid
// configuration.
func (p profiling) save(settings []profile.Setting) error {
	raw, err := os.ReadFile(p.write)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	text, err := profile.Update(p.write, raw, settings)
	if err != nil {
		return err
	}
	// A temporary file is written and renamed, so that a planner never reads a partial file.
	f, err := os.CreateTemp(filepath.Dir(p.write), filepath.Base(p.write)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // after the rename there is no file of that name
	_, err = io.Copy(f, bytes.NewReader(text))
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if info, err := os.Stat(p.write); err == nil {
		if err := os.Chmod(f.Name(), info.Mode().Perm()); err != nil {
			return err
		}
	} else if err := os.Chmod(f.Name(), 0o644); err != nil {
		return err
	}
	cfg := config.DefaultPlanner()
	if err := config.LoadInto(&cfg, f.Name(), nil); err != nil {
		return fmt.Errorf("%s was not changed, because it would be invalid for a planner: %v", p.write, err)
	}
	if _, err := scheduleOf(cfg.Schedule); err != nil {
		return fmt.Errorf("%s was not changed, because it would be invalid for a planner: %v", p.write, err)
	}
	return os.Rename(f.Name(), p.write)
}

// print writes the result as a table.
func (r profileResult) print(t *table) {
	if d := r.Read; d != nil {
		t.row("storage NIC", fmt.Sprintf("%s tokens/s, %s/s", count(int64(d.TokensPerSecond)), size(int64(d.BytesPerSecond))))
		t.row("", fmt.Sprintf("%s of namespace %s in %v, %s a token, %.1f passes", size(d.Bytes), r.Namespace, seconds(d.Seconds), size(int64(d.BytesPerToken)), d.Passes))
		if d.Passes > 1 {
			t.row("", "read more than once: the node may have answered from memory")
		}
		if d.Lost+d.Busy > 0 {
			t.row("", fmt.Sprintf("%s blocks were lost, %s reads turned away", count(d.Lost), count(d.Busy)))
		}
	}
	if c := r.Compute; c != nil {
		t.row("prefill engine", fmt.Sprintf("%s tokens/s over %s forward passes", count(int64(c.Rate)), count(c.Forwards)))
		if c.NoModel != "" {
			t.row("attention", "not fitted: "+c.NoModel)
		} else {
			what := "attention"
			if c.Whole {
				what = "forward pass" // the log does not separate attention
			}
			t.row(what, fmt.Sprintf("%s a token and %s a pair, MAPE %.1f %%", spell(c.PerToken), spell(c.PerPair), 100*c.MAPE))
			t.row("quota", fmt.Sprintf("%v: %s tokens from nothing, %s after %s", seconds(c.Quota), count(c.FromNothing), count(c.AtContext), count(c.Context)))
		}
	}
	t.row()
	t.row("schedule:")
	for _, s := range r.Settings {
		value := count(int64(s.Value))
		if s.Value != float64(int64(s.Value)) {
			value = fmt.Sprint(s.Value)
		}
		t.row("  "+s.Key, value, "# "+s.Comment)
	}
	if r.Wrote != "" {
		t.row()
		t.row("written to", r.Wrote)
	}
}
