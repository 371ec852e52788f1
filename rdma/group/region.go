package group

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sources"
)

// nicMemory is memory as registered with one NIC.
type nicMemory struct {
	serial uint32
	mem    Memory
}

// region is registered memory. It is a source of writes, and windows are parts of it.
type region struct {
	e    *Engine
	mem  []byte
	size uint64
	// opts.DMABuf holds a descriptor that the region owns until closeDescriptor closes it, once.
	opts           rdma.RegisterOptions
	descriptorOnce sync.Once
	// mems holds the registration with each NIC, by NIC index; nil while the NIC is dead.
	mems []atomic.Pointer[nicMemory]
	root *window // nil for a Local region

	mu      sync.Mutex
	closed  bool
	windows map[*window]struct{}
	// readers counts the operations whose source is this region.
	readers sources.Readers
}

var _ rdma.Region = (*region)(nil)

// Register implements rdma.Engine.
func (e *Engine) Register(mem []byte, opts rdma.RegisterOptions) (rdma.Region, error) {
	size := uint64(len(mem))
	if opts.DMABuf != nil {
		if mem != nil {
			return nil, fmt.Errorf("group: register a dma-buf and %d bytes of memory: %w", len(mem), rdma.ErrRange)
		}
		size = opts.DMABuf.Len
		// The region needs its own descriptor: the caller may close the caller's descriptor, and
		// the kernel may then reuse that number for another buffer.
		own, err := ownBuf(opts.DMABuf)
		if err != nil {
			return nil, fmt.Errorf("group: register a dma-buf: %w", err)
		}
		opts.DMABuf = own
	}
	if size == 0 {
		closeBuf(opts.DMABuf)
		return nil, fmt.Errorf("group: register no memory: %w", rdma.ErrRange)
	}
	r := &region{
		e: e, mem: mem, size: size, opts: opts,
		mems: make([]atomic.Pointer[nicMemory], len(e.nics)), windows: make(map[*window]struct{}),
	}
	if err := r.register(); err != nil {
		r.closeDescriptor()
		return nil, err
	}
	if !opts.Local {
		w, err := r.open(0, size, nil, nil)
		if err != nil {
			return nil, errors.Join(err, r.Close(context.Background()))
		}
		r.root = w
	}
	return r, nil
}

// register registers the region with every NIC and adds it to the engine.
func (r *region) register() error {
	e := r.e
	e.regMu.RLock()
	defer e.regMu.RUnlock()
	if e.released {
		return fmt.Errorf("group: register: %w", rdma.ErrClosed)
	}
	for i := range e.nics {
		n := e.nics[i].Load()
		if n.dead.Load() {
			continue
		}
		if err := r.registerWith(n); err != nil && !n.dead.Load() {
			return errors.Join(err, r.release())
		}
	}
	e.regionsMu.Lock()
	defer e.regionsMu.Unlock()
	e.regions[r] = struct{}{}
	return nil
}

// registerWith registers the region with one NIC, without remote access. Only windows give remote
// access. So the keys of windows can be invalidated while local writes continue to use the region.
func (r *region) registerWith(n *nic) error {
	opts := r.opts
	opts.Local = true
	m, err := n.dom.Register(r.mem, opts)
	if err != nil {
		return fmt.Errorf("group: register %d bytes with %s: %w", r.size, n.name, err)
	}
	r.mems[n.index].Store(&nicMemory{n.serial, m})
	return nil
}

// Bytes implements rdma.Region.
func (r *region) Bytes() []byte { return r.mem }

// Len implements rdma.Region.
func (r *region) Len() uint64 { return r.size }

// registeredOn reports whether the region is registered with a NIC.
func (r *region) registeredOn(nic int) bool { return r.mems[nic].Load() != nil }

// memory returns the region's registration with the NIC of that serial number, or nil.
func (r *region) memory(nic int, serial uint32) Memory {
	if m := r.mems[nic].Load(); m != nil && m.serial == serial {
		return m.mem
	}
	return nil
}

// Desc implements rdma.Region. For a Local region each key is 0, which is never valid.
func (r *region) Desc() rdma.Desc {
	if r.root != nil {
		return r.root.Desc()
	}
	d := rdma.Desc{Engine: r.e.id, Len: r.size}
	for i := range r.e.nics {
		d.NICs = append(d.NICs, rdma.NICKey{Addr: r.e.nics[i].Load().addr})
	}
	return d
}

// Window implements rdma.Region.
func (r *region) Window(off, n uint64, peers ...rdma.EngineID) (rdma.Window, error) {
	if err := rdma.Range("window", off, n, r.size); err != nil {
		return nil, err
	}
	return r.open(off, n, nil, peers)
}

// WindowSpans implements rdma.Region.
func (r *region) WindowSpans(spans []rdma.Span, peers ...rdma.EngineID) (rdma.Window, error) {
	merged, err := rdma.MergeSpans(spans, r.size)
	if err != nil {
		return nil, err
	}
	relative, reach := rdma.Relative(merged)
	return r.open(merged[0].Offset, reach, relative, peers)
}

// open makes a window and registers it with the engine and its NICs. If spans is not nil, only the
// spans of the window are accessible.
func (r *region) open(off, n uint64, spans []rdma.Span, peers []rdma.EngineID) (*window, error) {
	w := &window{region: r, off: off, n: n, spans: spans, peers: slices.Clone(peers), mems: make([]atomic.Pointer[nicMemory], len(r.mems)), done: make(chan struct{})}
	if r.mem != nil {
		// The capacity ends with the window, so that an append by the owner cannot overwrite the
		// bytes after the window.
		w.mem = r.mem[off : off+n : off+n]
	}
	e := r.e
	e.regMu.RLock()
	defer e.regMu.RUnlock()
	r.mu.Lock()
	closed := r.closed || e.released
	if !closed {
		r.windows[w] = struct{}{}
	}
	r.mu.Unlock()
	if closed {
		return nil, fmt.Errorf("group: window of a region: %w", rdma.ErrClosed)
	}
	for i := range e.nics {
		n := e.nics[i].Load()
		if err := w.openOn(n); err != nil && !n.dead.Load() {
			err = errors.Join(err, w.release())
			r.mu.Lock()
			delete(r.windows, w)
			r.mu.Unlock()
			return nil, err
		}
	}
	return w, nil
}

// Close implements rdma.Region.
func (r *region) Close(ctx context.Context) error {
	r.mu.Lock()
	r.closed = true
	r.readers.Close()
	r.mu.Unlock()
	windows := r.openWindows() // no window is added after closed is set
	for _, w := range windows {
		w.begin()
	}
	for _, w := range windows {
		if err := w.Revoke(ctx); err != nil {
			return err
		}
	}
	if err := r.readers.Wait(ctx); err != nil {
		return err
	}
	r.e.regMu.RLock()
	defer r.e.regMu.RUnlock()
	r.e.regionsMu.Lock()
	delete(r.e.regions, r)
	r.e.regionsMu.Unlock()
	defer r.closeDescriptor()
	return r.release()
}

// openWindows returns the windows that have not been revoked.
func (r *region) openWindows() []*window {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Keys(r.windows))
}

// closeDescriptor closes the region's own descriptor of its dma-buf. The region must be
// registered with no NIC.
func (r *region) closeDescriptor() { r.descriptorOnce.Do(func() { closeBuf(r.opts.DMABuf) }) }

// release closes the region's registrations.
func (r *region) release() error {
	var errs []error
	for i := range r.mems {
		errs = append(errs, closeMemory(&r.mems[i]))
	}
	return errors.Join(errs...)
}

// closeMemory closes the memory in p, if there is one, and clears p, so that the memory is closed
// only once.
func closeMemory(p *atomic.Pointer[nicMemory]) error {
	if m := p.Swap(nil); m != nil {
		return m.mem.Close()
	}
	return nil
}

// window is a range of a region with its own key on each NIC.
type window struct {
	region *region
	off, n uint64
	// spans, if not nil, are the accessible parts of the window. Only some NICs can restrict
	// access to spans.
	spans []rdma.Span
	mem   []byte
	mems  []atomic.Pointer[nicMemory]
	// peers are the engines that may write to the window; empty means every peer. An engine that
	// the Desc does not name never posts the window's keys (op.aim), so Revoke need not ask that
	// engine.
	peers []rdma.EngineID

	// done is closed when the revocation of the window is complete.
	done chan struct{}
	once sync.Once

	mu sync.Mutex
	// base and keys are the fields Base and NICs of the window's Desc. keys keeps its values after
	// the keys have become invalid.
	base uint64
	keys []rdma.NICKey
	// linked are the valid keys of the window. stale are keys of NICs that died. check finds the
	// window by a stale key too, so it does not report the key as invalid.
	linked, stale []remoteKey
	// revoked: the window accepts no further key.
	revoked bool
}

var _ rdma.Window = (*window)(nil)

// openOn makes the window's key on one NIC.
func (w *window) openOn(n *nic) error {
	r := w.region
	whole := r.memory(n.index, n.serial)
	if whole == nil {
		return nil // the NIC is dead or cannot reach this memory
	}
	var m Memory
	var err error
	if parts, ok := whole.(SpanMemory); ok && n.lim.Spans && w.spans != nil {
		m, err = parts.WindowSpans(w.off, w.n, w.spans)
	} else if n.lim.Windows {
		m, err = whole.Window(w.off, w.n)
	}
	if !n.lim.Windows || errors.Is(err, rdma.ErrUnsupported) {
		m, err = w.registerOn(n)
	}
	if err != nil {
		return fmt.Errorf("group: window of %d bytes on %s: %w", w.n, n.name, err)
	}
	if m.Key() == 0 || n.tooWide(m.Key()) {
		return errors.Join(fmt.Errorf("group: %s gave out key %#x for a window", n.name, m.Key()), m.Close())
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.keys) > 0 && m.Base() != w.base {
		return errors.Join(fmt.Errorf("group: %s counts a window from %#x, another NIC from %#x: a Desc has one base", n.name, m.Base(), w.base), m.Close())
	}
	if w.revoked {
		return m.Close()
	}
	w.base = m.Base()
	w.mems[n.index].Store(&nicMemory{n.serial, m})
	w.keys = append(w.keys, rdma.NICKey{Addr: n.addr, Key: m.Key()})
	k := remoteKey{n.serial, m.Key()}
	w.linked = append(w.linked, k)
	r.e.link(k, w)
	return nil
}

// registerOn registers the window's part of the memory separately. It is for a NIC without
// windows, or for a part for which Window returned ErrUnsupported.
func (w *window) registerOn(n *nic) (Memory, error) {
	opts := w.region.opts
	opts.Local = false
	if d := opts.DMABuf; d != nil {
		part := *d
		part.Offset, part.Addr, part.Len = d.Offset+w.off, d.Addr+w.off, w.n
		opts.DMABuf = &part
	}
	return n.dom.Register(w.mem, opts)
}

// Bytes implements rdma.Window.
func (w *window) Bytes() []byte {
	if w.spans != nil {
		return nil
	}
	return w.mem
}

// Desc implements rdma.Window. After a NIC was replaced, the Desc has the key of the replacement.
func (w *window) Desc() rdma.Desc {
	w.mu.Lock()
	defer w.mu.Unlock()
	return rdma.Desc{Engine: w.region.e.id, NICs: slices.Clone(w.keys), Base: w.base, Len: w.n, Peers: slices.Clone(w.peers)}
}

// contains reports whether n bytes at addr lie in the window.
func (w *window) contains(addr, n uint64) bool {
	w.mu.Lock()
	base := w.base
	w.mu.Unlock()
	off := addr - base
	if addr < base || off > w.n || n > w.n-off {
		return false
	}
	return w.spans == nil || rdma.HoldSpan(w.spans, off, n)
}

// Revoke implements rdma.Window.
func (w *window) Revoke(ctx context.Context) error {
	w.begin()
	select {
	case <-w.done:
		return nil
	default:
	}
	select {
	case <-w.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("group: revoke: payload may be landing: %w", ctx.Err())
	}
}

// begin invalidates the keys and starts the revocation, once.
func (w *window) begin() {
	w.once.Do(func() {
		keys := w.close()
		if !w.region.e.beginRevoke() {
			// The engine is closed. Its Close closes every memory.
			<-w.region.e.core.Closed
			close(w.done)
			return
		}
		go func() {
			defer w.region.e.revokes.Done()
			w.region.e.revoke(w, keys)
		}()
	})
}

// close removes the keys from the engine and returns the keys that peers may still use.
func (w *window) close() []remoteKey {
	w.mu.Lock()
	w.revoked = true
	keys, stale := w.linked, w.stale
	w.linked, w.stale = nil, nil
	w.mu.Unlock()
	w.region.e.unlink(keys)
	w.region.e.unlink(stale)
	return keys
}

// release closes the window's registrations and removes its keys.
func (w *window) release() error {
	w.close()
	var errs []error
	for i := range w.mems {
		errs = append(errs, closeMemory(&w.mems[i]))
	}
	return errors.Join(errs...)
}

// installNIC puts n in the place of the NIC with the same index. It registers all memory with n
// before any transfer can use n.
func (e *Engine) installNIC(n *nic) error {
	e.regMu.Lock()
	defer e.regMu.Unlock()
	if e.released {
		return rdma.ErrClosed
	}
	for r := range e.regions {
		if err := r.registerAllOn(n); err != nil {
			return errors.Join(err, e.unregisterLocked(n))
		}
	}
	e.nics[n.index].Store(n)
	e.core.Running.Go(n.poll)
	return nil
}

// registerAllOn registers the region and its windows with a NIC that replaces another.
func (r *region) registerAllOn(n *nic) error {
	if err := r.registerWith(n); err != nil {
		return err
	}
	for _, w := range r.openWindows() {
		if err := w.openOn(n); err != nil {
			return err
		}
	}
	return nil
}

// unregister closes all memory of a NIC.
func (e *Engine) unregister(n *nic) error {
	e.regMu.Lock()
	defer e.regMu.Unlock()
	return e.unregisterLocked(n)
}

// unregisterLocked closes all memory of a NIC: windows before their regions.
func (e *Engine) unregisterLocked(n *nic) error {
	var errs []error
	closeOn := func(p *atomic.Pointer[nicMemory]) {
		if m := p.Load(); m != nil && m.serial == n.serial {
			errs = append(errs, closeMemory(p))
		}
	}
	for r := range e.regions {
		for _, w := range r.openWindows() {
			closeOn(&w.mems[n.index])
			w.dropKeys(n.serial)
		}
		closeOn(&r.mems[n.index])
	}
	return errors.Join(errs...)
}

// staleMax is the largest number of keys of dead NICs that a window keeps.
const staleMax = 2 * MaxDomains

// dropKeys removes the keys of a NIC that has been replaced, so that a new Desc does not name that
// NIC. If no other key is left, the keys stay in Desc.
func (w *window) dropKeys(serial uint32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	linked := w.linked[:0]
	for _, k := range w.linked {
		if k.serial == serial {
			w.stale = append(w.stale, k)
		} else {
			linked = append(linked, k)
		}
	}
	w.linked = linked
	if n := len(w.stale) - staleMax; n > 0 {
		w.region.e.unlink(w.stale[:n])
		w.stale = append([]remoteKey(nil), w.stale[n:]...)
	}
	if len(w.keys) < 2 {
		return
	}
	keys := make([]rdma.NICKey, 0, len(w.keys))
	for _, k := range w.keys {
		if s, _ := serialOf(k.Addr); s != serial {
			keys = append(keys, k)
		}
	}
	w.keys = keys
}

// link adds a key of w to keys, the table that check reads.
func (e *Engine) link(k remoteKey, w *window) {
	e.keysMu.Lock()
	defer e.keysMu.Unlock()
	e.keys[k] = w
}

// unlink removes keys from the table that check reads.
func (e *Engine) unlink(keys []remoteKey) {
	e.keysMu.Lock()
	defer e.keysMu.Unlock()
	for _, k := range keys {
		delete(e.keys, k)
	}
}

// admits reports whether a peer may write to the window.
func (w *window) admits(peer rdma.EngineID) bool {
	return len(w.peers) == 0 || slices.Contains(w.peers, peer)
}

// check returns the reason for which a peer's write of n bytes at addr with key k is refused,
// or ReasonNone.
func (e *Engine) check(peer rdma.EngineID, k remoteKey, addr, n uint64) rdma.Reason {
	e.keysMu.RLock()
	w := e.keys[k]
	e.keysMu.RUnlock()
	switch {
	case w == nil || !w.admits(peer):
		return rdma.ReasonKey
	case !w.contains(addr, n):
		return rdma.ReasonBounds
	}
	return rdma.ReasonNone
}
