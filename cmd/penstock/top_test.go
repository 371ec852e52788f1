package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/internal/top/screen"
)

// topSample is a line of top --format json.
type topSample struct {
	Total struct {
		Nodes, Answering int
	}
	Nodes []struct {
		Address, Name, Failure string
		Restarted              bool
		Up                     *float64 `json:"up_seconds"`
		topRates
	}
	Namespaces []struct {
		Name string
		topRates
	}
}

type topRates struct {
	Written *float64 `json:"written_blocks_per_second"`
	Queried *float64 `json:"queried_tokens_per_second"`
	HitRate *float64 `json:"hit_rate"`
}

// topLines is a running top --format json.
type topLines struct {
	t     testing.TB
	lines *bufio.Scanner
	stop  func() int
}

// startTop runs top --format json until the test ends or stop is called.
func startTop(t testing.TB, args ...string) *topLines {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	out, print := io.Pipe()
	code := make(chan int, 1)
	go func() {
		code <- run(ctx, world{in: strings.NewReader(""), out: print, err: io.Discard}, append(args, "--format", "json", "--interval", "100ms", "--answer-timeout", "1m"))
		print.Close()
	}()
	l := &topLines{t: t, lines: bufio.NewScanner(out)}
	l.lines.Buffer(nil, 1<<20)
	ended := false
	l.stop = func() int {
		if ended {
			return 0
		}
		ended = true
		cancel()
		out.Close()
		return <-code
	}
	t.Cleanup(func() { l.stop() })
	return l
}

// next returns the next sample.
func (l *topLines) next() topSample {
	l.t.Helper()
	if !l.lines.Scan() {
		l.t.Fatal("top ended")
	}
	var s topSample
	if err := json.Unmarshal(l.lines.Bytes(), &s); err != nil {
		l.t.Fatalf("%v in %s", err, l.lines.Text())
	}
	return s
}

// until returns the first sample for which is returns true.
func (l *topLines) until(is func(s topSample) bool) topSample {
	l.t.Helper()
	for {
		if s := l.next(); is(s) {
			return s
		}
	}
}

// TestTopRates: the rates of a node are those of its work: rate times time, added over the samples,
// is the number of written blocks. A node that is restarted has a row without an answer, then one
// without rates, and never a negative rate; the other nodes go on.
func TestTopRates(t *testing.T) {
	dir := t.TempDir()
	a := startServed(t, dir+"/a")
	b := startServed(t, dir+"/b")
	tokensFile, dataFile := prompt2(t, dir)
	a.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	top := startTop(t, "ns", "top", "--server", a.ready.Listen+","+b.ready.Listen)
	first := top.next()
	if first.Total.Answering != 2 || len(first.Nodes) != 2 || *first.Nodes[0].Written != 0 || len(first.Namespaces) != 1 || first.Nodes[0].HitRate != nil {
		t.Fatalf("first sample: %+v", first)
	}
	a.run("block", "put", "m", "--tokens-file", tokensFile, "--data-file", dataFile).must(t)
	a.run("prefix", "match", "m", "--tokens-file", tokensFile)
	var written, ofNamespace float64
	last := *first.Nodes[0].Up
	s := top.until(func(s topSample) bool {
		n := s.Nodes[0]
		written += *n.Written * (*n.Up - last)
		ofNamespace += *s.Namespaces[0].Written * (*n.Up - last)
		last = *n.Up
		return *n.Queried > 0
	})
	if s.Nodes[0].HitRate == nil || *s.Nodes[0].HitRate != 1 || s.Namespaces[0].HitRate == nil || *s.Namespaces[0].HitRate != 1 {
		t.Errorf("after a match of all tokens: %+v", s)
	}
	stored := decode[struct {
		Blocks int
	}](t, a.run("ns", "show", "m", "--format", "json")).Blocks
	if stored == 0 || int(written+0.5) != stored || int(ofNamespace+0.5) != stored {
		t.Errorf("rates add up to %v blocks, those of the namespace to %v; %d were stored", written, ofNamespace, stored)
	}

	address := a.ready.Listen
	a.stop()
	s = top.until(func(s topSample) bool { return s.Nodes[0].Failure != "" })
	if s.Total.Answering != 1 || s.Nodes[1].Failure != "" || s.Nodes[1].Written == nil || s.Nodes[0].Name != "test" {
		t.Errorf("while a is down: %+v", s)
	}
	startServed(t, dir+"/a", "--listen", address)
	s = top.until(func(s topSample) bool { return s.Nodes[0].Failure == "" })
	if n := s.Nodes[0]; !n.Restarted || n.Written != nil || n.Queried != nil {
		t.Errorf("after a restart: %+v", n)
	}
	s = top.next()
	if n := s.Nodes[0]; n.Restarted || n.Written == nil || *n.Written != 0 {
		t.Errorf("after another sample: %+v", n)
	}
}

// TestTopEnds: --timeout ends top with a failure, and a signal with its own code.
func TestTopEnds(t *testing.T) {
	args := []string{"top", "--interval", "100ms", "--server", testkit.Port(t)}
	if r := penstock(t, "", nil, append(args, "--timeout", "250ms")...); r.code != exitFailed || !strings.Contains(r.err, "--timeout 250ms ended the command") {
		t.Errorf("exit %d, %q", r.code, r.err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(signalError{syscall.SIGINT})
	if r := penstockIn(ctx, "", nil, args...); r.code != 130 || !strings.Contains(r.err, "interrupted") {
		t.Errorf("exit %d, %q", r.code, r.err)
	}
}

// TestTopWithANodeThatHangs: a node that accepts connections and does not answer has a row with the
// reason, and the others have theirs.
func TestTopWithANodeThatHangs(t *testing.T) {
	s := startServed(t, t.TempDir()+"/volume")
	silent, err := net.Listen("tcp", "127.0.0.1:0") // the kernel accepts connections up to its backlog
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	out := s.run("top", "--once", "--interval", "100ms", "--server", silent.Addr().String()+","+s.ready.Listen).must(t)
	if !strings.Contains(out, "no answer: timeout after 1s") || !strings.Contains(out, "\ntest") {
		t.Errorf("top:\n%s", out)
	}
	out = s.run("top", "--once", "--interval", "100ms", "--answer-timeout", "100ms", "--server", silent.Addr().String()).out
	if !strings.Contains(out, "no answer: timeout after 100ms") {
		t.Errorf("top with --answer-timeout:\n%s", out)
	}
}

// olderNode answers as a node without counters, uptime and live epochs. A real node is behind it.
type olderNode struct {
	pb.UnimplementedAdminServer
	node pb.AdminClient
}

// Status implements pb.AdminServer.
func (o olderNode) Status(ctx context.Context, req *pb.StatusRequest) (*pb.StatusResponse, error) {
	s, err := o.node.Status(ctx, req)
	if err != nil {
		return nil, err
	}
	s.Counters, s.UptimeUs, s.RunningReadsLimit = nil, 0, 0
	return s, nil
}

// ListNamespaces implements pb.AdminServer.
func (o olderNode) ListNamespaces(ctx context.Context, req *pb.ListNamespacesRequest) (*pb.ListNamespacesResponse, error) {
	l, err := o.node.ListNamespaces(ctx, req)
	if err != nil {
		return nil, err
	}
	for _, ns := range l.GetNamespaces() {
		ns.Counters, ns.Live, ns.EpochSinceUnixMs = nil, nil, 0
	}
	return l, nil
}

// TestTopOfAnOlderNode: of a node of an older version, the state and the rates of volumes and NICs
// are shown, and the other rates are unknown. A command that such a node does not have names the reason.
func TestTopOfAnOlderNode(t *testing.T) {
	s := startServed(t, t.TempDir()+"/volume")
	s.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	conn, err := grpc.NewClient(s.ready.Listen, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	older := grpc.NewServer()
	pb.RegisterAdminServer(older, olderNode{node: pb.NewAdminClient(conn)})
	go func() { _ = older.Serve(listener) }() // Stop ends it
	defer older.Stop()
	show := func(view string) []string {
		t.Helper()
		out := s.run("top", "--once", "--interval", "100ms", "--answer-timeout", "1m", "--server", listener.Addr().String(), "--view", view).must(t)
		lines := strings.Split(strings.TrimSpace(out), "\n")
		return strings.Fields(lines[len(lines)-1])
	}
	if got := strings.Join(show("nodes")[:13], " "); got != "test serving 0.0 % - - - - - - - - 1" {
		t.Errorf("nodes: %s", got)
	}
	if got := strings.Join(show("namespaces"), " "); got != "m 1 - - 0 B none - - - - - - 1 - 0 1" {
		t.Errorf("namespaces: %s", got)
	}
	if got := strings.Join(show("nics")[2:6], " "); got != "up 0 B -" {
		t.Errorf("nics: %s", got)
	}
	if got := strings.Join(show("volumes")[2:9], " "); got != "ok 0.0 % 0 B 0 B" {
		t.Errorf("volumes: %s", got)
	}
	if r := s.run("ns", "tenants", "--server", listener.Addr().String()); r.code == exitOK || !strings.Contains(r.err, "the node is of another version") {
		t.Errorf("ns tenants: exit %d\n%s", r.code, r.err)
	}
}

// checkRestored fails the test unless the terminal is as it was before.
func checkRestored(t *testing.T, p *pty, before unix.Termios) {
	t.Helper()
	if after := p.mode(); after != before {
		t.Errorf("the mode of the terminal is %+v; it was %+v", after, before)
	}
	p.until("usual modes", func(string) bool {
		s := p.state()
		return !s.alternate && !s.clips && !s.hidden
	})
	if s := p.state(); s.overflow > 0 || len(s.unknown) > 0 {
		t.Errorf("%d characters were outside of the screen; unknown sequences: %q", s.overflow, s.unknown)
	}
}

// TestTopTerminal drives top on a terminal against a real node: views, sorting, a pause, help, the
// size, and q.
func TestTopTerminal(t *testing.T) {
	s := startServed(t, t.TempDir()+"/volume")
	s.run("ns", "create", "chat", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	down := testkit.Port(t)
	p := openPTY(t, 150, 20)
	before := p.mode()
	cmd := p.start(nil, "top", "--server", s.ready.Listen+","+down, "--interval", "100ms")
	p.shows("penstock top", "[nodes]", "test", "serving", "2 nodes, 1 without an answer", "no answer: dial tcp", "READS/s", "q quit")
	if state := p.state(); !state.alternate || !state.hidden || !state.clips || state.colours == 0 {
		t.Errorf("the terminal is not prepared, or has no colours: %+v", state)
	}
	p.typed("s")
	p.shows("[namespaces]", "chat", "EPOCH")
	p.typed(">")
	p.shows("by writes, largest first")
	p.typed("\x1b[D\x1b[D") // two arrows to the left
	p.shows("by reads, largest first")
	p.typed("r")
	p.shows("by reads, smallest first")
	p.typed("i")
	p.shows("[nics]", "RECEIVED B/s", s.ready.DataListen)
	p.typed("v")
	p.shows("[volumes]", "IN FLIGHT", "/volume")
	p.typed("h")
	p.shows("keys and columns", "reverse the order")
	p.typed("n")
	p.shows("[volumes]")
	p.typed("n")
	p.shows("[nodes]")

	// A pause keeps the rows while the namespace appears on the node.
	p.typed("s ")
	p.shows("PAUSED", "chat")
	s.run("ns", "create", "later", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	paused := p.shows("PAUSED")
	p.typed("r")
	if now := p.shows("largest first"); strings.Contains(now, "later") || paused == now {
		t.Errorf("during a pause:\n%s", now)
	}
	p.typed(" ")
	p.shows("later")

	p.resize(40, 8)
	p.until("screen of 8 short lines", func(screen string) bool {
		lines := strings.Split(strings.TrimSuffix(screen, "\n"), "\n")
		for _, l := range lines {
			if len([]rune(l)) > 40 {
				return false
			}
		}
		return len(lines) == 8 && strings.Contains(lines[3], "NAMESPACE") && strings.HasPrefix(lines[7], "q quit")
	})
	p.resize(150, 20)
	p.shows("LIVE", "NODES")
	p.typed("q")
	if err := cmd.Wait(); err != nil {
		t.Errorf("q: %v", err)
	}
	checkRestored(t, p, before)
}

// TestTopInterrupted: Ctrl-C and SIGTERM end top with the usual codes and restore the terminal, and
// with NO_COLOR there is no colour.
func TestTopInterrupted(t *testing.T) {
	down := testkit.Port(t)
	for _, c := range []struct {
		name string
		end  func(p *pty, process *os.Process) error
		code int
	}{
		{"Ctrl-C", func(p *pty, _ *os.Process) error { p.typed("\x03"); return nil }, 130},
		{"SIGTERM", func(_ *pty, process *os.Process) error { return process.Signal(syscall.SIGTERM) }, 143},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := openPTY(t, 80, 10)
			before := p.mode()
			cmd := p.start([]string{"NO_COLOR=1"}, "top", "--server", down, "--interval", "1h")
			p.shows("no answer")
			p.resize(80, 12) // the size is applied before the next sample
			p.until("screen of 12 lines", func(screen string) bool { return strings.Count(screen, "\n") == 12 })
			p.typed("\x1a\x1c") // Ctrl-Z and Ctrl-\ have no effect
			p.typed("s")
			p.shows("[namespaces]")
			if n := p.state().colours; n > 0 {
				t.Errorf("%d colours despite NO_COLOR", n)
			}
			if err := c.end(p, cmd.Process); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait() // the exit code is checked
			if code := cmd.ProcessState.ExitCode(); code != c.code {
				t.Errorf("exit %d; want %d", code, c.code)
			}
			checkRestored(t, p, before)
		})
	}
}

// TestTopOnADumbTerminal: a terminal that cannot move its cursor gets plain lines.
func TestTopOnADumbTerminal(t *testing.T) {
	p := openPTY(t, 80, 10)
	before := p.mode()
	cmd := p.start([]string{"TERM=dumb"}, "top", "--server", testkit.Port(t), "--interval", "100ms", "-n", "2")
	_ = cmd.Wait() // no node answers
	if code := cmd.ProcessState.ExitCode(); code != exitFailed {
		t.Errorf("exit %d", code)
	}
	p.shows("no answer")
	if s := p.state(); s.alternate || s.colours > 0 || len(s.unknown) > 0 {
		t.Errorf("escape sequences on a dumb terminal: %+v", s)
	}
	if p.mode() != before {
		t.Error("the mode of the terminal has changed")
	}
}

// TestTerminalAfterAPanic: a panic of the sampling goroutine reaches the caller of watch after the
// terminal was restored.
func TestTerminalAfterAPanic(t *testing.T) {
	p := openPTY(t, 80, 10)
	before := p.mode()
	broken := &observed{nodes: []observedNode{{address: "a"}}} // without a connection: a nil pointer
	caught := func() (caught any) {
		defer func() { caught = recover() }()
		return watch(t.Context(), broken, screen.New(screen.Nodes, screen.Order{}, 0, time.Second), p.slave, p.slave, true)
	}()
	if caught == nil || !strings.Contains(fmt.Sprint(caught), "nil pointer") {
		t.Errorf("watch ended with %v", caught)
	}
	checkRestored(t, p, before)
}

// TestTerminalCloses: watch ends if the terminal of its keys is closed.
func TestTerminalCloses(t *testing.T) {
	in := openPTY(t, 80, 10)
	reader, err := readKeys(in.slave)
	if err != nil {
		t.Fatal(err)
	}
	in.typed("\x04") // end of input: in the usual mode of a terminal a read returns no bytes
	if keys, open := <-reader.pressed; open || reader.err == nil {
		t.Errorf("keys %v, error %v", keys, reader.err)
	}
	reader.stop()
	if err := errors.Unwrap(reader.err); err != nil {
		t.Errorf("end of input is %v", reader.err)
	}
}
