package main

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/testetcd"
)

// TestDiscoverCommands: block put, block get and the gateway find the members of a cluster from the
// address of any one of them. Without --discover, block get finds only the blocks of its node, and
// warns.
func TestDiscoverCommands(t *testing.T) {
	testkit.VerifyNone(t)
	etcd, dir := testetcd.Start(t, 1), t.TempDir()
	a := startServed(t, dir+"/a", clusterOf(etcd, "a")...)
	c := startServed(t, dir+"/c", clusterOf(etcd, "c")...)
	awaitTrue(t, "both nodes serve", func() bool { return serving(t, a)() && serving(t, c)() })
	a.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	const sequences = 8
	file := func(i int) string { return writeFile(t, dir, fmt.Sprint("tokens", i), tokens(1+100*i, 4)) }
	for i := range sequences {
		data := writeFile(t, dir, "data", bytesOf(byte(i), 8192))
		a.run("block", "put", "m", "--discover", "--tokens-file", file(i), "--data-file", data).must(t)
	}
	out, alone := dir+"/out", 0
	for i := range sequences {
		r := c.run("block", "get", "m", "--discover", "--tokens-file", file(i), "--out", out)
		r.must(t)
		got, err := os.ReadFile(out)
		if err != nil || !bytes.Equal(got, bytesOf(byte(i), 8192)) || strings.Contains(r.err, "warning") {
			t.Errorf("sequence %d has other bytes: %v, %s", i, err, r.err)
		}
		r = c.run("block", "get", "m", "--tokens-file", file(i), "--out", out)
		if r.code == exitOK {
			alone++
		}
		if !strings.Contains(r.err, "warning: the node has a cluster") {
			t.Errorf("no warning without --discover: %s", r.err)
		}
	}
	if alone == 0 || alone == sequences {
		t.Errorf("one node has %d of %d sequences", alone, sequences)
	}
	byVariable := []string{"PENSTOCK_SERVER=" + c.ready.Listen, "PENSTOCK_DISCOVER=true"}
	penstock(t, "", byVariable, "block", "get", "m", "--tokens-file", file(0), "--out", out).must(t)
	penstock(t, "", byVariable, "block", "get", "m", "--tokens-file", file(1), "--out", out).must(t)
	if r := penstock(t, "", []string{"PENSTOCK_DISCOVER=sometimes"}, "block", "get", "m", "--tokens-file", file(0), "--out", out); r.code != exitUsage || !strings.Contains(r.err, "PENSTOCK_DISCOVER") {
		t.Errorf("exit %d, %s", r.code, r.err)
	}

	_, args := startPrefillDecode(t, a, "m", func(string) {}) // args ends with --servers and the address of a; the prompts begin with the tokens of sequence 0
	for _, member := range []*served{a, c} {
		s := startGateway(t, append(args[:len(args)-1], member.ready.Listen, "--discover")...)
		web := gatewayClient(t, nil)
		if err := complete(t.Context(), web, s.ready.Listen, "x"); err != nil {
			t.Error(err)
		}
		if _, body := call(t, web, "GET", "http://"+s.ready.HTTP+"/metrics", ""); !strings.Contains(body, "\npenstock_gateway_hit_tokens_total 4\n") {
			t.Errorf("a gateway with the address of %s did not find the block of 4 tokens", member.ready.Listen)
		}
		s.stop()
	}
}
