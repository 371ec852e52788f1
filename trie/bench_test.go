package trie

import (
	"encoding/binary"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/kv"
)

const (
	benchChain = 512
	benchBatch = 64
)

// benchBlocks is the number of blocks in the measured index. The figures of docs/benchmarks.md are
// for 2 M blocks; PENSTOCK_BENCH_BLOCKS changes the number.
func benchBlocks(b *testing.B) int {
	s := os.Getenv("PENSTOCK_BENCH_BLOCKS")
	if s == "" {
		return 2_000_000
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < benchChain {
		b.Fatalf("PENSTOCK_BENCH_BLOCKS is %q; want a number of at least %d", s, benchChain)
	}
	return n
}

// benchID returns an id that is as random as a hash, and cheap to make.
func benchID(chain, block int) (id kv.BlockID) {
	x := rand.New(rand.NewPCG(uint64(chain), uint64(block)))
	binary.LittleEndian.PutUint64(id[:], x.Uint64())
	binary.LittleEndian.PutUint64(id[8:], x.Uint64()|1)
	return id
}

func benchIDs(chain int) []kv.BlockID {
	ids := make([]kv.BlockID, benchChain)
	for i := range ids {
		ids[i] = benchID(chain, i)
	}
	return ids
}

func benchEntries(ids []kv.BlockID, firstSlot int) []Entry {
	entries := make([]Entry, len(ids))
	var parent kv.BlockID
	for i, id := range ids {
		slot := uint32(firstSlot + i)
		entries[i] = Entry{ID: id, Parent: parent, Ref: kv.Ref{Extent: kv.MakeExtent(0, slot>>10, slot&1023), Generation: 1<<32 + kv.Generation(slot)}}
		parent = id
	}
	return entries
}

func quiet() pebble.Logger { return &pebbleLog{log: slog.New(slog.DiscardHandler)} }

func benchNamespace(b testing.TB, tr *Trie) kv.Namespace { return benchNamed(b, tr, "bench") }

func benchNamed(b testing.TB, tr *Trie, name string) kv.Namespace {
	def, err := tr.Create(kv.Namespace{Name: name, Index: kv.IndexTrie, Geometry: kv.SingleGroup(61, 64, 656), Epoch: 1})
	if err != nil {
		b.Fatal(err)
	}
	return def
}

// fill puts whole chains in batches.
func fill(b testing.TB, tr *Trie, ns kv.Namespace, blocks int) (chains int) {
	fillFrom(b, tr, ns, 0, blocks/benchChain)
	return blocks / benchChain
}

// fillFrom puts the chains from first to before end.
func fillFrom(b testing.TB, tr *Trie, ns kv.Namespace, first, end int) {
	var status []PutStatus
	for chain := first; chain < end; chain++ {
		entries := benchEntries(benchIDs(chain), chain*benchChain)
		for batch := range slices.Chunk(entries, benchBatch) {
			var err error
			if status, err = tr.Put(status[:0], ns.ID, ns.Epoch, batch, false); err != nil {
				b.Fatal(err)
			}
			for _, s := range status {
				if s != Added {
					b.Fatal(s)
				}
			}
		}
	}
}

// quantiles reports p50 and p99 of the durations.
func quantiles(b *testing.B, d []time.Duration) {
	slices.Sort(d)
	b.ReportMetric(float64(d[len(d)/2].Nanoseconds())/1e3, "p50-µs")
	b.ReportMetric(float64(d[len(d)*99/100].Nanoseconds())/1e3, "p99-µs")
}

func heapBytes() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// BenchmarkIndex measures an index of 2 M blocks in chains of 512: the time to fill and to open the
// index, memory and disk per block, and matches, both warm and just after opening. It compares the
// matches with the same number of Pebble gets.
func BenchmarkIndex(b *testing.B) {
	blocks := benchBlocks(b)
	dir := b.TempDir()
	opts := Options{Dir: dir, FS: vfs.Default}
	before := heapBytes()
	tr := openTest(b, opts)
	ns := benchNamespace(b, tr)
	chains := fill(b, tr, ns, blocks)
	blocks = chains * benchChain
	b.Run("Bytes", func(b *testing.B) {
		for b.Loop() {
			s := tr.Stats()
			index := s.NodeBytes + s.TableBytes + s.PolicyBytes + s.LeaseBytes
			b.ReportMetric(float64(index)/float64(blocks), "index-B/block")
			b.ReportMetric(float64(heapBytes()-before)/float64(blocks), "heap-B/block")
		}
		b.ReportMetric(0, "ns/op")
	})
	b.Run("Match512Warm", func(b *testing.B) { benchMatch(b, tr, ns, chains, MatchOptions{}) })
	b.Run("Match512Leased", func(b *testing.B) {
		benchMatch(b, tr, ns, chains, MatchOptions{Lease: true, TTL: time.Minute, Now: epoch0})
	})
	b.Run("Match512Parallel", func(b *testing.B) { benchMatchParallel(b, tr, ns, chains) })
	b.Run("PebbleGets512", func(b *testing.B) { benchGets(b, dir, chains) })
	if err := tr.Close(); err != nil {
		b.Fatal(err)
	}
	b.Run("Open", func(b *testing.B) {
		for b.Loop() {
			tr = openTest(b, opts)
			s := tr.Stats()
			b.ReportMetric(float64(s.DiskBytes)/float64(blocks), "disk-B/block")
			b.ReportMetric(s.Load.Took.Seconds(), "load-s")
			tr.Close()
		}
	})
	tr = openTest(b, opts)
	b.Run("Match512Cold", func(b *testing.B) { benchCold(b, tr, ns, chains) })
	b.Run("Match512WhilePut", func(b *testing.B) { benchMatchWhilePut(b, tr, ns, chains) })
	b.Run("Evict", func(b *testing.B) { benchEvict(b, tr) })
	closeTest(b, tr)
}

func benchMatch(b *testing.B, tr *Trie, ns kv.Namespace, chains int, opts MatchOptions) {
	rng := rand.New(rand.NewPCG(1, 2))
	// The chains are made outside of the measured time; 64 chains stay warm.
	var ids [64][]kv.BlockID
	for i := range ids {
		ids[i] = benchIDs(rng.IntN(chains))
	}
	opts.Pieces = make([]Piece, 0, benchChain)
	var took []time.Duration
	b.ReportAllocs()
	for b.Loop() {
		start := time.Now()
		m, err := tr.Match(ns.ID, ids[rng.IntN(len(ids))], opts)
		took = append(took, time.Since(start))
		if err != nil || m.Blocks != benchChain {
			b.Fatal(m, err)
		}
		if m.Lease != 0 {
			if err := tr.Release(m.Lease); err != nil {
				b.Fatal(err)
			}
		}
	}
	quantiles(b, took)
}

func benchMatchParallel(b *testing.B, tr *Trie, ns kv.Namespace, chains int) {
	b.RunParallel(func(pb *testing.PB) {
		rng := rand.New(rand.NewPCG(rand.Uint64(), 2))
		var ids [16][]kv.BlockID
		for i := range ids {
			ids[i] = benchIDs(rng.IntN(chains))
		}
		opts := MatchOptions{Pieces: make([]Piece, 0, benchChain)}
		for pb.Next() {
			if m, err := tr.Match(ns.ID, ids[rng.IntN(len(ids))], opts); err != nil || m.Blocks != benchChain {
				b.Error(m, err)
				return
			}
		}
	})
}

// benchMatchWhilePut measures matches while one writer commits batches without a pause.
func benchMatchWhilePut(b *testing.B, tr *Trie, ns kv.Namespace, chains int) {
	other, err := tr.Create(kv.Namespace{Name: "writer", Index: kv.IndexTrie, Geometry: ns.Geometry, Epoch: 1})
	if err != nil {
		b.Skip("the writer's namespace was filled by an earlier run of this benchmark")
	}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for c := chains; ; c++ {
			for batch := range slices.Chunk(benchEntries(benchIDs(c), c*benchChain), benchBatch) {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := tr.Put(nil, other.ID, other.Epoch, batch, false); err != nil {
					b.Error(err)
					return
				}
			}
		}
	}()
	benchMatch(b, tr, ns, chains, MatchOptions{})
	close(stop)
	<-done
}

// benchCold matches every chain once, in random order. No chain was matched since the index was
// opened.
func benchCold(b *testing.B, tr *Trie, ns kv.Namespace, chains int) {
	order := rand.New(rand.NewPCG(3, 4)).Perm(chains)
	pieces := make([]Piece, 0, benchChain)
	var took []time.Duration
	i := 0
	for b.Loop() {
		b.StopTimer()
		ids := benchIDs(order[i%chains])
		i++
		b.StartTimer()
		start := time.Now()
		m, err := tr.Match(ns.ID, ids, MatchOptions{Pieces: pieces})
		took = append(took, time.Since(start))
		if err != nil || m.Blocks != benchChain {
			b.Fatal(m, err)
		}
	}
	quantiles(b, took)
}

// benchGets measures an index without DRAM: one Pebble get per block, in a separate database with
// the id as the key.
func benchGets(b *testing.B, dir string, chains int) {
	db, err := pebble.Open(dir+"/gets", &pebble.Options{Cache: pebble.NewCache(512 << 20), Logger: quiet()})
	if err != nil {
		b.Fatal(err)
	}
	defer db.Close()
	value := make([]byte, 64)
	for c := range chains {
		batch := db.NewBatch()
		for _, id := range benchIDs(c) {
			if err := batch.Set(id[:], value, nil); err != nil {
				b.Fatal(err)
			}
		}
		if err := batch.Commit(pebble.NoSync); err != nil {
			b.Fatal(err)
		}
	}
	rng := rand.New(rand.NewPCG(1, 2))
	var ids [64][]kv.BlockID
	for i := range ids {
		ids[i] = benchIDs(rng.IntN(chains))
	}
	var took []time.Duration
	for b.Loop() {
		start := time.Now()
		for _, id := range ids[rng.IntN(len(ids))] {
			_, closer, err := db.Get(id[:])
			if err != nil {
				b.Fatal(err)
			}
			closer.Close()
		}
		took = append(took, time.Since(start))
	}
	quantiles(b, took)
}

// BenchmarkEvictTenant evicts 8 of a tenant's 64 blocks, which lie among 4 M blocks of another
// tenant. Before, a match touches all 64; afterwards the evicted blocks are put again. The
// quantiles are those of Evict alone.
func BenchmarkEvictTenant(b *testing.B) {
	blocks := max(benchBlocks(b), 4_000_000)
	tr := openTest(b, Options{Dir: b.TempDir(), FS: vfs.Default, SlotBytes: func(kv.Geometry, int) int64 { return 1 }})
	other := benchNamespace(b, tr)
	def := kv.Namespace{Name: "tenant", Index: kv.IndexTrie, Geometry: kv.SingleGroup(61, 64, 656), Epoch: 1}
	tenant, err := tr.Create(def)
	if err != nil {
		b.Fatal(err)
	}
	half := blocks / 2 / benchChain
	fillFrom(b, tr, other, 0, half)
	ids := benchIDs(-1)[:64]
	entries := benchEntries(ids, 2*half*benchChain)
	var status []PutStatus
	put := func() {
		if status, err = tr.Put(status[:0], tenant.ID, tenant.Epoch, entries, false); err != nil {
			b.Fatal(err)
		}
	}
	put()
	fillFrom(b, tr, other, half, 2*half)
	var took []time.Duration
	dst := make([]Evicted, 0, 64)
	for b.Loop() {
		if _, err := tr.Match(tenant.ID, ids, MatchOptions{}); err != nil {
			b.Fatal(err)
		}
		start := time.Now()
		if dst, err = tr.Evict(dst[:0], 8, tenant.ID, epoch0); err != nil || len(dst) != 8 {
			b.Fatal(len(dst), err)
		}
		took = append(took, time.Since(start))
		put()
	}
	quantiles(b, took)
	closeTest(b, tr)
}

func benchEvict(b *testing.B, tr *Trie) {
	const each = 256
	slot := tr.opts.SlotBytes(kv.SingleGroup(61, 64, 656), 0)
	dst := make([]Evicted, 0, each+1)
	n := 0
	for b.Loop() {
		var err error
		if dst, err = tr.Evict(dst[:0], each*slot, 0, epoch0); err != nil {
			b.Fatal(err)
		}
		n += len(dst)
	}
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "pieces/s")
}

// BenchmarkPut commits chains in batches of 64; the growth of the index is included.
func BenchmarkPut(b *testing.B) {
	for _, durable := range []bool{false, true} {
		b.Run(fmt.Sprintf("Durable=%v", durable), func(b *testing.B) {
			tr := openTest(b, Options{Dir: b.TempDir(), FS: vfs.Default})
			ns := benchNamespace(b, tr)
			var status []PutStatus
			var entries []Entry
			i := 0
			for b.Loop() {
				if len(entries) == 0 {
					// Stopping the timer is expensive, so each stop makes a large number of chains.
					b.StopTimer()
					for range 64 {
						entries = append(entries, benchEntries(benchIDs(i), i*benchChain)...)
						i++
					}
					b.StartTimer()
				}
				var err error
				if status, err = tr.Put(status[:0], ns.ID, ns.Epoch, entries[:benchBatch], durable); err != nil || status[benchBatch-1] != Added {
					b.Fatal(status, err)
				}
				entries = entries[benchBatch:]
			}
			b.ReportMetric(float64(b.N*benchBatch)/b.Elapsed().Seconds(), "keys/s")
			closeTest(b, tr)
		})
	}
}

// BenchmarkPebbleSet is the lower bound for BenchmarkPut/Durable=true: batches of the same number
// of bytes, without an index.
func BenchmarkPebbleSet(b *testing.B) {
	db, err := pebble.Open(b.TempDir(), &pebble.Options{MemTableSize: defaultMemTableBytes, Logger: quiet()})
	if err != nil {
		b.Fatal(err)
	}
	defer db.Close()
	var key [blockKeyLen]byte
	value := make([]byte, 32)
	slot := uint32(0)
	for b.Loop() {
		batch := db.NewBatch()
		for range benchBatch {
			slot++
			if err := batch.Set(appendBlockKey(key[:0], kv.Extent(slot)), value, nil); err != nil {
				b.Fatal(err)
			}
		}
		if err := batch.Commit(pebble.Sync); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N*benchBatch)/b.Elapsed().Seconds(), "keys/s")
}

// BenchmarkPutParallel measures eight committers that share Pebble's group commit.
func BenchmarkPutParallel(b *testing.B) {
	tr := openTest(b, Options{Dir: b.TempDir(), FS: vfs.Default})
	ns := benchNamespace(b, tr)
	const committers = 8
	chains := make(chan []Entry, b.N/(benchChain/benchBatch)+committers)
	for c := range cap(chains) {
		chains <- benchEntries(benchIDs(c), c*benchChain)
	}
	b.SetParallelism(max(1, committers/runtime.GOMAXPROCS(0)))
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		var status []PutStatus
		var entries []Entry
		for pb.Next() {
			if len(entries) == 0 {
				entries = <-chains
			}
			var err error
			if status, err = tr.Put(status[:0], ns.ID, ns.Epoch, entries[:benchBatch], true); err != nil || status[0] != Added {
				b.Error(status, err)
				return
			}
			entries = entries[benchBatch:]
		}
	})
	b.StopTimer()
	b.ReportMetric(float64(b.N*benchBatch)/b.Elapsed().Seconds(), "keys/s")
	closeTest(b, tr)
}

// BenchmarkBump measures an epoch bump. Its duration does not depend on the number of blocks.
func BenchmarkBump(b *testing.B) {
	for _, blocks := range []int{0, 100_000} {
		b.Run(fmt.Sprintf("Blocks=%d", blocks), func(b *testing.B) {
			tr := openTest(b, Options{Dir: b.TempDir(), FS: vfs.Default})
			ns := benchNamespace(b, tr)
			if blocks > 0 {
				fill(b, tr, ns, blocks)
			}
			if err := tr.Sync(); err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				if _, err := bumpEpoch(tr, ns.Name, 0, 1); err != nil {
					b.Fatal(err)
				}
			}
			closeTest(b, tr)
		})
	}
}
