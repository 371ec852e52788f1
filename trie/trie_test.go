package trie

import (
	"encoding/hex"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie/evict"
)

// epoch0 is the start time of the tests.
var epoch0 = time.Unix(1_000_000, 0)

func openTest(t testing.TB, opts Options) *Trie {
	t.Helper()
	if opts.FS == nil {
		opts.FS = vfs.NewMem()
	}
	if opts.Dir == "" {
		opts.Dir = "index"
	}
	tr, err := Open(opts)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// closeTest checks every invariant before it closes.
func closeTest(t testing.TB, tr *Trie) {
	t.Helper()
	if err := tr.Check(); err != nil {
		t.Error(err)
	}
	if err := tr.Close(); err != nil {
		t.Error(err)
	}
}

func TestNodeSize(t *testing.T) {
	if got := reflect.TypeFor[node]().Size(); got != 48 {
		t.Errorf("a node is %d B; a block may take 80 B in all (docs/benchmarks.md), which counts on 48", got)
	}
}

// story runs one transcript. A block is named by the hexadecimal digits with which its id begins.
// Slots are assigned in order and never reused, so a transcript shows the slot of every piece.
type story struct {
	t      *testing.T
	fs     *vfs.MemFS
	opts   Options
	tr     *Trie
	now    time.Time
	slot   uint32
	refs   map[string]kv.Ref // by "ns/id/group"
	leases map[string]LeaseID
}

func TestStories(t *testing.T) {
	datadriven.Walk(t, "testdata/stories", func(t *testing.T, path string) {
		s := &story{t: t, fs: vfs.NewCrashableMem(), now: epoch0, refs: map[string]kv.Ref{}, leases: map[string]LeaseID{}}
		s.opts = Options{FS: s.fs, Dir: "index", SlotBytes: func(kv.Geometry, int) int64 { return 1 }}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			s.t = t
			if s.tr == nil {
				s.open(d)
				if d.Cmd == "open" {
					return ""
				}
			}
			var b strings.Builder
			if err := s.run(&b, d); err != nil {
				fmt.Fprintf(&b, "error: %v\n", err)
			}
			return b.String()
		})
		closeTest(t, s.tr)
	})
}

func (s *story) open(d *datadriven.TestData) {
	if d.Cmd == "open" {
		scanInt(d, "leases", &s.opts.MaxLeases)
		scanInt(d, "pins", &s.opts.MaxPins)
		scanInt(d, "chain", &s.opts.MaxChainBlocks)
		if d.HasArg("policy") {
			var name string
			d.ScanArgs(s.t, "policy", &name)
			kind, err := evict.ParseKind(name)
			if err != nil {
				s.t.Fatal(err)
			}
			s.opts.Policy = kind
		}
	}
	s.tr = openTest(s.t, s.opts)
}

func scanInt[T int | int64](d *datadriven.TestData, name string, v *T) {
	for _, a := range d.CmdArgs {
		if a.Key == name {
			n, err := strconv.ParseInt(a.Vals[0], 10, 64)
			if err != nil {
				d.Fatalf(nil, "%v", err)
			}
			*v = T(n)
		}
	}
}

func blockID(name string) (id kv.BlockID) {
	if len(name)%2 == 1 {
		name += "0"
	}
	b, err := hex.DecodeString(name)
	if err != nil {
		panic(err)
	}
	copy(id[:], b)
	return id
}

func blockIDs(line string) (ids []kv.BlockID) {
	for _, name := range strings.Fields(line) {
		ids = append(ids, blockID(name))
	}
	return ids
}

func short(id kv.BlockID) string { return strings.TrimRight(id.String(), "0") }

// ns returns the namespace that the first argument names.
func (s *story) ns(d *datadriven.TestData) kv.Namespace {
	def, err := s.tr.Namespace(d.CmdArgs[0].Key)
	if err != nil {
		s.t.Fatalf("%s: %v", d.Pos, err)
	}
	return def
}

func lines(d *datadriven.TestData) []string {
	return strings.FieldsFunc(d.Input, func(r rune) bool { return r == '\n' })
}

func (s *story) run(b *strings.Builder, d *datadriven.TestData) error {
	switch d.Cmd {
	case "create":
		return s.create(b, d)
	case "put":
		return s.put(b, d)
	case "known":
		return s.known(b, d)
	case "match":
		return s.match(b, d)
	case "renew", "release", "expire", "advance":
		return s.lease(b, d)
	case "evict":
		return s.evict(b, d)
	case "delivered":
		return s.gone(b, func() ([]Evicted, error) { return s.tr.Delivered(nil, s.ns(d).ID, 0, blockIDs(d.Input)) })
	case "reclaim":
		return s.reclaim(b, d)
	case "delete":
		return s.tr.Delete(s.ns(d).ID, blockID(d.CmdArgs[1].Key))
	case "delete-all":
		return s.tr.DeleteAll(s.ns(d).ID)
	case "remove":
		var group int
		scanInt(d, "group", &group)
		return s.tr.Remove(s.refs[pieceName(s.ns(d), d.CmdArgs[1].Key, group)], Dropped)
	case "delete-namespace":
		return s.tr.DeleteNamespace(d.CmdArgs[0].Key)
	case "bump":
		var to, keep int
		scanInt(d, "to", &to)
		scanInt(d, "keep", &keep)
		retired, err := bumpEpoch(s.tr, d.CmdArgs[0].Key, kv.Epoch(to), keep)
		s.epochs(b, d.CmdArgs[0].Key, retired)
		return err
	case "retire":
		epoch, err := strconv.ParseUint(d.CmdArgs[1].Key, 10, 64)
		if err != nil {
			return err
		}
		def, err := s.tr.PlanRetire(d.CmdArgs[0].Key, kv.Epoch(epoch), d.HasArg("force"))
		if err != nil {
			return err
		}
		retired, err := s.tr.SetEpochs(def)
		s.epochs(b, def.Name, retired)
		return err
	case "settle":
		for _, def := range s.tr.Unsettled() {
			retired, err := s.tr.SetEpochs(def)
			if err != nil {
				return err
			}
			s.epochs(b, def.Name, retired)
		}
		return nil
	case "pin-epoch":
		return s.pinEpoch(b, d)
	case "pins":
		pins, _ := s.tr.Pins(nil, PinFilter{Endless: d.HasArg("endless")}, 0, 100)
		for _, p := range pins {
			fmt.Fprintf(b, "%s epoch %d of %q: %d blocks, of the epoch: %v, for %v\n", p.Namespace, p.Epoch, p.Owner, p.Blocks, p.OfEpoch, p.Expires.Sub(s.now))
		}
		return nil
	case "quota":
		var n int64
		scanInt(d, "bytes", &n)
		return s.tr.SetQuota(d.CmdArgs[0].Key, n)
	case "sync":
		return s.tr.Sync()
	case "crash", "reopen":
		return s.reopen(b, d.Cmd == "crash")
	case "draw":
		b.WriteString(s.tr.String())
		return s.tr.Check()
	case "stats":
		b.WriteString(s.tr.Stats().String())
		return nil
	case "epochs":
		for _, n := range s.tr.Stats().Namespaces {
			for _, e := range n.Live {
				fmt.Fprintf(b, "%s epoch %d: kept %v  blocks %d  pieces %d  bytes %d  matches %d  hits %d  leases %d  pins %d\n",
					n.Name, e.Epoch, e.Kept, e.Blocks, e.Pieces, e.Bytes, e.Matches, e.Hits, e.Leases, e.Pins)
			}
		}
		return nil
	case "namespaces":
		for _, n := range s.tr.Namespaces() {
			fmt.Fprintf(b, "%d %s epoch %d quota %d: %v %s\n", n.ID, n.Name, n.Epoch, n.QuotaBytes, n.Index, n.Geometry)
		}
		return nil
	case "stat":
		infos, err := s.tr.Stat(s.ns(d).ID, blockID(d.CmdArgs[1].Key))
		writeInfos(b, infos)
		return err
	case "list":
		return s.list(b, d)
	}
	return fmt.Errorf("%s: unknown command %s", d.Pos, d.Cmd)
}

// bumpEpoch bumps a namespace as the owner of a Trie does.
func bumpEpoch(tr *Trie, name string, to kv.Epoch, keep int) (retired []kv.Epoch, err error) {
	def, err := tr.PlanBump(name, to, keep)
	if err != nil {
		return nil, err
	}
	return tr.SetEpochs(def)
}

// epochs prints the live epochs of a namespace, and the epochs that have just been retired.
func (s *story) epochs(b *strings.Builder, name string, retired []kv.Epoch) {
	if def, err := s.tr.Namespace(name); err == nil {
		fmt.Fprintf(b, "live %d, retired %d\n", def.Live(), retired)
	}
}

// pinEpoch NAME EPOCH as=OWNER [ttl=D]
func (s *story) pinEpoch(b *strings.Builder, d *datadriven.TestData) error {
	epoch, err := strconv.ParseUint(d.CmdArgs[1].Key, 10, 64)
	if err != nil {
		return err
	}
	var owner string
	d.ScanArgs(s.t, "as", &owner)
	lease, got, err := s.tr.PinEpoch(s.ns(d).ID, kv.Epoch(epoch), owner, duration(s.t, d, "ttl"), s.now)
	if err != nil {
		return err
	}
	s.leases[owner] = lease
	fmt.Fprintf(b, "%s holds epoch %d\n", owner, got)
	return nil
}

// create NAME [flat] [quota=N] [groups=(full,window:4,state)] creates a namespace with 2 tokens per
// block, so window:4 is two blocks.
func (s *story) create(b *strings.Builder, d *datadriven.TestData) error {
	def := kv.Namespace{Name: d.CmdArgs[0].Key, Index: kv.IndexTrie, Epoch: 1}
	if d.HasArg("flat") {
		def.Index = kv.IndexFlat
	}
	scanInt(d, "quota", &def.QuotaBytes)
	def.Geometry = kv.SingleGroup(1, 2, 1)
	for _, a := range d.CmdArgs {
		if a.Key != "groups" {
			continue
		}
		def.Geometry.Groups = nil
		for _, v := range a.Vals {
			kind, window, _ := strings.Cut(v, ":")
			g := kv.Group{Layers: 1, TokenBytes: 1}
			var err error
			if g.Kind, err = kv.ParseGroupKind(kind); err != nil {
				return err
			}
			g.WindowTokens, _ = strconv.Atoi(window)
			def.Geometry.Groups = append(def.Geometry.Groups, g)
		}
	}
	got, err := s.tr.Create(def)
	if errors.Is(err, ErrNamespaceExists) {
		fmt.Fprintf(b, "it has id %d\n", got.ID)
	}
	return err
}

func pieceName(ns kv.Namespace, name string, group int) string {
	return fmt.Sprintf("%s/%s/%d", ns.Name, short(blockID(name)), group)
}

// entries reads lines of blocks. Each block is the child of the block before it; "a > b" makes b a
// child of a, and a is not put.
func (s *story) entries(d *datadriven.TestData, slots bool) (kv.Namespace, kv.Epoch, []Entry) {
	ns := s.ns(d)
	epoch, group := int64(ns.Epoch), 0
	scanInt(d, "epoch", &epoch)
	scanInt(d, "group", &group)
	class := Prefix
	if d.HasArg("transfer") {
		class = Transfer
	}
	var entries []Entry
	for _, line := range lines(d) {
		var parent kv.BlockID
		if before, after, ok := strings.Cut(line, ">"); ok {
			parent, line = blockID(strings.TrimSpace(before)), after
		}
		for _, id := range blockIDs(line) {
			e := Entry{ID: id, Parent: parent, Group: group, Class: class}
			if slots {
				s.slot++
				e.Ref = kv.Ref{Extent: kv.MakeExtent(0, 0, s.slot), Generation: kv.Generation(s.slot)}
			}
			entries = append(entries, e)
			if ns.Index == kv.IndexTrie {
				parent = id
			}
		}
	}
	return ns, kv.Epoch(epoch), entries
}

func (s *story) put(b *strings.Builder, d *datadriven.TestData) error {
	ns, epoch, entries := s.entries(d, true)
	status, err := s.tr.Put(nil, ns.ID, epoch, entries, d.HasArg("durable"))
	for i, st := range status {
		e := entries[i]
		if st == Added {
			s.refs[pieceName(ns, short(e.ID), e.Group)] = e.Ref
		}
	}
	writeStatus(b, entries, status)
	return err
}

func (s *story) known(b *strings.Builder, d *datadriven.TestData) error {
	ns, epoch, entries := s.entries(d, false)
	status, err := s.tr.Known(nil, ns.ID, epoch, entries)
	writeStatus(b, entries, status)
	return err
}

// writeStatus prints one line per run of entries with equal status.
func writeStatus(b *strings.Builder, entries []Entry, status []PutStatus) {
	for i := 0; i < len(status); {
		j := i
		for ; j < len(status) && status[j] == status[i]; j++ {
			fmt.Fprintf(b, "%s ", short(entries[j].ID))
		}
		fmt.Fprintf(b, "%v\n", status[i])
		i = j
	}
}

func (s *story) match(b *strings.Builder, d *datadriven.TestData) error {
	ns := s.ns(d)
	opts := MatchOptions{Now: s.now, NoTouch: d.HasArg("no-touch"), Count: d.HasArg("count"), Mix: d.HasArg("mix")}
	var epoch, oldest int
	scanInt(d, "epoch", &epoch)
	scanInt(d, "oldest", &oldest)
	scanInt(d, "max", &opts.MaxBlocks)
	opts.Epoch, opts.Oldest = kv.Epoch(epoch), kv.Epoch(oldest)
	var name string
	if d.HasArg("lease") {
		d.ScanArgs(s.t, "lease", &name)
		opts.Lease = true
	}
	opts.TTL = duration(s.t, d, "ttl")
	m, err := s.tr.Match(ns.ID, blockIDs(d.Input), opts)
	if err != nil {
		return err
	}
	fmt.Fprintf(b, "%d blocks, %d tokens, cut %v", m.Blocks, m.Tokens, m.Cut)
	if m.Stored != m.Blocks {
		fmt.Fprintf(b, ", stored %d", m.Stored)
	}
	if len(ns.Older) > 0 {
		fmt.Fprintf(b, ", epoch %d", m.Epoch)
	}
	for _, r := range m.Epochs {
		fmt.Fprintf(b, ", %d of epoch %d", r.Blocks, r.Epoch)
	}
	b.WriteByte('\n')
	group := -1
	for _, p := range m.Pieces {
		if int(p.Group) != group {
			if group >= 0 {
				b.WriteByte('\n')
			}
			group = int(p.Group)
			fmt.Fprintf(b, "group %d:", group)
		}
		fmt.Fprintf(b, " %d=%v", p.Block, p.Ref)
	}
	if group >= 0 {
		b.WriteByte('\n')
	}
	if m.Lease != 0 {
		s.leases[name] = m.Lease
		fmt.Fprintf(b, "lease %s\n", name)
	}
	return nil
}

func duration(t *testing.T, d *datadriven.TestData, name string) time.Duration {
	for _, a := range d.CmdArgs {
		if a.Key == name {
			v, err := time.ParseDuration(a.Vals[0])
			if err != nil {
				t.Fatalf("%s: %v", d.Pos, err)
			}
			return v
		}
	}
	return 0
}

func (s *story) lease(b *strings.Builder, d *datadriven.TestData) error {
	name := ""
	if len(d.CmdArgs) > 0 {
		name = d.CmdArgs[0].Key
	}
	var err error
	switch d.Cmd {
	case "renew":
		err = s.tr.Renew(s.leases[name], duration(s.t, d, "ttl"), s.now)
	case "release":
		err = s.tr.Release(s.leases[name])
	case "expire":
		fmt.Fprintf(b, "%d expired\n", s.tr.ExpireLeases(s.now))
	case "advance":
		v, perr := time.ParseDuration(name)
		if perr != nil {
			return perr
		}
		s.now = s.now.Add(v)
	}
	if errors.Is(err, ErrLeaseUnknown) {
		b.WriteString("lease unknown\n")
		return nil
	}
	return err
}

func (s *story) gone(b *strings.Builder, f func() ([]Evicted, error)) error {
	gone, err := f()
	for _, g := range gone {
		def, nerr := s.tr.NamespaceByID(g.Namespace)
		name := def.Name
		if nerr != nil {
			name = fmt.Sprintf("namespace %d", g.Namespace)
		}
		fmt.Fprintf(b, "%s epoch %d: %s", name, g.Epoch, short(g.ID))
		if g.Group != 0 {
			fmt.Fprintf(b, " group %d", g.Group)
		}
		fmt.Fprintf(b, " %v\n", g.Ref)
	}
	if len(gone) == 0 {
		b.WriteString("nothing\n")
	}
	return err
}

func (s *story) evict(b *strings.Builder, d *datadriven.TestData) error {
	var want int64
	scanInt(d, "want", &want)
	var only kv.NamespaceID
	if d.HasArg("only") {
		var name string
		d.ScanArgs(s.t, "only", &name)
		def, err := s.tr.Namespace(name)
		if err != nil {
			return err
		}
		only = def.ID
	}
	return s.gone(b, func() ([]Evicted, error) { return s.tr.Evict(nil, want, only, s.now) })
}

func (s *story) reclaim(b *strings.Builder, d *datadriven.TestData) error {
	limit := 1 << 20
	scanInt(d, "max", &limit)
	more := false
	err := s.gone(b, func() (gone []Evicted, err error) {
		gone, more, err = s.tr.ReclaimStep(nil, limit)
		return gone, err
	})
	if more {
		b.WriteString("more\n")
	}
	return err
}

func (s *story) reopen(b *strings.Builder, crash bool) error {
	if crash {
		s.fs = s.fs.CrashClone(vfs.CrashCloneCfg{})
		s.opts.FS = s.fs
	}
	if err := s.tr.Close(); err != nil {
		return err
	}
	s.tr = openTest(s.t, s.opts)
	fmt.Fprintf(b, "%v\n", s.tr.Stats().Load)
	return s.tr.Check()
}

func writeInfos(b *strings.Builder, infos []Info) {
	for _, i := range infos {
		fmt.Fprintf(b, "%s group %d depth %d %v %v children %d leases %d", short(i.ID), i.Group, i.Depth, i.Ref, i.Class, i.Children, i.Leases)
		if !i.Parent.IsZero() {
			fmt.Fprintf(b, " parent %s", short(i.Parent))
		}
		b.WriteByte('\n')
	}
}

func (s *story) list(b *strings.Builder, d *datadriven.TestData) error {
	limit := 100
	scanInt(d, "limit", &limit)
	for cursor := uint32(0); ; {
		infos, next, err := s.tr.List(s.ns(d).ID, cursor, limit)
		if err != nil {
			return err
		}
		writeInfos(b, infos)
		if next == 0 {
			return nil
		}
		b.WriteString("…\n")
		cursor = next
	}
}
