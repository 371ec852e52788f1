package client_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/storage"
)

// TestCallsGoByMessage: each call of the data path is one message. A call that does not fit a
// message goes over gRPC with the same outcome.
func TestCallsGoByMessage(t *testing.T) {
	h := newHost(t, nil)
	r := newRig(t, func(o *client.Options) { o.ReadParallel = 1 }, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 8, 1)
	messages := func(what string, want uint64, f func()) {
		t.Helper()
		before := r.store.Stats().Messages
		f()
		if got := r.store.Stats().Messages - before; got != want {
			t.Errorf("%s: %d messages; want %d", what, got, want)
		}
	}
	messages("a write", 2, func() { r.mustPut(ns, ids) })
	messages("a match", 1, func() {
		if m := r.match(ns, ids); m.Blocks != 8 {
			t.Errorf("match: %+v", m)
		}
	})
	messages("a read", 1, func() {
		if got := r.get(ns, ids); got.Blocks != 8 {
			t.Errorf("read: %+v", got)
		}
	})
	messages("a read of what is not there", 1, func() {
		if got := r.get(ns, chain(ns, 3, 9)); got.Outcome != client.Miss {
			t.Errorf("read: %+v", got)
		}
	})
	// Checksums of layers of 16 bytes are longer than a reply.
	thin := r.namespace("thin", kv.SingleGroup(kv.MaxLayers, 4, 4), kv.IndexTrie)
	many := chain(thin, int(64<<10/(8*kv.MaxLayers))+1, 1)
	r.mustPut(thin, many)
	messages("a read with a long reply", 0, func() {
		if got := r.get(thin, many); got.Blocks != len(many) {
			t.Errorf("read: %+v", got)
		}
	})
	flat := r.namespace("flat", geometry, kv.IndexFlat)
	messages("a match of more keys than a node takes", 0, func() {
		_, err := r.store.Match(t.Context(), client.MatchRequest{Namespace: flat, IDs: keys(5000, 1)})
		if !errors.Is(err, client.ErrRequest) {
			t.Errorf("match of 5,000 keys: %v; the node takes 1,024", err)
		}
	})
}

// TestReceiveBuffersTaken: an engine whose receive buffers another user has posted makes its calls
// over gRPC.
func TestReceiveBuffersTaken(t *testing.T) {
	h := newHost(t, nil)
	r := newRig(t, func(o *client.Options) {
		h.must(o.Engine.Recv(1, 1024, func(rdma.EngineID, []byte) {}))
	}, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 8, 1)
	r.mustPut(ns, ids)
	if got := r.get(ns, ids); got.Blocks != 8 || r.store.Stats().Messages != 0 {
		t.Errorf("read %+v, %v", got, r.store.Stats())
	}
}

// TestOtherMessages: a message that is not a reply is passed to Options.Messages. Without that
// option it ends the session, which is opened again.
func TestOtherMessages(t *testing.T) {
	for _, handled := range []bool{true, false} {
		t.Run(fmt.Sprint("handled ", handled), func(t *testing.T) {
			var data rdma.Engine
			h := newHost(t, func(_ *storage.Options, o *server.Options) { data = o.Data })
			got := make(chan string, 1)
			r := newRig(t, func(o *client.Options) {
				if handled {
					o.Messages = func(_ rdma.EngineID, msg []byte) { got <- string(msg) }
				}
			}, h)
			ns := r.namespace("m", geometry, kv.IndexTrie)
			r.mustPut(ns, chain(ns, 2, 1))
			connects := r.store.Stats().Connects
			h.must(data.Send(t.Context(), r.engine.Addr().Engine, []byte("\x40hello"), nil))
			if handled {
				if msg := <-got; msg != "\x40hello" {
					t.Errorf("message %q", msg)
				}
			} else {
				eventually(t, "the session ended", func() bool { return len(r.engine.Peers()) == 0 })
			}
			if res := r.get(ns, chain(ns, 2, 1)); res.Blocks != 2 {
				t.Errorf("read: %+v", res)
			}
			if again := r.store.Stats().Connects - connects; again != 0 == handled {
				t.Errorf("%d sessions were opened again", again)
			}
		})
	}
}

// TestCallsGivenUp: a cancelled call keeps its receive buffer until the node replies. Calls without
// a free buffer go over gRPC, and later calls go by message again.
func TestCallsGivenUp(t *testing.T) {
	h := newHost(t, func(o *storage.Options, _ *server.Options) { o.ReadsMax = 256 })
	r := newRig(t, nil, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 1, 1)
	r.mustPut(ns, ids)
	h.gate.shut()
	ctx, cancel := context.WithCancel(t.Context())
	const reads = 80 // more than the number of buffers
	mem := r.memory(reads * 8192)
	ended := make(chan error, reads)
	for i := range reads {
		go func() {
			_, err := r.store.Read(ctx, client.ReadRequest{Namespace: ns, IDs: ids, Into: mem, Base: int64(i) * 8192})
			ended <- err
		}()
	}
	for range reads {
		<-h.gate.arrived
	}
	cancel()
	for range reads {
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("a read given up: %v", err)
		}
	}
	before := r.store.Stats().Messages
	if m := r.match(ns, ids); m.Blocks != 1 || r.store.Stats().Messages != before {
		t.Errorf("with every buffer waited for: match %+v, %d messages", m, r.store.Stats().Messages-before)
	}
	h.gate.lift()
	eventually(t, "calls go by message again", func() bool {
		r.match(ns, ids)
		return r.store.Stats().Messages > before
	})
	for i, b := range mem.Bytes() {
		if b != 0 {
			t.Fatalf("byte %d was written after its read had returned", i)
		}
	}
	if got := r.get(ns, ids); got.Blocks != 1 {
		t.Errorf("read: %+v", got)
	}
}

// TestClientSpans: a call by message is a span of the caller's trace, and the
// node's is its child.
func TestClientSpans(t *testing.T) {
	recorder := tracetest.NewSpanRecorder()
	before := otel.GetTracerProvider()
	otel.SetTracerProvider(trace.NewTracerProvider(trace.WithSpanProcessor(recorder)))
	defer otel.SetTracerProvider(before)
	h, path := newLocalHost(t, 1<<20, nil)
	// Read goes by message, and ReadLocal over the socket.
	r := localRig{newRig(t, func(o *client.Options) { o.LocalSocket, o.NoLocal = path, true }, h), path}
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 2, 1)
	r.mustPut(ns, ids)
	ctx, root := otel.Tracer("test").Start(t.Context(), "an engine's step")
	mem := r.memory(2 * 8192)
	if _, err := r.store.Read(ctx, client.ReadRequest{Namespace: ns, IDs: ids, Into: mem}); err != nil {
		t.Fatal(err)
	}
	got, err := r.store.ReadLocal(ctx, client.ReadRequest{Namespace: ns, IDs: ids})
	if err != nil {
		t.Fatal(err)
	}
	r.giveBack(got)
	root.End()
	h.kill() // ends its spans
	spans := map[string]trace.ReadOnlySpan{}
	for _, s := range recorder.Ended() {
		if s.SpanContext().TraceID() == root.SpanContext().TraceID() && len(s.Attributes()) == 1 {
			spans[fmt.Sprintf("%s %v by %s", s.Name(), s.SpanKind(), s.Attributes()[0].Value.AsString())] = s
		}
	}
	for _, transport := range []string{"message", "socket"} {
		asked, answered := spans["penstock.v1.Cache/Read client by "+transport], spans["penstock.v1.Cache/Read server by "+transport]
		if asked == nil || answered == nil || asked.Parent().SpanID() != root.SpanContext().SpanID() || answered.Parent().SpanID() != asked.SpanContext().SpanID() {
			t.Errorf("by %s: %v, of the node %v", transport, asked, answered)
		}
	}
}

// victimEnv makes the test binary the process that a test kills. Its value is the address of a
// node, a namespace, and the path of the node's unix socket or nothing, with commas between them.
const victimEnv = "PENSTOCK_TEST_VICTIM"

// startVictim runs a test of this binary in a process with victimEnv.
func startVictim(t *testing.T, test string, h *host, ns kv.Namespace, socket string) (*exec.Cmd, io.Reader) {
	t.Helper()
	exe, err := os.Executable()
	h.must(err)
	cmd := exec.Command(exe, "-test.run=^"+test+"$", "-test.count=1")
	cmd.Env = append(os.Environ(), victimEnv+"="+strings.Join([]string{h.control, ns.Name, socket}, ","))
	out, err := cmd.StdoutPipe()
	h.must(err)
	h.must(cmd.Start())
	return cmd, out
}

// openVictim opens the store and the namespace of a process with victimEnv. In another process
// it returns no store.
func openVictim(t *testing.T) (*client.Store, kv.Namespace) {
	t.Helper()
	args := strings.Split(os.Getenv(victimEnv), ",")
	if len(args) != 3 {
		return nil, kv.Namespace{}
	}
	engine, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	store, err := client.Open(t.Context(), client.Options{Servers: args[:1], Engine: engine, LocalSocket: args[2]})
	if err != nil {
		t.Fatal(err)
	}
	ns, err := store.Namespace(t.Context(), args[1])
	if err != nil {
		t.Fatal(err)
	}
	return store, ns
}

// readUntilKilled reads blocks while the node delays the read.
func readUntilKilled(t *testing.T, store *client.Store, ns kv.Namespace) {
	mem, err := store.Register(make([]byte, 8*8192))
	if err != nil {
		t.Fatal(err)
	}
	_, err = store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: chain(ns, 8, 1), Into: mem})
	t.Fatalf("the read was not held up: %v", err)
}

// TestKilledClientIsFreed: when a client is killed during a read, the node frees its memory and its
// slots.
func TestKilledClientIsFreed(t *testing.T) {
	if store, ns := openVictim(t); store != nil {
		readUntilKilled(t, store, ns)
	}
	h := newHost(t, nil)
	r := newRig(t, nil, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	r.mustPut(ns, chain(ns, 8, 1))
	idle := h.node.Stats().Arena.UsedBytes
	h.gate.shut()
	cmd, _ := startVictim(t, "TestKilledClientIsFreed", h, ns, "")
	<-h.gate.arrived
	h.must(cmd.Process.Signal(syscall.SIGKILL))
	_ = cmd.Wait() // killed
	h.gate.lift()
	eventually(t, "the node has its memory back", func() bool { return h.node.Stats().Arena.UsedBytes == idle })
	h.admin(func(ctx context.Context, c pb.AdminClient) error {
		_, err := c.DeleteNamespace(ctx, &pb.DeleteNamespaceRequest{Name: ns.Name})
		return err
	})
	eventually(t, "every slot is free", func() bool { return h.node.Stats().Store.Slots.UsedBytes() == 0 })
}

// silentEngine drops messages, like a node that has stopped and whose session is not detected as
// dead yet.
type silentEngine struct{ rdma.Engine }

func (silentEngine) Send(_ context.Context, _ rdma.EngineID, _ []byte, done func(error)) error {
	if done != nil {
		done(nil)
	}
	return nil
}

// TestSilentNode: a call without a reply ends with its caller's deadline.
func TestSilentNode(t *testing.T) {
	h := newHost(t, nil)
	r := newRig(t, func(o *client.Options) { o.Engine = silentEngine{o.Engine} }, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := r.store.Read(ctx, client.ReadRequest{Namespace: ns, IDs: chain(ns, 1, 1), Into: r.memory(8192)})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("read from a silent node: %v", err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := r.store.Match(ctx, client.MatchRequest{Namespace: ns, IDs: chain(ns, 1, 1)}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("match of a silent node: %v", err)
	}
	// After the end of its session the result is a miss without a wait.
	h.kill()
	if m := r.match(ns, chain(ns, 1, 1)); m.Cut != client.CutNodeDown {
		t.Errorf("match of a dead node: %+v", m)
	}
}

// TestNodeSpeaksNoMessages: a node that accepts messages of another version, or none, is called
// over gRPC. The fakes of the other tests are such nodes.
func TestNodeSpeaksNoMessages(t *testing.T) {
	f := newFake(t)
	f.describe = func(d *pb.DescribeResponse) { d.CallVersion, d.CallBytes = api.CallVersion+1, 1<<16 }
	f.read = func(_ context.Context, f *fake, req *pb.ReadRequest) (*pb.ReadResponse, error) {
		return f.serve(req, 1)
	}
	r, ns, ids := fakeRig(t, f, nil)
	fill(f.mem[:8192], ids[0], 0, 1)
	got, err := r.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Into: r.memory(4 * 8192)})
	if err != nil || got.Blocks != 4 || r.store.Stats().Messages != 0 {
		t.Errorf("read: %+v, %v, %v", got, err, r.store.Stats())
	}
	// A reservation names the engine that writes, because gRPC does not identify the caller's engine.
	var named []byte
	f.reserve = func(_ context.Context, _ *fake, req *pb.ReserveRequest) (*pb.ReserveResponse, error) {
		named = req.GetDataEngine()
		return nil, status.Error(codes.Unavailable, "node takes no writes")
	}
	own := r.engine.Addr().Engine
	if _, err := r.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, From: r.memory(4 * 8192)}); err != nil || !bytes.Equal(named, own[:]) {
		t.Errorf("write: %v; the reservation is for engine %x, want %x", err, named, own)
	}
}

// nodeEnv makes the test binary a node until its standard input ends. It prints the address. If
// the value is local, the node has a unix socket.
const nodeEnv = "PENSTOCK_TEST_NODE"

// TestNode: a node in a separate process stores and loads blocks. In the processes of startNode it
// is the node.
func TestNode(t *testing.T) {
	if os.Getenv(nodeEnv) == "" {
		_, h := startNode(t, "remote")
		r := newRig(t, nil, h)
		ns := r.namespace("m", geometry, kv.IndexTrie)
		ids := chain(ns, 8, 1)
		r.mustPut(ns, ids)
		if got := r.get(ns, ids); got.Blocks != len(ids) {
			t.Errorf("read: %+v", got)
		}
		return
	}
	localHosts = os.Getenv(nodeEnv) == "local"
	h := newHost(t, func(o *storage.Options, _ *server.Options) { o.HotBytes = 0 })
	fmt.Println(h.control)
	_, _ = io.Copy(io.Discard, os.Stdin) // until the other process closes it
}

// startNode starts a node in a process of its own, with a value of nodeEnv.
func startNode(t *testing.T, env string) (*exec.Cmd, *host) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "-test.run=^TestNode$", "-test.count=1")
	cmd.Env = append(os.Environ(), nodeEnv+"="+env)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGCONT) // it may be stopped, or have ended
		err := errors.Join(stdin.Close(), cmd.Wait())
		if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signal() == syscall.SIGKILL {
			return // the test has killed it
		}
		if err != nil {
			t.Errorf("the node: %v", err)
		}
	})
	lines := bufio.NewScanner(stdout)
	if !lines.Scan() {
		t.Fatal("the node does not print where it listens")
	}
	go func() { _, _ = io.Copy(io.Discard, stdout) }()
	return cmd, &host{t: t, control: lines.Text()}
}

// stop stops a process, and returns when the kernel reports that it has stopped.
func stop(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var status syscall.WaitStatus
	if _, err := syscall.Wait4(cmd.Process.Pid, &status, syscall.WUNTRACED, nil); err != nil || !status.Stopped() {
		t.Fatalf("the process has not stopped: %v, %#x", err, status)
	}
}

// TestStoppedNode: a stopped node ends no session, so its readers return at their deadlines, and
// their memory does not change afterwards. When the node continues, reads succeed again.
func TestStoppedNode(t *testing.T) {
	cmd, h := startNode(t, "remote")
	r := newRig(t, nil, h)
	ns := r.namespace("m", geometry, kv.IndexTrie)
	ids := chain(ns, 8, 1)
	r.mustPut(ns, ids)
	stop(t, cmd)
	mem := r.memory(8 * 8192)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := r.store.Read(ctx, client.ReadRequest{Namespace: ns, IDs: ids, Into: mem}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("read from a stopped node: %v", err)
	}
	if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if got := r.get(ns, ids); got.Blocks != 8 {
		t.Errorf("read after it continues: %+v", got)
	}
	// The node has performed the first read too, into a window that was closed.
	for i, b := range mem.Bytes() {
		if b != 0 {
			t.Fatalf("byte %d was written after its read had returned", i)
		}
	}
}
