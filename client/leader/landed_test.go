package leader

import (
	"testing"

	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/kv"
)

// TestLanded: the tokens of a part arrive in proportion to its bytes, also if its last blocks have more bytes than its
// first ones, and all of them have arrived with the last byte.
func TestLanded(t *testing.T) {
	hybrid := kv.Geometry{BlockTokens: 16, Groups: []kv.Group{
		{Kind: kv.Full, Layers: 1, TokenBytes: 100},
		{Kind: kv.Window, Layers: 5, TokenBytes: 100, WindowTokens: 32},
	}}
	full := kv.SingleGroup(6, 16, 100)
	largest := kv.SingleGroup(1, kv.MaxBlockTokens, kv.MaxPieceBytes/kv.MaxBlockTokens)
	const block = 1600 // bytes of a layer
	for _, c := range []struct {
		of       kv.Geometry
		from, to int
		bytes    int64
		want     int
	}{
		{hybrid, 0, 8, 8 * block, 8 * 16}, {hybrid, 0, 8, 4 * block, 4 * 16}, {hybrid, 0, 8, 6 * 8 * block, 8 * 16},
		{hybrid, 8, 10, 12 * block, 2 * 16}, {hybrid, 8, 10, 6 * block, 16},
		{hybrid, 0, 10, 20 * block, 10 * 16}, {hybrid, 0, 10, 10 * block, 5 * 16}, {hybrid, 0, 10, 20*block - 1, 10*16 - 1},
		{full, 0, 8, 8 * 6 * block, 8 * 16}, {full, 0, 8, 6*block - 1, 15}, {full, 0, 8, 0, 0},
		{largest, 0, traffic.MaxBlocks, traffic.MaxBlocks * kv.MaxPieceBytes, traffic.MaxBlocks * kv.MaxBlockTokens},
	} {
		hit := max(10, c.to)
		if got := landed(c.of, traffic.Progress{Part: traffic.Part{From: c.from, To: c.to}, Bytes: c.bytes}, hit); got != c.want {
			t.Errorf("%v: %d bytes of the blocks [%d, %d) are %d tokens; want %d", c.of, c.bytes, c.from, c.to, got, c.want)
		}
	}
}
