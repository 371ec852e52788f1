package traffic

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/copier"
)

var (
	// ErrClosed: the manager is closed.
	ErrClosed = errors.New("traffic manager is closed")
	// ErrCancelled: the job was cancelled, by this side or by its peer.
	ErrCancelled = errors.New("cancelled")
	// ErrCut: a read was ended by Cut.
	ErrCut = errors.New("ended by Cut")
	// ErrJob: the job or the options are invalid. The error has the reason.
	ErrJob = errors.New("bad job")
	// ErrRecompute: Recompute was called for blocks that the model has already used.
	ErrRecompute = errors.New("a block to recompute has already been used")
	// ErrExists: a job of that request is running on this manager.
	ErrExists = errors.New("a job of that request is under way")
	// ErrBusy: the buffer has no room, and either the job may not wait for room or the queue of
	// waiting jobs is full.
	ErrBusy = errors.New("the buffer is full")
)

// BlockError reports that the bytes of one block differ from the bytes that its writer wrote.
type BlockError struct {
	Block, Layer int
	// Where is the memory in which the block was checked: "prefill device", "decode buffer",
	// "decode device".
	Where string
}

// Error returns a text with the block, the layer and the place of the check.
func (e *BlockError) Error() string {
	return fmt.Sprintf("traffic: block %d, layer %d: the bytes differ from those that were written (found in the %s)", e.Block, e.Layer, e.Where)
}

// Storage is the part of a storage client that a manager uses. *client.Store implements it.
type Storage interface {
	// Register makes memory of the manager usable for Read and Write. The manager closes the result
	// when nothing uses the memory any more.
	Register(mem []byte) (*client.Memory, error)
	Read(ctx context.Context, r client.ReadRequest) (client.ReadResult, error)
	Write(ctx context.Context, w client.WriteRequest) (client.WriteResult, error)
}

// NoPage in place of a device page: the block has no page in this page table. Only layers with
// recurrent state need no page of some blocks.
const NoPage = math.MaxUint32

// Device is an engine's device memory, or host memory used instead. It consists of KV pages, each
// with room for one Layer Block. Page p of layer l is at Bases[l mod len(Bases)] + p × Stride. The
// two sides of a request may have different layouts.
type Device struct {
	// Region is registered with Options.Compute. nil: the NIC cannot access the memory. Then only
	// Options.DeviceCopies refers to the memory, and layers pass through host memory ("Staged
	// device memory" in the package comment).
	Region rdma.Region
	// Bases are the offsets of the layers in Region, in bytes. A decode engine must have
	// one for each layer. A prefill engine may have fewer: it then holds len(Bases) layers
	// at a time (layerwise prefill).
	Bases []uint64
	// Stride is the distance from a page of a layer to the next one, in bytes. With the length of the
	// largest Layer Block, the default, the pages of a layer are contiguous (layer-major). With the length
	// of all layers, the pages of a block are contiguous (block-major).
	Stride uint64
	// Pages is the number of pages of each layer. A job with a page beyond them is refused. With 0,
	// the default, a job may have any page that lies in Region.
	Pages int
	// Tables has, for each layer, the number of its page table. An engine that allocates pages for
	// kinds of layers apart has several tables; a block then has a page in each of them, in the order
	// of their numbers. Layers of different tables may share memory. Empty, the default: one table
	// for all layers.
	Tables []int
}

// tables returns the number of page tables.
func (d *Device) tables() int {
	if len(d.Tables) == 0 {
		return 1
	}
	return slices.Max(d.Tables) + 1
}

// table returns the page table of a layer.
func (d *Device) table(layer int) int {
	if len(d.Tables) == 0 {
		return 0
	}
	return d.Tables[layer]
}

// offset returns the offset in Region of a page of a layer.
func (d *Device) offset(layer int, page uint32) uint64 {
	return d.Bases[layer%len(d.Bases)] + uint64(page)*d.Stride
}

// validate returns an error for pages of layers of g that overlap or lie outside of memory of size
// bytes.
func (d *Device) validate(g *geometry, size uint64) error {
	switch {
	case len(d.Tables) > 0 && (len(d.Tables) != g.layers || len(d.Bases) != g.layers || slices.Min(d.Tables) < 0 || slices.Max(d.Tables) >= g.layers):
		return fmt.Errorf("page tables %v and %d bases of %d layers; want one of each for each layer, and tables below %d: %w", d.Tables, len(d.Bases), g.layers, g.layers, ErrJob)
	case len(d.Bases) == 0:
		return fmt.Errorf("device memory without a layer: %w", ErrJob)
	case d.Pages < 0 || d.Pages > math.MaxUint32:
		return fmt.Errorf("device memory of %d pages a layer: %w", d.Pages, ErrJob)
	case d.Stride < g.maxBytes || d.Stride > size:
		return fmt.Errorf("device pages every %d bytes; a page has %d, and the memory %d: %w", d.Stride, g.maxBytes, size, ErrJob)
	}
	// bytes returns the size of the largest page at a base, which several layers may use in turn.
	bytes := func(base int) uint64 {
		if len(d.Bases) == g.layers {
			return g.bytes[base]
		}
		return g.maxBytes
	}
	pages := max(uint64(d.Pages), 1)
	for l, base := range d.Bases {
		if base > size || (size-base)/d.Stride+1 < pages || base+(pages-1)*d.Stride+bytes(l) > size {
			return fmt.Errorf("%d device pages of layer %d from %d on, every %d bytes, in memory of %d bytes: %w", pages, l, base, d.Stride, size, ErrJob)
		}
		for k, other := range d.Bases[:l] {
			if d.table(l) != d.table(k) {
				continue
			}
			apart, lower, higher := max(base, other)-min(base, other), bytes(k), bytes(l)
			if base < other {
				lower, higher = higher, lower
			}
			// Page p of the layer with the higher base and page p+i of the other layer overlap if
			// apart exceeds i × Stride by less than a page of the lower layer, or is less than i ×
			// Stride by less than a page of the higher layer. This is possible only for i = n and
			// i = n+1.
			if n := apart / d.Stride; apart%d.Stride < lower && n < pages || d.Stride-apart%d.Stride < higher && n+1 < pages {
				return fmt.Errorf("device pages of layers %d and %d overlap: they begin at %d and %d, every %d bytes: %w", k, l, other, base, d.Stride, ErrJob)
			}
		}
	}
	return nil
}

// Options of a Manager.
type Options struct {
	Namespace kv.Namespace
	// Storage reads and writes through the engine's storage NIC.
	Storage Storage
	// Compute is the engine's compute NIC. The manager calls Compute.Recv, so no other code may
	// call that method.
	Compute rdma.Engine
	// BufferBytes is the size of the buffer for whole prompts, in DRAM (the PE or DE buffer of the
	// DualPath paper). New maps it and registers it with Storage, Compute and Copier. It is rounded
	// up to a multiple of 2 MiB. Required.
	BufferBytes int64
	// AppendBytes is the size of a second buffer, which holds only decoded blocks (Append), so that
	// no decoded block waits for the memory of a prompt. It is rounded up like BufferBytes and
	// holds at least one block. Default: BufferBytes / 16.
	AppendBytes int64
	// Order lists the layers in the order in which the model computes them, each by its index in a
	// Full Block, which has the layers of group 0, then those of group 1, and so on. Layer l in every
	// other place of this package is the layer Order[l]. The managers of a cluster must have the same
	// Order. Default: the order in a Full Block.
	Order []int
	// Device is the engine's device memory. The caller owns its Region.
	Device Device
	// Copier moves bytes between the buffers and device memory. DeviceCopies is the memory of
	// Device.Region, registered with the Copier. The caller owns Copier and DeviceCopies and closes
	// them after the manager. Without a Copier the manager uses a copier.Plain of its own, which
	// needs device memory that the CPU can address; DeviceCopies must then be nil.
	Copier       copier.Copier
	DeviceCopies copier.Memory
	// SaveCopier, if set, makes the copies from device memory, and SaveCopies is that memory,
	// registered with it. A copier of a device has one stream. With two of them a load does not
	// wait for a save that waits for the engine's stream. The caller owns both. Default: Copier
	// makes all copies.
	SaveCopier copier.Copier
	SaveCopies copier.Memory
	// PersistMax is the largest number of blocks that wait to be stored. Further blocks are not
	// stored; the requests are not affected. Default: the number of blocks for which the two
	// buffers have room, because each waiting block is in a buffer; but at least 4096.
	PersistMax int
	// Verify selects where blocks on the way between the engines are compared with their checksums.
	// Default: VerifyEveryHop.
	Verify Verify
	Logger *slog.Logger
}

// EnsureDefaults fills the fields that are zero.
func (o *Options) EnsureDefaults() {
	if o.AppendBytes == 0 {
		o.AppendBytes = o.BufferBytes / 16
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	held := int64(0)
	if len(o.Namespace.Geometry.Groups) > 0 {
		if o.Device.Stride == 0 {
			for i := range o.Namespace.Geometry.Groups {
				o.Device.Stride = max(o.Device.Stride, uint64(o.Namespace.Geometry.LayerBytes(i)))
			}
		}
		block := o.Namespace.Geometry.BlockBytes()
		o.AppendBytes = max(o.AppendBytes, block)
		held = (max(o.BufferBytes, 0) + o.AppendBytes) / max(block, 1)
	}
	if o.PersistMax == 0 {
		o.PersistMax = int(max(4096, held))
	}
}

// Validate returns the first error in the options. Call it after EnsureDefaults.
func (o *Options) Validate() error {
	g := o.Namespace.Geometry
	if err := g.Validate(); err != nil {
		return err
	}
	if err := checkGroups(g); err != nil {
		return fmt.Errorf("namespace %q has %v: %w", o.Namespace.Name, g, err)
	}
	if err := checkOrder(o.Order, g); err != nil {
		return err
	}
	switch {
	case o.Storage == nil || o.Compute == nil:
		return fmt.Errorf("Storage and Compute are required: %w", ErrJob)
	case o.Verify < 0:
		return fmt.Errorf("Verify is %d; it must be VerifyEveryHop, VerifyLastHop or VerifyOneIn of a number above 1: %w", o.Verify, ErrJob)
	case o.BufferBytes <= 0:
		return fmt.Errorf("a buffer of %d bytes (BufferBytes): %w", o.BufferBytes, ErrJob)
	case o.Copier == nil && o.DeviceCopies != nil:
		return fmt.Errorf("DeviceCopies without a Copier: %w", ErrJob)
	case o.Copier == nil && o.deviceMemory() == nil:
		return fmt.Errorf("the CPU cannot address this device memory, and no Copier was given: %w", ErrJob)
	case o.Copier != nil && o.DeviceCopies == nil:
		return fmt.Errorf("a Copier without DeviceCopies: %w", ErrJob)
	case (o.SaveCopier == nil) != (o.SaveCopies == nil) || o.SaveCopier != nil && (o.Copier == nil || o.SaveCopies.Len() != o.DeviceCopies.Len()):
		return fmt.Errorf("SaveCopier and SaveCopies: want both, beside a Copier, with the same device memory: %w", ErrJob)
	case o.Copier != nil && o.Device.Region != nil && o.DeviceCopies.Len() != o.Device.Region.Len():
		return fmt.Errorf("DeviceCopies has %d bytes, Device.Region %d: %w", o.DeviceCopies.Len(), o.Device.Region.Len(), ErrJob)
	}
	geo := newGeometry(g, o.Order)
	return o.Device.validate(&geo, o.deviceBytes())
}

// deviceBytes returns the size of device memory in bytes.
func (o *Options) deviceBytes() uint64 {
	if o.Device.Region == nil {
		return o.DeviceCopies.Len()
	}
	return o.Device.Region.Len()
}

// deviceMemory returns the bytes of device memory, or nil if the CPU cannot address it.
func (o *Options) deviceMemory() []byte {
	if o.Device.Region == nil {
		return nil
	}
	return o.Device.Region.Bytes()
}

// Peer has the address and the token of the other side's manager.
type Peer struct {
	Addr  rdma.Addr
	Token rdma.Token
}

const (
	// recvBuffers is the number of receive buffers for the messages of peers, of recvBytes each.
	// The longest message lists pagesPerMessage pages or rangesPerMessage ranges: 40 KiB.
	recvBuffers = 64
	recvBytes   = 64 << 10
	// MaxBlocks is the longest prompt of a job: 2 M tokens in blocks of 16. It is the
	// longest chain that a storage node takes unless configured otherwise
	// (limits.chain_blocks), so every block of such a prompt can be found and stored.
	// A longer job is refused (ErrJob).
	MaxBlocks = 1 << 17
	// maxEarly is the largest number of messages that a manager keeps for jobs that have not begun
	// on it, about 300 bytes each. Further messages are returned to their sender, which sends them
	// again. returnsMax is the largest number of messages that are being returned at a time. When
	// this number is reached, the method receive waits.
	maxEarly   = 4096
	returnsMax = 256
	// queueMax is the largest number of jobs that wait for memory. Each waiting job takes a
	// goroutine of the engine, so in practice fewer wait.
	queueMax = 1 << 16
	// A message that the other side could not accept is sent again after a pause, which doubles
	// from resendMin to resendMax.
	resendMin = time.Millisecond
	resendMax = 250 * time.Millisecond
)

// Manager is the traffic manager of one engine. Its methods may be called
// concurrently.
type Manager struct {
	opts Options
	geo  geometry
	// tables is the number of page tables of opts.Device.
	tables int
	log    *slog.Logger
	imms   atomic.Uint32
	// buffer is the memory for prompts, appended the memory for decoded blocks.
	buffer, appended space
	// plain is the copier of the manager, used if the caller set no Options.Copier.
	plain *copier.Plain

	// returns bounds the early messages that are being sent back to their senders: it has an
	// element for each.
	returns chan struct{}
	// life ends when Close has ended the jobs. mu is held when endLife is called.
	life    context.Context
	endLife context.CancelFunc

	// closing makes one call of Close release the buffers. closeErr is the result of every call.
	closing  sync.Once
	closeErr error

	mu     sync.Mutex
	closed bool
	jobs   map[string]job
	// early has, by request, the messages for jobs that have not begun on this manager. Invariant:
	// earlyCount is the number of these messages, and earlyCount <= earlyMax.
	early                map[string][]earlyMessage
	earlyCount, earlyMax int
	// senders has an element for each peer with a message in early.
	senders map[rdma.EngineID]*earlySender

	pending pending
	// work counts goroutines: those of jobs, of writes of decoded blocks, and of messages to be
	// repeated. It is incremented with mu held, and only while life has not ended.
	work sync.WaitGroup
}

// page returns the device page of a block in a layer. pages has, for each block, a page in each page
// table.
func (m *Manager) page(pages []uint32, layer, block int) uint32 {
	return pages[block*m.tables+m.opts.Device.table(layer)]
}

// job is a Prefill or a Decode.
type job interface {
	message(from rdma.EngineID, m *pb.TrafficMessage)
	close(err error) error
}

// earlySender is a peer with kept messages. watch is an expectation that ends with the session to the peer;
// nil until watchSender has set it.
type earlySender struct {
	messages int
	watch    *rdma.Expectation
}

type earlyMessage struct {
	from rdma.EngineID
	m    *pb.TrafficMessage
}

// New maps and registers the buffers and returns a manager, which receives the
// messages of opts.Compute. Close the manager before Storage, Compute and Copier.
func New(opts Options) (*Manager, error) {
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, fmt.Errorf("traffic: %w", err)
	}
	m := &Manager{
		opts: opts, log: opts.Logger, jobs: make(map[string]job),
		early: make(map[string][]earlyMessage), earlyMax: maxEarly, senders: make(map[rdma.EngineID]*earlySender), returns: make(chan struct{}, returnsMax),
		geo:     newGeometry(opts.Namespace.Geometry, opts.Order),
		pending: newPending(opts.PersistMax),
		tables:  opts.Device.tables(),
	}
	m.life, m.endLife = context.WithCancel(context.Background())
	if err := m.open(); err != nil {
		m.endLife()
		return nil, fmt.Errorf("traffic: %w", errors.Join(err, m.release()))
	}
	return m, nil
}

// open maps and registers the buffers. release undoes open.
func (m *Manager) open() (err error) {
	o := &m.opts
	if o.Copier == nil {
		if m.plain, err = copier.NewPlain(copier.PlainOptions{}); err != nil {
			return err
		}
		if o.DeviceCopies, err = m.plain.Register(o.Device.Region.Bytes(), rdma.RegisterOptions{}); err != nil {
			return err
		}
		o.Copier = m.plain
	}
	if err := m.buffer.open(o.BufferBytes, o); err != nil {
		return fmt.Errorf("buffer: %w", err)
	}
	if m.buffer.region, err = o.Compute.Register(m.buffer.Bytes(), rdma.RegisterOptions{Local: true}); err != nil {
		return fmt.Errorf("buffer: %w", err)
	}
	if err := m.appended.open(o.AppendBytes, o); err != nil {
		return fmt.Errorf("buffer of decoded blocks: %w", err)
	}
	return o.Compute.Recv(recvBuffers, recvBytes, m.receive)
}

// release closes the buffers. No job may be running.
func (m *Manager) release() error {
	ctx, cancel := context.WithTimeout(context.Background(), teardownWithin)
	defer cancel()
	err := errors.Join(m.buffer.close(ctx), m.appended.close(ctx))
	if m.plain != nil {
		err = errors.Join(err, m.plain.Close())
	}
	return err
}

// toDevice copies from the buffer to device memory, after the mark if it is not nil. Also after an
// error, it returns only when its copies have ended, so close waits for the copies too.
func (m *Manager) toDevice(ctx context.Context, spans []copier.Span, after copier.Mark) error {
	return copySpans(ctx, m.opts.Copier, copier.Batch{Src: m.buffer.copies, Dst: m.opts.DeviceCopies, After: after}, spans)
}

// fromDevice copies from device memory to one of the buffers. Otherwise it is like toDevice.
func (m *Manager) fromDevice(ctx context.Context, to *space, spans []copier.Span, after copier.Mark) error {
	if c := m.opts.SaveCopier; c != nil {
		return copySpans(ctx, c, copier.Batch{Src: m.opts.SaveCopies, Dst: to.saves, After: after}, spans)
	}
	return copySpans(ctx, m.opts.Copier, copier.Batch{Src: m.opts.DeviceCopies, Dst: to.copies, After: after}, spans)
}

func copySpans(ctx context.Context, c copier.Copier, b copier.Batch, spans []copier.Span) error {
	for b.Spans = range slices.Chunk(spans, copier.MaxSpans) {
		if err := copier.Copy(ctx, c, b); err != nil {
			return err
		}
	}
	return nil
}

// Close cancels the running jobs, waits for them and for the blocks that are being stored, and then
// releases the buffers. It returns an error if a buffer could not be released because a peer may
// still write to it. Close may be called twice; each call returns when the buffers have been released.
func (m *Manager) Close() error {
	m.closing.Do(func() {
		m.endAll()
		if err := m.release(); err != nil {
			m.closeErr = fmt.Errorf("traffic: %w", err)
		}
	})
	return m.closeErr
}

// endAll ends the jobs and waits for the manager's goroutines.
func (m *Manager) endAll() {
	m.mu.Lock()
	m.closed = true
	jobs := slices.Collect(maps.Values(m.jobs))
	m.mu.Unlock()
	for _, j := range jobs {
		_ = j.close(ErrClosed) // Finish returns ErrClosed to the job's owner
	}
	m.mu.Lock()
	m.endLife()
	var watches []*rdma.Expectation
	for _, s := range m.senders {
		watches = append(watches, s.watch)
	}
	m.mu.Unlock()
	cancelAll(watches)
	m.work.Wait()
}

// Stats are a manager's gauges.
type Stats struct {
	// BufferBytes is the size of the buffer for prompts, BufferUsedBytes the allocated
	// part of it.
	BufferBytes, BufferUsedBytes int64
	// AppendBytes is the size of the buffer for decoded blocks, AppendUsedBytes the
	// allocated part of it.
	AppendBytes, AppendUsedBytes int64
	// Jobs is the number of running jobs, Persisting the number of blocks that wait
	// for storage.
	Jobs, Persisting int
}

// Stats returns the manager's gauges.
func (m *Manager) Stats() Stats {
	buffer, appended := m.buffer.Stats(), m.appended.Stats()
	s := Stats{
		BufferBytes: buffer.SizeBytes, BufferUsedBytes: buffer.UsedBytes,
		AppendBytes: appended.SizeBytes, AppendUsedBytes: appended.UsedBytes,
		Persisting: m.pending.len(),
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s.Jobs = len(m.jobs)
	return s
}

// Buffer returns the memory of the buffer for prompts, for tools that inject faults. The bytes
// belong to the running jobs.
func (m *Manager) Buffer() []byte { return m.buffer.Bytes() }

// begin adds a job.
func (m *Manager) begin(request string, j job) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.closed:
		return ErrClosed
	case m.jobs[request] != nil:
		return fmt.Errorf("traffic: request %q: %w", request, ErrExists)
	}
	m.jobs[request] = j
	m.work.Add(1)
	return nil
}

// takeEarly removes and returns the messages that arrived for a request before its job.
func (m *Manager) takeEarly(request string) []earlyMessage {
	m.mu.Lock()
	out := m.early[request]
	delete(m.early, request)
	over := m.forgottenLocked(out)
	m.mu.Unlock()
	cancelAll(over)
	return out
}

// forgottenLocked counts messages that are not kept any more. It returns the watches of senders without
// further messages, which the caller cancels without the lock.
func (m *Manager) forgottenLocked(messages []earlyMessage) (over []*rdma.Expectation) {
	m.earlyCount -= len(messages)
	for _, e := range messages {
		s := m.senders[e.from]
		if s == nil {
			continue // its session has ended
		}
		if s.messages--; s.messages == 0 {
			delete(m.senders, e.from)
			over = append(over, s.watch)
		}
	}
	return over
}

// cancelAll cancels watches; a nil watch is cancelled by watchSender.
func cancelAll(watches []*rdma.Expectation) {
	for _, w := range watches {
		if w != nil {
			w.Cancel()
		}
	}
}

// keepEarlyLocked keeps a message for a job that has not begun. It returns false if there is no
// room.
func (m *Manager) keepEarlyLocked(from rdma.EngineID, t *pb.TrafficMessage) bool {
	if m.earlyCount >= m.earlyMax {
		return false
	}
	m.early[t.Request] = append(m.early[t.Request], earlyMessage{from, t})
	m.earlyCount++
	return true
}

// dropEarlyLocked drops the kept messages of a request from one sender. It returns watches as
// forgottenLocked does.
func (m *Manager) dropEarlyLocked(request string, sender rdma.EngineID) []*rdma.Expectation {
	var kept, dropped []earlyMessage
	for _, e := range m.early[request] {
		if e.from == sender {
			dropped = append(dropped, e)
		} else {
			kept = append(kept, e)
		}
	}
	if m.early[request] = kept; len(kept) == 0 {
		delete(m.early, request)
	}
	return m.forgottenLocked(dropped)
}

// watchSender arranges that the kept messages of a peer are dropped when the session ends over which they
// came: their jobs have ended with the session, also if the peer opens another session. A message that the
// handler gets after the end of its session is dropped with the next session.
func (m *Manager) watchSender(from rdma.EngineID, s *earlySender) {
	// No write carries this immediate.
	watch, err := m.opts.Compute.ExpectImm(rdma.Expect{Imm: m.imm(1), Count: 1, From: []rdma.EngineID{from}, Done: func(error) { m.senderEnded(from, s) }})
	if err != nil {
		m.senderEnded(from, s) // the engine is closed
		return
	}
	m.mu.Lock()
	s.watch = watch
	over := m.senders[from] != s || m.life.Err() != nil
	m.mu.Unlock()
	if over {
		watch.Cancel()
	}
}

// senderEnded drops the kept messages of a peer, unless the peer has none any more.
func (m *Manager) senderEnded(from rdma.EngineID, s *earlySender) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.senders[from] != s {
		return
	}
	delete(m.senders, from)
	for request := range m.early {
		m.dropEarlyLocked(request, from) // no watch is left
	}
}

// end removes a job.
func (m *Manager) end(request string, j job) {
	m.mu.Lock()
	if m.jobs[request] == j {
		delete(m.jobs, request)
	}
	m.mu.Unlock()
	m.work.Done()
}

// receive handles a message of a peer. The engine has authenticated the peer by its token.
func (m *Manager) receive(from rdma.EngineID, raw []byte) {
	t := &pb.TrafficMessage{}
	if err := proto.Unmarshal(raw, t); err != nil {
		m.log.Warn("a message of another traffic manager cannot be decoded", "peer", from.String(), "bytes", len(raw), "err", err)
		return
	}
	if j := m.find(from, t); j != nil {
		j.message(from, t)
		return
	}
	switch t.Body.(type) {
	case *pb.TrafficMessage_Offer, *pb.TrafficMessage_Held:
		m.keep(from, t, raw)
	}
	// Any other message is about a job that has ended here.
}

// find returns the job of a message's request; nil if there is none. If a message cancels a job
// that has not begun on this manager, find drops the job's kept messages.
func (m *Manager) find(from rdma.EngineID, t *pb.TrafficMessage) job {
	m.mu.Lock()
	j := m.jobs[t.Request]
	var over []*rdma.Expectation
	if j == nil && t.GetCancel() != nil {
		over = m.dropEarlyLocked(t.Request, from)
	}
	m.mu.Unlock()
	cancelAll(over)
	return j
}

// keep keeps a message of a decode side until its job begins on this manager, or returns it to its
// sender. The message must not be dropped, because the decode side would wait forever.
func (m *Manager) keep(from rdma.EngineID, t *pb.TrafficMessage, raw []byte) {
	m.mu.Lock()
	if j := m.jobs[t.Request]; j != nil {
		m.mu.Unlock()
		j.message(from, t) // the job has begun since the call of find
		return
	}
	kept := m.keepEarlyLocked(from, t)
	sender := m.senders[from]
	first := kept && sender == nil
	if first {
		sender = new(earlySender)
		m.senders[from] = sender
	}
	if kept {
		sender.messages++
	}
	m.mu.Unlock()
	if first {
		m.watchSender(from, sender)
	}
	if kept {
		return
	}
	back := &pb.TrafficMessage{Request: t.Request, Version: wireVersion, Body: &pb.TrafficMessage_Again{Again: &pb.TrafficAgain{Message: bytes.Clone(raw)}}}
	m.returns <- struct{}{}
	if !m.start() {
		<-m.returns
		return
	}
	go func() {
		defer m.work.Done()
		defer func() { <-m.returns }()
		// If the sender's session has ended, its job has ended too.
		_ = m.send(m.life, from, back, func(error) {})
	}()
}

// start adds a goroutine to m.work. It returns false if the manager is closed.
func (m *Manager) start() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.life.Err() != nil {
		return false
	}
	m.work.Add(1)
	return true
}

// send sends a message. If the peer has no free receive buffer, send repeats the message after a
// pause, until ctx ends. It calls done once, with nil when the peer has received the message. If
// send returns an error, it does not call done.
func (m *Manager) send(ctx context.Context, to rdma.EngineID, t *pb.TrafficMessage, done func(error)) error {
	raw, err := proto.Marshal(t)
	if err != nil {
		return fmt.Errorf("traffic: %w", err)
	}
	return m.sendRaw(ctx, to, raw, resendMin, done)
}

// sendRaw is send for an encoded message. pause is the pause before the next attempt.
func (m *Manager) sendRaw(ctx context.Context, to rdma.EngineID, raw []byte, pause time.Duration, done func(error)) error {
	err := m.opts.Compute.Send(ctx, to, raw, func(err error) {
		var refused *rdma.RefusedError
		switch {
		case err == nil:
			done(nil)
		case errors.As(err, &refused) && refused.Reason == rdma.ReasonNoBuffer && m.start():
			go func() {
				defer m.work.Done()
				if err := m.sendLater(ctx, to, raw, pause, done); err != nil {
					done(err)
				}
			}()
		default:
			done(fmt.Errorf("traffic: message to %v: %w", to, err))
		}
	})
	if err != nil {
		return fmt.Errorf("traffic: message to %v: %w", to, err)
	}
	return nil
}

// sendLater is sendRaw after a pause.
func (m *Manager) sendLater(ctx context.Context, to rdma.EngineID, raw []byte, pause time.Duration, done func(error)) error {
	// Half of the pause is random, so that senders that were refused at the same time
	// do not send again at the same time.
	t := time.NewTimer(pause/2 + rand.N(pause))
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-m.life.Done():
		return ErrClosed
	}
	return m.sendRaw(ctx, to, raw, min(2*pause, resendMax), done)
}

// imm returns the first of n consecutive immediates that no other job of this manager has.
func (m *Manager) imm(n int) uint32 { return m.imms.Add(uint32(n)) - uint32(n) + 1 }
