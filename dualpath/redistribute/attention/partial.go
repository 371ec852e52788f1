package attention

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// MaxParts is the largest number of partial results in one merge: eight times the largest number of
// holders in the paper's tests.
const MaxParts = 64

// ErrInvalid is wrapped by every error about an invalid partial result. The caller must drop the
// partial result and obtain the attention over its tokens in another way.
var ErrInvalid = errors.New("invalid partial")

// Element is the element type of outputs.
type Element interface{ float32 | BFloat16 }

// Rows has the attention results of a batch of query rows over one part of a cache.
type Rows[E Element] struct {
	// Width is the number of columns of an output row: d_v.
	Width int
	// O has the outputs, rows x Width, normalised over this part of the cache. M has the largest
	// logit of each row, and L the denominator of each row: the sum of exp(logit - M). L is at
	// least 1 if the part has tokens for the row, and 0 if not. If L is 0, O and M of the row are
	// undefined and not read.
	O    []E
	M, L []float32
}

// Partial is the form for computation, with outputs in float32. Wire is the form that crosses the
// fabric, with outputs in bfloat16.
type (
	Partial = Rows[float32]
	Wire    = Rows[BFloat16]
)

// Rows returns the number of rows of the batch.
func (p *Rows[E]) Rows() int { return len(p.L) }

// Reserve sets p to the given number of rows, all without tokens. It reuses the memory of p if that
// memory is large enough.
func (p *Rows[E]) Reserve(rows, width int) {
	p.resize(rows, width)
	for r := range rows {
		p.clear(r)
	}
}

// resize sets the number and the width of the rows, as Reserve does, but leaves their content
// undefined.
func (p *Rows[E]) resize(rows, width int) {
	p.Width = width
	p.O, p.M, p.L = grow(p.O, rows*width), grow(p.M, rows), grow(p.L, rows)
}

// clear sets row r to a row without tokens: the identity of the merge.
func (p *Rows[E]) clear(r int) {
	clear(p.row(r))
	p.M[r], p.L[r] = float32(math.Inf(-1)), 0
}

// row returns output r.
func (p *Rows[E]) row(r int) []E { return p.O[r*p.Width : (r+1)*p.Width] }

// fits reports whether the lengths match the given rows and width.
func (p *Rows[E]) fits(rows, width int) bool {
	return p.Width == width && len(p.O) == rows*width && len(p.M) == rows && len(p.L) == rows
}

// misfit returns the error about a partial whose lengths do not match.
func (p *Rows[E]) misfit(what string, rows, width int) error {
	return fmt.Errorf("attention: %s has width %d, %d outputs, %d maxima and %d denominators; want %d rows of width %d: %w",
		what, p.Width, len(p.O), len(p.M), len(p.L), rows, width, ErrInvalid)
}

// Round sets w to p with outputs rounded to bfloat16. It reuses the memory of w if that memory is
// large enough.
func Round(w *Wire, p Partial) error {
	if !p.fits(p.Rows(), p.Width) {
		return p.misfit("the partial", p.Rows(), p.Width)
	}
	w.resize(p.Rows(), p.Width)
	copy(w.M, p.M)
	copy(w.L, p.L)
	for i, x := range p.O {
		w.O[i] = ToBFloat16(x)
	}
	return nil
}

// RowBytes returns the encoded size of one row of width outputs, in bytes.
func RowBytes(width int) int { return 2*width + 8 }

// AppendWire appends the encoded rows of w to b.
func AppendWire(b []byte, w Wire) []byte {
	for r := range w.L {
		for _, x := range w.row(r) {
			b = binary.LittleEndian.AppendUint16(b, uint16(x))
		}
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(w.M[r]))
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(w.L[r]))
	}
	return b
}

// ParseWire decodes all of b as rows of width outputs into w. It reuses the memory of w if that
// memory is large enough. It checks only the length; Merge checks the values.
func ParseWire(w *Wire, b []byte, width int) error {
	if width < 1 || width > 1<<20 || len(b)%RowBytes(width) != 0 {
		return fmt.Errorf("attention: %d bytes are not whole rows of width %d: %w", len(b), width, ErrInvalid)
	}
	rows := len(b) / RowBytes(width)
	w.resize(rows, width)
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

// grow returns s with length n.
func grow[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n)
	}
	return s[:n]
}
