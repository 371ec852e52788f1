package suite

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/bloom"

	"github.com/penstock-kv/penstock/internal/sys"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/bench"
	"github.com/penstock-kv/penstock/trie"
)

// IndexOptions configures the index suite.
type IndexOptions struct {
	// Blocks is the number of blocks in the index.
	Blocks int
	// NodeBlocks is the number of blocks of the node that is killed and recovered; 0 skips the
	// recovery comparisons.
	NodeBlocks int
}

const (
	// chainBlocks is the length of the prefixes that are matched.
	chainBlocks = 512
	// commitBatch is the number of keys in one commit, commitCallers the number of concurrent
	// commits.
	commitBatch   = 64
	commitCallers = 8
	// warmChains is the number of chains that are matched repeatedly.
	warmChains = 64
)

const (
	matchName      = "trie.Match"
	matchLeaseName = "trie.Match, leased"
	getsName       = "512 Pebble gets"
)

// indexSuite is one run of the suite.
type indexSuite struct {
	*suiteRun
	opts   IndexOptions
	dir    string
	chains int
}

// Index measures the prefix index.
func Index(ctx context.Context, w World, o IndexOptions) (_ bench.Report, err error) {
	s := &indexSuite{suiteRun: newRun(w, "index"), opts: o, chains: o.Blocks / chainBlocks}
	// A block takes 160 bytes of disk in the index and 100 bytes in the Pebble database of
	// fillGets, and as much again during a compaction.
	if err := s.needSpace(int64(o.Blocks)*1000 + nodeBytes(o.NodeBlocks)); err != nil {
		return s.report, err
	}
	dir, remove, err := s.tempDir("index")
	if err != nil {
		return s.report, err
	}
	defer remove()
	s.dir = dir
	s.setup("%d blocks in chains of %d", s.chains*chainBlocks, chainBlocks)
	err = s.all(ctx, step{"matches", s.matches}, step{"commits", s.commits}, step{"recovery", s.recovery})
	return s.report, err
}

// chainID returns an id that is as random as a hash, but cheap to compute.
func chainID(chain, block int) (id kv.BlockID) {
	x := rand.New(rand.NewPCG(uint64(chain), uint64(block)))
	binary.LittleEndian.PutUint64(id[:], x.Uint64())
	binary.LittleEndian.PutUint64(id[8:], x.Uint64()|1) // never zero
	return id
}

func chainIDs(chain int) []kv.BlockID {
	ids := make([]kv.BlockID, chainBlocks)
	for i := range ids {
		ids[i] = chainID(chain, i)
	}
	return ids
}

// chainEntries returns the index entries of a chain in consecutive slots, which is how a node
// stores a chain.
func chainEntries(chain int) []trie.Entry {
	entries := make([]trie.Entry, chainBlocks)
	var parent kv.BlockID
	for i, id := range chainIDs(chain) {
		slot := uint32(chain*chainBlocks + i)
		entries[i] = trie.Entry{ID: id, Parent: parent, Ref: kv.Ref{
			Extent: kv.MakeExtent(0, slot>>10, slot&1023), Generation: 1<<32 + kv.Generation(slot),
		}}
		parent = id
	}
	return entries
}

// openTrie opens an index and adds the benchmark's namespace.
func openTrie(dir string) (*trie.Trie, kv.Namespace, error) {
	t, err := trie.Open(trie.Options{Dir: dir})
	if err != nil {
		return nil, kv.Namespace{}, err
	}
	ns, err := t.Create(kv.Namespace{Name: "bench", Index: kv.IndexTrie, Geometry: kv.SingleGroup(61, 64, 656), Epoch: 1})
	if err != nil && !errors.Is(err, trie.ErrNamespaceExists) {
		return nil, kv.Namespace{}, errors.Join(err, t.Close())
	}
	return t, ns, nil
}

// put commits entries in batches.
func put(t *trie.Trie, ns kv.Namespace, entries []trie.Entry, durable bool) error {
	var status []trie.PutStatus
	for batch := range slices.Chunk(entries, commitBatch) {
		var err error
		if status, err = t.Put(status[:0], ns.ID, ns.Epoch, batch, durable); err != nil {
			return err
		}
		if i := slices.IndexFunc(status, func(p trie.PutStatus) bool { return p != trie.Added }); i >= 0 {
			return fmt.Errorf("bench: a new block was not added but is %v", status[i])
		}
	}
	return nil
}

const (
	warmWork = "match 512 blocks, warm"
	coldWork = "match 512 blocks, just opened"
	sizeWork = "size of the index"
)

// matches compares matching with point gets, and measures the size of the index.
func (s *indexSuite) matches(ctx context.Context) error {
	if !s.wants(warmWork, coldWork, sizeWork) {
		return nil
	}
	dir, gets := filepath.Join(s.dir, "trie"), filepath.Join(s.dir, "gets")
	s.Progress(fmt.Sprintf("filling the index with %d blocks", s.chains*chainBlocks))
	before := heapBytes()
	t, ns, err := openTrie(dir)
	if err != nil {
		return err
	}
	defer func() { _ = t.Close() }() // closing twice is harmless
	for c := range s.chains {
		if err := put(t, ns, chainEntries(c), false); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	heap := heapBytes() - before
	s.Progress("filling a Pebble with the same keys")
	db, err := fillGets(ctx, gets, s.chains)
	if err != nil {
		return err
	}
	if err := errors.Join(s.warm(ctx, t, ns, db), db.Close()); err != nil {
		return err
	}
	stats := t.Stats()
	if err := t.Close(); err != nil {
		return err
	}
	if err := s.cold(ctx, dir, gets); err != nil {
		return err
	}
	return s.sizes(ctx, dir, heap, stats)
}

// fillGets stores the same entries in a separate Pebble database, keyed by block id. An index that
// keeps nothing in DRAM would need one get per block from such a database.
func fillGets(ctx context.Context, dir string, chains int) (*pebble.DB, error) {
	db, err := openGets(dir, 1<<30)
	if err != nil {
		return nil, err
	}
	value := make([]byte, 64)
	for c := range chains {
		batch := db.NewBatch()
		for _, id := range chainIDs(c) {
			if err := batch.Set(id[:], value, nil); err != nil {
				return nil, errors.Join(err, batch.Close(), db.Close())
			}
		}
		if err := errors.Join(batch.Commit(pebble.NoSync), ctx.Err()); err != nil {
			return nil, errors.Join(err, db.Close())
		}
	}
	// Flush and compact, so that the memtable is not measured.
	return db, errors.Join(db.Flush(), db.Compact(ctx, []byte{0}, slices.Repeat([]byte{0xff}, 17), true))
}

// openGets opens the Pebble database of fillGets with bloom filters and a cache of cacheBytes.
func openGets(dir string, cacheBytes int64) (*pebble.DB, error) {
	cache := pebble.NewCache(cacheBytes)
	defer cache.Unref()
	o := &pebble.Options{Cache: cache, Logger: silent{}, MemTableSize: 64 << 20}
	for i := range o.Levels {
		o.Levels[i].FilterPolicy = bloom.FilterPolicy(10)
	}
	return pebble.Open(dir, o)
}

// silent discards Pebble's log. Pebble calls Fatalf if the disk fails.
type silent struct{}

func (silent) Infof(string, ...any)  {}
func (silent) Errorf(string, ...any) {}
func (silent) Fatalf(format string, args ...any) {
	panic(fmt.Sprintf("bench: pebble: "+format, args...))
}

// warm matches chains that have been matched before.
func (s *indexSuite) warm(ctx context.Context, t *trie.Trie, ns kv.Namespace, db *pebble.DB) error {
	var warm [warmChains][]kv.BlockID
	for i := range warm {
		warm[i] = chainIDs(s.rng.IntN(s.chains))
	}
	pick := func() []kv.BlockID { return warm[s.rng.IntN(len(warm))] }
	pieces := make([]trie.Piece, 0, chainBlocks)
	plain := func() error { return match(t, ns, pick(), trie.MatchOptions{Pieces: pieces}) }
	leased := func() error {
		return match(t, ns, pick(), trie.MatchOptions{Pieces: pieces, Lease: true, TTL: time.Minute, Now: time.Now()})
	}
	gets := func() error { return get(db, pick()) }
	return s.compare(ctx, bench.Comparison{
		Name: warmWork, Unit: "matches/s",
		Contenders: []bench.Contender{
			{Name: matchName, Turn: s.timed(plain)},
			{Name: matchLeaseName, Turn: s.timed(leased)},
			{Name: getsName, Turn: s.timed(gets)},
		},
		Measures: []bench.Measure{
			speedup(matchName, getsName, bench.AtLeast(20)),
			bench.Figure("p50", "µs", "p50 µs", matchName, bench.AtMost(40)),
			bench.Figure("p99", "µs", "p99 µs", matchName, bench.AtMost(120)),
			bench.Figure("p50, leased and released", "µs", "p50 µs", matchLeaseName, bench.Target{}),
		},
	})
}

// speedup returns a measure: the median time of 512 gets divided by the median time of a match.
func speedup(over, under string, t bench.Target) bench.Measure {
	return bench.Ratio("times faster than 512 gets (p50)", "p50 µs", under, over, t)
}

// match matches a chain and returns an error unless all of its blocks match.
func match(t *trie.Trie, ns kv.Namespace, ids []kv.BlockID, o trie.MatchOptions) error {
	m, err := t.Match(ns.ID, ids, o)
	if err != nil {
		return err
	}
	if m.Blocks != len(ids) || len(m.Pieces) != len(ids) {
		return fmt.Errorf("bench: %d of %d blocks matched", m.Blocks, len(ids))
	}
	if m.Lease != 0 {
		return t.Release(m.Lease)
	}
	return nil
}

// get reads the entry of each block with a separate get.
func get(db *pebble.DB, ids []kv.BlockID) error {
	for _, id := range ids {
		_, closer, err := db.Get(id[:])
		if err != nil {
			return err
		}
		if err := closer.Close(); err != nil {
			return err
		}
	}
	return nil
}

// timed returns a turn (one measured run of a contender) that repeats f and returns quantiles of
// the duration of f.
func (s *indexSuite) timed(f func() error) func(context.Context) (bench.Sample, error) {
	return func(ctx context.Context) (bench.Sample, error) {
		return times(s.Turn, func() (bool, error) { return ctx.Err() == nil, f() })
	}
}

// times calls f repeatedly until d has elapsed or f returns false, and returns the calls per second
// and quantiles of their duration.
func times(d time.Duration, f func() (more bool, err error)) (bench.Sample, error) {
	var took []time.Duration
	for start := time.Now(); time.Since(start) < d; {
		before := time.Now()
		more, err := f()
		if err != nil {
			return nil, err
		}
		took = append(took, time.Since(before))
		if !more {
			break
		}
	}
	var sum time.Duration
	for _, t := range took {
		sum += t
	}
	return bench.Sample{
		bench.Rate: float64(len(took)) / sum.Seconds(),
		"p50 µs":   micros(bench.Quantile(took, 0.5)),
		"p99 µs":   micros(bench.Quantile(took, 0.99)),
	}, nil
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// cold opens the index and matches chains that have not been read since the open.
func (s *indexSuite) cold(ctx context.Context, dir, gets string) error {
	return s.compare(ctx, bench.Comparison{
		Name: coldWork, Unit: "matches/s", Rounds: min(s.Rounds, 3),
		Contenders: []bench.Contender{
			{Name: matchName, Turn: func(ctx context.Context) (bench.Sample, error) { return s.coldMatches(dir) }},
			{Name: getsName, Turn: func(ctx context.Context) (bench.Sample, error) { return s.coldGets(gets) }},
		},
		Measures: []bench.Measure{
			speedup(matchName, getsName, bench.AtLeast(20)),
			bench.Figure("p50", "µs", "p50 µs", matchName, bench.AtMost(1000)),
			bench.Figure("p99", "µs", "p99 µs", matchName, bench.Target{}),
			bench.Figure("opening", "s", "open s", matchName, bench.Target{}),
		},
		Notes: []string{"each chain is matched once; the gets' Pebble has an 8 MiB cache and its files are dropped from the page cache before"},
	})
}

func (s *indexSuite) coldMatches(dir string) (bench.Sample, error) {
	start := time.Now()
	t, ns, err := openTrie(dir)
	if err != nil {
		return nil, err
	}
	defer t.Close()
	opened := time.Since(start)
	pieces := make([]trie.Piece, 0, chainBlocks)
	sample, err := s.eachOnce(func(ids []kv.BlockID) error {
		return match(t, ns, ids, trie.MatchOptions{Pieces: pieces})
	})
	if err == nil {
		sample["open s"] = opened.Seconds()
	}
	return sample, err
}

func (s *indexSuite) coldGets(dir string) (bench.Sample, error) {
	if err := dropDir(dir); err != nil {
		return nil, err
	}
	db, err := openGets(dir, 8<<20)
	if err != nil {
		return nil, err
	}
	defer db.Close()
	return s.eachOnce(func(ids []kv.BlockID) error { return get(db, ids) })
}

// eachOnce calls f during one turn with the ids of one chain after another, in random order and
// each chain at most once. The time to compute the ids is not measured.
func (s *indexSuite) eachOnce(f func(ids []kv.BlockID) error) (bench.Sample, error) {
	const most = 1000
	order := s.rng.Perm(s.chains)[:min(most, s.chains)]
	chains := make([][]kv.BlockID, len(order))
	for i, c := range order {
		chains[i] = chainIDs(c)
	}
	return times(s.Turn, func() (bool, error) {
		ids := chains[0]
		chains = chains[1:]
		return len(chains) > 0, f(ids)
	})
}

// dropDir removes the files of a directory from the page cache.
func dropDir(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		f, openErr := os.Open(filepath.Join(dir, e.Name()))
		if openErr != nil {
			return openErr
		}
		err = errors.Join(err, sys.DropCache(f), f.Close())
	}
	return err
}

// sizes reports the bytes per block on disk and in memory. They are the same in every turn.
func (s *indexSuite) sizes(ctx context.Context, dir string, heap int64, stats trie.Stats) error {
	t, _, err := openTrie(dir)
	if err != nil {
		return err
	}
	blocks := float64(s.chains * chainBlocks)
	disk := float64(t.Stats().DiskBytes) / blocks
	if err := t.Close(); err != nil {
		return err
	}
	nodes := float64(stats.NodeBytes+stats.TableBytes+stats.PolicyBytes+stats.LeaseBytes) / blocks
	return s.compare(ctx, bench.Comparison{
		Name: sizeWork, Rounds: 1,
		Contenders: []bench.Contender{{Name: "trie", Turn: func(context.Context) (bench.Sample, error) {
			return bench.Sample{"heap": float64(heap) / blocks, "nodes": nodes, "disk": disk}, nil
		}}},
		Measures: []bench.Measure{
			bench.Figure("DRAM a block, all of the Go heap's growth", "B", "heap", "trie", bench.AtMost(80)),
			bench.Figure("of that, nodes, table and policy", "B", "nodes", "trie", bench.Target{}),
			bench.Figure("disk a block", "B", "disk", "trie", bench.AtMost(160)),
		},
	})
}

// heapBytes returns the size of the Go heap after two collections.
func heapBytes() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// commits measures how many keys per second are committed, durably and not durably.
func (s *indexSuite) commits(ctx context.Context) error {
	const name = "commit, 8 callers, batches of 64"
	if !s.wants(name) {
		return nil
	}
	const synced, unsynced = "synced", "not synced"
	return s.compare(ctx, bench.Comparison{
		Name: name, Unit: "keys/s",
		Contenders: []bench.Contender{
			{Name: synced, Turn: func(ctx context.Context) (bench.Sample, error) { return s.commit(ctx, true) }},
			{Name: unsynced, Turn: func(ctx context.Context) (bench.Sample, error) { return s.commit(ctx, false) }},
		},
		Measures: []bench.Measure{
			bench.Figure("synced", "keys/s", bench.Rate, synced, bench.AtLeast(200_000)),
			bench.Figure("not synced", "keys/s", bench.Rate, unsynced, bench.AtLeast(500_000)),
		},
	})
}

// commit fills a new index from several goroutines.
func (s *indexSuite) commit(ctx context.Context, durable bool) (_ bench.Sample, err error) {
	dir := filepath.Join(s.dir, "commit")
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	t, ns, err := openTrie(dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	// The chains have enough keys for two million commits per second.
	chains := make([][]trie.Entry, int(s.Turn.Seconds()*2e6)/chainBlocks+commitCallers)
	for i := range chains {
		chains[i] = chainEntries(i)
	}
	var next atomic.Int64
	limited, cancel := context.WithCancel(ctx)
	defer cancel()
	sample, err := drive(limited, s.Turn, commitCallers, 1, nil, func(int) (int64, error) {
		n := next.Add(1) - 1
		if n >= int64(len(chains)) {
			cancel()
			return 0, nil
		}
		return chainBlocks, put(t, ns, chains[n], durable)
	})
	if err != nil {
		return nil, err
	}
	delete(sample, bench.CPU) // the metric is per byte, and commits move no bytes
	return sample, ctx.Err()
}
