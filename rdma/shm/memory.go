package shm

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// memory is a registered region, or a window of a region.
type memory struct {
	d   *Domain
	key uint64
	mem []byte
	// spans, if not nil, are the parts of mem to which peers may write.
	spans []rdma.Span
	// segment and offset are the place from which peers read the memory: an offset in a shared
	// arena, or, if segment is 0, an address of this process.
	segment, offset uint64

	// mu is held while a chunk is placed into the memory.
	mu     sync.Mutex
	closed bool
}

var (
	_ group.Memory     = (*memory)(nil)
	_ group.SpanMemory = (*memory)(nil)
)

// Register implements group.Domain. If mem is in an arena that is shared with the domain, peers
// map the arena. Peers read other memory by system calls, if they may read this process.
func (d *Domain) Register(mem []byte, opts rdma.RegisterOptions) (group.Memory, error) {
	if opts.Device != "" || opts.DMABuf != nil {
		return nil, fmt.Errorf("shm: register memory of device %q: processes share host memory only: %w", opts.Device, rdma.ErrUnsupported)
	}
	if len(mem) == 0 {
		return nil, fmt.Errorf("shm: register no memory: %w", rdma.ErrRange)
	}
	segment, offset := d.locate(mem)
	return d.enter(&memory{d: d, mem: mem, segment: segment, offset: offset})
}

// Window implements group.Memory.
func (m *memory) Window(off, n uint64) (group.Memory, error) {
	size := uint64(len(m.mem))
	if off > size || n > size-off {
		return nil, fmt.Errorf("shm: window of %d bytes at %d of %d: %w", n, off, size, rdma.ErrRange)
	}
	return m.d.enter(&memory{d: m.d, mem: m.mem[off : off+n : off+n], segment: m.segment, offset: m.offset + off})
}

// WindowSpans implements group.SpanMemory.
func (m *memory) WindowSpans(off, n uint64, spans []rdma.Span) (group.Memory, error) {
	size := uint64(len(m.mem))
	if off > size || n > size-off {
		return nil, fmt.Errorf("shm: window of %d bytes at %d of %d: %w", n, off, size, rdma.ErrRange)
	}
	return m.d.enter(&memory{d: m.d, mem: m.mem[off : off+n : off+n], spans: spans, segment: m.segment, offset: m.offset + off})
}

// enter gives m a unique key and adds it to d.keys.
func (d *Domain) enter(m *memory) (*memory, error) {
	d.keysMu.Lock()
	defer d.keysMu.Unlock()
	if d.keys == nil {
		return nil, fmt.Errorf("shm: register memory: %w", rdma.ErrClosed)
	}
	for m.key == 0 || d.keys[m.key] != nil {
		var b [8]byte
		_, _ = rand.Read(b[:])
		m.key = binary.LittleEndian.Uint64(b[:])
	}
	d.keys[m.key] = m
	return m, nil
}

// find returns the memory with a key, or nil.
func (d *Domain) find(key uint64) *memory {
	d.keysMu.RLock()
	defer d.keysMu.RUnlock()
	return d.keys[key]
}

// Key implements group.Memory.
func (m *memory) Key() uint64 { return m.key }

// Base implements group.Memory: addresses are offsets from the memory's first byte.
func (m *memory) Base() uint64 { return 0 }

// Close implements group.Memory. When it returns, no chunk is being placed.
func (m *memory) Close() error {
	m.d.keysMu.Lock()
	delete(m.d.keys, m.key)
	m.d.keysMu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	return nil
}

// sliceLocked returns the bytes [addr, addr+n). It returns false unless all of them are within the
// memory and peers may write to them.
func (m *memory) sliceLocked(addr, n uint64) ([]byte, bool) {
	size := uint64(len(m.mem))
	if m.closed || addr > size || n > size-addr || m.spans != nil && !rdma.HoldSpan(m.spans, addr, n) {
		return nil, false
	}
	return m.mem[addr : addr+n], true
}
