package kvevents

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/zmtp/zmtptest"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// hangs is the time limit of a wait for an event that must occur. Only a failing test
// reaches it.
const hangs = 2 * time.Minute

// host is a storage node, a client that writes to it, and a proxy in front of it that can
// be cut.
type host struct {
	t     *testing.T
	admin pb.AdminClient
	store *client.Store
	wire  *wire
}

func newHost(t *testing.T, o testnode.Options) *host {
	t.Helper()
	n := testnode.Start(t, o)
	engine, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	h := &host{t: t, wire: newWire(t, n.Addr)}
	h.store, err = client.Open(t.Context(), client.Options{Servers: []string{n.Addr}, Engine: engine, DialTimeout: time.Minute})
	if err != nil {
		t.Fatal(errors.Join(err, engine.Close()))
	}
	t.Cleanup(func() {
		if err := errors.Join(h.store.Close(), engine.Close()); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	h.admin = dial(t, n.Addr).Admin
	return h
}

// dial connects a follower to an address.
func dial(t *testing.T, addr string) Node {
	t.Helper()
	conn, err := client.Dial(addr, client.DialOptions{Timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return Node{Server: addr, Cache: pb.NewCacheClient(conn), Admin: pb.NewAdminClient(conn)}
}

// must returns the result of a call, or fails the test if the call returned an error.
func must[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func (h *host) namespace(name string, index kv.IndexKind) {
	h.t.Helper()
	must[*pb.Namespace](h.t)(h.admin.CreateNamespace(h.t.Context(), &pb.CreateNamespaceRequest{
		Namespace: api.NamespaceProto(kv.Namespace{Name: name, Geometry: kv.SingleGroup(1, 16, 16), Index: index}),
	}))
}

func (h *host) bump(name string) {
	h.t.Helper()
	must[*pb.BumpEpochResponse](h.t)(h.admin.BumpEpoch(h.t.Context(), &pb.BumpEpochRequest{Name: name}))
}

// epochs bumps a namespace, keeping some epochs live, or retires one of them.
func (h *host) epochs(name string, rng *rand.Rand) {
	h.t.Helper()
	live := must[*pb.Namespace](h.t)(h.admin.GetNamespace(h.t.Context(), &pb.GetNamespaceRequest{Name: name})).GetLive()
	if e := live[rng.IntN(len(live))]; e != live[0] {
		must[*pb.RetireEpochResponse](h.t)(h.admin.RetireEpoch(h.t.Context(), &pb.RetireEpochRequest{Name: name, Epoch: e.GetEpoch()}))
		return
	}
	must[*pb.BumpEpochResponse](h.t)(h.admin.BumpEpoch(h.t.Context(), &pb.BumpEpochRequest{Name: name, Keep: 1 + uint32(rng.IntN(3))}))
}

func (h *host) drop(name string) {
	h.t.Helper()
	must[*pb.DeleteNamespaceResponse](h.t)(h.admin.DeleteNamespace(h.t.Context(), &pb.DeleteNamespaceRequest{Name: name}))
}

// put stores blocks in the newest epoch. In a chained namespace each is the child of the
// block before it.
func (h *host) put(name string, ids ...kv.BlockID) {
	h.t.Helper()
	h.putIn(name, 0, ids...)
}

// putIn stores blocks in the live epoch that is age epochs older than the newest, or in
// the oldest.
func (h *host) putIn(name string, age int, ids ...kv.BlockID) {
	h.t.Helper()
	live := must[*pb.Namespace](h.t)(h.admin.GetNamespace(h.t.Context(), &pb.GetNamespaceRequest{Name: name})).GetLive()
	ns := must[kv.Namespace](h.t)(h.store.Namespace(h.t.Context(), name))
	from := must[*client.Memory](h.t)(h.store.Register(make([]byte, int64(len(ids))*ns.Geometry.PieceBytes(0))))
	defer from.Close(context.Background())
	epoch := kv.Epoch(live[min(age, len(live)-1)].GetEpoch())
	w, err := h.store.Write(h.t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, From: from, Epoch: epoch})
	if err != nil || w.Outcome != client.Hit || w.Blocks != len(ids) {
		h.t.Fatalf("write of %d blocks to epoch %d of %s: %+v, %v", len(ids), epoch, name, w, err)
	}
}

// list returns the blocks of the node in a namespace.
func (h *host) list(name string) map[kv.BlockID]bool {
	h.t.Helper()
	held := make(map[kv.BlockID]bool)
	for cursor := []byte(nil); ; {
		r := must[*pb.ListBlocksResponse](h.t)(h.admin.ListBlocks(h.t.Context(), &pb.ListBlocksRequest{Namespace: name, Cursor: cursor, Limit: 7}))
		for _, b := range r.GetBlocks() {
			held[kv.BlockID(b.GetId())] = true
		}
		if cursor = r.GetCursor(); len(cursor) == 0 {
			return held
		}
	}
}

// wire is a TCP proxy that can be cut and connected to another node.
type wire struct {
	l  net.Listener
	wg sync.WaitGroup

	mu     sync.Mutex
	target string // empty if the proxy is cut
	conns  []net.Conn
}

func newWire(t *testing.T, target string) *wire {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{l: l, target: target}
	w.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			w.wg.Go(func() { w.carry(c) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		w.join("")
		w.wg.Wait()
	})
	return w
}

func (w *wire) addr() string { return w.l.Addr().String() }

// join closes all connections and directs later ones to another target. The target "" cuts
// the proxy.
func (w *wire) join(target string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.target = target
	for _, c := range w.conns {
		_ = c.Close()
	}
	w.conns = nil
}

// reader hides all methods of a connection but Read. With the others, io.Copy would splice
// through pipes, which it keeps open.
type reader struct{ io.Reader }

func (w *wire) carry(near net.Conn) {
	defer near.Close()
	w.mu.Lock()
	far, err := net.Dial("tcp", w.target)
	if err != nil {
		w.mu.Unlock()
		return
	}
	defer far.Close()
	w.conns = append(w.conns, near, far)
	w.mu.Unlock()
	var back sync.WaitGroup
	back.Go(func() {
		_, _ = io.Copy(near, reader{far})
		_ = near.Close()
	})
	_, _ = io.Copy(far, reader{near})
	_ = far.Close()
	back.Wait()
}

// show is a Follower and its Publisher, with a subscriber that has received all messages.
type show struct {
	t        *testing.T
	pub      *Publisher
	endpoint string
	reports  chan Report
	joined   chan struct{} // one element for each subscription that the Publisher has received
	view     *view
}

// newShow follows hosts. It sets Nodes, Publisher and Report of o.
func newShow(t *testing.T, o Options, hosts ...*host) *show {
	t.Helper()
	s := &show{t: t, reports: make(chan Report, 1000), joined: make(chan struct{}, 1000)}
	var f *Follower
	s.pub = NewPublisher(PublisherOptions{Missed: func(a net.Addr, lost uint64) {
		f.Missed(a, lost)
		if lost == 0 {
			s.joined <- struct{}{}
		}
	}})
	for _, h := range hosts {
		o.Nodes = append(o.Nodes, dial(t, h.wire.addr()))
	}
	o.Publisher, o.Report = s.pub, func(r Report) { s.reports <- r }
	if o.Topic == "" {
		o.Topic = DefaultTopic
	}
	o.Wire.Medium = MediumStorage
	f, err := NewFollower(o)
	if err != nil {
		t.Fatal(err)
	}
	s.endpoint = must[string](t)(s.pub.Listen(t.Context(), "tcp://127.0.0.1:0"))
	s.view = s.subscribe("")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- f.Run(ctx) }()
	stop := func() error {
		cancel()
		err := <-ended
		return errors.Join(err, s.pub.Close())
	}
	t.Cleanup(func() {
		if err := stop(); !errors.Is(err, context.Canceled) {
			t.Errorf("the follower ended with %v", err)
		}
	})
	return s
}

// subscribe returns a subscriber that receives the messages published after the call.
func (s *show) subscribe(prefix string) *view {
	s.t.Helper()
	c := zmtptest.Subscribe(s.t, s.endpoint, prefix)
	if err := c.Net().SetReadDeadline(time.Now().Add(hangs)); err != nil {
		s.t.Fatal(err)
	}
	select {
	case <-s.joined:
	case <-time.After(hangs):
		s.t.Fatalf("the publisher did not receive the subscription to %q", prefix)
	}
	return &view{t: s.t, client: c, topics: make(map[string]map[kv.BlockID]bool), all: prefix == "", next: -1}
}

// report waits for a report with the given What.
func (s *show) report(what string) Report {
	s.t.Helper()
	for {
		select {
		case r := <-s.reports:
			if r.What == what {
				return r
			}
		case <-time.After(hangs):
			s.t.Fatalf("no report of %s", what)
		}
	}
}

// view is a minimal router: a set of blocks for each topic. When a topic is cleared, it
// drops the blocks of all topics of the same pod, as llm-d does.
type view struct {
	t      *testing.T
	client *zmtptest.Client
	topics map[string]map[kv.BlockID]bool
	// all is set if the view has all topics. It must then receive all sequence numbers.
	all bool
	// next is the required sequence number of the next message; -1: any.
	next  int64
	beats int
}

// receive applies the next message.
func (v *view) receive() {
	v.t.Helper()
	m := v.client.MustReceive()
	seq := int64(binary.BigEndian.Uint64(m[1]))
	if v.all && v.next >= 0 && seq != v.next {
		v.t.Fatalf("message %d; want %d", seq, v.next)
	}
	v.next = seq + 1
	v.apply(string(m[0]), m[2])
}

func (v *view) apply(topic string, payload []byte) {
	v.t.Helper()
	var batch llmdBatch
	if err := msgpack.Unmarshal(payload, &batch); err != nil {
		v.t.Fatal(err)
	}
	if len(batch.Events) == 0 {
		v.beats++
	}
	for _, e := range batch.Events {
		var fields []any
		if err := msgpack.Unmarshal(e, &fields); err != nil {
			v.t.Fatal(err)
		}
		switch fields[0] {
		case "AllBlocksCleared":
			maps.DeleteFunc(v.topics, func(other string, _ map[kv.BlockID]bool) bool {
				return Topic(other).pod() == Topic(topic).pod()
			})
		case "BlockRemoved":
			for _, h := range fields[1].([]any) {
				delete(v.topics[topic], kv.BlockID(h.([]byte)))
			}
		case "BlockStored":
			if v.topics[topic] == nil {
				v.topics[topic] = make(map[kv.BlockID]bool)
			}
			for _, h := range fields[1].([]any) {
				v.topics[topic][kv.BlockID(h.([]byte))] = true
			}
		default:
			v.t.Fatalf("unexpected event %v", fields)
		}
	}
}

// until receives messages until a topic has exactly the blocks that a host lists.
func (v *view) until(topic string, h *host, namespace string) {
	v.t.Helper()
	for !maps.Equal(v.topics[topic], h.list(namespace)) {
		v.receive()
	}
}

// has receives messages until a topic has a block.
func (v *view) has(topic string, id kv.BlockID) {
	v.t.Helper()
	for !v.topics[topic][id] {
		v.receive()
	}
}

// chainOf returns a prompt of n blocks. Prompts of different seeds share no block.
func chainOf(n int, seed uint64) []kv.BlockID {
	ids := make([]kv.BlockID, n)
	for i := range ids {
		binary.BigEndian.PutUint64(ids[i][:], seed+1)
		binary.BigEndian.PutUint64(ids[i][8:], uint64(i)+1)
	}
	return slices.Clip(ids)
}
