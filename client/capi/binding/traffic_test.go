package binding

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// devicePages is the number of pages of each layer in device memory of a side.
const devicePages = 64

// pair is a prefill and a decode engine over a node in this process.
type pair struct {
	*rig
	ns              *Namespace
	prefill, decode *side
}

// side is a traffic manager, its events and its device memory, which is layer-major.
type side struct {
	*events[TransferEvent, *Traffic]
	mem []byte
}

func newPair(t testing.TB) *pair {
	t.Helper()
	return newPairIn(t, (*pair).trafficOptions)
}

// newPairIn is newPair with device memory that options allocates and describes.
func newPairIn(t testing.TB, options func(*pair) (TrafficOptions, []byte)) *pair {
	t.Helper()
	p := &pair{rig: newRig(t, testnode.Start(t, testnode.Options{}).Addr)}
	p.ensure()
	p.prefill, p.decode = p.open(options), p.open(options)
	return p
}

// ensure opens the namespace.
func (p *pair) ensure() {
	p.t.Helper()
	h, err := p.store.Ensure(kv.Namespace{Name: "m", Index: kv.IndexTrie, Geometry: geo}, true)
	p.ns = valueOf(p.t, p.library.Namespace, h, err)
}

// trafficOptions returns options of a traffic manager, and its device memory. The buffer has room for
// 60 blocks.
func (p *pair) trafficOptions() (TrafficOptions, []byte) {
	p.t.Helper()
	a, err := arena.New(arena.Options{SizeBytes: geo.PieceBytes(0) * devicePages})
	if err != nil {
		p.t.Fatal(err)
	}
	token := rdma.Token("the token of a traffic manager")
	p.t.Cleanup(func() {
		if err := p.store.Close(); err != nil && !errors.Is(err, ErrHandle) {
			p.t.Error(err)
		}
		if err := a.Close(); err != nil {
			p.t.Error(err)
		}
	})
	return TrafficOptions{
		Compute: func(ctx context.Context, secure *tls.Config, log *slog.Logger) (rdma.Engine, error) {
			return tcp.New(ctx, tcp.Options{Listen: "127.0.0.1:0", Token: token, TLS: secure, TLSOnly: secure != nil, Logger: log})
		},
		Token: token, Address: addressOf(a.Bytes()), Bytes: uint64(len(a.Bytes())), Pages: devicePages,
		Bases: []uint64{0, uint64(geo.LayerBytes(0)) * devicePages}, BufferBytes: 2 << 20,
	}, a.Bytes()
}

func (p *pair) open(options func(*pair) (TrafficOptions, []byte)) *side {
	p.t.Helper()
	o, mem := options(p)
	h, err := p.ns.OpenTraffic(o)
	return &side{watch[TransferEvent](p.t, valueOf(p.t, p.library.Traffic, h, err)), mem}
}

// page returns the memory of a page of a layer.
func (s *side) page(layer int, page uint32) []byte {
	n := int(geo.LayerBytes(0))
	return s.mem[(layer*devicePages+int(page))*n:][:n]
}

// compute writes the KV of a block, as a model would, to a page of a layer.
func (s *side) compute(layer int, page uint32, seed int) {
	copy(s.page(layer, page), computed(layer, seed))
}

// computed are the bytes of one layer of a block; seed names the block.
func computed(layer, seed int) []byte {
	b := make([]byte, geo.LayerBytes(0))
	_, _ = rand.NewChaCha8([32]byte{byte(layer), byte(seed), byte(seed >> 8)}).Read(b) // it never fails
	return b
}

// chain returns the ids of n blocks.
func (p *pair) chain(number, n int) []kv.BlockID {
	p.t.Helper()
	tokens := make([]kv.Token, n*geo.BlockTokens)
	tokens[0] = kv.Token(number)
	ids := make([]kv.BlockID, n)
	if _, err := p.ns.Chain(ids[:0], nil, nil, tokens); err != nil {
		p.t.Fatal(err)
	}
	return ids
}

func pagesFrom(first, n int) []uint32 {
	pages := make([]uint32, n)
	for i := range pages {
		pages[i] = uint32(first + i)
	}
	return pages
}

// peer is a side as the other one reaches it.
func (s *side) peer() traffic.Peer {
	s.t.Helper()
	d, err := s.of.Describe()
	if err != nil {
		s.t.Fatal(err)
	}
	return traffic.Peer{Addr: rdma.Addr{NICs: []rdma.NetAddr{rdma.NetAddr(d.Address)}}, Token: d.Token}
}

// transfers begins both sides of a request. The decode side has the last pages of its device memory;
// the prefill side has none yet.
func (p *pair) transfers(name string, ids []kv.BlockID, blocks, hit int, mine, theirs []traffic.Part) (pre, dec *Transfer) {
	p.t.Helper()
	h, err := p.decode.of.Decode(traffic.DecodeJob{
		Request: name, IDs: ids, Blocks: blocks, Hit: hit, Parts: theirs, Pages: pagesFrom(devicePages-blocks, blocks), Peer: p.prefill.peer(),
	}, time.Minute)
	dec = valueOf(p.t, p.library.Transfer, h, err)
	h, err = p.prefill.of.Prefill(traffic.PrefillJob{Request: name, IDs: ids, Blocks: blocks, Hit: hit, Parts: mine}, time.Minute)
	pre = valueOf(p.t, p.library.Transfer, h, err)
	return pre, dec
}

// until returns the next event of a kind. Only progress may come before it.
func (s *side) until(kind TransferKind) TransferEvent {
	s.t.Helper()
	for {
		e := s.next()
		if e.Kind == kind {
			return e
		}
		if e.Kind != TransferProgress {
			s.t.Fatalf("event %+v; want %d", e, kind)
		}
	}
}

// failed returns the error of the transfer's last event.
func (s *side) failed(x *Transfer, code Code) error {
	s.t.Helper()
	e := s.until(TransferFailed)
	if e.Transfer != x.handle || CodeOf(e.Err) != code {
		s.t.Errorf("transfer %d: %v, code %d; want transfer %d, code %d", e.Transfer, e.Err, CodeOf(e.Err), x.handle, code)
	}
	return e.Err
}

func (p *pair) must(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

// TestTransfers: a prompt is computed on one side and arrives on the other. The next turn reads its
// blocks on both sides, and a decoded block is stored too.
func TestTransfers(t *testing.T) { newPair(t).testTransfers() }

func (p *pair) testTransfers() {
	t := p.t
	ids := p.chain(1, 6)
	for turn, hit := range []int{0, 4} {
		blocks := hit + 5
		mine, theirs := []traffic.Part(nil), []traffic.Part(nil)
		if hit > 0 {
			mine, theirs = []traffic.Part{{From: 0, To: 3}}, []traffic.Part{{From: 3, To: 4}}
		}
		name := fmt.Sprint("turn ", turn)
		pre, dec := p.transfers(name, ids[:min(blocks-1, 6)], blocks, hit, mine, theirs)
		e := p.prefill.until(TransferLoaded)
		if e.Transfer != pre.handle || e.FirstMiss != hit {
			t.Errorf("%s: %+v; want a first miss of %d", name, e, hit)
		}
		p.must(pre.AddPages(pagesFrom(0, hit)))
		p.must(pre.AddPages(pagesFrom(hit, blocks-hit)))
		for layer := range 2 {
			p.must(pre.Layer(layer, NoLimit))
			for b := range hit {
				if !bytes.Equal(p.prefill.page(layer, uint32(b)), computed(layer, b)) {
					t.Errorf("%s: block %d, layer %d: other bytes in prefill", name, b, layer)
				}
			}
			for b := hit; b < blocks; b++ {
				p.prefill.compute(layer, uint32(b), b)
			}
			p.must(pre.Computed(layer, blocks-1))
			p.must(pre.Computed(layer, blocks))
		}
		p.must(pre.Finish())
		p.must(pre.Finish())
		if e := p.prefill.until(TransferFinished); e.Transfer != pre.handle {
			t.Errorf("%+v", e)
		}
		p.decode.until(TransferReady)
		for b := range blocks {
			for layer := range 2 {
				if !bytes.Equal(p.decode.page(layer, uint32(devicePages-blocks+b)), computed(layer, b)) {
					t.Errorf("%s: block %d, layer %d: other bytes in decode", name, b, layer)
				}
			}
		}
		p.must(dec.Finish())
		p.decode.until(TransferFinished)
		for _, x := range []*Transfer{pre, dec} {
			if _, err := p.library.Transfer(x.handle); !errors.Is(err, ErrHandle) {
				t.Errorf("a transfer whose last event was drained: %v", err)
			}
		}
	}
	chain := append(p.chain(1, 6), kv.BlockID{7})
	p.must(p.decode.of.Append("turn 1", chain, 0, time.Minute, 3))
	p.must(p.decode.of.Settle(chain[6], time.Minute))
	b := &Batch{KeyOffsets: []uint32{0}}
	for _, id := range chain {
		b.Keys = append(b.Keys, id[:]...)
		b.KeyOffsets = append(b.KeyOffsets, uint32(len(b.Keys)))
	}
	if r := p.ns.Do(OpMatch, b); r.Err != nil || r.Prefix != 7 {
		t.Errorf("%d of 7 blocks are stored: %v", r.Prefix, r.Err)
	}
}

// TestTransferProgress: each read ends with progress up to the end of its part. A read of a block that
// storage does not have is stopped there, and the model computes the rest.
func TestTransferProgress(t *testing.T) {
	p := newPair(t)
	ids := p.chain(2, 2)
	pre, dec := p.transfers("r", ids, 2, 2, nil, []traffic.Part{{From: 0, To: 2}})
	e := p.decode.until(TransferStopped)
	if e.Transfer != dec.handle || e.Part != (traffic.Part{From: 0, To: 2}) || e.Upto != 0 || !e.Gone || e.Err == nil {
		t.Errorf("%+v", e)
	}
	p.must(pre.Recompute(traffic.Part{From: 0, To: 2}))
	if e := p.prefill.until(TransferLoaded); e.FirstMiss != 0 {
		t.Errorf("%+v", e)
	}
	p.must(pre.AddPages(pagesFrom(0, 2)))
	for layer := range 2 {
		p.must(pre.Layer(layer, time.Minute))
		p.must(pre.Computed(layer, 2))
	}
	p.must(pre.Finish())
	p.prefill.until(TransferFinished)
	p.decode.until(TransferReady)
	p.must(dec.Finish())
	p.decode.until(TransferFinished)

	pre, dec = p.transfers("s", ids, 3, 2, nil, []traffic.Part{{From: 0, To: 2}})
	if e := p.decode.next(); e.Kind != TransferProgress || e.Part != (traffic.Part{From: 0, To: 2}) || e.Upto > 2 || e.Bytes > 2*geo.PieceBytes(0) {
		t.Errorf("%+v", e)
	}
	if e := p.prefill.until(TransferLoaded); e.FirstMiss != 2 {
		t.Errorf("%+v", e)
	}
	p.must(dec.Cancel())
	p.decode.failed(dec, Canceled)
	p.prefill.failed(pre, Canceled)
}

// TestProgressIsMerged: one report of a part waits. A report after the end of a read does not pass
// that end.
func TestProgressIsMerged(t *testing.T) {
	p := newPair(t)
	h, err := p.prefill.of.Prefill(traffic.PrefillJob{Request: "r", Blocks: 4, Hit: 4, IDs: p.chain(1, 4), Pages: pagesFrom(0, 4)}, 0)
	x := valueOf(t, p.library.Transfer, h, err)
	a, b := traffic.Part{From: 0, To: 2}, traffic.Part{From: 2, To: 4}
	for _, r := range []traffic.Progress{{Part: a, Upto: 0, Bytes: 1}, {Part: b, Upto: 3, Bytes: 9}, {Part: a, Upto: 1, Bytes: 5}, {Part: a, Upto: 1, Bytes: 4}} {
		x.progress(r)
	}
	x.stopped(traffic.Stop{Part: a, Upto: 1})
	x.progress(traffic.Progress{Part: a, Upto: 2, Bytes: 7})
	p.must(x.Cancel())
	got := []string{}
	for len(got) == 0 || !strings.HasPrefix(got[len(got)-1], fmt.Sprint(TransferFailed)) {
		e := p.prefill.next()
		got = append(got, fmt.Sprint(e.Kind, e.Part, e.Upto, e.Bytes))
	}
	if want := "[3 {0 2} 1 5 3 {2 4} 3 9 4 {0 2} 1 0 3 {0 2} 2 7 6 {0 0} 0 0]"; fmt.Sprint(got) != want {
		t.Errorf("events %v; want %s", got, want)
	}
	x.progress(traffic.Progress{Part: a, Upto: 2, Bytes: 8})
	x.push(TransferEvent{Kind: TransferFailed})
	if n, err := p.prefill.of.Drain(make([]TransferEvent, 1)); n != 0 || err != nil {
		t.Errorf("%d events after the last one, %v", n, err)
	}
}

// TestTransferFails: a transfer fails at its time limit, by Cancel of either side, and when the other
// engine does not answer. A request may begin again then.
func TestTransferFails(t *testing.T) {
	p := newPair(t)
	alone := traffic.PrefillJob{Request: "r", Blocks: 1, Pages: []uint32{0}}
	h, err := p.prefill.of.Prefill(alone, time.Millisecond)
	x := valueOf(t, p.library.Transfer, h, err)
	if err := x.Layer(0, NoLimit); !errors.Is(err, ErrEnded) || !strings.Contains(err.Error(), "1ms") {
		t.Errorf("a layer of a transfer that ended: %v", err)
	}
	p.prefill.failed(x, Timeout)

	h, err = p.prefill.of.Prefill(alone, 0)
	x = valueOf(t, p.library.Transfer, h, err)
	if err := x.Layer(0, time.Millisecond); CodeOf(err) != Timeout {
		t.Errorf("a layer that does not come: %v", err)
	}
	if _, err := p.prefill.of.Prefill(alone, 0); CodeOf(err) != Invalid || !errors.Is(err, traffic.ErrExists) {
		t.Errorf("the request twice: %v", err)
	}
	p.must(x.Cancel())
	p.prefill.failed(x, Canceled)
	if err := x.Cancel(); err != nil {
		t.Errorf("Cancel of a transfer that ended: %v", err)
	}

	peer := p.prefill.peer()
	p.must(p.prefill.of.Close())
	job := traffic.DecodeJob{Request: "r", Blocks: 1, Pages: []uint32{0}, Peer: peer}
	h, err = p.decode.of.Decode(job, time.Minute)
	p.decode.failed(valueOf(t, p.library.Transfer, h, err), Unavailable)
	p.prefill = p.open((*pair).trafficOptions)
	job.Peer = p.prefill.peer()
	job.Peer.Token = rdma.Token("another token of the same length")
	h, err = p.decode.of.Decode(job, time.Minute)
	p.decode.failed(valueOf(t, p.library.Transfer, h, err), Auth)
}

// TestIntact: blocks before a wrong one are intact, at most those of the cached prefix.
func TestIntact(t *testing.T) {
	for block, want := range map[int]int{0: 0, 3: 3, 9: 4} {
		if got := intact(fmt.Errorf("job: %w", &traffic.BlockError{Block: block}), 4); got != want {
			t.Errorf("block %d is wrong: %d intact; want %d", block, got, want)
		}
	}
	if got := intact(errors.New("x"), 4); got != 0 {
		t.Errorf("%d intact after another error", got)
	}
}

// TestWrongBlock: a block that changes in the buffer ends the transfer, and the blocks before it are
// intact. The other side fails too.
func TestWrongBlock(t *testing.T) {
	p := newPair(t)
	ids := p.chain(4, 3)
	b := &Batch{KeyOffsets: []uint32{0}, AnyMemory: true}
	for i, id := range ids {
		copy(p.mem[i*int(geo.PieceBytes(0)):], append(computed(0, i), computed(1, i)...))
		b.Keys = append(b.Keys, id[:]...)
		b.KeyOffsets = append(b.KeyOffsets, uint32(len(b.Keys)))
		b.Addresses, b.Lengths = append(b.Addresses, p.addr+uint64(i)*uint64(geo.PieceBytes(0))), append(b.Lengths, uint64(geo.PieceBytes(0)))
	}
	if r := p.ns.Do(OpPut, b); r.Err != nil || r.OK != 3 {
		t.Fatalf("%d of 3 blocks are stored: %v", r.OK, r.Err)
	}
	pre, dec := p.transfers("r", ids, 3, 3, []traffic.Part{{From: 0, To: 3}}, nil)
	p.prefill.until(TransferLoaded)
	buffer := p.prefill.of.manager.Buffer()
	buffer[bytes.Index(buffer, computed(1, 2))]++
	p.must(pre.AddPages(pagesFrom(0, 3)))
	if err := pre.Layer(1, NoLimit); !errors.Is(err, ErrEnded) || !strings.Contains(err.Error(), "block 2, layer 1") {
		t.Errorf("a layer with a wrong block: %v", err)
	}
	if e := p.prefill.until(TransferFailed); e.Intact != 2 || CodeOf(e.Err) != Internal {
		t.Errorf("%+v", e)
	}
	p.decode.failed(dec, Canceled)
}

// TestTransferWaitsForRoom: calls on a transfer whose buffer has no room are performed later, in
// order, up to a bound.
func TestTransferWaitsForRoom(t *testing.T) {
	p := newPair(t)
	full := traffic.DecodeJob{Request: "full", Blocks: 60, Pages: pagesFrom(0, 60), Peer: p.prefill.peer()}
	h, err := p.decode.of.Decode(full, time.Minute)
	first := valueOf(t, p.library.Transfer, h, err)
	<-first.begun
	ids := p.chain(3, 20)
	h, err = p.decode.of.Decode(traffic.DecodeJob{Request: "waits", Blocks: 20, Hit: 20, IDs: ids, Pages: pagesFrom(0, 20), Peer: p.prefill.peer()}, time.Minute)
	second := valueOf(t, p.library.Transfer, h, err)
	p.must(second.Cut())
	p.must(second.Read(traffic.Part{From: 4, To: 6}))
	for range ordersMax - 2 {
		p.must(second.Cut())
	}
	if err := second.Cut(); CodeOf(err) != Busy {
		t.Errorf("one call too many: %v", err)
	}
	p.must(first.Cancel())
	// The second one gets the room before the event of the first one.
	for seen := 0; seen < 2; seen++ {
		switch e := p.decode.next(); {
		case e.Kind == TransferProgress && e.Transfer == second.handle:
			seen--
		case e.Kind == TransferStopped && e.Transfer == second.handle && e.Part.From == 4 && e.Upto == 4:
		case e.Kind == TransferFailed && e.Transfer == first.handle && CodeOf(e.Err) == Canceled:
		default:
			t.Errorf("%+v", e)
		}
	}
	p.must(second.Cancel())
	p.decode.failed(second, Canceled)
	if err := second.Read(traffic.Part{From: 0, To: 1}); err != nil {
		t.Errorf("Read of a transfer that ended: %v", err)
	}
}

// TestTransfersMax: a transfer counts until its last event was drained.
func TestTransfersMax(t *testing.T) {
	p := newPair(t)
	o, _ := p.trafficOptions()
	o.TransfersMax = 1
	h, err := p.ns.OpenTraffic(o)
	e := watch[TransferEvent](t, valueOf(t, p.library.Traffic, h, err))
	h, err = e.of.Prefill(traffic.PrefillJob{Request: "a", Blocks: 1, Pages: []uint32{0}}, time.Millisecond)
	x := valueOf(t, p.library.Transfer, h, err)
	e.wait()
	b := traffic.PrefillJob{Request: "b", Blocks: 1, Pages: []uint32{0}}
	if _, err := e.of.Prefill(b, 0); CodeOf(err) != Busy {
		t.Errorf("a second transfer: %v", err)
	}
	if last := e.drain1(t); last.Kind != TransferFailed || last.Transfer != x.handle {
		t.Errorf("%+v", last)
	}
	_, err = e.of.Prefill(b, 0)
	p.must(err)
}

// drain1 returns one event that waits.
func (e *events[E, D]) drain1(t testing.TB) E {
	t.Helper()
	got := make([]E, 1)
	if n, err := e.of.Drain(got); n != 1 || err != nil {
		t.Fatalf("%d events, %v", n, err)
	}
	return got[0]
}

// TestTrafficCloses: Close of a traffic manager, and of its store, ends running transfers and calls.
func TestTrafficCloses(t *testing.T) {
	p := newPair(t)
	pre, dec := p.transfers("r", nil, 1, 0, nil, nil)
	waits := make(chan error, 1)
	go func() { waits <- pre.Layer(0, NoLimit) }()
	p.must(p.prefill.of.Close())
	if err := <-waits; !errors.Is(err, ErrHandle) && !errors.Is(err, ErrEnded) {
		t.Errorf("a call during Close: %v", err)
	}
	p.decode.until(TransferFailed)
	other, _ := p.transfersOfDecode("s")
	p.must(p.store.Close())
	p.decode.wait() // a duplicate of the descriptor is readable
	for what, err := range map[string]error{
		"read": pre.Read(traffic.Part{}), "cut": dec.Cut(), "finish": other.Finish(), "cancel": other.Cancel(), "layer": pre.Layer(0, 0),
		"close": p.prefill.of.Close(), "append": p.decode.of.Append("r", make([]kv.BlockID, 1), 0, time.Second, 0), "settle": p.decode.of.Settle(kv.BlockID{}, 0),
	} {
		if !errors.Is(err, ErrHandle) {
			t.Errorf("%s after Close: %v; want ErrHandle", what, err)
		}
	}
	for _, h := range []Handle{pre.handle, other.handle, p.prefill.of.handle, p.decode.of.handle} {
		if p.library.remove(h) {
			t.Errorf("handle %d is open", h)
		}
	}
	if _, err := p.decode.of.Describe(); !errors.Is(err, ErrHandle) {
		t.Errorf("a closed traffic manager: %v", err)
	}
}

// transfersOfDecode begins a decode whose prefill engine does not answer.
func (p *pair) transfersOfDecode(name string) (*Transfer, error) {
	h, err := p.decode.of.Decode(traffic.DecodeJob{Request: name, Blocks: 1, Pages: []uint32{0}, Peer: traffic.Peer{
		Addr: rdma.Addr{NICs: []rdma.NetAddr{"127.0.0.1:1"}}, Token: rdma.Token("sixteen bytes..."),
	}}, time.Minute)
	return valueOf(p.t, p.library.Transfer, h, err), err
}

// TestBadTraffic: options that no traffic manager can have are refused, with the reason.
func TestBadTraffic(t *testing.T) {
	p := newPair(t)
	for word, change := range map[string]func(*TrafficOptions){
		"BufferBytes": func(o *TrafficOptions) { o.BufferBytes = 0 },
		"address 0x0": func(o *TrafficOptions) { o.Address = 0 },
		"0 bytes":     func(o *TrafficOptions) { o.Bytes = 0 },
		"a layer":     func(o *TrafficOptions) { o.Bases = nil },
		"overlap":     func(o *TrafficOptions) { o.Bases[1] = o.Bases[0] },
		"memory of":   func(o *TrafficOptions) { o.Pages = 1 << 20 },
		"every 1":     func(o *TrafficOptions) { o.Stride = 1 },
		"page tables": func(o *TrafficOptions) { o.Tables = []int{0} },
		"no such nic!": func(o *TrafficOptions) {
			o.Compute = func(context.Context, *tls.Config, *slog.Logger) (rdma.Engine, error) {
				return nil, fmt.Errorf("%w: no such nic!", ErrInvalid)
			}
		},
	} {
		o, _ := p.trafficOptions()
		change(&o)
		if _, err := p.ns.OpenTraffic(o); CodeOf(err) != Invalid || !strings.Contains(err.Error(), word) {
			t.Errorf("%v; want Invalid with %q", err, word)
		}
	}
	for word, def := range map[string]struct {
		kv.Namespace
		ids bool
	}{
		"is flat":       {kv.Namespace{Name: "flat", Index: kv.IndexFlat, Geometry: geo}, true},
		"not block ids": {kv.Namespace{Name: "any", Index: kv.IndexTrie, Geometry: geo}, false},
	} {
		h, err := p.store.Ensure(def.Namespace, def.ids)
		ns := valueOf(t, p.library.Namespace, h, err)
		o, _ := p.trafficOptions()
		if _, err := ns.OpenTraffic(o); CodeOf(err) != Invalid || !strings.Contains(err.Error(), word) {
			t.Errorf("%s: %v; want Invalid with %q", def.Name, err, word)
		}
	}
}

// TestBadTransfers: jobs and calls that contradict themselves are refused at once, and have no effect.
func TestBadTransfers(t *testing.T) {
	p := newPair(t)
	ids, peer := p.chain(1, 4), p.prefill.peer()
	for name, j := range map[string]traffic.DecodeJob{
		"no request": {Blocks: 1, Pages: pagesFrom(0, 1), Peer: peer},
		"long name":  {Request: strings.Repeat("n", nameMax+1), Blocks: 1, Pages: pagesFrom(0, 1), Peer: peer},
		"no blocks":  {Request: "r", Peer: peer},
		"hit":        {Request: "r", Blocks: 1, Hit: 2, IDs: ids, Pages: pagesFrom(0, 1), Peer: peer},
		"ids":        {Request: "r", Blocks: 5, Hit: 5, IDs: ids, Pages: pagesFrom(0, 5), Peer: peer},
		"pages":      {Request: "r", Blocks: 1, Pages: pagesFrom(0, 2), Peer: peer},
		"page":       {Request: "r", Blocks: 1, Pages: []uint32{devicePages}, Peer: peer},
		"part":       {Request: "r", Blocks: 2, Hit: 2, IDs: ids[:2], Pages: pagesFrom(0, 2), Parts: []traffic.Part{{From: 0, To: 3}}, Peer: peer},
		"large":      {Request: "r", Blocks: 100, Pages: make([]uint32, 100), Peer: peer},
	} {
		if _, err := p.decode.of.Decode(j, 0); CodeOf(err) != Invalid {
			t.Errorf("%s, decode: %v", name, err)
		}
		if name == "large" {
			j.Blocks, j.Hit, j.IDs, j.Parts = 100, 100, make([]kv.BlockID, 100), []traffic.Part{{From: 0, To: 100}}
		}
		if _, err := p.prefill.of.Prefill(traffic.PrefillJob{Request: j.Request, IDs: j.IDs, Blocks: j.Blocks, Hit: j.Hit, Parts: j.Parts, Pages: j.Pages}, 0); CodeOf(err) != Invalid {
			t.Errorf("%s, prefill: %v", name, err)
		}
	}
	for name, peer := range map[string]traffic.Peer{"no address": {Token: peer.Token}, "short token": {Addr: peer.Addr, Token: rdma.Token("short")}} {
		if _, err := p.decode.of.Decode(traffic.DecodeJob{Request: "r", Blocks: 1, Pages: pagesFrom(0, 1), Peer: peer}, 0); CodeOf(err) != Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	pre, dec := p.transfers("r", ids, 4, 2, []traffic.Part{{From: 0, To: 2}}, nil)
	for name, err := range map[string]error{
		"part beyond": pre.Read(traffic.Part{From: 1, To: 3}), "part empty": dec.Read(traffic.Part{From: 1, To: 1}), "recompute beyond": pre.Recompute(traffic.Part{From: 2, To: 3}),
		"too many pages": pre.AddPages(pagesFrom(0, 5)), "page": pre.AddPages([]uint32{devicePages}), "layer": pre.Computed(2, 4), "negative layer": pre.Layer(-1, 0), "no layer": pre.Layer(2, 0),
		"block": pre.Computed(0, 5), "block without page": pre.Computed(0, 3),
		"recompute of decode": dec.Recompute(traffic.Part{From: 0, To: 1}), "pages of decode": dec.AddPages(nil), "computed of decode": dec.Computed(0, 1), "layer of decode": dec.Layer(0, 0),
		"append without chain": p.decode.of.Append("r", nil, 0, 0, 0), "append of another page": p.decode.of.Append("r", ids, 0, time.Second, devicePages),
	} {
		if CodeOf(err) != Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	p.must(pre.Cancel())
	p.must(dec.Cancel())
}
