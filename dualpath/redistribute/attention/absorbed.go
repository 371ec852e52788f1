package attention

import (
	"fmt"
	"math"
)

// Latent is the shape of absorbed multi-head latent attention: a query row and a cached token have
// Key columns each. The first Value columns of a cached token are also its value. A logit is Scale
// times the dot product of query row and cached token.
type Latent struct {
	Key, Value int
	Scale      float32
}

// DeepSeekV2Lite returns the shape with 576 and 512 columns. Scale is that of an attention head
// before absorption, whose keys have 128 columns and another 64 columns for the rotary position.
func DeepSeekV2Lite() Latent {
	return Latent{Key: 576, Value: 512, Scale: float32(1 / math.Sqrt(128+64))}
}

// Absorbed sets dst to the partial attention of the query rows over the tokens of cache whose
// indexes are in selected, or over all tokens if selected is nil. selected must have no duplicates.
// Logits are in float32, as in a kernel. The sums are in float64, because the error of adding terms
// one by one in float32 would be larger than that of any merge.
func (g Latent) Absorbed(dst *Partial, query, cache []float32, selected []int) error {
	if g.Key < 1 || g.Value < 1 || g.Value > g.Key || !finite(g.Scale) {
		return fmt.Errorf("attention: keys %d wide, values %d, scale %v: values are a part of keys, and the scale is finite", g.Key, g.Value, g.Scale)
	}
	if len(query)%g.Key != 0 || len(cache)%g.Key != 0 {
		return fmt.Errorf("attention: %d query and %d cache elements are not whole rows of %d", len(query), len(cache), g.Key)
	}
	tokens := len(cache) / g.Key
	for _, j := range selected {
		if j < 0 || j >= tokens {
			return fmt.Errorf("attention: token %d of %d is selected", j, tokens)
		}
	}
	if selected == nil {
		selected = make([]int, tokens)
		for j := range selected {
			selected[j] = j
		}
	}
	dst.Reserve(len(query)/g.Key, g.Value)
	if len(selected) == 0 {
		return nil
	}
	logits, sum := make([]float32, len(selected)), make([]float64, g.Value)
	for r := range dst.Rows() {
		m, err := g.logits(logits, r, query[r*g.Key:(r+1)*g.Key], cache, selected)
		if err != nil {
			return err
		}
		clear(sum)
		l := 0.0
		for i, j := range selected {
			p := math.Exp(float64(logits[i]) - float64(m))
			l += p
			for c, v := range cache[j*g.Key : j*g.Key+g.Value] {
				sum[c] += p * float64(v)
			}
		}
		dst.M[r], dst.L[r] = m, float32(l)
		out := dst.row(r)
		for c, o := range sum {
			out[c] = narrow(o / l)
		}
	}
	return nil
}

// logits stores the logits of query row r in the slice into and returns the largest logit. q has
// the elements of the row.
func (g Latent) logits(into []float32, r int, q, cache []float32, selected []int) (float32, error) {
	m := float32(math.Inf(-1))
	for i, j := range selected {
		var x float32
		for c, k := range cache[j*g.Key : (j+1)*g.Key] {
			x += q[c] * k
		}
		if x *= g.Scale; !finite(x) {
			return 0, fmt.Errorf("attention: row %d, token %d: the logit is %v: the products exceed float32", r, j, x)
		}
		into[i], m = x, max(m, x)
	}
	return m, nil
}
