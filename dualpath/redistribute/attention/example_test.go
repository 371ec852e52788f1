package attention_test

import (
	"fmt"

	"github.com/penstock-kv/penstock/dualpath/redistribute/attention"
)

// Two holders attend to their tokens, and the requester merges their results.
func ExampleMerge() {
	g := attention.Latent{Key: 2, Value: 1, Scale: 1}
	query := []float32{1, 0}
	near, far := []float32{1, 0, 2, 0}, []float32{3, 0}
	var parts [2]attention.Partial
	for i, cache := range [][]float32{near, far} {
		if err := g.Absorbed(&parts[i], query, cache, nil); err != nil {
			panic(err)
		}
	}
	var all attention.Partial
	all.Reserve(1, g.Value)
	if err := attention.Merge(&all, parts[:]); err != nil {
		panic(err)
	}
	fmt.Printf("%.4f and %.4f make %.4f\n", parts[0].O[0], parts[1].O[0], all.O[0])
	// Output: 1.7311 and 3.0000 make 2.5752
}
