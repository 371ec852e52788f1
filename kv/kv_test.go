package kv_test

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/kv"
)

func TestBlockIDText(t *testing.T) {
	id := kv.BlockID{0: 0xab, 15: 0x01}
	got, err := kv.ParseBlockID(id.String())
	if err != nil || got != id {
		t.Fatalf("ParseBlockID(%v) = %v, %v", id, got, err)
	}
	for _, bad := range []string{"", "ab", strings.Repeat("g", 32), strings.Repeat("a", 33)} {
		if _, err := kv.ParseBlockID(bad); err == nil {
			t.Errorf("ParseBlockID(%q) succeeded", bad)
		}
		if err := new(kv.BlockID).UnmarshalText([]byte(bad)); err == nil {
			t.Errorf("UnmarshalText(%q) succeeded", bad)
		}
	}
	if _, err := kv.BlockIDFromBytes(make([]byte, 15)); err == nil {
		t.Error("15 bytes made a block id")
	}
}

func TestExtentParts(t *testing.T) {
	e := kv.MakeExtent(255, kv.MaxSegments-1, math.MaxUint32)
	if e.Volume() != 255 || e.Segment() != kv.MaxSegments-1 || e.Slot() != math.MaxUint32 {
		t.Fatalf("%v lost a part", e)
	}
	if next := kv.MakeExtent(1, 2, 3) + 1; next != kv.MakeExtent(1, 2, 4) {
		t.Fatalf("v1/s2/3 + 1 = %v", next)
	}
	if got := (kv.Ref{Extent: kv.MakeExtent(1, 2, 3), Generation: 9}).String(); got != "v1/s2/3@9" {
		t.Fatalf("ref prints %q", got)
	}
}

func TestGeometrySizes(t *testing.T) {
	g := kv.Geometry{BlockTokens: 64, Groups: []kv.Group{
		{Kind: kv.Full, Layers: 61, TokenBytes: 656},
		{Kind: kv.Window, Layers: 3, TokenBytes: 100, WindowTokens: 65},
		{Kind: kv.State, Layers: 2, TokenBytes: 5000},
	}}
	if err := g.Validate(); err != nil {
		t.Fatal(err)
	}
	for group, want := range []struct{ layer, piece, window int64 }{
		{64 * 656, 61 * 64 * 656, 0},
		{6400, 19200, 2},
		{5000, 10000, 1},
	} {
		if got := g.LayerBytes(group); got != want.layer {
			t.Errorf("group %d: a layer is %d bytes; want %d", group, got, want.layer)
		}
		if got := g.PieceBytes(group); got != want.piece {
			t.Errorf("group %d: a piece is %d bytes; want %d", group, got, want.piece)
		}
		if got := int64(g.WindowBlocks(group)); got != want.window {
			t.Errorf("group %d: needs %d blocks; want %d", group, got, want.window)
		}
	}
	if got, want := g.BlockBytes(), int64(61*64*656+19200+10000); got != want {
		t.Errorf("a block is %d bytes; want %d", got, want)
	}
}

func TestNeededPieces(t *testing.T) {
	g := kv.Geometry{BlockTokens: 64, Groups: []kv.Group{
		{Kind: kv.Full, Layers: 1, TokenBytes: 1},
		{Kind: kv.Window, Layers: 1, TokenBytes: 1, WindowTokens: 100},
		{Kind: kv.State, Layers: 1, TokenBytes: 7},
	}}
	for _, tc := range []struct {
		blocks int
		first  [3]int
		bytes  int64
	}{
		{0, [3]int{0, 0, 0}, 0},
		{1, [3]int{0, 0, 0}, 64 + 64 + 7},
		{5, [3]int{0, 3, 4}, 5*64 + 2*64 + 7},
	} {
		for group, want := range tc.first {
			if got := g.FirstNeeded(group, tc.blocks); got != want {
				t.Errorf("%d blocks, group %d: first needed %d; want %d", tc.blocks, group, got, want)
			}
		}
		parts := int64(0)
		for b := range tc.blocks {
			parts += g.PartBytes(b, b+1, tc.blocks)
		}
		if got := g.PartBytes(0, tc.blocks, tc.blocks); got != parts {
			t.Errorf("all of %d blocks need %d bytes, and one by one %d", tc.blocks, got, parts)
		}
		if got := g.NeededBytes(tc.blocks); got != tc.bytes {
			t.Errorf("%d blocks need %d bytes; want %d", tc.blocks, got, tc.bytes)
		}
	}
	for _, tc := range []struct {
		from, to int
		bytes    int64
	}{{0, 3, 3 * 64}, {2, 4, 64 + 2*64}, {4, 5, 64 + 64 + 7}, {3, 3, 0}} {
		if got := g.PartBytes(tc.from, tc.to, 5); got != tc.bytes {
			t.Errorf("blocks [%d, %d) of 5 need %d bytes; want %d", tc.from, tc.to, got, tc.bytes)
		}
	}
}

func TestGeometryDigestSeparates(t *testing.T) {
	base := kv.SingleGroup(61, 64, 656)
	variants := []kv.Geometry{base, kv.SingleGroup(64, 61, 656), kv.SingleGroup(61, 656, 64), kv.SingleGroup(61, 64, 657)}
	tagged := base
	tagged.DType = "fp8"
	laid := base
	laid.Layout = "fp8"
	windowed := base
	windowed.Groups = []kv.Group{{Kind: kv.Window, Layers: 61, TokenBytes: 656, WindowTokens: 1}}
	variants = append(variants, tagged, laid, windowed)
	for i, a := range variants {
		for j, b := range variants {
			if a.Equal(b) != (i == j) {
				t.Errorf("variants %d and %d: equal = %v", i, j, a.Equal(b))
			}
		}
	}
}

func TestGeometryRefuses(t *testing.T) {
	big := math.MaxInt32
	full := kv.Group{Kind: kv.Full, Layers: 1, TokenBytes: 1}
	cases := map[string]kv.Geometry{
		"no groups":           {BlockTokens: 64},
		"zero tokens":         kv.SingleGroup(1, 0, 1),
		"negative tokens":     kv.SingleGroup(1, -1, 1),
		"huge tokens":         kv.SingleGroup(1, big, 1),
		"zero layers":         kv.SingleGroup(0, 64, 1),
		"huge layers":         kv.SingleGroup(big, 64, 1),
		"zero bytes":          kv.SingleGroup(1, 64, 0),
		"huge bytes":          kv.SingleGroup(1, 64, big),
		"product too large":   kv.SingleGroup(kv.MaxLayers, kv.MaxBlockTokens, kv.MaxTokenBytes),
		"unknown kind":        {BlockTokens: 64, Groups: []kv.Group{{Kind: 9, Layers: 1, TokenBytes: 1}}},
		"two full groups":     {BlockTokens: 64, Groups: []kv.Group{full, full}},
		"full not first":      {BlockTokens: 64, Groups: []kv.Group{{Kind: kv.State, Layers: 1, TokenBytes: 1}, full}},
		"window without size": {BlockTokens: 64, Groups: []kv.Group{{Kind: kv.Window, Layers: 1, TokenBytes: 1}}},
		"size without window": {BlockTokens: 64, Groups: []kv.Group{{Kind: kv.Full, Layers: 1, TokenBytes: 1, WindowTokens: 5}}},
		"negative window":     {BlockTokens: 64, Groups: []kv.Group{{Kind: kv.Full, Layers: 1, TokenBytes: 1, WindowTokens: -5}}},
		"long tag":            {BlockTokens: 64, DType: strings.Repeat("x", 65), Groups: []kv.Group{full}},
		"too many groups":     {BlockTokens: 64, Groups: make([]kv.Group, kv.MaxGroups+1)},
	}
	for name, g := range cases {
		if err := g.Validate(); !errors.Is(err, kv.ErrGeometry) {
			t.Errorf("%s: %v; want ErrGeometry", name, err)
		}
	}
}

func TestNamespaceRefuses(t *testing.T) {
	good := kv.Namespace{Name: "llama-3/70b_fp8.v1", Tenant: "acme", Geometry: kv.SingleGroup(2, 64, 8), Index: kv.IndexTrie}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	edit := func(f func(*kv.Namespace)) kv.Namespace { n := good; f(&n); return n }
	cases := map[string]kv.Namespace{
		"no name":        edit(func(n *kv.Namespace) { n.Name = "" }),
		"long name":      edit(func(n *kv.Namespace) { n.Name = strings.Repeat("a", 129) }),
		"space in name":  edit(func(n *kv.Namespace) { n.Name = "a b" }),
		"control tenant": edit(func(n *kv.Namespace) { n.Tenant = "a\x00" }),
		"long salt":      edit(func(n *kv.Namespace) { n.Salt = make([]byte, 65) }),
		"no index":       edit(func(n *kv.Namespace) { n.Index = 0 }),
		"negative quota": edit(func(n *kv.Namespace) { n.QuotaBytes = -1 }),
		"older newer":    edit(func(n *kv.Namespace) { n.Epoch, n.Older = 3, []kv.Epoch{3} }),
		"older twice":    edit(func(n *kv.Namespace) { n.Epoch, n.Older = 3, []kv.Epoch{2, 2} }),
		"too many live": edit(func(n *kv.Namespace) {
			n.Epoch, n.Older = 99, kv.Namespace{Epoch: 98, Older: make([]kv.Epoch, kv.MaxLive-1)}.Live()
		}),
		"keeps too many": edit(func(n *kv.Namespace) { n.Epoch, n.Older, n.Keep = 3, []kv.Epoch{2}, 3 }),
		"flat hybrid": edit(func(n *kv.Namespace) {
			n.Index = kv.IndexFlat
			n.Geometry.Groups = append(n.Geometry.Groups[:1:1], kv.Group{Kind: kv.State, Layers: 1, TokenBytes: 1})
		}),
	}
	for name, n := range cases {
		if err := n.Validate(); !errors.Is(err, kv.ErrNamespace) {
			t.Errorf("%s: %v; want ErrNamespace", name, err)
		}
	}
	bad := good
	bad.Geometry.BlockTokens = 0
	if err := bad.Validate(); !errors.Is(err, kv.ErrGeometry) {
		t.Errorf("bad geometry: %v", err)
	}
}

// FuzzGeometry: a geometry that Validate accepts has sizes that are positive, bounded and
// consistent.
func FuzzGeometry(f *testing.F) {
	f.Add(64, 61, 656, uint8(1), 0)
	f.Add(64, 61, 656, uint8(2), 4096)
	f.Add(1<<16, 1<<12, 1<<24, uint8(3), 0)
	f.Fuzz(func(t *testing.T, blockTokens, layers, tokenBytes int, kind uint8, window int) {
		g := kv.Geometry{BlockTokens: blockTokens, Groups: []kv.Group{{Kind: kv.GroupKind(kind), Layers: layers, TokenBytes: tokenBytes, WindowTokens: window}}}
		if g.Validate() != nil {
			return
		}
		if n := g.PieceBytes(0); n < 1 || n > kv.MaxPieceBytes || n != g.LayerBytes(0)*int64(layers) || n != g.BlockBytes() {
			t.Fatalf("%v: piece of %d bytes, layer of %d", g, n, g.LayerBytes(0))
		}
		if w := g.WindowBlocks(0); w < 0 || int64(w)*int64(blockTokens) < int64(window) {
			t.Fatalf("%v: %d blocks do not cover the window", g, w)
		}
	})
}

// TestLiveEpochs follows the live epochs of a namespace through bumps, pins and
// retirements. Each step names the live epochs and how many need no pin.
func TestLiveEpochs(t *testing.T) {
	ns := kv.Namespace{Name: "n", Geometry: kv.SingleGroup(1, 2, 8), Index: kv.IndexTrie, Epoch: 1}
	pins := map[kv.Epoch]bool{}
	pinned := func(e kv.Epoch) bool { return pins[e] }
	expect := func(keep int, live ...kv.Epoch) {
		t.Helper()
		if got := ns.Live(); !slices.Equal(got, live) || max(1, ns.Keep) != keep {
			t.Fatalf("live epochs %v, %d kept; want %v, %d", got, ns.Keep, live, keep)
		}
		if err := ns.Validate(); err != nil {
			t.Fatal(err)
		}
		for e := range kv.Epoch(100) {
			if ns.IsLive(e) != slices.Contains(live, e) {
				t.Fatalf("IsLive(%d) is %v with %v live", e, ns.IsLive(e), live)
			}
		}
	}
	expect(1, 1)
	ns = ns.Bump(2, 3, pinned) // there is only one older epoch
	expect(2, 2, 1)
	ns = ns.Bump(5, 3, pinned)
	expect(3, 5, 2, 1)
	ns = ns.Bump(6, 3, pinned)
	expect(3, 6, 5, 2)
	pins[2], pins[5] = true, true
	ns = ns.Bump(7, 1, pinned) // keep 1: only pinned epochs stay live besides the newest
	expect(1, 7, 5, 2)
	ns = ns.Bump(8, 3, pinned) // a later bump does not keep an epoch that needs a pin
	expect(2, 8, 7, 5, 2)
	delete(pins, 5)
	ns = ns.Settle(pinned)
	expect(2, 8, 7, 2)
	ns = ns.Retire(7)
	expect(1, 8, 2)
	ns = ns.Retire(8) // the newest cannot be retired
	expect(1, 8, 2)
	ns = ns.Retire(2)
	expect(1, 8)
	for e := kv.Epoch(9); e < 60; e++ {
		pins[e] = true
		ns = ns.Bump(e, 1+int(e)%kv.MaxLive, pinned)
		if err := ns.Validate(); err != nil {
			t.Fatal(err)
		}
	}
	if live := ns.Live(); len(live) != kv.MaxLive || live[kv.MaxLive-1] != 60-kv.MaxLive {
		t.Fatalf("pins of all epochs leave %v live", live)
	}
}
