package trie

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie/evict"
)

// model is the simplest correct index: a list of pieces, and scans over it.
type model struct {
	pieces []*mpiece
	leases []mlease
	quotas []kv.TenantQuota
}

type mpiece struct {
	ns, group int
	epoch     kv.Epoch
	id        kv.BlockID
	parent    *mpiece
	ref       kv.Ref
	class     Class
	// garbage is set if the piece is unmatchable and waits to be reclaimed.
	garbage bool
}

type mlease struct {
	id      LeaseID
	expires time.Time // zero means never
	pieces  []*mpiece
	// ns and epoch are those of a lease without pieces.
	ns    int
	epoch kv.Epoch
}

// pinnedEpoch reports whether a lease holds the epoch.
func (m *model) pinnedEpoch(ns int) func(kv.Epoch) bool {
	return func(e kv.Epoch) bool {
		return slices.ContainsFunc(m.leases, func(l mlease) bool { return l.pieces == nil && l.ns == ns && l.epoch == e })
	}
}

// retire makes all pieces of ns garbage whose epoch is not live. It ends the hold of leases on such
// epochs; the leases stay open until they are released or expire.
func (m *model) retire(ns int, def kv.Namespace) {
	m.discard(func(p *mpiece) bool { return p.ns == ns && !def.IsLive(p.epoch) })
	for i := range m.leases {
		if l := &m.leases[i]; l.pieces == nil && l.ns == ns && !def.IsLive(l.epoch) {
			l.ns = -1
		}
	}
}

func (m *model) find(ns int, epoch kv.Epoch, group int, id kv.BlockID) *mpiece {
	for _, p := range m.pieces {
		if p.ns == ns && p.epoch == epoch && p.group == group && p.id == id && !p.garbage {
			return p
		}
	}
	return nil
}

func (m *model) pinned(p *mpiece) bool {
	for _, l := range m.leases {
		if slices.Contains(l.pieces, p) {
			return true
		}
	}
	return false
}

// evictable reports whether a piece is a leaf without a lease.
func (m *model) evictable(p *mpiece) bool {
	return !m.pinned(p) && !slices.ContainsFunc(m.pieces, func(q *mpiece) bool { return q.parent == p })
}

func (m *model) bytes(ns int) (n int64) {
	for _, p := range m.pieces {
		if p.ns == ns {
			n++
		}
	}
	return n
}

// tenant returns the quota of the tenant with a namespace of this name; its prefix is "" if there is none.
func (m *model) tenant(name string) (quota kv.TenantQuota) {
	for _, q := range m.quotas {
		if strings.HasPrefix(name, q.Prefix) {
			quota = q
		}
	}
	return quota
}

// tenantBytes returns the bytes of the namespaces whose names begin with prefix. names are the names of
// all namespaces.
func (m *model) tenantBytes(prefix string, names []kv.Namespace) (n int64) {
	for ns, def := range names {
		if strings.HasPrefix(def.Name, prefix) {
			n += m.bytes(ns)
		}
	}
	return n
}

// discard makes every piece for which f is true garbage, with its descendants.
func (m *model) discard(f func(*mpiece) bool) {
	for _, p := range m.pieces {
		for q := p; q != nil; q = q.parent {
			p.garbage = p.garbage || f(q)
		}
	}
}

func (m *model) expire(now time.Time) {
	m.leases = slices.DeleteFunc(m.leases, func(l mlease) bool { return !l.expires.IsZero() && !l.expires.After(now) })
}

func (m *model) put(ns int, defs []kv.Namespace, epoch kv.Epoch, e Entry) PutStatus {
	def := defs[ns]
	if !def.IsLive(epoch) {
		return StaleEpoch
	}
	var parent *mpiece
	if def.Index == kv.IndexTrie && def.Geometry.Groups[0].Kind == kv.Full {
		switch {
		case e.Group != 0:
			parent = m.find(ns, epoch, 0, e.ID)
		case !e.Parent.IsZero():
			parent = m.find(ns, epoch, 0, e.Parent)
		}
		if parent == nil && (e.Group != 0 || !e.Parent.IsZero()) {
			return ParentAbsent
		}
	}
	if p := m.find(ns, epoch, e.Group, e.ID); p != nil {
		if e.Class == Prefix {
			p.class = Prefix
		}
		return Exists
	}
	if def.QuotaBytes > 0 && m.bytes(ns)+1 > def.QuotaBytes {
		return OverQuota
	}
	if q := m.tenant(def.Name); q.Prefix != "" && m.tenantBytes(q.Prefix, defs)+1 > q.Bytes {
		return OverTenantQuota
	}
	m.pieces = append(m.pieces, &mpiece{ns: ns, epoch: epoch, group: e.Group, id: e.ID, parent: parent, ref: e.Ref, class: e.Class})
	return Added
}

// needs returns the pieces that a reuse of the first n blocks needs. If a group lacks one, it
// returns nil and the kind of that group.
func (m *model) needs(ns int, def kv.Namespace, epoch kv.Epoch, ids []kv.BlockID, n int) ([]*mpiece, kv.GroupKind) {
	needed := []*mpiece{}
	for g, group := range def.Geometry.Groups {
		first := 0
		if def.Index == kv.IndexTrie && group.Kind != kv.Full {
			first = max(0, n-def.Geometry.WindowBlocks(g))
		}
		for i := first; i < n; i++ {
			p := m.find(ns, epoch, g, ids[i])
			if p == nil || def.Index == kv.IndexTrie && group.Kind == kv.Full && i > 0 && (p.parent == nil || p.parent.id != ids[i-1]) ||
				group.Kind == kv.Full && i == 0 && p.parent != nil {
				return nil, group.Kind
			}
			needed = append(needed, p)
		}
	}
	return needed, 0
}

// suffix returns the pieces of the longest run from the first of ids, which may have
// ancestors. The namespace is a tree of one full group.
func (m *model) suffix(ns int, epoch kv.Epoch, ids []kv.BlockID) (pieces []*mpiece) {
	for i := range ids {
		p := m.find(ns, epoch, 0, ids[i])
		if p == nil || i > 0 && (p.parent == nil || p.parent.id != ids[i-1]) {
			break
		}
		pieces = append(pieces, p)
	}
	return pieces
}

// longest tries every length in descending order, and for each length every epoch of the range, the
// newest first.
func (m *model) longest(ns int, def kv.Namespace, oldest, newest kv.Epoch, ids []kv.BlockID) (int, kv.Epoch, []*mpiece) {
	for n := len(ids); n > 0; n-- {
		for e := newest; e >= oldest; e-- {
			if p, _ := m.needs(ns, def, e, ids, n); p != nil && def.IsLive(e) {
				return n, e, p
			}
		}
	}
	return 0, 0, nil
}

// held returns the pieces of block i of an epoch that a reuse of n blocks needs, by group, or nil
// if one is missing.
func (m *model) held(ns int, def kv.Namespace, epoch kv.Epoch, ids []kv.BlockID, i, n int) map[int]*mpiece {
	held := make(map[int]*mpiece)
	for g, group := range def.Geometry.Groups {
		switch {
		case def.Index == kv.IndexTrie && group.Kind == kv.Full:
			if before, _ := m.needs(ns, kv.Namespace{Index: def.Index, Geometry: kv.Geometry{Groups: def.Geometry.Groups[g : g+1]}}, epoch, ids, i+1); before == nil {
				return nil
			}
		case def.Index == kv.IndexTrie && i < n-def.Geometry.WindowBlocks(g):
			continue
		}
		if held[g] = m.find(ns, epoch, g, ids[i]); held[g] == nil {
			return nil
		}
	}
	return held
}

// mixed tries every length, the longest first. Each block is of the newest epoch that has
// all pieces of the block that a match of this length needs.
func (m *model) mixed(ns int, def kv.Namespace, oldest, newest kv.Epoch, ids []kv.BlockID) (runs []kv.EpochRun, pieces []*mpiece) {
	for n := len(ids); n > 0; n-- {
		runs = nil
		byGroup := make([][]*mpiece, len(def.Geometry.Groups))
		for i := range n {
			for e := newest; e >= oldest; e-- {
				held := m.held(ns, def, e, ids, i, n)
				if held == nil || !def.IsLive(e) {
					continue
				}
				for g, p := range held {
					byGroup[g] = append(byGroup[g], p)
				}
				if k := len(runs) - 1; k >= 0 && runs[k].Epoch == e {
					runs[k].Blocks++
				} else {
					runs = append(runs, kv.EpochRun{Epoch: e, Blocks: 1})
				}
				break
			}
		}
		blocks := 0
		for _, r := range runs {
			blocks += r.Blocks
		}
		if blocks == n {
			return runs, slices.Concat(byGroup...)
		}
	}
	return nil, nil
}

// fuzzer drives index and model with the same operations.
type fuzzer struct {
	t    *testing.T
	in   []byte
	opts Options
	tr   *Trie
	m    model
	defs []kv.Namespace
	now  time.Time
	slot uint32
}

func (f *fuzzer) byte() int {
	if len(f.in) == 0 {
		return 0
	}
	b := f.in[0]
	f.in = f.in[1:]
	return int(b)
}

// chain returns a path in a tree with three branches; flat ids are paths of the tree too.
func (f *fuzzer) chain() (ids []kv.BlockID) {
	path := []byte{1}
	steps, bits := f.byte()%7, f.byte()
	for range steps + 1 {
		path = append(path, byte(bits%3)+1)
		bits /= 2
		var id kv.BlockID
		copy(id[:], path)
		ids = append(ids, id)
	}
	return ids
}

// FuzzModel compares every operation of the index with the model. Because of Pebble's goroutines,
// coverage differs between runs, and the fuzzer would spend its time minimising inputs. Run it with
// -fuzzminimizetime=1x.
func FuzzModel(f *testing.F) {
	rng := rand.New(rand.NewPCG(7, 7))
	for i := range 24 {
		seed := make([]byte, 900)
		for j := range seed {
			seed[j] = byte(rng.Uint32())
		}
		seed[0] = byte(i)
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > 4096 {
			return
		}
		fz := &fuzzer{t: t, in: in, now: epoch0}
		fz.opts = Options{
			Dir: "index", FS: vfs.NewMem(), MaxLeases: 5, MaxPins: 24,
			SlotBytes: func(kv.Geometry, int) int64 { return 1 },
			Policy:    evict.Kinds()[fz.byte()%3],
		}
		fz.tr = openTest(t, fz.opts)
		fz.create()
		fz.tenants(3, 9)
		for len(fz.in) > 0 && !t.Failed() {
			fz.step()
		}
		fz.compare()
		closeTest(t, fz.tr)
	})
}

func (f *fuzzer) create() {
	full := kv.Group{Kind: kv.Full, Layers: 1, TokenBytes: 1}
	window := kv.Group{Kind: kv.Window, Layers: 1, TokenBytes: 1, WindowTokens: 4}
	state := kv.Group{Kind: kv.State, Layers: 1, TokenBytes: 1}
	for i, def := range []kv.Namespace{
		{Index: kv.IndexTrie, Geometry: kv.Geometry{Groups: []kv.Group{full}}},
		{Index: kv.IndexTrie, Geometry: kv.Geometry{Groups: []kv.Group{full, window, state}}, QuotaBytes: 12},
		{Index: kv.IndexTrie, Geometry: kv.Geometry{Groups: []kv.Group{window, state}}},
		{Index: kv.IndexFlat, Geometry: kv.Geometry{Groups: []kv.Group{full}}},
	} {
		def.Name, def.Epoch, def.Geometry.BlockTokens = []string{"a", "a/x", "b/y", "c"}[i], 1, 2
		got, err := f.tr.Create(def)
		if err != nil {
			f.t.Fatal(err)
		}
		f.defs = append(f.defs, got)
	}
}

func (f *fuzzer) step() {
	op, ns := f.byte()%22, f.byte()%4
	switch op {
	case 0, 1, 2, 3, 4:
		f.put(ns)
	case 5, 6, 7, 8:
		f.match(ns)
	case 9:
		f.evict(ns)
	case 10:
		f.delete(ns)
	case 11:
		f.reclaim()
	case 12:
		f.lease()
	case 13:
		f.remove()
	case 14:
		f.bump(ns)
	case 15:
		f.rare(ns)
	case 19:
		f.suffix(ns)
	case 16:
		f.vacate()
	case 17:
		f.move()
	case 18:
		f.epochs(ns)
	case 20:
		f.evictTenant(ns)
	case 21:
		f.tenants(f.byte(), f.byte())
	}
}

// epoch returns one of the namespace's live epochs, mostly the newest, or the next epoch.
func (f *fuzzer) epoch(ns int) kv.Epoch {
	live := f.defs[ns].Live()
	if b := f.byte(); b%4 == 0 {
		return live[b/4%len(live)]
	} else if b == 255 {
		return live[0] + 1
	}
	return live[0]
}

func (f *fuzzer) put(ns int) {
	def := f.defs[ns]
	group := f.byte() % len(def.Geometry.Groups)
	class := Class(f.byte() % 8 / 7)
	var entries []Entry
	var parent kv.BlockID
	for _, id := range f.chain() {
		f.slot++
		e := Entry{ID: id, Group: group, Class: class, Ref: kv.Ref{Extent: kv.Extent(f.slot), Generation: kv.Generation(f.slot)}}
		if def.Index == kv.IndexTrie {
			e.Parent = parent
		}
		entries = append(entries, e)
		parent = id
	}
	epoch := f.epoch(ns)
	known, err := f.tr.Known(nil, def.ID, epoch, entries)
	if err != nil {
		f.t.Fatal(err)
	}
	status, err := f.tr.Put(nil, def.ID, epoch, entries, f.byte()%2 == 0)
	if err != nil {
		f.t.Fatal(err)
	}
	for i, e := range entries {
		if want := f.m.put(ns, f.defs, epoch, e); status[i] != want || known[i] != want {
			f.t.Fatalf("put %v group %d in %s: %v, Known returns %v; the model has %v", e.ID, group, def.Name, status[i], known[i], want)
		}
	}
}

// expireIfFull expires leases as the index does before it grants a lease.
func (f *fuzzer) expireIfFull() {
	if s := f.tr.Stats(); s.Leases >= int64(f.opts.MaxLeases) || s.Pins*8 >= int64(f.opts.MaxPins)*7 {
		f.m.expire(f.now)
	}
}

func (f *fuzzer) match(ns int) {
	def, ids := f.defs[ns], f.chain()
	opts := MatchOptions{Lease: f.byte()%3 == 0, TTL: time.Duration(f.byte()%4) * time.Minute, Now: f.now}
	newest, oldest := def.Epoch, def.Epoch
	switch b := f.byte() % 8; {
	case b < 4: // the newest epoch
	case b < 6:
		opts.Epoch = f.epoch(ns)
		newest, oldest = opts.Epoch, opts.Epoch
	default:
		opts.Epoch, opts.Oldest, opts.Mix = f.epoch(ns), kv.Epoch(1+f.byte()%8), b == 7
		newest, oldest = opts.Epoch, opts.Oldest
	}
	if opts.Lease {
		f.expireIfFull()
	}
	m, err := f.tr.Match(def.ID, ids, opts)
	if err != nil {
		f.t.Fatal(err)
	}
	n, epoch, needed := f.m.longest(ns, def, oldest, newest, ids)
	var runs []kv.EpochRun
	if opts.Mix {
		single := n
		n, epoch = 0, 0
		runs, needed = f.m.mixed(ns, def, oldest, newest, ids)
		for _, r := range runs {
			n, epoch = n+r.Blocks, max(epoch, r.Epoch)
		}
		if n < single {
			f.t.Fatalf("match in %s: %d blocks of one epoch, %d of several", def.Name, single, n)
		}
	}
	live := slices.DeleteFunc(def.Live(), func(e kv.Epoch) bool { return e < oldest || e > newest })
	if (m.Cut == CutEpoch) != (len(live) == 0) {
		f.t.Fatalf("match in %s, epochs %d to %d, live %d: cut %v", def.Name, oldest, newest, def.Live(), m.Cut)
	}
	if m.Cut == CutEpoch {
		return
	}
	if n == 0 {
		epoch = live[0]
	}
	if m.Epoch != epoch && m.Cut != CutLeaseDenied {
		f.t.Fatalf("match in %s, epochs %d to %d, live %d: epoch %d; the model has %d\n%v", def.Name, oldest, newest, def.Live(), m.Epoch, epoch, f.tr)
	}
	if m.Cut == CutLeaseDenied {
		if len(f.m.leases) == 0 {
			f.t.Fatalf("match in %s: lease denied although none is held", def.Name)
		}
		return
	}
	if m.Blocks != n || len(m.Pieces) != len(needed) {
		f.t.Fatalf("match in %s: %d blocks, %d pieces; the model has %d and %d", def.Name, m.Blocks, len(m.Pieces), n, len(needed))
	}
	for i, p := range m.Pieces {
		if want := needed[i]; p.Ref != want.ref || ids[p.Block] != want.id || int(p.Group) != want.group {
			f.t.Fatalf("match in %s: piece %d is %+v; the model has %+v", def.Name, i, p, want)
		}
	}
	if !slices.Equal(m.Epochs, runs) {
		f.t.Fatalf("match in %s, epochs %d to %d: epochs %v; the model has %v", def.Name, oldest, newest, m.Epochs, runs)
	}
	if !opts.Mix {
		f.cut(ns, epoch, m, ids)
	}
	if m.Lease != 0 {
		l := mlease{id: m.Lease, pieces: needed}
		if opts.TTL > 0 {
			l.expires = f.now.Add(opts.TTL)
		}
		f.m.leases = append(f.m.leases, l)
	}
}

// suffix matches the end of a chain.
func (f *fuzzer) suffix(ns int) {
	def, ids := f.defs[ns], f.chain()
	if def.Index == kv.IndexFlat || len(def.Geometry.Groups) > 1 || def.Geometry.Groups[0].Kind != kv.Full {
		return
	}
	epoch := f.epoch(ns)
	first := f.byte() % len(ids)
	m, err := f.tr.Match(def.ID, ids[first:], MatchOptions{Epoch: epoch, Suffix: true, NoTouch: f.byte()%2 == 0})
	if err != nil {
		f.t.Fatal(err)
	}
	var want []*mpiece
	if def.IsLive(epoch) {
		want = f.m.suffix(ns, epoch, ids[first:])
	}
	same := func(p Piece, w *mpiece) bool { return p.Ref == w.ref && ids[first+int(p.Block)] == w.id }
	if m.Blocks != len(want) || !slices.EqualFunc(m.Pieces, want, same) {
		f.t.Fatalf("match in %s, epoch %d, from block %d of %d: %+v; the model has %d blocks\n%v", def.Name, epoch, first, len(ids), m, len(want), f.tr)
	}
}

func (f *fuzzer) cut(ns int, epoch kv.Epoch, m Match, ids []kv.BlockID) {
	want := map[kv.GroupKind]Cut{0: CutComplete, kv.Full: CutAbsent, kv.Window: CutWindowMissing, kv.State: CutStateMissing}
	ok := m.Blocks == len(ids) && m.Cut == CutComplete
	for n := m.Blocks + 1; n <= len(ids); n++ {
		_, kind := f.m.needs(ns, f.defs[ns], epoch, ids, n)
		ok = ok || m.Cut == want[kind] || kind != 0 && (m.Cut == CutWindowMissing || m.Cut == CutStateMissing)
	}
	if !ok {
		f.t.Fatalf("match in %s: %d of %d blocks, cut %v", f.defs[ns].Name, m.Blocks, len(ids), m.Cut)
	}
}

// take removes the pieces that the index returned from the model. Each must be evictable at its
// turn.
func (f *fuzzer) take(gone []Evicted, what string) {
	for _, g := range gone {
		i := slices.IndexFunc(f.m.pieces, func(p *mpiece) bool { return p.ref == g.Ref })
		if i < 0 {
			f.t.Fatalf("%s: %+v is not in the model", what, g)
		}
		p := f.m.pieces[i]
		if !f.m.evictable(p) {
			f.t.Fatalf("%s: %+v is held or has children", what, g)
		}
		if p.id != g.ID || p.group != g.Group || f.defs[p.ns].ID != g.Namespace || p.class != g.Class || p.epoch != g.Epoch {
			f.t.Fatalf("%s: %+v; the model has %+v", what, g, *p)
		}
		f.m.pieces = slices.Delete(f.m.pieces, i, i+1)
	}
}

func (f *fuzzer) evict(ns int) {
	want := int64(f.byte()%6 + 1)
	only := kv.NamespaceID(0)
	if f.byte()%3 == 0 {
		only = f.defs[ns].ID
	}
	f.m.expire(f.now)
	gone, err := f.tr.Evict(nil, want, only, f.now)
	if err != nil {
		f.t.Fatal(err)
	}
	f.order(gone, only)
	f.take(gone, "evict")
	var got int64
	for _, g := range gone {
		if only == 0 || g.Namespace == only {
			got += g.SlotBytes
		}
	}
	for _, p := range f.m.pieces {
		if got < want && (only == 0 || p.ns == ns) && f.m.evictable(p) {
			f.t.Fatalf("evict %d: got %d although %+v may be evicted\n%v", want, got, *p, f.tr)
		}
	}
}

// tenants sets the quotas of tenants: the bits of which choose prefixes, which do not overlap. A quota may
// be below what the tenant has.
func (f *fuzzer) tenants(which, bytes int) {
	f.m.quotas = nil
	for i, prefix := range [][]string{{"a", "b/", "x"}, {"a/", "b", "c"}}[which/8%2] {
		if which>>i&1 == 1 {
			f.m.quotas = append(f.m.quotas, kv.TenantQuota{Prefix: prefix, Bytes: int64(bytes%24 + 1)})
		}
	}
	slices.Reverse(f.m.quotas) // in any order
	f.tr.SetTenantQuotas(f.m.quotas)
	for i, def := range f.defs {
		if got, ok := f.tr.TenantQuota(def.Name); got != f.m.tenant(def.Name) || ok != (got.Prefix != "") {
			f.t.Fatalf("%s: the quota of its tenant is %+v; the model has %+v", f.defs[i].Name, got, f.m.tenant(def.Name))
		}
	}
	f.usage()
}

// usage compares the bytes of the tenants with the model.
func (f *fuzzer) usage() {
	for _, got := range f.tr.Tenants() {
		if want := f.m.tenantBytes(got.Prefix, f.defs); got.UsedBytes != want || !slices.Contains(f.m.quotas, got.TenantQuota) {
			f.t.Fatalf("tenant %+v; the model has %d bytes, and the quotas %+v\n%v", got, want, f.m.quotas, f.tr)
		}
	}
	if n := len(f.tr.Tenants()); n != len(f.m.quotas) {
		f.t.Fatalf("%d tenants; the model has %d", n, len(f.m.quotas))
	}
}

// evictTenant evicts from a tenant. Only unmatchable pieces of other namespaces may be evicted too, and
// older epochs go before newest ones.
func (f *fuzzer) evictTenant(ns int) {
	want := int64(f.byte()%6 + 1)
	prefix := f.m.tenant(f.defs[ns].Name).Prefix
	if prefix == "" {
		prefix = "x"
	}
	f.m.expire(f.now)
	old := func(p *mpiece) bool { return p.epoch != f.defs[p.ns].Epoch }
	over := false
	for i, def := range f.defs {
		over = over || def.QuotaBytes > 0 && f.m.bytes(i) > def.QuotaBytes
	}
	member := func(p *mpiece) bool {
		return f.m.tenant(f.defs[p.ns].Name).Prefix == prefix
	}
	gone, err := f.tr.EvictTenant(nil, want, prefix, f.now)
	if err != nil {
		f.t.Fatal(err)
	}
	var got, chosen int64
	newest := false
	for _, g := range gone {
		p := f.m.pieces[slices.IndexFunc(f.m.pieces, func(p *mpiece) bool { return p.ref == g.Ref })]
		if !member(p) && !p.garbage {
			f.t.Fatalf("evict %d from %q: %+v is of another tenant", want, prefix, g)
		}
		if g.Tenant != f.m.tenant(f.defs[p.ns].Name).Prefix {
			f.t.Fatalf("evict %d from %q: %+v has another tenant", want, prefix, g)
		}
		if member(p) {
			got += g.SlotBytes
			if !p.garbage {
				chosen += g.SlotBytes
			}
			newest = newest || !p.garbage && !old(p)
		}
	}
	f.take(gone, "evict from a tenant")
	for _, p := range f.m.pieces {
		if member(p) && f.m.evictable(p) && (got < want || newest && !over && !p.garbage && old(p)) {
			f.t.Fatalf("evict %d from %q: got %d although %+v may be evicted\n%v", want, prefix, got, *p, f.tr)
		}
	}
	if chosen > want {
		f.t.Fatalf("evict %d from %q: %d matchable pieces, of 1 byte each", want, prefix, chosen)
	}
	f.usage()
}

// order checks that no piece of an epoch was evicted while an older epoch of the namespace had
// evictable pieces: always if only that namespace was evicted from, and otherwise if neither a
// namespace nor a tenant has a quota.
func (f *fuzzer) order(gone []Evicted, only kv.NamespaceID) {
	if only == 0 && (len(f.m.quotas) > 0 || slices.ContainsFunc(f.tr.Stats().Namespaces, func(s NamespaceStats) bool { return s.QuotaBytes > 0 })) {
		return
	}
	for _, g := range gone {
		for _, p := range f.m.pieces {
			if f.defs[p.ns].ID != g.Namespace || p.garbage || p.epoch >= g.Epoch || !f.defs[p.ns].IsLive(g.Epoch) || g.Why != Chosen {
				continue
			}
			if stays := !slices.ContainsFunc(gone, func(h Evicted) bool { return h.Ref == p.ref }); stays && f.m.evictable(p) {
				f.t.Fatalf("evict: %+v was evicted, and %+v of an older epoch could have been evicted\n%v", g, *p, f.tr)
			}
		}
	}
}

func (f *fuzzer) delete(ns int) {
	def, ids := f.defs[ns], f.chain()
	id := ids[len(ids)-1]
	found := slices.ContainsFunc(f.m.pieces, func(p *mpiece) bool { return p.ns == ns && p.id == id && !p.garbage })
	if err := f.tr.Delete(def.ID, id); errors.Is(err, ErrAbsent) == found || err != nil && found {
		f.t.Fatalf("delete %v in %s: %v; in the model: %v", id, def.Name, err, found)
	}
	f.m.discard(func(p *mpiece) bool { return p.ns == ns && p.id == id })
}

func (f *fuzzer) remove() {
	if len(f.m.pieces) == 0 {
		return
	}
	p := f.m.pieces[f.byte()%len(f.m.pieces)]
	if p.garbage {
		return
	}
	if err := f.tr.Remove(p.ref, Dropped); err != nil {
		f.t.Fatal(err)
	}
	f.m.discard(func(q *mpiece) bool { return q == p })
}

// move moves a few pieces to consecutive slots. Matchable pieces must move; all others
// must keep their slots.
func (f *fuzzer) move() {
	if len(f.m.pieces) == 0 {
		return
	}
	var moves []Moved
	var pieces []*mpiece
	at, step := f.byte(), f.byte()%3
	for i := range f.byte()%4 + 1 {
		f.slot++
		p := f.m.pieces[(at+i*step)%len(f.m.pieces)]
		pieces = append(pieces, p)
		moves = append(moves, Moved{From: p.ref, To: kv.Ref{Extent: kv.Extent(f.slot), Generation: kv.Generation(f.slot)}})
	}
	moved, err := f.tr.Move(moves)
	if err != nil {
		f.t.Fatal(err)
	}
	for i, p := range pieces {
		if want := !p.garbage && p.ref == moves[i].From; moved[i] != want {
			f.t.Fatalf("move %+v to %v: %v; the model has %v\n%v", *p, moves[i].To, moved[i], want, f.tr)
		}
		if moved[i] {
			p.ref = moves[i].To
		}
	}
	for _, p := range pieces {
		got, ok := f.tr.Find(f.defs[p.ns].ID, p.epoch, PieceKey{ID: p.id, Group: uint8(p.group)})
		if q := f.m.find(p.ns, p.epoch, p.group, p.id); ok != (q != nil) || ok && got != q.ref {
			f.t.Fatalf("find %+v: %v, %v\n%v", *p, got, ok, f.tr)
		}
	}
}

func (f *fuzzer) reclaim() {
	gone, more, err := f.tr.ReclaimStep(nil, f.byte()%8+1)
	if err != nil {
		f.t.Fatal(err)
	}
	for _, g := range gone {
		if !slices.ContainsFunc(f.m.pieces, func(p *mpiece) bool { return p.ref == g.Ref && p.garbage }) {
			f.t.Fatalf("reclaim: %+v is matchable in the model", g)
		}
	}
	f.take(gone, "reclaim")
	for _, p := range f.m.pieces {
		if !more && p.garbage && f.m.evictable(p) {
			f.t.Fatalf("reclaim: nothing more, although %+v may be evicted\n%v", *p, f.tr)
		}
	}
}

// vacate calls CheapestVacancy and Vacate for some ranges of slots, with reads of some slots in
// progress, and compares the results with the model: to empty a range, every piece in it and every
// descendant must be removable.
func (f *fuzzer) vacate() {
	f.m.expire(f.now)
	var ranges []ExtentRange
	width := f.byte()%8 + 1
	for from := f.byte() % 4; from < int(f.slot)+1 && len(ranges) < vacancyChoices; from += width + f.byte()%3 {
		ranges = append(ranges, ExtentRange{From: kv.Extent(from), To: kv.Extent(from + width)})
	}
	read := kv.Extent(f.byte())
	reading := func(ref kv.Ref) bool { return ref.Extent%64 == read%64 }
	needs := func(r ExtentRange) (bytes int64, held bool) {
		for _, p := range f.m.pieces {
			for q := p; q != nil; q = q.parent {
				if q.ref.Extent >= r.From && q.ref.Extent < r.To {
					held = held || f.m.pinned(p) || reading(p.ref)
					bytes++
					break
				}
			}
		}
		return bytes, held
	}
	least := int64(-1)
	for _, r := range ranges {
		if bytes, held := needs(r); !held && (least < 0 || bytes < least) {
			least = bytes
		}
	}
	v, ok := f.tr.CheapestVacancy(ranges, reading, f.now)
	if ok != (least >= 0) || ok && v.Bytes != least {
		f.t.Fatalf("vacate one of %v: %v, %d bytes; the model has %d\n%v", ranges, ok, v.Bytes, least, f.tr)
	}
	if !ok {
		return
	}
	gone, done, err := f.tr.Vacate(nil, v, reading)
	if err != nil || !done || int64(len(gone)) != least {
		f.t.Fatalf("vacate %v: %d pieces were removed, done %v, %v; the model has %d", v.Range, len(gone), done, err, least)
	}
	f.take(gone, "vacate")
	if bytes, _ := needs(v.Range); bytes != 0 {
		f.t.Fatalf("vacate %v: %d pieces are left", v.Range, bytes)
	}
}

func (f *fuzzer) lease() {
	f.now = f.now.Add(time.Duration(f.byte()%3) * 40 * time.Second)
	if len(f.m.leases) == 0 {
		return
	}
	i := f.byte() % len(f.m.leases)
	l := &f.m.leases[i]
	switch f.byte() % 3 {
	case 0:
		if err := f.tr.Release(l.id); err != nil {
			f.t.Fatal(err)
		}
		f.m.leases = slices.Delete(f.m.leases, i, i+1)
	case 1:
		expired := !l.expires.IsZero() && !l.expires.After(f.now) || l.ns < 0
		err := f.tr.Renew(l.id, time.Minute, f.now)
		if errors.Is(err, ErrLeaseUnknown) != expired {
			f.t.Fatalf("renew: %v; expired in the model: %v", err, expired)
		}
		if !expired {
			l.expires = f.now.Add(time.Minute)
		}
	case 2:
		before := len(f.m.leases)
		f.m.expire(f.now)
		if n := f.tr.ExpireLeases(f.now); n != before-len(f.m.leases) {
			f.t.Fatalf("%d leases expired; the model has %d", n, before-len(f.m.leases))
		}
	}
}

func (f *fuzzer) bump(ns int) {
	if f.byte()%4 != 0 {
		return
	}
	if f.byte()%2 == 0 {
		keep := f.byte() % 4
		if _, err := bumpEpoch(f.tr, f.defs[ns].Name, 0, keep); err != nil {
			f.t.Fatal(err)
		}
		f.live(ns, f.defs[ns].Bump(f.defs[ns].Epoch+1, max(1, keep), f.m.pinnedEpoch(ns)))
		return
	}
	if err := f.tr.DeleteAll(f.defs[ns].ID); err != nil {
		f.t.Fatal(err)
	}
	f.m.discard(func(p *mpiece) bool { return p.ns == ns })
	for i := range f.m.leases {
		if l := &f.m.leases[i]; l.pieces == nil && l.ns == ns {
			l.ns = -1
		}
	}
}

// live compares the live epochs with those of the model.
func (f *fuzzer) live(ns int, want kv.Namespace) {
	got, err := f.tr.Namespace(want.Name)
	if err != nil {
		f.t.Fatal(err)
	}
	if !slices.Equal(got.Live(), want.Live()) || max(1, got.Keep) != max(1, want.Keep) {
		f.t.Fatalf("%s: live %d, %d kept; the model has %d, %d", got.Name, got.Live(), got.Keep, want.Live(), want.Keep)
	}
	f.defs[ns] = want
	f.m.retire(ns, want)
}

// epochs pins an epoch, retires an epoch, or retires the epochs whose pins have ended.
func (f *fuzzer) epochs(ns int) {
	def := f.defs[ns]
	switch f.byte() % 4 {
	case 0, 1:
		f.expireIfFull()
		e, ttl := f.epoch(ns), time.Duration(f.byte()%4)*time.Minute
		lease, got, err := f.tr.PinEpoch(def.ID, e, "fuzz", ttl, f.now)
		if errors.Is(err, ErrTooManyLeases) && len(f.m.leases) > 0 {
			return
		}
		if errors.Is(err, ErrEpoch) != !def.IsLive(e) || err != nil && def.IsLive(e) || err == nil && got != e {
			f.t.Fatalf("pin epoch %d of %s, live %d: %d, %v", e, def.Name, def.Live(), got, err)
		}
		if err != nil {
			return
		}
		l := mlease{id: lease, ns: ns, epoch: e}
		if ttl > 0 {
			l.expires = f.now.Add(ttl)
		}
		f.m.leases = append(f.m.leases, l)
	case 2:
		e, force := f.epoch(ns), f.byte()%2 == 0
		plan, err := f.tr.PlanRetire(def.Name, e, force)
		switch {
		case e == def.Epoch || !def.IsLive(e):
			if !errors.Is(err, ErrEpoch) {
				f.t.Fatalf("retire epoch %d of %s, live %d: %v", e, def.Name, def.Live(), err)
			}
			return
		case !force && f.m.pinnedEpoch(ns)(e):
			if !errors.Is(err, ErrPinned) {
				f.t.Fatalf("retire pinned epoch %d of %s: %v", e, def.Name, err)
			}
			return
		}
		if retired, err := f.tr.SetEpochs(plan); err != nil || !slices.Equal(retired, []kv.Epoch{e}) {
			f.t.Fatalf("retire epoch %d of %s: %d, %v", e, def.Name, retired, err)
		}
		f.live(ns, def.Retire(e))
	case 3:
		for _, plan := range f.tr.Unsettled() {
			i := slices.IndexFunc(f.defs, func(d kv.Namespace) bool { return d.ID == plan.ID })
			if _, err := f.tr.SetEpochs(plan); err != nil {
				f.t.Fatal(err)
			}
			f.live(i, f.defs[i].Settle(f.m.pinnedEpoch(i)))
		}
		for i, d := range f.defs {
			if s := d.Settle(f.m.pinnedEpoch(i)); len(s.Older) != len(d.Older) {
				f.t.Fatalf("%s: live %d; the model has %d", d.Name, d.Live(), s.Live())
			}
		}
	}
}

func (f *fuzzer) rare(ns int) {
	switch f.byte() % 6 {
	case 0:
		if err := f.tr.Check(); err != nil {
			f.t.Fatal(err)
		}
	case 1:
		f.reopen()
	case 2:
		epoch := f.epoch(ns)
		gone, err := f.tr.Delivered(nil, f.defs[ns].ID, epoch, f.chain())
		if err != nil {
			f.t.Fatal(err)
		}
		for _, g := range gone {
			if g.Class != Transfer || g.Epoch != epoch {
				f.t.Fatalf("delivered: %+v", g)
			}
		}
		f.take(gone, "delivered")
	case 3:
		f.compare()
	case 4:
		quota := int64(f.byte() % 20)
		if err := f.tr.SetQuota(f.defs[ns].Name, quota); err != nil {
			f.t.Fatal(err)
		}
		f.defs[ns].QuotaBytes = quota
	case 5:
		f.opts.Dir += "'"
		if err := f.tr.Relocate(f.t.Context(), f.opts.Dir, func() error { return nil }); err != nil {
			f.t.Fatal(err)
		}
		if err := f.tr.Check(); err != nil {
			f.t.Fatal(err)
		}
	}
}

func (f *fuzzer) reopen() {
	closeTest(f.t, f.tr)
	f.tr = openTest(f.t, f.opts)
	f.tr.SetTenantQuotas(f.m.quotas)
	f.m.leases = nil
	for i, d := range f.defs {
		f.live(i, d.Settle(unpinned))
	}
	f.revive()
	f.m.pieces = slices.DeleteFunc(f.m.pieces, func(p *mpiece) bool { return p.garbage })
	f.compare()
}

// revive models Open: the descendants of a deleted block that were not reclaimed are matchable
// again, if the block was put again.
func (f *fuzzer) revive() {
	var revived []*mpiece
	for ref := range f.tr.Refs() {
		i := slices.IndexFunc(f.m.pieces, func(p *mpiece) bool { return p.ref == ref })
		if p := f.m.pieces[i]; p.garbage {
			if p.parent == nil {
				f.t.Fatalf("%+v was deleted and is back", *p)
			}
			p.garbage = false
			revived = append(revived, p)
		}
	}
	for _, p := range revived {
		group := p.parent.group
		if p.parent = f.m.find(p.ns, p.epoch, group, p.parent.id); p.parent == nil {
			f.t.Fatalf("%+v is back without a parent", *p)
		}
	}
}

// compare checks that index and model refer to the same slots.
func (f *fuzzer) compare() {
	want := make(map[kv.Ref]*mpiece)
	for _, p := range f.m.pieces {
		want[p.ref] = p
	}
	for ref, place := range f.tr.Refs() {
		p := want[ref]
		if p == nil || f.defs[p.ns].ID != place.Namespace || p.group != place.Group {
			f.t.Fatalf("the index has %v for %+v; the model has %+v", ref, place, p)
		}
		delete(want, ref)
	}
	f.usage()
	for ref, p := range want {
		f.t.Fatalf("the index lacks %v: %+v\n%v\n%v", ref, *p, f.tr.Stats().Load, f.tr)
	}
}
