package traffic

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"

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
	// ErrCancelled: the job was cancelled, here or by its other side.
	ErrCancelled = errors.New("cancelled")
	// ErrCut: a read was told to stop.
	ErrCut = errors.New("told to stop")
	// ErrJob: the job is not one that can be done; it says why.
	ErrJob = errors.New("bad job")
	// ErrExists: a job of that request is under way here.
	ErrExists = errors.New("a job of that request is under way")
	// ErrBusy: the buffer is used up and so is its queue.
	ErrBusy = errors.New("the buffer is used up")
)

// BlockError says that the bytes of one block are not the writer's.
type BlockError struct {
	Block, Layer int
	// Where it was noticed: "prefill device", "decode buffer", "decode device".
	Where string
}

// Error says which.
func (e *BlockError) Error() string {
	return fmt.Sprintf("traffic: block %d, layer %d: not the bytes that were written (noticed in the %s)", e.Block, e.Layer, e.Where)
}

// Storage is what a manager needs of storage nodes; *client.Store has it.
type Storage interface {
	// Register makes memory of the manager usable for Read and Write; the manager
	// closes the result when nothing uses the memory any more.
	Register(mem []byte) (*client.Memory, error)
	Read(ctx context.Context, r client.ReadRequest) (client.ReadResult, error)
	Write(ctx context.Context, w client.WriteRequest) (client.WriteResult, error)
}

// Device is an engine's device memory, or what stands for it: KV pages of one
// Layer Block each.
type Device struct {
	// Region is registered with Options.Compute.
	Region rdma.Region
	// Bases are the offsets of the layers: layer l is at Bases[l mod len(Bases)].
	// One for each layer holds a request whole; a decode engine has that. Fewer,
	// on a prefill engine, hold so many layers at a time (layerwise prefill).
	Bases []uint64
}

// offset is where a block's page of a layer is.
func (d *Device) offset(layer int, page uint32, layerBytes uint64) uint64 {
	return d.Bases[layer%len(d.Bases)] + uint64(page)*layerBytes
}

// Options of a Manager.
type Options struct {
	Namespace kv.Namespace
	// Storage reads and writes through the engine's storage NIC.
	Storage Storage
	// Compute is the engine's compute NIC; the manager takes its messages
	// (rdma.Engine.Recv), so nobody else may.
	Compute rdma.Engine
	// BufferBytes is the size of the PE or DE buffer: DRAM that holds whole prompts
	// on their way. New maps it and registers it with Storage, Compute and Copier.
	// It is rounded up to a multiple of 2 MiB. Required.
	BufferBytes int64
	// AppendBytes is the size of a second buffer, which holds decoded blocks only
	// (Append): no decoded block waits for memory behind a prompt. It is rounded up
	// like BufferBytes and holds at least one block. Default: BufferBytes / 16.
	AppendBytes int64
	// Device is the engine's device memory; its Region stays the caller's.
	Device Device
	// Copier moves bytes between the buffers and device memory. DeviceCopies is
	// Device.Region's memory, registered with the Copier. Both stay the caller's, who
	// closes them after the manager. Without a Copier the manager uses a
	// copier.Plain of its own, which needs device memory that the CPU can address;
	// DeviceCopies must then be nil.
	Copier       copier.Copier
	DeviceCopies copier.Memory
	// PersistMax bounds the blocks that wait for storage; more are dropped (the
	// cache loses them, nothing else does). Default 4096.
	PersistMax int
	Logger     *slog.Logger
}

// EnsureDefaults fills the fields that are zero.
func (o *Options) EnsureDefaults() {
	if o.AppendBytes == 0 {
		o.AppendBytes = o.BufferBytes / 16
	}
	if o.PersistMax == 0 {
		o.PersistMax = 4096
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if len(o.Namespace.Geometry.Groups) > 0 {
		o.AppendBytes = max(o.AppendBytes, o.Namespace.Geometry.PieceBytes(0))
	}
}

// Validate says what is wrong with the options, after EnsureDefaults.
func (o *Options) Validate() error {
	g := o.Namespace.Geometry
	if err := g.Validate(); err != nil {
		return err
	}
	switch {
	case len(g.Groups) != 1 || g.Groups[0].Kind != kv.Full:
		return fmt.Errorf("namespace %q has %v: a manager carries one full-attention group, layer by layer: %w", o.Namespace.Name, g, ErrJob)
	case o.Storage == nil || o.Compute == nil || o.Device.Region == nil:
		return fmt.Errorf("Storage, Compute and Device.Region are required: %w", ErrJob)
	case len(o.Device.Bases) == 0:
		return fmt.Errorf("device memory without a layer: %w", ErrJob)
	case o.BufferBytes <= 0:
		return fmt.Errorf("a buffer of %d bytes (BufferBytes): %w", o.BufferBytes, ErrJob)
	case o.Copier == nil && o.DeviceCopies != nil:
		return fmt.Errorf("DeviceCopies without a Copier: %w", ErrJob)
	case o.Copier == nil && o.Device.Region.Bytes() == nil:
		return fmt.Errorf("the CPU cannot address this device memory, and no Copier was given: %w", ErrJob)
	case o.Copier != nil && o.DeviceCopies == nil:
		return fmt.Errorf("a Copier without DeviceCopies: %w", ErrJob)
	case o.Copier != nil && o.DeviceCopies.Len() != o.Device.Region.Len():
		return fmt.Errorf("DeviceCopies has %d bytes, Device.Region %d: %w", o.DeviceCopies.Len(), o.Device.Region.Len(), ErrJob)
	}
	return nil
}

// Peer is how to reach the other side's manager.
type Peer struct {
	Addr  rdma.Addr
	Token rdma.Token
}

const (
	// recvBuffers and recvBytes hold messages of peers: an Accept of 8,192 pages
	// is 40 KiB.
	recvBuffers = 64
	recvBytes   = 64 << 10
	// maxBlocks bounds the blocks of a job, so that its messages fit.
	maxBlocks = 8192
	// maxEarly bounds the messages that came before their job.
	maxEarly = 256
)

// Manager is the traffic manager of one engine. Its methods may be called
// concurrently.
type Manager struct {
	opts Options
	geo  geometry
	log  *slog.Logger
	imms atomic.Uint32
	// buffer holds prompts, appended decoded blocks.
	buffer, appended space
	// plain is opts.Copier where the caller gave none.
	plain *copier.Plain

	mu     sync.Mutex
	closed bool
	jobs   map[string]job
	// early are messages whose job has not begun here, oldest first.
	early   []earlyMessage
	pending pending
	work    sync.WaitGroup
}

// job is a Prefill or a Decode.
type job interface {
	message(from rdma.EngineID, m *pb.TrafficMessage)
	close(err error) error
}

type earlyMessage struct {
	from rdma.EngineID
	m    *pb.TrafficMessage
}

// geometry is what a manager needs of the namespace's.
type geometry struct {
	layers                int
	layerBytes, fullBytes uint64
	digest                kv.GeometryDigest
}

// New maps and registers the buffers, returns a manager and takes over the
// messages of opts.Compute. Close the manager before Storage, Compute and Copier.
func New(opts Options) (*Manager, error) {
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, fmt.Errorf("traffic: %w", err)
	}
	g := opts.Namespace.Geometry
	m := &Manager{
		opts: opts, log: opts.Logger, jobs: make(map[string]job),
		geo:     geometry{g.Groups[0].Layers, uint64(g.LayerBytes(0)), uint64(g.PieceBytes(0)), g.Digest()},
		pending: newPending(opts.PersistMax),
	}
	if err := m.open(); err != nil {
		return nil, fmt.Errorf("traffic: %w", errors.Join(err, m.release()))
	}
	return m, nil
}

// open takes what release gives back.
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

// release gives the buffers back; nothing is under way.
func (m *Manager) release() error {
	ctx, cancel := context.WithTimeout(context.Background(), teardownWithin)
	defer cancel()
	err := errors.Join(m.buffer.close(ctx), m.appended.close(ctx))
	if m.plain != nil {
		err = errors.Join(err, m.plain.Close())
	}
	return err
}

// toDevice copies from the buffer to device memory. It returns when nothing of it
// is under way, so that what waits for the caller waits for the copy.
func (m *Manager) toDevice(ctx context.Context, spans []copier.Span) error {
	return copier.Copy(ctx, m.opts.Copier, copier.Batch{Src: m.buffer.copies, Dst: m.opts.DeviceCopies, Spans: spans})
}

// Close cancels what is under way and waits for it, and for what is being
// persisted; then it gives the buffers back. An error says what of them could not
// be: it may still be written to. Close may be called twice.
func (m *Manager) Close() error {
	m.mu.Lock()
	first := !m.closed
	m.closed = true
	jobs := make([]job, 0, len(m.jobs))
	for _, j := range m.jobs {
		jobs = append(jobs, j)
	}
	m.mu.Unlock()
	for _, j := range jobs {
		_ = j.close(ErrClosed) // Finish returns it to the job's owner
	}
	m.work.Wait()
	if !first {
		return nil
	}
	if err := m.release(); err != nil {
		return fmt.Errorf("traffic: %w", err)
	}
	return nil
}

// Stats are what a manager holds now.
type Stats struct {
	// BufferBytes of whole prompts, of which BufferUsedBytes are taken.
	BufferBytes, BufferUsedBytes int64
	// AppendBytes of decoded blocks, of which AppendUsedBytes are taken.
	AppendBytes, AppendUsedBytes int64
	// Jobs are under way; Persisting blocks wait for storage.
	Jobs, Persisting int
}

// Stats returns what the manager holds now.
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

// Buffer returns the memory of the PE or DE buffer, for tools that inject faults.
// Its bytes belong to the jobs under way.
func (m *Manager) Buffer() []byte { return m.buffer.Bytes() }

// begin enters a job and hands it what came early.
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

// takeEarly returns what came for a request before its job.
func (m *Manager) takeEarly(request string) []earlyMessage {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []earlyMessage
	m.early = slices.DeleteFunc(m.early, func(e earlyMessage) bool {
		if e.m.Request != request {
			return false
		}
		out = append(out, e)
		return true
	})
	return out
}

// end takes a job out.
func (m *Manager) end(request string, j job) {
	m.mu.Lock()
	if m.jobs[request] == j {
		delete(m.jobs, request)
	}
	m.mu.Unlock()
	m.work.Done()
}

// receive takes a message of a peer: it has proved the token.
func (m *Manager) receive(from rdma.EngineID, raw []byte) {
	t := &pb.TrafficMessage{}
	if err := proto.Unmarshal(raw, t); err != nil {
		m.log.Warn("a traffic manager sent what does not decode", "peer", from.String(), "bytes", len(raw), "err", err)
		return
	}
	m.mu.Lock()
	j := m.jobs[t.Request]
	if j == nil {
		if t.GetCancel() == nil {
			if len(m.early) == maxEarly {
				m.early = m.early[1:]
			}
			m.early = append(m.early, earlyMessage{from, t})
		}
		m.mu.Unlock()
		return
	}
	m.mu.Unlock()
	j.message(from, t)
}

// send sends a message; the job fails if it does not arrive.
func (m *Manager) send(ctx context.Context, to rdma.EngineID, t *pb.TrafficMessage, failed func(error)) error {
	raw, err := proto.Marshal(t)
	if err != nil {
		return fmt.Errorf("traffic: %w", err)
	}
	return m.opts.Compute.Send(ctx, to, raw, func(err error) {
		if err != nil {
			failed(fmt.Errorf("traffic: message to %v: %w", to, err))
		}
	})
}

// imm returns n consecutive immediates that no other job of this process has.
func (m *Manager) imm(n int) uint32 { return m.imms.Add(uint32(n)) - uint32(n) + 1 }
