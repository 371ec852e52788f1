package profile

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/kv"
)

// ReadOptions are the options of MeasureRead. Store, Namespace and Runs are required.
type ReadOptions struct {
	Store     *client.Store
	Namespace kv.Namespace
	Runs      []Run
	// For is the duration of the measurement; default 10 s.
	For time.Duration
	// Parallel is the number of concurrent reads; default 8. WindowBytes is the memory of each
	// read; default 16 MiB, at least one block.
	Parallel    int
	WindowBytes int64
	// Progress, if not nil, is called after each read, by several goroutines.
	Progress func(elapsed time.Duration, bytes int64)
}

// Read is the result of a measurement.
type Read struct {
	Blocks  int64   `json:"blocks"`
	Bytes   int64   `json:"bytes"`
	Lost    int64   `json:"lost_blocks"`
	Busy    int64   `json:"busy"`
	Seconds float64 `json:"seconds"`
	// BytesPerSecond and TokensPerSecond are means over Seconds.
	BytesPerSecond  float64 `json:"bytes_per_second"`
	TokensPerSecond float64 `json:"tokens_per_second"`
	// Passes is how often all runs were read. If Passes is above 1, a node may have answered from
	// memory.
	Passes float64 `json:"passes"`
	// BytesPerToken is the KV size of a token in the namespace, in bytes.
	BytesPerToken float64 `json:"bytes_per_token"`
}

// busyPause is the pause of a reader after a busy node has refused a read.
const busyPause = 5 * time.Millisecond

// ErrNothingRead: no block of the namespace could be read.
var ErrNothingRead = errors.New("none of the blocks could be read")

// reader is the state of one measurement.
type reader struct {
	opts  ReadOptions
	each  int64
	start time.Time
	next  atomic.Int64

	mu   sync.Mutex
	read Read
}

// MeasureRead reads the runs repeatedly, several at a time. Each pass reads each block once.
func MeasureRead(ctx context.Context, o ReadOptions) (Read, error) {
	if o.For == 0 {
		o.For = 10 * time.Second
	}
	if o.Parallel == 0 {
		o.Parallel = 8
	}
	if o.WindowBytes == 0 {
		o.WindowBytes = 16 << 20
	}
	if o.Store == nil || len(o.Runs) == 0 {
		return Read{}, errors.New("profile: a store and runs are required")
	}
	if o.For < 0 || o.Parallel < 1 || o.Parallel > 1024 || o.WindowBytes < 1 || o.WindowBytes > 1<<30 {
		return Read{}, fmt.Errorf("profile: %d reads at once for %v in windows of %d bytes: 1 to 1024 at once, and windows of up to 1 GiB", o.Parallel, o.For, o.WindowBytes)
	}
	if g := o.Namespace.Geometry; len(g.Groups) != 1 || g.Groups[0].Kind != kv.Full {
		return Read{}, fmt.Errorf("profile: namespace %q has %v; one full layer group is needed", o.Namespace.Name, g)
	}
	r := &reader{opts: o, each: o.Namespace.Geometry.BlockBytes(), start: time.Now()}
	g, ctx := errgroup.WithContext(ctx)
	for range o.Parallel {
		g.Go(func() error { return r.work(ctx) })
	}
	if err := g.Wait(); err != nil {
		return r.read, err
	}
	out := r.read
	if out.Bytes == 0 {
		return out, fmt.Errorf("profile: %q: %w (%d lost, %d turned away)", o.Namespace.Name, ErrNothingRead, out.Lost, out.Busy)
	}
	out.BytesPerToken = float64(r.each) / float64(o.Namespace.Geometry.BlockTokens)
	out.BytesPerSecond = float64(out.Bytes) / out.Seconds
	out.TokensPerSecond = out.BytesPerSecond / out.BytesPerToken
	out.Passes = float64(out.Blocks+out.Lost) / float64(blocksOf(o.Runs))
	return out, nil
}

// blocksOf returns the number of blocks in a pass.
func blocksOf(runs []Run) (n int) {
	for _, r := range runs {
		n += len(r.IDs) - r.First
	}
	return n
}

// work reads one run after the other until the time is over.
func (r *reader) work(ctx context.Context) (err error) {
	blocks := max(1, r.opts.WindowBytes/r.each)
	memory, err := arena.New(arena.Options{SizeBytes: blocks * r.each})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, memory.Close()) }()
	into, err := r.opts.Store.Register(memory.Bytes())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, into.Close(context.WithoutCancel(ctx))) }()
	for {
		run := r.opts.Runs[int(r.next.Add(1)-1)%len(r.opts.Runs)]
		for at := run.First; at < len(run.IDs); at += int(blocks) {
			if err := r.window(ctx, run.IDs[:min(at+int(blocks), len(run.IDs))], at, into); err != nil {
				return err
			}
			// The time is checked after the read, so each reader reads at least once, also on a
			// slow machine.
			if time.Since(r.start) >= r.opts.For {
				return nil
			}
		}
		if run.First >= len(run.IDs) && time.Since(r.start) >= r.opts.For {
			return nil
		}
	}
}

// window reads the blocks from index at to the end of ids.
func (r *reader) window(ctx context.Context, ids []kv.BlockID, at int, into *client.Memory) error {
	pieces := make([]client.Piece, len(ids)-at)
	for i := range pieces {
		pieces[i] = client.Piece{Block: at + i, Offset: int64(i) * r.each}
	}
	res, err := r.opts.Store.Read(ctx, client.ReadRequest{Namespace: r.opts.Namespace, IDs: ids, Into: into, Pieces: pieces})
	if err != nil {
		return err
	}
	elapsed := time.Since(r.start)
	r.mu.Lock()
	r.read.Bytes += res.Bytes
	r.read.Blocks += res.Bytes / r.each
	r.read.Seconds = max(r.read.Seconds, elapsed.Seconds())
	if res.Outcome == client.Busy {
		r.read.Busy++
	} else {
		r.read.Lost += int64(len(pieces)) - res.Bytes/r.each
	}
	bytes := r.read.Bytes
	r.mu.Unlock()
	if r.opts.Progress != nil {
		r.opts.Progress(elapsed, bytes)
	}
	if res.Outcome != client.Busy {
		return nil
	}
	select {
	case <-time.After(busyPause):
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}
