package storage

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/internal/spread"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

// Node is one storage node. All methods may be called concurrently.
type Node struct {
	opts   Options
	index  *trie.Trie
	store  *blockstore.Store
	events *EventLog
	// changes has the changes of the index that have not been published as events yet.
	changes changes
	hot     *hotSet

	// reads limits the Loads of the node, and lanes the reads of each volume. detached has one unit
	// of weight for each device request that detach has started and that has not completed; only
	// Close waits for them, by acquiring the whole weight.
	reads    *gate
	lanes    []*lane
	detached *semaphore.Weighted
	room     *roomMaker
	movers   []*mover     // by volume
	workers  *spread.Pool // of Commit
	loans    loanBook
	limits   atomic.Pointer[Limits]

	draining atomic.Bool
	refusing atomic.Bool // the last result of noteWriteState: writes are refused
	// unsynced is set if acknowledged blocks may not be durable: every commit and every failed sync
	// sets it, and the next sync clears it.
	unsynced atomic.Bool

	recovered Recovery

	stop     context.CancelFunc
	stopped  context.Context
	loops    sync.WaitGroup
	closing  sync.Once
	closeErr error
	reclaim  chan struct{}
	// scrubRate has a token when the rate of the scrubber has changed.
	scrubRate chan struct{}

	// nsTurn is the token of changes of namespaces and of writes of the catalogue. It is held during the
	// I/O of the catalogue, so callers wait for it with takeNamespaces, until their contexts end. Reads of
	// blocks do not take it, and writes take it only for a namespace without a record.
	nsTurn  chan struct{}
	deleted deletions
	ended   endedNames
	// unerased: the last eraseEnded has failed.
	unerased atomic.Bool
	// unrecorded has the announced namespaces whose last record has failed, which was logged.
	unrecorded map[kv.NamespaceID]bool
	// epochStarts has the moment at which the newest epoch of a namespace began: an EpochStart by
	// kv.NamespaceID. A namespace whose epoch began before the node started is not in it.
	epochStarts sync.Map
	// prefixes counts the hits of prefixes.
	prefixes *prefixHits
	// hotPrefixes finds the prefixes that get copies on other nodes.
	hotPrefixes *hotPrefixes
	hotCopies   atomic.Int64

	nextReserve atomic.Uint64
	commits     atomic.Uint64

	mu           sync.Mutex
	reservations map[ReservationID]*Reservation
}

// Recovery is the result of the recovery in Open.
type Recovery struct {
	// Blocks counts the pieces in the index. Rejected counts the index entries that were dropped
	// because no slot on a volume holds their piece.
	Blocks, Rejected int64
	// Hidden counts the index entries of pieces on missing volumes, and of the descendants of these
	// pieces. They are misses until the volumes are back.
	Hidden int64
	// Took is the time from Open until the node is ready, including the time for loading the index.
	Took time.Duration
}

// Open reconciles index and store. It drops the entries of the index that have no slot, frees the
// slots that have no entry, and makes both agree on the namespaces. Then it starts the background
// work. If Open fails, index and store stay open and belong to the caller.
func Open(ctx context.Context, opts Options) (*Node, error) {
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	n := &Node{
		opts:         opts,
		index:        opts.Index,
		store:        opts.Store,
		events:       NewEventLog(opts.EventHistory),
		prefixes:     newPrefixHits(prefixesMax),
		hotPrefixes:  newHotPrefixes(opts.HotPrefix),
		hot:          newHotSet(opts.HotBytes),
		workers:      spread.New(),
		detached:     semaphore.NewWeighted(math.MaxInt64),
		reservations: make(map[ReservationID]*Reservation),
		unrecorded:   make(map[kv.NamespaceID]bool),
		nsTurn:       make(chan struct{}, 1),
		reclaim:      make(chan struct{}, 1),
		scrubRate:    make(chan struct{}, 1),
	}
	// Half of the arena is reserved for writers, and writers use only that half.
	opts.Arena.SetShare(int64(len(opts.Arena.Bytes()))/2, waitingWritesMax)
	n.lanes = newLanes(opts.Store.Volumes(), opts.ReadsMax, int64(len(opts.Arena.Bytes())))
	// Each lane admits ReadsMax Loads. So if all volumes but one hang, Loads from the other volume
	// are still admitted.
	places := opts.ReadsMax * len(n.lanes)
	n.reads = newGate(int64(places), places)
	n.room = newRoomMaker(n)
	n.movers = newMovers(n)
	n.loans.max = n.opts.LoanBytesMax
	n.limits.Store(startLimits(&n.opts))
	if err := n.recover(ctx); err != nil {
		return nil, fmt.Errorf("storage: recover: %w", err)
	}
	n.store.OnVolumeChange(n.reportVolume)
	n.index.OnChange(n.changes.note)
	n.stopped, n.stop = context.WithCancel(context.Background())
	n.startLoops()
	return n, nil
}

func (n *Node) recover(ctx context.Context) error {
	start := n.opts.Now()
	if err := n.reconcileNamespaces(ctx); err != nil {
		return err
	}
	geometries := make(map[kv.NamespaceID]kv.Geometry)
	for _, ns := range n.index.Namespaces() {
		geometries[ns.ID] = ns.Geometry
		n.opts.Metrics.AddNamespace(ns.Name)
		if _, err := n.slotBytes(ns); err != nil {
			n.opts.Logger.Warn("new blocks of a namespace are refused", "namespace", ns.Name, "err", err)
		}
	}
	var rejected []kv.Ref
	for ref, place := range n.index.Refs() {
		if err := ctx.Err(); err != nil {
			return err
		}
		g, ok := geometries[place.Namespace]
		if !ok {
			rejected = append(rejected, ref)
			continue
		}
		err := n.store.Adopt(ref, g.PieceBytes(place.Group), g.Groups[place.Group].Layers)
		if err != nil {
			n.opts.Logger.Debug("the slot of an index entry does not hold its piece", "ref", ref, "err", err)
			rejected = append(rejected, ref)
		}
	}
	if err := n.store.Ready(); err != nil {
		return err
	}
	if len(rejected) > 0 {
		n.opts.Logger.Warn("dropped index entries whose slots do not hold their pieces", "entries", len(rejected))
		if err := n.dropAll(ctx, rejected, trie.Dropped); err != nil {
			return err
		}
	}
	// If the configured capacity was reduced, the node drops the excess blocks here (invariant
	// bounded).
	if surplus := n.store.Surplus(); len(surplus) > 0 {
		n.opts.Logger.Warn("dropped blocks because the capacity is smaller than the stored bytes", "slots", len(surplus), "capacity_bytes", n.store.Stats().CapacityBytes)
		if err := n.dropAll(ctx, surplus, trie.Chosen); err != nil {
			return err
		}
	}
	stats := n.index.Stats()
	n.recovered = Recovery{
		Blocks:   stats.Pieces,
		Rejected: int64(len(rejected)),
		Hidden:   stats.Load.Hidden,
		Took:     n.opts.Now().Sub(start) + stats.Load.Took,
	}
	if missing := n.store.MissingVolumes(); len(missing) > 0 {
		n.opts.Logger.Error("volumes are missing: their blocks are misses until the node is restarted with these volumes", "volumes", missing, "hidden_blocks", n.recovered.Hidden)
	}
	m := n.opts.Metrics
	m.RecoveredBlocks.Set(float64(n.recovered.Blocks))
	m.RejectedEntries.Set(float64(n.recovered.Rejected))
	m.RecoverySeconds.Set(n.recovered.Took.Seconds())
	return nil
}

// dropAll removes the pieces in the slots and their descendants from the index, and
// frees their slots.
func (n *Node) dropAll(ctx context.Context, refs []kv.Ref, why trie.Why) error {
	for _, ref := range refs {
		if err := n.index.Remove(ref, why); err != nil && !errors.Is(err, trie.ErrAbsent) {
			return err
		}
	}
	return n.reclaimAll(ctx)
}

// Recovered returns the result of the recovery in Open.
func (n *Node) Recovered() Recovery { return n.recovered }

// reportVolume publishes a change of a volume's state. When a failed volume has recovered, it
// requests a sync: the volume may hold committed blocks that are not durable, because failed
// volumes are not synced.
func (n *Node) reportVolume(c blockstore.VolumeChange) {
	if c.Was == health.Failed && c.Is.Syncs() {
		n.unsynced.Store(true)
	}
	n.events.Publish(Event{Kind: VolumeState, Volume: &c, Time: n.opts.Now()})
}

// Events returns the log of stored and removed blocks and of changes of volume states.
func (n *Node) Events() *EventLog { return n.events }

// Drain makes the node refuse new reservations, so that writers use other nodes. Reads
// are served until Close.
func (n *Node) Drain() { n.draining.Store(true) }

// WriteState reports whether the node takes writes, with the reason if not: "serving", "draining",
// "read_only", or "failed" if no volume can be read either.
func (n *Node) WriteState() (state, reason string) {
	err := n.writable()
	switch {
	case err == nil:
		return "serving", ""
	case errors.Is(err, ErrDraining):
		return "draining", err.Error()
	case !n.store.Readable():
		return "failed", err.Error()
	}
	return "read_only", err.Error()
}

// IndexWritable returns nil, or trie.ErrBroken with the reason why the index refuses
// changes.
func (n *Node) IndexWritable() error { return n.index.Writable() }

// Ready returns nil if clients should send traffic to the node. It returns an error in four cases:
// the node is draining, no volume can be read, too few volumes are healthy for a change of epochs
// or namespaces, or the index refuses changes. A node that is full or below its floor of free space
// is ready, because it serves reads.
func (n *Node) Ready() error {
	switch {
	case n.draining.Load():
		return ErrDraining
	case !n.store.Readable():
		return n.writable()
	}
	return errors.Join(n.store.Quorate(), n.index.Writable())
}

// Close ends the background work, aborts open reservations, waits for Loads, syncs, and closes
// index and store. It may be called twice.
func (n *Node) Close(ctx context.Context) error {
	n.closing.Do(func() {
		n.Drain()
		n.stop()
		n.loops.Wait()
		n.abortAll()
		if err := n.reads.close(ctx); err != nil {
			n.closeErr = fmt.Errorf("storage: close: loads are still running: %w", err)
			return
		}
		n.hot.drop(-1, func(arena.Buffer) bool { return true })
		if invariants.Enabled || n.opts.CheckOnClose {
			n.closeErr = n.check()
		}
		// The store is closed before the index, so that data-before-index always holds.
		closed := n.store.Close(ctx)
		n.closeErr = errors.Join(n.closeErr, closed, n.index.Sync(), n.index.Close())
		if closed == nil {
			// The devices have completed all requests, so this does not block.
			n.closeErr = errors.Join(n.closeErr, n.detached.Acquire(context.WithoutCancel(ctx), math.MaxInt64))
		}
	})
	return n.closeErr
}

// check verifies the invariants of index and store and that they agree. No other call
// may run.
func (n *Node) check() error {
	errs := []error{n.index.Check()}
	for _, f := range n.store.Check(n.liveRefs()) {
		errs = append(errs, fmt.Errorf("storage: %s: %v: %s", f.Invariant, f.Ref, f.Detail))
	}
	return errors.Join(errs...)
}

func (n *Node) liveRefs() iter.Seq[kv.Ref] {
	return func(yield func(kv.Ref) bool) {
		for ref := range n.index.Refs() {
			if !yield(ref) {
				return
			}
		}
	}
}
