package relay

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/kv"
)

// Store is the storage of a datacenter. *client.Store implements it.
type Store interface {
	Register(mem []byte) (*client.Memory, error)
	Read(ctx context.Context, r client.ReadRequest) (client.ReadResult, error)
	Write(ctx context.Context, r client.WriteRequest) (client.WriteResult, error)
}

// Options of a Relay.
type Options struct {
	// From is the source and To the destination of the blocks. The caller closes both after it has
	// closed the Relay.
	From, To Store
	// BytesPerSecond is the bandwidth that all copies together may use on the link. Required.
	BytesPerSecond float64
	// MemoryBytes is the size of the memory for blocks that are being copied. Default 64 MiB.
	MemoryBytes int64
	// ChunkBytes is the largest total size of the blocks that one copy reads and writes at a time.
	// Default 4 MiB. At least one block is copied at a time.
	ChunkBytes int64
}

// EnsureDefaults fills the fields that are zero.
func (o *Options) EnsureDefaults() {
	if o.MemoryBytes == 0 {
		o.MemoryBytes = 64 << 20
	}
	if o.ChunkBytes == 0 {
		o.ChunkBytes = 4 << 20
	}
}

// Validate returns an error that names the first field out of its range.
func (o *Options) Validate() error {
	switch {
	case o.From == nil || o.To == nil:
		return errors.New("relay: From and To are required")
	case !(o.BytesPerSecond > 0):
		return fmt.Errorf("relay: BytesPerSecond is %v; it must be above 0", o.BytesPerSecond)
	case o.MemoryBytes < 1 || o.ChunkBytes < 1:
		return fmt.Errorf("relay: MemoryBytes is %d and ChunkBytes %d; both must be above 0", o.MemoryBytes, o.ChunkBytes)
	}
	return nil
}

// Relay copies blocks. Its methods may be called concurrently.
type Relay struct {
	opts     Options
	memory   *arena.Arena
	from, to *client.Memory
	budget   *rate.Limiter
	// waiting is the number of bytes of running copies that have not crossed the link, and copied
	// the number of bytes that have crossed it since New.
	waiting, copied atomic.Int64
}

// ErrTooLarge: a block does not fit into the memory of the Relay.
var ErrTooLarge = errors.New("relay: a block is larger than the memory for blocks on their way")

// New maps the memory and registers it with From and To.
func New(o Options) (_ *Relay, err error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	r := &Relay{opts: o, budget: rate.NewLimiter(rate.Limit(o.BytesPerSecond), int(o.ChunkBytes))}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close(context.Background()))
		}
	}()
	if r.memory, err = arena.New(arena.Options{SizeBytes: o.MemoryBytes}); err != nil {
		return nil, err
	}
	if r.from, err = o.From.Register(r.memory.Bytes()); err != nil {
		return nil, err
	}
	r.to, err = o.To.Register(r.memory.Bytes())
	return r, err
}

// Close releases the memory. No copy may be running. If a storage client may still write to the
// memory, the memory stays mapped, and Close returns an error.
func (r *Relay) Close(ctx context.Context) error {
	var errs []error
	for _, m := range []*client.Memory{r.from, r.to} {
		if m != nil {
			errs = append(errs, m.Close(ctx))
		}
	}
	if err := errors.Join(errs...); err != nil || r.memory == nil {
		return err
	}
	return r.memory.Close()
}

// Stats are counters and gauges of a Relay.
type Stats struct {
	// CopiedBytes is the number of bytes that have crossed the link since New. WaitingBytes is the
	// number of bytes of running copies that have not crossed the link yet.
	CopiedBytes, WaitingBytes int64
}

// Stats returns the counters.
func (r *Relay) Stats() Stats {
	return Stats{CopiedBytes: r.copied.Load(), WaitingBytes: max(r.waiting.Load(), 0)}
}

// Backlog returns the time that the link takes for the bytes that wait for it.
func (r *Relay) Backlog() time.Duration {
	return time.Duration(float64(r.Stats().WaitingBytes) / r.opts.BytesPerSecond * float64(time.Second))
}

// Copied is the result of a copy.
type Copied struct {
	// Blocks is the number of leading blocks of the chain that To has then. If no block was copied, it
	// is the index of the first block that was to be copied.
	Blocks int
	// Bytes is the number of bytes that To has stored.
	Bytes int64
	// Reason is the reason why the next block was not copied: a client.Cut or a client.Reason of From,
	// or the reason for which To refused the block. It is empty if all were copied. Detail is a node's
	// explanation, for people.
	Reason, Detail string
}

// Copy copies the blocks [first, len(ids)) of the chain ids, in order. A block that From does not
// have, or that To refuses, ends the copy without an error. The namespace must have the same
// definition and epoch in From and To, and exactly one layer group.
func (r *Relay) Copy(ctx context.Context, ns kv.Namespace, epoch kv.Epoch, ids []kv.BlockID, first int) (Copied, error) {
	done := Copied{Blocks: first}
	if len(ns.Geometry.Groups) != 1 {
		return done, fmt.Errorf("relay: namespace %q has %d layer groups; want 1", ns.Name, len(ns.Geometry.Groups))
	}
	size := ns.Geometry.PieceBytes(0)
	if size > r.opts.MemoryBytes {
		return done, fmt.Errorf("%w: %d of %d bytes", ErrTooLarge, size, r.opts.MemoryBytes)
	}
	left := int64(len(ids)-first) * size
	r.waiting.Add(left)
	defer func() { r.waiting.Add(-left) }()
	perChunk := int(max(1, min(r.opts.ChunkBytes, r.opts.MemoryBytes)/size))
	for done.Blocks < len(ids) {
		to := min(done.Blocks+perChunk, len(ids))
		got, err := r.chunk(ctx, ns, epoch, ids[:to], done.Blocks)
		moved := int64(got.Blocks-done.Blocks) * size
		left -= moved
		r.waiting.Add(-moved)
		r.copied.Add(moved)
		got.Bytes += done.Bytes
		done = got
		if err != nil || done.Blocks < to {
			return done, err
		}
	}
	return done, nil
}

// chunk copies the blocks [first, len(ids)).
func (r *Relay) chunk(ctx context.Context, ns kv.Namespace, epoch kv.Epoch, ids []kv.BlockID, first int) (Copied, error) {
	none := Copied{Blocks: first}
	size, n := ns.Geometry.PieceBytes(0), len(ids)-first
	buf, err := r.memory.Alloc(ctx, int(size)*n)
	if err != nil {
		return none, fmt.Errorf("relay: memory for %d blocks: %w", n, err)
	}
	defer buf.Release()
	if err := r.wait(ctx, int(size)*n); err != nil {
		return none, err
	}
	pieces, sums := make([]client.Piece, n), make([][]uint64, n)
	for i := range pieces {
		pieces[i] = client.Piece{Block: first + i, Offset: buf.Offset() + int64(i)*size}
		sums[i] = make([]uint64, ns.Geometry.Groups[0].Layers)
	}
	read, err := r.opts.From.Read(ctx, client.ReadRequest{Namespace: ns, IDs: ids, First: first, Epoch: epoch, Into: r.from, Pieces: pieces, Sums: sums})
	if err != nil {
		return none, fmt.Errorf("relay: read of %d blocks from %d on: %w", n, first, err)
	}
	if read.Blocks < len(ids) {
		none.Reason = string(read.Cut)
		if len(read.Lost) > 0 {
			none.Reason, none.Detail = string(read.Lost[0].Reason), read.Lost[0].Detail
		}
	}
	n = read.Blocks - first
	if n <= 0 {
		return none, nil
	}
	written, err := r.opts.To.Write(ctx, client.WriteRequest{
		Namespace: ns, IDs: ids[:read.Blocks], First: first, Epoch: epoch, From: r.to, Pieces: pieces[:n], Sums: sums[:n],
	})
	if err != nil {
		return none, fmt.Errorf("relay: write of %d blocks from %d on: %w", n, first, err)
	}
	done := Copied{Blocks: written.Blocks, Bytes: written.Bytes, Reason: none.Reason, Detail: none.Detail}
	if len(written.Refused) > 0 {
		done.Reason, done.Detail = string(written.Refused[0].Reason), written.Refused[0].Detail
	}
	return done, nil
}

// wait waits until the budget allows n bytes.
func (r *Relay) wait(ctx context.Context, n int) error {
	for n > 0 {
		part := min(n, r.budget.Burst())
		if err := r.budget.WaitN(ctx, part); err != nil {
			return fmt.Errorf("relay: the budget of the link: %w", err)
		}
		n -= part
	}
	return nil
}
