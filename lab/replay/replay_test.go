package replay_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/internal/trace"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/replay"
	"github.com/penstock-kv/penstock/lab/testnode"
)

// geo has blocks of 512 tokens, the length of a Mooncake trace's blocks, and 8 KiB.
var geo = kv.SingleGroup(2, 512, 8)

const blockBytes = 8 << 10

// requests are four prompts: three blocks, two of them and another, all three and a part of a fourth, and
// less than a block.
const requests = `{"timestamp":0,"input_length":1536,"output_length":1,"hash_ids":[1,2,3]}
{"timestamp":1,"input_length":1536,"output_length":1,"hash_ids":[1,2,4]}
{"timestamp":2,"input_length":1900,"output_length":1,"hash_ids":[1,2,3,5]}
{"timestamp":3,"input_length":100,"output_length":1,"hash_ids":[6]}
`

// reader returns a trace with the text.
func reader(t *testing.T, text string) *trace.Reader {
	t.Helper()
	r, err := trace.NewReader(strings.NewReader(text), "test", trace.Options{Format: trace.Mooncake})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// rig is a node with the namespace m, and a client of it.
type rig struct {
	t    *testing.T
	node *testnode.Node
	*client.Store
	ns kv.Namespace
}

func newRig(t *testing.T, o testnode.Options) *rig {
	t.Helper()
	testkit.VerifyNone(t)
	r := &rig{t: t, node: testnode.Start(t, o)}
	r.node.Namespace(t, "m", geo)
	r.Store, r.ns = r.node.Open(t, "m")
	return r
}

// options replays one request at a time, in windows of one block.
func (r *rig) options() replay.Options {
	return replay.Options{Store: r.Store, Namespace: r.ns, Trace: reader(r.t, requests), Concurrency: 1, WindowBytes: 1}
}

func (r *rig) run(o replay.Options) replay.Result {
	r.t.Helper()
	got, err := replay.Run(r.t.Context(), o)
	if err != nil {
		r.t.Fatal(err)
	}
	return got
}

// TestCounts: without evictions each block is stored once, and each prompt gets what a cache of any
// size has. A second replay finds all whole blocks.
func TestCounts(t *testing.T) {
	r := newRig(t, testnode.Options{})
	o := r.options()
	var mu sync.Mutex
	var progress []int64
	o.Progress = func(p replay.Result) {
		mu.Lock()
		defer mu.Unlock()
		progress = append(progress, p.Requests)
	}
	got := r.run(o)
	for what, is := range map[string]struct{ got, want int64 }{
		"requests": {got.Requests, 4}, "input tokens": {got.InputTokens, 1536 + 1536 + 1900 + 100}, "asked": {got.AskedTokens, 9 * 512},
		"ideal": {got.IdealTokens, 5 * 512}, "matched": {got.MatchedTokens, 5 * 512}, "hits": {got.HitTokens, 5 * 512},
		"read": {got.ReadBytes, 5 * blockBytes}, "written": {got.WrittenBytes, 4 * blockBytes}, "stored": {got.StoredBlocks, 4},
		"existed": {got.ExistedBlocks, 0}, "lost": {got.LostBlocks, 0}, "mismatched": {got.MismatchedBlocks, 0},
		"missed calls": {got.MissedCalls, 0}, "matches": {int64(got.Match.Count), 3}, "loads": {int64(got.Load.Count), 2},
	} {
		if is.got != is.want {
			t.Errorf("%s: %d; want %d", what, is.got, is.want)
		}
	}
	if len(progress) != 4 || progress[3] != 4 {
		t.Errorf("the progress is %v", progress)
	}
	if again := r.run(r.options()); again.HitTokens != again.AskedTokens || again.StoredBlocks != 0 || again.MismatchedBlocks != 0 {
		t.Errorf("the second replay: %v", again)
	}
}

// TestConcurrent: several workers with wide windows have the same sums.
func TestConcurrent(t *testing.T) {
	r := newRig(t, testnode.Options{})
	o := r.options()
	o.Concurrency, o.WindowBytes = 0, 0
	r.run(o)
	o = r.options()
	o.Concurrency, o.WindowBytes = 3, 2*blockBytes
	if got := r.run(o); got.HitTokens != 9*512 || got.ReadBytes != 9*blockBytes || got.MismatchedBlocks != 0 {
		t.Errorf("%v", got)
	}
}

// TestWrongBytes: a block with other bytes than those of its id ends the prefix and is reported.
func TestWrongBytes(t *testing.T) {
	r := newRig(t, testnode.Options{})
	chain, err := r.ns.Chain()
	if err != nil {
		t.Fatal(err)
	}
	var ids []kv.BlockID
	for req, err := range reader(t, requests).All() {
		if err != nil {
			t.Fatal(err)
		}
		ids, _ = chain.Append(nil, req.AppendTokens(nil))
		break
	}
	mem, err := r.Register(make([]byte, 2*blockBytes))
	if err != nil {
		t.Fatal(err)
	}
	w, err := r.Write(t.Context(), client.WriteRequest{Namespace: r.ns, IDs: ids[:2], From: mem})
	if err := errors.Join(err, mem.Close(context.WithoutCancel(t.Context()))); err != nil || w.Stored != 2 {
		t.Fatalf("%+v, %v", w, err)
	}
	got := r.run(r.options())
	if got.MismatchedBlocks != 3 || !strings.Contains(got.Mismatch, "block "+ids[0].String()) || got.HitTokens != 0 || got.MatchedTokens != 7*512 {
		t.Errorf("%d wrong blocks (%s), %d tokens of %d are hits: %v", got.MismatchedBlocks, got.Mismatch, got.HitTokens, got.MatchedTokens, got)
	}
}

// TestNodeDown: requests that no node answers are counted, and the replay goes on.
func TestNodeDown(t *testing.T) {
	r := newRig(t, testnode.Options{})
	within, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := r.node.Stop(within); err != nil {
		t.Fatal(err)
	}
	got := r.run(r.options())
	if got.Requests != 4 || got.MissedCalls == 0 || got.HitTokens+got.StoredBlocks+got.ReadBytes != 0 {
		t.Errorf("%v, %d calls without an answer", got, got.MissedCalls)
	}
}

// TestFull: a store that is smaller than the trace evicts or refuses blocks, and none has wrong bytes.
func TestFull(t *testing.T) {
	r := newRig(t, testnode.Options{CapacityBytes: 2 << 20})
	var text strings.Builder
	for i := range 300 {
		text.WriteString(strings.NewReplacer("A", string(rune('0'+i%10)), "N", "1"+strings.Repeat("0", 2)+string(rune('0'+i/100))+string(rune('0'+i/10%10))+string(rune('0'+i%10))).
			Replace(`{"timestamp":0,"input_length":1024,"output_length":1,"hash_ids":[A,N]}` + "\n"))
	}
	o := r.options()
	o.Trace = reader(t, text.String())
	got := r.run(o)
	if got.Requests != 300 || got.MismatchedBlocks != 0 || got.StoredBlocks < 200 || got.HitTokens > got.IdealTokens {
		t.Errorf("%v", got)
	}
	o = r.options()
	o.Trace = reader(t, text.String())
	if again := r.run(o); again.HitTokens == again.AskedTokens || again.MismatchedBlocks != 0 {
		t.Errorf("all of 310 blocks of 8 KiB are in a store of 2 MiB: %v", again)
	}
}

// TestEnds: the error of a malformed trace, and the end of ctx, end the replay with the counts so far.
func TestEnds(t *testing.T) {
	r := newRig(t, testnode.Options{})
	o := r.options()
	o.Trace = reader(t, requests+"{\n")
	if got, err := replay.Run(t.Context(), o); !errors.Is(err, trace.ErrFormat) || got.MismatchedBlocks != 0 {
		t.Errorf("%v, %v", got, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	o = r.options()
	o.Progress = func(replay.Result) { cancel() }
	if got, err := replay.Run(ctx, o); !errors.Is(err, context.Canceled) || got.Requests == 0 {
		t.Errorf("%v, %v", got, err)
	}
}

// TestOptions: an option that cannot work is an error with its value.
func TestOptions(t *testing.T) {
	r := newRig(t, testnode.Options{})
	for want, change := range map[string]func(o *replay.Options){
		"Store and Trace are required": func(o *replay.Options) { o.Trace = nil },
		"one full layer group":         func(o *replay.Options) { o.Namespace.Geometry.Groups = nil },
		"blocks of 16 tokens":          func(o *replay.Options) { o.Namespace.Geometry = kv.SingleGroup(2, 16, 8) },
		"concurrency of -1":            func(o *replay.Options) { o.Concurrency = -1 },
		"window of -5 bytes":           func(o *replay.Options) { o.WindowBytes = -5 },
		"lease of -1s":                 func(o *replay.Options) { o.Lease = -time.Second },
	} {
		o := r.options()
		change(&o)
		if _, err := replay.Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
}
