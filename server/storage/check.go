package storage

import (
	"context"
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

// Names of the invariants that Check reports. ARCHITECTURE.md lists all. blockstore reports
// one-owner.
const (
	ExactOrMiss     = "exact-or-miss"
	DataBeforeIndex = "data-before-index"
	IndexInvariants = "prefix-closed"
)

// checkBatchBytes is the size, in bytes, of one device batch of a check with Verify.
const checkBatchBytes = 16 << 20

// CheckOptions are the options of Check.
type CheckOptions struct {
	// Store is open and not Ready, so no node serves from it. Check calls Ready.
	Store *blockstore.Store
	Index *trie.Trie
	// Verify, if not nil, is an arena into which Check reads every piece, to compare header and
	// layers with the index.
	Verify *arena.Arena
	// Progress, if not nil, is called with the number of verified pieces and the number of all
	// pieces.
	Progress func(done, total int64)
}

// CheckReport is the outcome of a check.
type CheckReport struct {
	// Pieces counts the pieces in the index. Verified counts the pieces that were read and are
	// intact.
	Pieces, Verified, VerifiedBytes int64
	// Stale counts the index entries whose slot was lost in a crash. The next start drops them.
	// They violate no invariant.
	Stale int64
	// Findings are the broken invariants.
	Findings []blockstore.Finding
}

// Check compares index and volumes and checks the invariants. It changes neither.
func Check(ctx context.Context, opts CheckOptions) (CheckReport, error) {
	var r CheckReport
	geometries := make(map[kv.NamespaceID]kv.Namespace)
	for _, ns := range opts.Index.Namespaces() {
		geometries[ns.ID] = ns
	}
	stale := make(map[kv.Ref]bool)
	for ref, place := range opts.Index.Refs() {
		if err := ctx.Err(); err != nil {
			return r, err
		}
		ns, ok := geometries[place.Namespace]
		if !ok {
			stale[ref] = true // a piece of a deleted namespace that waits to be reclaimed
			continue
		}
		err := opts.Store.Adopt(ref, ns.Geometry.PieceBytes(place.Group), ns.Geometry.Groups[place.Group].Layers)
		switch {
		case errors.Is(err, blockstore.ErrState):
			r.find(blockstore.OneOwner, ref, err.Error())
			stale[ref] = true
		case err != nil:
			stale[ref] = true
		}
	}
	if err := opts.Store.Ready(); err != nil {
		return r, err
	}
	r.Stale = int64(len(stale))
	r.Findings = append(r.Findings, opts.Store.Check(func(yield func(kv.Ref) bool) {
		for ref := range opts.Index.Refs() {
			if !stale[ref] && !yield(ref) {
				return
			}
		}
	})...)
	if err := opts.Index.Check(); err != nil {
		r.find(IndexInvariants, kv.Ref{}, err.Error())
	}
	r.Pieces = opts.Index.Stats().Pieces
	if opts.Verify == nil {
		return r, nil
	}
	for _, ns := range opts.Index.Namespaces() {
		if err := r.verify(ctx, opts, ns, stale); err != nil {
			return r, fmt.Errorf("storage: check: %w", err)
		}
	}
	return r, nil
}

func (r *CheckReport) find(invariant string, ref kv.Ref, detail string) {
	r.Findings = append(r.Findings, blockstore.Finding{Invariant: invariant, Ref: ref, Detail: detail})
}

// verify reads every matchable piece of one namespace.
func (r *CheckReport) verify(ctx context.Context, opts CheckOptions, ns kv.Namespace, stale map[kv.Ref]bool) error {
	digest := ns.Geometry.Digest()
	var batch []blockstore.Read
	var batchBytes int64
	flush := func() error {
		err := r.readBatch(ctx, opts, ns, batch, batchBytes)
		batch, batchBytes = batch[:0], 0
		return err
	}
	for cursor := uint32(0); ; {
		infos, next, err := opts.Index.List(ns.ID, cursor, listPage)
		if err != nil {
			return err
		}
		for _, info := range infos {
			if stale[info.Ref] {
				continue
			}
			want := slotKey(ns, digest, info.ID, info.Group)
			layout, err := want.Layout()
			if err != nil {
				return err
			}
			batch = append(batch, blockstore.Read{Ref: info.Ref, Want: want})
			batchBytes += layout.SlotBytes()
			if batchBytes >= checkBatchBytes {
				if err := flush(); err != nil {
					return err
				}
			}
		}
		if next == 0 {
			return flush()
		}
		cursor = next
	}
}

func (r *CheckReport) readBatch(ctx context.Context, opts CheckOptions, ns kv.Namespace, batch []blockstore.Read, sizeBytes int64) error {
	if len(batch) == 0 {
		return nil
	}
	buf, err := opts.Verify.Alloc(ctx, int(sizeBytes))
	if err != nil {
		return err
	}
	defer buf.Release()
	rest := buf.Bytes()
	for i := range batch {
		layout, err := batch[i].Want.Layout()
		if err != nil {
			return err
		}
		batch[i].Buf, rest = rest[:layout.SlotBytes():layout.SlotBytes()], rest[layout.SlotBytes():]
	}
	if err := opts.Store.Read(ctx, batch); err != nil {
		return err
	}
	for i := range batch {
		switch b := &batch[i]; {
		case b.Err == nil:
			r.Verified++
			r.VerifiedBytes += b.Want.PayloadBytes
		case errors.Is(b.Err, blockstore.ErrStale):
			r.find(DataBeforeIndex, b.Ref, fmt.Sprintf("namespace %q, block %v, group %d: %v", ns.Name, b.Want.ID, b.Want.Group, b.Err))
		default:
			r.find(ExactOrMiss, b.Ref, fmt.Sprintf("namespace %q, block %v, group %d: %v", ns.Name, b.Want.ID, b.Want.Group, b.Err))
		}
	}
	if opts.Progress != nil {
		opts.Progress(r.Verified, r.Pieces)
	}
	return nil
}
