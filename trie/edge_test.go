package trie

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/kv"
)

func TestOptions(t *testing.T) {
	for want, opts := range map[string]Options{
		"Dir is empty":   {},
		"memtable":       {Dir: "x", MemTableBytes: 1},
		"MaxLeases":      {Dir: "x", MaxLeases: -1},
		"MaxPins":        {Dir: "x", MaxPins: -1},
		"MaxChainBlocks": {Dir: "x", MaxChainBlocks: 1 << 30},
		"MaxNamespaces":  {Dir: "x", MaxNamespaces: 1 << 20},
		"policy":         {Dir: "x", Policy: 9},
	} {
		opts.FS = vfs.NewMem()
		if _, err := Open(opts); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v; want an error that names %s", opts, err, want)
		}
	}
}

// TestForeign: Open refuses a directory that holds other data, and does not change it.
func TestForeign(t *testing.T) {
	for name, record := range map[string][2]string{
		"another database": {"some key", "value"},
		"another format":   {string(formatKey), "99"},
	} {
		t.Run(name, func(t *testing.T) {
			fs := vfs.NewMem()
			db, err := pebble.Open("index", &pebble.Options{FS: fs, Logger: quiet()})
			if err != nil {
				t.Fatal(err)
			}
			if err := db.Set([]byte(record[0]), []byte(record[1]), pebble.Sync); err != nil {
				t.Fatal(err)
			}
			if err := db.Close(); err != nil {
				t.Fatal(err)
			}
			if _, err := Open(Options{Dir: "index", FS: fs}); !errors.Is(err, ErrFormat) {
				t.Errorf("open: %v; want ErrFormat", err)
			}
		})
	}
}

// TestSingleEpochFormat: an index in the format with one epoch per namespace keeps its blocks.
// Afterwards it has the new format, which older programs refuse.
func TestSingleEpochFormat(t *testing.T) {
	opts := Options{FS: vfs.NewMem(), Dir: "index"}
	tr := openTest(t, opts)
	ns, ids := benchNamespace(t, tr), benchIDs(0)
	if _, err := tr.Put(nil, ns.ID, ns.Epoch, benchEntries(ids, 100), true); err != nil {
		t.Fatal(err)
	}
	if err := tr.setMeta(formatKey, singleEpochFormat); err != nil {
		t.Fatal(err)
	}
	closeTest(t, tr)
	tr = openTest(t, opts)
	defer closeTest(t, tr)
	if m, err := tr.Match(ns.ID, ids, MatchOptions{}); err != nil || m.Blocks != len(ids) || m.Epoch != ns.Epoch {
		t.Errorf("%d of %d blocks of epoch %d match, %v", m.Blocks, len(ids), m.Epoch, err)
	}
	if got, err := tr.disk.Load().get(formatKey); err != nil || string(got) != formatVersion {
		t.Errorf("format %q, %v; want %q", got, err, formatVersion)
	}
}

// TestOwner: an index opens only for the store for which it was made.
func TestOwner(t *testing.T) {
	fs := vfs.NewMem()
	for _, c := range []struct {
		owner   string
		foreign bool
	}{
		{owner: ""},                 // made without an owner
		{owner: "a"},                // gets an owner
		{owner: "b", foreign: true}, // refused to another owner
		{owner: ""}, {owner: "a"},   // an Open without an owner succeeds
		{owner: "aa", foreign: true}, // the whole name is compared
	} {
		index, err := Open(Options{Dir: "index", FS: fs, Owner: c.owner})
		if errors.Is(err, ErrForeign) != c.foreign || (err == nil) == c.foreign {
			t.Fatalf("owner %q: %v", c.owner, err)
		}
		if err != nil {
			if !strings.Contains(err.Error(), `store a, not for `+c.owner) {
				t.Errorf("owner %q: %v does not name both", c.owner, err)
			}
			continue
		}
		if err := index.Close(); err != nil {
			t.Fatal(err)
		}
	}
	fresh := vfs.NewMem()
	index, err := Open(Options{Dir: "index", FS: fresh, Owner: "a"})
	if err != nil {
		t.Fatal(err)
	}
	if err := index.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Options{Dir: "index", FS: fresh, Owner: "b"}); !errors.Is(err, ErrForeign) {
		t.Errorf("the index of a new store: %v; want ErrForeign", err)
	}
}

// TestDamagedRecord: if a record does not decode or does not fit its namespace, only its block and
// the descendants are lost.
func TestDamagedRecord(t *testing.T) {
	fs := vfs.NewMem()
	opts := Options{FS: fs, Dir: "index"}
	tr := openTest(t, opts)
	ns := benchNamespace(t, tr)
	ids := benchIDs(0)
	entries := benchEntries(ids[:10], 100)
	if _, err := tr.Put(nil, ns.ID, ns.Epoch, entries, true); err != nil {
		t.Fatal(err)
	}
	group := record{id: blockID("ff"), serial: 1, group: 3}
	for slot, value := range map[int][]byte{104: []byte("damaged"), 200: group.append(nil), 201: {}} {
		key := appendBlockKey(nil, kv.MakeExtent(0, uint32(slot)>>10, uint32(slot)&1023))
		if err := tr.disk.Load().db.Set(key, value, pebble.Sync); err != nil {
			t.Fatal(err)
		}
	}
	if err := tr.Close(); err != nil {
		t.Fatal(err)
	}
	tr = openTest(t, opts)
	if got := tr.Stats().Load; got.Loaded != 4 || got.Corrupt != 3 || got.Orphans != 5 {
		t.Errorf("%v; want 4 loaded, 3 corrupt, 5 orphans", got)
	}
	if m, err := tr.Match(ns.ID, ids, MatchOptions{}); err != nil || m.Blocks != 4 {
		t.Errorf("%d blocks match: %v; want 4", m.Blocks, err)
	}
	closeTest(t, tr)
	tr = openTest(t, opts)
	if got := tr.Stats().Load; got.Loaded != 4 || got.Corrupt+got.Orphans != 0 {
		t.Errorf("opened again: %v; the dropped records are back", got)
	}
	closeTest(t, tr)
}

func TestBadEntries(t *testing.T) {
	tr := openTest(t, Options{})
	defer closeTest(t, tr)
	ns := benchNamespace(t, tr)
	good := benchEntries(benchIDs(0)[:2], 0)
	for name, e := range map[string]Entry{
		"zero id":    {},
		"group":      {ID: blockID("a1"), Group: 1},
		"negative":   {ID: blockID("a1"), Group: -1},
		"class":      {ID: blockID("a1"), Class: 7},
		"generation": {ID: blockID("a1"), Ref: kv.Ref{Generation: 1 << 48}},
		"own parent": {ID: blockID("a1"), Parent: blockID("a1")},
	} {
		entries := append(good[:2:2], e)
		if status, err := tr.Put(nil, ns.ID, ns.Epoch, entries, false); !errors.Is(err, ErrEntry) || len(status) != 0 {
			t.Errorf("%s: %v, %v; want ErrEntry and no status", name, status, err)
		}
		if _, err := tr.Known(nil, ns.ID, ns.Epoch, entries); !errors.Is(err, ErrEntry) && e.Ref == (kv.Ref{}) {
			t.Errorf("%s: Known: %v; want ErrEntry", name, err)
		}
	}
	if n := tr.Stats().Pieces; n != 0 {
		t.Errorf("%d pieces of refused calls are indexed", n)
	}
	if status, err := tr.Put(nil, ns.ID, ns.Epoch, nil, true); err != nil || len(status) != 0 {
		t.Errorf("nothing put: %v, %v", status, err)
	}
}

func TestUnknownNamespace(t *testing.T) {
	tr := openTest(t, Options{})
	defer closeTest(t, tr)
	_, putErr := tr.Put(nil, 7, 1, nil, false)
	_, knownErr := tr.Known(nil, 7, 1, nil)
	_, matchErr := tr.Match(7, nil, MatchOptions{})
	_, _, tokensErr := tr.MatchTokens(nil, 7, nil, MatchOptions{})
	_, roomErr := tr.Room(7)
	_, statErr := tr.Stat(7, blockID("a1"))
	_, _, listErr := tr.List(7, 0, 1)
	_, deliveredErr := tr.Delivered(nil, 7, 0, nil)
	_, nsErr := tr.Namespace("x")
	for i, err := range []error{putErr, knownErr, matchErr, tokensErr, roomErr, statErr, listErr, deliveredErr, nsErr,
		tr.Delete(7, blockID("a1")), tr.DeleteAll(7), tr.DeleteNamespace("x"), tr.SetQuota("x", 1)} {
		if !errors.Is(err, ErrNamespaceUnknown) {
			t.Errorf("call %d: %v; want ErrNamespaceUnknown", i, err)
		}
	}
	if gone, err := tr.Evict(nil, 1, 7, epoch0); err != nil || len(gone) != 0 {
		t.Errorf("evict from an unknown namespace: %v, %v; want nothing", gone, err)
	}
}

func TestClosed(t *testing.T) {
	tr := openTest(t, Options{})
	ns := benchNamespace(t, tr)
	closeTest(t, tr)
	if err := tr.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
	_, putErr := tr.Put(nil, ns.ID, ns.Epoch, benchEntries(benchIDs(0)[:1], 0), true)
	_, matchErr := tr.Match(ns.ID, nil, MatchOptions{})
	_, createErr := tr.Create(kv.Namespace{Name: "late", Index: kv.IndexTrie, Geometry: ns.Geometry})
	_, bumpErr := bumpEpoch(tr, ns.Name, 0, 1)
	_, evictErr := tr.Evict(nil, 1, 0, epoch0)
	_, _, reclaimErr := tr.ReclaimStep(nil, 1)
	for i, err := range []error{putErr, matchErr, createErr, bumpErr, evictErr, reclaimErr, tr.Sync(), tr.Remove(kv.Ref{}, Dropped)} {
		if !errors.Is(err, ErrClosed) {
			t.Errorf("call %d: %v; want ErrClosed", i, err)
		}
	}
	_ = tr.Stats()
	_ = tr.String()
}

func TestTooManyNamespaces(t *testing.T) {
	tr := openTest(t, Options{MaxNamespaces: 2})
	defer closeTest(t, tr)
	def := kv.Namespace{Index: kv.IndexTrie, Geometry: kv.SingleGroup(1, 2, 1)}
	for i := range 3 {
		def.Name = fmt.Sprint("ns", i)
		if _, err := tr.Create(def); errors.Is(err, ErrTooManyNamespaces) != (i == 2) {
			t.Errorf("namespace %d: %v", i, err)
		}
	}
	def.Name = "bad name"
	if _, err := tr.Create(def); !errors.Is(err, kv.ErrNamespace) {
		t.Errorf("a bad name: %v; want kv.ErrNamespace", err)
	}
}

// TestBumpLoop: bumps of an empty namespace use up no resource.
func TestBumpLoop(t *testing.T) {
	tr := openTest(t, Options{})
	defer closeTest(t, tr)
	ns := benchNamespace(t, tr)
	for range 200 {
		if _, err := bumpEpoch(tr, ns.Name, 0, 1); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(tr.spaces); n > 4 {
		t.Errorf("200 bumps left %d spaces", n)
	}
}

func TestLongChains(t *testing.T) {
	const limit = 100
	tr := openTest(t, Options{MaxChainBlocks: limit})
	defer closeTest(t, tr)
	ns := benchNamespace(t, tr)
	ids := benchIDs(0)[:limit+1]
	status, err := tr.Put(nil, ns.ID, ns.Epoch, benchEntries(ids, 0), false)
	if err != nil || status[limit-1] != Added || status[limit] != TooDeep {
		t.Errorf("put: %v, %v; want block %d too deep", status[limit-1:], err, limit)
	}
	m, err := tr.Match(ns.ID, ids, MatchOptions{})
	if err != nil || m.Blocks != limit || m.Cut != CutTooLong {
		t.Errorf("%d blocks, cut %v: %v; want %d, too_long", m.Blocks, m.Cut, err, limit)
	}
	if m, err := tr.Match(ns.ID, ids, MatchOptions{MaxBlocks: 7}); err != nil || m.Blocks != 7 || m.Cut != CutLimit {
		t.Errorf("%d blocks, cut %v: %v; want 7, limit", m.Blocks, m.Cut, err)
	}
	if m, err := tr.Match(ns.ID, nil, MatchOptions{Lease: true}); err != nil || m.Blocks != 0 || m.Cut != CutComplete || m.Lease != 0 {
		t.Errorf("no ids: %+v, %v; want nothing, complete, no lease", m, err)
	}
}

func TestMatchTokens(t *testing.T) {
	tr := openTest(t, Options{})
	defer closeTest(t, tr)
	ns := benchNamespace(t, tr)
	tokens := make([]kv.Token, 64*5+13)
	for i := range tokens {
		tokens[i] = kv.Token(i)
	}
	chain, err := ns.Chain()
	if err != nil {
		t.Fatal(err)
	}
	ids, _ := chain.Append(nil, tokens)
	if _, err := tr.Put(nil, ns.ID, ns.Epoch, benchEntries(ids[:3], 0), false); err != nil {
		t.Fatal(err)
	}
	m, got, err := tr.MatchTokens(nil, ns.ID, tokens, MatchOptions{})
	if err != nil || len(got) != 5 || m.Blocks != 3 || m.Tokens != 192 || m.Cut != CutAbsent {
		t.Errorf("%d ids, %+v: %v; want 5 ids and a match of 3 blocks", len(got), m, err)
	}
}

// TestPinLimits: one node takes at most 65,535 leases, and all leases together at most MaxPins.
func TestPinLimits(t *testing.T) {
	tr := openTest(t, Options{MaxLeases: 1 << 17})
	ns := benchNamespace(t, tr)
	ids := benchIDs(0)[:2]
	if _, err := tr.Put(nil, ns.ID, ns.Epoch, benchEntries(ids, 0), false); err != nil {
		t.Fatal(err)
	}
	opts := MatchOptions{Lease: true, TTL: time.Second, Now: epoch0}
	for i := range maxPins + 1 {
		m, err := tr.Match(ns.ID, ids, opts)
		if err != nil || (m.Cut == CutLeaseDenied) != (i == maxPins) {
			t.Fatalf("lease %d: cut %v, %v", i, m.Cut, err)
		}
	}
	if n := tr.ExpireLeases(epoch0.Add(time.Second)); n != maxPins {
		t.Errorf("%d leases expired; want %d", n, maxPins)
	}
	closeTest(t, tr)

	tr = openTest(t, Options{MaxPins: 3})
	flat, err := tr.Create(kv.Namespace{Name: "flat", Index: kv.IndexFlat, Geometry: kv.SingleGroup(1, 2, 1), Epoch: 1})
	if err != nil {
		t.Fatal(err)
	}
	entries := benchEntries(benchIDs(0)[:4], 0)
	for i := range entries {
		entries[i].Parent = kv.BlockID{}
	}
	if _, err := tr.Put(nil, flat.ID, 1, entries, false); err != nil {
		t.Fatal(err)
	}
	if m, err := tr.Match(flat.ID, benchIDs(0)[:4], opts); err != nil || m.Cut != CutLeaseDenied {
		t.Errorf("a lease on 4 pieces of 3: cut %v, %v; want lease_denied", m.Cut, err)
	}
	if m, err := tr.Match(flat.ID, benchIDs(0)[:3], opts); err != nil || m.Lease == 0 {
		t.Errorf("a lease on 3 pieces of 3: cut %v, %v; want it granted", m.Cut, err)
	}
	closeTest(t, tr)
}

// TestWords checks the words that users see.
func TestWords(t *testing.T) {
	var words []string
	for c := CutComplete; c <= CutTooLong+1; c++ {
		words = append(words, c.String())
	}
	for s := Added; s <= OverTenantQuota+1; s++ {
		words = append(words, s.String())
	}
	for c := Prefix; c <= Transfer+1; c++ {
		words = append(words, c.String())
	}
	const want = "complete absent epoch lease_denied state_missing window_missing limit too_long Cut(8) " +
		"added exists parent_absent parent_mismatch too_deep stale_epoch over_quota over_quota PutStatus(9) prefix transfer Class(2)"
	if got := strings.Join(words, " "); got != want {
		t.Errorf("%s; want %s", got, want)
	}
}

// TestHold: eviction spares a held block and its ancestors and takes their other descendants. After
// Release it takes them too.
func TestHold(t *testing.T) {
	tr := openTest(t, Options{FS: vfs.NewMem(), Dir: "index", MaxLeases: 1})
	defer closeTest(t, tr)
	ns := benchNamespace(t, tr)
	ids := benchIDs(0)
	if _, err := tr.Put(nil, ns.ID, ns.Epoch, benchEntries(ids[:10], 100), true); err != nil {
		t.Fatal(err)
	}
	if _, err := tr.Hold(ns.ID, ns.Epoch, blockID("ff")); !errors.Is(err, ErrAbsent) {
		t.Errorf("hold of an absent block: %v", err)
	}
	lease, err := tr.Hold(ns.ID, ns.Epoch, ids[5])
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tr.Hold(ns.ID, ns.Epoch, ids[6]); !errors.Is(err, ErrTooManyLeases) {
		t.Errorf("a second hold: %v", err)
	}
	if gone, err := tr.Evict(nil, 1<<40, 0, time.Unix(0, 0)); err != nil || len(gone) != 4 {
		t.Errorf("%d pieces evicted, %v; want the 4 below the held one", len(gone), err)
	}
	if err := tr.Release(lease); err != nil {
		t.Fatal(err)
	}
	if gone, err := tr.Evict(nil, 1<<40, 0, time.Unix(0, 0)); err != nil || len(gone) != 6 {
		t.Errorf("%d pieces evicted after the release, %v; want 6", len(gone), err)
	}
}

// Leases are counted in the namespace in which they were granted, also after its blocks became
// unmatchable.
func TestLeasesAreCountedByNamespace(t *testing.T) {
	tr := openTest(t, Options{})
	defer closeTest(t, tr)
	a := benchNamespace(t, tr)
	def := a
	def.Name = a.Name + "-other"
	b, err := tr.Create(def)
	if err != nil {
		t.Fatal(err)
	}
	ids := benchIDs(0)[:4]
	for i, ns := range []kv.Namespace{a, b} {
		if _, err := tr.Put(nil, ns.ID, ns.Epoch, benchEntries(ids, 100*i), false); err != nil {
			t.Fatal(err)
		}
	}
	leases := func() (n [2]int64) {
		for i, s := range tr.Stats().Namespaces {
			n[i] = s.Leases
		}
		return n
	}
	opts := MatchOptions{Lease: true, TTL: time.Second, Now: epoch0}
	held, err := tr.Match(a.ID, ids, opts)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tr.Match(b.ID, ids, opts); err != nil {
		t.Fatal(err)
	}
	if _, err := tr.Hold(b.ID, b.Epoch, ids[1]); err != nil {
		t.Fatal(err)
	}
	if got := leases(); got != [2]int64{1, 2} {
		t.Errorf("%v leases; want 1 and 2", got)
	}
	if _, err := bumpEpoch(tr, a.Name, a.Epoch+1, 1); err != nil {
		t.Fatal(err)
	}
	if got := leases(); got != [2]int64{1, 2} {
		t.Errorf("%v leases after the bump; want 1 and 2", got)
	}
	if err := tr.Release(held.Lease); err != nil {
		t.Fatal(err)
	}
	tr.ExpireLeases(epoch0.Add(time.Second))
	if got := leases(); got != [2]int64{0, 1} {
		t.Errorf("%v leases at the end; want 0 and 1", got)
	}
}

// TestBelowOmitsDeleted: pieces that wait for ReclaimStep are not
// counted a second time.
func TestBelowOmitsDeleted(t *testing.T) {
	tr := openTest(t, Options{SlotBytes: func(kv.Geometry, int) int64 { return 10 }})
	defer closeTest(t, tr)
	ns := benchNamespace(t, tr)
	ids := benchIDs(0)[:5]
	if _, err := tr.Put(nil, ns.ID, ns.Epoch, benchEntries(ids, 0), false); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		block  int
		pieces int64
	}{{2, 3}, {1, 1}, {0, 1}} {
		pieces, bytes, err := tr.Below(ns.ID, ids[c.block])
		if err != nil || pieces != c.pieces || bytes != 10*c.pieces {
			t.Errorf("below block %d: %d pieces, %d bytes, %v; want %d of 10 bytes", c.block, pieces, bytes, err, c.pieces)
		}
		if err := tr.Delete(ns.ID, ids[c.block]); err != nil {
			t.Fatal(err)
		}
	}
}

// TestSuffix: a match of the end of a chain has the pieces that a match of the whole chain has
// there. It ends where the whole match ends, and a block whose ancestor was deleted is absent.
func TestSuffix(t *testing.T) {
	tr, ns, ids, _ := openWithPrefix(t, vfs.NewMem(), false)
	defer closeTest(t, tr)
	match := func(ids []kv.BlockID, suffix bool) Match {
		t.Helper()
		m, err := tr.Match(ns.ID, ids, MatchOptions{Suffix: suffix})
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	whole := match(ids[:12], false)
	for first := range 12 {
		m := match(ids[first:12], true)
		if m.Blocks != max(0, 10-first) || m.Cut != CutAbsent || len(m.Pieces) != m.Blocks {
			t.Fatalf("from block %d: %+v", first, m)
		}
		for i, p := range m.Pieces {
			if want := whole.Pieces[first+i]; p.Ref != want.Ref || int(p.Block) != i {
				t.Errorf("from block %d: piece %d is %+v; in the whole match %+v", first, i, p, want)
			}
		}
		if m := match(ids[first:12], false); first > 0 && m.Blocks != 0 {
			t.Errorf("%d blocks from block %d match without Suffix", m.Blocks, first)
		}
	}
	if err := tr.Delete(ns.ID, ids[3]); err != nil {
		t.Fatal(err)
	}
	for first, want := range []int{3, 2, 1, 0, 0, 0, 0, 0, 0, 0} {
		if m := match(ids[first:10], true); m.Blocks != want {
			t.Errorf("block 3 is deleted: %d blocks match from block %d; want %d", m.Blocks, first, want)
		}
	}
}
