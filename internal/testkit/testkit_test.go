package testkit

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestMain(m *testing.M) { Main(m) }

// short is a wait for a leak that is known to exist: settle returns after that time.
const short = time.Millisecond

func TestSettleFindsGoroutine(t *testing.T) {
	before := take()
	stop := make(chan struct{})
	running := make(chan struct{})
	go leakedOnPurpose(running, stop)
	<-running // before that the goroutine's stack has only the go statement
	leaks := before.settle(short)
	if len(leaks) != 1 || !strings.Contains(leaks[0], "leakedOnPurpose") {
		t.Errorf("leaks = %q; want the one goroutine", leaks)
	}
	close(stop)
	if leaks := before.settle(settleMax); len(leaks) != 0 {
		t.Errorf("after its end: leaks = %q", leaks)
	}
}

func leakedOnPurpose(running, stop chan struct{}) {
	close(running)
	<-stop
}

func TestSettleFindsDescriptor(t *testing.T) {
	before := take()
	path := filepath.Join(t.TempDir(), "left-open")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	leaks := before.settle(short)
	if len(leaks) != 1 || !strings.Contains(leaks[0], "left-open") {
		t.Errorf("leaks = %q; want the one file", leaks)
	}
	f.Close()
	if leaks := before.settle(settleMax); len(leaks) != 0 {
		t.Errorf("after close: leaks = %q", leaks)
	}
}

// recorder is a testing.TB that records failure instead of failing.
type recorder struct {
	testing.TB
	cleanups []func()
	errors   int
}

func (r *recorder) Helper()               {}
func (r *recorder) Failed() bool          { return r.errors > 0 }
func (r *recorder) Errorf(string, ...any) { r.errors++ }
func (r *recorder) Cleanup(f func())      { r.cleanups = append(r.cleanups, f) }

func TestVerifyNone(t *testing.T) {
	r := &recorder{TB: t}
	VerifyNone(r)
	r.cleanups[0]()
	if r.errors != 0 {
		t.Error("reported a leak where there is none")
	}
}

func TestAlignedBuffer(t *testing.T) {
	b := AlignedBuffer(t, 5000)
	if len(b) != 5000 {
		t.Fatalf("len = %d", len(b))
	}
	b[4999] = 1
}

func TestTraceFileNamed(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(TracesEnv, dir)
	want := filepath.Join(dir, "x.gz")
	if err := os.WriteFile(want, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := TraceFile(t, "x.gz"); got != want {
		t.Errorf("TraceFile = %s; want %s", got, want)
	}
}

func TestRepositoryRoot(t *testing.T) {
	if _, err := os.Stat(filepath.Join(RepositoryRoot(t), "LICENSE")); err != nil {
		t.Error(err)
	}
}
