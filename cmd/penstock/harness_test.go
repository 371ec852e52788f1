package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/cluster"
)

// childEnv makes the test binary run as penstock, for tests that need a separate process.
const childEnv = "TEST_RUN_AS_PENSTOCK=1"

func TestMain(m *testing.M) {
	if os.Getenv("TEST_RUN_AS_PENSTOCK") == "1" {
		os.Unsetenv(goMemLimit)
		main()
		return
	}
	// Each of a test's nodes would set the runtime's limit to its own budget. The process has the heaps of all of them,
	// so the collector would run without end.
	os.Setenv(goMemLimit, "off")
	testkit.Main(m)
}

// result is the result of one command line.
type result struct {
	code     int
	out, err string
}

// penstock runs one command line in this process.
func penstock(t testing.TB, stdin string, environ []string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute) // only a command that hangs reaches the limit
	defer cancel()
	return penstockIn(ctx, stdin, environ, args...)
}

func penstockIn(ctx context.Context, stdin string, environ []string, args ...string) result {
	var out, errs bytes.Buffer
	code := run(ctx, world{in: strings.NewReader(stdin), out: &out, err: &errs, environ: environ}, args)
	return result{code: code, out: out.String(), err: errs.String()}
}

// must returns the output. It fails the test if the command failed.
func (r result) must(t testing.TB) string {
	t.Helper()
	if r.code != exitOK {
		t.Fatalf("exit %d\n%s%s", r.code, r.out, r.err)
	}
	return r.out
}

// decode parses the output as JSON.
func decode[T any](t testing.TB, r result) T {
	t.Helper()
	var v T
	if err := json.Unmarshal([]byte(r.must(t)), &v); err != nil {
		t.Fatalf("%v in\n%s", err, r.out)
	}
	return v
}

// small returns the settings of a node that starts quickly, and that waits for a disk that is busy with
// other work. data is "" if the node has only shared volumes.
func small(data string) []string {
	args := []string{"serve"}
	if data != "" {
		args = append(args, "--data", data)
	}
	return append(args,
		"--io", "posix", "--node", "test",
		"--listen", "127.0.0.1:0", "--data-listen", "127.0.0.1:0", "--http", "127.0.0.1:0",
		"--capacity", "64MiB", "--arena", "32MiB", "--index-cache", "4MiB", "--free-floor", "1MiB",
		"--prewrite=false", "--scrub-rate", "0B", "--log-format", "json", "--limits-hung-after", "5m",
	)
}

// served is a node in this process.
type served struct {
	t     testing.TB
	ready cluster.Ready
	log   *cluster.Log
	stop  func() result
}

// startServed runs serve until the test ends or stop is called.
func startServed(t testing.TB, data string, more ...string) *served {
	t.Helper()
	s, r := tryServed(t, nil, append(small(data), more...)...)
	if s == nil {
		t.Fatalf("serve: exit %d\n%s", r.code, r.err)
	}
	return s
}

// tryServed returns the node, or the result of a serve that did not become ready.
func tryServed(t testing.TB, environ []string, args ...string) (*served, result) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	pr, pw := io.Pipe()
	s := &served{t: t, log: &cluster.Log{}}
	ready := make(chan cluster.Ready, 1)
	ended := make(chan result, 1)
	var logs sync.WaitGroup
	logs.Go(func() { s.log.Follow(pr, ready) })
	go func() {
		code := run(ctx, world{in: strings.NewReader(""), out: io.Discard, err: pw, environ: environ}, args)
		pw.Close()
		logs.Wait()
		ended <- result{code: code, err: s.log.String()}
	}()
	s.stop = sync.OnceValue(func() result {
		cancel()
		return <-ended
	})
	select {
	case s.ready = <-ready:
		t.Cleanup(func() { s.stop() })
		return s, result{}
	case r := <-ended:
		cancel()
		return nil, r
	}
}

// run runs a client command against the node.
func (s *served) run(args ...string) result { return s.runWith("", args...) }

func (s *served) runWith(stdin string, args ...string) result {
	s.t.Helper()
	return penstock(s.t, stdin, []string{"PENSTOCK_SERVER=" + s.ready.Listen}, args...)
}

// writeFile makes a file in the directory.
func writeFile(t testing.TB, dir, name string, content []byte) string {
	t.Helper()
	path := dir + "/" + name
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// diagnose runs doctor on a node in this process, and returns its checks by layer. The test fails if a check has failed, except
// that of the memory: the process has the memory of other tests, too.
func (s *served) diagnose(args ...string) map[string]layer {
	s.t.Helper()
	r := s.run(append([]string{"doctor", "--format", "json"}, args...)...)
	var d diagnosis
	if err := json.Unmarshal([]byte(r.out), &d); err != nil {
		s.t.Fatalf("doctor: exit %d: %v in\n%s%s", r.code, err, r.out, r.err)
	}
	layers := make(map[string]layer)
	for _, l := range d.Layers {
		if layers[l.Layer] = l; l.State == layerFailed && l.Layer != "memory" {
			s.t.Errorf("doctor: %+v", l)
		}
	}
	return layers
}

// tokens returns count token ids from first on, in the format of a tokens file.
func tokens(first, count int) []byte {
	var b bytes.Buffer
	for i := range count {
		fmt.Fprintf(&b, "%d\n", first+i)
	}
	return b.Bytes()
}

// bytesOf returns n bytes that are determined by the seed.
func bytesOf(seed byte, n int) []byte {
	b := make([]byte, n)
	x := uint32(seed)*2654435761 + 1
	for i := range b {
		x = x*1664525 + 1013904223
		b[i] = byte(x >> 24)
	}
	return b
}
