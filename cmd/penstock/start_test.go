package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
)

// penstockWaiting runs penstock with retries while the node is not up.
func penstockWaiting(ctx context.Context, startWithin time.Duration, args ...string) result {
	var out, errs bytes.Buffer
	code := run(ctx, world{in: strings.NewReader(""), out: &out, err: &errs, startWithin: startWithin}, args)
	return result{code: code, out: out.String(), err: errs.String()}
}

// TestClientWaitsForStart: commands that start before the node listens succeed when it does, over
// the control plane and over the data plane.
func TestClientWaitsForStart(t *testing.T) {
	dir := t.TempDir()
	listen := testkit.Port(t)
	s := startServed(t, dir+"/volume", "--listen", listen)
	s.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "64").must(t)
	s.stop()

	toks, data := writeFile(t, dir, "tokens", tokens(0, 4)), writeFile(t, dir, "data", bytesOf(1, 512))
	ended := make(chan result)
	commands := [][]string{
		{"ns", "list", "--server", listen},
		{"status", "--wait", "--server", listen, "--timeout", "2m"},
		{"block", "put", "m", "--server", listen, "--tokens-file", toks, "--data-file", data},
	}
	for _, args := range commands {
		go func() { ended <- penstockWaiting(t.Context(), 2*time.Minute, args...) }()
	}
	startServed(t, dir+"/volume", "--listen", listen)
	for range commands {
		(<-ended).must(t)
	}
}

// TestClientWaitsForABusyNode: a client waits, within --timeout, for a node that accepts the first
// connection after a longer time than an engine waits.
func TestClientWaitsForABusyNode(t *testing.T) {
	s := startServed(t, t.TempDir())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go answerLate(c, s.ready.Listen)
		}
	}()
	r := penstockWaiting(t.Context(), 0, "ns", "list", "--server", l.Addr().String(), "--timeout", "2m")
	r.must(t)
}

// answerLate connects c with a node and delays the node's responses by 4 s, which is more than
// client.Dial's default.
func answerLate(c net.Conn, node string) {
	defer c.Close()
	to, err := net.Dial("tcp", node)
	if err != nil {
		return // the client's command fails
	}
	defer to.Close()
	go func() {
		copyPlain(to, c)
		_ = to.Close()
	}()
	<-time.After(4 * time.Second)
	copyPlain(c, to)
}

// copyPlain copies without splice(2), because package net keeps pipes for that.
func copyPlain(to io.Writer, from io.Reader) {
	_, _ = io.Copy(struct{ io.Writer }{to}, struct{ io.Reader }{from}) // ends when either end closes
}

// TestClientStopsWaiting: the wait ends with --timeout, and there is no wait without startWithin.
// The error is the connection's.
func TestClientStopsWaiting(t *testing.T) {
	closed := testkit.Port(t)
	var waiting sync.WaitGroup
	for _, args := range [][]string{
		{"ns", "list"}, {"status", "--wait"},
		{"block", "get", "m", "--tokens-file", "/dev/null", "--out", "/dev/null"},
	} {
		waiting.Go(func() {
			// On a busy machine the first refusal may take more than a second.
			args := append(args, "--server", closed, "--timeout", "5s")
			r := penstockWaiting(t.Context(), time.Hour, args...)
			if r.code != exitFailed || !strings.Contains(r.err, "connection refused") || !strings.Contains(r.err, "--timeout 5s") {
				t.Errorf("%v: exit %d, %q", args, r.code, r.err)
			}
		})
	}
	waiting.Wait()
	if r := penstockWaiting(t.Context(), 0, "ns", "list", "--server", closed); r.code != exitFailed || !strings.Contains(r.err, "connection refused") {
		t.Errorf("without a wait: exit %d, %q", r.code, r.err)
	}
}

// beforeItsTimer is a context after its deadline whose timer has not run.
type beforeItsTimer struct{ context.Context }

func (beforeItsTimer) Deadline() (time.Time, bool) { return time.Now(), true }

// TestDialerOutOfTime: a connection attempt that ends with the deadline before the context does is
// not taken for a node that answers.
func TestDialerOutOfTime(t *testing.T) {
	silent := "192.0.2.1:7420" // RFC 5737: no host has this address
	c := &connection{servers: silent, timeout: time.Second, startWithin: time.Hour}
	if err := c.awaitListening(beforeItsTimer{t.Context()}); err == nil || !strings.Contains(err.Error(), "no connection within --timeout 1s") {
		t.Errorf("after the deadline: %v", err)
	}
}

// TestTimeoutOfMoves: the node accepts connections and does not answer. --timeout ends a
// command that moves blocks with an error, not with a miss.
func TestTimeoutOfMoves(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for _, args := range [][]string{
		{"block", "get", "m", "--tokens-file", "/dev/null", "--out", "/dev/null"},
		{"block", "put", "m", "--tokens-file", "/dev/null", "--data-file", "/dev/null"},
		{"trace", "replay", "sample"},
	} {
		r := penstock(t, "", nil, append(args, "--server", silent.Addr().String(), "--timeout", "10ms")...)
		if r.code != exitFailed || !strings.Contains(r.err, "within --timeout") {
			t.Errorf("%v: exit %d, %q", args, r.code, r.err)
		}
	}
}

// TestWaitReportsState: status --wait fails with the node's state if the node responds and
// does not serve.
func TestWaitReportsState(t *testing.T) {
	s := startServed(t, t.TempDir()+"/volume", "--free-floor", "1000TiB")
	// On a busy machine the node may need longer than a short time limit for its first answer.
	var r result
	limit := 2 * time.Second
	for ; limit < 2*time.Minute; limit *= 2 {
		r = s.run("status", "--wait", "--timeout", limit.String())
		if !strings.Contains(r.err, "did not answer within --timeout") {
			break
		}
	}
	state := decode[struct {
		State string `json:"state"`
	}](t, s.run("status", "--format", "json")).State
	if state == stateServing {
		t.Error("a node below its free floor reports serving")
	}
	if r.code != exitFailed || !strings.Contains(r.err, fmt.Sprintf("not ready within --timeout %v: the node is %s", limit, state)) {
		t.Errorf("exit %d, %q; the node is %q", r.code, r.err, state)
	}
}

// TestGetKeepsTheFile: block get replaces --out only if it has blocks to write, and leaves no other
// file.
func TestGetKeepsTheFile(t *testing.T) {
	s := startServed(t, t.TempDir()+"/volume")
	dir := t.TempDir()
	s.run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "64").must(t)
	known, unknown := writeFile(t, dir, "known", tokens(0, 8)), writeFile(t, dir, "unknown", tokens(100, 8))
	data := bytesOf(1, 1024)
	s.run("block", "put", "m", "--tokens-file", known, "--data-file", writeFile(t, dir, "data", data)).must(t)

	out := writeFile(t, dir, "out", []byte("precious"))
	link := filepath.Join(dir, "link")
	if err := os.Symlink("out", link); err != nil {
		t.Fatal(err)
	}
	content := func() string {
		t.Helper()
		b, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	for _, to := range []string{out, link} {
		if r := s.run("block", "get", "m", "--tokens-file", unknown, "--out", to); r.code != exitMiss || content() != "precious" {
			t.Errorf("a miss: exit %d, and the file holds %q", r.code, content())
		}
	}
	if r := s.run("block", "get", "nope", "--tokens-file", known, "--out", out); r.code != exitMiss || content() != "precious" {
		t.Errorf("no such namespace: exit %d, and the file holds %q", r.code, content())
	}
	if err := os.Chmod(out, 0o640); err != nil {
		t.Fatal(err)
	}
	s.run("block", "get", "m", "--tokens-file", known, "--out", link).must(t)
	if content() != string(data) {
		t.Errorf("the file holds %d bytes, not the stored bytes", len(content()))
	}
	if info, err := os.Lstat(link); err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link was replaced: %v, %v", info, err)
	}
	if info, err := os.Stat(out); err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("the file's permissions changed: %v, %v", info, err)
	}
	s.run("block", "get", "m", "--tokens-file", known, "--out", filepath.Join(dir, "new")).must(t)
	if r := s.run("block", "get", "m", "--tokens-file", known, "--out", "/dev/null"); r.code != exitOK {
		t.Errorf("to a device: exit %d, %s", r.code, r.err)
	}
	// The name of a pipe of the process, as a shell gives for >(command), cannot be resolved to a path.
	end, pipe, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r := s.run("block", "get", "m", "--tokens-file", known, "--out", fmt.Sprintf("/proc/self/fd/%d", pipe.Fd()))
	if err := pipe.Close(); err != nil {
		t.Error(err)
	}
	got, err := io.ReadAll(end)
	if err := errors.Join(err, end.Close()); r.code != exitOK || !bytes.Equal(got, data) || err != nil {
		t.Errorf("to a pipe: exit %d, %s: %d bytes, %v", r.code, r.err, len(got), err)
	}
	if r := s.run("block", "get", "m", "--tokens-file", known, "--out", filepath.Join(dir, strings.Repeat("n", 255))); r.code != exitOK {
		t.Errorf("to the longest name: exit %d, %s", r.code, r.err)
	}
	dangling := filepath.Join(dir, "dangling")
	if err := os.Symlink(filepath.Join(dir, "nothing", "here"), dangling); err != nil {
		t.Fatal(err)
	}
	// A file that cannot be written is an error, even if nothing is cached.
	for _, to := range []string{dir, filepath.Join(dir, "none", "out"), dangling} {
		for _, prompt := range []string{known, unknown} {
			if r := s.run("block", "get", "m", "--tokens-file", prompt, "--out", to); r.code != exitFailed || !strings.Contains(r.err, "--out: ") {
				t.Errorf("to %s: exit %d, %s", to, r.code, r.err)
			}
		}
	}
	left, err := filepath.Glob(filepath.Join(dir, "*.penstock-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestReadmeWorksAtOnce runs the README's first block of shell commands in a new directory with the
// current penstock, in a shell that stops at the first failure. Ports and the data directory are
// replaced.
func TestReadmeWorksAtOnce(t *testing.T) {
	testkit.Long(t, "runs the commands of the README in a shell")
	readme, err := os.ReadFile(filepath.Join(testkit.RepositoryRoot(t), "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, block, ok := strings.Cut(string(readme), "\n```sh\n")
	block, _, closed := strings.Cut(block, "\n```\n")
	if !ok || !closed {
		t.Fatal("README.md has no block of shell commands")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	// The test binary replaces the result of make build.
	for name, text := range map[string]string{
		"bin/penstock": "#!/bin/sh\nexec env " + childEnv + " " + self + ` "$@"` + "\n",
		"bin/make":     "#!/bin/sh\ntest \"$*\" = build\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	const data = "/tmp/penstock"
	if !strings.Contains(block, "--data "+data+" ") || !strings.Contains(block, "make build") {
		t.Fatalf("the block does not build, or not serve %s:\n%s", data, block)
	}
	block = strings.ReplaceAll(block, "--data "+data+" ", "--data "+dir+"/data ")
	block = strings.ReplaceAll(block, "--capacity 8GiB", "--capacity 256MiB") // to fit the test's disk
	listen := testkit.Port(t)
	// The node runs in the background at the end of the block.
	block = "trap 'kill $!' EXIT\n" + block + "\nkill $!\nwait $!\ntrap - EXIT\n"
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute) // only a command that hangs reaches the limit
	defer cancel()
	sh := exec.CommandContext(ctx, "sh", "-e", "-c", block)
	sh.Dir = dir
	sh.Env = append(os.Environ(), "PATH="+dir+"/bin:"+os.Getenv("PATH"), "PENSTOCK_SERVER="+listen, "PENSTOCK_LISTEN="+listen,
		"PENSTOCK_DATA_LISTEN=127.0.0.1:0", "PENSTOCK_HTTP=127.0.0.1:0", "PENSTOCK_ARENA=64MiB", "PENSTOCK_FREE_FLOOR=1MiB")
	sh.WaitDelay = time.Second // the node holds the output if the shell ended without it
	if out, err := sh.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	} else if !strings.Contains(string(out), "is well") {
		t.Errorf("the block does not end with a node that doctor reports as healthy:\n%s", out)
	}
}
