package attention

import (
	"fmt"
	"math"
)

// Merge sets dst to the attention over all parts, which must be of disjoint tokens and have dst's
// shape. Parts that came over a fabric are merged in their wire form. dst may be one of parts;
// otherwise their memory must not overlap. An error wraps ErrInvalid and names the part; dst is
// then not usable. Merge allocates nothing unless it fails.
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

// tile is the number of columns that are summed at a time. 2 KiB of sums stay in the first-level
// cache, and a destination that is also a part is read before it is written.
const tile = 256

// mix sets out to the sum of the parts' rows r, weighted by their shares. It returns the first
// column that is not finite, or -1.
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

// blend is the scratch memory of one row: the parts' statistics, and the shares in the result of
// the parts that have weight (which).
type blend struct {
	m, l  [MaxParts]float32
	share [MaxParts]float64
	which [MaxParts]int
	n     int
}

// weigh converts the statistics of n parts into shares that add up to 1, and returns the statistics
// of the whole. Shares are in float64: those of 64 parts in float32 would not add up to 1.
func (b *blend) weigh(n, row int) (m, l float32, err error) {
	m = float32(math.Inf(-1))
	for i := range n {
		pm, pl := b.m[i], b.l[i]
		// A sum of exponentials that includes the largest is at least 1, but a kernel may round it
		// down, or count a dropped token. So only its sign is checked.
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
