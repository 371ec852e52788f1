//go:build cuda && cgo && linux

package copier

// #cgo LDFLAGS: -ldl
// #include <stdlib.h>
// #include "cuda_shim.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"unsafe"

	"github.com/penstock-kv/penstock/rdma"
)

// Span has C's layout, so a slice of spans can be passed to C.
var _ [unsafe.Sizeof(C.copier_span{})]byte = [unsafe.Sizeof(Span{})]byte{}

// cuda copies with a GPU's copy engine. It uses one stream and makes one call from Go to C for
// each batch. An event follows each batch in the stream, and one goroutine waits for the events in
// their order.
type cuda struct {
	api     *C.copier_cuda // C memory; C keeps no pointer to it
	device  C.int
	context unsafe.Pointer // the CUDA context
	stream  unsafe.Pointer
	name    string
	events  []unsafe.Pointer // events of all batches
	free    chan *cudaBatch
	started chan *cudaBatch // in the stream's order
	waiter  sync.WaitGroup
	submit  sync.Mutex // makes the order of started the same as that of the stream
	closed  bool
	// driver is held for reading while memory is allocated from the driver or returned to it.
	// After shut has set gone, memory is neither allocated nor returned.
	driver   sync.RWMutex
	gone     bool
	mu       sync.Mutex
	memories map[*cudaMemory]struct{} // not freed yet
	marks    map[*cudaMark]struct{}   // not closed yet
	once     sync.Once
	closeErr error
}

var _ DeviceCopier = (*cuda)(nil)

// cudaBatch is one batch in flight. There are as many of them as the queue is long.
type cudaBatch struct {
	event    unsafe.Pointer
	src, dst *cudaMemory
	done     func(error)
	err      error // error of the driver when the batch was put into the stream
}

// NewCUDA loads the CUDA driver and opens a GPU's primary context, which it shares with the
// inference engine in the same process. It has been tested with the driver of copiertest, not on a
// GPU.
func NewCUDA(o CUDAOptions) (DeviceCopier, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	c := &cuda{memories: make(map[*cudaMemory]struct{}), marks: make(map[*cudaMark]struct{}), api: (*C.copier_cuda)(C.calloc(1, C.sizeof_copier_cuda))}
	if err := c.open(o); err != nil {
		C.free(unsafe.Pointer(c.api))
		return nil, err
	}
	c.free, c.started = make(chan *cudaBatch, o.Queue), make(chan *cudaBatch, o.Queue)
	for range o.Queue {
		b := &cudaBatch{}
		if r := C.copier_cuda_event(c.api, c.context, &b.event); r != 0 {
			return nil, errors.Join(c.failure("create an event", r), c.shut())
		}
		c.events = append(c.events, b.event)
		c.free <- b
	}
	c.waiter.Go(c.wait)
	return c, nil
}

func (c *cuda) open(o CUDAOptions) error {
	path := C.CString(o.Library)
	defer C.free(unsafe.Pointer(path))
	why := make([]C.char, 512)
	if C.copier_cuda_load(c.api, path, &why[0], C.size_t(len(why))) != 0 {
		return fmt.Errorf("copier: load the CUDA driver: %s; it comes with the NVIDIA driver: %w", C.GoString(&why[0]), rdma.ErrUnsupported)
	}
	name := make([]C.char, 128)
	if r := C.copier_cuda_open(c.api, C.int(o.Device), &c.context, &c.stream, &c.device, &name[0], C.int(len(name))); r != 0 {
		err := c.failure(fmt.Sprintf("open GPU %d", o.Device), r)
		C.copier_cuda_unload(c.api)
		return err
	}
	c.name = C.GoString(&name[0])
	return nil
}

func (c *cuda) failure(doing string, r C.int) error {
	return fmt.Errorf("copier: %s: CUDA error %d, %s", doing, int(r), C.GoString(C.copier_cuda_error(c.api, r)))
}

// Info implements Copier.
func (c *cuda) Info() Info { return Info{Kind: "cuda", Detail: "copy engine of " + c.name} }

// origin is the way in which a copier got its memory.
type origin uint8

const (
	pinned    origin = iota // host memory that the driver has pinned
	allocated               // device memory of Alloc
	imported                // device memory that another library frees
)

// cudaMemory is memory that a copier can access.
type cudaMemory struct {
	cuda    *cuda
	address C.uint64_t
	len     uint64
	from    origin
	pinner  runtime.Pinner
	users

	give    sync.Once
	giveErr error
}

// Register implements Copier, for host memory. For device memory use Alloc.
func (c *cuda) Register(mem []byte, opts rdma.RegisterOptions) (Memory, error) {
	if opts.DMABuf != nil || opts.Device != "" {
		return nil, fmt.Errorf("copier: memory of device %q: CUDA copies to memory of Alloc: %w", opts.Device, rdma.ErrUnsupported)
	}
	if len(mem) == 0 {
		return nil, fmt.Errorf("copier: register no memory: %w", rdma.ErrRange)
	}
	c.driver.RLock()
	defer c.driver.RUnlock()
	if c.gone {
		return nil, fmt.Errorf("copier: %w", rdma.ErrClosed)
	}
	m := &cudaMemory{cuda: c, len: uint64(len(mem))}
	// Safety: the memory is pinned while the driver has its address. For memory outside the Go
	// heap Pin does nothing; the owner must keep that memory mapped.
	m.pinner.Pin(unsafe.SliceData(mem))
	m.address = C.uint64_t(uintptr(unsafe.Pointer(unsafe.SliceData(mem))))
	if r := C.copier_cuda_pin(c.api, c.context, m.address, C.size_t(len(mem))); r != 0 {
		m.pinner.Unpin()
		return nil, c.failure(fmt.Sprintf("pin %d bytes of host memory", len(mem)), r)
	}
	c.keep(m)
	return m, nil
}

// Alloc implements DeviceCopier.
func (c *cuda) Alloc(sizeBytes uint64) (Memory, error) {
	c.driver.RLock()
	defer c.driver.RUnlock()
	if c.gone {
		return nil, fmt.Errorf("copier: %w", rdma.ErrClosed)
	}
	m := &cudaMemory{cuda: c, len: sizeBytes, from: allocated}
	if r := C.copier_cuda_alloc(c.api, c.context, &m.address, C.size_t(sizeBytes)); r != 0 {
		return nil, c.failure(fmt.Sprintf("allocate %d bytes of %s", sizeBytes, c.name), r)
	}
	c.keep(m)
	return m, nil
}

// Import implements DeviceCopier.
func (c *cuda) Import(address, sizeBytes uint64) (Memory, error) {
	if address == 0 || sizeBytes == 0 || address > math.MaxUint64-sizeBytes {
		return nil, fmt.Errorf("copier: import %d bytes of device memory at %#x: %w", sizeBytes, address, rdma.ErrRange)
	}
	c.driver.RLock()
	defer c.driver.RUnlock()
	if c.gone {
		return nil, fmt.Errorf("copier: %w", rdma.ErrClosed)
	}
	m := &cudaMemory{cuda: c, address: C.uint64_t(address), len: sizeBytes, from: imported}
	c.keep(m)
	return m, nil
}

func (c *cuda) keep(m *cudaMemory) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.memories[m] = struct{}{}
}

// Len implements Memory.
func (m *cudaMemory) Len() uint64 { return m.len }

// Close implements Memory.
func (m *cudaMemory) Close(ctx context.Context) error {
	if err := m.users.close(ctx); err != nil {
		return err
	}
	c := m.cuda
	c.driver.RLock() // if this call does not free the memory, shut does
	defer c.driver.RUnlock()
	c.mu.Lock()
	delete(c.memories, m)
	c.mu.Unlock()
	m.give.Do(func() { m.giveErr = m.freeDevice() })
	return m.giveErr
}

// freeDevice returns the memory to the driver. The caller holds c.driver.
func (m *cudaMemory) freeDevice() error {
	c := m.cuda
	switch m.from {
	case imported:
		return nil
	case allocated:
		if r := C.copier_cuda_free(c.api, c.context, m.address); r != 0 {
			return c.failure("free device memory", r)
		}
		return nil
	}
	defer m.pinner.Unpin()
	if r := C.copier_cuda_unpin(c.api, c.context, m.address); r != 0 {
		return c.failure("unpin host memory", r)
	}
	return nil
}

// cudaMark is an event that was recorded in a stream of another library.
type cudaMark struct {
	cuda  *cuda
	event unsafe.Pointer
}

// Mark implements DeviceCopier.
func (c *cuda) Mark(stream uint64) (Mark, error) {
	c.driver.RLock()
	defer c.driver.RUnlock()
	if c.gone {
		return nil, fmt.Errorf("copier: %w", rdma.ErrClosed)
	}
	m := &cudaMark{cuda: c}
	if r := C.copier_cuda_mark(c.api, c.context, C.uint64_t(stream), &m.event); r != 0 {
		return nil, c.failure(fmt.Sprintf("record an event in stream %#x", stream), r)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.marks[m] = struct{}{}
	return m, nil
}

// Close implements Mark.
func (m *cudaMark) Close() error {
	c := m.cuda
	c.driver.RLock() // if this call does not destroy the event, shut does
	defer c.driver.RUnlock()
	c.mu.Lock()
	_, open := c.marks[m]
	delete(c.marks, m)
	c.mu.Unlock()
	if !open {
		return nil
	}
	// The driver releases a destroyed event when the device has completed it (CUDA Driver API, cuEventDestroy).
	if r := C.copier_cuda_event_free(c.api, c.context, m.event); r != 0 {
		return c.failure("destroy an event", r)
	}
	return nil
}

// Submit implements Copier.
func (c *cuda) Submit(ctx context.Context, b Batch) error {
	src, ok := b.Src.(*cudaMemory)
	if !ok || src.cuda != c {
		return foreign("source")
	}
	dst, ok := b.Dst.(*cudaMemory)
	if !ok || dst.cuda != c {
		return foreign("destination")
	}
	if err := b.check(); err != nil {
		return err
	}
	var after unsafe.Pointer
	if b.After != nil {
		m, ok := b.After.(*cudaMark)
		if !ok || m.cuda != c {
			return foreign("mark")
		}
		after = m.event
	}
	p, err := c.take(ctx, b.NoWait)
	if err != nil {
		return err
	}
	if err := both(&src.users, &dst.users); err != nil {
		c.free <- p
		return err
	}
	if err := c.start(p, src, dst, after, b); err != nil {
		src.users.done()
		dst.users.done()
		c.free <- p
		return err
	}
	return nil
}

// start puts the batch into the stream. If the driver refuses a copy of the batch, the earlier
// copies complete, and then the batch ends with the driver's error.
func (c *cuda) start(p *cudaBatch, src, dst *cudaMemory, after unsafe.Pointer, b Batch) error {
	c.submit.Lock()
	defer c.submit.Unlock()
	if c.closed {
		return fmt.Errorf("copier: %w", rdma.ErrClosed)
	}
	p.src, p.dst, p.done, p.err = src, dst, b.Done, nil
	var started C.size_t
	// Safety: C reads the spans during the call and keeps no pointer to them.
	spans := (*C.copier_span)(unsafe.Pointer(unsafe.SliceData(b.Spans)))
	if r := C.copier_cuda_submit(c.api, c.context, c.stream, after, p.event, src.address, dst.address, spans, C.size_t(len(b.Spans)), &started); r != 0 {
		p.err = c.failure(fmt.Sprintf("copy span %d of %d", int(started), len(b.Spans)), r)
	}
	c.started <- p // does not block: started has room for every batch
	return nil
}

func (c *cuda) take(ctx context.Context, noWait bool) (*cudaBatch, error) {
	select {
	case p := <-c.free:
		return p, nil
	default:
	}
	if noWait {
		return nil, fmt.Errorf("copier: %d batches are in flight: %w", cap(c.free), rdma.ErrBusy)
	}
	select {
	case p := <-c.free:
		return p, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("copier: wait for room: %w", ctx.Err())
	}
}

// wait ends the batches in the order of the stream.
func (c *cuda) wait() {
	for p := range c.started {
		err := p.err
		if r := C.copier_cuda_wait(c.api, c.context, p.event); r != 0 {
			err = errors.Join(err, c.failure("wait for a batch", r))
		}
		if err != nil {
			// The event may not have been recorded after the copies that were started. No copy may
			// access the memories after Done.
			if r := C.copier_cuda_drain(c.api, c.context, c.stream); r != 0 {
				err = errors.Join(err, c.failure("wait for the stream of a batch", r))
			}
		}
		src, dst, done := p.src, p.dst, p.done
		p.src, p.dst, p.done = nil, nil, nil
		c.free <- p
		if done != nil {
			done(err)
		}
		src.users.done()
		dst.users.done()
	}
}

// Close implements Copier. It completes the copies in the stream and frees the memory that is
// still open.
func (c *cuda) Close() error {
	c.once.Do(func() {
		c.submit.Lock()
		c.closed = true
		close(c.started)
		c.submit.Unlock()
		c.waiter.Wait()
		c.closeErr = c.shut()
	})
	return c.closeErr
}

// shut releases the resources that open and NewCUDA have acquired.
func (c *cuda) shut() error {
	var errs []error
	c.driver.Lock()
	defer c.driver.Unlock()
	c.gone = true
	c.mu.Lock()
	for m := range c.memories {
		m.users.shut()
		m.give.Do(func() { m.giveErr = m.freeDevice() })
		errs = append(errs, m.giveErr)
	}
	for m := range c.marks {
		c.events = append(c.events, m.event)
	}
	clear(c.marks)
	c.mu.Unlock()
	// The events are freed from this list, because a late Submit may still hold a batch.
	for _, event := range c.events {
		if r := C.copier_cuda_event_free(c.api, c.context, event); r != 0 {
			errs = append(errs, c.failure("destroy an event", r))
		}
	}
	if r := C.copier_cuda_close(c.api, c.device, c.context, c.stream); r != 0 {
		errs = append(errs, c.failure("close the GPU", r))
	}
	C.copier_cuda_unload(c.api)
	C.free(unsafe.Pointer(c.api))
	return errors.Join(errs...)
}

// shut makes add fail.
func (u *users) shut() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.closed = true
}
