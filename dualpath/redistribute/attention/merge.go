package attention

import (
	"fmt"
	"math"
)

// Merge makes dst the attention over all parts, which must be of disjoint tokens
// and of one shape, dst's too. dst may be one of parts; it must not overlap them
// otherwise. On an error, which wraps ErrInvalid and names the part, dst is not
// usable. It allocates nothing unless it fails.
func Merge(dst *Partial, parts []Partial) error {
	if err := countParts(len(parts)); err != nil {
		return err
	}
	rows, width := dst.Rows(), dst.Width
	if err := dst.check("the destination", rows, width); err != nil {
		return err
	}
	for i := range parts {
		if p := &parts[i]; shape("", rows, width, p.Width, len(p.O), len(p.M), len(p.L)) != nil {
			return p.check(fmt.Sprintf("part %d", i), rows, width)
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
		from, out := r*width, dst.row(r)
		for c := range out {
			o := 0.0
			for k, i := range b.which[:b.n] {
				o += b.share[k] * float64(parts[i].O[from+c])
			}
			out[c] = narrow(o)
		}
		if c := firstBad(out); c >= 0 {
			return badOutput(r, c)
		}
		dst.M[r], dst.L[r] = m, l
	}
	return nil
}

// MergeWire is Merge of partials that came over a fabric, into dst in float32.
func MergeWire(dst *Partial, parts []Wire) error {
	if err := countParts(len(parts)); err != nil {
		return err
	}
	rows, width := dst.Rows(), dst.Width
	if err := dst.check("the destination", rows, width); err != nil {
		return err
	}
	for i := range parts {
		p := &parts[i]
		if shape("", rows, width, p.Width, len(p.O), len(p.M), len(p.L)) != nil {
			return shape(fmt.Sprintf("part %d", i), rows, width, p.Width, len(p.O), len(p.M), len(p.L))
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
		from, out := r*width, dst.row(r)
		for c := range out {
			o := 0.0
			for k, i := range b.which[:b.n] {
				o += b.share[k] * float64(parts[i].O[from+c].Float32())
			}
			out[c] = narrow(o)
		}
		if c := firstBad(out); c >= 0 {
			return badOutput(r, c)
		}
		dst.M[r], dst.L[r] = m, l
	}
	return nil
}

// countParts returns an error unless a merge takes n parts.
func countParts(n int) error {
	if n > MaxParts {
		return fmt.Errorf("attention: %d parts; a merge takes at most %d: merge some of them first", n, MaxParts)
	}
	return nil
}

// blend is the scratch of one row: the parts' statistics, and of those that count
// (which) their shares of the result.
type blend struct {
	m, l  [MaxParts]float32
	share [MaxParts]float64
	which [MaxParts]int
	n     int
}

// weigh turns the statistics of n parts into shares that add up to 1, and returns
// the statistics of the whole. Shares are in float64: those of 64 parts in float32
// would not add up to 1.
func (b *blend) weigh(n, row int) (m, l float32, err error) {
	m = float32(math.Inf(-1))
	for i := range n {
		pm, pl := b.m[i], b.l[i]
		// A sum of exponentials with the largest among them is at least 1, but a
		// kernel may round it, or count a dropped token: only its sign is asked for.
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

// narrow rounds to float32; what is finite stays finite.
func narrow(x float64) float32 {
	switch {
	case x > math.MaxFloat32 && !math.IsInf(x, 1):
		return math.MaxFloat32
	case x < -math.MaxFloat32 && !math.IsInf(x, -1):
		return -math.MaxFloat32
	}
	return float32(x)
}

// finite is neither NaN nor infinite.
func finite(x float32) bool { return x-x == 0 }

// firstBad returns the first column that is not finite, or -1.
func firstBad(row []float32) int {
	for c, x := range row {
		if !finite(x) {
			return c
		}
	}
	return -1
}

func badOutput(row, column int) error {
	return fmt.Errorf("attention: row %d, column %d: a part's output is not finite: %w", row, column, ErrInvalid)
}
