//go:build fabric && cgo && linux

package fabric

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// memory is a registration of a region or of a window of it.
type memory struct {
	d          *domain
	addr       uintptr
	size, base uint64
	remote     bool
	reg        registration
	pinned     runtime.Pinner // of a whole
}

var _ group.Memory = (*memory)(nil)

// Register registers mem with the provider.
func (d *domain) Register(mem []byte, opts rdma.RegisterOptions) (group.Memory, error) {
	if opts.DMABuf != nil || opts.Device != "" {
		return nil, fmt.Errorf("fabric: register memory of device %q: libfabric's device memory is not built in: %w", opts.Device, rdma.ErrUnsupported)
	}
	if len(mem) == 0 {
		return nil, fmt.Errorf("fabric: register no memory: %w", rdma.ErrRange)
	}
	m := &memory{d: d, addr: addressOf(mem), size: uint64(len(mem)), remote: !opts.Local}
	pin(&m.pinned, mem)
	if err := m.register(); err != nil {
		m.pinned.Unpin()
		return nil, err
	}
	return m, nil
}

// register registers m under a key. This process chooses the key, or the provider if it requires
// that.
func (m *memory) register() error {
	d := m.d
	if d.traits.virtAddr {
		m.base = uint64(m.addr)
	}
	reg, err := d.native.register(m.addr, m.size, m.remote, d.newKey())
	if err != nil {
		return fmt.Errorf("fabric: register %d bytes on %s: %w", m.size, d.Name(), err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if reg.key == 0 || d.memories[reg.key] != nil {
		return errors.Join(fmt.Errorf("fabric: the provider returned key %#x, which is 0 or in use", reg.key), reg.close())
	}
	m.reg = reg
	d.memories[reg.key] = m
	return nil
}

// Key returns the key with which peers access the memory.
func (m *memory) Key() uint64 { return m.reg.key }

// Base returns the first byte's address, or 0 if the provider's addresses are offsets.
func (m *memory) Base() uint64 { return m.base }

// Window registers the n bytes at off separately, with another key.
func (m *memory) Window(off, n uint64) (group.Memory, error) {
	if err := rdma.Range("window", off, n, m.size); err != nil {
		return nil, err
	}
	w := &memory{d: m.d, addr: m.addr + uintptr(off), size: n, remote: true}
	if err := w.register(); err != nil {
		return nil, err
	}
	return w, nil
}

// Close invalidates the key.
func (m *memory) Close() error {
	m.d.mu.Lock()
	delete(m.d.memories, m.reg.key)
	m.d.mu.Unlock()
	err := m.reg.close()
	m.pinned.Unpin()
	return err
}
