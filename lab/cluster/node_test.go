package cluster

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/emulate"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/lab/testplanner"
	"github.com/penstock-kv/penstock/server/planner"
)

func newRand() *rand.Rand { return rand.New(rand.NewPCG(1, 2)) }

// runner is a Node in this process.
type runner struct {
	t      *testing.T
	in     *json.Encoder
	events chan Event
	end    func() error
}

// run starts a Node, and waits until it is ready.
func run(t *testing.T, cfg *NodeConfig) *runner {
	t.Helper()
	stdin, input := io.Pipe()
	output, stdout := io.Pipe()
	logs, stderr := io.Pipe()
	r := &runner{t: t, in: json.NewEncoder(input), events: make(chan Event, 1024)}
	ready, ended, read := make(chan Ready, 1), make(chan error, 1), make(chan struct{})
	log := &Log{}
	go log.Follow(logs, ready)
	go func() {
		err := Node(context.Background(), stdin, stdout, slog.New(slog.NewJSONHandler(stderr, nil)))
		_ = stdout.Close()
		_ = stderr.Close()
		_ = stdin.Close()
		ended <- err
	}()
	go func() {
		defer close(read)
		lines := bufio.NewScanner(output)
		for lines.Scan() {
			var e Event
			if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
				t.Errorf("%s reports %q: %v", cfg.Name, lines.Text(), err)
			}
			r.events <- e
		}
	}()
	r.end = func() error {
		_ = input.Close()
		for {
			select {
			case <-r.events: // the node must not block
			case err := <-ended:
				<-read
				return err
			}
		}
	}
	if err := r.in.Encode(cfg); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ready:
	case err := <-ended:
		ended <- err
		t.Fatalf("%s: %v\n%s", cfg.Name, err, log)
	case <-time.After(time.Minute):
		t.Fatalf("%s is not ready:\n%s", cfg.Name, log)
	}
	return r
}

// order sends an order.
func (r *runner) order(o Order) {
	r.t.Helper()
	if err := r.in.Encode(o); err != nil {
		r.t.Fatal(err)
	}
}

// await returns the first event for which is returns true, and calls each for all before it.
func (r *runner) await(is func(Event) bool, each func(Event)) Event {
	r.t.Helper()
	timeout := time.After(2 * time.Minute)
	for {
		select {
		case e := <-r.events:
			if is(e) {
				return e
			}
			if each != nil {
				each(e)
			}
		case <-timeout:
			r.t.Fatal("the event has not come")
		}
	}
}

// TestNodes: a gateway and two engines, each a Node, replay two agents against a storage node and a
// planner. The second turn finds the blocks that the first has stored, with the same bytes, on both sides. Then the nodes
// execute each other order: new weights, flipped bits, bursts and other rates.
func TestNodes(t *testing.T) {
	testkit.VerifyNone(t)
	storage := testnode.Start(t, testnode.Options{})
	plan := testplanner.Start(t, testplanner.Options{TCP: true, Planner: planner.Options{
		TickEvery: time.Millisecond, Planner: dualpath.Options{BlockTokens: 16, MinPart: 16, Patience: time.Hour, GroupTimeout: time.Hour},
	}})
	config := func(kind Kind, name string) *NodeConfig {
		return &NodeConfig{
			Kind: kind, Name: name, Planner: plan.Addr, Storage: storage.Addr, Namespace: "cluster", Layers: 4, TokenBytes: 64, Tokens: 16,
			Compute: "127.0.0.1:0", Token: strings.Repeat("ab", 16), Model: emulate.Model{Layers: 4}, BufferBytes: 1 << 20, DeviceBlocks: 512, Window: 4,
			ReadRate: 1e6, Shaped: true, SNICBits: 800e6, Deadline: time.Minute,
		}
	}
	gateway := run(t, config(KindGateway, "gateway"))
	prefill, decode := run(t, config(KindPrefill, "P0")), run(t, config(KindDecode, "D0"))
	defer func() {
		for _, r := range []*runner{gateway, prefill, decode} {
			if err := r.end(); err != nil {
				t.Errorf("a node ended with %v", err)
			}
		}
	}()

	turns := 0
	started := 0
	agents := []emulate.Session{{Name: "a", Turns: []emulate.Turn{{Append: 320, Output: 32}, {Append: 64, Output: 16}}}, {Name: "b", Turns: []emulate.Turn{{Append: 160, Output: 16}}}}
	gateway.order(Order{Replay: agents, Parallel: 2})
	gateway.await(func(e Event) bool { return e.Replayed != nil }, func(e Event) {
		if e.Started {
			started++
		}
		if e.Turn == nil {
			return
		}
		turns++
		if e.Turn.Failed || e.Turn.Err != "" {
			t.Errorf("a turn failed: %s", e.Turn.Err)
		}
		if e.Turn.Session == "a" && e.Turn.Turn == 1 && (e.Turn.Hit != 352 || e.Turn.PrefillSide+e.Turn.DecodeSide != 352) {
			t.Errorf("the second turn: %+v; want a hit of 352 tokens", e.Turn)
		}
	})
	if turns != 3 || started < 3 {
		t.Errorf("%d turns ended, %d started; want 3", turns, started)
	}
	for _, r := range []*runner{prefill, decode} {
		e := r.await(func(e Event) bool { return e.Counts != nil && e.Counts.Requests+e.Counts.Failed == 3 }, nil)
		// The planner ends the prefill side of a request whose decode side reports its end first.
		failed := r == decode && e.Counts.Failed != 0
		if e.Counts.WrongBlocks != 0 || e.Counts.CaughtBlocks != 0 || failed || e.Counts.CheckedBytes == 0 {
			t.Errorf("%+v", e.Counts)
		}
		if e.NICs == nil || e.NICs.CNIC.ReceivedBytes == 0 || e.NICs.SNIC.SentBytes == 0 {
			t.Errorf("NICs: %+v", e.NICs)
		}
	}

	gateway.order(Order{Bump: true})
	if b := gateway.await(func(e Event) bool { return e.Bumped != nil }, nil).Bumped; b.Err != "" || b.Epoch == 0 {
		t.Errorf("new weights: %+v", b)
	}
	prefill.order(Order{Flip: time.Millisecond, Flips: 3})
	prefill.await(func(e Event) bool { return e.Flipped == 3 }, nil)

	decode.order(Order{BurstSink: "127.0.0.1:0"})
	target := decode.await(func(e Event) bool { return e.Sink != nil }, nil).Sink
	prefill.order(Order{Bursts: &Bursts{Bytes: 1 << 20, N: 3, Target: target}})
	if b := prefill.await(func(e Event) bool { return e.Bursts != nil }, nil).Bursts; b.Err != "" || len(b.Took) != 3 {
		t.Errorf("bursts: %+v", b)
	}
	prefill.order(Order{Bursts: &Bursts{Bytes: 1, N: 1, Target: &BurstTarget{Addr: []byte("bad")}}})
	if b := prefill.await(func(e Event) bool { return e.Bursts != nil }, nil).Bursts; b.Err == "" {
		t.Error("bursts to a bad address have no error")
	}
	decode.order(Order{SNICBits: 16e6, CNICBits: 16e6})
}

// TestNodeRefuses: the error names the mistake in a node's input.
func TestNodeRefuses(t *testing.T) {
	good := `{"kind":"prefill","name":"P0","planner":"127.0.0.1:1","storage":"127.0.0.1:1"`
	for input, want := range map[string]string{
		"":                                  "standard input ended before the configuration",
		"{":                                 "configuration of the node",
		good + `,"kind":"router"}`:          `node of kind "router"`,
		good + `,"token":"xy"}`:             "token",
		good + `,"storage":"no port"}`:      "storage",
		good + "}\n" + `{"parallel":"two"}`: "",
	} {
		err := Node(t.Context(), strings.NewReader(input), io.Discard, slog.New(slog.DiscardHandler))
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "%!") {
			t.Errorf("%q: %v", input, err)
		}
	}
}
