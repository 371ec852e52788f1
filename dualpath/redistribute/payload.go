package redistribute

import "fmt"

// Payload has the sizes, in bytes, of the data that cross a fabric.
type Payload struct {
	// Query is the size of one routed query row (q in the paper). Partial is the size of the row
	// that is sent back: an output and its softmax statistics (p). Stats is the size of these
	// statistics within Partial: the running maximum and the denominator.
	Query, Partial, Stats int
	// Token is the size of one cached token in one layer (b_KV).
	Token int
	// Layers is the number of layers with attention (L).
	Layers int
}

// statsBytes is the size of the maximum and the denominator of one row, both float32.
const statsBytes = 8

// MLA returns the payload of absorbed multi-head latent attention: query rows and cached tokens
// have qk elements, outputs have v elements, and an element has the given number of bytes (section
// 3.2).
func MLA(qk, v, element, layers int) Payload {
	return Payload{Query: qk * element, Partial: v*element + statsBytes, Stats: statsBytes, Token: qk * element, Layers: layers}
}

// DeepSeekV2Lite returns the payload that the paper measures: 576 and 512 elements, bf16, 27
// layers.
func DeepSeekV2Lite() Payload { return MLA(576, 512, 2, 27) }

// Validate returns an error that names the first size out of its range.
func (p Payload) Validate() error {
	for _, f := range []struct {
		name  string
		value int
	}{{"query row", p.Query}, {"partial row", p.Partial}, {"cached token", p.Token}, {"layers", p.Layers}} {
		if f.value < 1 || f.value > 1<<30 {
			return fmt.Errorf("redistribute: %s: %d; it must be between 1 and 2^30", f.name, f.value)
		}
	}
	if p.Stats < 0 || p.Stats >= p.Partial {
		return fmt.Errorf("redistribute: statistics of %d bytes in a partial row of %d: they must be fewer", p.Stats, p.Partial)
	}
	return nil
}

// RouteBytes returns the number of bytes, in both directions, of one round trip to each of the
// holders, with the given number of query rows.
func (p Payload) RouteBytes(rows, holders int) float64 {
	return float64(holders) * float64(rows) * float64(p.Query+p.Partial)
}

// LayerBytes returns the size in bytes of the given number of cached tokens in one layer.
func (p Payload) LayerBytes(tokens int) float64 { return float64(tokens) * float64(p.Token) }

// ChunkBytes returns the size in bytes of the given number of cached tokens in all layers, which
// fetch moves.
func (p Payload) ChunkBytes(tokens int) float64 { return p.LayerBytes(tokens) * float64(p.Layers) }

// BreakEvenRows returns the number of query rows at which routing moves as many bytes as one layer
// of the chunk: c_t b_KV/(q+p) (section 5.2).
func (p Payload) BreakEvenRows(tokens int) float64 {
	return p.LayerBytes(tokens) / float64(p.Query+p.Partial)
}

// Saved returns the share of one layer's bytes that route saves compared with fetch. It is negative
// above BreakEvenRows.
func (p Payload) Saved(rows, tokens int) float64 {
	return 1 - p.RouteBytes(rows, 1)/p.LayerBytes(tokens)
}

// Rank returns the payload of one of n tensor-parallel ranks whose instances divide the latent by
// columns (section 8, "Tensor parallelism"): each rank sends its slice of the query and receives
// its slice of the output. The statistics belong to the whole row and go to each rank. So each rank
// carries 1/n of the query and output bytes and the statistics in full. All ranks together exchange
// more bytes than without tensor parallelism, by n-1 times the statistics.
func (p Payload) Rank(n int) (Payload, error) {
	if n < 1 || p.Query%n != 0 || p.Token%n != 0 || (p.Partial-p.Stats)%n != 0 {
		return Payload{}, fmt.Errorf("redistribute: rows of %d and %d bytes and tokens of %d cannot be cut in %d equal slices: choose a degree that divides all three",
			p.Query, p.Partial-p.Stats, p.Token, n)
	}
	p.Query, p.Token, p.Partial = p.Query/n, p.Token/n, (p.Partial-p.Stats)/n+p.Stats
	return p, nil
}

// Pair is a rank of the requester, a rank of the holder, and the columns [Low, High) of the latent
// that the requester's rank sends to the holder's rank.
type Pair struct{ Requester, Holder, Low, High int }

// PairRanks pairs the ranks of two instances that divide a latent of width columns into equal
// slices. If both have the same number of ranks, rank r is paired with rank r, and the all-reduce
// over ranks stays inside each instance. Otherwise any two ranks with common columns form a pair.
func PairRanks(width, requester, holder int) ([]Pair, error) {
	if requester < 1 || holder < 1 || width < 1 || width%requester != 0 || width%holder != 0 {
		return nil, fmt.Errorf("redistribute: a latent of %d columns cannot be cut evenly over %d and %d ranks", width, requester, holder)
	}
	var out []Pair
	wide, narrow := width/requester, width/holder
	for at := 0; at < width; {
		r, h := at/wide, at/narrow
		end := min((r+1)*wide, (h+1)*narrow)
		out = append(out, Pair{Requester: r, Holder: h, Low: at, High: end})
		at = end
	}
	return out, nil
}
