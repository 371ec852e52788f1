package storage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/fair"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

// ReservationID identifies a reservation. Ids are not reused while the node runs.
type ReservationID uint64

// waitingWritesMax is the maximum number of Reserves that wait for memory. It is a quarter of the calls that
// package server performs concurrently over the data plane, so that waiting writes do not keep matches and reads from
// being performed.
const waitingWritesMax = 256

// ReserveRequest is the request of a Reserve.
type ReserveRequest struct {
	Namespace string
	// Share is that of the principal that writes.
	Share fair.Share
	// Epoch is the epoch of the weights with which the blocks were computed; 0 means the newest.
	// The epoch must be live at Commit.
	Epoch kv.Epoch
	// Geometry is the writer's geometry. It must equal the namespace's.
	Geometry kv.GeometryDigest
	// Parent is the block before the first of IDs. It is zero at the start of a prompt and in flat
	// namespaces.
	Parent kv.BlockID
	// IDs are consecutive blocks of one chain or, in a flat namespace, any keys.
	IDs []kv.BlockID
	// Pieces are the pieces that the writer offers. Nil means group 0 of every block. Within a
	// group, pieces are in the order of the blocks.
	Pieces []PieceRef
	Class  trie.Class
	// Attach, if not nil, is called with a reservation that has granted pieces, before any other
	// call can use the reservation. It may open a transfer window over the memory and call OnEnd.
	// If Attach fails, the reservation ends.
	Attach func(*Reservation) error
}

// Grant is the result of Reserve for one piece.
type Grant struct {
	PieceRef
	// Status is trie.Added if the writer must write the piece at Offset of the window. Any other
	// status is the reason why the node does not need the piece or cannot store it.
	Status trie.PutStatus
	// Offset is the offset of the piece in the reservation's Bytes.
	Offset int64
}

// A Reservation is arena memory into which a writer writes pieces. It belongs to the writer until
// Commit or Abort.
type Reservation struct {
	ID      ReservationID
	Grants  []Grant
	Expires time.Time
	// Granted is the number of pieces that the writer must write.
	Granted int

	ns      kv.Namespace // with the epoch of the reservation
	by      fair.Caller
	class   trie.Class
	parent  kv.BlockID
	ids     []kv.BlockID
	mem     *hold
	layouts []ondisk.Layout // by group
	// above is the lease that protects the parent block from eviction until the reservation ends; 0
	// if there is none.
	above trie.LeaseID
	// staged, if not nil, has the bytes of all offered pieces, one after the other.
	staged []byte
	// onEnd is called at the end of the reservation, before its memory is released.
	onEnd func()
}

// Bytes returns the arena memory into which the writer writes the granted pieces.
func (r *Reservation) Bytes() []byte { return r.mem.buf.Bytes() }

// ArenaOffset returns the offset of Bytes in the arena.
func (r *Reservation) ArenaOffset() int64 { return r.mem.buf.Offset() }

// TakeFrom makes Commit copy the granted pieces from staged to Bytes, and verify the copies. staged
// has the bytes of all pieces of Grants, one after the other. The writer may change them at any time,
// so they are not verified there. They must stay mapped until Commit returns. Attach calls TakeFrom.
// Error: ErrRequest if staged is too short.
func (r *Reservation) TakeFrom(staged []byte) error {
	need := int64(0)
	for _, g := range r.Grants {
		need += r.ns.Geometry.PieceBytes(g.Group)
	}
	if have := int64(len(staged)); need > have {
		return fmt.Errorf("%w: the pieces have %d bytes and the staging memory has %d", ErrRequest, need, have)
	}
	r.staged = staged
	return nil
}

// Namespace returns the namespace as of Reserve.
func (r *Reservation) Namespace() kv.Namespace { return r.ns }

// OnEnd sets a function that is called once when the reservation ends for any reason, before its
// memory is released. The function may close a transfer window. The goroutine that ends the
// reservation calls it.
func (r *Reservation) OnEnd(f func()) { r.onEnd = f }

// Reserve grants the offered pieces that the node needs, and allocates memory into which the writer
// writes them. A reservation without a granted piece needs no Commit and has the ID 0. Errors:
// ErrBusy, ErrReadOnly, ErrDraining, ErrRequest, ErrMismatch, trie.ErrNamespaceUnknown.
func (n *Node) Reserve(ctx context.Context, req ReserveRequest) (*Reservation, error) {
	ns, err := n.Namespace(req.Namespace)
	if err != nil {
		return nil, err
	}
	m := n.opts.Metrics
	m.WriteRequests.Of(ns.Name).Inc()
	r, err := n.reserve(ctx, ns, req)
	if err != nil {
		m.WriteFailures.WithLabelValues(failureReason(err)).Inc()
		return nil, err
	}
	for _, g := range r.Grants {
		if g.Status != trie.Added {
			m.WriteSkipped.WithLabelValues(g.Status.String()).Inc()
		}
	}
	return r, nil
}

func (n *Node) reserve(ctx context.Context, ns kv.Namespace, req ReserveRequest) (*Reservation, error) {
	if err := n.admitWrite(ns, req); err != nil {
		return nil, err
	}
	if req.Epoch != 0 {
		ns.Epoch = req.Epoch
	}
	if req.Pieces == nil {
		req.Pieces = make([]PieceRef, len(req.IDs))
		for i := range req.IDs {
			req.Pieces[i].Block = i
		}
	}
	r := &Reservation{ns: ns, by: fair.Caller{Share: req.Share, Tenant: ns.Tenant}, class: req.Class, parent: req.Parent, ids: req.IDs, Grants: make([]Grant, len(req.Pieces))}
	for i, g := range ns.Geometry.Groups {
		layout, err := n.store.SlotLayout(ns.Geometry.PieceBytes(i), g.Layers)
		if err != nil {
			return nil, fmt.Errorf("%w: namespace %q, group %d: %w", ErrRequest, ns.Name, i, err)
		}
		r.layouts = append(r.layouts, layout)
	}
	entries := make([]trie.Entry, len(req.Pieces))
	var payload int64
	for i, p := range req.Pieces {
		if p.Block < 0 || p.Block >= len(req.IDs) || p.Group < 0 || p.Group >= len(ns.Geometry.Groups) {
			return nil, fmt.Errorf("%w: block %d, group %d does not exist: the call has %d blocks and the namespace %d groups", ErrRequest, p.Block, p.Group, len(req.IDs), len(ns.Geometry.Groups))
		}
		entries[i] = r.entry(p)
		payload += ns.Geometry.PieceBytes(p.Group)
	}
	if payload > n.opts.WriteBytesMax {
		return nil, fmt.Errorf("%w: one write of %d bytes; the limit is %d (limits.write_bytes)", ErrRequest, payload, n.opts.WriteBytesMax)
	}
	statuses, err := n.wanted(ctx, r, entries)
	if err != nil {
		return nil, err
	}
	n.index.CountRefused(ns.ID, statuses)
	var total int64
	for i, p := range req.Pieces {
		r.Grants[i] = Grant{PieceRef: p, Status: statuses[i]}
		if statuses[i] != trie.Added {
			continue
		}
		layout := r.layouts[p.Group]
		r.Grants[i].Offset = total + layout.HeaderBytes()
		total += layout.SlotBytes()
		r.Granted++
	}
	if r.Granted == 0 {
		return r, nil
	}
	if err := n.record(ctx, ns); err != nil {
		return nil, err
	}
	return r, n.open(ctx, r, total, req.Attach)
}

// wanted returns for each entry whether the index would accept it. If the namespace or its tenant is at
// its quota, wanted first evicts blocks of the namespace or of the tenant to make room for the new
// ones.
func (n *Node) wanted(ctx context.Context, r *Reservation, entries []trie.Entry) ([]trie.PutStatus, error) {
	statuses, err := n.index.Known(nil, r.ns.ID, r.ns.Epoch, entries)
	if errors.Is(err, trie.ErrNamespaceUnknown) {
		return nil, fmt.Errorf("namespace %q: %w", r.ns.Name, err) // it was deleted meanwhile
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	for round, fit := 0, true; fit && round < roomRounds && slices.ContainsFunc(statuses, trie.PutStatus.ByQuota); round++ {
		var bytes int64
		for i, s := range statuses {
			// If a block exceeds the quota, the status of its descendants is ParentAbsent. So all
			// pieces count, except the pieces that exist.
			if s != trie.Exists {
				bytes += r.layouts[entries[i].Group].SlotBytes()
			}
		}
		if fit, err = n.room.inQuota(ctx, r.ns, bytes); err != nil {
			return nil, err
		}
		if statuses, err = n.index.Known(statuses[:0], r.ns.ID, r.ns.Epoch, entries); err != nil {
			return nil, err
		}
	}
	return statuses, nil
}

// admitWrite refuses invalid requests before any memory is used.
func (n *Node) admitWrite(ns kv.Namespace, req ReserveRequest) error {
	if err := n.writable(); err != nil {
		return err
	}
	if err := n.checkChain(req.IDs); err != nil {
		return err
	}
	if want := ns.Geometry.Digest(); req.Geometry != want {
		return fmt.Errorf("%w: the geometry is %v, but namespace %q has %v (%v)", ErrMismatch, req.Geometry, ns.Name, want, ns.Geometry)
	}
	if req.Epoch > ns.Epoch {
		return fmt.Errorf("%w: the epoch is %d, but namespace %q is at %d; bump its epoch first", ErrMismatch, req.Epoch, ns.Name, ns.Epoch)
	}
	if ns.Index == kv.IndexFlat && !req.Parent.IsZero() {
		return fmt.Errorf("%w: a parent is given, but namespace %q is flat", ErrRequest, ns.Name)
	}
	return nil
}

// entry is the index entry of a piece, without its slot.
func (r *Reservation) entry(p PieceRef) trie.Entry {
	e := trie.Entry{ID: r.ids[p.Block], Group: p.Group, Class: r.class}
	if r.ns.Index != kv.IndexFlat {
		e.Parent = r.parent
		if p.Block > 0 {
			e.Parent = r.ids[p.Block-1]
		}
	}
	return e
}

// open allocates the memory and adds the reservation to the table.
func (n *Node) open(ctx context.Context, r *Reservation, sizeBytes int64, attach func(*Reservation) error) error {
	if err := n.mayEnter(); err != nil {
		return err // before it waits for memory
	}
	buf, err := n.allocShare(ctx, r.by, sizeBytes)
	if err != nil {
		return err
	}
	r.mem = newHold(buf)
	r.ID = ReservationID(n.nextReserve.Add(1))
	r.Expires = n.opts.Now().Add(n.limits.Load().ReservationTTL)
	if !r.parent.IsZero() {
		// Without the lease, the parent may be evicted before the commit, which then refuses the
		// blocks.
		r.above, _ = n.index.Hold(r.ns.ID, r.ns.Epoch, r.parent)
	}
	if attach != nil {
		if err := attach(r); err != nil {
			n.end(r)
			return err
		}
	}
	if err := n.enter(r); err != nil {
		n.end(r)
		return err
	}
	return nil
}

// enter adds the reservation to the table if there is room.
func (n *Node) enter(r *Reservation) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.mayEnterLocked(); err != nil {
		return err
	}
	n.reservations[r.ID] = r
	return nil
}

// mayEnter fails if the node drains, or if the table has no room for a further reservation.
func (n *Node) mayEnter() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mayEnterLocked()
}

func (n *Node) mayEnterLocked() error {
	if n.draining.Load() {
		return ErrDraining
	}
	if len(n.reservations) >= n.limits.Load().ReservationsMax {
		return fmt.Errorf("%w: %d reservations are already open", ErrBusy, len(n.reservations))
	}
	return nil
}

// Reserved returns the name of the namespace of an open reservation. Error: ErrReservation.
func (n *Node) Reserved(id ReservationID) (string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	r, ok := n.reservations[id]
	if !ok {
		return "", fmt.Errorf("reservation %d: %w", id, ErrReservation)
	}
	return r.ns.Name, nil
}

// take removes a reservation from the table. The caller must end it.
func (n *Node) take(id ReservationID) (*Reservation, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	r, ok := n.reservations[id]
	if !ok {
		return nil, fmt.Errorf("reservation %d: %w", id, ErrReservation)
	}
	delete(n.reservations, id)
	return r, nil
}

// end releases the reservation's memory. r is not in the table.
func (n *Node) end(r *Reservation) {
	if r.onEnd != nil {
		r.onEnd()
	}
	if r.above != 0 {
		n.logIf("release the parent", n.index.Release(r.above))
	}
	r.mem.release()
}

// Abort ends a reservation without storing anything.
func (n *Node) Abort(id ReservationID) error {
	r, err := n.take(id)
	if err != nil {
		return err
	}
	n.end(r)
	return nil
}

func (n *Node) abortAll() { n.abortWhere(func(*Reservation) bool { return true }) }

// expireReservations ends the reservations that were not committed in time.
func (n *Node) expireReservations(now time.Time) {
	ended := n.abortWhere(func(r *Reservation) bool { return now.After(r.Expires) })
	if ended > 0 {
		n.opts.Metrics.WriteFailures.WithLabelValues("expired").Add(float64(ended))
	}
}

func (n *Node) abortWhere(match func(*Reservation) bool) int {
	n.mu.Lock()
	var ended []*Reservation
	for id, r := range n.reservations {
		if match(r) {
			delete(n.reservations, id)
			ended = append(ended, r)
		}
	}
	n.mu.Unlock()
	for _, r := range ended {
		n.end(r)
	}
	return len(ended)
}
