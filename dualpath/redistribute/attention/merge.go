package attention

import (
	"fmt"
	"math"
)

// Merge sets dst to the attention over the tokens of all parts. The parts must have disjoint tokens
// and the shape of dst. They may be in the form Wire, so parts that came over a fabric need no
// conversion. dst may be one of parts; otherwise their memory must not overlap. An error about a
// part wraps ErrInvalid and names the part; the content of dst is then undefined. Merge allocates
// nothing unless it returns an error.
func Merge[E Element](dst *Partial, parts []Rows[E]) error {
	if len(parts) > MaxParts {
		return fmt.Errorf("attention: %d parts; a merge takes at most %d: merge some of them first", len(parts), MaxParts)
	}
	rows, width := dst.Rows(), dst.Width
	if !dst.fits(rows, width) {
		return dst.misfit("the destination", rows, width)
	}
	for i := range parts {
		if !parts[i].fits(rows, width) {
			return parts[i].misfit(fmt.Sprintf("part %d", i), rows, width)
		}
	}
	var b blend
	for r := range rows {
		for i := range parts {
			b.m[i], b.l[i] = parts[i].M[r], parts[i].L[r]
		}
		m, l, err := b.weigh(len(parts), r)
		if err != nil {
			return err
		}
		if l == 0 {
			dst.clear(r)
			continue
		}
		if c := mix(dst.row(r), parts, r, &b); c >= 0 {
			return fmt.Errorf("attention: row %d, column %d: a part's output is not finite: %w", r, c, ErrInvalid)
		}
		dst.M[r], dst.L[r] = m, l
	}
	return nil
}

// tile is the number of columns that mix sums at a time. The sums of a tile, 2 KiB, stay in the
// first-level cache. If the destination is also one of the parts, mix reads each tile before it
// writes the tile.
const tile = 256

// mix stores the sum of the parts' rows r, weighted by their shares, in out. It returns the first
// column in which the sum is not finite, or -1.
func mix[E Element](out []float32, parts []Rows[E], r int, b *blend) int {
	var sums [tile]float64
	for at := 0; at < len(out); at += tile {
		end := min(at+tile, len(out))
		sum := sums[:end-at]
		clear(sum)
		for k, i := range b.which[:b.n] {
			addShare(sum, parts[i].row(r)[at:end], b.share[k])
		}
		for c, x := range sum {
			y := narrow(x)
			if !finite(y) {
				return at + c
			}
			out[at+c] = y
		}
	}
	return -1
}

// addShare adds share times o to sum, which has the same length.
func addShare[E Element](sum []float64, o []E, share float64) {
	switch o := any(o).(type) {
	case []float32:
		for c, x := range o[:len(sum)] {
			sum[c] += share * float64(x)
		}
	case []BFloat16:
		for c, x := range o[:len(sum)] {
			sum[c] += share * float64(x.Float32())
		}
	}
}

// blend is the scratch memory for one row. m and l are the statistics of all parts. share has the
// weights in the result of the n parts whose weight is not 0, and which has the indexes of these
// parts.
type blend struct {
	m, l  [MaxParts]float32
	share [MaxParts]float64
	which [MaxParts]int
	n     int
}

// weigh converts the statistics of n parts into shares that add up to 1, and returns the maximum
// and the denominator of the whole row. Shares are in float64, because the rounding errors of 64
// shares in float32 would make their sum differ from 1.
func (b *blend) weigh(n, row int) (m, l float32, err error) {
	m = float32(math.Inf(-1))
	for i := range n {
		pm, pl := b.m[i], b.l[i]
		// The denominator includes exp(0) and so is at least 1 in exact arithmetic, but the kernel
		// of an engine may round it below 1. So only its sign is checked.
		if !(pl >= 0) || math.IsInf(float64(pl), 1) || (pl > 0 && !finite(pm)) {
			return 0, 0, fmt.Errorf("attention: part %d, row %d: maximum %v, denominator %v: a denominator is finite and not negative, and with it the maximum is finite: %w",
				i, row, pm, pl, ErrInvalid)
		}
		if pl > 0 {
			m = max(m, pm)
		}
	}
	b.n = 0
	sum := 0.0
	for i := range n {
		w := float64(b.l[i]) * math.Exp(float64(b.m[i])-float64(m))
		if b.l[i] == 0 || w == 0 {
			continue
		}
		b.share[b.n], b.which[b.n] = w, i
		b.n++
		sum += w
	}
	for k := range b.n {
		b.share[k] /= sum
	}
	return m, narrow(sum), nil
}

// narrow rounds to float32; finite values stay finite.
func narrow(x float64) float32 {
	switch {
	case x > math.MaxFloat32 && !math.IsInf(x, 1):
		return math.MaxFloat32
	case x < -math.MaxFloat32 && !math.IsInf(x, -1):
		return -math.MaxFloat32
	}
	return float32(x)
}

// finite reports whether x is neither NaN nor infinite.
func finite(x float32) bool { return x-x == 0 }
