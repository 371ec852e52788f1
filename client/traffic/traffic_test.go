package traffic

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/zeebo/xxh3"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/copier"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/rdmatest/simrdma"
	"github.com/penstock-kv/penstock/rdma/shm"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// geo has Layer Blocks of 2 KiB: 5 layers of 4 tokens of 512 bytes.
var geo = kv.SingleGroup(5, 4, 512)

// fill writes the bytes of one Layer Block, which are derived from its id and layer.
func fill(dst []byte, id kv.BlockID, layer int) {
	rng := rand.NewChaCha8([32]byte(append(id[:], byte(layer), 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)))
	_, _ = rng.Read(dst) // it never fails
}

// blockName is the name of block b of a sequence.
func blockName(sequence, b int) kv.BlockID {
	var id kv.BlockID
	binary.LittleEndian.PutUint64(id[:], uint64(sequence)+1)
	binary.LittleEndian.PutUint64(id[8:], uint64(b)+1)
	return id
}

// shelf is the storage of a test: blocks in a map, with faults of single blocks. It has the
// contract of client.Store: a lost block shortens the prefix, and the checksums are those of the
// writer.
type shelf struct {
	geo kv.Geometry
	// order is Options.Order of the managers.
	order  []int
	mu     sync.Mutex
	blocks map[kv.BlockID][]byte
	// fail has the error of a read of a block.
	fail map[kv.BlockID]error
	// flip changes the bytes of a block after they were verified, as a faulty buffer
	// would.
	flip map[kv.BlockID]bool
	// gate, if set, blocks writes until it is closed. waiting, if set, gets an element
	// for a blocked write. spoil, if set, changes the bytes before they are stored.
	gate    chan struct{}
	waiting chan struct{}
	spoil   func(mem []byte)
	// read and wrote have the pieces that were read and written, without the offsets of the latter, pieces the number of pieces of each write, deadlines the
	// deadline of each.
	read      []client.Piece
	wrote     []client.Piece
	pieces    []int
	deadlines []time.Time
	// stall: the first read of this block closes stalled and does not continue.
	stall   kv.BlockID
	stalled chan struct{}
}

func newShelf() *shelf {
	return &shelf{blocks: map[kv.BlockID][]byte{}, fail: map[kv.BlockID]error{}, flip: map[kv.BlockID]bool{}, geo: geo}
}

// layersOf returns the layers of a Full Block in their order there.
func layersOf(g kv.Geometry, full []byte) [][]byte {
	var layers [][]byte
	for i, group := range g.Groups {
		for range group.Layers {
			n := g.LayerBytes(i)
			layers, full = append(layers, full[:n:n]), full[n:]
		}
	}
	return layers
}

// put stores the first n blocks of a sequence.
func (s *shelf) put(sequence, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for b := range n {
		id := blockName(sequence, b)
		full := make([]byte, s.geo.BlockBytes())
		for l, layer := range layersOf(s.geo, full) {
			fill(layer, id, l)
		}
		s.blocks[id] = full
	}
}

// drop loses one block.
func (s *shelf) drop(sequence, b int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.blocks, blockName(sequence, b))
}

// at is the shelf for one manager, with the memory that the manager has
// registered.
type at struct {
	*shelf
	mems *sync.Map // by *client.Memory
}

func newAt(s *shelf) at { return at{s, new(sync.Map)} }

func (s at) Register(mem []byte) (*client.Memory, error) {
	m := new(client.Memory)
	s.mems.Store(m, mem)
	return m, nil
}

// mem returns the memory for which Register returned m.
func (s at) mem(m *client.Memory) []byte {
	mem, _ := s.mems.Load(m)
	return mem.([]byte)
}

var errNIC = errors.New("the storage NIC is down")

func (s at) Read(ctx context.Context, r client.ReadRequest) (client.ReadResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return client.ReadResult{}, err
	}
	for i, p := range r.Pieces {
		id := r.IDs[p.Block]
		if id == s.stall && s.stalled != nil {
			close(s.stalled)
			s.stalled = nil
			s.mu.Unlock()
			<-ctx.Done()
			s.mu.Lock()
			return client.ReadResult{Outcome: client.Miss, Blocks: p.Block, Cut: client.CutLost}, ctx.Err()
		}
		if err := s.fail[id]; err != nil {
			return client.ReadResult{Outcome: client.Miss, Blocks: p.Block, Cut: client.CutLost, Detail: err.Error()}, nil
		}
		full, ok := s.blocks[id]
		if !ok {
			return client.ReadResult{Outcome: client.Miss, Blocks: p.Block, Cut: client.CutAbsent}, nil
		}
		dst := s.mem(r.Into)[p.Offset:][:s.geo.PieceBytes(p.Group)]
		copy(dst, full[s.geo.PieceOffset(0, p.Group):])
		s.read = append(s.read, p)
		lb := int(s.geo.LayerBytes(p.Group))
		for l := range r.Sums[i] {
			r.Sums[i][l] = xxh3.Hash(dst[l*lb : (l+1)*lb])
		}
		if s.flip[id] {
			dst[len(dst)/2] ^= 1
		}
	}
	return client.ReadResult{Outcome: client.Hit, Blocks: len(r.IDs), Cut: client.CutComplete}, nil
}

func (s at) Write(ctx context.Context, w client.WriteRequest) (client.WriteResult, error) {
	s.mu.Lock()
	gate := s.gate
	s.mu.Unlock()
	if gate != nil {
		select {
		case s.waiting <- struct{}{}:
		default:
		}
		select {
		case <-gate:
		case <-ctx.Done():
			return client.WriteResult{}, ctx.Err()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pieces = append(s.pieces, len(w.Pieces))
	if deadline, ok := ctx.Deadline(); ok {
		s.deadlines = append(s.deadlines, deadline)
	}
	mem := s.mem(w.From)
	if s.spoil != nil {
		s.spoil(mem[w.Pieces[0].Offset:][:s.geo.PieceBytes(0)])
	}
	for i, p := range w.Pieces {
		s.wrote = append(s.wrote, client.Piece{Block: p.Block, Group: p.Group})
		lb := int(s.geo.LayerBytes(p.Group))
		for l, sum := range w.Sums[i] {
			if xxh3.Hash(mem[p.Offset:][l*lb:(l+1)*lb]) != sum {
				return client.WriteResult{Outcome: client.Miss, Blocks: p.Block, Refused: []client.RefusedPiece{{Block: p.Block, Reason: client.LostCorrupt}}}, nil
			}
		}
		if p.Block > 0 && s.blocks[w.IDs[p.Block-1]] == nil {
			return client.WriteResult{Outcome: client.Miss, Blocks: p.Block, Refused: []client.RefusedPiece{{Block: p.Block}}}, nil
		}
		full := s.blocks[w.IDs[p.Block]]
		if full == nil {
			full = make([]byte, s.geo.BlockBytes())
			s.blocks[w.IDs[p.Block]] = full
		}
		copy(full[s.geo.PieceOffset(0, p.Group):], mem[p.Offset:][:s.geo.PieceBytes(p.Group)])
	}
	return client.WriteResult{Outcome: client.Hit, Blocks: len(w.IDs)}, nil
}

// engine is one engine of a test: manager, transfer engine, device memory.
type engine struct {
	*Manager
	rdma   rdma.Engine
	device []byte
	peer   Peer
	pages  int
}

var token = rdma.Token("a token for the traffic managers")

// newEngine starts an engine whose device memory holds the given number of layers, each
// with the given number of pages.
func newEngine(t testing.TB, s *shelf, layers, pages int, bufferBytes int64) *engine {
	t.Helper()
	return newEngineCopying(t, s, layers, pages, bufferBytes, nil)
}

// newEngineCopying is newEngine with a copier; nil: the manager's own.
func newEngineCopying(t testing.TB, s *shelf, layers, pages int, bufferBytes int64, c copier.Copier) *engine {
	t.Helper()
	return newEngineOver(t, s, layers, pages, bufferBytes, c, func(r rdma.Engine) rdma.Engine { return r })
}

// newEngineOver is newEngineCopying with a compute NIC that over makes of a real one.
func newEngineOver(t testing.TB, s *shelf, layers, pages int, bufferBytes int64, c copier.Copier, over func(rdma.Engine) rdma.Engine) *engine {
	t.Helper()
	r, err := tcp.New(t.Context(), tcp.Options{Listen: "127.0.0.1:0", Token: token})
	if err != nil {
		t.Fatal(err)
	}
	return newEngineOn(t, s, newAt(s), layers, pages, bufferBytes, c, r, over(r))
}

// newEngineOn starts an engine over the given storage and transfer engine r, of any
// provider, and closes both at the end of the test. compute is r or wraps r; the manager
// uses compute.
func newEngineOn(t testing.TB, s *shelf, storage Storage, layers, pages int, bufferBytes int64, c copier.Copier, r, compute rdma.Engine) *engine {
	t.Helper()
	return newEngineIn(t, s, storage, layerMajor(layers, pages, uint64(s.geo.LayerBytes(0))), bufferBytes, c, r, compute)
}

// layerMajor is device memory in which the pages of a layer are contiguous.
func layerMajor(layers, pages int, layerBytes uint64) Device {
	d := Device{Stride: layerBytes, Pages: pages}
	for l := range layers {
		d.Bases = append(d.Bases, uint64(l*pages)*layerBytes)
	}
	return d
}

// newEngineIn is newEngineOn with device memory of any layout.
func newEngineIn(t testing.TB, s *shelf, storage Storage, layout Device, bufferBytes int64, c copier.Copier, r, compute rdma.Engine) *engine {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	device := make([]byte, slices.Max(layout.Bases)+uint64(layout.Pages-1)*layout.Stride+newGeometry(s.geo, s.order).maxBytes)
	dev, err := r.Register(device, rdma.RegisterOptions{Local: true, Device: ""})
	must(err)
	if _, staged := c.(apart); !staged {
		layout.Region = dev
	}
	o := Options{
		Namespace: kv.Namespace{Name: "m", Geometry: s.geo}, Order: s.order, Storage: storage, Compute: compute, BufferBytes: bufferBytes,
		Device: layout, Copier: c,
	}
	if c != nil {
		o.DeviceCopies, err = c.Register(device, rdma.RegisterOptions{})
		must(err)
	}
	m, err := New(o)
	must(err)
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		if c != nil {
			if err := o.DeviceCopies.Close(context.Background()); err != nil {
				t.Error(err)
			}
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return &engine{m, r, device, Peer{r.Addr(), token}, layout.Pages}
}

// page is the device memory of one page of a layer.
func (e *engine) page(layer int, page uint32) []byte {
	off := e.opts.Device.offset(layer, page)
	return e.device[off : off+e.geo.bytes[layer]]
}

// request is one request of a test.
type request struct {
	t           testing.TB
	name        string
	sequence    int
	blocks, hit int
	ids         []kv.BlockID
	pages       []uint32
	pe, de      *engine
	// again: the model computes the hit blocks again.
	again bool
	// resident is DecodeJob.Resident.
	resident int
}

// newRequest makes a request whose last block is not full.
func newRequest(t testing.TB, pe, de *engine, sequence, blocks, hit int) *request {
	r := &request{t: t, name: fmt.Sprintf("r%d", sequence), sequence: sequence, blocks: blocks, hit: hit, pe: pe, de: de}
	for b := range blocks {
		if b < blocks-1 {
			r.ids = append(r.ids, blockName(sequence, b))
		}
		for t := range pe.tables {
			page, n := uint32(NoPage), pe.pages/pe.tables
			if t == 0 || b == hit-1 || b == blocks-1 { // the other tables are of layers with recurrent state
				page = uint32(t*n + (b*7+sequence)%n)
			}
			r.pages = append(r.pages, page)
		}
	}
	return r
}

// parts returns the range that one side reads, if it is not empty.
func parts(from, to int) []Part {
	if from == to {
		return nil
	}
	return []Part{{from, to}}
}

// compute acts as the model: it checks the layer of the hit on the device and writes
// the missed blocks.
func (r *request) compute(p *Prefill, layer int) error {
	missed := map[int]bool{}
	for _, b := range p.Miss() {
		missed[b] = true
	}
	want := make([]byte, r.pe.geo.bytes[layer])
	for b := range r.blocks {
		id, number := blockName(r.sequence, b), r.pe.Manager.page(r.pages, layer, b)
		if number == NoPage {
			continue
		}
		page := r.pe.page(layer, number)
		if missed[b] {
			fill(page, id, r.pe.geo.places[layer])
			continue
		}
		r.want(want, id, layer, b)
		if !bytes.Equal(page, want) {
			return fmt.Errorf("block %d, layer %d: other bytes on the prefill device", b, layer)
		}
	}
	return nil
}

// want writes the expected bytes of a page to dst: zeros for a hit block outside of the layer's window, whose page does
// not change.
func (r *request) want(dst []byte, id kv.BlockID, layer, block int) {
	if block < r.outside(layer) {
		clear(dst)
		return
	}
	fill(dst, id, r.pe.geo.places[layer])
}

// outside returns the number of hit blocks that are outside of the layer's window.
func (r *request) outside(layer int) int {
	if r.again {
		return 0
	}
	return r.pe.geo.first(layer, r.hit)
}

// prefill runs the PE's side.
func (r *request) prefill(ctx context.Context, p *Prefill) error {
	for l := range r.pe.geo.layers {
		if err := p.Layer(ctx, l); err != nil {
			_ = p.Finish(ctx) // it returns the same error
			return err
		}
		if err := r.compute(p, l); err != nil {
			return err
		}
		p.Computed(l)
	}
	return p.Finish(ctx)
}

// check compares the whole prompt on the decode device.
func (r *request) check() error {
	for b := range r.blocks {
		for l := range r.pe.geo.layers {
			page, want := r.de.Manager.page(r.pages, l, b), make([]byte, r.pe.geo.bytes[l])
			switch {
			case page == NoPage:
				continue
			case r.pe.geo.state(l) && b < r.blocks-1: // the decode engine needs the last state only
			case b < min(r.resident, r.hit):
				fill(want, residentName(b), l)
			default:
				r.want(want, blockName(r.sequence, b), l, b)
			}
			if !bytes.Equal(r.de.page(l, page), want) {
				return fmt.Errorf("block %d, layer %d: other bytes on the decode device", b, l)
			}
		}
	}
	return nil
}

// run serves the request: the PE reads the first x blocks of the hit, and the DE reads the
// others.
func (r *request) run(ctx context.Context, x int) error {
	d, err := r.de.Decode(ctx, DecodeJob{Request: r.name, IDs: r.ids, Blocks: r.blocks, Hit: r.hit, Parts: parts(x, r.hit), Pages: r.pages, Resident: r.resident, Peer: r.pe.peer})
	if err != nil {
		return err
	}
	p, err := r.pe.Prefill(ctx, PrefillJob{Request: r.name, IDs: r.ids, Blocks: r.blocks, Hit: r.hit, Parts: parts(0, x), Pages: r.pages})
	if err != nil {
		d.Cancel()
		return err
	}
	err = r.prefill(ctx, p)
	return errors.Join(err, d.Finish(ctx), r.check())
}

// apart copies to and from device memory to which only it has access: newEngineIn passes the manager no
// Region of the memory.
type apart struct{ copier.Copier }

// newApart returns a copier of type apart, and closes it at the end of the test.
func newApart(t testing.TB) copier.Copier {
	t.Helper()
	plain, err := copier.NewPlain(copier.PlainOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := plain.Close(); err != nil {
			t.Error(err)
		}
	})
	return apart{plain}
}

// newNIC returns a CNIC-assisted copier over the loopback of a NIC, which here is a
// goroutine of the other engine.
func newNIC(t testing.TB) copier.Copier {
	t.Helper()
	open := func(at string) rdma.Engine {
		e, err := shm.New(t.Context(), shm.Options{Listen: at, Group: group.Options{Token: token}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := e.Close(); err != nil {
				t.Error(err)
			}
		})
		return e
	}
	nic, err := copier.NewNIC(t.Context(), copier.NICOptions{Near: open(""), Far: open(filepath.Join(t.TempDir(), "far")), Token: token})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := nic.Close(); err != nil {
			t.Error(err)
		}
	})
	return nic
}

// counting counts the batches that ended well and their bytes.
type counting struct {
	copier.Copier
	batches, bytes atomic.Int64
}

func (c *counting) Submit(ctx context.Context, b copier.Batch) error {
	n, done := int64(0), b.Done
	for _, s := range b.Spans {
		n += int64(s.Len)
	}
	b.Done = func(err error) {
		if err == nil {
			c.batches.Add(1)
			c.bytes.Add(n)
		}
		done(err)
	}
	return c.Copier.Submit(ctx, b)
}

// TestPaths: the prefill side, the decode side or both read the hit; there is no hit, or all
// blocks are hits; device memory holds all layers, two or one. Every byte on both devices is
// the writer's, and storage has the new blocks.
func TestPaths(t *testing.T) {
	testPaths(t, []int{5, 2, 1}, func(testing.TB) copier.Copier { return nil })
}

// TestPathsNIC is TestPaths with NICs that copy between buffer and device. They copy every
// byte that neither the other side nor the model writes.
func TestPathsNIC(t *testing.T) { testPaths(t, []int{5, 1}, newNIC) }

// TestPathsStaged is TestPaths with device memory to which no NIC and no CPU has access, on both sides.
func TestPathsStaged(t *testing.T) { testPaths(t, []int{5, 2, 1}, newApart) }

func testPaths(t *testing.T, windows []int, open func(testing.TB) copier.Copier) {
	for _, window := range windows {
		for _, tc := range []struct{ blocks, hit, x int }{
			{9, 6, 6}, {9, 6, 0}, {9, 6, 3}, {9, 6, 1}, {4, 0, 0}, {6, 5, 2}, {1, 0, 0}, {2, 1, 0},
		} {
			t.Run(fmt.Sprintf("window=%d/blocks=%d/hit=%d/x=%d", window, tc.blocks, tc.hit, tc.x), func(t *testing.T) {
				testkit.VerifyNone(t)
				s := newShelf()
				s.put(1, tc.hit)
				var copies [2]*counting
				engine := func(side, layers int) *engine {
					c := open(t)
					if c == nil {
						return newEngine(t, s, layers, 64, 1<<20)
					}
					copies[side] = &counting{Copier: c}
					if a, staged := c.(apart); staged {
						copies[side].Copier = a.Copier
						return newEngineCopying(t, s, layers, 64, 1<<20, apart{copies[side]})
					}
					return newEngineCopying(t, s, layers, 64, 1<<20, copies[side])
				}
				pe, de := engine(0, window), engine(1, 5)
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
				defer cancel()
				r := newRequest(t, pe, de, 1, tc.blocks, tc.hit)
				if err := r.run(ctx, tc.x); err != nil {
					t.Fatal(err)
				}
				if got := len(s.blocks); got != len(r.ids) {
					t.Errorf("%d blocks in storage, want %d", got, len(r.ids))
				}
				copied := [2]int{tc.x, tc.blocks}
				if pe.staged() {
					// The copier copies the decode side's part of the hit to the device, and all other blocks from it.
					copied[0] = tc.hit + tc.blocks - (tc.hit - tc.x)
				}
				for side, blocks := range copied {
					if c := copies[side]; c != nil && c.bytes.Load() != int64(blocks)*geo.PieceBytes(0) {
						t.Errorf("%s copied %d bytes to the device, want %d blocks of %d", c.Info().Kind, c.bytes.Load(), blocks, geo.PieceBytes(0))
					}
				}
				// Decoded blocks are copied from the device.
				last := blockName(1, tc.blocks-1)
				if err := de.Append(ctx, r.name, append(r.ids, last), 0, r.pages[tc.blocks-1]); err != nil {
					t.Fatal(err)
				}
				if err := de.Settle(ctx, last); err != nil {
					t.Fatal(err)
				}
				want := newShelf()
				want.put(1, tc.blocks)
				for id, full := range want.blocks {
					if !bytes.Equal(s.blocks[id], full) {
						t.Errorf("other bytes of block %x in storage", id[:])
					}
				}
			})
		}
	}
}

// late ends its batches only after the end of the job that submitted them was
// ordered, and records when the last of their bytes were written.
type late struct {
	copier.Copier
	submitted chan struct{} // a batch is under way
	ended     atomic.Bool
}

func (c *late) Submit(ctx context.Context, b copier.Batch) error {
	go func() {
		close(c.submitted)
		<-ctx.Done()
		done := b.Done
		b.Done = func(err error) {
			c.ended.Store(true)
			done(err)
		}
		if err := c.Copier.Submit(context.WithoutCancel(ctx), b); err != nil {
			b.Done(err)
		}
	}()
	return nil
}

// TestCancelWaitsForCopies: a copy that is in progress when a job is cancelled still
// writes to the device. The job's pages and buffer are released after the copy.
func TestCancelWaitsForCopies(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	s.put(1, 3)
	c := &late{Copier: newNIC(t), submitted: make(chan struct{})}
	pe, de := newEngineCopying(t, s, 1, 64, 1<<20, c), newEngine(t, s, 5, 64, 1<<20)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	p, d, _, _ := newRequest(t, pe, de, 1, 4, 3).both(ctx, 3)
	<-c.submitted
	p.Cancel()
	if !c.ended.Load() {
		t.Error("cancelled while a copy writes to the device")
	}
	if used := pe.Stats().BufferUsedBytes; used != 0 {
		t.Errorf("%d bytes of the buffer are still taken", used)
	}
	d.Cancel()
}

// broken refuses, or fails, every batch.
type broken struct {
	copier.Copier
	refuse bool
}

var errCopy = errors.New("the copy engine is down")

func (c broken) Submit(_ context.Context, b copier.Batch) error {
	if c.refuse {
		return errCopy
	}
	go b.Done(errCopy)
	return nil
}

// TestCopyFails: a copy that fails ends the job with the copy's error, on either side
// and in Append, and all memory is released.
func TestCopyFails(t *testing.T) {
	testCopyFails(t, newNIC, func(b broken) copier.Copier { return b })
}

// TestCopyFailsStaged is TestCopyFails with device memory to which only the copier has access.
func TestCopyFailsStaged(t *testing.T) {
	testCopyFails(t, newApart, func(b broken) copier.Copier { return apart{b} })
}

func testCopyFails(t *testing.T, open func(testing.TB) copier.Copier, wrap func(broken) copier.Copier) {
	for _, refuse := range []bool{true, false} {
		for _, side := range []string{"prefill", "decode"} {
			t.Run(fmt.Sprintf("%s/refuse=%t", side, refuse), func(t *testing.T) {
				testkit.VerifyNone(t)
				s := newShelf()
				s.put(1, 3)
				copiers := map[string]copier.Copier{side: wrap(broken{open(t), refuse})}
				pe, de := newEngineCopying(t, s, 5, 64, 1<<20, copiers["prefill"]), newEngineCopying(t, s, 5, 64, 1<<20, copiers["decode"])
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
				defer cancel()
				r := newRequest(t, pe, de, 1, 4, 3)
				p, d, _, _ := r.both(ctx, 3)
				pErr, dErr := r.prefill(ctx, p), d.Finish(ctx)
				switch side {
				case "prefill":
					if !errors.Is(pErr, errCopy) || dErr == nil {
						t.Errorf("prefill ended with %v, decode with %v", pErr, dErr)
					}
				case "decode":
					if !errors.Is(dErr, errCopy) {
						t.Errorf("decode ended with %v", dErr)
					}
					if err := de.Append(ctx, "r", r.ids, 0, 9); !errors.Is(err, errCopy) {
						t.Errorf("append: %v", err)
					}
				}
				for _, e := range []*engine{pe, de} {
					if used := e.Stats().BufferUsedBytes; used != 0 {
						t.Errorf("%d bytes of the buffer are still taken", used)
					}
				}
			})
		}
	}
}

// held is storage whose writes continue after their context has ended, until release is closed.
type held struct {
	at
	writing, release chan struct{}
}

func (s held) Write(ctx context.Context, w client.WriteRequest) (client.WriteResult, error) {
	close(s.writing)
	<-s.release
	return s.at.Write(ctx, w)
}

// TestCopyFailsDuringWrite: if the copy to the device fails while the prompt's new blocks are being
// written to storage, the job fails at once, and its memory is released after the write.
func TestCopyFailsDuringWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, s := newSimFabric(1), newShelf()
		storage := held{newAt(s), make(chan struct{}), make(chan struct{})}
		layout := layerMajor(5, 64, uint64(s.geo.LayerBytes(0)))
		nic := newSimNIC(t, f, 1, simrdma.NICOptions{}.LikeRC())
		pe := newSimEngine(t, f, 0, s, newAt(s), 5, 64, 1<<20)
		de := newEngineIn(t, s, storage, layout, 1<<20, apart{broken{newApart(t), true}}, nic, nic)
		r := newRequest(t, pe, de, 1, 4, 0)
		p, d, _, _ := r.both(t.Context(), 0)
		if err := r.prefill(t.Context(), p); err != nil {
			t.Error(err)
		}
		<-storage.writing
		finished := make(chan error, 1)
		go func() { finished <- d.Finish(t.Context()) }()
		<-d.Ended()
		synctest.Wait()
		if used := de.Stats().BufferUsedBytes; used == 0 || len(finished) != 0 {
			t.Errorf("the job has released its memory, of which %d bytes are in use, before the write has ended", used)
		}
		close(storage.release)
		if err := <-finished; !errors.Is(err, errCopy) {
			t.Errorf("decode ended with %v", err)
		}
		if used := de.Stats().BufferUsedBytes; used != 0 {
			t.Errorf("%d bytes of the buffer are still taken", used)
		}
	})
}

// TestBadCopies: a copier that has registered other memory than the regions is refused.
func TestBadCopies(t *testing.T) {
	testkit.VerifyNone(t)
	e := newEngineCopying(t, newShelf(), 5, 8, 1<<20, newNIC(t))
	small, err := e.opts.Copier.Register(make([]byte, 10), rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := small.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	for want, change := range map[string]func(*Options){
		"a Copier without DeviceCopies":            func(o *Options) { o.DeviceCopies = nil },
		"DeviceCopies has 10 bytes, Device.Region": func(o *Options) { o.DeviceCopies = small },
		"DeviceCopies without a Copier":            func(o *Options) { o.Copier = nil },
		"SaveCopier and SaveCopies: want both":     func(o *Options) { o.SaveCopier = o.Copier },
		"with the same device memory":              func(o *Options) { o.SaveCopier, o.SaveCopies = o.Copier, small },
		"a buffer of 0 bytes":                      func(o *Options) { o.BufferBytes = 0 },
		"Storage and Compute are required":         func(o *Options) { o.Compute = nil },
		"no Copier was given":                      func(o *Options) { o.Device.Region, o.Copier, o.DeviceCopies = nil, nil, nil },
		"device memory without a layer":            func(o *Options) { o.Device.Bases = nil },
	} {
		o := e.opts
		change(&o)
		if _, err := New(o); !errors.Is(err, ErrJob) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want an error with %q", err, want)
		}
	}
}

// TestMany: requests of several sequences at once, in buffers that do not hold
// all of them.
func TestMany(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	pe, de := newEngine(t, s, 2, 512, 256<<10), newEngine(t, s, 5, 512, 512<<10)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	const n = 24
	errs := make(chan error, n)
	for i := range n {
		s.put(i, 10)
		go func() {
			r := newRequest(t, pe, de, i, 12, 10)
			for b := range r.pages {
				r.pages[b] = uint32(i*12+b) % 512 // requests do not share pages
			}
			errs <- r.run(ctx, i%11)
		}()
	}
	for range n {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

// both begins both sides of a request and returns channels with their reports of stopped reads.
func (r *request) both(ctx context.Context, x int) (p *Prefill, d *Decode, pStop, dStop chan Stop) {
	r.t.Helper()
	pStop, dStop = make(chan Stop, 4), make(chan Stop, 4)
	d, err := r.de.Decode(ctx, DecodeJob{
		Request: r.name, IDs: r.ids, Blocks: r.blocks, Hit: r.hit, Parts: parts(x, r.hit), Pages: r.pages, Resident: r.resident, Peer: r.pe.peer,
		Stopped: func(s Stop) { dStop <- s },
	})
	if err != nil {
		r.t.Fatal(err)
	}
	p, err = r.pe.Prefill(ctx, PrefillJob{
		Request: r.name, IDs: r.ids, Blocks: r.blocks, Hit: r.hit, Parts: parts(0, x), Pages: r.pages,
		Stopped: func(s Stop) { pStop <- s },
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return p, d, pStop, dStop
}

// TestRecomputeArrived: blocks that Recompute names are computed again for both sides, also
// blocks that have arrived in a buffer. The job ends if the decode side still reads blocks that the
// prefill side would write, and if Recompute comes after layers may have used the blocks.
func TestRecomputeArrived(t *testing.T) {
	testkit.VerifyNone(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for _, tc := range []struct {
		name string
		cut  bool // the decode side's read has ended before
	}{{"stopped", true}, {"under way", false}} {
		t.Run(tc.name, func(t *testing.T) {
			s := newShelf()
			s.put(1, 8)
			s.stall, s.stalled = blockName(1, 6), make(chan struct{})
			stalled := s.stalled // the shelf sets s.stalled to nil when it closes it
			pe, de := newEngine(t, s, 2, 64, 1<<20), newEngine(t, s, 5, 64, 1<<20)
			r := newRequest(t, pe, de, 1, 10, 8)
			p, d, _, dStop := r.both(ctx, 4)
			<-stalled
			if err := p.await(ctx, func() bool { return p.from[3] == here }); err != nil {
				t.Fatal(err)
			}
			if tc.cut {
				d.Cut()
				<-dStop
			}
			p.Recompute(Part{0, 8})
			if !tc.cut {
				if err := d.Ready(ctx); !errors.Is(err, ErrRecompute) {
					t.Errorf("ready: %v", err)
				}
				d.Cancel()
				p.Cancel()
				return
			}
			if err := errors.Join(r.prefill(ctx, p), d.Finish(ctx), r.check()); err != nil {
				t.Fatal(err)
			}
			if got := fmt.Sprint(p.Miss()); got != "[0 1 2 3 4 5 6 7 8 9]" {
				t.Errorf("computed %s", got)
			}
		})
	}
	t.Run("used", func(t *testing.T) {
		s := newShelf()
		s.put(1, 8)
		pe, de := newEngine(t, s, 2, 64, 1<<20), newEngine(t, s, 5, 64, 1<<20)
		r := newRequest(t, pe, de, 1, 10, 8)
		p, d, _, _ := r.both(ctx, 4)
		if err := p.Layer(ctx, 0); err != nil {
			t.Fatal(err)
		}
		p.Recompute(Part{8, 9}) // not a hit block: nothing
		p.Recompute(Part{7, 8})
		if err := p.Layer(ctx, 1); !errors.Is(err, ErrRecompute) {
			t.Errorf("layer 1: %v", err)
		}
		p.Cancel()
		d.Cancel()
	})
}

// TestBothRead: both sides read the end of the hit, because the decode side is late, and the prefill side has it
// first. The decode side's read ends, and the request is served.
func TestBothRead(t *testing.T) {
	testkit.VerifyNone(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	s := newShelf()
	s.put(1, 8)
	s.stall, s.stalled = blockName(1, 6), make(chan struct{})
	stalled := s.stalled // the shelf sets s.stalled to nil when it closes it
	pe, de := newEngine(t, s, 5, 64, 1<<20), newEngine(t, s, 5, 64, 1<<20)
	r := newRequest(t, pe, de, 1, 10, 8)
	p, d, _, dStop := r.both(ctx, 4)
	<-stalled
	p.Read(Part{4, 8})
	if err := errors.Join(r.prefill(ctx, p), d.Finish(ctx), r.check()); err != nil {
		t.Fatal(err)
	}
	if stop := <-dStop; !errors.Is(stop.Err, ErrCut) || stop.Gone {
		t.Errorf("the decode side's read: %+v", stop)
	}
	if got := fmt.Sprint(p.Miss()); got != "[8 9]" {
		t.Errorf("computed %s", got)
	}
}

// TestLostBlocks: a missing block is computed, and a block that one side's NIC cannot read is
// read by the other side. The other blocks of the hit are used, and blocks that were computed again
// are stored again.
func TestLostBlocks(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	s.put(1, 8)
	s.drop(1, 2)
	pe, de := newEngine(t, s, 2, 64, 1<<20), newEngine(t, s, 5, 64, 1<<20)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	r := newRequest(t, pe, de, 1, 10, 8)
	s.fail[blockName(1, 6)] = errNIC
	p, d, pStop, dStop := r.both(ctx, 4)
	stop := <-pStop
	if stop.Upto != 2 || !stop.Gone {
		t.Fatalf("the prefill side stopped: %+v", stop)
	}
	p.Recompute(Part{2, 3})
	p.Read(Part{3, 4})
	stop = <-dStop
	if stop.Upto != 6 || stop.Gone {
		t.Fatalf("the decode side stopped: %+v", stop)
	}
	s.mu.Lock()
	clear(s.fail) // the other NIC works
	s.mu.Unlock()
	p.Read(Part{6, 8})
	if err := errors.Join(r.prefill(ctx, p), d.Finish(ctx), r.check()); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(p.Miss()); got != "[2 8 9]" {
		t.Errorf("computed %s", got)
	}
	if s.blocks[blockName(1, 2)] == nil || s.blocks[blockName(1, 8)] == nil {
		t.Error("the computed blocks are not in storage")
	}
}

// TestCut: Cut ends the read of a side that hangs. The blocks that it had read are used,
// and the other side reads the rest.
func TestCut(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	s.put(1, 8)
	s.stall, s.stalled = blockName(1, 2), make(chan struct{})
	stalled := s.stalled
	pe, de := newEngine(t, s, 2, 64, 1<<20), newEngine(t, s, 5, 64, 1<<20)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	r := newRequest(t, pe, de, 1, 10, 8)
	p, d, pStop, _ := r.both(ctx, 4)
	<-stalled
	p.Cut()
	if stop := <-pStop; stop.Upto != 2 || stop.Gone || !errors.Is(stop.Err, ErrCut) {
		t.Fatalf("the prefill side stopped: %+v", stop)
	}
	d.Read(Part{2, 4})
	if err := errors.Join(r.prefill(ctx, p), d.Finish(ctx), r.check()); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(p.Miss()); got != "[8 9]" {
		t.Errorf("computed %s", got)
	}
}

// TestWrongBytes: a layer with a bit that flipped in either side's buffer is never reported as
// complete.
func TestWrongBytes(t *testing.T) {
	for name, tc := range map[string]struct {
		x, block int
		where    string
		open     func(testing.TB) copier.Copier
	}{
		"prefill buffer":         {6, 3, "prefill device", nil},
		"decode buffer":          {0, 3, "prefill device", nil},
		"prefill buffer, staged": {6, 3, "prefill buffer", newApart},
		"decode buffer, staged":  {0, 3, "prefill staging", newApart},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.VerifyNone(t)
			s := newShelf()
			s.put(1, 6)
			s.flip[blockName(1, tc.block)] = true
			var c copier.Copier
			if tc.open != nil {
				c = tc.open(t)
			}
			pe, de := newEngineCopying(t, s, 5, 64, 1<<20, c), newEngine(t, s, 5, 64, 1<<20)
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			r := newRequest(t, pe, de, 1, 8, 6)
			p, d, _, _ := r.both(ctx, tc.x)
			err := r.prefill(ctx, p)
			var wrong *BlockError
			if !errors.As(err, &wrong) || wrong.Block != tc.block || wrong.Layer != 2 || wrong.Where != tc.where {
				t.Errorf("prefill ended with %v", err)
			}
			// The decode side gets the Cancel, or one of its own writes is refused before that.
			if err := d.Finish(ctx); !errors.Is(err, ErrCancelled) && !errors.Is(err, rdma.ErrRefused) {
				t.Errorf("decode ended with %v", err)
			}
		})
	}
}

// TestFlipBeforeStorage: if memory changes between the last check and the write to storage,
// storage refuses the block, because the bytes do not match the checked sums. The request is
// served, and no wrong block is stored.
func TestFlipBeforeStorage(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	s.spoil = func(mem []byte) { mem[7] ^= 2 }
	s.gate = make(chan struct{})
	pe, de := newEngine(t, s, 5, 64, 1<<20), newEngine(t, s, 5, 64, 1<<20)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	r := newRequest(t, pe, de, 1, 4, 0)
	p, d, _, _ := r.both(ctx, 0)
	if err := errors.Join(r.prefill(ctx, p), d.Ready(ctx)); err != nil {
		t.Fatal(err)
	}
	close(s.gate) // the device has its copy of the buffer, so a later change affects only storage
	if err := errors.Join(d.Finish(ctx), r.check()); err != nil {
		t.Fatal(err)
	}
	for l := range 5 {
		fill(de.page(l, 9), blockName(2, 0), l)
	}
	if err := de.Append(ctx, "r2", []kv.BlockID{blockName(2, 0)}, 0, 9); err != nil {
		t.Fatal(err)
	}
	if err := de.Settle(ctx, blockName(2, 0)); err != nil {
		t.Fatal(err)
	}
	if len(s.blocks) != 0 {
		t.Errorf("%d blocks with a flipped bit are in storage", len(s.blocks))
	}
}

// TestEnds: when a job ends by a cancellation, by a deadline or by the failure of an engine, on
// either side, the other side's job ends too, and its memory is released.
func TestEnds(t *testing.T) {
	for name, tc := range map[string]struct {
		end    func(p *Prefill, d *Decode, pe, de *engine)
		p, d   error
		prefix string
	}{
		"prefill cancels": {func(p *Prefill, _ *Decode, _, _ *engine) { p.Cancel() }, ErrCancelled, ErrCancelled, "by the prefill side"},
		"decode cancels":  {func(_ *Prefill, d *Decode, _, _ *engine) { d.Cancel() }, ErrCancelled, ErrCancelled, "by the decode side"},
		"decode dies":     {func(_ *Prefill, d *Decode, pe, de *engine) { pe.rdma.Disconnect(de.rdma.Addr().Engine) }, rdma.ErrPeerDied, rdma.ErrPeerDied, ""},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.VerifyNone(t)
			s := newShelf()
			s.put(1, 6)
			pe, de := newEngine(t, s, 1, 64, 1<<20), newEngine(t, s, 5, 64, 1<<20)
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			r := newRequest(t, pe, de, 1, 8, 6)
			p, d, _, _ := r.both(ctx, 3)
			if err := p.Layer(ctx, 0); err != nil {
				t.Fatal(err)
			}
			tc.end(p, d, pe, de)
			if err := p.Finish(ctx); !errors.Is(err, tc.p) {
				t.Errorf("prefill ended with %v, want %v", err, tc.p)
			}
			if err := d.Finish(ctx); !errors.Is(err, tc.d) {
				t.Errorf("decode ended with %v, want %v", err, tc.d)
			}
			for _, e := range []*engine{pe, de} {
				if used := e.Stats().BufferUsedBytes; used != 0 {
					t.Errorf("%d bytes of the buffer are still taken", used)
				}
			}
		})
	}
	t.Run("deadline", func(t *testing.T) {
		testkit.VerifyNone(t)
		s := newShelf()
		pe := newEngine(t, s, 5, 64, 1<<20)
		ctx, cancel := context.WithCancel(t.Context())
		r := newRequest(t, pe, pe, 1, 4, 2)
		p, err := pe.Prefill(ctx, PrefillJob{Request: "r", IDs: r.ids, Blocks: 4, Hit: 2, Parts: nil, Pages: r.pages})
		if err != nil {
			t.Fatal(err)
		}
		cancel() // no side reads the hit
		if err := p.Layer(t.Context(), 0); !errors.Is(err, context.Canceled) {
			t.Errorf("layer 0: %v", err)
		}
		p.Cancel()
	})
}

// watches counts the expectations that have not ended.
type watches struct {
	rdma.Engine
	open atomic.Int64
}

func (w *watches) ExpectImm(x rdma.Expect) (*rdma.Expectation, error) {
	done := x.Done
	x.Done = func(err error) {
		w.open.Add(-1)
		done(err)
	}
	w.open.Add(1)
	e, err := w.Engine.ExpectImm(x)
	if err != nil {
		w.open.Add(-1)
	}
	return e, err
}

// TestLateMessage: if the first message of the other side arrives while the job ends, no
// expectation is left that would wait until that side fails.
func TestLateMessage(t *testing.T) {
	testkit.VerifyNone(t)
	pe, de := newEngine(t, newShelf(), 5, 64, 1<<20), newEngine(t, newShelf(), 5, 64, 1<<20)
	w := &watches{Engine: pe.rdma}
	pe.opts.Compute = w
	p, err := pe.Prefill(t.Context(), PrefillJob{Request: "r", Blocks: 1, Pages: []uint32{0}})
	if err != nil {
		t.Fatal(err)
	}
	peer, err := pe.rdma.Connect(t.Context(), de.peer.Addr, de.peer.Token)
	if err != nil {
		t.Fatal(err)
	}
	p.Cancel()
	p.message(peer, &pb.TrafficMessage{Request: "r", Body: &pb.TrafficMessage_Held{Held: &pb.TrafficHeld{}}})
	if n := w.open.Load(); n != 0 {
		t.Errorf("%d expectations outlive their job", n)
	}
}

// TestSecondOffer: a peer that offers memory twice ends the job. Layers may be on their way to
// the first window.
func TestSecondOffer(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	pe, de := newEngine(t, s, 5, 64, 1<<20), newEngine(t, s, 5, 64, 1<<20)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	r := newRequest(t, pe, de, 1, 4, 0)
	p, d, _, _ := r.both(ctx, 0)
	defer d.Cancel()
	if err := p.Layer(ctx, 0); err != nil { // the offer has arrived
		t.Fatal(err)
	}
	p.mu.Lock()
	offer := p.offer
	p.mu.Unlock()
	p.takeOffer(offer)
	if err := r.prefill(ctx, p); !errors.Is(err, ErrJob) {
		t.Errorf("prefill ended with %v", err)
	}
}

// TestReadYourWrites: Settle for the last block of a turn waits until the blocks in the
// decode engine's memory are stored.
func TestReadYourWrites(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	s.gate = make(chan struct{})
	de := newEngine(t, s, 5, 64, 1<<20)
	ids := []kv.BlockID{blockName(1, 0)}
	for l := range 5 {
		fill(de.page(l, 9), ids[0], l)
	}
	if err := de.Append(t.Context(), "r1", ids, 0, 9); err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := de.Settle(ended, ids[0]); !errors.Is(err, context.Canceled) {
		t.Errorf("settled before storage has it: %v", err)
	}
	for l := range 5 {
		clear(de.page(l, 9)) // the page may change once Append has returned
	}
	close(s.gate)
	if err := de.Settle(t.Context(), ids[0]); err != nil {
		t.Fatal(err)
	}
	want := newShelf()
	want.put(1, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if !bytes.Equal(s.blocks[ids[0]], want.blocks[ids[0]]) {
		t.Error("other bytes in storage")
	}
}

// TestAppendTogether: decoded blocks that wait for the block before them are stored
// with one write, in order, and Settle can wait for each of them. If the parent is refused, its
// descendants are dropped and their memory is released.
func TestAppendTogether(t *testing.T) {
	for _, refused := range []bool{false, true} {
		testkit.VerifyNone(t)
		s := newShelf()
		s.gate, s.waiting = make(chan struct{}), make(chan struct{}, 1)
		if refused {
			s.spoil = func(mem []byte) { mem[0] ^= 1 }
		}
		de := newEngine(t, s, 5, 64, 1<<20)
		var ids []kv.BlockID
		for b := range 5 {
			ids = append(ids, blockName(1, b))
			for l := range 5 {
				fill(de.page(l, 9), ids[b], l)
			}
			if err := de.Append(t.Context(), "r1", ids[:b+1], 0, 9); err != nil {
				t.Fatal(err)
			}
			if b == 0 {
				<-s.waiting
			}
		}
		close(s.gate)
		for b := range 5 {
			if err := de.Settle(t.Context(), ids[b]); err != nil {
				t.Fatal(err)
			}
		}
		if n := de.Stats().Persisting; n != 0 {
			t.Errorf("%d blocks are still on their way", n)
		}
		want := newShelf()
		if !refused {
			want.put(1, 5)
		}
		if len(s.blocks) != len(want.blocks) || len(s.pieces) != 2 || s.pieces[0] != 1 || s.pieces[1] != 4 {
			t.Errorf("refused %v: %d blocks in storage, want %d; writes of %v blocks, want 1 and 4", refused, len(s.blocks), len(want.blocks), s.pieces)
		}
		for id, b := range want.blocks {
			if !bytes.Equal(s.blocks[id], b) {
				t.Errorf("other bytes in storage for block %v", id)
			}
		}
		de.work.Wait()
		if used := de.Stats().AppendUsedBytes; used != 0 {
			t.Errorf("%d bytes of decoded blocks are still taken", used)
		}
	}
}

// TestBadJobs: each invalid job is refused with the reason, and leaves no state.
func TestBadJobs(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	e := newEngine(t, s, 5, 8, 1<<20)
	ids := []kv.BlockID{{1}, {2}, {3}}
	for name, j := range map[string]PrefillJob{
		"no request":   {Blocks: 1, Pages: []uint32{0}},
		"no blocks":    {Request: "r"},
		"too many":     {Request: "r", Blocks: MaxBlocks + 1},
		"hit":          {Request: "r", Blocks: 1, Hit: 2, Pages: []uint32{0}},
		"ids":          {Request: "r", Blocks: 4, Hit: 4, IDs: ids, Pages: []uint32{0, 1, 2, 3}},
		"more pages":   {Request: "r", Blocks: 1, Pages: []uint32{0, 1}},
		"page":         {Request: "r", Blocks: 1, Pages: []uint32{40}},
		"part beyond":  {Request: "r", Blocks: 3, Hit: 2, IDs: ids, Pages: []uint32{0, 1, 2}, Parts: []Part{{0, 3}}},
		"parts shared": {Request: "r", Blocks: 3, Hit: 3, IDs: ids, Pages: []uint32{0, 1, 2}, Parts: []Part{{0, 2}, {1, 3}}},
		"part empty":   {Request: "r", Blocks: 3, Hit: 3, IDs: ids, Pages: []uint32{0, 1, 2}, Parts: []Part{{1, 1}}},
	} {
		if _, err := e.Prefill(t.Context(), j); !errors.Is(err, ErrJob) {
			t.Errorf("%s: %v", name, err)
		}
		d := DecodeJob{Request: j.Request, IDs: j.IDs, Blocks: j.Blocks, Hit: j.Hit, Parts: j.Parts, Pages: j.Pages}
		if _, err := e.Decode(t.Context(), d); !errors.Is(err, ErrJob) {
			t.Errorf("%s, decode: %v", name, err)
		}
	}
	if _, err := e.Decode(t.Context(), DecodeJob{Request: "r", Blocks: 2, Hit: 2, IDs: ids, Pages: []uint32{0}}); !errors.Is(err, ErrJob) {
		t.Errorf("too few pages, decode: %v", err)
	}
	if _, err := e.Prefill(t.Context(), PrefillJob{Request: "big", Blocks: 8000, Pages: make([]uint32, 8000)}); err != nil {
		t.Errorf("8,000 blocks of table: %v", err)
	}
	if _, err := e.Prefill(t.Context(), PrefillJob{Request: "big", Blocks: 1, Pages: make([]uint32, 1)}); !errors.Is(err, ErrExists) {
		t.Errorf("twice: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := e.Decode(ctx, DecodeJob{Request: "huge", Blocks: 8000, Pages: make([]uint32, 8000), Peer: e.peer}); err == nil {
		t.Error("a prompt larger than the buffer was accepted")
	}
}

// FuzzMessage: after any message of a peer, a manager still serves requests and has not
// panicked.
func FuzzMessage(f *testing.F) {
	s := newShelf()
	e := newEngine(f, s, 5, 8, 1<<20)
	f.Add([]byte("\x0a\x01r\x12\x00"))
	f.Add([]byte("\x0a\x01r\x22\x04\x08\x05\x10\x01"))
	f.Add([]byte("\x0a\x01r\x1a\x00"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		ids := []kv.BlockID{{1}, {2}}
		p, err := e.Prefill(t.Context(), PrefillJob{Request: "r", IDs: ids, Blocks: 3, Hit: 2, Pages: []uint32{0, 1, 2}})
		if err != nil {
			t.Fatal(err)
		}
		e.receive(rdma.EngineID{7}, raw)
		p.Cancel()
		if used := e.Stats().BufferUsedBytes; used != 0 {
			t.Fatalf("%d bytes of the buffer are still taken", used)
		}
	})
}

// TestAppendPassesPrompts: decoded blocks are stored without waiting when the buffer of the
// prompts is full and more prompts wait for it.
func TestAppendPassesPrompts(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	pe, de := newEngine(t, s, 5, 512, 2<<20), newEngine(t, s, 5, 512, 2<<20)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	// 150 blocks of 10 KiB: no two of these prompts fit in 2 MiB.
	job := func(name string) DecodeJob {
		return DecodeJob{Request: name, Blocks: 150, Pages: make([]uint32, 150), Peer: pe.peer}
	}
	first, err := de.Decode(ctx, job("first"))
	if err != nil {
		t.Fatal(err)
	}
	waiting, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		_, err := de.Decode(waiting, job("second"))
		ended <- err
	}()
	for de.buffer.Stats().Waiting == 0 {
		runtime.Gosched()
	}
	var ids []kv.BlockID
	for b := range 20 {
		ids = append(ids, blockName(1, b))
		for l := range 5 {
			fill(de.page(l, 9), ids[b], l)
		}
		if err := de.Append(ctx, "decoding", ids, 0, 9); err != nil {
			t.Fatal(err)
		}
	}
	if err := de.Settle(ctx, ids[19]); err != nil {
		t.Fatal(err)
	}
	stop()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the second prompt: %v", err)
	}
	first.Cancel()
	want := newShelf()
	want.put(1, 20)
	for id, full := range want.blocks {
		if !bytes.Equal(s.blocks[id], full) {
			t.Errorf("other bytes of block %x in storage", id[:])
		}
	}
}

// TestPersistClock: the time limit of a write to storage begins with the write, not with the
// job, so a prompt whose computation takes longer than the limit is stored too. The
// same holds for decoded blocks that wait for their parent.
func TestPersistClock(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	pe, de := newEngine(t, s, 5, 64, 1<<20), newEngine(t, s, 5, 64, 1<<20)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	r := newRequest(t, pe, de, 1, 5, 2)
	s.put(1, 2)
	p, d, _, _ := r.both(ctx, 1)
	for l := range 4 {
		if err := p.Layer(ctx, l); err != nil {
			t.Fatal(err)
		}
		if err := r.compute(p, l); err != nil {
			t.Fatal(err)
		}
		p.Computed(l)
	}
	if err := p.Layer(ctx, 4); err != nil {
		t.Fatal(err)
	}
	nothingYet := time.Now()
	if err := r.compute(p, 4); err != nil {
		t.Fatal(err)
	}
	p.Computed(4)
	if err := errors.Join(p.Finish(ctx), d.Finish(ctx), r.check()); err != nil {
		t.Fatal(err)
	}
	if len(s.deadlines) != 1 || s.deadlines[0].Before(nothingYet.Add(persistWithin)) {
		t.Errorf("the prompt's blocks: deadlines %v; there was nothing to store at %v", s.deadlines, nothingYet)
	}

	s.gate, s.waiting = make(chan struct{}), make(chan struct{}, 1)
	ids := []kv.BlockID{blockName(2, 0), blockName(2, 1)}
	for b := range ids {
		for l := range 5 {
			fill(de.page(l, 9), ids[b], l)
		}
		if err := de.Append(ctx, "r2", ids[:b+1], 0, 9); err != nil {
			t.Fatal(err)
		}
		if b == 0 {
			<-s.waiting
		}
	}
	nothingYet = time.Now()
	close(s.gate)
	if err := de.Settle(ctx, ids[1]); err != nil {
		t.Fatal(err)
	}
	if n := len(s.deadlines); n != 3 || s.deadlines[2].Before(nothingYet.Add(persistWithin)) {
		t.Errorf("decoded blocks: deadlines %v; the parent was not stored at %v", s.deadlines[1:], nothingYet)
	}
}

// gated processes no message until its gate is open.
type gated struct {
	rdma.Engine
	gate chan struct{}
}

func (g gated) Recv(count, sizeBytes int, handler func(from rdma.EngineID, msg []byte)) error {
	return g.Engine.Recv(count, sizeBytes, func(from rdma.EngineID, msg []byte) {
		<-g.gate
		handler(from, msg)
	})
}

// TestBurst: decode engines offer 1,000 requests to a prefill engine before it has
// begun one of them, and one of the decode engines processes no message until all
// requests of the others have ended. Every request completes, also if the
// prefill engine keeps few early messages and returns the others.
func TestBurst(t *testing.T) {
	testkit.Long(t, "a thousand requests at once")
	for _, earlyMax := range []int{maxEarly, 10} {
		t.Run(fmt.Sprintf("early=%d", earlyMax), func(t *testing.T) { testBurst(t, 1000, earlyMax) })
	}
}

func testBurst(t *testing.T, n, earlyMax int) {
	testkit.VerifyNone(t)
	s := newShelf()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	pe := newEngine(t, s, 5, n, 32<<20)
	pe.earlyMax = earlyMax
	slow := gated{gate: make(chan struct{})}
	des := []*engine{
		newEngine(t, s, 5, n, 16<<20), newEngine(t, s, 5, n, 16<<20),
		newEngineOver(t, s, 5, n, 16<<20, nil, func(r rdma.Engine) rdma.Engine {
			slow.Engine = r
			return slow
		}),
	}
	jobs := make([]*Decode, n)
	requests := make([]*request, n)
	var offered sync.WaitGroup
	for i := range n {
		requests[i] = newRequest(t, pe, des[i%len(des)], i, 1, 0)
		requests[i].pages[0] = uint32(i)
		offered.Go(func() {
			r := requests[i]
			var err error
			if jobs[i], err = r.de.Decode(ctx, DecodeJob{Request: r.name, Blocks: 1, Pages: r.pages, Peer: pe.peer}); err != nil {
				t.Error(err)
			}
		})
	}
	offered.Wait()
	if t.Failed() {
		return
	}
	errs := make([]chan error, len(des))
	for d := range des {
		errs[d] = make(chan error, n)
	}
	for i, r := range requests {
		go func() {
			p, err := pe.Prefill(ctx, PrefillJob{Request: r.name, Blocks: 1, Pages: r.pages})
			if err == nil {
				err = r.prefill(ctx, p)
			}
			errs[i%len(des)] <- errors.Join(err, jobs[i].Finish(ctx), r.check())
		}()
	}
	for d := range des {
		if d == len(des)-1 {
			close(slow.gate)
		}
		for i := d; i < n; i += len(des) {
			if err := <-errs[d]; err != nil {
				t.Fatalf("decode engine %d: %v", d, err)
			}
		}
	}
	if pe.earlyCount != 0 || len(pe.early) != 0 {
		t.Errorf("%d early messages are left", pe.earlyCount)
	}
}

// TestEarlyEnds: early messages for a job that never begins on this engine are dropped at the
// decode side's Cancel, or when their sender has failed.
func TestEarlyEnds(t *testing.T) {
	testkit.VerifyNone(t)
	s := newShelf()
	pe, de, gone := newEngine(t, s, 5, 64, 1<<20), newEngine(t, s, 5, 64, 1<<20), newEngine(t, s, 5, 64, 1<<20)
	pe.earlyMax = 2
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	early := func(n int) {
		t.Helper()
		for {
			pe.mu.Lock()
			have := pe.earlyCount
			pe.mu.Unlock()
			if have == n {
				return
			}
			if ctx.Err() != nil {
				t.Fatalf("%d early messages, want %d", have, n)
			}
			runtime.Gosched()
		}
	}
	offer := func(e *engine, sequence int) (*request, *Decode) {
		t.Helper()
		r := newRequest(t, pe, e, sequence, 1, 0)
		d, err := e.Decode(ctx, DecodeJob{Request: r.name, Blocks: 1, Pages: r.pages, Peer: pe.peer})
		if err != nil {
			t.Fatal(err)
		}
		return r, d
	}
	_, d := offer(de, 1)
	early(1)
	d.Cancel()
	early(0)
	_, a := offer(gone, 2)
	_, b := offer(gone, 3)
	early(2)
	pe.rdma.Disconnect(gone.rdma.Addr().Engine)
	if err := errors.Join(a.Finish(ctx), b.Finish(ctx)); !errors.Is(err, rdma.ErrPeerDied) {
		t.Errorf("jobs whose other side is gone: %v", err)
	}
	early(0)
	_, a = offer(gone, 5) // it has opened another session
	early(1)
	a.Cancel()
	r, d := offer(de, 4)
	p, err := pe.Prefill(ctx, PrefillJob{Request: r.name, Blocks: 1, Pages: r.pages})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.prefill(ctx, p), d.Finish(ctx), r.check()); err != nil {
		t.Fatal(err)
	}
}

// TestPagesOnly: the decode side can write the pages of the blocks that it sends, in
// every layer that the prefill device holds, and no other page of that device.
func TestPagesOnly(t *testing.T) {
	testkit.VerifyNone(t)
	for _, window := range []int{1, 2, 5} {
		s := newShelf()
		s.put(1, 6)
		pe, de := newEngine(t, s, window, 64, 1<<20), newEngine(t, s, 5, 64, 1<<20)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		r := newRequest(t, pe, de, 1, 8, 6)
		copy(r.pages, []uint32{11, 30, 12, 31, 13, 40, 50, 51})
		p, d, _, _ := r.both(ctx, 2) // the decode side reads blocks 2 to 5
		if err := d.await(ctx, func() bool { return d.accept != nil }); err != nil {
			t.Fatal(err)
		}
		lb := uint64(geo.LayerBytes(0))
		first := uint32(12)
		junk, err := de.rdma.Register(bytes.Repeat([]byte{0xEE}, int(lb)), rdma.RegisterOptions{Local: true})
		if err != nil {
			t.Fatal(err)
		}
		for l, base := range d.accept.Bases {
			for page := first; page < 64; page++ {
				if page == 12 || page == 13 || page == 31 || page == 40 {
					continue
				}
				dst := d.device
				dst.Len = 1 << 40 // longer than the window
				ended := rdma.NewFlag()
				err := de.rdma.Write(ctx, rdma.Write{Src: junk, Dst: dst, DstOffset: base + uint64(page-first)*lb, Len: lb, Done: ended.Set})
				if err == nil {
					err = ended.Wait(ctx)
				}
				if !errors.Is(err, rdma.ErrRefused) {
					t.Errorf("a write to page %d of layer %d: %v", page, l, err)
				}
			}
		}
		if err := errors.Join(r.prefill(ctx, p), d.Finish(ctx), r.check()); err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(pe.device, bytes.Repeat([]byte{0xEE}, int(lb))) {
			t.Error("a page of another request was written")
		}
	}
}
