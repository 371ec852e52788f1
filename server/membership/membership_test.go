package membership_test

import (
	"bufio"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/server/membership"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// ttl is short, so that tests see leases end, and long enough for a busy machine to renew them most
// of the time.
const ttl = 4 * time.Second

var geo = kv.SingleGroup(2, 16, 256)

// rig is an etcd and nodes in this process.
type rig struct {
	*testing.T
	ctx  context.Context
	etcd *testetcd.Etcd
}

func newRig(t *testing.T, members int) *rig {
	t.Helper()
	testkit.VerifyNone(t)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return &rig{t, ctx, testetcd.Start(t, members)}
}

// node is a member.
type node struct {
	*membership.Cluster
	store *storage.Node
	gates []*testetcd.Gate // one for each member of etcd
	leave func()
	move  atomic.Pointer[membership.Move]
}

// store opens a storage node, and closes it when the test ends.
func (r *rig) store() *storage.Node {
	r.Helper()
	return testnode.Storage(r)
}

// join makes a new store the member name, behind a gate of its own.
func (r *rig) join(name string) *node {
	r.Helper()
	n := r.begin(name, name+".example:7420", r.store())
	r.joined(n)
	return n
}

func (r *rig) joined(n *node) {
	r.Helper()
	select {
	case <-n.Joined():
	case <-r.ctx.Done():
		r.Fatal("a node has not joined")
	}
}

// begin begins to make a store a member.
func (r *rig) begin(name, addr string, store *storage.Node) *node {
	r.Helper()
	return r.beginUsing(name, addr, store, func() {})
}

// beginUsing is begin with a function that is called before each write of the member's record.
func (r *rig) beginUsing(name, addr string, store *storage.Node, writing func()) *node {
	r.Helper()
	var gates []*testetcd.Gate
	var endpoints []string
	for _, to := range r.etcd.Endpoints {
		g := testetcd.NewGate(r.T, to)
		gates, endpoints = append(gates, g), append(endpoints, g.Addr)
	}
	n := &node{store: store, gates: gates}
	c, err := membership.Join(membership.Options{
		Endpoints: endpoints, TTL: ttl, Node: store,
		Move: func() membership.Move {
			if m := n.move.Load(); m != nil {
				return *m
			}
			return membership.Move{}
		},
		Member: membership.Member{Name: name, Addr: addr, Store: fmt.Sprintf("%p", store), Zone: "rack-" + name, Version: "v0"},
		Details: func() membership.Details {
			return membership.Details{
				NICs:    []membership.NIC{{Name: "eth0", Addr: name + ".example:7421", Up: true, BitsPerSecond: 400e9}},
				Volumes: []membership.Volume{{Path: "/" + name, State: "ok", CapacityBytes: 64 << 20, UsedBytes: 1 << 20, Blocks: 5}},
			}
		},
		Usage: func() membership.Usage {
			writing()
			return membership.Usage{CapacityBytes: 64 << 20, UsedBytes: 1 << 20, Blocks: 5, Leases: 2}
		},
	})
	r.must(err)
	n.Cluster = c
	var once sync.Once
	n.leave = func() {
		once.Do(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			_ = c.Close(ctx) // etcd may be down
		})
	}
	r.Cleanup(n.leave)
	return n
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// await waits until the condition holds.
func (r *rig) await(what string, ok func() bool) {
	r.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-r.ctx.Done():
			r.Fatal("not reached: " + what)
		}
	}
}

// client is a client of etcd for the test itself.
func (r *rig) client() *clientv3.Client {
	r.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: r.etcd.Endpoints, Logger: zap.NewNop()})
	r.must(err)
	r.Cleanup(func() { _ = c.Close() })
	return c
}

// cut makes etcd unreachable for the node, without an end of the connections.
func (n *node) cut() {
	for _, g := range n.gates {
		g.Cut()
	}
}

// mend ends the cut. The connections have lost bytes, so they end too.
func (n *node) mend() {
	for _, g := range n.gates {
		g.Mend()
	}
}

func (n *node) epoch(name string) kv.Epoch {
	ns, err := n.store.Namespace(name)
	if err != nil {
		return 0
	}
	return ns.Epoch
}

// TestNamespaces: a change on one node has been made on all nodes when the call returns.
func TestNamespaces(t *testing.T) {
	r := newRig(t, 1)
	nodes := []*node{r.join("a"), r.join("b"), r.join("c")}
	a, b, c := nodes[0], nodes[1], nodes[2]
	each := func(what string, ok func(ns kv.Namespace, err error) bool) {
		t.Helper()
		for i, n := range nodes {
			if ns, err := n.store.Namespace("m"); !ok(ns, err) {
				t.Errorf("%s: node %d has %+v, %v", what, i, ns, err)
			}
		}
	}
	ns, err := a.CreateNamespace(r.ctx, kv.Namespace{Name: "m", Geometry: geo, Index: kv.IndexTrie, Tenant: "t", Salt: []byte("a secret salt")})
	r.must(err)
	each("created", func(got kv.Namespace, err error) bool {
		return err == nil && got.Epoch == 1 && storage.SameDefinition(got, ns)
	})
	if _, err := b.CreateNamespace(r.ctx, ns); err != nil {
		t.Errorf("the same namespace again: %v", err)
	}
	other := ns
	other.Tenant = "u"
	if _, err := b.CreateNamespace(r.ctx, other); !errors.Is(err, trie.ErrNamespaceExists) {
		t.Errorf("another definition: %v", err)
	}
	bumped, err := b.BumpEpoch(r.ctx, "m", 5, 2)
	r.must(err)
	if bumped.Old != 1 || !slices.Equal(bumped.Live, []kv.Epoch{5, 1}) || len(bumped.Retired) != 0 {
		t.Errorf("bumped %+v", bumped)
	}
	each("bumped", func(got kv.Namespace, err error) bool { return slices.Equal(got.Live(), []kv.Epoch{5, 1}) })
	if again, err := c.BumpEpoch(r.ctx, "m", 5, 1); err != nil || !slices.Equal(again.Live, []kv.Epoch{5, 1}) || len(again.Retired) != 0 {
		t.Errorf("bumped to the same epoch: %+v, %v", again, err)
	}
	if _, err := c.BumpEpoch(r.ctx, "m", 4, 1); !errors.Is(err, trie.ErrEpoch) || !errors.Is(err, storage.ErrRequest) {
		t.Errorf("bumped to an older epoch: %v", err)
	}
	if _, err := c.RetireEpoch(r.ctx, "m", 1, false, true); err != nil {
		t.Errorf("dry run: %v", err)
	}
	each("after a dry run", func(got kv.Namespace, err error) bool { return got.IsLive(1) })
	_, err = c.RetireEpoch(r.ctx, "m", 1, false, false)
	r.must(err)
	each("retired", func(got kv.Namespace, err error) bool { return slices.Equal(got.Live(), []kv.Epoch{5}) })
	if _, err = a.SetQuota(r.ctx, "m", 1); !errors.Is(err, storage.ErrRequest) {
		t.Errorf("a quota below one block: %v", err)
	}
	_, err = a.SetQuota(r.ctx, "m", 8<<20)
	r.must(err)
	each("quota", func(got kv.Namespace, err error) bool { return got.QuotaBytes == 8<<20 })
	_, err = b.DeleteNamespace(r.ctx, "m", false)
	r.must(err)
	stored, err := r.client().Get(r.ctx, "/penstock/namespaces/m")
	r.must(err)
	if value := string(stored.Kvs[0].Value); strings.Contains(value, base64.StdEncoding.EncodeToString([]byte("a secret salt"))) || len(value) > 200 {
		t.Errorf("the record of the deleted namespace is %s; want one of its name and its last epoch, without the salt", value)
	}
	each("deleted", func(_ kv.Namespace, err error) bool { return errors.Is(err, trie.ErrNamespaceUnknown) })
	if _, err := a.BumpEpoch(r.ctx, "m", 0, 1); !errors.Is(err, trie.ErrNamespaceUnknown) {
		t.Errorf("bump of a deleted namespace: %v", err)
	}
	_, err = c.CreateNamespace(r.ctx, kv.Namespace{Name: "m", Geometry: geo, Index: kv.IndexFlat})
	r.must(err)
	each("created again, above the last epoch", func(got kv.Namespace, err error) bool {
		return err == nil && got.Epoch == 6 && got.Index == kv.IndexFlat
	})
	members, err := a.Members(r.ctx)
	r.must(err)
	if len(members) != 3 || members[1].Name != "b" || members[1].Zone != "rack-b" || members[1].State != membership.Serving || members[1].CapacityBytes != 64<<20 {
		t.Errorf("members %+v", members)
	}
}

// TestPins: a pin keeps an epoch live on its own node only, until the epoch is retired by force from
// any node.
func TestPins(t *testing.T) {
	r := newRig(t, 1)
	a, b := r.join("a"), r.join("b")
	_, err := a.CreateNamespace(r.ctx, kv.Namespace{Name: "m", Geometry: geo, Index: kv.IndexTrie})
	r.must(err)
	_, _, err = b.store.PinEpoch(t.Context(), "rollout", "m", 1, time.Minute)
	r.must(err)
	_, err = a.BumpEpoch(r.ctx, "m", 0, 1)
	r.must(err)
	live := func(n *node, want ...kv.Epoch) {
		t.Helper()
		if ns, err := n.store.Namespace("m"); err != nil || !slices.Equal(ns.Live(), want) {
			t.Errorf("live are %d, %v; want %d", ns.Live(), err, want)
		}
	}
	live(a, 2)
	live(b, 2, 1)
	if _, err := b.RetireEpoch(r.ctx, "m", 1, false, false); !errors.Is(err, trie.ErrPinned) {
		t.Errorf("retired a pinned epoch: %v", err)
	}
	_, err = a.RetireEpoch(r.ctx, "m", 1, true, false)
	r.must(err)
	live(b, 2)
}

// TestBringAlong: the first node's namespaces become the cluster's. A node that was away during a
// bump and a deletion, or that comes from another cluster, drops what differs.
func TestBringAlong(t *testing.T) {
	r := newRig(t, 1)
	first := r.store()
	for _, name := range []string{"m", "gone", "other"} {
		_, err := first.CreateNamespace(r.ctx, kv.Namespace{Name: name, Geometry: geo, Index: kv.IndexTrie, Epoch: 3})
		r.must(err)
	}
	a := r.begin("a", "a.example:7420", first)
	r.joined(a)
	b := r.join("b")
	if b.epoch("m") != 3 || b.epoch("gone") != 3 {
		t.Errorf("the second node has epochs %d and %d; want 3", b.epoch("m"), b.epoch("gone"))
	}
	a.leave()
	_, err := b.BumpEpoch(r.ctx, "m", 0, 1)
	r.must(err)
	_, err = b.DeleteNamespace(r.ctx, "gone", false)
	r.must(err)
	_, err = first.BumpEpoch(r.ctx, "other", 9, 1) // as a node that stands alone
	r.must(err)
	if err := a.Admit("m"); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a node that has left: %v", err)
	}
	again := r.begin("a", "a.example:7420", first)
	r.joined(again)
	if again.epoch("m") != 4 || again.epoch("gone") != 0 || again.epoch("other") != 3 {
		t.Errorf("the node has epochs %d, %d and %d; want 4, none and 3", again.epoch("m"), again.epoch("gone"), again.epoch("other"))
	}
}

// TestDeletedAlone: names that a node has deleted before it was a member are known to the cluster: a new namespace of such a
// name begins above the last epoch, on whichever node it is created. After the node has left the cluster, the same holds for
// the names that the cluster deleted.
func TestDeletedAlone(t *testing.T) {
	r := newRig(t, 1)
	def := func(name string, epoch kv.Epoch) kv.Namespace {
		return kv.Namespace{Name: name, Geometry: geo, Index: kv.IndexTrie, Epoch: epoch}
	}
	first := r.store()
	for _, name := range []string{"m", "n"} {
		_, err := first.CreateNamespace(r.ctx, def(name, 5))
		r.must(err)
		_, err = first.DeleteNamespace(r.ctx, name, false)
		r.must(err)
	}
	_, err := first.CreateNamespace(r.ctx, def("k", 3))
	r.must(err)
	a := r.begin("a", "a.example:7420", first)
	r.joined(a)
	b := r.join("b")
	for name, n := range map[string]*node{"m": b, "n": a} {
		ns, err := n.CreateNamespace(r.ctx, def(name, 0))
		r.must(err)
		if ns.Epoch != 6 || a.epoch(name) != 6 || b.epoch(name) != 6 {
			t.Errorf("%s begins at epoch %d, and the nodes have %d and %d; want 6", name, ns.Epoch, a.epoch(name), b.epoch(name))
		}
	}
	_, err = b.DeleteNamespace(r.ctx, "k", false)
	r.must(err)
	a.leave()
	ns, err := first.CreateNamespace(r.ctx, def("k", 0)) // as a node that stands alone
	r.must(err)
	if ns.Epoch != 4 {
		t.Errorf("alone again, k begins at epoch %d; want 4", ns.Epoch)
	}
}

// TestReborn: a namespace is deleted and created again while a node is cut off from etcd. The node serves the old namespace
// to nobody after the deletion has returned, and has the new one, without the old blocks, when it serves again.
func TestReborn(t *testing.T) {
	r := newRig(t, 3)
	a, b := r.join("a"), r.join("b")
	def := kv.Namespace{Name: "m", Geometry: geo, Index: kv.IndexTrie}
	old, err := a.CreateNamespace(r.ctx, def)
	r.must(err)
	r.await("the node serves", func() bool { return b.Admit("m") == nil })
	b.cut()
	_, err = a.DeleteNamespace(r.ctx, "m", false)
	if b.Admit("m") == nil {
		t.Error("the deletion has returned, and a node that is cut off serves the namespace")
	}
	r.must(err)
	again, err := a.CreateNamespace(r.ctx, def)
	r.must(err)
	if again.Epoch <= old.Epoch {
		t.Errorf("epoch %d after %d", again.Epoch, old.Epoch)
	}
	if b.epoch("m") != old.Epoch || b.Admit("m") == nil {
		t.Errorf("the node that is cut off has epoch %d, and Admit returns %v", b.epoch("m"), b.Admit("m"))
	}
	b.mend()
	r.await("the node serves again", func() bool { return b.Admit("m") == nil })
	now, err := b.store.Namespace("m")
	r.must(err)
	if now.Epoch != again.Epoch || now.IsLive(old.Epoch) {
		t.Errorf("the node serves %+v; want the epoch %d only", now, again.Epoch)
	}
}

// TestCutOff: a bump waits for a node that etcd cannot reach until the node's lease has ended, and
// the node has stopped to serve before. When the node is back, it has the new epoch.
func TestCutOff(t *testing.T) {
	r := newRig(t, 1)
	a, b := r.join("a"), r.join("b")
	_, err := a.CreateNamespace(r.ctx, kv.Namespace{Name: "m", Geometry: geo, Index: kv.IndexTrie})
	r.must(err)
	r.await("the node serves", func() bool { return b.Admit("m") == nil })
	b.cut()
	_, err = a.BumpEpoch(r.ctx, "m", 0, 1)
	if admitted := b.Admit("m"); admitted == nil {
		t.Error("the bump has returned, and a node that is cut off serves the old epoch")
	}
	r.must(err)
	if b.epoch("m") != 1 {
		t.Errorf("the node that is cut off has epoch %d", b.epoch("m"))
	}
	b.mend()
	r.await("the node serves again", func() bool { return b.Admit("m") == nil })
	if b.epoch("m") != 2 {
		t.Errorf("the node serves with epoch %d", b.epoch("m"))
	}
}

// TestBumpsRandom: nodes join, leave, are cut off and come back while a namespace is bumped. A node
// that serves at a moment has at least the epoch of the last bump that had returned before.
func TestBumpsRandom(t *testing.T) {
	r := newRig(t, 1)
	admin := r.join("admin")
	_, err := admin.CreateNamespace(r.ctx, kv.Namespace{Name: "m", Geometry: geo, Index: kv.IndexTrie})
	r.must(err)
	var bumped, served atomic.Int64
	stop := make(chan struct{})
	var wg sync.WaitGroup
	watch := func(n *node, left chan struct{}) {
		tick := time.NewTicker(200 * time.Microsecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-left:
				return
			case <-tick.C:
			}
			before := kv.Epoch(bumped.Load())
			if n.Admit("m") != nil {
				continue
			}
			epoch := n.epoch("m")
			if n.Admit("m") == nil {
				served.Add(1)
				if epoch < before {
					t.Errorf("a node serves with epoch %d; a bump to %d has returned", epoch, before)
					return
				}
			}
		}
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for i := range 3 {
		rnd := rand.New(rand.NewPCG(seed, uint64(i)))
		name, store := fmt.Sprintf("n%d", i), r.store()
		wg.Go(func() {
			for life := 0; ; life++ {
				n := r.begin(name, name+".example:7420", store)
				left := make(chan struct{})
				wg.Go(func() { watch(n, left) })
				for range 1 + rnd.IntN(3) {
					select {
					case <-stop:
						close(left)
						return
					case <-time.After(time.Duration(rnd.IntN(400)) * time.Millisecond):
					}
					n.cut()
					select {
					case <-stop:
					case <-time.After(time.Duration(rnd.IntN(int(ttl)))):
					}
					n.mend()
				}
				close(left)
				n.leave()
			}
		})
	}
	bumps := testkit.Rounds(12, 4)
	for round := 0; round < bumps || served.Load() == 0; round++ { // on a busy machine no node may have joined before the last bump
		b, err := admin.BumpEpoch(r.ctx, "m", 0, 1)
		if status.Code(err) == codes.DeadlineExceeded || status.Code(err) == codes.Unavailable {
			continue // made or not; in any case not promised
		}
		r.must(err)
		bumped.Store(int64(b.Live[0]))
	}
	close(stop)
	wg.Wait()
	t.Logf("%d bumps; nodes were found serving %d times", bumped.Load(), served.Load())
}

// TestBumpDuringJoin: a node that joins does not serve the epoch that it read before a bump, although
// the bump does not wait for it.
func TestBumpDuringJoin(t *testing.T) {
	r := newRig(t, 1)
	a := r.join("a")
	_, err := a.CreateNamespace(r.ctx, kv.Namespace{Name: "m", Geometry: geo, Index: kv.IndexTrie})
	r.must(err)
	writes := 0
	b := r.beginUsing("b", "b.example:7420", r.store(), func() {
		if writes++; writes == 2 { // the first record has the state joining, the second serving
			if _, err := a.BumpEpoch(r.ctx, "m", 0, 1); err != nil {
				t.Error(err)
			}
		}
	})
	r.joined(b)
	if e := b.epoch("m"); e != 2 {
		t.Errorf("a node that has joined has epoch %d", e)
	}
}

// TestSlowJoin: a node whose lease is renewed while its transaction waits does not serve the epoch
// that a bump has ended meanwhile.
func TestSlowJoin(t *testing.T) {
	r := newRig(t, 1)
	a := r.join("a")
	_, err := a.CreateNamespace(r.ctx, kv.Namespace{Name: "m", Geometry: geo, Index: kv.IndexTrie})
	r.must(err)
	writes, bumped, renewed := 0, make(chan struct{}), make(chan struct{})
	b := r.beginUsing("b", "b.example:7420", r.store(), func() {
		if writes++; writes == 2 { // the first record has the state joining, the second serving
			if _, err := a.BumpEpoch(r.ctx, "m", 0, 1); err != nil {
				t.Error(err)
			}
			close(bumped)
			<-renewed
		}
	})
	<-bumped
	for end := time.After(ttl); ; {
		select {
		case <-end: // some renewals later
			close(renewed)
			r.joined(b)
			if e := b.epoch("m"); e != 2 {
				t.Errorf("a node that has joined has epoch %d", e)
			}
			return
		case <-time.After(time.Millisecond):
		}
		if b.Admit("m") == nil {
			close(renewed)
			t.Fatalf("a node that joins serves epoch %d", b.epoch("m"))
		}
	}
}

// TestNames: a name belongs to one store. A process that follows a killed one on the same volumes
// takes the name over at once, with another address too.
func TestNames(t *testing.T) {
	r := newRig(t, 1)
	a := r.join("a")
	var log testkit.Log
	c, err := membership.Join(membership.Options{
		Endpoints: r.etcd.Endpoints, TTL: ttl, Node: r.store(), Logger: slog.New(slog.NewTextHandler(&log, nil)),
		Member: membership.Member{Name: "a", Addr: "a.example:7420", Store: "other volumes"},
	})
	r.must(err)
	log.Await("give each node its own name")
	if c.Admit("") == nil {
		t.Error("a node with another node's name serves")
	}
	r.must(c.Close(r.ctx))
	r.await("the first node serves", func() bool { return a.Admit("") == nil })
	a.cut() // etcd does not see this process end
	r.joined(r.begin("a", "elsewhere.example:7420", a.store))
}

// TestRecordLost: a node whose record is deleted by hand, so that no bump would wait for it, stops to
// serve and joins again.
func TestRecordLost(t *testing.T) {
	r := newRig(t, 1)
	a := r.join("a")
	_, err := r.client().Delete(r.ctx, "/penstock/members/a")
	r.must(err)
	r.await("the node stops", func() bool { return a.Admit("") != nil })
	r.await("the node is a member again", func() bool {
		all, err := a.Members(r.ctx)
		r.must(err)
		return len(all) == 1 && a.Admit("") == nil
	})
}

// TestBlocked: a node that cannot apply a record refuses that namespace only, and serves it when the
// record can be applied.
func TestBlocked(t *testing.T) {
	r := newRig(t, 1)
	a := r.join("a")
	for _, name := range []string{"m", "n"} {
		_, err := a.CreateNamespace(r.ctx, kv.Namespace{Name: name, Geometry: geo, Index: kv.IndexTrie})
		r.must(err)
	}
	etcd := r.client()
	const key = "/penstock/namespaces/m"
	was, err := etcd.Get(r.ctx, key)
	r.must(err)
	_, err = etcd.Put(r.ctx, key, `{"version":7}`)
	r.must(err)
	r.await("the namespace is refused", func() bool {
		err := a.Admit("m")
		return status.Code(err) == codes.ResourceExhausted && strings.Contains(err.Error(), "version 7")
	})
	r.await("the other namespace is served", func() bool { return a.Admit("n") == nil && a.Admit("m") != nil })
	if n := a.Refused(); n != 1 {
		t.Errorf("%d namespaces are refused", n)
	}
	_, err = etcd.Put(r.ctx, key, string(was.Kvs[0].Value))
	r.must(err)
	r.await("the namespace is served", func() bool { return a.Admit("m") == nil })
}

// TestEtcdFails: the death of one of three members of etcd is not noticed beyond the length of a
// lease, a majority's stops the nodes, and its return brings them back with their namespaces.
func TestEtcdFails(t *testing.T) {
	r := newRig(t, 3)
	a, b := r.join("a"), r.join("b")
	_, err := a.CreateNamespace(r.ctx, kv.Namespace{Name: "m", Geometry: geo, Index: kv.IndexTrie})
	r.must(err)
	r.etcd.Kill(0) // both nodes are connected to it first
	bump := func() (to kv.Epoch) {
		r.await("a bump", func() bool {
			b, err := a.BumpEpoch(r.ctx, "m", 0, 1)
			if err == nil {
				to = b.Live[0]
			}
			return err == nil
		})
		return to
	}
	to := bump()
	if b.epoch("m") < to && b.Admit("m") == nil {
		t.Errorf("a node serves with epoch %d after the bump to %d", b.epoch("m"), to)
	}
	r.etcd.Kill(1)
	r.await("no node serves", func() bool { return a.Admit("") != nil && b.Admit("") != nil })
	ctx, cancel := context.WithTimeout(r.ctx, time.Second)
	defer cancel()
	if _, err := a.BumpEpoch(ctx, "m", 0, 1); status.Code(err) != codes.Unavailable && status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("a bump without a majority: %v", err)
	}
	r.etcd.Run(0)
	r.etcd.Run(1)
	r.await("both nodes serve", func() bool { return a.Admit("m") == nil && b.Admit("m") == nil })
	to = bump()
	r.await("both nodes serve the new epoch", func() bool {
		return a.Admit("m") == nil && b.Admit("m") == nil && a.epoch("m") >= to && b.epoch("m") >= to
	})
}

// TestLateEtcd: a node that starts before etcd joins when etcd runs. With a wrong password it says so,
// and does not serve.
func TestLateEtcd(t *testing.T) {
	r := newRig(t, 1)
	etcd := r.client()
	_, err := etcd.UserAdd(r.ctx, "root", "right")
	r.must(err)
	_, err = etcd.UserGrantRole(r.ctx, "root", "root")
	r.must(err)
	_, err = etcd.AuthEnable(r.ctx)
	r.must(err)
	r.etcd.Kill(0)
	join := func(name, password string, log *testkit.Log) *membership.Cluster {
		c, err := membership.Join(membership.Options{
			Endpoints: r.etcd.Endpoints, TTL: ttl, Node: r.store(), Username: "root", Password: password,
			Member: membership.Member{Name: name, Addr: name + ".example:7420"}, Logger: slog.New(slog.NewTextHandler(log, nil)),
		})
		r.must(err)
		t.Cleanup(func() { _ = c.Close(context.Background()) })
		return c
	}
	var rightLog, wrongLog testkit.Log
	right, wrong := join("a", "right", &rightLog), join("b", "wrong", &wrongLog)
	rightLog.Await("not a member of the cluster")
	ctx, cancel := context.WithTimeout(r.ctx, time.Second)
	defer cancel()
	if _, err := right.Members(ctx); status.Code(err) != codes.Unavailable {
		t.Errorf("members without etcd: %v", err)
	}
	r.etcd.Run(0)
	select {
	case <-right.Joined():
	case <-r.ctx.Done():
		t.Fatal("the node has not joined")
	}
	wrongLog.Await("authentication failed")
	if wrong.Admit("") == nil {
		t.Error("a node with a wrong password serves")
	}
}

// TestStop: the list of members shows a node that stops, and not one that has left.
func TestStop(t *testing.T) {
	r := newRig(t, 1)
	a, b := r.join("a"), r.join("b")
	states := func() map[string]membership.State {
		all, err := a.Members(r.ctx)
		r.must(err)
		m := make(map[string]membership.State)
		for _, x := range all {
			m[x.Name] = x.State
		}
		return m
	}
	b.Stop()
	r.await("the node stops", func() bool {
		s := states()
		return s["a"] == membership.Serving && s["b"] == membership.Stopping
	})
	b.leave()
	if s := states(); len(s) != 1 {
		t.Errorf("states %v after a node has left", s)
	}
}

// TestDrainTogether: of two orders at the same time that would leave no member for new sequences, one is
// refused.
func TestDrainTogether(t *testing.T) {
	r := newRig(t, 1)
	a, b := r.join("a"), r.join("b")
	for range 10 {
		errs := make([]error, 2)
		var wg sync.WaitGroup
		wg.Go(func() { errs[0] = a.DrainMember(r.ctx, "b", membership.Drain{}) })
		wg.Go(func() { errs[1] = b.DrainMember(r.ctx, "a", membership.Drain{}) })
		wg.Wait()
		taken := 0
		for i, err := range errs {
			if err == nil {
				taken++
				r.must(a.UndrainMember(r.ctx, []string{"b", "a"}[i]))
			} else if status.Code(err) != codes.FailedPrecondition {
				t.Error(err)
			}
		}
		if taken != 1 {
			t.Errorf("%d of two orders are taken", taken)
		}
	}
}

// TestDrainMember: an order to drain a member is in the list of members at once, reaches the member, and
// holds for its next process, until it is taken back. The progress of an earlier order is not in the list.
func TestDrainMember(t *testing.T) {
	r := newRig(t, 1)
	a, b := r.join("a"), r.join("b")
	member := func(name string) membership.Member {
		t.Helper()
		all, err := a.Members(r.ctx)
		r.must(err)
		for _, m := range all {
			if m.Name == name {
				return m
			}
		}
		return membership.Member{}
	}
	refused := func(err error, want codes.Code) {
		t.Helper()
		if status.Code(err) != want {
			t.Errorf("%v; want %v", err, want)
		}
	}
	refused(a.DrainMember(r.ctx, "x", membership.Drain{}), codes.NotFound)
	refused(a.UndrainMember(r.ctx, "x"), codes.NotFound)
	refused(a.DrainMember(r.ctx, "b", membership.Drain{BytesPerSecond: -1}), codes.InvalidArgument)
	first := membership.Drain{BytesPerSecond: 7, Since: time.Unix(1, 1).UTC()}
	r.must(a.DrainMember(r.ctx, "b", first))
	if s := member("b").State; s != membership.Draining {
		t.Errorf("after the order the state is %s", s)
	}
	refused(a.DrainMember(r.ctx, "a", membership.Drain{}), codes.FailedPrecondition) // no other member would be left
	ordered := func(n *node, want *membership.Drain) func() bool {
		return func() bool {
			d, _ := n.Draining()
			return d == want || d != nil && want != nil && *d == *want
		}
	}
	r.await("the order reaches the node", ordered(b, &first))
	_, changed := b.Draining()
	second := membership.Drain{Since: time.Unix(2, 0).UTC()}
	r.must(a.DrainMember(r.ctx, "b", second))
	r.await("the next order reaches the node", ordered(b, &second))
	select {
	case <-changed:
	default:
		t.Error("the channel of the first order is open")
	}
	b.move.Store(&membership.Move{Order: first.ID(), Phase: membership.MoveDone})
	b.Moved()
	b.Stop()
	state := func() membership.State { return member("b").State }
	if s := state(); s != membership.Draining {
		t.Errorf("a draining node that stops is %s", s)
	}
	if m := member("b").Move; m != (membership.Move{}) {
		t.Errorf("the list has the progress of an earlier order: %+v", m)
	}
	want := membership.Move{Order: second.ID(), Phase: membership.MoveCopying, Blocks: 3}
	b.move.Store(&want)
	b.Moved()
	r.await("the progress is in the list", func() bool { return member("b").Move == want })

	b.leave()
	again := r.join("b")
	if s := state(); s != membership.Draining {
		t.Errorf("after a restart the state is %s", s)
	}
	r.await("the order reaches the next process", ordered(again, &second))
	r.must(again.UndrainMember(r.ctx, "b"))
	if s := state(); s != membership.Serving {
		t.Errorf("after the end of the order the state is %s", s)
	}
	r.await("the node has no order", ordered(again, nil))
}

// TestRecordsTogether: changes that arrive while a member writes its record have one record together, and changes
// that wait at the same time have one watch together. So n changes at the same time cost a member few writes and etcd
// one watch, and not n.
func TestRecordsTogether(t *testing.T) {
	r := newRig(t, 1)
	a := r.join("a")
	var hold atomic.Bool
	entered, release := make(chan struct{}, 1), make(chan struct{})
	b := r.beginUsing("b", "b.example:7420", r.store(), func() {
		if hold.CompareAndSwap(true, false) {
			entered <- struct{}{}
			<-release
		}
	})
	r.joined(b)
	record := func() int64 {
		t.Helper()
		resp, err := r.client().Get(r.ctx, "/penstock/members/b")
		r.must(err)
		return resp.Kvs[0].Version
	}
	for i := range 3 { // b's watch has begun when the second one arrives
		_, err := a.CreateNamespace(r.ctx, kv.Namespace{Name: fmt.Sprint("first", i), Geometry: geo, Index: kv.IndexTrie})
		r.must(err)
	}
	before, watches := record(), r.watches()
	hold.Store(true)
	const changes = 40
	var g errgroup.Group
	for i := range changes {
		g.Go(func() error {
			_, err := a.CreateNamespace(r.ctx, kv.Namespace{Name: fmt.Sprint("ns", i), Geometry: geo, Index: kv.IndexTrie})
			return err
		})
	}
	<-entered
	r.await("b to apply all changes while it writes its record", func() bool { return len(b.store.Namespaces()) == 3+changes })
	if n := r.watches() - watches; n > changes/4 {
		t.Errorf("%d changes that wait have %d watches", changes, n)
	}
	close(release)
	r.must(g.Wait())
	if n := record() - before; n > 4 {
		t.Errorf("b has written its record %d times for %d changes at the same time", n, changes)
	}
}

// watches returns the number of watches that etcd has.
func (r *rig) watches() int {
	r.Helper()
	req, err := http.NewRequestWithContext(r.ctx, http.MethodGet, "http://"+r.etcd.Endpoints[0]+"/metrics", nil)
	r.must(err)
	resp, err := http.DefaultClient.Do(req)
	r.must(err)
	defer resp.Body.Close()
	const name = "etcd_debugging_mvcc_watcher_total "
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if value, ok := strings.CutPrefix(lines.Text(), name); ok {
			n, err := strconv.ParseFloat(value, 64)
			r.must(err)
			return int(n)
		}
	}
	r.Fatal("etcd has no metric " + name)
	return 0
}

// TestEnsureNamespace: members that create a namespace at once, each with a salt of its own, all get the
// salt of the first transaction. A namespace that was deleted gets another salt.
func TestEnsureNamespace(t *testing.T) {
	r := newRig(t, 1)
	nodes := []*node{r.join("a"), r.join("b"), r.join("c")}
	for i := range 8 {
		def := kv.Namespace{Name: fmt.Sprint("m", i), Geometry: geo, Index: kv.IndexTrie}
		got, errs := make([]string, len(nodes)), make([]error, len(nodes))
		var wg sync.WaitGroup
		for j, n := range nodes {
			wg.Go(func() {
				ns, err := n.EnsureNamespace(r.ctx, def, func() ([]byte, error) { return []byte{'s', byte('0' + j)}, nil })
				got[j], errs[j] = string(ns.Salt), err
			})
		}
		wg.Wait()
		r.must(errors.Join(errs...))
		for _, n := range nodes {
			ns, err := n.store.Namespace(def.Name)
			r.must(err)
			got = append(got, string(ns.Salt))
		}
		if got[0] == "" || len(slices.Compact(got)) != 1 {
			t.Fatalf("salts %q", got)
		}
	}
	a := nodes[0]
	def := kv.Namespace{Name: "m0", Geometry: geo, Index: kv.IndexTrie}
	_, err := a.DeleteNamespace(r.ctx, def.Name, false)
	r.must(err)
	ns, err := a.EnsureNamespace(r.ctx, def, func() ([]byte, error) { return []byte("new"), nil })
	if err != nil || string(ns.Salt) != "new" || ns.Epoch != 2 {
		t.Errorf("created again: %+v, %v", ns, err)
	}
	def.Name = "m1"
	refused := errors.New("no salt")
	fail := func() ([]byte, error) { return nil, refused }
	if _, err := a.EnsureNamespace(r.ctx, def, fail); err != nil {
		t.Errorf("an existing namespace needs a new salt: %v", err)
	}
	def.Name = "absent"
	if _, err := a.EnsureNamespace(r.ctx, def, fail); !errors.Is(err, refused) {
		t.Errorf("a new namespace without a salt: %v", err)
	}
	def.Name, def.Index = "m1", kv.IndexFlat
	if _, err := a.EnsureNamespace(r.ctx, def, fail); !errors.Is(err, trie.ErrNamespaceExists) {
		t.Errorf("another index kind: %v", err)
	}
}

// TestFollowed: two memberships of one storage node share a Followed. The second one does not read the namespaces again, and the node
// still gets the changes that were made after the first one read them. A change ends when both memberships have applied it.
func TestFollowed(t *testing.T) {
	r := newRig(t, 1)
	other := r.join("other")
	store, followed := r.store(), new(membership.Followed)
	join := func(name string) *node {
		c, err := membership.Join(membership.Options{
			Endpoints: r.etcd.Endpoints, TTL: ttl, Node: store, Followed: followed,
			Member: membership.Member{Name: name, Addr: name + ".example:7420", Store: name, Version: "v0"},
		})
		r.must(err)
		n := &node{Cluster: c, store: store}
		n.leave = sync.OnceFunc(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			if err := c.Close(ctx); err != nil {
				r.Error(err)
			}
		})
		r.Cleanup(n.leave)
		r.joined(n)
		return n
	}
	bump := func() kv.Epoch {
		b, err := other.BumpEpoch(r.ctx, "m", 0, 1)
		r.must(err)
		return b.Live[0]
	}
	_, err := other.CreateNamespace(r.ctx, kv.Namespace{Name: "m", Geometry: geo, Index: kv.IndexTrie})
	r.must(err)
	first := join("first")
	if want := bump(); first.epoch("m") != want {
		t.Errorf("epoch %d after the bump to %d", first.epoch("m"), want)
	}
	second := join("second")
	if want := bump(); second.epoch("m") != want {
		t.Errorf("epoch %d after the bump to %d, with two memberships", second.epoch("m"), want)
	}
	first.leave()
	second.leave()
	want := bump()
	_, err = other.CreateNamespace(r.ctx, kv.Namespace{Name: "late", Geometry: geo, Index: kv.IndexTrie})
	r.must(err)
	if store.Namespaces()[0].Name != "m" || join("third").epoch("m") != want || len(store.Namespaces()) != 2 {
		t.Errorf("after joining: %+v; want epoch %d of m, and late", store.Namespaces(), want)
	}
}
