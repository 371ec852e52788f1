package replay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/trace"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/content"
)

// Options are the options of a replay. Store, Namespace and Trace are required.
type Options struct {
	Store *client.Store
	// Namespace must have one full layer group and the trace's block length.
	Namespace kv.Namespace
	// Trace is the trace to replay, to its end. The caller closes the reader.
	Trace *trace.Reader
	// Concurrency is the number of concurrent requests. Default 4.
	Concurrency int
	// WindowBytes is the memory of each worker, and bounds the bytes of one read or write call. It
	// is at least one block. Default 32 MiB.
	WindowBytes int64
	// Lease is the duration of the lease that protects a matched prefix from eviction during the
	// read. Default 1 min.
	Lease time.Duration
	// Progress, if not nil, is called after each request, by several goroutines,
	// with the counts so far.
	Progress func(Result)
}

// EnsureDefaults fills the fields that are zero.
func (o *Options) EnsureDefaults() {
	if o.Concurrency == 0 {
		o.Concurrency = 4
	}
	if o.WindowBytes == 0 {
		o.WindowBytes = 32 << 20
	}
	if o.Lease == 0 {
		o.Lease = time.Minute
	}
	if o.Progress == nil {
		o.Progress = func(Result) {}
	}
}

// Validate returns an error for the first invalid option, or nil.
func (o *Options) Validate() error {
	switch {
	case o.Store == nil || o.Trace == nil:
		return errors.New("replay: Options.Store and Trace are required")
	case len(o.Namespace.Geometry.Groups) != 1 || o.Namespace.Geometry.Groups[0].Kind != kv.Full:
		return fmt.Errorf("replay: namespace %q has %v; a trace has no windows and states, so the namespace must have one full layer group", o.Namespace.Name, o.Namespace.Geometry)
	case o.Namespace.Geometry.BlockTokens != o.Trace.BlockTokens():
		return fmt.Errorf("replay: namespace %q has blocks of %d tokens and %s of %d; they must be equal", o.Namespace.Name, o.Namespace.Geometry.BlockTokens, o.Trace.Name(), o.Trace.BlockTokens())
	case o.Concurrency < 1:
		return fmt.Errorf("replay: concurrency of %d", o.Concurrency)
	case o.WindowBytes < 1 || o.Lease < 0:
		return fmt.Errorf("replay: window of %d bytes, lease of %v", o.WindowBytes, o.Lease)
	}
	return nil
}

// queueMax bounds the requests that wait for one worker. It is large enough that one long prompt
// does not leave the other workers idle, and small enough that few chains are in memory.
const queueMax = 8

// job is one request with its block ids.
type job struct {
	ids         []kv.BlockID
	inputTokens int
	idealBlocks int
}

// Run replays the trace and returns the counts, also after an error or the end of ctx. An error
// comes from the trace, the client (ErrAuth, ErrNotFound, …) or ctx. The package comment lists the
// outcomes that are not errors.
func Run(ctx context.Context, opts Options) (Result, error) {
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return Result{}, err
	}
	var all stats
	all.r.RefusedBlocks = make(map[string]int64)
	start := time.Now()
	g, ctx := errgroup.WithContext(ctx)
	queues := make([]chan job, opts.Concurrency)
	for i := range queues {
		queues[i] = make(chan job, queueMax)
		g.Go(func() error { return work(ctx, &opts, &all, queues[i]) })
	}
	g.Go(func() error {
		defer func() {
			for _, q := range queues {
				close(q)
			}
		}()
		return dispatch(ctx, &opts, queues)
	})
	err := g.Wait()
	return all.result(time.Since(start)), err
}

// dispatch computes the block ids of the requests and sends all requests of one session to one
// worker.
func dispatch(ctx context.Context, opts *Options, queues []chan job) error {
	root, err := opts.Namespace.Chain()
	if err != nil {
		return err
	}
	seen := make(map[kv.BlockID]struct{})
	var tokens []kv.Token
	for req, err := range opts.Trace.All() {
		if err != nil {
			return err
		}
		tokens = req.AppendTokens(tokens[:0])
		chain := root
		j := job{inputTokens: req.InputTokens}
		j.ids, _ = chain.Append(make([]kv.BlockID, 0, len(tokens)/req.BlockTokens), tokens)
		j.idealBlocks = remember(seen, j.ids)
		select {
		case queues[req.Session%uint64(len(queues))] <- j:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// remember adds the blocks of a chain to seen, and returns the number of leading blocks that were
// in seen before. If seen has a block, it has all of the block's ancestors.
func remember(seen map[kv.BlockID]struct{}, ids []kv.BlockID) (known int) {
	for known < len(ids) {
		if _, ok := seen[ids[known]]; !ok {
			break
		}
		known++
	}
	for _, id := range ids[known:] {
		seen[id] = struct{}{}
	}
	return known
}

// worker replays the requests of its queue, one after the other.
type worker struct {
	opts   *Options
	stats  *stats
	mem    *client.Memory
	buf    []byte
	each   int64 // bytes of a block
	blocks int   // the number of blocks that fit the window
}

func work(ctx context.Context, opts *Options, all *stats, queue <-chan job) (err error) {
	each := opts.Namespace.Geometry.BlockBytes()
	blocks := max(1, opts.WindowBytes/each)
	region, err := arena.New(arena.Options{SizeBytes: blocks * each})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, region.Close()) }()
	mem, err := opts.Store.Register(region.Bytes())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, mem.Close(context.WithoutCancel(ctx))) }()
	w := &worker{opts: opts, stats: all, mem: mem, buf: region.Bytes(), each: each, blocks: int(blocks)}
	for j := range queue {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := w.replay(ctx, j); err != nil {
			return err
		}
	}
	return nil
}

// replay performs one request (match, load, store) and counts it.
func (w *worker) replay(ctx context.Context, j job) error {
	hit, err := w.serve(ctx, j.ids)
	if err != nil {
		return err
	}
	tokens := int64(w.opts.Namespace.Geometry.BlockTokens)
	w.opts.Progress(w.stats.add(func(r *Result) {
		r.Requests++
		r.InputTokens += int64(j.inputTokens)
		r.AskedTokens += int64(len(j.ids)) * tokens
		r.IdealTokens += int64(j.idealBlocks) * tokens
		r.HitTokens += int64(hit) * tokens
	}))
	return nil
}

// serve performs the operations of an engine for one prompt and returns the number of blocks that
// came from the cache. It holds the lease on the matched blocks to the end. Otherwise these blocks
// could be evicted before their children are stored, and a child without its parent cannot be
// stored.
func (w *worker) serve(ctx context.Context, ids []kv.BlockID) (hit int, err error) {
	if len(ids) == 0 {
		return 0, nil
	}
	m, err := w.match(ctx, ids)
	if err != nil {
		return 0, err
	}
	if m.Lease != nil {
		// The lease ends by itself, so a failure to release it is ignored.
		defer func() { _ = m.Lease.Release(context.WithoutCancel(ctx)) }()
	}
	if m.Blocks > 0 {
		if hit, err = w.load(ctx, ids[:m.Blocks], m.Epoch); err != nil {
			return hit, err
		}
	}
	return hit, w.store(ctx, ids, hit, m.Epoch)
}

func (w *worker) match(ctx context.Context, ids []kv.BlockID) (client.MatchResult, error) {
	start := time.Now()
	m, err := w.opts.Store.Match(ctx, client.MatchRequest{Namespace: w.opts.Namespace, IDs: ids, Lease: w.opts.Lease})
	if err != nil {
		return m, err
	}
	w.stats.matched(time.Since(start))
	w.stats.add(func(r *Result) {
		r.MatchedTokens += int64(m.Tokens)
		switch {
		case m.Outcome == client.Busy:
			r.BusyMatches++
		case m.Cut == client.CutNodeDown:
			r.MissedCalls++
		}
	})
	return m, nil
}

// load reads the prefix one window at a time and compares every byte. It stops at the first block
// that did not arrive or was wrong.
func (w *worker) load(ctx context.Context, ids []kv.BlockID, epoch kv.Epoch) (good int, err error) {
	var took time.Duration
	defer func() { w.stats.loaded(took) }()
	for at := 0; at < len(ids); at += w.blocks {
		end := min(at+w.blocks, len(ids))
		start := time.Now()
		res, err := w.opts.Store.Read(ctx, client.ReadRequest{
			Namespace: w.opts.Namespace, IDs: ids[:end], Epoch: epoch, Into: w.mem, Pieces: w.pieces(at, end),
		})
		took += time.Since(start)
		if err != nil {
			return good, err
		}
		arrived := min(max(res.Blocks, at), end)
		right := w.compare(ids[at:arrived], epoch)
		good += right
		w.stats.add(func(r *Result) {
			r.ReadBytes += int64(arrived-at) * w.each
			r.LostBlocks += int64(end - arrived)
			if res.Outcome == client.Busy {
				r.BusyReads++
			}
		})
		if right < end-at {
			break
		}
	}
	return good, nil
}

// pieces returns the pieces of the blocks [at, end) of a chain, one after the other in the window.
func (w *worker) pieces(at, end int) []client.Piece {
	out := make([]client.Piece, end-at)
	for i := range out {
		out[i] = client.Piece{Block: at + i, Offset: int64(i) * w.each}
	}
	return out
}

// compare returns the number of correct blocks at the start of the window, and counts the wrong
// blocks in the window.
func (w *worker) compare(ids []kv.BlockID, epoch kv.Epoch) (right int) {
	right = len(ids)
	for i, id := range ids {
		at := content.Of(id, epoch).Differs(w.buf[int64(i)*w.each:][:w.each])
		if at < 0 {
			continue
		}
		right = min(right, i)
		w.stats.add(func(r *Result) {
			if r.MismatchedBlocks++; r.Mismatch == "" {
				r.Mismatch = fmt.Sprintf("block %v of epoch %d differs from what was stored at byte %d of %d", id, epoch, at, w.each)
			}
		})
	}
	return right
}

// store writes the blocks ids[first:], one window at a time. It stops at the first window with a
// refused block, because later blocks could not be matched.
func (w *worker) store(ctx context.Context, ids []kv.BlockID, first int, epoch kv.Epoch) error {
	for at := first; at < len(ids); at += w.blocks {
		end := min(at+w.blocks, len(ids))
		for i, id := range ids[at:end] {
			content.Of(id, epoch).Fill(w.buf[int64(i)*w.each:][:w.each])
		}
		res, err := w.opts.Store.Write(ctx, client.WriteRequest{
			Namespace: w.opts.Namespace, IDs: ids[:end], First: at, Epoch: epoch, From: w.mem, Pieces: w.pieces(at, end),
		})
		if err != nil {
			return err
		}
		w.stats.add(func(r *Result) {
			r.StoredBlocks += int64(res.Stored)
			r.ExistedBlocks += int64(res.Existed)
			r.WrittenBytes += res.Bytes
			for _, f := range res.Refused {
				r.RefusedBlocks[string(f.Reason)]++
			}
			switch {
			case res.Outcome == client.Busy:
				r.BusyWrites++
			case res.Outcome == client.Miss && len(res.Refused) == 0:
				r.MissedCalls++
			}
		})
		if res.Blocks < end {
			return nil
		}
	}
	return nil
}
