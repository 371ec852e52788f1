package kv_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"flag"
	"os"
	"testing"

	"github.com/penstock-kv/penstock/kv"
)

var rewrite = flag.Bool("rewrite", false, "rewrite testdata/chain_vectors.json from the implementation")

// chainVector is one published case. An implementation in another language that reproduces all
// cases computes the same chains.
type chainVector struct {
	Tenant      string       `json:"tenant"`
	Name        string       `json:"name"`
	Salt        []byte       `json:"salt_base64"`
	BlockTokens int          `json:"block_tokens"`
	Tokens      []kv.Token   `json:"tokens"`
	Root        kv.BlockID   `json:"root"`
	IDs         []kv.BlockID `json:"ids"`
}

// referenceChain is the formula of Chain's comment, written the long way.
func referenceChain(v chainVector) (root kv.BlockID, ids []kv.BlockID) {
	var b bytes.Buffer
	u32 := func(n int) { binary.Write(&b, binary.LittleEndian, uint32(n)) }
	b.WriteString("penstock kv chain v1\x00")
	u32(len(v.Tenant))
	b.WriteString(v.Tenant)
	u32(len(v.Name))
	b.WriteString(v.Name)
	u32(len(v.Salt))
	b.Write(v.Salt)
	u32(v.BlockTokens)
	sum := sha256.Sum256(b.Bytes())
	root = kv.BlockID(sum[:16])
	tip := root
	for i := 0; i+v.BlockTokens <= len(v.Tokens); i += v.BlockTokens {
		b.Reset()
		b.Write(tip[:])
		u32(v.BlockTokens)
		for _, t := range v.Tokens[i : i+v.BlockTokens] {
			u32(int(t))
		}
		sum := sha256.Sum256(b.Bytes())
		tip = kv.BlockID(sum[:16])
		ids = append(ids, tip)
	}
	return root, ids
}

func count(n int) []kv.Token {
	tokens := make([]kv.Token, n)
	for i := range tokens {
		tokens[i] = kv.Token(i)
	}
	return tokens
}

func TestChainVectors(t *testing.T) {
	const path = "testdata/chain_vectors.json"
	if *rewrite {
		vectors := []chainVector{
			{Name: "m", BlockTokens: 1, Tokens: []kv.Token{0, 1, 4294967295}},
			{Tenant: "acme", Name: "llama-3/70b", BlockTokens: 4, Tokens: count(11)},
			{Tenant: "acme", Name: "llama-3/70b", Salt: []byte{0, 1, 2, 255}, BlockTokens: 4, Tokens: count(11)},
			{Tenant: "a", Name: "bc", BlockTokens: 64, Tokens: count(200)},
			{Tenant: "ab", Name: "c", BlockTokens: 64, Tokens: count(200)},
			{Name: "empty", BlockTokens: 64, Tokens: count(63), IDs: []kv.BlockID{}},
		}
		for i := range vectors {
			v := &vectors[i]
			v.Root, v.IDs = referenceChain(*v)
		}
		out, err := json.MarshalIndent(vectors, "", " ")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, append(out, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var vectors []chainVector
	if err := json.Unmarshal(raw, &vectors); err != nil {
		t.Fatal(err)
	}
	seen := map[kv.BlockID]int{}
	for i, v := range vectors {
		chain, err := kv.NewChain(v.Tenant, v.Name, v.Salt, v.BlockTokens)
		if err != nil {
			t.Fatal(err)
		}
		if chain.Tip() != v.Root {
			t.Errorf("vector %d: root %v; want %v", i, chain.Tip(), v.Root)
		}
		if j, dup := seen[v.Root]; dup {
			t.Errorf("vectors %d and %d share a root", i, j)
		}
		seen[v.Root] = i
		ids, n := chain.Append(nil, v.Tokens)
		if n != len(v.IDs)*v.BlockTokens {
			t.Errorf("vector %d: consumed %d tokens; want %d", i, n, len(v.IDs)*v.BlockTokens)
		}
		for j, id := range ids {
			if id != v.IDs[j] {
				t.Errorf("vector %d: id %d is %v; want %v", i, j, id, v.IDs[j])
			}
		}
	}
}

// FuzzChain: appending in pieces equals appending at once, and equals the
// formula written the long way.
func FuzzChain(f *testing.F) {
	f.Add("t", "n", []byte("s"), uint8(4), []byte("0123456789abcdefghijklmnopqrstuvwxyz"), uint8(3))
	f.Fuzz(func(t *testing.T, tenant, name string, salt []byte, blockTokens uint8, raw []byte, cut uint8) {
		if blockTokens == 0 {
			return
		}
		tokens := make([]kv.Token, len(raw)/4)
		for i := range tokens {
			tokens[i] = binary.LittleEndian.Uint32(raw[4*i:])
		}
		v := chainVector{Tenant: tenant, Name: name, Salt: salt, BlockTokens: int(blockTokens), Tokens: tokens}
		_, want := referenceChain(v)
		chain, err := kv.NewChain(tenant, name, salt, int(blockTokens))
		if err != nil {
			t.Fatal(err)
		}
		split := min(int(cut)*int(blockTokens), len(tokens))
		got, n := chain.Append(nil, tokens[:split])
		got, _ = chain.Append(got, tokens[n:])
		if len(got) != len(want) {
			t.Fatalf("%d ids; want %d", len(got), len(want))
		}
		for i := range got {
			if got[i] != want[i] {
				t.Fatalf("id %d is %v; want %v", i, got[i], want[i])
			}
		}
	})
}

func TestChainRefusesImpossibleBlocks(t *testing.T) {
	for _, n := range []int{-1, 0, kv.MaxBlockTokens + 1} {
		if _, err := kv.NewChain("", "m", nil, n); err == nil {
			t.Errorf("a chain of blocks of %d tokens was accepted", n)
		}
	}
}

func BenchmarkChainAppend(b *testing.B) {
	chain, err := kv.NewChain("", "m", nil, 64)
	if err != nil {
		b.Fatal(err)
	}
	tokens := count(64 * 512)
	ids := make([]kv.BlockID, 0, 512)
	b.SetBytes(int64(4 * len(tokens)))
	for b.Loop() {
		c := chain
		ids, _ = c.Append(ids[:0], tokens)
	}
}
