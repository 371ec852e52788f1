package main

import (
	"bytes"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
)

// TestMixedGet: prefix match and block get with --mix name the epoch of each block, and the
// file has the bytes of these epochs.
func TestMixedGet(t *testing.T) {
	testkit.VerifyNone(t)
	dir := t.TempDir()
	s := startServed(t, dir+"/volume")
	tokensFile, dataFile := prompt(t, s, dir, 5)
	s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	s.run("ns", "bump-epoch", "m", "--keep", "2").must(t)
	newer := bytesOf(9, 2*8192)
	s.run("block", "put", "m", "--tokens-file", writeFile(t, dir, "first", tokens(1, 8)), "--data-file", writeFile(t, dir, "newer", newer)).must(t)

	want := []epochRun{{Epoch: 2, Blocks: 2}, {Epoch: 1, Blocks: 3}}
	args := []string{"m", "--tokens-file", tokensFile, "--oldest-epoch", "1", "--mix"}
	m := decode[matched](t, s.run(append([]string{"prefix", "match", "--format", "json"}, args...)...))
	if m.MatchedBlocks != 5 || m.Epoch != 2 || !slices.Equal(m.Epochs, want) {
		t.Errorf("match: %+v", m)
	}
	g := decode[getResult](t, s.run(append([]string{"block", "get", "--format", "json", "--out", dir + "/got"}, args...)...))
	if g.Blocks != 5 || !slices.Equal(g.Epochs, want) {
		t.Errorf("get: %+v", g)
	}
	got, err := os.ReadFile(dir + "/got")
	if err != nil {
		t.Fatal(err)
	}
	older, err := os.ReadFile(dataFile)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, append(newer, older[2*8192:]...)) {
		t.Error("the file does not have blocks 0-1 of epoch 2 and blocks 2-4 of epoch 1")
	}
	if out := s.run(append([]string{"prefix", "match"}, args...)...).must(t); !strings.Contains(out, "blocks 0-1  epoch 2\nblocks 2-4  epoch 1\n") {
		t.Errorf("match printed\n%s", out)
	}
}
