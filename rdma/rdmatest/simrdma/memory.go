package simrdma

import (
	"fmt"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// Memory is memory that is registered with one NIC, or a window of such memory.
type Memory struct {
	d      *Domain
	parent *Memory // nil for a registration
	key    uint64
	base   uint64
	buf    []byte
	// spans, if not nil, are the accessible parts of buf.
	spans []rdma.Span

	device bool // memory of a DMABuf

	// The fields below are guarded by the fabric's lock.
	closed  bool
	windows int // open ones
	reads   int // number of Works in flight whose source is this memory
}

var (
	_ group.Memory     = (*Memory)(nil)
	_ group.SpanMemory = (*Memory)(nil)
)

// Register registers mem with the NIC. A DMABuf may be any file that can be mapped: the tests use
// a memfd in place of device memory.
func (d *Domain) Register(mem []byte, opts rdma.RegisterOptions) (group.Memory, error) {
	if opts.Device != "" {
		return nil, fmt.Errorf("simrdma: memory of device %q: there are no devices: %w", opts.Device, rdma.ErrUnsupported)
	}
	var base uint64
	var mapped []byte
	if b := opts.DMABuf; b != nil {
		var err error
		if mapped, mem, err = mapBuf(b); err != nil {
			return nil, err
		}
		base = b.Addr
	} else if len(mem) == 0 {
		return nil, fmt.Errorf("simrdma: register no memory: %w", rdma.ErrRange)
	} else {
		base = address(mem)
	}
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	if err := d.usableLocked("register memory"); err != nil {
		if mapped != nil {
			unmapBuf(mapped)
		}
		return nil, err
	}
	if mapped != nil {
		d.mapped = append(d.mapped, mapped)
	}
	m := &Memory{d: d, buf: mem, device: mapped != nil}
	if d.opts.VirtualAddresses {
		m.base = base
	}
	d.keyLocked(m)
	return m, nil
}

// keyLocked gives m a key.
func (d *Domain) keyLocked(m *Memory) {
	for m.key == 0 || d.memories[m.key] != nil {
		m.key = d.keys.next()
		if b := d.opts.KeyBits; b > 0 && b < 64 {
			m.key &= 1<<b - 1
		}
	}
	d.memories[m.key] = m
}

// Key returns the key.
func (m *Memory) Key() uint64 { return m.key }

// Base returns the value of Work.RemoteAddr for the first byte.
func (m *Memory) Base() uint64 { return m.base }

// Window makes a window of a part of the memory.
func (m *Memory) Window(off, n uint64) (group.Memory, error) { return m.window(off, n, nil) }

// WindowSpans implements group.SpanMemory.
func (m *Memory) WindowSpans(off, n uint64, spans []rdma.Span) (group.Memory, error) {
	if !m.d.opts.Spans {
		return nil, fmt.Errorf("simrdma: %s has no windows over spans: %w", m.d.opts.Name, rdma.ErrUnsupported)
	}
	return m.window(off, n, spans)
}

// window makes a window of a part of the memory. If spans is nil, the whole part is accessible.
func (m *Memory) window(off, n uint64, spans []rdma.Span) (group.Memory, error) {
	if !m.d.opts.Windows {
		return nil, fmt.Errorf("simrdma: %s has no windows: %w", m.d.opts.Name, rdma.ErrUnsupported)
	}
	if err := rdma.Range("window", off, n, uint64(len(m.buf))); err != nil {
		return nil, err
	}
	if o := m.d.opts; o.WindowMax > 0 && n > o.WindowMax || o.NoDeviceWindows && m.device {
		return nil, fmt.Errorf("simrdma: %s has no window of %d bytes of this memory: %w", o.Name, n, rdma.ErrUnsupported)
	}
	m.d.f.mu.Lock()
	defer m.d.f.mu.Unlock()
	if err := m.d.usableLocked("open a window"); err != nil {
		return nil, err
	}
	if m.closed {
		m.d.f.violationLocked("%s: Window of closed memory %#x", m.d.opts.Name, m.key)
		return nil, fmt.Errorf("simrdma: window of closed memory: %w", rdma.ErrClosed)
	}
	w := &Memory{d: m.d, parent: m, buf: m.buf[off : off+n], spans: spans}
	if m.d.opts.VirtualAddresses {
		w.base = m.base + off
	}
	m.d.keyLocked(w)
	m.windows++
	return w, nil
}

// Close invalidates the key.
func (m *Memory) Close() error {
	f := m.d.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if m.closed {
		f.violationLocked("%s: Close of memory %#x, which is closed", m.d.opts.Name, m.key)
		return nil
	}
	if m.windows > 0 {
		f.violationLocked("%s: Close of memory %#x with %d windows open", m.d.opts.Name, m.key, m.windows)
	}
	if m.reads > 0 && !m.d.dead {
		f.violationLocked("%s: Close of memory %#x, the source of %d Works in flight", m.d.opts.Name, m.key, m.reads)
	}
	kept := m.d.receives[:0]
	for _, r := range m.d.receives {
		if r.mem != m {
			kept = append(kept, r)
		}
	}
	clear(m.d.receives[len(kept):])
	m.d.receives = kept
	m.closed = true
	if m.parent != nil {
		m.parent.windows--
	}
	delete(m.d.memories, m.key)
	return nil
}

// holds reports whether buf is a part of the memory.
func (m *Memory) holds(buf []byte) bool {
	if len(buf) == 0 {
		return true
	}
	at, from := address(buf), address(m.buf)
	return at >= from && at+uint64(len(buf)) <= from+uint64(len(m.buf))
}

// offset returns the offset of [addr, addr+n) in the memory, if the range is accessible.
func (m *Memory) offset(addr, n uint64) (uint64, bool) {
	off := addr - m.base
	size := uint64(len(m.buf))
	if addr < m.base || off > size || n > size-off || m.spans != nil && !rdma.HoldSpan(m.spans, off, n) {
		return 0, false
	}
	return off, true
}
