package access

import (
	"fmt"
	"strconv"
)

// WeightMax is the maximum weight of a principal.
const WeightMax = 1000

// weight is the weight of a principal in the YAML document; 0 if the document has none.
type weight int

// UnmarshalText parses a whole number from 1 to WeightMax.
func (w *weight) UnmarshalText(text []byte) error {
	n, err := strconv.Atoi(string(text))
	if err != nil || n < 1 || n > WeightMax {
		return fmt.Errorf("%q is not a weight; write a whole number from 1 to %d, or leave the key out for the weight 1", clip(string(text)), WeightMax)
	}
	*w = weight(n)
	return nil
}

// Weight returns the weight of the principal. While reads of several principals wait, each principal is granted bytes in
// proportion to its weight.
func (p *Principal) Weight() int { return max(1, p.weight) }
