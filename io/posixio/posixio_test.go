package posixio_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/blockiotest"
	"github.com/penstock-kv/penstock/io/posixio"
)

func open(t testing.TB, dir string, opts posixio.Options) *posixio.Device {
	t.Helper()
	d, err := posixio.Open(dir, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return d
}

// do runs one request over the whole of f, with buffers of the given number of pages.
func do(t testing.TB, d blockio.Device, op blockio.Op, f blockio.File, buf []byte, pages int) error {
	t.Helper()
	var bufs [][]byte
	for at := 0; at < len(buf); at += pages * blockio.Align {
		bufs = append(bufs, buf[at:min(len(buf), at+pages*blockio.Align)])
	}
	batch := []blockio.Request{{Op: op, File: f, Bufs: bufs}}
	if err := d.Do(t.Context(), batch); err != nil {
		t.Fatal(err)
	}
	return batch[0].Err
}

func random(t testing.TB, pages int) []byte {
	buf := testkit.AlignedBuffer(t, pages*blockio.Align)
	rng := rand.New(rand.NewPCG(7, 7))
	for i := range buf {
		buf[i] = byte(rng.Uint32())
	}
	return buf
}

// TestShortTransfersAreResumed shortens and interrupts most system calls. All written data can be
// read.
func TestShortTransfersAreResumed(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var mu sync.Mutex
	var bent int
	hook := func(_ blockio.Op, _ string, _ int64, n int, err error) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			return n, err
		}
		switch rng.IntN(4) {
		case 0:
			bent++
			return rng.IntN(n + 1), nil // any byte, also inside a page or sector
		case 1:
			bent++
			return 0, []error{unix.EINTR, unix.EAGAIN}[rng.IntN(2)]
		case 2:
			bent++
			return n / 2, nil
		}
		return n, nil
	}
	d := open(t, t.TempDir(), posixio.Options{Hook: hook})
	data, got := random(t, 97), testkit.AlignedBuffer(t, 97*blockio.Align)
	f := blockiotest.Create(t, d, "a", 97*blockio.Align)
	for cut := 1; cut <= 97; cut += 8 {
		if err := do(t, d, blockio.Write, f, data, cut); err != nil {
			t.Fatal(err)
		}
		clear(got)
		if err := do(t, d, blockio.Read, f, got, 98-cut); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, data) {
			t.Fatalf("cut into buffers of %d pages: the bytes that were read differ from the written bytes", cut)
		}
	}
	if s := d.Stats(); bent == 0 || s.Resumed == 0 {
		t.Fatalf("%d outcomes bent, stats %+v", bent, s)
	}
}

// TestNoProgressEnds: a device that never moves a byte causes an error and not an endless loop.
func TestNoProgressEnds(t *testing.T) {
	for _, c := range []struct {
		name string
		op   blockio.Op
		n    int
		err  error
		want error
	}{
		{"reads of nothing", blockio.Read, 0, nil, io.ErrUnexpectedEOF},
		{"writes of nothing", blockio.Write, 0, nil, io.ErrNoProgress},
		{"writes of a sector", blockio.Write, 512, nil, io.ErrNoProgress},
		{"for ever interrupted", blockio.Read, 0, unix.EINTR, unix.EINTR},
		{"for ever again", blockio.Write, 0, unix.EAGAIN, unix.EAGAIN},
		{"broken", blockio.Read, 0, unix.EIO, unix.EIO},
		{"full", blockio.Write, 0, unix.ENOSPC, blockio.ErrNoSpace},
		{"over quota", blockio.Write, 0, unix.EDQUOT, blockio.ErrNoSpace},
	} {
		t.Run(c.name, func(t *testing.T) {
			hook := func(blockio.Op, string, int64, int, error) (int, error) { return c.n, c.err }
			d := open(t, t.TempDir(), posixio.Options{Hook: hook})
			f := blockiotest.Create(t, d, "seg-3", 2*blockio.Align)
			err := do(t, d, c.op, f, testkit.AlignedBuffer(t, 2*blockio.Align), 2)
			if !errors.Is(err, c.want) {
				t.Fatalf("got %v, want %v", err, c.want)
			}
			if !strings.Contains(err.Error(), "seg-3") || !strings.Contains(err.Error(), d.Path()) {
				t.Fatalf("%q names neither the file nor the volume", err)
			}
			if s := d.Stats(); s.ReadFailures+s.WriteFailures != 1 {
				t.Fatalf("stats: %+v", s)
			}
		})
	}
}

// TestFileShrunk: another process truncated the file while it was open.
func TestFileShrunk(t *testing.T) {
	dir := t.TempDir()
	d := open(t, dir, posixio.Options{})
	f := blockiotest.Create(t, d, "a", 8*blockio.Align)
	if err := os.Truncate(filepath.Join(dir, "a"), 2*blockio.Align+100); err != nil {
		t.Fatal(err)
	}
	if err := do(t, d, blockio.Read, f, testkit.AlignedBuffer(t, 8*blockio.Align), 8); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatalf("read of a shrunk file: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	f, err := d.Open("a")
	if err != nil {
		t.Fatal(err)
	}
	if f.Size() != 2*blockio.Align {
		t.Fatalf("size is %d, want two whole pages", f.Size())
	}
}

// TestOthersInTheDirectory: files that Create did not make are not changed.
func TestOthersInTheDirectory(t *testing.T) {
	dir := t.TempDir()
	for _, sub := range []string{"index", "lost+found"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{"README", ".hidden"} {
		if err := os.WriteFile(filepath.Join(dir, file), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	d := open(t, dir, posixio.Options{})
	names, err := d.List()
	if err != nil || len(names) != 0 {
		t.Fatalf("list: %q, %v", names, err)
	}
	for _, name := range []string{"index", "link"} {
		if _, err := d.Open(name); !errors.Is(err, blockio.ErrNotExist) {
			t.Errorf("open %s: %v", name, err)
		}
		if _, err := d.Create(name, blockio.Align); !errors.Is(err, blockio.ErrExist) {
			t.Errorf("create %s: %v", name, err)
		}
	}
}

func TestOpenRefuses(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "volume")
	if _, err := posixio.Open(missing, posixio.Options{}); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), missing) {
		t.Errorf("a missing directory: %v", err)
	}
	if _, err := posixio.Open(t.TempDir(), posixio.Options{Workers: -1}); err == nil {
		t.Error("accepted -1 workers")
	}
	if _, err := posixio.Open(t.TempDir(), posixio.Options{Budget: blockio.BudgetOptions{MinBytes: 1}}); err == nil {
		t.Error("accepted a budget of a byte")
	}
}

// TestInfo: the file system of the temporary directory decides whether O_DIRECT is used; Detail
// gives the reason.
func TestInfo(t *testing.T) {
	d := open(t, t.TempDir(), posixio.Options{})
	if i := d.Info(); i.Backend != "posix" || !strings.Contains(i.Detail, "O_DIRECT") {
		t.Errorf("info: %+v", i)
	}
	b := open(t, t.TempDir(), posixio.Options{Buffered: true})
	if i := b.Info(); i.Direct || !strings.Contains(i.Detail, "page cache") {
		t.Errorf("info of a buffered device: %+v", i)
	}
}

// TestCancelledWait: a batch that waits for the budget can be cancelled, and one in flight cannot.
func TestCancelledWait(t *testing.T) {
	entered, leave := make(chan struct{}), make(chan struct{})
	hook := func(_ blockio.Op, _ string, _ int64, n int, err error) (int, error) {
		entered <- struct{}{}
		<-leave
		return n, err
	}
	budget := blockio.BudgetOptions{MinBytes: 4 * blockio.Align, MaxBytes: 4 * blockio.Align}
	d := open(t, t.TempDir(), posixio.Options{Hook: hook, Budget: budget})
	f := blockiotest.Create(t, d, "a", 4*blockio.Align)
	buf := testkit.AlignedBuffer(t, 4*blockio.Align)
	ctx, cancel := context.WithCancel(t.Context())
	request := func() []blockio.Request { return []blockio.Request{{Op: blockio.Read, File: f, Bufs: [][]byte{buf}}} }
	first, second := request(), request()
	results := make(chan error, 2)
	go func() { results <- d.Do(ctx, first) }()
	<-entered
	if s := d.Stats(); s.InFlightBytes != 4*blockio.Align || s.InFlightLimitBytes != 4*blockio.Align {
		t.Errorf("in flight: %+v", s)
	}
	go func() { results <- d.Do(ctx, second) }()
	cancel()
	if err := <-results; !errors.Is(err, context.Canceled) {
		t.Fatalf("the batch that waited: %v", err)
	}
	leave <- struct{}{}
	if err := <-results; err != nil || first[0].Err != nil {
		t.Fatalf("the batch in flight: %v, %v", err, first[0].Err)
	}
	if s := d.Stats(); s.ReadRequests != 1 || s.InFlightBytes != 0 {
		t.Errorf("stats: %+v", s)
	}
}

// TestCloseWaitsForTheKernel: Close returns only after the request in the kernel has completed, and
// new work is refused meanwhile.
func TestCloseWaitsForTheKernel(t *testing.T) {
	entered, leave := make(chan struct{}), make(chan struct{})
	hook := func(_ blockio.Op, _ string, _ int64, n int, err error) (int, error) {
		close(entered)
		<-leave
		return n, err
	}
	d := open(t, t.TempDir(), posixio.Options{Hook: hook})
	f := blockiotest.Create(t, d, "a", blockio.Align)
	buf := testkit.AlignedBuffer(t, blockio.Align)
	batch := []blockio.Request{{Op: blockio.Read, File: f, Bufs: [][]byte{buf}}}
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := d.Do(t.Context(), batch); err != nil || batch[0].Err != nil {
			t.Errorf("the request in the kernel: %v, %v", err, batch[0].Err)
		}
	})
	<-entered
	wg.Go(func() {
		if err := d.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		if s := d.Stats(); s.ReadRequests != 1 {
			t.Error("close did not wait")
		}
	})
	for d.Sync(t.Context()) == nil { // until Close has begun
	}
	close(leave)
	wg.Wait()
}

// TestWorkersBound counts the concurrent system calls.
func TestWorkersBound(t *testing.T) {
	var now, most atomic.Int64
	hook := func(_ blockio.Op, _ string, _ int64, n int, err error) (int, error) {
		if v := now.Add(1); v > most.Load() {
			most.Store(v)
		}
		defer now.Add(-1)
		return n, err
	}
	d := open(t, t.TempDir(), posixio.Options{Workers: 3, Hook: hook})
	f := blockiotest.Create(t, d, "a", 256*blockio.Align)
	buf := testkit.AlignedBuffer(t, 256*blockio.Align)
	var batch []blockio.Request
	for i := range 256 {
		place := int64(i * 97 % 256) // no two consecutive requests are adjacent
		batch = append(batch, blockio.Request{Op: blockio.Write, File: f, Offset: place * blockio.Align, Bufs: [][]byte{buf[i*blockio.Align : (i+1)*blockio.Align]}})
	}
	if err := d.Do(t.Context(), batch); err != nil {
		t.Fatal(err)
	}
	if most.Load() > 3 {
		t.Fatalf("%d system calls at a time, want at most 3", most.Load())
	}
}

// TestReadOnly: a volume opened read-only can be read, also while its owner has it open, and no
// call changes it.
func TestReadOnly(t *testing.T) {
	dir := t.TempDir()
	owner := open(t, dir, posixio.Options{})
	if err := owner.Lock("the owner"); err != nil {
		t.Fatal(err)
	}
	data, got := random(t, 3), testkit.AlignedBuffer(t, 3*blockio.Align)
	if err := do(t, owner, blockio.Write, blockiotest.Create(t, owner, "a", 3*blockio.Align), data, 1); err != nil {
		t.Fatal(err)
	}
	d := open(t, dir, posixio.Options{ReadOnly: true})
	f, err := d.Open("a")
	if err != nil {
		t.Fatal(err)
	}
	if err := do(t, d, blockio.Read, f, got, 3); err != nil || !bytes.Equal(got, data) {
		t.Errorf("read: %v; the bytes are right: %v", err, bytes.Equal(got, data))
	}
	_, createErr := d.Create("b", blockio.Align)
	for call, err := range map[string]error{
		"create": createErr, "remove": d.Remove("a"), "lock": d.Lock("another"),
		"write": d.Do(t.Context(), []blockio.Request{{Op: blockio.Write, File: f, Bufs: [][]byte{got}}}),
	} {
		if !errors.Is(err, blockio.ErrRequest) || !strings.Contains(err.Error(), "reading only") {
			t.Errorf("%s: %v; want ErrRequest with the reason", call, err)
		}
	}
}
