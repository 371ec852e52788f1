package move

import (
	"bytes"
	"context"
	"slices"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/placement"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// seen is a client with memory for a sequence.
type seen struct {
	*testing.T
	*client.Store
	ns     kv.Namespace
	memory *client.Memory
}

func see(t *testing.T, o client.Options) *seen {
	t.Helper()
	engine, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = engine.Close() })
	o.Engine, o.MembersEvery = engine, 20*time.Millisecond
	s := &seen{T: t}
	if s.Store, err = client.Open(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	if s.ns, err = s.EnsureNamespace(t.Context(), kv.Namespace{Name: "m", Index: kv.IndexTrie, Geometry: kv.SingleGroup(2, 4, 8<<10)}); err != nil {
		t.Fatal(err)
	}
	if s.memory, err = s.Register(make([]byte, 2*s.ns.Geometry.BlockBytes())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.memory.Close(context.Background()) })
	return s
}

func (s *seen) ids(sequence int) []kv.BlockID {
	var first, second kv.BlockID
	first[0], first[1], second[0], second[1] = 1, byte(sequence), 2, byte(sequence)
	return []kv.BlockID{first, second}
}

func (s *seen) write(sequence int) {
	s.Helper()
	copy(s.memory.Bytes(), bytes.Repeat([]byte{byte(sequence)}, len(s.memory.Bytes())))
	w, err := s.Write(s.Context(), client.WriteRequest{Namespace: s.ns, IDs: s.ids(sequence), From: s.memory})
	if err != nil || w.Blocks != 2 {
		s.Fatalf("sequence %d: %+v, %v", sequence, w, err)
	}
}

// blocks returns the number of blocks of a sequence that are read with the right bytes.
func (s *seen) blocks(sequence int) int {
	s.Helper()
	clear(s.memory.Bytes())
	r, err := s.Read(s.Context(), client.ReadRequest{Namespace: s.ns, IDs: s.ids(sequence), Into: s.memory})
	if err != nil {
		s.Fatal(err)
	}
	if n := int64(r.Blocks) * s.ns.Geometry.BlockBytes(); !bytes.Equal(s.memory.Bytes()[:n], bytes.Repeat([]byte{byte(sequence)}, int(n))) {
		s.Errorf("sequence %d has other bytes", sequence)
	}
	return r.Blocks
}

// awaitMembers waits until the list of members fulfils a condition.
func awaitMembers(t *testing.T, admin pb.AdminClient, what string, ok func([]*pb.Member) bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for limit := time.After(time.Minute); ; {
		list, err := admin.ListMembers(t.Context(), &pb.ListMembersRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if ok(list.GetMembers()) {
			return
		}
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("not true in time: %s; the members are %v", what, list)
		}
	}
}

// TestOverfull: copies pass over a member that is overfull, as new sequences do. They count as copied, and
// clients find them without the drained node.
func TestOverfull(t *testing.T) {
	etcd := testetcd.Start(t, 1)
	start := func(name string, capacity int64) *testnode.Node {
		return testnode.Start(t, testnode.Options{Name: name, Etcd: etcd.Endpoints, CapacityBytes: capacity})
	}
	from, small, large := start("from", 32<<20), start("small", 8<<20), start("large", 32<<20)
	onFrom, onSmall := see(t, client.Options{Servers: []string{from.Addr}}), see(t, client.Options{Servers: []string{small.Addr}})
	const sequences, fill = 48, 96
	for i := range sequences {
		onFrom.write(i)
	}
	for i := sequences; i < fill; i++ {
		onSmall.write(i)
	}
	conn, err := client.Dial(large.Addr, client.DialOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	admin := pb.NewAdminClient(conn)
	if _, err := admin.DrainMember(t.Context(), &pb.DrainMemberRequest{Name: "from"}); err != nil {
		t.Fatal(err)
	}
	awaitMembers(t, admin, "the small node is full", func(all []*pb.Member) bool {
		return all[2].GetName() == "small" && all[2].GetUsedBytes() > all[2].GetCapacityBytes()*5/8
	})
	to := see(t, client.Options{Servers: []string{large.Addr}, Discover: true, SkipDraining: true})
	p := run(t, Options{Node: from.Storage, To: to.Store}, done)
	if p.CopiedBlocks != 2*sequences {
		t.Errorf("%+v", p)
	}
	if err := from.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	c := see(t, client.Options{Servers: []string{large.Addr}, Discover: true})
	onLarge, passed := see(t, client.Options{Servers: []string{large.Addr}}), 0
	places := []placement.Place{{Seed: placement.PlaceSeed("large"), Capacity: 32 << 20}, {Seed: placement.PlaceSeed("small"), Capacity: 8 << 20}}
	for i := range sequences {
		if placement.Home(places, c.ids(i)[0]) == 1 && onLarge.blocks(i) == 2 {
			passed++
		}
		if n := c.blocks(i); n != 2 {
			t.Errorf("%d blocks of sequence %d are found", n, i)
		}
	}
	if passed == 0 {
		t.Error("no copy passed the overfull node over")
	}
}

// TestHalfFull: the sequences of a member that has joined are copied to it also when it is more than half full and
// not overfull, although clients would then find them at their old node too.
func TestHalfFull(t *testing.T) {
	etcd := testetcd.Start(t, 1)
	start := func(name string) *testnode.Node {
		return testnode.Start(t, testnode.Options{Name: name, Etcd: etcd.Endpoints, CapacityBytes: 8 << 20})
	}
	old, joined := start("old"), start("joined")
	onOld, onJoined := see(t, client.Options{Servers: []string{old.Addr}}), see(t, client.Options{Servers: []string{joined.Addr}})
	const sequences, fill = 40, 80
	for i := range sequences {
		onOld.write(i)
	}
	for i := sequences; i < fill; i++ {
		onJoined.write(i)
	}
	conn, err := client.Dial(old.Addr, client.DialOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	awaitMembers(t, pb.NewAdminClient(conn), "both members are more than half full", func(all []*pb.Member) bool {
		return !slices.ContainsFunc(all, func(m *pb.Member) bool { return m.GetUsedBytes() <= m.GetCapacityBytes()/2 })
	})
	to := see(t, client.Options{Servers: []string{old.Addr}, Discover: true, SkipDraining: true})
	if p := run(t, Options{Node: old.Storage, To: to.Store}, done); p.CopiedBlocks != 2*sequences {
		t.Errorf("%+v", p)
	}
	places := []placement.Place{{Seed: placement.PlaceSeed("joined"), Capacity: 8 << 20}, {Seed: placement.PlaceSeed("old"), Capacity: 8 << 20}}
	moved := 0
	for i := range sequences {
		if placement.Home(places, to.ids(i)[0]) == 0 {
			moved++
			if n := onJoined.blocks(i); n != 2 {
				t.Errorf("%d blocks of sequence %d are copied to its home", n, i)
			}
		}
	}
	if moved == 0 {
		t.Error("no sequence has the member that has joined as its home")
	}
}

// TestHotKept: when a node without room for all of the blocks gets them, the ones that were read on the draining node stay, and
// the ones that were read on the new node. Of the others, which come later, some are evicted.
func TestHotKept(t *testing.T) {
	etcd := testetcd.Start(t, 1)
	start := func(name string, capacity int64) *testnode.Node {
		return testnode.Start(t, testnode.Options{Name: name, Etcd: etcd.Endpoints, CapacityBytes: capacity})
	}
	from, small := start("from", 32<<20), start("small", 8<<20)
	onFrom, onSmall := see(t, client.Options{Servers: []string{from.Addr}}), see(t, client.Options{Servers: []string{small.Addr}})
	// Three tenths of a store are kept for blocks that have been read.
	const hot, cold = 8, 100
	for i := range cold {
		onFrom.write(i)
	}
	for i := cold; i < cold+hot; i++ {
		onSmall.write(i)
	}
	for range 3 {
		for i := range hot {
			onFrom.blocks(i)
			onSmall.blocks(cold + i)
		}
	}
	run(t, Options{Node: from.Storage, To: onSmall.Store}, done)
	found := func(from, to int) (n int) {
		for i := from; i < to; i++ {
			n += onSmall.blocks(i)
		}
		return n
	}
	if n := found(0, hot); n != 2*hot {
		t.Errorf("%d blocks of %d that were read on the draining node are found", n, 2*hot)
	}
	if n := found(cold, cold+hot); n != 2*hot {
		t.Errorf("%d blocks of %d that were read on the new node are found", n, 2*hot)
	}
	if n := found(hot, cold); n == 0 || n == 2*(cold-hot) {
		t.Errorf("%d blocks of %d that were not read are found; want some", n, 2*(cold-hot))
	}
}
