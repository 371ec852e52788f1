//go:build verbs && cgo && linux

package verbs

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/rdmatest"
)

// envChild makes a test binary a peer in its own process: "sink DEVICE" or "source DEVICE".
const envChild = "PENSTOCK_VERBS_CHILD"

const (
	testToken  = "a token for processes of a test"
	childBytes = 1 << 20
	sinkBytes  = 32 << 20
	childImm   = 7
)

func TestMain(m *testing.M) {
	if role, device, ok := strings.Cut(os.Getenv(envChild), " "); ok {
		if err := child(role, device); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	testkit.Main(m)
}

// testTimeout bounds each test that waits.
const testTimeout = 3 * time.Minute

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	t.Cleanup(cancel)
	return ctx
}

// child is a peer. A sink prints a Desc and receives writes until its input ends. A source
// reads a Desc and writes there until it is killed.
func child(role, device string) error {
	ctx := context.Background()
	listen := ""
	if role == "sink" {
		listen = "127.0.0.1:0"
	}
	control, err := group.TCP(ctx, listen, "", nil)
	if err != nil {
		return err
	}
	e, err := New(ctx, Options{Devices: []string{device}, Group: group.Options{Control: control, Token: rdma.Token(testToken)}})
	if err != nil {
		return err
	}
	size := childBytes
	if role == "sink" {
		size = sinkBytes
	}
	r, err := e.Register(make([]byte, size), rdma.RegisterOptions{})
	if err != nil {
		return err
	}
	if role == "source" {
		return pump(ctx, e, r, os.Stdin)
	}
	raw, err := r.Desc().MarshalBinary()
	if err != nil {
		return err
	}
	fmt.Println(base64.StdEncoding.EncodeToString(raw))
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return err
	}
	return e.Close()
}

// pump writes to the Desc that it reads from in.
func pump(ctx context.Context, e rdma.Engine, src rdma.Region, in io.Reader) error {
	line, err := bufio.NewReader(in).ReadString('\n')
	if err != nil {
		return err
	}
	d, err := decodeDesc(line)
	if err != nil {
		return err
	}
	if _, err := e.Connect(ctx, d.Addr(), rdma.Token(testToken)); err != nil {
		return err
	}
	fmt.Println(e.Addr().Engine)
	for {
		err := e.Write(ctx, rdma.Write{Src: src, Dst: d, Len: childBytes, Imm: rdma.ImmOf(childImm)})
		if err != nil {
			return err
		}
	}
}

func decodeDesc(line string) (d rdma.Desc, err error) {
	raw, err := base64.StdEncoding.DecodeString(strings.TrimSpace(line))
	if err != nil {
		return d, err
	}
	return d, d.UnmarshalBinary(raw)
}

// process is a child with its pipes.
type process struct {
	*exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// startChild starts a peer, which ends with the test.
func startChild(t testing.TB, role, device string) *process {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{Cmd: exec.Command(exe)}
	p.Env = append(os.Environ(), envChild+"="+role+" "+device)
	p.Stderr = os.Stderr
	if p.in, err = p.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewReader(out)
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.in.Close()
		_ = p.Process.Kill()
		_ = p.Wait()
	})
	return p
}

// line returns the child's next line.
func (p *process) line(t testing.TB) string {
	t.Helper()
	s, err := p.out.ReadString('\n')
	if err != nil {
		t.Fatalf("the child sent %q, then: %v", s, err)
	}
	return s
}

// closing closes the engine when the test ends.
func closing(t testing.TB, k *killable) *killable {
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return k
}

// TestKilledReceiver: kill -9 of the target process ends each operation in flight to it once,
// with ErrPeerDied, and also its expectations.
func TestKilledReceiver(t *testing.T) {
	names := ports(t, 2)
	testkit.VerifyNone(t)
	testkit.Repeat(t, "no write was in flight when the process was killed", func() bool { return killReceiver(t, names) > 0 })
}

// killReceiver returns how many writes were in flight to the process that it killed.
func killReceiver(t *testing.T, names []string) int {
	t.Helper()
	ctx := testContext(t)
	sink := startChild(t, "sink", names[1])
	d, err := decodeDesc(sink.line(t))
	if err != nil {
		t.Fatal(err)
	}
	e := closing(t, startEngine(t, names[:1], false, group.Options{InFlightOps: 16}))
	if _, err := e.Connect(ctx, d.Addr(), rdma.Token(testToken)); err != nil {
		t.Fatal(err)
	}
	src, err := e.Register(make([]byte, childBytes), rdma.RegisterOptions{Local: true})
	if err != nil {
		t.Fatal(err)
	}
	expected := rdma.NewFlag()
	if _, err := e.ExpectImm(rdma.Expect{Imm: 1, Count: 1, From: []rdma.EngineID{d.Engine}, Done: expected.Set}); err != nil {
		t.Fatal(err)
	}
	died := rdmatest.KillTarget(ctx, t, e, src, d, sink.Process.Kill)
	if err := expected.Wait(ctx); !errors.Is(err, rdma.ErrPeerDied) {
		t.Errorf("expectation: %v", err)
	}
	if st := e.Stats(); st.InFlightOps != 0 || st.InFlightBytes != 0 || st.SessionsClosed != 1 {
		t.Errorf("counters: %+v", st)
	}
	return died
}

// TestKilledSender: kill -9 of a writing process ends its expectations. After OnPeerDown no
// byte changes and nothing is counted.
func TestKilledSender(t *testing.T) {
	names := ports(t, 2)
	testkit.VerifyNone(t)
	ctx := testContext(t)
	down := make(chan error, 1)
	e := closing(t, startEngine(t, names[:1], true, group.Options{
		Token: rdma.Token(testToken), OnPeerDown: func(_ rdma.EngineID, err error) { down <- err },
	}))
	mem := make([]byte, childBytes)
	r, err := e.Register(mem, rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	raw, err := r.Desc().MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	source := startChild(t, "source", names[1])
	if _, err := fmt.Fprintln(source.in, base64.StdEncoding.EncodeToString(raw)); err != nil {
		t.Fatal(err)
	}
	source.line(t)
	id := e.Peers()[0].ID
	landing, endless := rdma.NewFlag(), rdma.NewFlag()
	for _, x := range []rdma.Expect{
		{Imm: childImm, Count: 10, From: []rdma.EngineID{id}, Done: landing.Set},
		{Imm: childImm + 1, Count: 1, From: []rdma.EngineID{id}, Done: endless.Set},
	} {
		if _, err := e.ExpectImm(x); err != nil {
			t.Fatal(err)
		}
	}
	if err := landing.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	if err := source.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-down:
		if !errors.Is(err, rdma.ErrPeerDied) {
			t.Errorf("peer down: %v", err)
		}
	case <-ctx.Done():
		t.Fatal("OnPeerDown was not called for the peer")
	}
	poison := bytes.Repeat([]byte{0xA5}, len(mem))
	copy(mem, poison)
	counted := e.Stats().ImmediatesIn
	if err := endless.Wait(ctx); !errors.Is(err, rdma.ErrPeerDied) {
		t.Errorf("expectation: %v", err)
	}
	// A new session, and as many bytes over the same port as were in flight, take longer than
	// the remaining packets in transit.
	other, err := e.Register(make([]byte, childBytes), rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	next := closing(t, startEngine(t, names[1:2], false, group.Options{}))
	if _, err := next.Connect(ctx, e.Addr(), rdma.Token(testToken)); err != nil {
		t.Fatal(err)
	}
	src, err := next.Register(make([]byte, childBytes), rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	done := rdma.NewFlag()
	if err := next.Write(ctx, rdma.Write{Src: src, Dst: other.Desc(), Len: childBytes, Done: done.Set}); err != nil {
		t.Fatal(err)
	}
	if err := done.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(mem, poison) {
		t.Error("bytes changed after the peer was gone")
	}
	if n := e.Stats().ImmediatesIn; n != counted {
		t.Errorf("%d immediates were counted after the peer was gone", n-counted)
	}
}
