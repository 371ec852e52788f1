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
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/content"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// poisonGeo has pieces of 256 KiB (8 layers of 16 tokens of 2 KiB); rdma/tcp sends pieces
// of that size without a copy.
var poisonGeo = kv.SingleGroup(8, 16, 2<<10)

const poisonByte = 0xCC

// poison overwrites memory that has been returned to its owner.
func poison(mem []byte) {
	for i := range mem {
		mem[i] = poisonByte
	}
}

// process stands for one process: a transfer engine, a store and its memory.
type process struct {
	t      *testing.T
	engine *late
	store  *client.Store
	ns     kv.Namespace
	mem    []byte
	pages  *client.Memory
}

// late is a transfer engine that submits each write some time after Write has returned.
// So the test detects a caller that frees a source before its write has ended. Ending
// the context of a write does not stop the write. late calls cut at the write at which
// left becomes 0.
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

// yields is how often late yields the CPU before it submits a write.
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

// newProcess opens a store over TCP, with memory for the given number of blocks.
func newProcess(t *testing.T, node *testnode.Node, tenant string, blocks int) *process {
	t.Helper()
	engine, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	p := &process{t: t, engine: &late{Engine: engine}, mem: make([]byte, int64(blocks)*poisonGeo.BlockBytes())}
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

func (p *process) must(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

// fill writes the contents of blocks to the process's memory.
func (p *process) fill(ids []kv.BlockID) {
	for b, id := range ids {
		for l := range poisonGeo.Groups[0].Layers {
			layerOf(id, p.ns.Epoch, l).Fill(p.layer(b, l))
		}
	}
}

func (p *process) layer(block, layer int) []byte {
	return p.mem[poisonGeo.PieceOffset(block, 0)+int64(layer)*poisonGeo.LayerBytes(0):][:poisonGeo.LayerBytes(0)]
}

// check reads a chain and compares its blocks. At least atLeast blocks must be hits.
func (p *process) check(ids []kv.BlockID, atLeast int) {
	p.t.Helper()
	r, err := p.store.Read(p.t.Context(), client.ReadRequest{Namespace: p.ns, IDs: ids, Into: p.pages})
	p.must(err)
	if r.Blocks < atLeast || len(r.Lost) > 0 {
		p.t.Errorf("%d of %d blocks are hits (%v), lost: %v; want at least %d", r.Blocks, len(ids), r.Cut, r.Lost, atLeast)
	}
	for b := range r.Blocks {
		for l := range poisonGeo.Groups[0].Layers {
			if layerOf(ids[b], p.ns.Epoch, l).Differs(p.layer(b, l)) >= 0 {
				p.t.Errorf("block %d, layer %d: bytes that differ from the written bytes", b, l)
			}
		}
	}
}

// layerOf returns the contents of one layer of a block.
func layerOf(id kv.BlockID, epoch kv.Epoch, layer int) content.Content {
	return content.Of(id, epoch).From(int64(layer) * poisonGeo.LayerBytes(0))
}

// poisonChain returns the ids of a sequence's blocks.
func poisonChain(tenant, sequence, blocks int) []kv.BlockID {
	ids := make([]kv.BlockID, blocks)
	for b := range ids {
		ids[b] = kv.BlockID{byte(tenant), byte(sequence), byte(b), 1}
	}
	return ids
}

// TestPoisonedSources overwrites memory as soon as it is returned to its owner, and then
// checks that no overwritten byte was sent or stored. The memory is that of a Write that
// has succeeded or was cancelled, and the device pages of a finished prefill job, of a
// block after Append, and of cancelled jobs. With the build tag invariants, the arenas of
// the node and of the traffic managers overwrite released buffers too.
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
			w, r := newProcess(t, node, tenant, blocks), newProcess(t, node, tenant, blocks)
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
		w, r := newProcess(t, node, "a", blocks), newProcess(t, node, "a", blocks)
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
			// A second write stores the blocks.
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
		writer, reader := newProcess(t, node, "b", blocks), newProcess(t, node, "b", blocks+1)
		pe, de := newPoisonEngine(t, node, (blocks+1)*jobs), newPoisonEngine(t, node, (blocks+1)*jobs)
		for s := range jobs {
			ids := poisonChain(1, 200+s, blocks)
			writer.fill(ids[:hit])
			res, err := writer.store.Write(t.Context(), client.WriteRequest{Namespace: writer.ns, IDs: ids[:hit], From: writer.pages})
			poison(writer.mem)
			if err != nil || res.Blocks != hit {
				t.Fatalf("wrote %+v, %v", res, err)
			}
		}
		// Round 0 cancels each job halfway, round 1 completes it.
		for round := range 2 {
			var all sync.WaitGroup
			for s := range jobs {
				all.Go(func() {
					j := poisonJob{t: t, name: fmt.Sprintf("round %d, job %d", round, s), pe: pe, de: de, ids: poisonChain(1, 200+s, blocks+1), blocks: blocks, hit: hit, split: s % (hit + 1), page: s * (blocks + 1)}
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

// poisonEngine is an engine's traffic manager with its device memory.
type poisonEngine struct {
	*traffic.Manager
	peer   traffic.Peer
	ns     kv.Namespace
	device []byte
	pages  int
}

// newPoisonEngine starts an engine whose device memory has the given number of pages for
// each layer.
func newPoisonEngine(t *testing.T, node *testnode.Node, pages int) *poisonEngine {
	t.Helper()
	storage := newProcess(t, node, "b", 1)
	compute, err := tcp.New(t.Context(), tcp.Options{Listen: "127.0.0.1:0", Token: token})
	storage.must(err)
	t.Cleanup(func() { storage.must(compute.Close()) })
	e := &poisonEngine{peer: traffic.Peer{Addr: compute.Addr(), Token: token}, ns: storage.ns, pages: pages}
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

func (e *poisonEngine) page(layer, page int) []byte {
	lb := int(poisonGeo.LayerBytes(0))
	return e.device[(layer*e.pages+page)*lb:][:lb]
}

// poisonJob is one request: a prompt of blocks blocks, and one decoded block.
type poisonJob struct {
	t                        *testing.T
	name                     string
	pe, de                   *poisonEngine
	ids                      []kv.BlockID
	blocks, hit, split, page int
}

// poison overwrites the job's pages on a device.
func (j *poisonJob) poison(e *poisonEngine) {
	for l := range poisonGeo.Groups[0].Layers {
		for b := range j.blocks + 1 {
			poison(e.page(l, j.page+b))
		}
	}
}

// run serves the request. If cancelled is set, it cancels both sides halfway.
func (j *poisonJob) run(cancelled bool) {
	// With a deadline, a job that hangs fails with its name.
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
	// Decode the next block while the prompt is being stored.
	for l := range layers {
		layerOf(j.ids[j.blocks], j.de.ns.Epoch, l).Fill(j.de.page(l, j.page+j.blocks))
	}
	err = j.de.Append(ctx, j.name, j.ids, j.de.ns.Epoch, uint32(j.page+j.blocks))
	j.poison(j.de)
	if err = errors.Join(err, d.Finish(ctx)); err != nil {
		j.t.Errorf("%s: %v", j.name, err)
	}
}
