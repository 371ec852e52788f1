package verbs

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"syscall"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// memory is a registered region, or a window of a region.
type memory struct {
	d *domain
	// mem is the registered memory; nil for device memory.
	mem  []byte
	base uint64
	size uint64
	// lkey and rkey are the card's keys: lkey for Works of this process, rkey for peers.
	lkey, rkey uint32
	reg        registration
	// pin pins memory of the Go heap while it is registered. Other memory is not pinned.
	pin    runtime.Pinner
	window bool
	// device: the memory is a dma-buf.
	device bool
	closed atomic.Bool
}

var _ group.Memory = (*memory)(nil)

// Register implements group.Domain. A Local region gets no remote rights; each of its windows has
// rights of its own.
func (d *domain) Register(mem []byte, opts rdma.RegisterOptions) (group.Memory, error) {
	m := &memory{d: d, mem: mem, base: addressOf(mem), size: uint64(len(mem))}
	var err error
	switch {
	case opts.DMABuf != nil:
		m.mem, m.base, m.size = nil, opts.DMABuf.Addr, opts.DMABuf.Len
		err = d.registerDMABuf(m, opts)
	case opts.Device != "":
		err = fmt.Errorf("memory of device %q needs a dma-buf: %w", opts.Device, rdma.ErrUnsupported)
	case len(mem) == 0:
		err = fmt.Errorf("no memory: %w", rdma.ErrRange)
	default:
		m.pin.Pin(&mem[0])
		if m.reg, err = d.nic.register(m.base, m.size, rightsOf(!opts.Local, d.dev.windows)); err != nil {
			m.pin.Unpin()
			err = hintMemlock(err)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("verbs: %s: register %d bytes: %w", d.name, m.size, err)
	}
	m.lkey, m.rkey = m.reg.keys()
	d.keep(m)
	return m, nil
}

// registerDMABuf registers device memory.
func (d *domain) registerDMABuf(m *memory, opts rdma.RegisterOptions) error {
	if opts.DMABuf.Len == 0 {
		return fmt.Errorf("an empty dma-buf: %w", rdma.ErrRange)
	}
	b := opts.DMABuf
	m.device = true
	// mlx5 returns EINVAL if a dma-buf is registered with the right to bind windows.
	reg, err := d.nic.registerDMABuf(b.FD, b.Offset, b.Len, b.Addr, rightsOf(!opts.Local, false))
	if errors.Is(err, syscall.EOPNOTSUPP) || errors.Is(err, syscall.EPROTONOSUPPORT) {
		err = fmt.Errorf("dma-buf of device %q: the card's driver does not support dma-bufs (%w): %w", opts.Device, err, rdma.ErrUnsupported)
	}
	m.reg = reg
	return err
}

// Key implements group.Memory.
func (m *memory) Key() uint64 { return uint64(m.rkey) }

// Base implements group.Memory. It returns the virtual address.
func (m *memory) Base() uint64 { return m.base }

// offsetOf returns the offset of buf in the memory; ok is false if buf is not within it.
func (m *memory) offsetOf(buf []byte) (off uint64, ok bool) {
	if len(buf) == 0 || len(m.mem) == 0 {
		return 0, false
	}
	off = addressOf(buf) - m.base
	return off, off < m.size && uint64(len(buf)) <= m.size-off
}

// Window implements group.Memory. It returns an error if the n bytes at off cannot be a memory
// window; the engine then registers these bytes separately.
func (m *memory) Window(off, n uint64) (group.Memory, error) {
	if m.window {
		return nil, fmt.Errorf("verbs: %s: a window of a window: %w", m.d.name, rdma.ErrUnsupported)
	}
	if !m.d.windows {
		return nil, fmt.Errorf("verbs: %s: the device has no memory windows of type 1 to which it confines writes: %w", m.d.name, rdma.ErrUnsupported)
	}
	if why := noWindow(m.device, n); why != nil {
		return nil, fmt.Errorf("verbs: %s: window of %d bytes: %w", m.d.name, n, why)
	}
	if n == 0 || off >= m.size || n > m.size-off {
		return nil, fmt.Errorf("verbs: %s: window of %d bytes from %d of %d: %w", m.d.name, n, off, m.size, rdma.ErrRange)
	}
	w := &memory{d: m.d, base: m.base + off, size: n, window: true}
	if m.mem != nil {
		w.mem = m.mem[off : off+n]
	}
	m.d.bindMu.Lock()
	defer m.d.bindMu.Unlock()
	var err error
	if w.reg, err = m.d.nic.window(m.reg, w.base, n); err != nil {
		return nil, fmt.Errorf("verbs: %s: window of %d bytes from %d: %w", m.d.name, n, off, err)
	}
	w.lkey, w.rkey = w.reg.keys()
	m.d.keep(w)
	return w, nil
}

// keep keeps m reachable until it is closed.
func (d *domain) keep(m *memory) {
	d.memMu.Lock()
	defer d.memMu.Unlock()
	d.memories[m] = struct{}{}
}

// Close implements group.Memory.
func (m *memory) Close() error {
	if m.closed.Swap(true) {
		return nil
	}
	err := m.reg.close()
	m.pin.Unpin()
	m.d.memMu.Lock()
	delete(m.d.memories, m)
	m.d.memMu.Unlock()
	if err != nil {
		return fmt.Errorf("verbs: %s: invalidate key %#x: %w", m.d.name, m.rkey, err)
	}
	return nil
}

// probeWindows tests whether the device confines writes to a memory window. rdma_rxe has memory
// windows, but checks only the bounds of the region. A window that also permits writes to the
// memory beside it is worse than no window.
func (d *domain) probeWindows() (ok bool, err error) {
	const size, half, n = 4096, 2048, 8
	m, err := d.Register(make([]byte, size), rdma.RegisterOptions{})
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	r := m.(*memory)
	w, err := d.nic.window(r.reg, r.base, half)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	if err := d.nic.write(r.reg, r.base, w, r.base+half-n, n); err != nil {
		return false, fmt.Errorf("write within a window: %w", err)
	}
	err = d.nic.write(r.reg, r.base, w, r.base+half-n/2, n)
	var refused *wcError
	switch {
	case err == nil:
		return false, nil
	case errors.As(err, &refused) && refused.status.outcome(false) == group.StatusRefused:
		return true, d.nic.restartBind() // the refused write broke the bind queue pair
	}
	return false, fmt.Errorf("write across the end of a window: %w", err)
}

// isNoMemory reports whether err is ENOMEM.
func isNoMemory(err error) bool { return errors.Is(err, syscall.ENOMEM) }
