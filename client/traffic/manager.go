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
	"github.com/penstock-kv/penstock/internal/arena"
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
	// Storage reads and writes through the engine's storage NIC; Memory is Buffer,
	// registered with it.
	Storage Storage
	Memory  *client.Memory
	// Compute is the engine's compute NIC; the manager takes its messages
	// (rdma.Engine.Recv), so nobody else may.
	Compute rdma.Engine
	// Buffer is the PE or DE buffer: bounded DRAM. Region is all of it, registered
	// with Compute.
	Buffer *arena.Arena
	Region rdma.Region
	Device Device
	// Copier moves bytes between the buffer and device memory: BufferCopies is all
	// of Buffer, DeviceCopies is Device.Region's memory, both registered with it.
	// All three stay the caller's, who closes them after the manager. Without a
	// Copier the manager has a copier.Plain of its own, which needs device memory
	// that the CPU can address; the memories are then not set.
	Copier                     copier.Copier
	BufferCopies, DeviceCopies copier.Memory
	// PersistMax bounds the blocks that wait for storage; more are dropped (the
	// cache loses them, nothing else does). Default 4096.
	PersistMax int
	Logger     *slog.Logger
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

// New returns a manager and takes over the messages of opts.Compute.
func New(opts Options) (*Manager, error) {
	g := opts.Namespace.Geometry
	if err := g.Validate(); err != nil {
		return nil, fmt.Errorf("traffic: %w", err)
	}
	if len(g.Groups) != 1 || g.Groups[0].Kind != kv.Full {
		return nil, fmt.Errorf("traffic: namespace %q has %v: one full-attention group is what is carried layer by layer: %w", opts.Namespace.Name, g, ErrJob)
	}
	if len(opts.Device.Bases) == 0 {
		return nil, fmt.Errorf("traffic: device memory without a layer: %w", ErrJob)
	}
	if opts.PersistMax == 0 {
		opts.PersistMax = 4096
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	plain, err := opts.openCopier()
	if err != nil {
		return nil, fmt.Errorf("traffic: %w", err)
	}
	m := &Manager{
		opts: opts, log: opts.Logger, jobs: make(map[string]job),
		geo:     geometry{g.Groups[0].Layers, uint64(g.LayerBytes(0)), uint64(g.PieceBytes(0)), g.Digest()},
		pending: newPending(opts.PersistMax), plain: plain,
	}
	if err := opts.Compute.Recv(recvBuffers, recvBytes, m.receive); err != nil {
		return nil, errors.Join(fmt.Errorf("traffic: %w", err), m.closeCopier())
	}
	return m, nil
}

// openCopier checks what was given to copy with. Where nothing was, it makes a
// Plain, which it returns.
func (o *Options) openCopier() (*copier.Plain, error) {
	if o.Copier != nil {
		return nil, o.checkCopies()
	}
	switch {
	case o.BufferCopies != nil || o.DeviceCopies != nil:
		return nil, fmt.Errorf("memory to copy with, and no Copier: %w", ErrJob)
	case o.Device.Region.Bytes() == nil:
		return nil, fmt.Errorf("the CPU cannot address this device memory, and no Copier was given: %w", ErrJob)
	}
	plain, err := copier.NewPlain(copier.PlainOptions{})
	if err != nil {
		return nil, err
	}
	if o.BufferCopies, err = plain.Register(o.Region.Bytes(), rdma.RegisterOptions{}); err == nil {
		o.DeviceCopies, err = plain.Register(o.Device.Region.Bytes(), rdma.RegisterOptions{})
	}
	if err != nil {
		return nil, errors.Join(err, plain.Close())
	}
	o.Copier = plain
	return plain, nil
}

// checkCopies refuses memory that is not what the Copier is to reach.
func (o *Options) checkCopies() error {
	for _, m := range []struct {
		what   string
		copies copier.Memory
		region rdma.Region
	}{{"BufferCopies", o.BufferCopies, o.Region}, {"DeviceCopies", o.DeviceCopies, o.Device.Region}} {
		switch {
		case m.copies == nil:
			return fmt.Errorf("a Copier without %s: %w", m.what, ErrJob)
		case m.copies.Len() != m.region.Len():
			return fmt.Errorf("%s has %d bytes, the region of the same memory %d: %w", m.what, m.copies.Len(), m.region.Len(), ErrJob)
		}
	}
	return nil
}

// toDevice copies from the buffer to device memory. It returns when nothing of it
// is under way, so that what waits for the caller waits for the copy.
func (m *Manager) toDevice(ctx context.Context, spans []copier.Span) error {
	return copier.Copy(ctx, m.opts.Copier, copier.Batch{Src: m.opts.BufferCopies, Dst: m.opts.DeviceCopies, Spans: spans})
}

// fromDevice copies the other way.
func (m *Manager) fromDevice(ctx context.Context, spans []copier.Span) error {
	return copier.Copy(ctx, m.opts.Copier, copier.Batch{Src: m.opts.DeviceCopies, Dst: m.opts.BufferCopies, Spans: spans})
}

// closeCopier ends the copier that New made.
func (m *Manager) closeCopier() error {
	if m.plain == nil {
		return nil
	}
	return m.plain.Close()
}

// Close cancels what is under way and waits for it, and for what is being
// persisted.
func (m *Manager) Close() {
	m.mu.Lock()
	m.closed = true
	jobs := make([]job, 0, len(m.jobs))
	for _, j := range m.jobs {
		jobs = append(jobs, j)
	}
	m.mu.Unlock()
	for _, j := range jobs {
		_ = j.close(ErrClosed) // the job's owner learns it by Finish
	}
	m.work.Wait()
	_ = m.closeCopier() // a Plain has no error to give, and nothing is under way
}

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
