package rdma

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"sync"
)

// Imm is an optional 32-bit immediate; the zero value is no immediate.
type Imm struct {
	value uint32
	set   bool
}

// ImmOf returns the immediate v.
func ImmOf(v uint32) Imm { return Imm{value: v, set: true} }

// Get returns the value, and whether an immediate is set.
func (i Imm) Get() (uint32, bool) { return i.value, i.set }

// Class is the traffic class of an operation. A provider marks the packets of the class with a
// service level, a traffic class or a DSCP. By this mark, switches assign the packets to a lane (a
// queue with its own priority).
type Class uint8

const (
	// ClassKV is the low-priority class for cache traffic, and the default. It gets the bandwidth
	// that model execution does not use (DualPath, section 5.1).
	ClassKV Class = 0
	// ClassCollective is the high-priority class for model execution.
	ClassCollective Class = 1
	// Classes is the number of classes.
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
	// Len is the length in bytes. If Len is zero, only the immediate is delivered; the key in Dst
	// is checked nevertheless.
	Len   uint64
	Imm   Imm
	Class Class
	// Done is called with nil when the payload has been placed, or with an error when the write
	// has failed. It may be nil.
	Done func(error)
	// NoWait makes the call return ErrBusy, instead of waiting, if the in-flight budget is used
	// up.
	NoWait bool
}

// Pages describes the positions of pages of equal length: page i begins at Offset +
// Indices[i]*Stride.
type Pages struct {
	Indices        []uint32
	Stride, Offset uint64
}

// PagedWrite is one write of len(SrcPages.Indices) pages.
type PagedWrite struct {
	// PageLen is the length of each page, in bytes.
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
	// Group, if set, contains the peers of all Dsts, so that their sessions need not be looked up
	// for each operation.
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

// PeerGroup is a set of peers that Scatter and Barrier reach without a look-up of each peer. It is
// bound to the sessions that existed when it was made. Once one of these sessions ends, the group
// is broken: its operations return ErrPeerDied at once, and the caller must make another group.
// Only the engine that made the group accepts the group; other engines return ErrForeign.
type PeerGroup interface {
	// Peers returns the members in the order given.
	Peers() []EngineID
	// Close releases the group. Operations in flight continue.
	Close()
}

// Range returns ErrRange, with the values, unless [off, off+n) lies within size bytes. memory is
// its name in the error text.
func Range(memory string, off, n, size uint64) error {
	if off > size || n > size-off {
		return fmt.Errorf("rdma: %s: %d bytes at offset %d of %d: %w", memory, n, off, size, ErrRange)
	}
	return nil
}

// At returns the offset of page i. It returns ErrRange if the page, which has pageLen bytes, does
// not lie within size bytes.
func (p Pages) At(i int, pageLen, size uint64) (uint64, error) {
	hi, off := bits.Mul64(uint64(p.Indices[i]), p.Stride)
	off, carry := bits.Add64(off, p.Offset, 0)
	if hi != 0 || carry != 0 || off > size || pageLen > size-off {
		return 0, fmt.Errorf("rdma: page %d (index %d, stride %d, offset %d, length %d) of %d bytes: %w",
			i, p.Indices[i], p.Stride, p.Offset, pageLen, size, ErrRange)
	}
	return off, nil
}

// Check returns ErrRange unless w lies within its source and its Desc.
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

// Check returns ErrRange unless the numbers of source and destination pages agree and are within
// the limits. It does not check the positions of pages; Pages.At does.
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

// ScatterOver performs s as one Write for each destination. Providers without a faster
// implementation call it from their Scatter.
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
			// The earlier writes have been submitted, so the call succeeds. This write and the
			// remaining writes end with this error.
			for range writes[i:] {
				g.one(err)
			}
			return nil
		}
	}
	return nil
}

// Scatter returns b as a Scatter of empty writes, one for each destination.
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

// group joins the completions of several operations into one call of Done.
type group struct {
	mu      sync.Mutex
	pending int
	errs    []error
	done    func(error)
}

// one adds the completion of one operation.
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

// Flag is a completion that can be polled or waited for. Its method Set is passed as Done. The
// zero value is not usable; use NewFlag. A flag can be set once.
type Flag struct {
	ch  chan struct{}
	err error
}

// NewFlag returns a flag that is not set.
func NewFlag() *Flag { return &Flag{ch: make(chan struct{})} }

// Set stores the result of the operation. It must be called once.
func (f *Flag) Set(err error) {
	f.err = err
	close(f.ch)
}

// Poll returns whether the flag is set, and the result.
func (f *Flag) Poll() (set bool, err error) {
	select {
	case <-f.ch:
		return true, f.err
	default:
		return false, nil
	}
}

// C returns a channel that is closed once the flag is set.
func (f *Flag) C() <-chan struct{} { return f.ch }

// Wait waits until the flag is set and returns the result. If ctx ends first, it returns the error
// of ctx.
func (f *Flag) Wait(ctx context.Context) error {
	select {
	case <-f.ch:
		return f.err
	case <-ctx.Done():
		return ctx.Err()
	}
}
