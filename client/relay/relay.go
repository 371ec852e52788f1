package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/kv"
)

// Source is storage from which blocks are read. *client.Store implements it. Register may return nil
// if Read does not use ReadRequest.Into: then the offsets of the pieces are those in mem.
type Source interface {
	Register(mem []byte) (*client.Memory, error)
	Read(ctx context.Context, r client.ReadRequest) (client.ReadResult, error)
}

// Store is storage to which blocks are written. *client.Store implements it.
type Store interface {
	Register(mem []byte) (*client.Memory, error)
	Write(ctx context.Context, r client.WriteRequest) (client.WriteResult, error)
}

// Options of a Relay.
type Options struct {
	// From is the source and To the destination of the blocks. The caller closes both after it has
	// closed the Relay.
	From Source
	To   Store
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

// Piece is one layer group of one block of a chain.
type Piece struct {
	// Block is the index in the chain.
	Block, Group int
}

// Copied is the result of a copy.
type Copied struct {
	// Blocks is the number of leading blocks whose pieces To has then. If no block was copied, it
	// is the index of the first block that was to be copied. CopyPieces does not set it. Pieces is the number of leading pieces that To
	// has then.
	Blocks, Pieces int
	// Bytes is the number of bytes that To has stored.
	Bytes int64
	// Reason is the reason why the next piece was not copied: a client.Cut or a client.Reason of From,
	// or the reason for which To refused the piece. It is empty if all were copied. Detail is a node's
	// explanation, for people.
	Reason, Detail string
}

// Copy copies the blocks [first, len(ids)) of the chain ids, in order: the pieces that a prefix of
// len(ids) blocks needs. With window or state groups ids must be exactly a prefix that a match in From
// returned, and first the length of one that a match in To returned. A block that From does not have, or that
// To refuses, ends the copy without an error. The namespace must have the same definition and epoch in From
// and To.
func (r *Relay) Copy(ctx context.Context, ns kv.Namespace, epoch kv.Epoch, ids []kv.BlockID, first int) (Copied, error) {
	groups := len(ns.Geometry.Groups)
	var pieces []Piece
	for b := first; b < len(ids); b++ {
		for g := range groups {
			if b >= ns.Geometry.FirstNeeded(g, len(ids)) {
				pieces = append(pieces, Piece{Block: b, Group: g})
			}
		}
	}
	done, err := r.copy(ctx, ns, epoch, ids, pieces, groups > 1)
	done.Blocks = max(first, len(ids))
	if done.Pieces < len(pieces) {
		done.Blocks = pieces[done.Pieces].Block
	}
	return done, err
}

// CopyPieces copies pieces of the chain ids, in the given order, which is by block and then by group. A
// piece that From does not have, or that To refuses, ends the copy without an error. The namespace must have
// the same definition and epoch in From and To. If it has several layer groups, From must read pieces
// that are not the ones of a match.
func (r *Relay) CopyPieces(ctx context.Context, ns kv.Namespace, epoch kv.Epoch, ids []kv.BlockID, pieces []Piece) (Copied, error) {
	return r.copy(ctx, ns, epoch, ids, pieces, false)
}

// copy copies pieces. If matched is set, ids is a prefix that From has matched, and every read names all
// of it.
func (r *Relay) copy(ctx context.Context, ns kv.Namespace, epoch kv.Epoch, ids []kv.BlockID, pieces []Piece, matched bool) (Copied, error) {
	var done Copied
	var left int64
	for _, p := range pieces {
		size := ns.Geometry.PieceBytes(p.Group)
		if size > r.opts.MemoryBytes {
			return done, fmt.Errorf("%w: %d of %d bytes", ErrTooLarge, size, r.opts.MemoryBytes)
		}
		left += size
	}
	r.waiting.Add(left)
	defer func() { r.waiting.Add(-left) }()
	for done.Pieces < len(pieces) {
		chunk := r.nextChunk(ns, pieces[done.Pieces:])
		got, err := r.chunk(ctx, ns, epoch, ids, chunk, matched)
		var moved int64
		for _, p := range chunk[:got.Pieces] {
			moved += ns.Geometry.PieceBytes(p.Group)
		}
		left -= moved
		r.waiting.Add(-moved)
		r.copied.Add(moved)
		whole := got.Pieces == len(chunk)
		got.Pieces, got.Bytes = got.Pieces+done.Pieces, got.Bytes+done.Bytes
		done = got
		if err != nil || !whole {
			return done, err
		}
	}
	return done, nil
}

// nextChunk returns the pieces that are copied at a time: as many as fit, and at least one.
func (r *Relay) nextChunk(ns kv.Namespace, pieces []Piece) []Piece {
	room := min(r.opts.ChunkBytes, r.opts.MemoryBytes)
	for i, p := range pieces {
		if room -= ns.Geometry.PieceBytes(p.Group); room < 0 && i > 0 {
			return pieces[:i]
		}
	}
	return pieces
}

// chunk copies the pieces, of which there is at least one, as copy does. Copied.Pieces counts these pieces.
func (r *Relay) chunk(ctx context.Context, ns kv.Namespace, epoch kv.Epoch, ids []kv.BlockID, chunk []Piece, matched bool) (Copied, error) {
	var none Copied
	var size int64
	for _, p := range chunk {
		size += ns.Geometry.PieceBytes(p.Group)
	}
	first, prefix := chunk[0].Block, ids
	if !matched {
		prefix = ids[:chunk[len(chunk)-1].Block+1]
	}
	buf, err := r.memory.Alloc(ctx, int(size))
	if err != nil {
		return none, fmt.Errorf("relay: memory for %d pieces: %w", len(chunk), err)
	}
	defer buf.Release()
	if err := r.wait(ctx, int(size)); err != nil {
		return none, err
	}
	pieces, sums, arrived := make([]client.Piece, len(chunk)), make([][]uint64, len(chunk)), make([]bool, len(chunk))
	at := buf.Offset()
	for i, p := range chunk {
		pieces[i] = client.Piece{Block: p.Block, Group: p.Group, Offset: at}
		sums[i] = make([]uint64, ns.Geometry.Groups[p.Group].Layers)
		at += ns.Geometry.PieceBytes(p.Group)
	}
	read, err := r.opts.From.Read(ctx, client.ReadRequest{
		Namespace: ns, IDs: prefix, First: first, Epoch: epoch, Into: r.from, Pieces: pieces, Sums: sums, Arrived: arrived,
	})
	if err != nil {
		return none, fmt.Errorf("relay: read of %d pieces from block %d on: %w", len(chunk), first, err)
	}
	n := 0
	for n < len(chunk) && arrived[n] {
		n++
	}
	if n < len(chunk) {
		none.Reason = string(read.Cut)
		if len(read.Lost) > 0 {
			none.Reason, none.Detail = string(read.Lost[0].Reason), read.Lost[0].Detail
		}
	}
	if n == 0 {
		return none, nil
	}
	written, err := r.opts.To.Write(ctx, client.WriteRequest{
		Namespace: ns, IDs: ids[:chunk[n-1].Block+1], First: first, Epoch: epoch, From: r.to, Pieces: pieces[:n], Sums: sums[:n],
	})
	if err != nil {
		return none, fmt.Errorf("relay: write of %d pieces from block %d on: %w", n, first, err)
	}
	done := Copied{Pieces: n, Bytes: written.Bytes, Reason: none.Reason, Detail: none.Detail}
	if len(written.Refused) > 0 {
		bad := written.Refused[0]
		done.Pieces = slices.Index(chunk, Piece{bad.Block, bad.Group})
		done.Reason, done.Detail = string(bad.Reason), bad.Detail
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
