package main

import (
	"bytes"
	"context"
	"encoding/json"
	"image/png"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/internal/trace"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/cluster"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/sim/workload"
)

func cfgWith(capacity int64) config.Config {
	c := config.Default()
	c.Data, c.Capacity = []string{"/x"}, config.Size(capacity)
	return c
}

// TestDemoCluster runs a whole cluster in separate processes with rate-limited connections. Every
// turn of every agent succeeds, both sides read, the bytes are right, the picture is drawn, and no
// other file is left.
func TestDemoCluster(t *testing.T) {
	testkit.Long(t, "runs the whole demo")
	testkit.VerifyNone(t)
	dir := t.TempDir()
	picture := t.TempDir() + "/nics.png"
	r := penstock(t, "", append(os.Environ(), childEnv), "demo", "--loopback", "--dir", dir, "--picture", picture,
		"--agents", "4", "--rounds", "6", "--divide", "16", "--format", "json")
	d := decode[clusterReport](t, r)
	if len(d.Runs) != 3 || !strings.Contains(d.Network, "loopback") || d.Bound != 3 || d.Picture != picture {
		t.Fatalf("%+v", d)
	}
	for _, run := range d.Runs {
		if run.Turns != 24 || run.Failed != 0 || run.WrongBlocks != 0 || run.CaughtBlocks != 0 || run.CheckedBytes == 0 || run.HitTokens == 0 {
			t.Errorf("%s: %+v", run.Mode, run.Result)
		}
		if both := run.DecodeTokens > 0; both != (run.Mode != modeBasic) {
			t.Errorf("%s: the decode side read %d tokens", run.Mode, run.DecodeTokens)
		}
	}
	if d.of(modeDual).HitTokens != d.of(modeBasic).HitTokens {
		t.Error("the modes did not do the same work")
	}
	if drawn, err := os.ReadFile(picture); err != nil {
		t.Error(err)
	} else if _, err := png.Decode(bytes.NewReader(drawn)); err != nil {
		t.Error(err)
	}
	isEmpty(t, dir)
}

// TestDemoRefuses: impossible options are refused before any process starts.
func TestDemoRefuses(t *testing.T) {
	for text, bad := range map[string][]string{
		"like 2P4D": {"--shape", "2P"}, "at least one node": {"--shape", "0P4D"}, "1 to 32": {"--shape", "33P1D"}, "is one of basic, dualpath, oracle": {"--modes", "fast"},
		"at least 1 Mbit/s": {"--rate", "0"}, "128K": {"--set", "128K"}, "must be 1 to 4096": {"--agents", "0"},
		"--dir /nowhere": {"--dir", "/nowhere"},
	} {
		if r := penstock(t, "", nil, append([]string{"demo"}, bad...)...); r.code != exitUsage || !strings.Contains(r.err, text) {
			t.Errorf("%v: exit %d, %q without %q", bad, r.code, r.err, text)
		}
	}
}

// TestDemoNeedsSpace: a disk that is too small is reported before any process starts, with the
// required space, the directory, and a way to need less.
func TestDemoNeedsSpace(t *testing.T) {
	dir := t.TempDir()
	r := penstock(t, "", nil, "demo", "node", "--dir", dir, "--capacity", "900TiB")
	if want := "needs 900 TiB: name another directory with --dir, or a smaller --capacity"; r.code != exitFailed || !strings.Contains(r.err, dir+" has ") || !strings.Contains(r.err, want) {
		t.Errorf("exit %d, %q without %q", r.code, r.err, want)
	}
	few := []workload.Trajectory{{Rounds: []workload.Round{{Append: 1000, Gen: 24}}}}
	spec := cluster.Spec{Layers: 8, TokenBytes: 256, CapacityBytes: 1 << 40}
	if got, want := demoBytes(spec, few), int64(1024*8*256+2*demoSpare); got != want {
		t.Errorf("%d bytes for 1024 tokens of 2 KiB; want %d", got, want)
	}
	if spec.CapacityBytes = 1 << 20; demoBytes(spec, few) != 1<<20+2*demoSpare {
		t.Error("more than the capacity is requested")
	}
	isEmpty(t, dir)
}

// demoArgs are the arguments of a demo of one node that takes some seconds.
func demoArgs(dir string) []string {
	return []string{
		"demo", "node", "--dir", dir, "--io", "posix", "--capacity", "48MiB", "--format", "json",
		"--requests", "40", "--layers", "2", "--token-bytes", "32", "--concurrency", "2", "--window", "4MiB",
	}
}

// TestDemo: a node in a separate process serves a real trace from a disk that is too small for it.
// Every byte is right, and no file is left.
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

// TestInterruptedDemoCleansUp: SIGINT ends the node and removes the directory.
func TestInterruptedDemoCleansUp(t *testing.T) {
	testkit.VerifyNone(t)
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	args := append(demoArgs(dir), "--requests", "0")
	ended := make(chan result)
	go func() { ended <- penstockIn(ctx, "", append(os.Environ(), childEnv), args...) }()
	// The volume exists once the node has started.
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

// TestReplayNoticesForeignBytes: a block with other bytes than the replay stores is detected and
// named, and the command fails.
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

// TestReplayTakesMooncake: the replay accepts requests of 512-token blocks in several files, and
// removes the namespace that it made.
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

// TestPictureOfShortRuns: a run that ended before the first sample is drawn too. Without a run to
// draw, the report has no picture.
func TestPictureOfShortRuns(t *testing.T) {
	file := t.TempDir() + "/nics.png"
	run := func(mode string) clusterRun {
		return clusterRun{Mode: mode, Result: &cluster.Result{
			Completion: time.Millisecond, NICs: []cluster.NIC{{Node: "P0", Storage: true}, {Node: "D0", Storage: true}}, ReceivedBytes: []uint64{1e6, 2e6},
		}}
	}
	r := clusterReport{Runs: []clusterRun{run(modeOracle)}}
	if err := r.draw(file); err != nil || r.Picture != "" {
		t.Errorf("nothing but the oracle: picture %q, %v", r.Picture, err)
	}
	r.Runs = append(r.Runs, run(modeBasic))
	if err := r.draw(file); err != nil || r.Picture != file {
		t.Fatalf("picture %q, %v", r.Picture, err)
	}
	if drawn, err := os.ReadFile(file); err != nil {
		t.Error(err)
	} else if _, err := png.Decode(bytes.NewReader(drawn)); err != nil {
		t.Error(err)
	}
}
