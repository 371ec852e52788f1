package emulate

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/internal/content"
	"github.com/penstock-kv/penstock/internal/testnode"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// poisonGeo has pieces of 256 KiB, which tcp sends without copying them: 8 layers
// of 16 tokens of 2 KiB.
var poisonGeo = kv.SingleGroup(8, 16, 2<<10)

const poisonByte = 0xCC

// poison overwrites memory that the product has declared free.
func poison(mem []byte) {
	for i := range mem {
		mem[i] = poisonByte
	}
}

// poisoned is one process of a test: a transfer engine, a store and its memory.
type poisoned struct {
	t      *testing.T
	engine *late
	store  *client.Store
	ns     kv.Namespace
	mem    []byte
	pages  *client.Memory
}

// late is a transfer engine that submits each write after its caller has gone on, so
// that whoever frees a source before the write has ended is seen. It calls cut when
// so many more writes have been asked for. A write that it has taken is not affected
// by the end of its context.
type late struct {
	rdma.Engine
	left atomic.Int64
	cut  func()
}

func (l *late) Write(ctx context.Context, w rdma.Write) error {
	l.later(w.Done, func() error { return l.Engine.Write(context.WithoutCancel(ctx), w) })
	return nil
}

func (l *late) WritePaged(ctx context.Context, w rdma.PagedWrite) error {
	w.SrcPages.Indices, w.DstPages.Indices = slices.Clone(w.SrcPages.Indices), slices.Clone(w.DstPages.Indices)
	l.later(w.Done, func() error { return l.Engine.WritePaged(context.WithoutCancel(ctx), w) })
	return nil
}

// yields is how often a write lets others run before it is submitted.
const yields = 200

func (l *late) later(done func(error), submit func() error) {
	go func() {
		for range yields {
			runtime.Gosched()
		}
		if err := submit(); err != nil {
			done(err)
		}
	}()
	if l.left.Add(-1) == 0 {
		l.cut()
	}
}

// newPoisoned opens a store of its own over tcp, with memory for so many blocks.
func newPoisoned(t *testing.T, node *testnode.Node, tenant string, blocks int) *poisoned {
	t.Helper()
	engine, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	p := &poisoned{t: t, engine: &late{Engine: engine}, mem: make([]byte, int64(blocks)*poisonGeo.BlockBytes())}
	t.Cleanup(func() { p.must(engine.Close()) })
	p.store, err = client.Open(t.Context(), client.Options{Servers: []string{node.Addr}, Engine: p.engine})
	p.must(err)
	t.Cleanup(func() { p.must(p.store.Close()) })
	p.pages, err = p.store.Register(p.mem)
	p.must(err)
	p.ns, err = p.store.Namespace(t.Context(), tenant)
	p.must(err)
	return p
}

func (p *poisoned) must(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

// fill puts the bytes of blocks where the prompt has them.
func (p *poisoned) fill(ids []kv.BlockID) {
	for b, id := range ids {
		for l := range poisonGeo.Groups[0].Layers {
			layerOf(id, p.ns.Epoch, l).Fill(p.layer(b, l))
		}
	}
}

func (p *poisoned) layer(block, layer int) []byte {
	return p.mem[poisonGeo.PieceOffset(block, 0)+int64(layer)*poisonGeo.LayerBytes(0):][:poisonGeo.LayerBytes(0)]
}

// check reads a chain of which at least atLeast blocks must be there, and compares.
func (p *poisoned) check(ids []kv.BlockID, atLeast int) {
	p.t.Helper()
	r, err := p.store.Read(p.t.Context(), client.ReadRequest{Namespace: p.ns, IDs: ids, Into: p.pages})
	p.must(err)
	if r.Blocks < atLeast || len(r.Lost) > 0 {
		p.t.Errorf("%d of %d blocks are there (%v), lost: %v; want at least %d", r.Blocks, len(ids), r.Cut, r.Lost, atLeast)
	}
	for b := range r.Blocks {
		for l := range poisonGeo.Groups[0].Layers {
			if layerOf(ids[b], p.ns.Epoch, l).Differs(p.layer(b, l)) >= 0 {
				p.t.Errorf("block %d, layer %d: other bytes than were written", b, l)
			}
		}
	}
}

// layerOf is what one layer of a block must hold.
func layerOf(id kv.BlockID, epoch kv.Epoch, layer int) content.Content {
	return content.Of(id, epoch).From(int64(layer) * poisonGeo.LayerBytes(0))
}

// poisonChain names the blocks of a sequence.
func poisonChain(tenant, sequence, blocks int) []kv.BlockID {
	ids := make([]kv.BlockID, blocks)
	for b := range ids {
		ids[b] = kv.BlockID{byte(tenant), byte(sequence), byte(b), 1}
	}
	return ids
}

// TestPoisonedSources: whatever the product declares free, its owner may overwrite at
// once, and nobody reads those bytes: memory that a Write has returned, with success
// and after it was cancelled; device pages of a prefill engine that has finished, of
// a block that Append has taken, and of jobs that were cancelled. Built with the tag
// invariants, the arenas of the node and of the traffic managers overwrite their
// buffers in the same way when these are released.
func TestPoisonedSources(t *testing.T) {
	node := testnode.Start(t, testnode.Options{CapacityBytes: 256 << 20})
	tenants := []string{"a", "b"}
	for _, tenant := range tenants {
		node.Namespace(t, tenant, poisonGeo)
	}
	const blocks, sequences = 8, 6

	t.Run("written and read", func(t *testing.T) {
		var all sync.WaitGroup
		for i, tenant := range tenants {
			w, r := newPoisoned(t, node, tenant, blocks), newPoisoned(t, node, tenant, blocks)
			all.Go(func() {
				for s := range sequences {
					ids := poisonChain(i, s, blocks)
					w.fill(ids)
					res, err := w.store.Write(t.Context(), client.WriteRequest{Namespace: w.ns, IDs: ids, From: w.pages})
					poison(w.mem)
					if err != nil || res.Blocks != blocks {
						t.Errorf("wrote %+v, %v", res, err)
						return
					}
					r.check(ids, blocks)
				}
			})
		}
		all.Wait()
	})

	t.Run("cancelled writes", func(t *testing.T) {
		w, r := newPoisoned(t, node, "a", blocks), newPoisoned(t, node, "a", blocks)
		for s := range sequences {
			ids := poisonChain(0, 100+s, blocks)
			w.fill(ids)
			ctx, cancel := context.WithCancel(t.Context())
			w.engine.cut = cancel
			w.engine.left.Store(1 + int64(s)%3)
			_, err := w.store.Write(ctx, client.WriteRequest{Namespace: w.ns, IDs: ids, From: w.pages})
			poison(w.mem)
			if err != nil && !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			cancel()
			r.check(ids, 0)
			// The blocks can be stored after all.
			w.fill(ids)
			res, err := w.store.Write(t.Context(), client.WriteRequest{Namespace: w.ns, IDs: ids, From: w.pages})
			poison(w.mem)
			if err != nil || res.Blocks != blocks {
				t.Fatalf("wrote %+v, %v", res, err)
			}
			r.check(ids, blocks)
		}
	})

	t.Run("dual path", func(t *testing.T) {
		const hit, jobs = 5, 4
		writer, reader := newPoisoned(t, node, "b", blocks), newPoisoned(t, node, "b", blocks+1)
		pe, de := newPoisonedEngine(t, node, (blocks+1)*jobs), newPoisonedEngine(t, node, (blocks+1)*jobs)
		for s := range jobs {
			ids := poisonChain(1, 200+s, blocks)
			writer.fill(ids[:hit])
			res, err := writer.store.Write(t.Context(), client.WriteRequest{Namespace: writer.ns, IDs: ids[:hit], From: writer.pages})
			poison(writer.mem)
			if err != nil || res.Blocks != hit {
				t.Fatalf("wrote %+v, %v", res, err)
			}
		}
		// Jobs that are cancelled in the middle, and then as a whole.
		for round := range 2 {
			var all sync.WaitGroup
			for s := range jobs {
				all.Go(func() {
					j := poisonedJob{t: t, name: fmt.Sprintf("round %d, job %d", round, s), pe: pe, de: de, ids: poisonChain(1, 200+s, blocks+1), blocks: blocks, hit: hit, split: s % (hit + 1), page: s * (blocks + 1)}
					j.run(round == 0)
				})
			}
			all.Wait()
		}
		for s := range jobs {
			ids := poisonChain(1, 200+s, blocks+1)
			if err := de.Settle(t.Context(), ids[blocks]); err != nil {
				t.Fatal(err)
			}
			reader.check(ids, blocks+1)
		}
	})
}

// poisonedEngine is an engine's traffic manager with its device memory.
type poisonedEngine struct {
	*traffic.Manager
	peer   traffic.Peer
	ns     kv.Namespace
	device []byte
	pages  int
}

// newPoisonedEngine starts one whose device has so many pages for each layer.
func newPoisonedEngine(t *testing.T, node *testnode.Node, pages int) *poisonedEngine {
	t.Helper()
	storage := newPoisoned(t, node, "b", 1)
	compute, err := tcp.New(t.Context(), tcp.Options{Listen: "127.0.0.1:0", Token: token})
	storage.must(err)
	t.Cleanup(func() { storage.must(compute.Close()) })
	e := &poisonedEngine{peer: traffic.Peer{Addr: compute.Addr(), Token: token}, ns: storage.ns, pages: pages}
	layers, lb := poisonGeo.Groups[0].Layers, int(poisonGeo.LayerBytes(0))
	e.device = make([]byte, layers*pages*lb)
	region, err := compute.Register(e.device, rdma.RegisterOptions{Local: true})
	storage.must(err)
	bases := make([]uint64, layers)
	for l := range bases {
		bases[l] = uint64(l * pages * lb)
	}
	e.Manager, err = traffic.New(traffic.Options{
		Namespace: storage.ns, Storage: storage.store, Compute: &late{Engine: compute}, BufferBytes: 12 << 20, Device: traffic.Device{Region: region, Bases: bases},
	})
	storage.must(err)
	t.Cleanup(func() { storage.must(e.Close()) })
	return e
}

func (e *poisonedEngine) page(layer, page int) []byte {
	lb := int(poisonGeo.LayerBytes(0))
	return e.device[(layer*e.pages+page)*lb:][:lb]
}

// poisonedJob is one request with a chain of blocks blocks and a decoded one.
type poisonedJob struct {
	t                        *testing.T
	name                     string
	pe, de                   *poisonedEngine
	ids                      []kv.BlockID
	blocks, hit, split, page int
}

// poison overwrites the job's pages on a device.
func (j *poisonedJob) poison(e *poisonedEngine) {
	for l := range poisonGeo.Groups[0].Layers {
		for b := range j.blocks + 1 {
			poison(e.page(l, j.page+b))
		}
	}
}

// run serves the request, or begins it and cancels both sides.
func (j *poisonedJob) run(cancelled bool) {
	// A test that waits for ever says less than one that fails.
	ctx, cancel := context.WithTimeout(j.t.Context(), time.Minute)
	defer cancel()
	layers := poisonGeo.Groups[0].Layers
	pages := make([]uint32, j.blocks)
	for b := range pages {
		pages[b] = uint32(j.page + b)
	}
	part := func(from, to int) []traffic.Part {
		if from == to {
			return nil
		}
		return []traffic.Part{{From: from, To: to}}
	}
	prompt := j.ids[:j.blocks]
	d, err := j.de.Decode(ctx, traffic.DecodeJob{Request: j.name, IDs: prompt, Blocks: j.blocks, Hit: j.hit, Parts: part(j.split, j.hit), Pages: pages, Peer: j.pe.peer})
	if err != nil {
		j.t.Errorf("%s: %v", j.name, err)
		return
	}
	p, err := j.pe.Prefill(ctx, traffic.PrefillJob{Request: j.name, IDs: prompt, Blocks: j.blocks, Hit: j.hit, Parts: part(0, j.split), Pages: pages})
	if err != nil {
		d.Cancel()
		j.t.Errorf("%s: %v", j.name, err)
		return
	}
	for l := range layers {
		if err := p.Layer(ctx, l); err != nil {
			p.Cancel()
			d.Cancel()
			j.t.Errorf("%s, layer %d: %v", j.name, l, err)
			return
		}
		for b, id := range prompt {
			want := layerOf(id, j.pe.ns.Epoch, l)
			if page := j.pe.page(l, j.page+b); b >= j.hit {
				want.Fill(page)
			} else if want.Differs(page) >= 0 {
				j.t.Errorf("%s: block %d, layer %d: other bytes on the prefill device", j.name, b, l)
			}
		}
		p.Computed(l)
		if cancelled && l == layers/2 {
			p.Cancel()
			j.poison(j.pe)
			d.Cancel()
			j.poison(j.de)
			return
		}
	}
	err = p.Finish(ctx)
	j.poison(j.pe)
	if err = errors.Join(err, d.Ready(ctx)); err != nil {
		d.Cancel()
		j.t.Errorf("%s: %v", j.name, err)
		return
	}
	for b, id := range prompt {
		for l := range layers {
			if layerOf(id, j.de.ns.Epoch, l).Differs(j.de.page(l, j.page+b)) >= 0 {
				j.t.Errorf("%s: block %d, layer %d: other bytes on the decode device", j.name, b, l)
			}
		}
	}
	// The next block is decoded while the prompt is on its way to storage.
	for l := range layers {
		layerOf(j.ids[j.blocks], j.de.ns.Epoch, l).Fill(j.de.page(l, j.page+j.blocks))
	}
	err = j.de.Append(ctx, j.name, j.ids, j.de.ns.Epoch, uint32(j.page+j.blocks))
	j.poison(j.de)
	if err = errors.Join(err, d.Finish(ctx)); err != nil {
		j.t.Errorf("%s: %v", j.name, err)
	}
}
