package group

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
)

// nullNet connects NICs that move no payload and take no time, so a benchmark over them
// measures the engine alone.
type nullNet struct {
	mu   sync.Mutex
	next uint32
	eps  map[uint32]*nullEndpoint
}

// nullNIC is a Domain of a nullNet.
type nullNIC struct {
	net *nullNet
	// posted is the time at which the first Post began since posted was set to 0, in ns of the
	// monotonic clock, if timing is set.
	timing atomic.Bool
	posted atomic.Int64
	start  time.Time

	mu    sync.Mutex
	queue []Completion
	recvs []nullRecv
	keys  uint64
	wake  chan struct{}
}

// nullRecv is a lent buffer.
type nullRecv struct {
	slot uint32
	buf  []byte
}

func newNullNIC(n *nullNet) *nullNIC {
	return &nullNIC{net: n, wake: make(chan struct{}, 1), start: time.Now()}
}

func (d *nullNIC) Name() string { return "null" }

func (d *nullNIC) Limits() Limits {
	return Limits{MaxWrite: 1 << 30, MaxMessage: 2 << 20, QueueDepth: 256, Ordered: true, RefusalBreaks: true, CloseIsFinal: true, Windows: true}
}

// nullMemory is memory that no NIC accesses.
type nullMemory struct {
	d   *nullNIC
	key uint64
	mem []byte
}

func (d *nullNIC) newMemory(mem []byte) *nullMemory {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.keys++
	return &nullMemory{d, d.keys, mem}
}

func (d *nullNIC) Register(mem []byte, _ rdma.RegisterOptions) (Memory, error) {
	return d.newMemory(mem), nil
}
func (m *nullMemory) Key() uint64  { return m.key }
func (m *nullMemory) Base() uint64 { return 0 }
func (m *nullMemory) Close() error { return nil }
func (m *nullMemory) Window(off, n uint64) (Memory, error) {
	return m.d.newMemory(m.mem[off : off+n]), nil
}

// nullEndpoint completes each Work immediately.
type nullEndpoint struct {
	d      *nullNIC
	id     uint32
	cookie uint64
	peer   *nullEndpoint
}

func (d *nullNIC) NewEndpoint(cookie uint64, _ rdma.Class) (Endpoint, error) {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	d.net.next++
	e := &nullEndpoint{d: d, id: d.net.next, cookie: cookie}
	d.net.eps[e.id] = e
	return e, nil
}

func (e *nullEndpoint) Local() []byte { return binary.LittleEndian.AppendUint32(nil, e.id) }

func (e *nullEndpoint) Connect(remote []byte) error {
	e.d.net.mu.Lock()
	defer e.d.net.mu.Unlock()
	if len(remote) != 4 {
		return fmt.Errorf("address of %d bytes", len(remote))
	}
	if e.peer = e.d.net.eps[binary.LittleEndian.Uint32(remote)]; e.peer == nil {
		return errors.New("no such endpoint")
	}
	return nil
}

func (e *nullEndpoint) Shut()        {}
func (e *nullEndpoint) Close() error { return nil }

func (e *nullEndpoint) Post(works []Work) (int, error) {
	if e.d.timing.Load() && e.d.posted.Load() == 0 {
		e.d.posted.Store(int64(time.Since(e.d.start)))
	}
	for i := range works {
		w := &works[i]
		switch w.Op {
		case OpWriteImm:
			e.peer.d.add(Completion{Kind: KindImmediate, Cookie: e.peer.cookie, Imm: w.Imm, Len: w.Len})
		case OpSend:
			e.peer.d.receive(e.peer.cookie, w)
		}
	}
	e.d.mu.Lock()
	for i := range works {
		e.d.queue = append(e.d.queue, Completion{Kind: KindDone, Cookie: works[i].Cookie})
	}
	e.d.mu.Unlock()
	e.d.Wake()
	return len(works), nil
}

func (d *nullNIC) add(c Completion) {
	d.mu.Lock()
	d.queue = append(d.queue, c)
	d.mu.Unlock()
	d.Wake()
}

func (d *nullNIC) receive(cookie uint64, w *Work) {
	d.mu.Lock()
	r := d.recvs[0]
	d.recvs = d.recvs[:copy(d.recvs, d.recvs[1:])]
	n := copy(r.buf, w.Src.(*nullMemory).mem[w.SrcOff:w.SrcOff+w.Len])
	d.queue = append(d.queue, Completion{Kind: KindMessage, Cookie: cookie, Slot: r.slot, Len: uint64(n)})
	d.mu.Unlock()
	d.Wake()
}

func (d *nullNIC) PostRecv(slot uint32, _ Memory, buf []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.recvs = append(d.recvs, nullRecv{slot, buf})
	return nil
}

func (d *nullNIC) Poll(dst []Completion) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := copy(dst, d.queue)
	d.queue = d.queue[:copy(d.queue, d.queue[n:])]
	return n, nil
}

func (d *nullNIC) Wait() { <-d.wake }

func (d *nullNIC) Wake() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

func (d *nullNIC) Close() error { return nil }

// nullPair is two engines over a nullNet with nics NICs each; the first dialed
// the second.
func nullPair(t testing.TB, nics int, change func(*Options)) (client, server *Engine, clientNICs []*nullNIC) {
	t.Helper()
	network := &nullNet{eps: make(map[uint32]*nullEndpoint)}
	token := rdma.Token("a token for benchmarks")
	open := func(listen string) (*Engine, []*nullNIC) {
		c, err := TCP(t.Context(), listen, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		o := Options{Provider: "null", Control: c, Token: token}
		if change != nil {
			change(&o)
		}
		var ds []*nullNIC
		for range nics {
			ds = append(ds, newNullNIC(network))
			o.Domains = append(o.Domains, ds[len(ds)-1])
		}
		e, err := New(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := e.Close(); err != nil {
				t.Error(err)
			}
		})
		return e, ds
	}
	server, _ = open("127.0.0.1:0")
	client, clientNICs = open("")
	if _, err := client.Connect(t.Context(), server.Addr(), token); err != nil {
		t.Fatal(err)
	}
	return client, server, clientNICs
}

// writer is a region to write from, and a Desc to write to.
func writer(t testing.TB, client, server *Engine, n int) (rdma.Region, rdma.Desc) {
	t.Helper()
	src, err := client.Register(make([]byte, n), rdma.RegisterOptions{Local: true})
	if err != nil {
		t.Fatal(err)
	}
	dst, err := server.Register(make([]byte, n), rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return src, dst.Desc()
}

// TestAllocs: no operation allocates on either side once its session is warm. A closure or a
// string per operation, a slice that is not kept with its op, or an interface around a Work
// would break it.
func TestAllocs(t *testing.T) {
	if testkit.Race || invariants.Enabled {
		t.Skip("needs a build without the race detector and without checks of invariants, which allocate")
	}
	for _, nics := range []int{1, 2} {
		client, server, _ := nullPair(t, nics, nil)
		src, dst := writer(t, client, server, 4<<20)
		end := make(chan error, 1)
		done := func(err error) { end <- err }
		pages := make([]uint32, 64)
		for i := range pages {
			pages[i] = uint32(i*7) % 64
		}
		ctx := context.Background()
		for name, submit := range map[string]func() error{
			"write": func() error {
				return client.Write(ctx, rdma.Write{Src: src, Dst: dst, Len: 4 << 10, Imm: rdma.ImmOf(1), Done: done})
			},
			"large write": func() error {
				return client.Write(ctx, rdma.Write{Src: src, Dst: dst, Len: 4 << 20, Imm: rdma.ImmOf(1), Done: done})
			},
			"paged": func() error {
				p := rdma.Pages{Indices: pages, Stride: 32 << 10}
				return client.WritePaged(ctx, rdma.PagedWrite{PageLen: 1 << 10, Src: src, SrcPages: p, Dst: dst, DstPages: p, Imm: rdma.ImmOf(1), Done: done})
			},
		} {
			one := func() {
				if err := submit(); err != nil {
					t.Fatal(err)
				}
				if err := <-end; err != nil {
					t.Fatal(err)
				}
			}
			for range 100 {
				one()
			}
			if n := testing.AllocsPerRun(1000, one); n > 0.05 {
				t.Errorf("%d NICs, %s: %.2f allocations an operation", nics, name, n)
			}
		}
	}
}

// BenchmarkSubmit measures the engine's own cost of one operation in flight, and the part of it
// from the call to the first post (fabric-lib, section 7.4, measures the same on both sides of
// a queue).
func BenchmarkSubmit(b *testing.B) {
	for _, c := range []struct {
		name  string
		nics  int
		pages int
		n     uint64
	}{{"write", 1, 0, 4 << 10}, {"write-2nics", 2, 0, 4 << 10}, {"large-2nics", 2, 0, 4 << 20}, {"paged16", 1, 16, 1 << 10}, {"paged16-2nics", 2, 16, 1 << 10}} {
		b.Run(c.name, func(b *testing.B) {
			client, server, nics := nullPair(b, c.nics, nil)
			src, dst := writer(b, client, server, 4<<20)
			end := make(chan error, 1)
			done := func(err error) { end <- err }
			p := rdma.Pages{Stride: 3 * c.n}
			for i := range c.pages {
				p.Indices = append(p.Indices, uint32(i))
			}
			for _, n := range nics {
				n.timing.Store(true)
			}
			ctx := context.Background()
			b.ReportAllocs()
			var toPost []int64
			for b.Loop() {
				for _, n := range nics {
					n.posted.Store(0)
				}
				start := time.Now()
				var err error
				if c.pages == 0 {
					err = client.Write(ctx, rdma.Write{Src: src, Dst: dst, Len: c.n, Imm: rdma.ImmOf(1), Done: done})
				} else {
					err = client.WritePaged(ctx, rdma.PagedWrite{PageLen: c.n, Src: src, SrcPages: p, Dst: dst, DstPages: p, Imm: rdma.ImmOf(1), Done: done})
				}
				if err == nil {
					err = <-end
				}
				if err != nil {
					b.Fatal(err)
				}
				first := int64(math.MaxInt64)
				for _, n := range nics {
					if at := n.posted.Load(); at > 0 {
						first = min(first, at-int64(start.Sub(n.start)))
					}
				}
				toPost = append(toPost, first)
			}
			slices.Sort(toPost)
			b.ReportMetric(float64(toPost[len(toPost)/2]), "p50-ns-to-post")
		})
	}
}

// BenchmarkPipelined measures operations per second with as many in flight as the budget
// allows.
func BenchmarkPipelined(b *testing.B) {
	client, server, _ := nullPair(b, 1, nil)
	src, dst := writer(b, client, server, 1<<20)
	var failed atomic.Int64
	done := func(err error) {
		if err != nil {
			failed.Add(1)
		}
	}
	b.ReportAllocs()
	for b.Loop() {
		if err := client.Write(context.Background(), rdma.Write{Src: src, Dst: dst, Len: 1 << 10, Done: done}); err != nil {
			b.Fatal(err)
		}
	}
	if err := src.Close(context.Background()); err != nil || failed.Load() > 0 {
		b.Fatal(err, failed.Load())
	}
}
