package kv

import (
	"bytes"
	"crypto/sha256"
	"testing"
)

// TestKeys compares ids with the formula in the comment of Keys.
func TestKeys(t *testing.T) {
	ns := Namespace{Name: "m", Tenant: "t", Salt: []byte("s"), Geometry: SingleGroup(2, 16, 64), Index: IndexFlat}
	keys, err := ns.Keys()
	if err != nil {
		t.Fatal(err)
	}
	chain, err := ns.Chain()
	if err != nil {
		t.Fatal(err)
	}
	root := chain.Tip()
	for _, key := range [][]byte{{0}, []byte("model@0@aa"), bytes.Repeat([]byte{0xff}, KeyMaxBytes)} {
		want := sha256.Sum256(append(append([]byte("penstock kv key v1\x00"), root[:]...), key...))
		got, err := keys.ID(key)
		if err != nil || got != BlockID(want[:16]) {
			t.Errorf("key of %d bytes: %v, %v; want %x", len(key), got, err, want[:16])
		}
	}
	for _, n := range []int{0, KeyMaxBytes + 1} {
		if _, err := keys.ID(make([]byte, n)); err == nil {
			t.Errorf("key of %d bytes: no error", n)
		}
	}
	if n := testing.AllocsPerRun(100, func() { _, _ = keys.ID([]byte("model@0@aa")) }); n != 0 {
		t.Errorf("%v allocations per id; want 0", n)
	}
}

// TestChainSalt: chains with different salts and a chain without a salt have no id in
// common. Resume continues a chain from any of its blocks.
func TestChainSalt(t *testing.T) {
	c, err := NewChain("", "m", nil, 2)
	if err != nil {
		t.Fatal(err)
	}
	tokens := []Token{1, 2, 3, 4, 5, 6}
	plain, salted, other := c, c.Salt([]byte("lora")), c.Salt([]byte("lorb"))
	a, _ := plain.Append(nil, tokens)
	b, _ := salted.Append(nil, tokens)
	d, _ := other.Append(nil, tokens)
	for i := range a {
		if a[i] == b[i] || b[i] == d[i] || a[i] == d[i] {
			t.Errorf("block %d: ids %v, %v, %v; want three different ids", i, a[i], b[i], d[i])
		}
	}
	rest := c.Resume(b[0])
	e, _ := rest.Append(nil, tokens[2:])
	if e[0] != b[1] || e[1] != b[2] {
		t.Errorf("resumed: %v; want %v", e, b[1:])
	}
}
