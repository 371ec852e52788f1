package copier

import (
	"context"
	"fmt"
	"sync"

	"github.com/penstock-kv/penstock/rdma"
)

// Plain copies host memory with the CPU, on its own goroutines.
type Plain struct {
	queue   chan *job
	free    chan *job
	workers sync.WaitGroup

	mu     sync.RWMutex // read-locked while a job is queued, and while Copy copies
	closed bool
	once   sync.Once
}

var _ Copier = (*Plain)(nil)

// PlainOptions configure NewPlain. The zero value works.
type PlainOptions struct {
	// Workers is the number of goroutines that copy. Default 1, because one core saturates a
	// memory channel, and the other cores have other work.
	Workers int
	// Queue is the largest number of batches in flight. Default 64.
	Queue int
}

// EnsureDefaults sets each zero field to its default.
func (o *PlainOptions) EnsureDefaults() {
	if o.Workers == 0 {
		o.Workers = 1
	}
	if o.Queue == 0 {
		o.Queue = 64
	}
}

// Validate returns an error that names the first option out of its range.
func (o *PlainOptions) Validate() error {
	if o.Workers < 1 || o.Workers > 1024 {
		return fmt.Errorf("copier: %d workers; 1 to 1024 are possible", o.Workers)
	}
	if o.Queue < 1 || o.Queue > 1<<16 {
		return fmt.Errorf("copier: a queue of %d batches; 1 to %d are possible", o.Queue, 1<<16)
	}
	return nil
}

// NewPlain starts the workers.
func NewPlain(o PlainOptions) (*Plain, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	p := &Plain{queue: make(chan *job, o.Queue), free: make(chan *job, o.Queue)}
	for range o.Queue {
		p.free <- &job{}
	}
	for range o.Workers {
		p.workers.Go(p.work)
	}
	return p, nil
}

// Info implements Copier.
func (p *Plain) Info() Info { return Info{Kind: "plain", Detail: "memmove by the CPU"} }

// plainMemory is host memory.
type plainMemory struct {
	plain *Plain
	mem   []byte
	users
}

// Register implements Copier, for host memory.
func (p *Plain) Register(mem []byte, opts rdma.RegisterOptions) (Memory, error) {
	if opts.Device != "" || opts.DMABuf != nil {
		return nil, fmt.Errorf("copier: the CPU reaches host memory only, not memory of device %q: %w", opts.Device, rdma.ErrUnsupported)
	}
	if len(mem) == 0 {
		return nil, fmt.Errorf("copier: register no memory: %w", rdma.ErrRange)
	}
	return &plainMemory{plain: p, mem: mem}, nil
}

// Len implements Memory.
func (m *plainMemory) Len() uint64 { return uint64(len(m.mem)) }

// Close implements Memory.
func (m *plainMemory) Close(ctx context.Context) error { return m.users.close(ctx) }

// job is one batch in flight. There are as many jobs as the queue is long, so that the queue has
// room for every job.
type job struct {
	src, dst *plainMemory
	spans    []Span
	done     func(error)
}

// memories checks a batch and returns its source and its destination.
func (p *Plain) memories(b *Batch) (src, dst *plainMemory, err error) {
	src, ok := b.Src.(*plainMemory)
	if !ok || src.plain != p {
		return nil, nil, foreign("source")
	}
	dst, ok = b.Dst.(*plainMemory)
	if !ok || dst.plain != p {
		return nil, nil, foreign("destination")
	}
	if b.After != nil {
		return nil, nil, foreign("mark")
	}
	return src, dst, b.check()
}

// copyHere copies a batch on the caller's goroutine. It holds the lock for which Close waits.
func (p *Plain) copyHere(b Batch) error {
	src, dst, err := p.memories(&b)
	if err != nil {
		return err
	}
	if err := both(&src.users, &dst.users); err != nil {
		return err
	}
	p.mu.RLock()
	closed := p.closed
	if !closed {
		move(dst, src, b.Spans)
	}
	p.mu.RUnlock()
	src.users.done()
	dst.users.done()
	if closed {
		return fmt.Errorf("copier: %w", rdma.ErrClosed)
	}
	return nil
}

// move copies spans that have been checked.
func move(dst, src *plainMemory, spans []Span) {
	for _, s := range spans {
		copy(dst.mem[s.Dst:s.Dst+s.Len], src.mem[s.Src:s.Src+s.Len])
	}
}

// Submit implements Copier.
func (p *Plain) Submit(ctx context.Context, b Batch) error {
	src, dst, err := p.memories(&b)
	if err != nil {
		return err
	}
	j, err := p.take(ctx, b.NoWait)
	if err != nil {
		return err
	}
	if err := both(&src.users, &dst.users); err != nil {
		p.free <- j
		return err
	}
	j.src, j.dst, j.done = src, dst, b.Done
	j.spans = append(j.spans[:0], b.Spans...)
	p.mu.RLock()
	defer p.mu.RUnlock()
	if p.closed {
		p.recycle(j)
		src.users.done()
		dst.users.done()
		return fmt.Errorf("copier: %w", rdma.ErrClosed)
	}
	p.queue <- j // does not block: the queue has room for every job
	return nil
}

// take waits for a free job.
func (p *Plain) take(ctx context.Context, noWait bool) (*job, error) {
	select {
	case j := <-p.free:
		return j, nil
	default:
	}
	if noWait {
		return nil, fmt.Errorf("copier: %d batches are in flight: %w", cap(p.queue), rdma.ErrBusy)
	}
	select {
	case j := <-p.free:
		return j, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("copier: wait for room: %w", ctx.Err())
	}
}

func (p *Plain) work() {
	for j := range p.queue {
		move(j.dst, j.src, j.spans)
		// The job is released before Done is called, because Done may submit a batch. The memories
		// are in use until Done has returned.
		src, dst, done := j.src, j.dst, j.done
		p.recycle(j)
		if done != nil {
			done(nil)
		}
		src.users.done()
		dst.users.done()
	}
}

func (p *Plain) recycle(j *job) {
	j.src, j.dst, j.done = nil, nil, nil
	p.free <- j
}

// Close implements Copier. Before it returns, the queued batches are copied.
func (p *Plain) Close() error {
	p.once.Do(func() {
		p.mu.Lock()
		p.closed = true
		close(p.queue)
		p.mu.Unlock()
	})
	p.workers.Wait()
	return nil
}
