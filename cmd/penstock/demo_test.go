package main

import (
	"context"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/internal/trace"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/config"
)

func cfgWith(capacity int64) config.Config {
	c := config.Default()
	c.Data, c.Capacity = []string{"/x"}, config.Size(capacity)
	return c
}

// demoArgs are a demo of some seconds.
func demoArgs(dir string) []string {
	return []string{
		"demo", "node", "--dir", dir, "--io", "posix", "--capacity", "48MiB", "--format", "json",
		"--requests", "40", "--layers", "2", "--token-bytes", "32", "--concurrency", "2", "--window", "4MiB",
	}
}

// TestDemo: a node in a process of its own serves a real trace from too small a
// disk, every byte is right, and nothing is left behind.
func TestDemo(t *testing.T) {
	testkit.VerifyNone(t)
	dir := t.TempDir()
	r := penstock(t, "", append(os.Environ(), childEnv, "PENSTOCK_IO=uring"), demoArgs(dir)...)
	d := decode[demoNodeReport](t, r)
	if d.Requests != 40 || d.MismatchedBlocks != 0 || d.VerifiedBytes != d.ReadBytes || d.ReadBytes == 0 || d.WrittenBytes == 0 ||
		d.EvictedBlocks == 0 || d.HitRatio <= 0 || d.HitRatio > d.IdealHitRatio || d.IO != "posix" || d.RSSBytes == 0 || d.RSSBytes > d.MemoryBudgetBytes {
		t.Errorf("%+v", d)
	}
	isEmpty(t, dir)
}

func isEmpty(t *testing.T, dir string) {
	t.Helper()
	left, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range left {
		t.Errorf("%s was left behind", e.Name())
	}
}

// TestInterruptedDemoCleansUp: Ctrl-C ends node, directory and all.
func TestInterruptedDemoCleansUp(t *testing.T) {
	testkit.VerifyNone(t)
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	args := append(demoArgs(dir), "--requests", "0")
	ended := make(chan result)
	go func() { ended <- penstockIn(ctx, "", append(os.Environ(), childEnv), args...) }()
	// The volume is there once the node has started.
	for {
		if left, err := os.ReadDir(dir); err == nil && len(left) == 1 {
			if _, err := os.Stat(dir + "/" + left[0].Name() + "/volume/index"); err == nil {
				break
			}
		}
		select {
		case r := <-ended:
			t.Fatalf("it ended by itself: exit %d\n%s%s", r.code, r.out, r.err)
		default:
		}
	}
	cancel()
	r := <-ended
	if r.code != exitFailed || !strings.Contains(r.err, "canceled") {
		t.Errorf("exit %d\n%s", r.code, r.err)
	}
	isEmpty(t, dir)
}

// TestReplayNoticesForeignBytes: a block that holds something else than the
// replay would have stored is found, named, and fails the command.
func TestReplayNoticesForeignBytes(t *testing.T) {
	dir := t.TempDir()
	s := startServed(t, dir+"/volume")
	s.run("ns", "create", "m", "--layers", "2", "--block-tokens", "64", "--token-bytes", "32").must(t)
	sample, err := trace.Sample(trace.Options{Concurrency: 8, MaxRequests: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer sample.Close()
	var first []kv.Token
	for req, err := range sample.All() {
		if err != nil {
			t.Fatal(err)
		}
		first = req.AppendTokens(nil)[:3*64]
	}
	var text strings.Builder
	for _, token := range first {
		text.WriteString(itoa(int(token)) + " ")
	}
	tokensFile := writeFile(t, dir, "tokens", []byte(text.String()))
	dataFile := writeFile(t, dir, "data", bytesOf(3, 3*4096))
	s.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	r := s.run("trace", "replay", "sample", "--requests", "1", "--namespace", "m", "--window", "4MiB", "--format", "json")
	var rep report
	if err := json.Unmarshal([]byte(r.out), &rep); err != nil {
		t.Fatalf("%v in\n%s%s", err, r.out, r.err)
	}
	if r.code != exitFailed || rep.MismatchedBlocks != 3 || rep.HitTokens != 0 || !strings.Contains(rep.Mismatch, "differs from what was stored at byte 0 of 4096") {
		t.Errorf("exit %d, %+v\n%s", r.code, rep, r.err)
	}
}

// TestReplayTakesMooncake: requests of 512-token blocks, several files, and the
// namespace that was made is gone afterwards.
func TestReplayTakesMooncake(t *testing.T) {
	dir := t.TempDir()
	s := startServed(t, dir+"/volume")
	lines := `{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}
{"timestamp": 10, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]}
{"timestamp": 20, "input_length": 1536, "output_length": 5, "hash_ids": [1, 2, 4]}
`
	file := writeFile(t, dir, "mooncake.jsonl", []byte(lines))
	rep := decode[report](t, s.run("trace", "replay", file, "--layers", "2", "--token-bytes", "16", "--concurrency", "1", "--window", "1MiB", "--format", "json"))
	if rep.Requests != 3 || rep.AskedTokens != (2+2+3)*512 || rep.HitTokens != (2+2)*512 || rep.StoredBlocks != 3 || rep.HitRatio != rep.IdealHitRatio {
		t.Errorf("%+v", rep)
	}
	if r := s.run("ns", "list"); strings.Contains(r.must(t), "replay") {
		t.Errorf("left behind:\n%s", r.out)
	}
}
