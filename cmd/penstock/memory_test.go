package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strconv"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/sys"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/trie"
)

// memoryBlocks sets the number of blocks of TestMemoryBudget.
const memoryBlocks = "PENSTOCK_MEMORY_BLOCKS"

// memoryReport has the measurements of the child of TestMemoryBudget.
type memoryReport struct {
	PeakBytes, BudgetBytes, IndexBytes, SlotsBytes, LimitBytes int64
	AllocBytes, Collections                                    uint64
}

// TestMemoryBudget fills a synthetic index in a child process, evicts a tenth of it and opens it
// again. The process never takes more memory than the final budget, a block takes at most 80 bytes
// of index, and the collector runs only after a share of the working heap was allocated.
func TestMemoryBudget(t *testing.T) {
	if os.Getenv("PENSTOCK_MEMORY_CHILD") != "" {
		memoryChild(t)
		return
	}
	sizes := []string{"1000", "1000000"}
	if s := os.Getenv(memoryBlocks); s != "" {
		sizes = []string{s}
	} else if testing.Short() {
		sizes = sizes[:1]
	}
	for _, given := range sizes {
		t.Run(given, func(t *testing.T) {
			blocks, err := strconv.ParseInt(given, 10, 64)
			if err != nil || blocks < 1 {
				t.Fatalf("%s is %q; want a number of blocks", memoryBlocks, given)
			}
			file := t.TempDir() + "/report"
			cmd := exec.Command(os.Args[0], "-test.run", "^TestMemoryBudget$", "-test.timeout", "60m")
			cmd.Env = append(os.Environ(), "PENSTOCK_MEMORY_CHILD="+file, memoryBlocks+"="+given)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var r memoryReport
			if err := json.Unmarshal(text, &r); err != nil {
				t.Fatal(err)
			}
			t.Logf("%d blocks: RSS at most %s of a budget of %s, index %s (%.1f B a block), slots %s (%.1f B a block), runtime's limit %s, %d collections for %s",
				blocks, size(r.PeakBytes), size(r.BudgetBytes), size(r.IndexBytes), float64(r.IndexBytes)/float64(blocks), size(r.SlotsBytes), float64(r.SlotsBytes)/float64(blocks), size(r.LimitBytes), r.Collections, size(int64(r.AllocBytes)))
			if r.PeakBytes > r.BudgetBytes {
				t.Errorf("RSS was %s; the budget is %s", size(r.PeakBytes), size(r.BudgetBytes))
			}
			if blocks >= 1<<20 && r.IndexBytes > 80*blocks {
				t.Errorf("the index takes %d B for %d blocks; want at most 80 a block", r.IndexBytes, blocks)
			}
			if every := r.AllocBytes / max(1, r.Collections); blocks >= 1_000_000 && every < workingHeap/16 {
				t.Errorf("a collection for each %s allocated; want %s at least: the limit is too near to what the index holds", size(int64(every)), size(workingHeap/16))
			}
		})
	}
}

func memoryChild(t *testing.T) {
	t.Setenv(goMemLimit, "")
	blocks, err := strconv.Atoi(os.Getenv(memoryBlocks))
	if err != nil {
		t.Fatal(err)
	}
	cfg := config.Default()
	cfg.Arena = 64 << 20
	cfg.EnsureDefaults()
	mem, err := arena.New(arena.Options{SizeBytes: int64(cfg.Arena)})
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	budget := newMemoryBudget(cfg, nil)
	defer budget.close()
	opts := trie.Options{Dir: t.TempDir(), CacheBytes: int64(cfg.IndexCache), MemTableBytes: 16 << 20, Grew: budget.setIndex}
	store := fillStore(t, blocks)
	defer store.Close(t.Context())
	budget.watch(store, opts.MemTableBytes)
	index, err := trie.Open(opts)
	if err != nil {
		t.Fatal(err)
	}
	ns, err := index.Create(kv.Namespace{Name: "m", Index: kv.IndexTrie, Geometry: kv.SingleGroup(61, 64, 656), Epoch: 1})
	if err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	fillIndex(t, index, ns, blocks, 0)
	var gone []trie.Evicted
	for left := blocks / 10; left > 0; left -= len(gone) { // in rounds, like storage.roomMaker
		gone, err = index.Evict(gone[:0], int64(min(left, 1<<15))*ns.Geometry.PieceBytes(0), 0, time.Unix(1, 0))
		if err != nil || len(gone) == 0 {
			t.Fatal(len(gone), err)
		}
	}
	gone = nil
	fillIndex(t, index, ns, blocks/10, blocks)
	runtime.ReadMemStats(&after)
	if err := index.Close(); err != nil {
		t.Fatal(err)
	}
	index, ns = nil, kv.Namespace{}
	if index, err = trie.Open(opts); err != nil {
		t.Fatal(err)
	}
	s := index.Stats()
	if err := index.Close(); err != nil {
		t.Fatal(err)
	}
	r := memoryReport{
		IndexBytes: s.NodeBytes + s.TableBytes + s.PolicyBytes, LimitBytes: debug.SetMemoryLimit(-1),
		AllocBytes: after.TotalAlloc - before.TotalAlloc, Collections: uint64(after.NumGC - before.NumGC),
	}
	for _, p := range budget.parts() {
		r.BudgetBytes += p.Bytes
		if p.Name == "slots" {
			r.SlotsBytes = p.Bytes
		}
	}
	m, err := sys.ReadMemory()
	if err != nil {
		t.Fatal(err)
	}
	r.PeakBytes = m.PeakRSSBytes
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(os.Getenv("PENSTOCK_MEMORY_CHILD"), text, 0o600); err != nil {
		t.Fatal(err)
	}
}

// fillStore returns a store with a reserved slot for each block. No block is written, so its
// in-memory volume holds only the segments' headers.
func fillStore(t *testing.T, blocks int) *blockstore.Store {
	const slotBytes, perSegment = 8 << 10, 1<<17 - 1 // slots of a segment of 1 GiB
	segments := int64(blocks+perSegment-1) / perSegment
	store, err := blockstore.Open(t.Context(), blockstore.Options{
		Devices: []blockio.Device{memio.New(memio.Options{})}, SegmentBytes: 1 << 30, CatalogueBytes: 4096, CapacityBytes: segments<<30 + 64<<10,
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Ready(); err != nil {
		t.Fatal(err)
	}
	for done, n := 0, 0; done < blocks; done += n {
		n = min(1<<12, blocks-done)
		if _, err := store.Reserve(t.Context(), slotBytes-4096, 1, n, 0, false); err != nil {
			t.Fatal(err)
		}
	}
	return store
}

// fillIndex stores chains of 512 blocks, with slot numbers from first on. The blocks of a chain
// have descending slots, so that an index that is opened reads each block before its parent.
func fillIndex(t *testing.T, index *trie.Trie, ns kv.Namespace, blocks, first int) {
	const chain = 512
	entries := make([]trie.Entry, 0, chain)
	var status []trie.PutStatus
	for done := 0; done < blocks; done += len(entries) {
		entries = entries[:0]
		var parent kv.BlockID
		rng := rand.New(rand.NewPCG(uint64(first+done), 7))
		n := min(chain, blocks-done)
		for i := range n {
			var id kv.BlockID
			binary.LittleEndian.PutUint64(id[:], rng.Uint64())
			binary.LittleEndian.PutUint64(id[8:], rng.Uint64()|1)
			slot := uint32(first + done + n - 1 - i)
			entries = append(entries, trie.Entry{ID: id, Parent: parent, Ref: kv.Ref{Extent: kv.MakeExtent(0, slot>>12, slot&4095), Generation: 1<<32 + kv.Generation(slot)}})
			parent = id
		}
		var err error
		if status, err = index.Put(status[:0], ns.ID, ns.Epoch, entries, false); err != nil || status[len(status)-1] != trie.Added {
			t.Fatal(fmt.Sprint(status[max(0, len(status)-1):]), err)
		}
	}
}

// TestMemoryOfGuests: the limit of the runtime and the budget of a node include the nodes that it has
// adopted, and an adopted node does not lower the limit.
func TestMemoryOfGuests(t *testing.T) {
	t.Setenv(goMemLimit, "")
	before := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(before)
	limit := func() int64 { return debug.SetMemoryLimit(-1) }
	total := func(m *memoryBudget) (all int64) {
		for _, p := range m.parts() {
			all += p.Bytes
		}
		return all
	}
	cfg := config.Default()
	host := newMemoryBudget(cfg, nil)
	defer host.close()
	host.index.Store(4 << 30)
	host.limit()
	alone, aloneTotal := limit(), total(host)
	guest := newMemoryBudget(cfg, host)
	if got := limit(); got < alone {
		t.Errorf("with an empty adopted node the limit is %s; want at least %s", size(got), size(alone))
	}
	guest.index.Store(2 << 30)
	guest.limit()
	if got := limit(); got < alone+2<<30 {
		t.Errorf("with an adopted node the limit is %s; want at least %s", size(got), size(alone+2<<30))
	}
	if got, want := total(host), aloneTotal+total(guest); got != want {
		t.Errorf("the budget with an adopted node is %s; want %s", size(got), size(want))
	}
	guest.close()
	if got := limit(); got != alone {
		t.Errorf("after the adopted node the limit is %s; want %s", size(got), size(alone))
	}
	if got := total(host); got != aloneTotal {
		t.Errorf("after the adopted node the budget is %s; want %s", size(got), size(aloneTotal))
	}
}
