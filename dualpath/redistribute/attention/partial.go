package attention

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// MaxParts bounds the partials of one merge: eight times the holders that the paper
// tests.
const MaxParts = 64

// ErrInvalid is wrapped by every complaint about a partial: drop it, and attend to
// its tokens in another way.
var ErrInvalid = errors.New("invalid partial")

// Partial is the attention of a batch of rows over one part of a cache.
type Partial struct {
	// Width of an output row: d_v.
	Width int
	// O are the outputs, rows x Width, each normalised over its part. M are the
	// rows' largest logits, L their denominators: the sums of exp(logit - M), at
	// least 1 where there was a token, and 0 where there was none. Then O and M mean
	// nothing and are not read.
	O    []float32
	M, L []float32
}

// Rows of the batch.
func (p *Partial) Rows() int { return len(p.L) }

// Reserve makes p a partial of rows without a token, in its own memory where that
// is large enough.
func (p *Partial) Reserve(rows, width int) {
	p.Width = width
	p.O, p.M, p.L = grow(p.O, rows*width), grow(p.M, rows), grow(p.L, rows)
	for r := range rows {
		p.clear(r)
	}
}

// clear makes row r one without a token: the identity of the merge.
func (p *Partial) clear(r int) {
	clear(p.row(r))
	p.M[r], p.L[r] = float32(math.Inf(-1)), 0
}

// row is output r.
func (p *Partial) row(r int) []float32 { return p.O[r*p.Width : (r+1)*p.Width] }

// check returns an error unless the lengths fit rows of width.
func (p *Partial) check(what string, rows, width int) error {
	return shape(what, rows, width, p.Width, len(p.O), len(p.M), len(p.L))
}

// Wire is a partial as it crosses a fabric: outputs in bfloat16. Otherwise as
// Partial.
type Wire struct {
	Width int
	O     []BFloat16
	M, L  []float32
}

// Rows of the batch.
func (w *Wire) Rows() int { return len(w.L) }

// Round makes w what p is on the wire, in w's memory where that is large enough.
func (w *Wire) Round(p Partial) error {
	if err := p.check("partial", p.Rows(), p.Width); err != nil {
		return err
	}
	w.Width = p.Width
	w.O, w.M, w.L = grow(w.O, len(p.O)), grow(w.M, len(p.M)), grow(w.L, len(p.L))
	copy(w.M, p.M)
	copy(w.L, p.L)
	for i, x := range p.O {
		w.O[i] = ToBFloat16(x)
	}
	return nil
}

// RowBytes is the length of one row of width outputs on the wire.
func RowBytes(width int) int { return 2*width + 8 }

// AppendTo appends the rows in their wire form.
func (w *Wire) AppendTo(b []byte) []byte {
	for r := range w.L {
		for _, x := range w.O[r*w.Width : (r+1)*w.Width] {
			b = binary.LittleEndian.AppendUint16(b, uint16(x))
		}
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(w.M[r]))
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(w.L[r]))
	}
	return b
}

// Parse reads rows of width outputs from b, all of it, into w's memory where that
// is large enough. It checks the length only: Merge checks what the rows say.
func (w *Wire) Parse(b []byte, width int) error {
	if width < 1 || width > 1<<20 || len(b)%RowBytes(width) != 0 {
		return fmt.Errorf("attention: %d bytes are not whole rows of width %d: %w", len(b), width, ErrInvalid)
	}
	rows := len(b) / RowBytes(width)
	w.Width = width
	w.O, w.M, w.L = grow(w.O, rows*width), grow(w.M, rows), grow(w.L, rows)
	for r := range rows {
		for i := range width {
			w.O[r*width+i] = BFloat16(binary.LittleEndian.Uint16(b))
			b = b[2:]
		}
		w.M[r] = math.Float32frombits(binary.LittleEndian.Uint32(b))
		w.L[r] = math.Float32frombits(binary.LittleEndian.Uint32(b[4:]))
		b = b[8:]
	}
	return nil
}

// shape compares lengths with rows of width.
func shape(what string, rows, width, haveWidth, o, m, l int) error {
	if haveWidth != width || o != rows*width || m != rows || l != rows {
		return fmt.Errorf("attention: %s has width %d, %d outputs, %d maxima and %d denominators; want %d rows of width %d: %w",
			what, haveWidth, o, m, l, rows, width, ErrInvalid)
	}
	return nil
}

// grow returns s with length n.
func grow[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n)
	}
	return s[:n]
}
