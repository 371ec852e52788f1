package roundtrip

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const memoryBytes = 1 << 20

// engine returns a tcp engine on loopback that is closed at the end of the test.
func engine(t *testing.T, listen bool) rdma.Engine {
	t.Helper()
	o := tcp.Options{}
	if listen {
		o.Listen, o.Token = "127.0.0.1:0", token
	}
	e, err := tcp.New(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

var token = rdma.Token(strings.Repeat("k", rdma.MinToken))

// connect opens a session of e with the answerer's engine.
func connect(t *testing.T, e, far rdma.Engine) rdma.EngineID {
	t.Helper()
	id, err := e.Connect(t.Context(), far.Addr(), token)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// answering returns an engine with an Answerer, and its memory.
func answering(t *testing.T) (rdma.Engine, []byte) {
	t.Helper()
	e, memory := engine(t, true), make([]byte, memoryBytes)
	a, err := NewAnswerer(e, memory)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return e, memory
}

// TestMeasure: every shape is measured as often as requested, the bytes arrive in both directions,
// and a second requester succeeds after the first.
func TestMeasure(t *testing.T) {
	far, there := answering(t)
	for i := range there[memoryBytes/2:] {
		there[memoryBytes/2+i] = byte(i*7 + 1)
	}
	shapes := []Shape{{0, 0}, {1, 1}, {1152, 1032}, {300_000, 200_000}, {0, 4096}, {memoryBytes / 2, memoryBytes / 2}}
	for requester := range 2 {
		near := engine(t, false)
		memory := make([]byte, memoryBytes)
		for i := range memory[:memoryBytes/2] {
			memory[i] = byte(i*13 + requester)
		}
		turns := 0
		samples, err := Measure(t.Context(), near, connect(t, near, far), memory, Options{
			Shapes: shapes, Warmup: 2, Repeats: 5, Progress: func(done, total int) {
				if turns++; done != turns || total != 7 {
					t.Errorf("turn %d of %d after %d turns", done, total, turns-1)
				}
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		count := make([]int, len(shapes))
		for _, s := range samples {
			if count[s.Shape]++; s.Took <= 0 {
				t.Errorf("shape %d took %v", s.Shape, s.Took)
			}
		}
		for i, n := range count {
			if n != 5 {
				t.Errorf("shape %d was measured %d times", i, n)
			}
		}
		if !bytes.Equal(there[:memoryBytes/2], memory[:memoryBytes/2]) || !bytes.Equal(memory[memoryBytes/2:], there[memoryBytes/2:]) {
			t.Error("the received bytes differ from the sent bytes")
		}
		if s := near.Stats(); s.WritesOut != uint64(7*len(shapes)) {
			t.Errorf("%d writes for %d trips", s.WritesOut, 7*len(shapes))
		}
	}
}

// TestAtOnce: the maximum number of requesters measure concurrently without disturbing each other;
// one more requester gets an error.
func TestAtOnce(t *testing.T) {
	far, _ := answering(t)
	// The shapes send nothing to the answerer: the race detector would report that requesters share
	// its scratch memory.
	shapes := []Shape{{0, 8}, {0, 2048}}
	var inside, done sync.WaitGroup
	inside.Add(MaxRequesters)
	leave := make(chan struct{})
	for range MaxRequesters {
		near := engine(t, false)
		to := connect(t, near, far)
		done.Go(func() {
			arrived := sync.OnceFunc(inside.Done)
			defer arrived() // also if Measure fails before
			samples, err := Measure(t.Context(), near, to, make([]byte, memoryBytes), Options{
				Shapes: shapes, Repeats: 4, Progress: func(turn, _ int) {
					if turn == 2 {
						arrived()
						<-leave
					}
				},
			})
			if err != nil || len(samples) != 4*len(shapes) {
				t.Errorf("%d samples, %v", len(samples), err)
			}
		})
	}
	inside.Wait()
	late := engine(t, false)
	if _, err := Measure(t.Context(), late, connect(t, late, far), make([]byte, memoryBytes), Options{Shapes: shapes, Repeats: 1}); err == nil || !strings.Contains(err.Error(), "try again") {
		t.Errorf("one more: %v", err)
	}
	close(leave)
	done.Wait()
}

// TestRequesterDies: the engine of a requester is closed in the middle of a measurement; the next
// requester is served.
func TestRequesterDies(t *testing.T) {
	far, _ := answering(t)
	first, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = Measure(t.Context(), first, connect(t, first, far), make([]byte, memoryBytes), Options{
		Shapes: []Shape{{8, 8}, {16, 16}}, Repeats: 3, Progress: func(done, _ int) {
			if done == 1 {
				if err := first.Close(); err != nil {
					t.Error(err)
				}
			}
		},
	})
	if err == nil {
		t.Fatal("a measurement on a closed engine succeeded")
	}
	second := engine(t, false)
	if _, err := Measure(t.Context(), second, connect(t, second, far), make([]byte, memoryBytes), Options{Shapes: []Shape{{8, 8}}, Repeats: 1}); err != nil {
		t.Error(err)
	}
}

// TestAnswererDies: the measurement ends with an error.
func TestAnswererDies(t *testing.T) {
	far, _ := answering(t)
	near := engine(t, false)
	_, err := Measure(t.Context(), near, connect(t, near, far), make([]byte, memoryBytes), Options{
		Shapes: []Shape{{8, 8}}, Repeats: 3, Progress: func(done, _ int) {
			if done == 1 {
				if err := far.Close(); err != nil {
					t.Error(err)
				}
			}
		},
	})
	if err == nil {
		t.Error("a measurement without an answerer succeeded")
	}
}

// TestNoAnswer: with an engine that accepts no messages, the measurement ends with an error at
// the deadline.
func TestNoAnswer(t *testing.T) {
	far, near := engine(t, true), engine(t, false)
	o := Options{Shapes: []Shape{{8, 8}}, Repeats: 1}
	if _, err := Measure(t.Context(), near, connect(t, near, far), make([]byte, memoryBytes), o); err == nil || !strings.Contains(err.Error(), "takes no messages") {
		t.Errorf("without receive buffers there: %v", err)
	}
	mute, other := engine(t, true), engine(t, false)
	if err := mute.Recv(1, messageBytes, func(rdma.EngineID, []byte) {}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Measure(ctx, other, connect(t, other, mute), make([]byte, memoryBytes), o); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("an end that does not answer: %v", err)
	}
}

func TestRefuses(t *testing.T) {
	far, _ := answering(t)
	near := engine(t, false)
	to := connect(t, near, far)
	for name, o := range map[string]Options{
		"no shape": {Repeats: 1}, "no repeat": {Shapes: []Shape{{1, 1}}}, "negative": {Shapes: []Shape{{-1, 1}}, Repeats: 1},
		"too long": {Shapes: []Shape{{memoryBytes, 1}}, Repeats: 1}, "too many": {Shapes: make([]Shape, MaxShapes+1), Repeats: 1},
	} {
		if _, err := Measure(t.Context(), near, to, make([]byte, memoryBytes), o); err == nil {
			t.Errorf("%s: measured", name)
		}
	}
	// The other end itself reports payloads that it cannot take.
	if _, err := Measure(t.Context(), near, to, make([]byte, 4*memoryBytes), Options{Shapes: []Shape{{memoryBytes, 1}}, Repeats: 1}); err == nil || !strings.Contains(err.Error(), "half of the memory") {
		t.Errorf("more than the memory of the other end: %v", err)
	}
}

// TestSlots: the slot of a requester that starts again, ends its measurement or fails is freed.
func TestSlots(t *testing.T) {
	far := engine(t, true)
	a, err := NewAnswerer(far, make([]byte, memoryBytes))
	if err != nil {
		t.Fatal(err)
	}
	taken := func() (n int) {
		a.mu.Lock()
		defer a.mu.Unlock()
		for _, s := range a.slots {
			if s != nil {
				n++
			}
		}
		return n
	}
	for range 3 * MaxRequesters {
		near, err := tcp.New(t.Context(), tcp.Options{})
		if err != nil {
			t.Fatal(err)
		}
		connect(t, near, far)
		desc, err := describe(rdma.Desc{Engine: near.Addr().Engine, NICs: []rdma.NICKey{{Addr: "x:1"}}})
		if err != nil {
			t.Fatal(err)
		}
		peer := far.Peers()[len(far.Peers())-1].ID
		for range 2 {
			a.of(peer).end() // as the handler does when a requester starts again
			if _, err := a.begin(peer, hello{Version: version, Desc: desc, Shapes: []Shape{{8, 8}, {16, 16}}}); err != nil {
				t.Fatal(err)
			}
		}
		if n := taken(); n != 1 {
			t.Fatalf("%d slots are taken", n)
		}
		if err := near.Close(); err != nil {
			t.Fatal(err)
		}
		// The requester's death ends the session, one expectation after the other.
		for taken() != 0 {
			if t.Context().Err() != nil {
				t.Fatalf("%d slots are taken after the end", taken())
			}
			runtime.Gosched()
		}
	}
	if err := a.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	if _, err := a.begin(rdma.EngineID{1}, hello{}); err == nil {
		t.Error("a closed answerer begins")
	}
}

// FuzzHello: every message is either answered or rejected.
func FuzzHello(f *testing.F) {
	f.Add([]byte(`{"version":1,"shapes":[{"there":1,"back":1}]}`))
	f.Add([]byte(`{"version":1}`))
	f.Add([]byte(`[]`))
	f.Fuzz(func(t *testing.T, msg []byte) {
		a := &Answerer{engine: noSessions{}, half: 1 << 10}
		a.receive(rdma.EngineID{1}, msg)
		if a.slots != ([MaxRequesters]*session{}) {
			t.Errorf("without an engine there are sessions: %v", a.slots)
		}
	})
}

// noSessions is an engine without sessions.
type noSessions struct{ rdma.Engine }

func (noSessions) Send(context.Context, rdma.EngineID, []byte, func(error)) error { return nil }
func (noSessions) ExpectImm(rdma.Expect) (*rdma.Expectation, error)               { return nil, rdma.ErrClosed }
