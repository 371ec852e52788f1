package testkit

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// settleMax is the maximum time for which a check waits for goroutines that are about to end. The
// runtime does not signal the end of a goroutine, so the check polls. A goroutine that is about to
// end needs only microseconds of CPU time; a goroutine that still runs after settleMax is a leak.
const settleMax = 30 * time.Second

// VerifyNone fails t if, when t and its subtests have ended, goroutines or file descriptors exist
// that did not exist when VerifyNone was called. Call it first, so that its check runs after every
// other cleanup. It cannot distinguish tests that run at the same time, so a parallel test must not
// use it; see Main.
func VerifyNone(t testing.TB) {
	t.Helper()
	before := take()
	t.Cleanup(func() {
		if t.Failed() {
			return // the first failure is the better message
		}
		if leaks := before.settle(settleMax); len(leaks) > 0 {
			t.Errorf("left behind:\n%s", strings.Join(leaks, "\n"))
		}
	})
}

// Main runs the tests of a package and then fails if they left goroutines or
// file descriptors behind. It is the body of TestMain and does not return.
func Main(m *testing.M) {
	before := take()
	code := m.Run()
	if code == 0 {
		if leaks := before.settle(settleMax); len(leaks) > 0 {
			fmt.Fprintf(os.Stderr, "the tests passed but left behind:\n%s\n", strings.Join(leaks, "\n"))
			code = 1
		}
	}
	os.Exit(code)
}

// snapshot is the set of goroutines and descriptors at one moment.
type snapshot struct {
	goroutines map[uint64]string // id to stack
	fds        map[int]string    // number to the opened file
}

func take() snapshot {
	// The runtime opens its poller's descriptors at the first use and keeps them open. The pipe
	// makes the runtime open them before they are counted.
	if r, w, err := os.Pipe(); err == nil {
		r.Close()
		w.Close()
	}
	return snapshot{goroutines: goroutines(), fds: fds()}
}

// settle compares the current goroutines and descriptors with s until there are none that s does
// not have, or until max has passed. It returns a description of each that s does not have.
func (s snapshot) settle(max time.Duration) []string {
	deadline := time.Now().Add(max)
	for pause := 50 * time.Microsecond; ; pause = min(2*pause, 50*time.Millisecond) {
		leaks := s.leaks()
		if len(leaks) == 0 || time.Now().After(deadline) {
			return leaks
		}
		time.Sleep(pause)
	}
}

func (s snapshot) leaks() []string {
	var out []string
	now := goroutines()
	for _, id := range slices.Sorted(maps.Keys(now)) {
		if _, ok := s.goroutines[id]; !ok && !ignored(now[id]) {
			out = append(out, now[id])
		}
	}
	open := fds()
	for _, fd := range slices.Sorted(maps.Keys(open)) {
		if s.fds[fd] != open[fd] {
			out = append(out, fmt.Sprintf("file descriptor %d: %s", fd, open[fd]))
		}
	}
	return out
}

// goroutines returns the stack of every goroutine but the caller's, by id.
func goroutines() map[uint64]string {
	buf := make([]byte, 1<<16)
	for {
		n := runtime.Stack(buf, true)
		if n < len(buf) {
			buf = buf[:n]
			break
		}
		buf = make([]byte, 2*len(buf))
	}
	out := make(map[uint64]string)
	for i, stack := range bytes.Split(buf, []byte("\n\n")) {
		if id, ok := goroutineID(stack); ok && i > 0 { // the first is the caller's
			out[id] = string(stack)
		}
	}
	return out
}

// goroutineID reads the number in "goroutine 7 [running]:…".
func goroutineID(stack []byte) (uint64, bool) {
	rest, ok := bytes.CutPrefix(stack, []byte("goroutine "))
	if !ok {
		return 0, false
	}
	num, _, ok := bytes.Cut(rest, []byte(" "))
	if !ok {
		return 0, false
	}
	id, err := strconv.ParseUint(string(num), 10, 64)
	return id, err == nil
}

// processWide has functions of goroutines that the standard library starts once and never ends.
var processWide = [...]string{
	"os/signal.signal_recv",
	"os/signal.loop",
	"runtime.ensureSigM",
	"testing.(*T).Run(",
	"testing.(*M).startAlarm",
	"testing.tRunner.func", // a parent that waits for parallel subtests
	"internal/fuzz.",
}

func ignored(stack string) bool {
	return slices.ContainsFunc(processWide[:], func(s string) bool { return strings.Contains(stack, s) })
}

// OpenBelow returns the files below a directory that the process has open. While there are such
// files, the kernel refuses to unmount the file system.
func OpenBelow(t testing.TB, dir string) (names []string) {
	t.Helper()
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		t.Fatal(err)
	}
	open := fds()
	if len(open) == 0 {
		t.Fatal("/proc/self/fd lists no open file")
	}
	for _, name := range open {
		if name == dir || strings.HasPrefix(name, dir+"/") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// fds returns the file behind every open descriptor. If /proc is missing it returns nothing, and
// only goroutines are checked.
func fds() map[int]string {
	const dir = "/proc/self/fd"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	out := make(map[int]string, len(entries))
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil {
			continue // the descriptor that read the directory
		}
		out[fd] = target
	}
	return out
}
