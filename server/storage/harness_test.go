package storage_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/crypt"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/metrics"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// rig is a node on memory devices that can be crashed, closed and reopened.
type rig struct {
	t       testing.TB
	devices []blockio.Device
	index   vfs.FS
	opts    rigOptions

	node  *storage.Node
	trie  *trie.Trie
	store *blockstore.Store
	arena *arena.Arena
	stats *metrics.Node

	registry *prometheus.Registry
	reasons  map[string]bool // the label values in the registry before the first event
	drains   chan struct{}   // see drainLog
	indexLog testkit.Log
}

type rigOptions struct {
	capacityBytes, segmentBytes, arenaBytes int64
	durability                              blockstore.Durability
	degraded                                bool
	edit                                    func(*storage.Options)
	now                                     func() time.Time
	index                                   vfs.FS // nil: a file system that can crash
	indexDir                                string // empty: index
	keys                                    *crypt.Keyring
	epochKeys                               *bool
}

func newRig(t testing.TB, opts rigOptions, devices ...blockio.Device) *rig {
	t.Helper()
	if opts.capacityBytes == 0 {
		opts.capacityBytes = 16 << 20
	}
	if opts.segmentBytes == 0 {
		opts.segmentBytes = 1 << 20
	}
	if opts.arenaBytes == 0 {
		opts.arenaBytes = 8 << 20
	}
	if len(devices) == 0 {
		devices = []blockio.Device{memio.New(memio.Options{})}
	}
	if opts.index == nil {
		opts.index = vfs.NewCrashableMem()
	}
	r := &rig{t: t, devices: devices, index: opts.index, opts: opts, drains: make(chan struct{}, 1)}
	r.open()
	t.Cleanup(r.close)
	return r
}

func (r *rig) open() {
	r.t.Helper()
	if err := r.tryOpen(); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) tryOpen() error {
	ctx := context.Background()
	store, err := blockstore.Open(ctx, blockstore.Options{
		Devices:       r.devices,
		Identity:      "test",
		CapacityBytes: r.opts.capacityBytes,
		SegmentBytes:  r.opts.segmentBytes,
		Degraded:      r.opts.degraded,
		Keys:          r.opts.keys,
		EpochKeys:     r.opts.epochKeys,
	})
	if err != nil {
		return err
	}
	index, err := trie.Open(trie.Options{
		Dir:           cmp.Or(r.opts.indexDir, "index"),
		FS:            r.index,
		MemTableBytes: 256 << 10,
		CacheBytes:    1 << 20,
		Logger:        slog.New(slog.NewTextHandler(&r.indexLog, nil)),
		Absent:        store.Missing,
		SlotBytes: func(g kv.Geometry, group int) int64 {
			l, err := store.SlotLayout(g.PieceBytes(group), g.Groups[group].Layers)
			if err != nil {
				return g.PieceBytes(group)
			}
			return l.SlotBytes()
		},
	})
	if err != nil {
		return errors.Join(err, store.Close(ctx))
	}
	if r.arena == nil {
		if r.arena, err = arena.New(arena.Options{SizeBytes: r.opts.arenaBytes}); err != nil {
			return err
		}
	}
	r.registry = prometheus.NewRegistry()
	r.stats = metrics.NewNode(r.registry)
	r.reasons = r.countedReasons()
	o := storage.Options{
		Index: index, Store: store, Arena: r.arena, Metrics: r.stats,
		Durability: r.opts.durability, Now: r.opts.now, CheckOnClose: true,
		LoadBytesMax: 4 << 20, WriteBytesMax: 2 << 20,
		Logger: slog.New(drainLog(r.drains)),
	}
	if r.opts.edit != nil {
		r.opts.edit(&o)
	}
	r.trie, r.store = index, store
	r.node, err = storage.Open(ctx, o)
	return err
}

// close closes the node and checks that no memory, goroutine or reference is left.
func (r *rig) close() {
	if r.node == nil {
		return
	}
	if r.t.Failed() {
		// After a test failure, the findings of an orderly close would follow from that failure.
		// The goroutines of the node must end in any case, because a synctest bubble waits for
		// them.
		r.abandon()
		return
	}
	if err := r.node.Close(context.Background()); err != nil {
		r.t.Errorf("close: %v", err)
	}
	r.node = nil
	for reason := range r.countedReasons() {
		if !r.reasons[reason] {
			r.t.Errorf("%s is counted; package metrics does not list this reason", reason)
		}
	}
	if err := r.arena.Close(); err != nil {
		r.t.Errorf("arena: %v", err)
	}
	r.arena = nil
}

// abandon ends the goroutines of a node that cannot be closed in order, and frees its memory.
func (r *rig) abandon() {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_ = r.node.Close(ctx)
	r.node = nil
	if r.arena != nil {
		_ = r.arena.Close()
		r.arena = nil
	}
}

// countedReasons returns each metric by reason with its label values.
func (r *rig) countedReasons() map[string]bool {
	families, err := r.registry.Gather()
	if err != nil {
		r.t.Error(err)
	}
	out := map[string]bool{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "reason" {
					out[f.GetName()+" "+l.GetValue()] = true
				}
			}
		}
	}
	return out
}

// namespace creates a namespace.
func (r *rig) namespace(name string, g kv.Geometry, edit ...func(*kv.Namespace)) kv.Namespace {
	r.t.Helper()
	def := kv.Namespace{Name: name, Geometry: g, Index: kv.IndexTrie}
	for _, f := range edit {
		f(&def)
	}
	ns, err := r.node.CreateNamespace(context.Background(), def)
	if err != nil {
		r.t.Fatal(err)
	}
	return ns
}

// content fills buf with the content of a block. The content depends only on the id, the epoch and
// the group, so a test can check any bytes without a record of the writes.
func content(id kv.BlockID, epoch kv.Epoch, group int, buf []byte) {
	seed := binary.LittleEndian.Uint64(id[:8]) ^ uint64(epoch)<<32 ^ uint64(group)<<56
	rng := rand.New(rand.NewPCG(seed, binary.LittleEndian.Uint64(id[8:])))
	for len(buf) >= 8 {
		binary.LittleEndian.PutUint64(buf, rng.Uint64())
		buf = buf[8:]
	}
	for i := range buf {
		buf[i] = byte(rng.Uint64())
	}
}

// chain returns the ids of a prompt of n blocks. Each seed determines `per` blocks. Two prompts
// share the blocks before the first seed in which they differ.
func chain(ns kv.Namespace, per int, seeds ...int) []kv.BlockID {
	c, err := ns.Chain()
	if err != nil {
		panic(err)
	}
	var tokens []kv.Token
	for _, s := range seeds {
		for i := range per * ns.Geometry.BlockTokens {
			tokens = append(tokens, kv.Token(s*1_000_003+i))
		}
	}
	ids, _ := c.Append(nil, tokens)
	return ids
}

// put stores the blocks of the chain from first on and returns the outcomes.
func (r *rig) put(ns kv.Namespace, ids []kv.BlockID, first int, pieces ...storage.PieceRef) ([]storage.StoredPiece, error) {
	commit, err := r.reserve(ns, ids, first, pieces...)
	if err != nil || commit == nil {
		return nil, err
	}
	return commit()
}

// reserve is the first half of put, and commit the second. commit is nil if the node is busy.
func (r *rig) reserve(ns kv.Namespace, ids []kv.BlockID, first int, pieces ...storage.PieceRef) (commit func() ([]storage.StoredPiece, error), err error) {
	ctx := context.Background()
	req := storage.ReserveRequest{Namespace: ns.Name, Epoch: ns.Epoch, Geometry: ns.Geometry.Digest(), IDs: ids[first:], Pieces: pieces}
	if first > 0 && ns.Index != kv.IndexFlat {
		req.Parent = ids[first-1]
	}
	res, err := r.node.Reserve(ctx, req)
	if err != nil || res.ID == 0 {
		return nil, err
	}
	var sums []storage.PieceSums
	for _, g := range res.Grants {
		if g.Status != trie.Added {
			continue
		}
		payload := res.Bytes()[g.Offset:][:ns.Geometry.PieceBytes(g.Group)]
		content(ids[first+g.Block], ns.Epoch, g.Group, payload)
		sums = append(sums, storage.PieceSums{PieceRef: g.PieceRef, LayerSums: ondisk.AppendLayerSums(nil, payload, ns.Geometry.Groups[g.Group].Layers)})
	}
	return func() ([]storage.StoredPiece, error) { return r.node.Commit(ctx, res.ID, sums, nil) }, nil
}

// mustPut stores the whole chain.
func (r *rig) mustPut(ns kv.Namespace, ids []kv.BlockID) {
	r.t.Helper()
	stored, err := r.put(ns, ids, 0)
	if err != nil {
		r.t.Fatal(err)
	}
	for _, s := range stored {
		if !s.Stored && s.Reason != "exists" {
			r.t.Fatalf("block %d: %s: %v", s.Block, s.Reason, s.Err)
		}
	}
}

// load reads the chain and fails the test if any byte is wrong. It returns the number of delivered
// pieces.
func (r *rig) load(ns kv.Namespace, ids []kv.BlockID, edit ...func(*storage.LoadRequest)) (storage.LoadResult, int) {
	r.t.Helper()
	result, delivered, err := r.tryLoad(context.Background(), ns, ids, edit...)
	if err != nil {
		r.t.Fatal(err)
	}
	return result, delivered
}

func (r *rig) tryLoad(ctx context.Context, ns kv.Namespace, ids []kv.BlockID, edit ...func(*storage.LoadRequest)) (storage.LoadResult, int, error) {
	req := storage.LoadRequest{Namespace: ns.Name, IDs: ids}
	for _, f := range edit {
		f(&req)
	}
	var mu sync.Mutex
	got := map[storage.PieceRef][]byte{}
	result, err := r.node.Load(ctx, req, func(_ context.Context, parts []storage.Part) {
		for i := range parts {
			p := &parts[i]
			mu.Lock()
			buf := got[p.PieceRef]
			if need := int(p.At) + len(p.Bytes); len(buf) < need {
				buf = append(buf, make([]byte, need-len(buf))...)
			}
			copy(buf[p.At:], p.Bytes)
			got[p.PieceRef] = buf
			mu.Unlock()
			p.Done(nil)
		}
	})
	if err != nil {
		return result, 0, err
	}
	delivered := 0
	for _, p := range result.Pieces {
		if p.State != storage.Delivered {
			continue
		}
		delivered++
		want := make([]byte, ns.Geometry.PieceBytes(p.Group))
		content(ids[p.Block], result.Match.Epoch, p.Group, want)
		layer := ns.Geometry.LayerBytes(p.Group)
		from := int64(req.FirstLayer) * layer
		to := from + int64(len(p.LayerSums))*layer
		if !bytes.Equal(got[p.PieceRef], want[from:to]) {
			r.t.Errorf("WRONG BYTES in block %d, group %d of %s", p.Block, p.Group, ns.Name)
		}
	}
	return result, delivered, nil
}
