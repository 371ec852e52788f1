package posixio

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
)

// TestZero: where fallocate is refused, writing zeroes gives a file its size and its space.
func TestZero(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	const size = 3*zeroBytes + 5*blockio.Align
	if err := zero(fd, size); err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(content, make([]byte, size)) {
		t.Fatalf("%d bytes, %v", len(content), err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Blocks*512 < size {
		t.Fatalf("%d of %d bytes are reserved, %v", st.Blocks*512, size, err)
	}
}

// TestProbeFileHasNoName: the probe leaves no file in the directory.
func TestProbeFileHasNoName(t *testing.T) {
	d, err := OpenDir(t.TempDir(), false)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	entries, err := os.ReadDir(d.Path())
	if err != nil || len(entries) != 0 {
		t.Fatalf("the probe left %v, %v", entries, err)
	}
}

// TestFlusherCoversEveryMark: a caller returns only after a flush that began after the caller's
// mark, and there are no more flushes than callers.
func TestFlusherCoversEveryMark(t *testing.T) {
	var s flusher
	var written, durable, flushes atomic.Int64
	flush := func() error {
		flushes.Add(1)
		covered := written.Load()
		runtime.Gosched()
		durable.Store(covered)
		return nil
	}
	var wg sync.WaitGroup
	const callers, rounds = 8, 500
	for range callers {
		wg.Go(func() {
			for range rounds {
				mine := written.Add(1)
				s.mark()
				if err := s.flush(flush); err != nil || durable.Load() < mine {
					t.Errorf("write %d returned while %d are durable, %v", mine, durable.Load(), err)
					return
				}
			}
		})
	}
	wg.Wait()
	if n := flushes.Load(); n > callers*rounds {
		t.Fatalf("%d flushes for %d callers", n, callers*rounds)
	}
}

// TestFlusherAfterFailure: after a failed flush the next one is tried, although nothing was marked
// since.
func TestFlusherAfterFailure(t *testing.T) {
	var s flusher
	s.mark()
	broken := errors.New("broken")
	results := []error{unix.EINTR, broken, nil}
	flush := func() error {
		err := results[0]
		results = results[1:]
		return err
	}
	if err := s.flush(flush); err != broken {
		t.Fatal(err)
	}
	if err := s.flush(flush); err != nil || len(results) != 0 {
		t.Fatalf("%v, %d results left", err, len(results))
	}
	if err := s.flush(flush); err != nil {
		t.Fatal(err)
	}
}

// TestSyncFailureIsReported: the error names every file that failed, and the counter increases.
func TestSyncFailureIsReported(t *testing.T) {
	d, err := OpenDir(t.TempDir(), false)
	if err != nil {
		t.Fatal(err)
	}
	f, err := d.Create("a", blockio.Align)
	if err != nil {
		t.Fatal(err)
	}
	ino := f.(*File).ino
	good := ino.fd
	ino.fd = -1 // fdatasync then returns EBADF
	if err := d.Sync(context.Background()); !errors.Is(err, unix.EBADF) {
		t.Errorf("sync: %v", err)
	}
	if s := d.Counters().Stats(); s.Syncs != 1 || s.SyncFailures != 1 {
		t.Errorf("stats: %+v", s)
	}
	ino.fd = good
	if err := errors.Join(d.Sync(context.Background()), d.Close()); err != nil {
		t.Error(err)
	}
}

func TestAdvance(t *testing.T) {
	buf := make([]byte, 10)
	bufs := [][]byte{buf[:3], buf[3:4], buf[4:]}
	for n := range int64(10) {
		var rest []byte
		for _, b := range advance(bufs, n) {
			rest = append(rest, b...)
		}
		if int64(len(rest)) != 10-n || len(bufs[0]) != 3 {
			t.Fatalf("advance by %d leaves %d bytes, first buffer now %d", n, len(rest), len(bufs[0]))
		}
	}
}

// TestAdmitAllocatesNothing: Admit and Done run for every read. An escaping gate, or an error that
// is built too early, would allocate.
func TestAdmitAllocatesNothing(t *testing.T) {
	if invariants.Enabled {
		t.Skip("checks of this build allocate")
	}
	d, err := Open(t.TempDir(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	f, err := d.Create("a", 2*blockio.Align)
	if err != nil {
		t.Fatal(err)
	}
	buf := testkit.AlignedBuffer(t, 2*blockio.Align)
	batch := []blockio.Request{
		{Op: blockio.Read, File: f, Bufs: [][]byte{buf[:blockio.Align]}},
		{Op: blockio.Write, File: f, Offset: blockio.Align, Bufs: [][]byte{buf[blockio.Align:]}},
	}
	allocs := testing.AllocsPerRun(100, func() {
		if err := d.Admit(batch); err != nil {
			t.Fatal(err)
		}
		d.Done(batch, true)
	})
	if allocs != 0 {
		t.Errorf("%v allocations", allocs)
	}
}

// descriptors are the descriptors that a Dir has opened and not closed.
type descriptors struct {
	open map[int]bool
	fail error
}

func (d *descriptors) Opened(fd int) error {
	if d.fail == nil {
		d.open[fd] = true
	}
	return d.fail
}

func (d *descriptors) Closing(fd int) {
	var st unix.Stat_t
	if !d.open[fd] || unix.Fstat(fd, &st) != nil {
		panic("a descriptor is closed that was not opened, or was closed before")
	}
	delete(d.open, fd)
}

// TestFollow: each descriptor of a file is followed from before its first use until before it is
// closed. A refused descriptor leaves no file open, and no new file.
func TestFollow(t *testing.T) {
	testkit.VerifyNone(t)
	d, err := OpenDir(t.TempDir(), true)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	w := &descriptors{open: map[int]bool{}}
	d.Follow(w)
	a, err := d.Create("a", blockio.Align)
	if err != nil {
		t.Fatal(err)
	}
	again, err := d.Open("a")
	if err != nil {
		t.Fatal(err)
	}
	if !w.open[a.(*File).FD()] || len(w.open) != 1 {
		t.Errorf("one file is open twice, followed are %v", w.open)
	}
	if a.Close(); len(w.open) != 1 {
		t.Errorf("after the first of two closes, followed are %v", w.open)
	}
	if again.Close(); len(w.open) != 0 {
		t.Errorf("after both closes, followed are %v", w.open)
	}
	w.fail = unix.EMFILE
	if _, err := d.Create("b", blockio.Align); !errors.Is(err, unix.EMFILE) {
		t.Errorf("create with a refused descriptor: %v", err)
	}
	if _, err := d.Open("a"); !errors.Is(err, unix.EMFILE) {
		t.Errorf("open with a refused descriptor: %v", err)
	}
	if names, err := d.List(); err != nil || len(names) != 1 {
		t.Errorf("files are %v, %v", names, err)
	}
	w.fail = nil
	if _, err := d.Open("a"); err != nil || len(w.open) != 1 {
		t.Errorf("followed are %v, %v", w.open, err)
	}
	if err := d.Close(); err != nil || len(w.open) != 0 {
		t.Errorf("after the close of the directory, followed are %v, %v", w.open, err)
	}
}
