package client

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/placement"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
)

func bareStore(targets ...string) *Store {
	s := &Store{}
	s.opts.EnsureDefaults()
	var nodes []*node
	for _, target := range targets {
		nodes = append(nodes, newNode(s, target))
	}
	s.table.Store(&table{nodes: nodes})
	return s
}

// TestOwner: sequences are spread over the nodes independently of the order of the list. The
// removal of a node moves only the sequences of that node.
func TestOwner(t *testing.T) {
	s := bareStore("a:1", "b:1", "c:1", "d:1")
	turned := bareStore("d:1", "b:1", "a:1", "c:1")
	fewer := bareStore("a:1", "b:1", "d:1")
	const n = 20000
	count := make(map[string]int)
	for i := range n {
		var id kv.BlockID
		binary.LittleEndian.PutUint64(id[:], uint64(i))
		owner := s.owner(id).target
		count[owner]++
		if other := turned.owner(id).target; other != owner {
			t.Fatalf("block %v belongs to %s or %s", id, owner, other)
		}
		if other := fewer.owner(id).target; other != owner && owner != "c:1" {
			t.Fatalf("block %v moved from %s to %s when c:1 left", id, owner, other)
		}
	}
	for target, got := range count {
		if got < n/4*9/10 || got > n/4*11/10 {
			t.Errorf("%s has %d of %d sequences", target, got, n)
		}
	}
}

func TestDataAddresses(t *testing.T) {
	id := rdma.EngineID{1}
	for _, tc := range []struct {
		advertised, host string
		port             uint32
		want             string
	}{
		{"10.0.0.1:7421", "10.0.0.1", 7421, "10.0.0.1:7421"},
		{"10.0.0.1:7421", "storage-1", 7421, "10.0.0.1:7421 storage-1:7421"},
		{"0.0.0.0:7421", "storage-1", 7421, "storage-1:7421 0.0.0.0:7421"},
		{"[::]:7421", "storage-1", 7421, "storage-1:7421 [::]:7421"},
		{"127.0.0.1:7421", "storage-1", 9000, "storage-1:9000 127.0.0.1:7421"},
		{"127.0.0.1:7421", "localhost", 7421, "127.0.0.1:7421 localhost:7421"},
		{"", "storage-1", 7421, "storage-1:7421"},
		{"10.0.0.1:7421", "", 7421, "10.0.0.1:7421"},
		{"10.0.0.1:7421", "storage-1", 0, "10.0.0.1:7421"},
		{"tls://0.0.0.0:7421", "storage-1", 7421, "tls://storage-1:7421 tls://0.0.0.0:7421"},
		{"tls://127.0.0.1:7421", "127.0.0.1", 7421, "tls://127.0.0.1:7421"},
		{"tls://0.0.0.0:7421#3", "storage-1", 7421, "tls://storage-1:7421#3 tls://0.0.0.0:7421#3"},
		{"10.0.0.1:7421#3", "10.0.0.1", 7421, "10.0.0.1:7421#3"},
		{"gid:fe80", "::1", 7421, "gid:fe80 [::1]:7421"},
	} {
		addr := rdma.Addr{Engine: id}
		if tc.advertised != "" {
			addr.NICs = []rdma.NetAddr{rdma.NetAddr(tc.advertised)}
		}
		var got []string
		for _, a := range dataAddresses(addr, tc.host, tc.port) {
			if a.Engine != id {
				t.Errorf("address %s: the engine has another id", tc.advertised)
			}
			got = append(got, string(a.NICs[0]))
		}
		if s := strings.Join(got, " "); s != tc.want {
			t.Errorf("address %s, reached by %s, port %d: %s; want %s", tc.advertised, tc.host, tc.port, s, tc.want)
		}
	}
}

func TestDialKeepsTokensPrivate(t *testing.T) {
	for _, tc := range []struct {
		target   string
		tls      bool
		insecure bool
		ok       bool
	}{
		{target: "127.0.0.1:7420", ok: true},
		{target: "localhost:7420", ok: true},
		{target: "[::1]:7420", ok: true},
		{target: "unix:///run/penstock.sock", ok: true},
		{target: "dns:///localhost:7420", ok: true},
		{target: "10.0.0.1:7420"},
		{target: "storage-1:7420"},
		{target: "localhost.example.com:7420"},
		{target: "dns://127.0.0.1/storage-1:7420"},
		{target: "storage-1:7420", tls: true, ok: true},
		{target: "storage-1:7420", insecure: true, ok: true},
		{target: ""},
	} {
		opts := DialOptions{BearerToken: "secret", Insecure: tc.insecure}
		if tc.tls {
			opts.TLS = &tls.Config{}
		}
		conn, err := Dial(tc.target, opts)
		if (err == nil) != tc.ok {
			t.Errorf("dial %q (tls %v, insecure %v): %v", tc.target, tc.tls, tc.insecure, err)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("dial %q: the error has the token in it", tc.target)
		}
		if conn != nil {
			conn.Close()
		}
	}
}

func TestOptionsValidate(t *testing.T) {
	good := func() Options {
		o := Options{Servers: []string{"a:1"}, Engine: stubEngine{}}
		o.EnsureDefaults()
		return o
	}
	if o := good(); o.Validate() != nil {
		t.Fatal(o.Validate())
	}
	for name, edit := range map[string]func(*Options){
		"no servers":       func(o *Options) { o.Servers = nil },
		"an empty server":  func(o *Options) { o.Servers = []string{"a:1", ""} },
		"a server twice":   func(o *Options) { o.Servers = []string{"a:1", "a:1"} },
		"no engine":        func(o *Options) { o.Engine = nil },
		"negative timeout": func(o *Options) { o.DialTimeout = -1 },
		"negative dead":    func(o *Options) { o.DeadFor = -1 },
		"negative silence": func(o *Options) { o.SilentAfter = -1 },
		"no parallelism":   func(o *Options) { o.ReadParallel = -1 },
		"no batch":         func(o *Options) { o.BatchParallel = -1 },
		"negative task":    func(o *Options) { o.ReadTaskBytes = -1 },
	} {
		o := good()
		edit(&o)
		if err := o.Validate(); err == nil || !strings.HasPrefix(err.Error(), "client: ") {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := Open(context.Background(), o); err == nil {
			t.Errorf("%s: Open succeeded", name)
		}
	}
}

type stubEngine struct{ rdma.Engine }

// live makes every node of s ready, with the given limits, without a network.
func (s *Store) live(limits session) {
	for _, n := range s.all() {
		sess := limits
		sess.transport = &transport{}
		n.session = &sess
	}
}

// TestTasksOfLayers: a task of a range of layers has as many bytes to move as one of whole
// pieces, up to the node's limit, which counts whole pieces.
func TestTasksOfLayers(t *testing.T) {
	ns := kv.Namespace{Name: "m", Geometry: kv.SingleGroup(32, 32, 4<<10), Index: kv.IndexTrie, Epoch: 1} // 4 MiB a block
	s := bareStore("a")
	s.live(session{readBytes: 64 << 20, chainBlocks: 64})
	ids := make([]kv.BlockID, 48)
	for i := range ids {
		ids[i][0] = byte(i + 1)
	}
	for layers, want := range map[int]int{0: 24, 16: 12, 4: 3, 1: 3} {
		r, err := s.newReading(ReadRequest{Namespace: ns, IDs: ids, Layers: layers})
		if err != nil {
			t.Fatal(err)
		}
		if err := r.plan(t.Context(), 0); err != nil || len(r.tasks) != want {
			t.Errorf("%d layers: %d tasks, %v; want %d", layers, len(r.tasks), err, want)
		}
	}
}

// FuzzPlan: for every division of a Read, each piece is in one task, on its owner node, with the
// index of its block in the task's chain. A task exceeds a limit only if a single piece does.
func FuzzPlan(f *testing.F) {
	f.Add(uint64(1), uint8(20), uint16(4), uint8(1), false, uint8(0), false)
	f.Add(uint64(2), uint8(20), uint16(4), uint8(3), true, uint8(0), true)
	f.Add(uint64(3), uint8(33), uint16(1), uint8(3), false, uint8(2), false)
	f.Add(uint64(4), uint8(60), uint16(30), uint8(1), false, uint8(1), true)
	f.Fuzz(func(t *testing.T, seed uint64, blocks uint8, limitKiB uint16, nodes uint8, flat bool, extraGroups uint8, oneLayer bool) {
		rng := rand.New(rand.NewPCG(seed, 0))
		ns := kv.Namespace{Name: "m", Geometry: kv.SingleGroup(2, 4, 128), Index: kv.IndexTrie, Epoch: 1}
		if flat {
			ns.Index = kv.IndexFlat
		} else {
			for range extraGroups % 3 {
				ns.Geometry.Groups = append(ns.Geometry.Groups, kv.Group{Kind: kv.Window, Layers: 1, TokenBytes: 64, WindowTokens: 9})
			}
		}
		var targets []string
		for i := range nodes%4 + 1 {
			targets = append(targets, string(rune('a'+i)))
		}
		s := bareStore(targets...)
		s.live(session{readBytes: int64(limitKiB) << 10, writeBytes: 1 << 20, chainBlocks: 64})
		ids := make([]kv.BlockID, int(blocks)+1)
		for i := range ids {
			binary.LittleEndian.PutUint64(ids[i][:], rng.Uint64())
		}
		pieces := []Piece{} // none is not the same as nil
		for b := range ids {
			for g := range ns.Geometry.Groups {
				if rng.IntN(4) > 0 {
					pieces = append(pieces, Piece{Block: b, Group: g, Offset: int64(len(pieces)) << 10})
				}
			}
		}
		rng.Shuffle(len(pieces), func(i, j int) { pieces[i], pieces[j] = pieces[j], pieces[i] })
		s.opts.ReadTaskBytes = 8 << 10
		req := ReadRequest{Namespace: ns, IDs: ids, Pieces: pieces, Into: &Memory{region: memRegion(make([]byte, 2<<20))}}
		if oneLayer {
			req.Layers = 1
		}
		r, err := s.newReading(req)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.plan(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
		seen := make([]int, len(pieces))
		for _, task := range r.tasks {
			var bytes, moved int64
			for k, i := range task.pieces {
				seen[i]++
				bytes += ns.Geometry.PieceBytes(pieces[i].Group)
				moved += r.pieceBytes(pieces[i].Group)
				id := ids[pieces[i].Block]
				if task.ids[task.local[k]] != id {
					t.Fatalf("piece of block %d is at another block of its task", pieces[i].Block)
				}
				owner := s.owner(ids[0])
				if flat {
					owner = s.owner(id)
				}
				if task.node != owner {
					t.Fatalf("piece of block %d goes to %s, not to %s", pieces[i].Block, task.node.target, owner.target)
				}
			}
			if len(task.pieces) > 1 && (bytes > int64(limitKiB)<<10 || moved > s.opts.ReadTaskBytes) || len(task.pieces) > readTaskPieces {
				t.Fatalf("a task of %d pieces, %d bytes, of which it reads %d", len(task.pieces), bytes, moved)
			}
			if !flat && len(ns.Geometry.Groups) > 1 && len(task.ids) != len(ids) {
				t.Fatalf("a task of a hybrid chain has %d blocks of %d", len(task.ids), len(ids))
			}
		}
		if i := slices.IndexFunc(seen, func(n int) bool { return n != 1 }); i >= 0 {
			t.Fatalf("piece %d is in %d tasks", i, seen[i])
		}
	})
}

// FuzzChunks: for every division of a Write, each piece is in one chunk, in order. A chunk is a
// range of the chain that begins after its parent, and keeps the limits.
func FuzzChunks(f *testing.F) {
	f.Add(uint64(1), uint8(20), uint16(4), false, uint8(0))
	f.Add(uint64(2), uint8(20), uint16(3), true, uint8(0))
	f.Add(uint64(3), uint8(99), uint16(2), false, uint8(2))
	f.Fuzz(func(t *testing.T, seed uint64, blocks uint8, limitKiB uint16, flat bool, extraGroups uint8) {
		rng := rand.New(rand.NewPCG(seed, 0))
		ns := kv.Namespace{Name: "m", Geometry: kv.SingleGroup(2, 4, 128), Index: kv.IndexTrie, Epoch: 1}
		if flat {
			ns.Index = kv.IndexFlat
		} else {
			for range extraGroups % 3 {
				ns.Geometry.Groups = append(ns.Geometry.Groups, kv.Group{Kind: kv.State, Layers: 1, TokenBytes: 700})
			}
		}
		s := bareStore("a")
		s.opts.WriteChunkBytes = max(1, int64(limitKiB)<<10)
		s.live(session{writeBytes: 1 << 20, chainBlocks: 16})
		n := s.all()[0]
		ids := make([]kv.BlockID, int(blocks)+1)
		for i := range ids {
			binary.LittleEndian.PutUint64(ids[i][:], rng.Uint64())
		}
		first := rng.IntN(len(ids) + 1)
		pieces := []Piece{}
		for b := first; b < len(ids); b++ {
			for g := range ns.Geometry.Groups {
				if rng.IntN(3) > 0 {
					pieces = append(pieces, Piece{Block: b, Group: g, Offset: int64(len(pieces)) << 10})
				}
			}
		}
		rng.Shuffle(len(pieces), func(i, j int) { pieces[i], pieces[j] = pieces[j], pieces[i] })
		w, err := s.newWriting(WriteRequest{Namespace: ns, IDs: ids, First: first, Pieces: pieces, From: &Memory{region: memRegion(make([]byte, 2<<20))}})
		if err != nil {
			t.Fatal(err)
		}
		next := 0
		copies := w.copies(t.Context())
		if len(copies) == 0 && flat && len(pieces) == 0 {
			return
		}
		if len(copies) != 1 {
			t.Fatalf("%d copies without replicas", len(copies))
		}
		for _, l := range copies[0] {
			for rest := l.pieces; len(rest) > 0; {
				count, err := w.chunkLen(n, n.session, rest)
				if err != nil || count < 1 {
					t.Fatalf("chunk of %d pieces: %v", count, err)
				}
				c := w.chunk(rest[:count])
				rest = rest[count:]
				checkChunk(t, w, c, &next)
			}
		}
		if next != len(pieces) {
			t.Fatalf("%d pieces of %d are in a chunk", next, len(pieces))
		}
	})
}

func checkChunk(t *testing.T, w *writing, c writeChunk, next *int) {
	t.Helper()
	var bytes int64
	for k, i := range c.pieces {
		if i != *next {
			t.Fatalf("piece %d follows piece %d", i, *next-1)
		}
		*next++
		p := w.pieces[i]
		bytes += w.req.Namespace.Geometry.PieceBytes(p.Group)
		if c.ids[c.local[k]] != w.ids[p.Block] {
			t.Fatalf("piece of block %d is at another block of its chunk", p.Block)
		}
	}
	if len(c.pieces) > 1 && bytes > w.store.opts.WriteChunkBytes || len(c.pieces) > writeChunkPieces {
		t.Fatalf("a chunk of %d pieces, %d bytes", len(c.pieces), bytes)
	}
	if w.flat() {
		return
	}
	start := w.pieces[c.pieces[0]].Block
	if start > 0 != (c.parent == w.ids[max(0, start-1)]) || len(c.ids) > 16 {
		t.Fatalf("chunk of %d blocks at block %d with parent %v", len(c.ids), start, c.parent)
	}
}

// memRegion is memory that is not registered.
type memRegion []byte

func (m memRegion) Len() uint64     { return uint64(len(m)) }
func (m memRegion) Bytes() []byte   { return m }
func (m memRegion) Desc() rdma.Desc { return rdma.Desc{} }
func (m memRegion) Window(_, _ uint64, _ ...rdma.EngineID) (rdma.Window, error) {
	return nil, rdma.ErrUnsupported
}
func (m memRegion) Close(context.Context) error { return nil }
func (m memRegion) WindowSpans([]rdma.Span, ...rdma.EngineID) (rdma.Window, error) {
	return nil, rdma.ErrUnsupported
}

// TestErrorsSayThingsOnce: the text of an error has the kind, the node and the reason, each once.
func TestErrorsSayThingsOnce(t *testing.T) {
	for _, c := range []struct {
		code  codes.Code
		words string
		kind  error
		want  string
	}{
		{codes.FailedPrecondition, "namespace differs: epoch 3; namespace \"m\" is at 1", ErrMismatch,
			`client: read: n:1: namespace differs: epoch 3; namespace "m" is at 1`},
		{codes.AlreadyExists, "trie: restore: namespace exists", ErrMismatch, "client: read: n:1: namespace differs: trie: restore: namespace exists"},
		{codes.InvalidArgument, "bad request: a chain of no blocks", ErrRequest, "client: read: n:1: bad request: a chain of no blocks"},
		{codes.InvalidArgument, "trie: bad entry", ErrRequest, "client: read: n:1: bad request: trie: bad entry"},
		{codes.NotFound, "trie: lease 7: lease unknown", ErrNotFound, "client: read: n:1: not found: trie: lease 7: lease unknown"},
		{codes.ResourceExhausted, "busy: 4 loads are running", errBusy, "client: read: n:1: node is busy: 4 loads are running"},
		{codes.Unavailable, "node is draining", errDown, "client: read: n:1: node is down: node is draining"},
		{codes.DeadlineExceeded, "context deadline exceeded", context.DeadlineExceeded, "client: read: n:1: context deadline exceeded"},
		{codes.Internal, "segment 4 is gone", nil, "client: read: n:1: rpc error: code = Internal desc = segment 4 is gone"},
	} {
		err := callError(t.Context(), "read", "n:1", status.Error(c.code, c.words))
		if err.Error() != c.want {
			t.Errorf("%v %q:\n%v, want\n%s", c.code, c.words, err, c.want)
		}
		if c.kind != nil && !errors.Is(err, c.kind) || c.kind == nil && status.Code(err) != c.code {
			t.Errorf("%v %q: %v is not %v", c.code, c.words, err, c.kind)
		}
	}
	if err := callError(t.Context(), "read", "n:1", errLinkLost); strings.Count(err.Error(), errLinkLost.Error()) != 1 {
		t.Errorf("an error that is no status: %v", err)
	}
	down := callError(t.Context(), "describe", "n:1", status.Error(codes.Unavailable, "refused"))
	if err := hideInternal(errors.Join(down, down)); errors.Is(err, errDown) || strings.Contains(err.Error(), "client: ") {
		t.Errorf("hidden: %v", err)
	}
	if err := hideLink(inWords(errLinkLost, "local session has ended: reset")); !errors.Is(err, ErrUnsupported) || errors.Is(err, errLinkLost) ||
		err.Error() != "client: not supported: local session has ended: reset" {
		t.Errorf("a lost link: %v", err)
	}
}

// TestReaders: of the replicas of a sequence, the one in the client's zone is asked first, then the one
// with the fewest calls. Without replicas the client's zone does not matter.
func TestReaders(t *testing.T) {
	s := bareStore("a", "b", "c")
	tab := &table{nodes: s.all()}
	for _, n := range tab.nodes {
		tab.places = append(tab.places, placement.Place{Seed: placement.PlaceSeed(n.target), Capacity: 1 << 30, Zone: "zone " + n.target})
	}
	tab.overfull = placement.Overfull(tab.places)
	s.table.Store(tab)
	three, one := kv.Namespace{Index: kv.IndexTrie, Replicas: 3}, kv.Namespace{Index: kv.IndexTrie}
	var id kv.BlockID
	for i := range 32 {
		id[0] = byte(i)
		s.opts.Zone = ""
		tab.nodes[0].calling.Store(2)
		tab.nodes[1].calling.Store(1)
		var order []string
		for _, n := range s.readers(three, id) {
			order = append(order, n.target)
		}
		if !slices.Equal(order, []string{"c", "b", "a"}) {
			t.Fatalf("with 2, 1 and 0 calls the nodes are asked in the order %v", order)
		}
		s.opts.Zone = "zone a"
		if n := s.readers(three, id)[0]; n.target != "a" {
			t.Fatalf("%s is asked before the node of the client's zone", n.target)
		}
		if nodes := s.readers(one, id); len(nodes) != 1 || nodes[0] != s.owner(id) {
			t.Fatal("without replicas another node than the owner is asked")
		}
	}
}

// TestPlacements: a change of a member's usage is no change of the placements; a change of its capacity, zone
// or state is one, as are members that come and go. A list without members changes nothing.
func TestPlacements(t *testing.T) {
	s := bareStore()
	s.ctx = t.Context()
	d := &directory{store: s, members: make(map[string]*member), absent: newNode(s, "the cluster")}
	list := []*pb.Member{{Name: "a", Addr: "a:1", CapacityBytes: 100}, {Name: "b", Addr: "b:1", CapacityBytes: 100}, {Name: "c", Addr: "c:1", CapacityBytes: 100}}
	var removed []string
	for _, step := range []struct {
		name    string
		change  func()
		changes bool
	}{
		{"the first list", func() {}, true},
		{"the same list", func() {}, false},
		{"usage", func() { list[0].UsedBytes = 40 }, false},
		{"a member is overfull", func() { list[0].UsedBytes = 90 }, false},
		{"capacity", func() { list[1].CapacityBytes = 200 }, true},
		{"zone", func() { list[1].Zone = "z" }, true},
		{"a member drains", func() { list[1].State = stateDraining }, true},
		{"it joins again, and drains", func() { list[1].State = stateJoining }, false},
		{"it serves", func() { list[1].State = "serving" }, true},
		{"another address", func() { list[2].Addr = "c:2" }, true},
		{"a member leaves for a short time", func() { list = list[:2] }, false},
		{"it is gone", func() { s.opts.GoneFor = 0 }, true},
		{"a new member joins", func() { list = append(list, &pb.Member{Name: "d", Addr: "d:1", State: stateJoining}) }, false},
		{"it serves", func() { list[2].State = "serving" }, true},
		{"it is removed", func() { s.opts.GoneFor, list, removed = time.Hour, list[:2], []string{"d"} }, true},
	} {
		step.change()
		before := s.Placements()
		d.replace(list, removed)
		if changed := s.Placements() != before; changed != step.changes {
			t.Errorf("%s: the placements changed: %t", step.name, changed)
		}
		if over := s.Overfull() == 1; over != (list[0].UsedBytes == 90) {
			t.Errorf("%s: a member is overfull: %t", step.name, over)
		}
	}
}

// TestKeysAndLists: keys of flat namespaces pass over no member, and a Store with a list of nodes stores one
// copy, whatever the number of replicas.
func TestKeysAndLists(t *testing.T) {
	s := bareStore("a", "b", "c")
	tab := &table{nodes: s.all()}
	for _, n := range tab.nodes {
		tab.places = append(tab.places, placement.Place{Seed: placement.PlaceSeed(n.target), Capacity: 100})
	}
	tab.places[0].Used = 90
	if tab.overfull = placement.Overfull(tab.places); !tab.overfull[0] {
		t.Fatal("no member is overfull")
	}
	ns := kv.Namespace{Name: "m", Index: kv.IndexFlat, Epoch: 1, Geometry: kv.SingleGroup(2, 4, 128)}
	three := ns
	three.Replicas = 3
	ids := make([]kv.BlockID, 64)
	for i := range ids {
		ids[i][0] = byte(i + 1)
	}
	copies := func(ns kv.Namespace) [][]line {
		w, err := s.newWriting(WriteRequest{Namespace: ns, IDs: ids, From: &Memory{region: memRegion(make([]byte, 1<<20))}})
		if err != nil {
			t.Fatal(err)
		}
		return w.copies(t.Context())
	}
	if n := len(copies(three)); n != 1 {
		t.Errorf("a Store with a list of nodes stores %d copies", n)
	}
	s.table.Store(tab)
	if n := len(copies(three)); n != 3 {
		t.Errorf("%d copies of three", n)
	}
	for _, l := range copies(ns)[0] {
		for _, i := range l.pieces {
			id := ids[i]
			if home := s.owner(id); l.node != home || !slices.Equal(s.readers(ns, id), []*node{home}) {
				t.Errorf("key %d is written to %s; its home is %s", i, l.node.target, home.target)
			}
		}
	}
}

// TestNotAsked: a node is not silent because a call began after the end of the caller's deadline.
func TestNotAsked(t *testing.T) {
	s := &Store{opts: Options{DeadFor: time.Hour}}
	s.ctx = t.Context()
	n := newNode(s, "n:1")
	n.session = &session{} // a call would panic
	ctx, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	if m := (&share{node: n}).matchHere(ctx, MatchRequest{}); !errors.Is(m.err, context.DeadlineExceeded) || n.silent() {
		t.Errorf("a match after the deadline: %v; the node is silent: %v", m.err, n.silent())
	}
}

// TestHeard: a node is silent after calls have waited for SilentAfter until their deadlines, also if the
// transport has noticed the end before ctx has, until it answers. A shorter wait and the cancellation of
// a call do not count. Waits at the same time count once, and the time after a deadline does not count.
func TestHeard(t *testing.T) {
	late := fmt.Errorf("read: %w", context.DeadlineExceeded)
	n := newNode(&Store{opts: Options{DeadFor: time.Hour, SilentAfter: time.Second}}, "n:1")
	at := time.Now()
	for _, step := range []struct {
		err           error
		began, millis int // since at
		want          bool
	}{
		{fmt.Errorf("read: %w", context.Canceled), 0, 5000, false},
		{late, 5000, 5010, false},
		{late, 5010, 5999, false},
		{late, 5010, 5999, false}, // at the same time as the call before
		{late, 9000, 9001, true},  // a second in all
		{fmt.Errorf("read: %w", errDown), 9001, 9002, true},
		{nil, 9002, 9003, false},
		{late, 9003, 9103, false}, // the waits before the answer do not count
		{late, 9050, 10002, false},
		{late, 9050, 10003, true},
	} {
		began, now := at.Add(time.Duration(step.began)*time.Millisecond), at.Add(time.Duration(step.millis)*time.Millisecond)
		n.heard(t.Context(), began, now, step.err)
		if n.silentAt(now) != step.want {
			t.Errorf("after %v from %d to %d ms: silent is %v", step.err, step.began, step.millis, !step.want)
		}
	}
	ctx, cancel := context.WithDeadline(t.Context(), at.Add(10*time.Millisecond))
	defer cancel()
	n.unanswered.Store(nil)
	n.heard(ctx, at, at.Add(time.Minute), late)
	if u := n.unanswered.Load(); u == nil || u.waited != 10*time.Millisecond {
		t.Errorf("a call with a deadline of 10 ms that ended after a minute: %+v", u)
	}
	n.heard(ctx, at.Add(time.Hour), at.Add(time.Hour), late)
	if u := n.unanswered.Load(); u == nil || u.waited != 10*time.Millisecond {
		t.Errorf("after a call that began after its deadline: %+v", u)
	}
	n.unanswered.Store(nil)
	n.heard(ctx, at.Add(time.Hour), at.Add(time.Hour), late)
	if u := n.unanswered.Load(); u == nil || u.waited != 0 {
		t.Errorf("only a call that began after its deadline: %+v", u)
	}
}
