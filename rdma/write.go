package rdma

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"sync"
)

// Imm is an optional 32-bit immediate; the zero value is none.
type Imm struct {
	value uint32
	set   bool
}

// ImmOf returns the immediate v.
func ImmOf(v uint32) Imm { return Imm{value: v, set: true} }

// Get returns the value and whether there is one.
func (i Imm) Get() (uint32, bool) { return i.value, i.set }

// Class is a traffic class: which lane of the fabric carries an operation. A
// provider maps it to a service level, a traffic class or a DSCP.
type Class uint8

const (
	// ClassKV is the low lane of cache traffic, and the default: it gets what
	// model execution leaves over (DualPath, section 5.1).
	ClassKV Class = 0
	// ClassCollective is the high lane, of model execution.
	ClassCollective Class = 1
	// Classes is how many there are.
	Classes = 2
)

// String returns "kv" or "collective".
func (c Class) String() string {
	switch c {
	case ClassKV:
		return "kv"
	case ClassCollective:
		return "collective"
	}
	return fmt.Sprintf("class %d", uint8(c))
}

// Write is one contiguous one-sided write.
type Write struct {
	Src       Region
	SrcOffset uint64
	Dst       Desc
	DstOffset uint64
	// Len in bytes. Zero delivers the immediate alone; Dst's key is checked all
	// the same.
	Len   uint64
	Imm   Imm
	Class Class
	// Done is called when the payload has landed (nil) or the write has failed.
	// May be nil.
	Done func(error)
	// NoWait answers ErrBusy instead of waiting for room.
	NoWait bool
}

// Pages names places of equal length: page i is at Offset + Indices[i]*Stride.
type Pages struct {
	Indices        []uint32
	Stride, Offset uint64
}

// PagedWrite is one write of len(SrcPages.Indices) pages.
type PagedWrite struct {
	// PageLen in bytes, of each page.
	PageLen  uint64
	Src      Region
	SrcPages Pages
	Dst      Desc
	DstPages Pages
	Imm      Imm
	Class    Class
	Done     func(error)
	NoWait   bool
}

// MaxPages is the largest number of pages in one PagedWrite.
const MaxPages = 1 << 16

// ScatterDst is one destination of a Scatter.
type ScatterDst struct {
	SrcOffset uint64
	Dst       Desc
	DstOffset uint64
	Len       uint64
}

// Scatter writes slices of one source to several destinations.
type Scatter struct {
	// Group, if set, holds the peers of all Dsts, resolved once and for all.
	Group PeerGroup
	Src   Region
	Dsts  []ScatterDst
	Imm   Imm
	Class Class
	Done  func(error)
}

// Barrier delivers Imm to each of Dsts.
type Barrier struct {
	// Group is as in Scatter.
	Group PeerGroup
	Imm   uint32
	Dsts  []Desc
	Class Class
	Done  func(error)
}

// PeerGroup is a set of peers that Scatter and Barrier reach without looking
// each up. It is bound to the sessions that were alive when it was made: once
// one of them ends, the group is broken and its operations answer ErrPeerDied
// at once; make another. Only the engine that made it takes it (ErrForeign).
type PeerGroup interface {
	// Peers returns the members in the order given.
	Peers() []EngineID
	// Close releases the group. Operations in flight go on.
	Close()
}

// Range returns ErrRange, with the values, unless [off, off+n) lies in size
// bytes. what names the place in the error.
func Range(what string, off, n, size uint64) error {
	if off > size || n > size-off {
		return fmt.Errorf("rdma: %s: %d bytes at offset %d of %d: %w", what, n, off, size, ErrRange)
	}
	return nil
}

// At returns the offset of page i, or ErrRange if the page, pageLen long, does
// not lie in size bytes.
func (p Pages) At(i int, pageLen, size uint64) (uint64, error) {
	hi, off := bits.Mul64(uint64(p.Indices[i]), p.Stride)
	off, carry := bits.Add64(off, p.Offset, 0)
	if hi != 0 || carry != 0 || off > size || pageLen > size-off {
		return 0, fmt.Errorf("rdma: page %d (index %d, stride %d, offset %d, length %d) of %d bytes: %w",
			i, p.Indices[i], p.Stride, p.Offset, pageLen, size, ErrRange)
	}
	return off, nil
}

// Check returns ErrRange unless w lies inside its source and its Desc.
func (w *Write) Check() error {
	if w.Src == nil {
		if w.Len != 0 {
			return fmt.Errorf("rdma: write of %d bytes without a source: %w", w.Len, ErrRange)
		}
	} else if err := Range("source", w.SrcOffset, w.Len, w.Src.Len()); err != nil {
		return err
	}
	return Range("destination", w.DstOffset, w.Len, w.Dst.Len)
}

// Check returns ErrRange unless the numbers of pages agree and are allowed. The
// pages themselves are checked as they are laid out, with Pages.At.
func (w *PagedWrite) Check() error {
	s, d := len(w.SrcPages.Indices), len(w.DstPages.Indices)
	if s != d || s > MaxPages {
		return fmt.Errorf("rdma: %d source pages, %d destination pages (at most %d): %w", s, d, MaxPages, ErrRange)
	}
	if w.Src == nil && s > 0 && w.PageLen > 0 {
		return fmt.Errorf("rdma: paged write without a source: %w", ErrRange)
	}
	return nil
}

// ScatterOver performs s as one Write for each destination: what a provider
// without a better way calls from its Scatter.
func ScatterOver(ctx context.Context, e Engine, s Scatter) error {
	if len(s.Dsts) == 0 {
		return fmt.Errorf("rdma: scatter to no destination: %w", ErrRange)
	}
	writes := make([]Write, len(s.Dsts))
	for i, d := range s.Dsts {
		writes[i] = Write{Src: s.Src, SrcOffset: d.SrcOffset, Dst: d.Dst, DstOffset: d.DstOffset, Len: d.Len, Imm: s.Imm, Class: s.Class}
		if err := writes[i].Check(); err != nil {
			return fmt.Errorf("rdma: scatter destination %d: %w", i, err)
		}
	}
	g := &group{pending: len(writes), done: s.Done}
	for i := range writes {
		writes[i].Done = g.one
		if err := e.Write(ctx, writes[i]); err != nil {
			if i == 0 {
				return err
			}
			// The writes before this one are on their way: what is left ends
			// with this error.
			for range writes[i:] {
				g.one(err)
			}
			return nil
		}
	}
	return nil
}

// Scatter returns b as an empty write for each destination.
func (b Barrier) Scatter() Scatter {
	s := Scatter{Group: b.Group, Imm: ImmOf(b.Imm), Class: b.Class, Done: b.Done, Dsts: make([]ScatterDst, len(b.Dsts))}
	for i, d := range b.Dsts {
		s.Dsts[i].Dst = d
	}
	return s
}

// BarrierOver performs b as an empty Write for each destination.
func BarrierOver(ctx context.Context, e Engine, b Barrier) error {
	return ScatterOver(ctx, e, b.Scatter())
}

// group joins the ends of several operations into one.
type group struct {
	mu      sync.Mutex
	pending int
	errs    []error
	done    func(error)
}

// one takes the end of one operation.
func (g *group) one(err error) {
	g.mu.Lock()
	if err != nil {
		g.errs = append(g.errs, err)
	}
	g.pending--
	last := g.pending == 0
	g.mu.Unlock()
	if last && g.done != nil {
		g.done(errors.Join(g.errs...))
	}
}

// Flag is a completion that can be polled or waited for: pass its Set as Done.
// The zero value is not ready; use NewFlag. A flag is set once.
type Flag struct {
	ch  chan struct{}
	err error
}

// NewFlag returns a flag that is not set.
func NewFlag() *Flag { return &Flag{ch: make(chan struct{})} }

// Set records the outcome. It must be called once.
func (f *Flag) Set(err error) {
	f.err = err
	close(f.ch)
}

// Poll returns whether the flag is set, and the outcome.
func (f *Flag) Poll() (set bool, err error) {
	select {
	case <-f.ch:
		return true, f.err
	default:
		return false, nil
	}
}

// C is closed once the flag is set.
func (f *Flag) C() <-chan struct{} { return f.ch }

// Wait returns the outcome, or ctx's error if that ends first.
func (f *Flag) Wait(ctx context.Context) error {
	select {
	case <-f.ch:
		return f.err
	case <-ctx.Done():
		return ctx.Err()
	}
}
