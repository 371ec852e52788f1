package tcp

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/sources"
)

// region is registered memory. It is a source of writes, and windows are parts of it.
type region struct {
	e    *Engine
	mem  []byte
	root *window // nil for a Local region

	mu      sync.Mutex
	closed  bool
	windows map[*window]struct{}
	// readers counts the operations whose source is this region.
	readers sources.Readers
}

var _ rdma.LandingRegion = (*region)(nil)

// Register implements rdma.Engine.
func (e *Engine) Register(mem []byte, opts rdma.RegisterOptions) (rdma.Region, error) {
	if opts.Device != "" || opts.DMABuf != nil {
		return nil, fmt.Errorf("tcp: register memory of device %q: sockets reach host memory only: %w", opts.Device, rdma.ErrUnsupported)
	}
	if len(mem) == 0 {
		return nil, fmt.Errorf("tcp: register no memory: %w", rdma.ErrRange)
	}
	r := &region{e: e, mem: mem, windows: make(map[*window]struct{})}
	if !opts.Local {
		w, err := r.open(&window{mem: mem})
		if err != nil {
			return nil, err
		}
		r.root = w
	}
	return r, nil
}

// Bytes implements rdma.Region.
func (r *region) Bytes() []byte { return r.mem }

// Len implements rdma.Region.
func (r *region) Len() uint64 { return uint64(len(r.mem)) }

// Desc implements rdma.Region. For a Local region the key is 0, which is never valid.
func (r *region) Desc() rdma.Desc {
	if r.root != nil {
		return r.root.Desc()
	}
	return r.e.desc(0, len(r.mem))
}

// Window implements rdma.Region.
func (r *region) Window(off, n uint64, peers ...rdma.EngineID) (rdma.Window, error) {
	return r.WindowLanding(off, n, nil, peers...)
}

// WindowLanding implements rdma.LandingRegion; landed may be nil.
func (r *region) WindowLanding(off, n uint64, landed func(off, n uint64), peers ...rdma.EngineID) (rdma.Window, error) {
	if err := rdma.Range("window", off, n, uint64(len(r.mem))); err != nil {
		return nil, err
	}
	// The capacity ends with the window, so that an append by the owner cannot overwrite the bytes
	// after the window.
	return r.open(&window{mem: r.mem[off : off+n : off+n], landed: landed, peers: slices.Clone(peers)})
}

// WindowSpans implements rdma.Region.
func (r *region) WindowSpans(spans []rdma.Span, peers ...rdma.EngineID) (rdma.Window, error) {
	merged, err := rdma.MergeSpans(spans, r.Len())
	if err != nil {
		return nil, err
	}
	relative, reach := rdma.Relative(merged)
	off := merged[0].Offset
	return r.open(&window{mem: r.mem[off : off+reach : off+reach], spans: relative, peers: slices.Clone(peers)})
}

// open makes a window of the region and adds it to the engine.
func (r *region) open(w *window) (*window, error) {
	w.region = r
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, fmt.Errorf("tcp: window of a region: %w", rdma.ErrClosed)
	}
	if !r.e.link(w) {
		return nil, fmt.Errorf("tcp: window: %w", rdma.ErrClosed)
	}
	r.windows[w] = struct{}{}
	return w, nil
}

// Close implements rdma.Region.
func (r *region) Close(ctx context.Context) error {
	r.mu.Lock()
	r.closed = true
	r.readers.Close()
	windows := slices.Collect(maps.Keys(r.windows))
	r.mu.Unlock()
	for _, w := range windows {
		w.begin() // begin all revocations, even if ctx ends while one waits
	}
	for _, w := range windows {
		if err := w.Revoke(ctx); err != nil {
			return err
		}
	}
	return r.readers.Wait(ctx)
}

// window is a range of a region with a key.
type window struct {
	region *region
	key    uint64
	mem    []byte
	// spans, if not nil, are the accessible parts of mem.
	spans []rdma.Span
	// landed, if set, is called for each placed range by the reader that placed it.
	landed func(off, n uint64)
	// peers may write to the window; empty means every peer.
	peers []rdma.EngineID

	// revoked is set under mu. Readers load it without mu between the reads of a payload.
	revoked atomic.Bool

	mu sync.Mutex
	// inside are the connections whose payload is landing in the window. A connection is inside at
	// most one window. After revoked is set, no connection is added.
	inside []*conn
	// idle, if set, is closed when inside becomes empty.
	idle chan struct{}
}

var _ rdma.Window = (*window)(nil)

// Bytes implements rdma.Window.
func (w *window) Bytes() []byte {
	if w.spans != nil {
		return nil
	}
	return w.mem
}

// Desc implements rdma.Window.
func (w *window) Desc() rdma.Desc { return w.region.e.desc(w.key, len(w.mem)) }

// begin makes the window refuse payload. It returns a channel that is closed when no payload is
// landing any more, or nil if none is landing.
func (w *window) begin() <-chan struct{} {
	w.region.e.unlink(w)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.revoked.Store(true)
	for _, c := range w.inside {
		c.interrupt()
	}
	if len(w.inside) > 0 && w.idle == nil {
		w.idle = make(chan struct{})
	}
	return w.idle
}

// Revoke implements rdma.Window.
func (w *window) Revoke(ctx context.Context) error {
	idle := w.begin()
	if idle != nil {
		select {
		case <-idle:
		case <-ctx.Done():
			return fmt.Errorf("tcp: revoke: payload is landing: %w", ctx.Err())
		}
	}
	// The window is removed last, so that the region's Close also waits until no payload lands.
	w.region.mu.Lock()
	delete(w.region.windows, w)
	w.region.mu.Unlock()
	return nil
}

// admits reports whether a peer may write to the window.
func (w *window) admits(peer rdma.EngineID) bool {
	return len(w.peers) == 0 || slices.Contains(w.peers, peer)
}

// enter adds a connection to inside, before its payload lands. It returns false if the window is
// revoked.
func (w *window) enter(c *conn) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.revoked.Load() {
		return false
	}
	w.inside = append(w.inside, c)
	return true
}

// leave undoes enter. After leave the connection touches no byte of the window, and Revoke does
// not interrupt the connection.
func (w *window) leave(c *conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	i := slices.Index(w.inside, c)
	last := len(w.inside) - 1
	w.inside[i] = w.inside[last]
	w.inside[last] = nil
	w.inside = w.inside[:last]
	// idle stays set, so that another call of Revoke finds a closed channel.
	if last == 0 && w.idle != nil {
		close(w.idle)
	}
}

// desc returns the Desc of n bytes with key, which is the same on every NIC.
func (e *Engine) desc(key uint64, n int) rdma.Desc {
	d := rdma.Desc{Engine: e.id, Len: uint64(n), NICs: make([]rdma.NICKey, len(e.nics))}
	for i, nic := range e.nics {
		d.NICs[i] = rdma.NICKey{Addr: nic.addr, Key: key}
	}
	return d
}

// link gives w a key and adds it to the engine. It returns false if the engine is closed.
func (e *Engine) link(w *window) bool {
	e.winMu.Lock()
	defer e.winMu.Unlock()
	if e.windows == nil {
		return false
	}
	for w.key == 0 || e.windows[w.key] != nil {
		w.key = randomKey()
	}
	e.windows[w.key] = w
	return true
}

// unlink invalidates the key of w.
func (e *Engine) unlink(w *window) {
	e.winMu.Lock()
	defer e.winMu.Unlock()
	delete(e.windows, w.key)
}

// lookup returns the window with that key, or nil.
func (e *Engine) lookup(key uint64) *window {
	e.winMu.RLock()
	defer e.winMu.RUnlock()
	return e.windows[key]
}

// randomKey returns 64 bits that a peer cannot guess.
func randomKey() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // rand.Read never fails; it ends the process instead
	return binary.LittleEndian.Uint64(b[:])
}
