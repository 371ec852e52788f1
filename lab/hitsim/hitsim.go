package hitsim

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"

	"github.com/penstock-kv/penstock/trie/evict"
)

// Bound is the name of the offline policy in a Report.
const Bound = "belady"

// Options select the simulations. The zero value compares every policy and the optimal offline
// policy at 1, 3, 10, 30 and 60 % of the distinct blocks.
type Options struct {
	// Policies are the policies to compare; default evict.Kinds().
	Policies []evict.Kind
	// Percents are the capacities, in percent of the trace's distinct blocks;
	// default 1, 3, 10, 30, 60.
	Percents []float64
	// NoBound omits the offline policy.
	NoBound bool
	// Tuning is the tuning of S3-FIFO; the zero value means the default tuning.
	Tuning evict.Tuning
	// Workers is the number of concurrent simulations; default GOMAXPROCS.
	Workers int
	// Progress, if not nil, is called after each simulation, never concurrently.
	Progress func(done, total int)
}

// EnsureDefaults fills the fields that are zero.
func (o *Options) EnsureDefaults() {
	if len(o.Policies) == 0 {
		o.Policies = evict.Kinds()
	}
	if len(o.Percents) == 0 {
		o.Percents = []float64{1, 3, 10, 30, 60}
	}
	if o.Workers == 0 {
		o.Workers = runtime.GOMAXPROCS(0)
	}
}

// Validate reports the first field that is out of range, or nil.
func (o Options) Validate() error {
	for _, p := range o.Percents {
		if !(p > 0 && p <= 100) {
			return fmt.Errorf("hitsim: capacity of %v %% of the distinct blocks; want more than 0, at most 100", p)
		}
	}
	if o.Workers < 0 {
		return fmt.Errorf("hitsim: %d workers; want at least 1", o.Workers)
	}
	return nil
}

// Row is the outcome of one simulation.
type Row struct {
	Policy string `json:"policy"`
	// Percent is the capacity relative to the distinct blocks.
	Percent        float64 `json:"capacity_percent"`
	CapacityBlocks int     `json:"capacity_blocks"`
	Found
	// TokenRatio is the share of all prompt tokens that were found.
	TokenRatio float64 `json:"hit_token_ratio"`
}

// Report is the result of Run for one trace.
type Report struct {
	Trace       string `json:"trace"`
	BlockTokens int    `json:"block_tokens"`
	Requests    int    `json:"requests"`
	Blocks      int64  `json:"query_blocks"`
	Tokens      int64  `json:"query_tokens"`
	Unique      int    `json:"unique_blocks"`
	// Infinite has the hits of a cache without a limit; InfiniteTokenRatio is the share of all
	// prompt tokens that these hits cover.
	Infinite           Found   `json:"infinite"`
	InfiniteTokenRatio float64 `json:"infinite_hit_token_ratio"`
	// Rows are ordered by capacity; the rows of one capacity have the order of Options.Policies,
	// with the optimal offline policy last.
	Rows []Row `json:"rows"`
}

// Run simulates every policy at every capacity. If ctx ends, it returns the cause.
func Run(ctx context.Context, t *Trace, o Options) (*Report, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	report := &Report{
		Trace: t.Name, BlockTokens: t.BlockTokens, Requests: t.Requests(),
		Blocks: t.blocks, Tokens: t.tokens, Unique: t.Unique(),
		Infinite: t.infinite, InfiniteTokenRatio: ratio(t.infinite.Tokens, t.tokens),
	}
	var jobs []job
	for _, percent := range o.Percents {
		capacity := max(1, int(float64(t.Unique())*percent/100))
		for _, kind := range o.Policies {
			jobs = append(jobs, job{kind.String(), percent, capacity, func(ctx context.Context) (Found, error) {
				return online(ctx, t, kind, o.Tuning, capacity)
			}})
		}
		if !o.NoBound {
			jobs = append(jobs, job{Bound, percent, capacity, func(ctx context.Context) (Found, error) {
				return belady(ctx, t, capacity)
			}})
		}
	}
	report.Rows = make([]Row, len(jobs))
	return report, runAll(ctx, t, jobs, report.Rows, o)
}

// job is one simulation.
type job struct {
	policy   string
	percent  float64
	capacity int
	run      func(context.Context) (Found, error)
}

// runAll runs the jobs on o.Workers goroutines and returns the first error.
func runAll(ctx context.Context, t *Trace, jobs []job, rows []Row, o Options) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex // guards done
		done int
		todo = make(chan int, len(jobs))
	)
	for i := range jobs {
		todo <- i
	}
	close(todo)
	for range min(o.Workers, len(jobs)) {
		wg.Go(func() {
			for i := range todo {
				j := jobs[i]
				found, err := j.run(ctx)
				if err != nil {
					cancel(fmt.Errorf("hitsim: %s at %d blocks: %w", j.policy, j.capacity, err))
					return
				}
				rows[i] = Row{j.policy, j.percent, j.capacity, found, ratio(found.Tokens, t.tokens)}
				mu.Lock()
				done++
				if o.Progress != nil {
					o.Progress(done, len(jobs))
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// online replays the trace through a policy as the storage node does.
func online(ctx context.Context, t *Trace, kind evict.Kind, tuning evict.Tuning, capacity int) (Found, error) {
	cache, err := evict.NewCache(kind, tuning, capacity)
	if err != nil {
		return Found{}, err
	}
	var (
		found Found
		path  []uint32
		keys  []uint64
	)
	for i, r := range t.requests {
		if i%256 == 0 && ctx.Err() != nil {
			return Found{}, context.Cause(ctx)
		}
		path, keys = t.appendPath(path[:0], r), keys[:0]
		for _, n := range path {
			keys = append(keys, key(n))
		}
		found.add(r, cache.Access(keys), t.BlockTokens)
	}
	return found, nil
}

// key distributes node numbers over the 64-bit words, as block ids are distributed. The multiplier
// is odd, so no two keys collide.
func key(n uint32) uint64 {
	z := uint64(n) * 0x9e3779b97f4a7c15
	return (z ^ z>>32) * 0xd6e8feb86659fd93
}

func ratio(part, whole int64) float64 {
	if whole == 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

// Winner returns the best default policy: the online policy with the highest sum of token hit
// ratios over the capacities of all reports. Every trace has the same weight, independent of its
// length.
func Winner(reports ...*Report) string {
	sum := make(map[string]float64)
	var order []string // in order of first appearance, so that ties are stable
	for _, r := range reports {
		for _, row := range r.Rows {
			if row.Policy == Bound {
				continue
			}
			if _, seen := sum[row.Policy]; !seen {
				order = append(order, row.Policy)
			}
			sum[row.Policy] += row.TokenRatio
		}
	}
	best := ""
	for _, policy := range order {
		if best == "" || sum[policy] > sum[best] {
			best = policy
		}
	}
	return best
}

// String returns the report as a table of token hit ratios in percent: a line
// for each capacity, a column for each policy.
func (r *Report) String() string {
	var policies []string
	var percents []float64
	cell := make(map[string]string)
	for _, row := range r.Rows {
		if !slices.Contains(policies, row.Policy) {
			policies = append(policies, row.Policy)
		}
		if !slices.Contains(percents, row.Percent) {
			percents = append(percents, row.Percent)
		}
		cell[fmt.Sprint(row.Policy, row.Percent)] = fmt.Sprintf("%.2f", 100*row.TokenRatio)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %d requests, %d blocks of %d tokens, %d distinct; infinite cache %.2f %% of tokens\n",
		r.Trace, r.Requests, r.Blocks, r.BlockTokens, r.Unique, 100*r.InfiniteTokenRatio)
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "capacity %%\tblocks\t%s\t\n", strings.Join(policies, "\t"))
	for _, p := range percents {
		line := []string{fmt.Sprint(p), fmt.Sprint(max(1, int(float64(r.Unique)*p/100)))}
		for _, policy := range policies {
			line = append(line, cell[fmt.Sprint(policy, p)])
		}
		fmt.Fprintf(w, "%s\t\n", strings.Join(line, "\t"))
	}
	w.Flush()
	return b.String()
}

// WriteJSON writes the report as one JSON object.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}
