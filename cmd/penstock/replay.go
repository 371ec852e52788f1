package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/trace"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/replay"
)

// sampleWord is the argument that selects the trace in the binary.
const sampleWord = "sample"

// replayFlags are the flags of a replay.
type replayFlags struct {
	namespace          string
	layers, tokenBytes int
	requests           int
	concurrency        int
	sessions           int
	window             int64
	keep               bool
}

// replayDefaults returns the default flags. With them a block of 64 tokens has 128 KiB: small
// enough that a minute covers many requests, large enough that moving the bytes costs more than the
// calls.
func replayDefaults() replayFlags {
	return replayFlags{layers: 8, tokenBytes: 256, concurrency: 4, sessions: 8, window: 32 << 20}
}

func (f *replayFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.IntVar(&f.layers, "layers", f.layers, "layers of the geometry")
	fs.IntVar(&f.tokenBytes, "token-bytes", f.tokenBytes, "bytes per token and layer of the geometry")
	fs.IntVar(&f.requests, "requests", f.requests, "stop after this many requests; 0: replay all")
	fs.IntVar(&f.concurrency, "concurrency", f.concurrency, "concurrent requests; the requests of one session stay in order")
	fs.IntVar(&f.sessions, "sessions", f.sessions, "sessions of an agentic trace that are open at once; 0: all")
	fs.Var(sizeFlag{&f.window}, "window", "memory of each concurrent request")
}

func newTraceCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "trace",
		Short: "Replay recorded requests against a node, with real bytes",
	}
	c := addConnectionFlags(cmd, w)
	return noun(cmd, newTraceReplay(w, c))
}

func newTraceReplay(w world, c *connection) *cobra.Command {
	f := replayDefaults()
	cmd := &cobra.Command{
		Use:   "replay FILE…",
		Short: "Replay traces: match, load, compare every byte, store what is missing",
		Long: `Replay the requests of recorded traces as fast as the node serves them: match the
prompt, load the cached prefix, compare every byte with the expected byte, store the
missing blocks. The bytes are computed from the block ids.

A FILE is in the format of kv-cache-tester (one session a line, 64-token blocks), of
Mooncake (one request a line, 512-token blocks), a generated DualPath set or an Azure
CSV, plain or gzip; the word "sample" is the trace inside this binary. The exit code
is 1 if any byte differs.`,
		Example: `  penstock trace replay sample --requests 200
  penstock trace replay conversation_trace.jsonl.gz --layers 4 --token-bytes 128`,
		Args: args(cobra.MinimumNArgs(1)),
	}
	f.add(cmd)
	cmd.Flags().StringVar(&f.namespace, "namespace", "", "replay into this namespace, which must exist and have one full layer group; otherwise one is made")
	c.completeNamespaceFlag(cmd)
	cmd.Flags().BoolVar(&f.keep, "keep", false, "keep the namespace")
	cmd.RunE = func(cmd *cobra.Command, files []string) error {
		target, err := c.one()
		if err != nil {
			return err
		}
		conn, err := c.dial(target)
		if err != nil {
			return err
		}
		defer conn.Close()
		return c.data(cmd, func(ctx context.Context, s *client.Store) error {
			failed := false
			for _, name := range files {
				r := replayRun{world: w, flags: f, store: s, admin: admin{AdminClient: pb.NewAdminClient(conn), conn: conn}, name: name}
				rep, err := r.run(ctx)
				if rep != nil && (err == nil || rep.Requests > 0) {
					if err := outputOf(cmd).emit(rep, rep.print); err != nil {
						return err
					}
				}
				if err != nil {
					return err
				}
				failed = failed || rep.MismatchedBlocks > 0
			}
			if failed {
				return errReported
			}
			return nil
		})
	}
	return cmd
}

// replayRun is the replay of one trace.
type replayRun struct {
	world world
	flags replayFlags
	store *client.Store
	admin admin
	name  string
}

// report is the output of a replay. demoNodeReport embeds it.
type report struct {
	Trace    string `json:"trace"`
	Geometry string `json:"geometry"`
	// BlockBytes is the size of one block with all layers.
	BlockBytes int64 `json:"block_bytes"`
	Requests   int64 `json:"requests"`

	AskedTokens   int64   `json:"asked_tokens"`
	HitTokens     int64   `json:"hit_tokens"`
	HitRatio      float64 `json:"hit_ratio_tokens"`
	IdealHitRatio float64 `json:"ideal_hit_ratio_tokens"`

	ReadBytes        int64            `json:"read_bytes"`
	WrittenBytes     int64            `json:"written_bytes"`
	VerifiedBytes    int64            `json:"verified_bytes"`
	MismatchedBlocks int64            `json:"mismatched_blocks"`
	Mismatch         string           `json:"mismatch,omitempty"`
	LostBlocks       int64            `json:"lost_blocks"`
	StoredBlocks     int64            `json:"stored_blocks"`
	EvictedBlocks    int64            `json:"evicted_blocks"`
	RefusedBlocks    map[string]int64 `json:"refused_blocks"`
	Busy             int64            `json:"busy"`

	Seconds     float64 `json:"seconds"`
	GiBPerSec   float64 `json:"gib_per_second"`
	MatchP50    float64 `json:"match_p50_seconds"`
	MatchP99    float64 `json:"match_p99_seconds"`
	LoadP50     float64 `json:"load_p50_seconds"`
	LoadP99     float64 `json:"load_p99_seconds"`
	Interrupted bool    `json:"interrupted,omitempty"`
}

// run replays the trace. After an error the report is not nil if the replay had begun.
func (r *replayRun) run(ctx context.Context) (_ *report, err error) {
	t, err := r.open()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	ns, drop, err := r.target(ctx, t)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, drop(context.WithoutCancel(ctx))) }()
	before, err := r.admin.Status(ctx, &pb.StatusRequest{})
	if err != nil {
		return nil, err
	}
	bar := newProgress(r.world, "replay", unitRequests)
	defer bar.finish()
	var done atomic.Int64
	result, err := replay.Run(ctx, replay.Options{
		Store: r.store, Namespace: ns, Trace: t,
		Concurrency: r.flags.concurrency, WindowBytes: r.flags.window,
		Progress: func(p replay.Result) {
			bar.note(done.Add(1), int64(r.flags.requests), fmt.Sprintf("%.1f%% hit, %s moved", 100*p.HitRatio(), size(p.ReadBytes+p.WrittenBytes)))
		},
	})
	rep := newReport(r.name, ns, result)
	if ctx.Err() != nil {
		// The report has the results up to the interruption.
		rep.Interrupted = true
		return rep, context.Cause(ctx)
	}
	if err != nil {
		return rep, err
	}
	after, err := r.admin.Status(ctx, &pb.StatusRequest{})
	if err != nil {
		return rep, err
	}
	// There is no other writer, so each stored block that is missing was evicted.
	rep.EvictedBlocks = max(0, result.StoredBlocks-(after.GetBlocks()-before.GetBlocks()))
	return rep, nil
}

// check refuses numbers out of range.
func (f *replayFlags) check() error {
	if f.concurrency < 1 {
		return usagef("--concurrency %d: must be at least 1", f.concurrency)
	}
	return nil
}

func (r *replayRun) open() (*trace.Reader, error) {
	if err := r.flags.check(); err != nil {
		return nil, err
	}
	opts := trace.Options{Concurrency: r.flags.sessions, MaxRequests: r.flags.requests}
	if r.name == sampleWord {
		return trace.Sample(opts)
	}
	return trace.Open(r.name, opts)
}

// target returns the namespace of the replay and a function that cleans up at the end.
func (r *replayRun) target(ctx context.Context, t *trace.Reader) (kv.Namespace, func(context.Context) error, error) {
	nothing := func(context.Context) error { return nil }
	if r.flags.namespace != "" {
		ns, err := r.store.Namespace(ctx, r.flags.namespace)
		return ns, nothing, err
	}
	def := kv.Namespace{
		Name:     fmt.Sprintf("replay-%d", time.Now().UnixNano()),
		Index:    kv.IndexTrie,
		Geometry: kv.SingleGroup(r.flags.layers, t.BlockTokens(), r.flags.tokenBytes),
	}
	if err := def.Geometry.Validate(); err != nil {
		return def, nothing, usageError{fmt.Errorf("--layers, --token-bytes: %w", err)}
	}
	if _, err := r.admin.CreateNamespace(ctx, &pb.CreateNamespaceRequest{Namespace: api.NamespaceProto(def)}); err != nil {
		return def, nothing, err
	}
	drop := func(ctx context.Context) error {
		if r.flags.keep {
			return nil
		}
		ctx, cancel := context.WithTimeout(ctx, dropWait)
		defer cancel()
		_, err := r.admin.DeleteNamespace(ctx, &pb.DeleteNamespaceRequest{Name: def.Name})
		if c := status.Code(err); c == codes.NotFound || c == codes.Unavailable {
			return nil // the node is unreachable
		}
		return err
	}
	ns, err := r.store.Namespace(ctx, def.Name)
	if err != nil {
		return ns, nothing, errors.Join(err, drop(context.WithoutCancel(ctx)))
	}
	return ns, drop, nil
}

// dropWait is the time limit of a command's clean-up, which also runs after an interrupt.
const dropWait = 10 * time.Second

func newReport(name string, ns kv.Namespace, r replay.Result) *report {
	const gib = 1 << 30
	if name == sampleWord {
		name = trace.SampleName
	}
	return &report{
		Trace: name, Geometry: ns.Geometry.String(), BlockBytes: ns.Geometry.BlockBytes(), Requests: r.Requests,
		AskedTokens: r.AskedTokens, HitTokens: r.HitTokens, HitRatio: r.HitRatio(), IdealHitRatio: r.IdealRatio(),
		ReadBytes: r.ReadBytes, WrittenBytes: r.WrittenBytes, VerifiedBytes: r.ReadBytes,
		MismatchedBlocks: r.MismatchedBlocks, Mismatch: r.Mismatch, LostBlocks: r.LostBlocks,
		StoredBlocks: r.StoredBlocks, RefusedBlocks: r.RefusedBlocks, Busy: r.BusyMatches + r.BusyReads + r.BusyWrites,
		Seconds: r.Elapsed.Seconds(), GiBPerSec: r.BytesPerSecond() / gib,
		MatchP50: r.Match.P50.Seconds(), MatchP99: r.Match.P99.Seconds(),
		LoadP50: r.Load.P50.Seconds(), LoadP99: r.Load.P99.Seconds(),
	}
}

// print writes the report as a table.
func (r *report) print(t *table) {
	t.pair("trace", fmt.Sprintf("%s, %s requests", r.Trace, count(r.Requests)))
	t.pair("geometry", fmt.Sprintf("%s, %s a block", r.Geometry, size(r.BlockBytes)))
	t.pair("hit ratio", fmt.Sprintf("%.1f %% of %s tokens (%.1f %% if nothing were evicted)", 100*r.HitRatio, count(r.AskedTokens), 100*r.IdealHitRatio))
	t.pair("read", fmt.Sprintf("%s, every byte compared", size(r.ReadBytes)))
	t.pair("written", size(r.WrittenBytes))
	t.pair("rate", fmt.Sprintf("%.2f GiB/s over %v", r.GiBPerSec, seconds(r.Seconds)))
	t.pair("match", fmt.Sprintf("p50 %v, p99 %v", seconds(r.MatchP50), seconds(r.MatchP99)))
	t.pair("load", fmt.Sprintf("p50 %v, p99 %v (a whole prefix)", seconds(r.LoadP50), seconds(r.LoadP99)))
	t.pair("verified", fmt.Sprintf("%s, %d blocks differ", size(r.VerifiedBytes), r.MismatchedBlocks))
	t.pair("", r.Mismatch)
	t.pair("evicted", fmt.Sprintf("%s of %s stored blocks; %s lost while being read", count(r.EvictedBlocks), count(r.StoredBlocks), count(r.LostBlocks)))
	t.pair("refused", refusedWords(r.RefusedBlocks, r.Busy))
}

func refusedWords(refused map[string]int64, busy int64) string {
	var words []string
	for _, reason := range slices.Sorted(maps.Keys(refused)) {
		words = append(words, fmt.Sprintf("%s %s", count(refused[reason]), reason))
	}
	if len(words) == 0 && busy == 0 {
		return "none"
	}
	return fmt.Sprintf("%s (%s calls were busy)", strings.Join(words, ", "), count(busy))
}

// seconds rounds a duration to three digits.
func seconds(s float64) time.Duration {
	d := time.Duration(s * float64(time.Second))
	for unit := time.Second; unit > time.Nanosecond; unit /= 10 {
		if d >= unit {
			return d.Round(unit / 100)
		}
	}
	return d
}
