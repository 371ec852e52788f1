//go:build cgo && linux

package usrbio

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/blockiotest"
	"github.com/penstock-kv/penstock/io/usrbio/usrbiotest"
)

const page = blockio.Align

// standIn is the library of all tests of the package, and the directories that it takes for mounts.
// Tests that leave registrations behind use the mount failing.
type standIn struct {
	dir, library, mount, failing string
	control                      *usrbiotest.Control
	err                          error
}

var built = sync.OnceValue(func() (w standIn) {
	if w.dir, w.err = os.MkdirTemp("", "penstock-usrbio"); w.err != nil {
		return w
	}
	w.mount, w.failing = filepath.Join(w.dir, "mount"), filepath.Join(w.dir, "failing")
	if w.library, w.err = usrbiotest.Build(w.dir); w.err != nil {
		return w
	}
	if w.control, w.err = usrbiotest.NewControl(w.dir); w.err != nil {
		return w
	}
	if w.err = errors.Join(usrbiotest.Virtual(w.mount), usrbiotest.Virtual(w.failing), usrbiotest.Directories(w.mount, w.failing)); w.err != nil {
		return w
	}
	// The library keeps a descriptor from its first use on. It is not a leak of a test.
	if ok, why := Probe(w.mount, Options{Library: w.library}); !ok {
		w.err = errors.New(why)
	}
	return w
})

func TestMain(m *testing.M) {
	code := m.Run()
	if _, err := exec.LookPath("gcc"); err == nil && os.Getenv(childVolume) == "" {
		os.RemoveAll(built().dir)
	}
	os.Exit(code)
}

// loaded returns the stand-in library. The test's cleanup checks that the test has destroyed all
// buffers and rings, none of them in flight, and has deregistered all descriptors.
func loaded(t testing.TB) standIn {
	t.Helper()
	w := loadedToFail(t)
	testkit.VerifyNone(t)
	before := w.control.Counters()
	t.Cleanup(func() {
		after := w.control.Counters()
		if after.Destroyed != before.Destroyed || after.Crossed != before.Crossed {
			t.Errorf("%d rings or buffers were destroyed in flight, %d requests crossed blocks", after.Destroyed-before.Destroyed, after.Crossed-before.Crossed)
		}
		if after.Files != before.Files || after.Buffers != before.Buffers || after.Rings != before.Rings || after.InFlight != before.InFlight {
			t.Errorf("left behind: %+v, before: %+v", after, before)
		}
	})
	return w
}

// loadedToFail returns the library for a test after which rings, buffers and the library's copies of
// descriptors stay.
func loadedToFail(t testing.TB) standIn {
	t.Helper()
	testkit.Program(t, "gcc", "gcc")
	w := built()
	if w.err != nil {
		t.Fatal(w.err)
	}
	t.Cleanup(func() {
		w.control.Set(usrbiotest.Fault{})
		w.control.SetHoles(false)
	})
	return w
}

// volume returns a new directory on the mount.
func (w standIn) volume(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp(w.mount, "volume")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// open opens a device in a new directory.
func (w standIn) open(t testing.TB, o Options) *Device {
	t.Helper()
	o.Library = w.library
	d, err := Open(w.volume(t), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d.(*Device)
}

const always = 1 << 40

// await returns when the condition is true. It fails the test with the text missed after a minute.
func await(t testing.TB, missed string, condition func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for limit := time.After(time.Minute); !condition(); {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatal(missed)
		}
	}
}

func TestConformance(t *testing.T) {
	w := loaded(t)
	suite := func(t *testing.T, mount string, o Options) {
		o.Library = w.library
		blockiotest.Run(t, func(t *testing.T) blockiotest.Volume {
			dir, err := os.MkdirTemp(mount, "volume")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.RemoveAll(dir) })
			return blockiotest.Volume{Open: func() (blockio.Device, error) { return Open(dir, o) }}
		})
	}
	tiny := blockio.BudgetOptions{MinBytes: 2 * page, MaxBytes: 2 * page}
	for name, c := range map[string]struct {
		o     Options
		fault usrbiotest.Fault
		holes bool
	}{
		"default": {},
		"small":   {o: Options{Slots: 2, SlotBytes: 2 * page, Budget: tiny}},
		"short":   {o: Options{SlotBytes: 16 * page}, fault: usrbiotest.Fault{Kind: usrbiotest.Short, Count: always, Arg: 5*page + 100}, holes: true},
	} {
		t.Run(name, func(t *testing.T) {
			if name != "default" {
				testkit.Long(t, "the whole suite of blockio")
			}
			w.control.Set(c.fault)
			w.control.SetHoles(c.holes)
			suite(t, w.mount, c.o)
			w.control.Set(usrbiotest.Fault{})
			w.control.SetHoles(false)
		})
	}
	t.Run("mount", func(t *testing.T) {
		testkit.Long(t, "the whole suite of blockio on a FUSE mount")
		suite(t, usrbiotest.Mount(t), Options{})
	})
	if links := usrbiotest.Links(t, w.mount); len(links) != 0 {
		t.Errorf("registrations are left: %v", links)
	}
}

// TestShortCompletionsAreResumed shortens every transfer to an odd number of bytes.
func TestShortCompletionsAreResumed(t *testing.T) {
	w := loaded(t)
	d := w.open(t, Options{SlotBytes: 8 * page})
	f := blockiotest.Create(t, d, "f", 64*page)
	w.control.Set(usrbiotest.Fault{Kind: usrbiotest.Short, Count: always, Arg: page + 17})
	before := w.control.Counters().Faults
	want, got := blockiotest.Pattern(t, 20, 7), testkit.AlignedBuffer(t, 20*page)
	if err := blockiotest.One(t, d, blockio.Write, f, 4*page, want[:3*page], want[3*page:4*page], want[4*page:]); err != nil {
		t.Fatal(err)
	}
	if err := blockiotest.One(t, d, blockio.Read, f, 4*page, got[:page], got[page:9*page], got[9*page:]); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("after resumed transfers, the bytes differ from the written bytes")
	}
	// 20 pages in parts of 8, 8 and 4 pages take 20 transfers in each direction, 17 of them resumed.
	if s, n := d.Stats(), w.control.Counters().Faults-before; s.Resumed != 34 || n != 40 {
		t.Errorf("%d transfers were shortened and %d resumed; want 40 and 34", n, s.Resumed)
	}
}

// TestHoles: a read of a hole, at which 3FS ends a transfer, returns zeroes.
func TestHoles(t *testing.T) {
	w := loaded(t)
	w.control.SetHoles(true)
	d := w.open(t, Options{})
	f := blockiotest.Create(t, d, "f", 16*page)
	path := filepath.Join(d.Path(), "f")
	// A file that another process has made may have holes.
	if err := errors.Join(os.Truncate(path, 0), os.Truncate(path, 16*page)); err != nil {
		t.Fatal(err)
	}
	want, got := make([]byte, 16*page), blockiotest.Pattern(t, 16, 1)
	data := blockiotest.Pattern(t, 3, 2)
	for _, at := range []int64{2, 9} {
		if err := blockiotest.One(t, d, blockio.Write, f, at*page, data); err != nil {
			t.Fatal(err)
		}
		copy(want[at*page:], data)
	}
	if err := blockiotest.One(t, d, blockio.Read, f, 0, got); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("the bytes of a file with holes differ")
	}
}

// TestFailuresSurface: an error affects one request only, names that request, and is counted.
func TestFailuresSurface(t *testing.T) {
	for name, c := range map[string]struct {
		fault usrbiotest.Fault
		want  error
	}{
		"EIO":            {usrbiotest.Fault{Kind: usrbiotest.Errno, Arg: int64(unix.EIO), Count: 1}, unix.EIO},
		"ENOSPC":         {usrbiotest.Fault{Kind: usrbiotest.Errno, Arg: int64(unix.ENOSPC), Count: 1}, blockio.ErrNoSpace},
		"EDQUOT":         {usrbiotest.Fault{Kind: usrbiotest.Errno, Arg: int64(unix.EDQUOT), Count: 1}, blockio.ErrNoSpace},
		"EAGAIN forever": {usrbiotest.Fault{Kind: usrbiotest.Errno, Arg: int64(unix.EAGAIN), Count: always}, unix.EAGAIN},
		"full forever":   {usrbiotest.Fault{Kind: usrbiotest.Full, Count: always}, unix.EAGAIN},
	} {
		t.Run(name, func(t *testing.T) {
			w := loaded(t)
			d := w.open(t, Options{Slots: 4, SlotBytes: 2 * page})
			f := blockiotest.Create(t, d, "f", 8*page)
			c.fault.Writes = true
			w.control.Set(c.fault)
			got := testkit.AlignedBuffer(t, page)
			batch := []blockio.Request{
				{Op: blockio.Read, File: f, Bufs: [][]byte{got}},
				{Op: blockio.Write, File: f, Offset: 2 * page, Bufs: [][]byte{blockiotest.Pattern(t, 4, 1)}},
				{Op: blockio.Read, File: f, Offset: 7 * page, Bufs: [][]byte{got}},
			}
			if err := d.Do(t.Context(), batch); err != nil {
				t.Fatal(err)
			}
			if batch[0].Err != nil || batch[2].Err != nil {
				t.Errorf("requests beside the failed one: %v, %v", batch[0].Err, batch[2].Err)
			}
			err := batch[1].Err
			if !errors.Is(err, c.want) || !strings.Contains(err.Error(), "16384 bytes at 8192 of f") {
				t.Errorf("%v; want %v, naming the request", err, c.want)
			}
			if s := d.Stats(); s.ReadRequests != 2 || s.WriteFailures != 1 || s.ReadBytes != 2*page || s.InFlightBytes != 0 {
				t.Errorf("counted %+v; want 2 reads and a failed write", s)
			}
			w.control.Set(usrbiotest.Fault{})
			if err := blockiotest.One(t, d, blockio.Write, f, 2*page, blockiotest.Pattern(t, 4, 1)); err != nil {
				t.Errorf("after the fault: %v", err)
			}
		})
	}
}

// TestPassingErrorsAreRetried: a full ring and temporary errors are retried.
func TestPassingErrorsAreRetried(t *testing.T) {
	for name, fault := range map[string]usrbiotest.Fault{
		"full":       {Kind: usrbiotest.Full, After: 3, Count: 10},
		"EAGAIN":     {Kind: usrbiotest.Errno, Arg: int64(unix.EAGAIN), Count: 10},
		"EINTR":      {Kind: usrbiotest.Errno, Arg: int64(unix.EINTR), Count: 10},
		"wait EINTR": {Kind: usrbiotest.RefusedWait, Arg: int64(unix.EINTR), Count: 10},
	} {
		t.Run(name, func(t *testing.T) {
			w := loaded(t)
			d := w.open(t, Options{Slots: 4, SlotBytes: page})
			f := blockiotest.Create(t, d, "f", 64*page)
			want, got := blockiotest.Pattern(t, 64, 3), testkit.AlignedBuffer(t, 64*page)
			w.control.Set(fault)
			if err := errors.Join(blockiotest.One(t, d, blockio.Write, f, 0, want), blockiotest.One(t, d, blockio.Read, f, 0, got)); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Error("the bytes that were read differ from the written bytes")
			}
		})
	}
}

// TestCutFile: reading a file that another process truncates is an error and does not return
// zeroes.
func TestCutFile(t *testing.T) {
	d := loaded(t).open(t, Options{})
	f := blockiotest.Create(t, d, "f", 8*page)
	if err := os.Truncate(d.Path()+"/f", 2*page+100); err != nil {
		t.Fatal(err)
	}
	if err := blockiotest.One(t, d, blockio.Read, f, 0, testkit.AlignedBuffer(t, 4*page)); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("read beyond the cut: %v", err)
	}
}

// TestHugeBatch: a batch with more requests than the rings have entries, in both directions. No
// more requests than the entries are in flight.
func TestHugeBatch(t *testing.T) {
	w := loaded(t)
	d := w.open(t, Options{Slots: 4, SlotBytes: 2 * page})
	f := blockiotest.Create(t, d, "f", blockio.MaxBatch*page)
	g := blockiotest.Create(t, d, "g", blockio.MaxBatch*page)
	const n = blockio.MaxBatch / 2
	want, other := blockiotest.Pattern(t, n, 1), blockiotest.Pattern(t, n, 2)
	if err := blockiotest.One(t, d, blockio.Write, f, 0, want); err != nil {
		t.Fatal(err)
	}
	w.control.Set(usrbiotest.Fault{})
	batch := blockiotest.PageReads(t, f, n)
	for i := range n {
		batch = append(batch, blockio.Request{Op: blockio.Write, File: g, Offset: int64(i) * page, Bufs: [][]byte{other[i*page : (i+1)*page]}})
	}
	if err := d.Do(t.Context(), batch); err != nil {
		t.Fatal(err)
	}
	got := testkit.AlignedBuffer(t, n*page)
	if err := blockiotest.One(t, d, blockio.Read, g, 0, got); err != nil || !bytes.Equal(got, other) {
		t.Errorf("the written bytes differ: %v", err)
	}
	for i := range n {
		if err := errors.Join(batch[i].Err, batch[n+i].Err); err != nil || !bytes.Equal(batch[i].Bufs[0], want[i*page:(i+1)*page]) {
			t.Fatalf("page %d differs: %v", i, err)
		}
	}
	if peak := w.control.Counters().Peak; peak < 2 || peak > 8 {
		t.Errorf("at most %d requests were in flight; want 2 to 8", peak)
	}
}

// TestStuck: a request that does not complete keeps its Do, also after its context has ended, and
// no other. The buffers change only before Do returns, and Close waits.
func TestStuck(t *testing.T) {
	w := loaded(t)
	d := w.open(t, Options{Slots: 4, SlotBytes: page})
	f := blockiotest.Create(t, d, "f", 8*page)
	want := blockiotest.Pattern(t, 8, 5)
	if err := blockiotest.One(t, d, blockio.Write, f, 0, want); err != nil {
		t.Fatal(err)
	}
	before := w.control.Counters().Faults
	w.control.Set(usrbiotest.Fault{Kind: usrbiotest.Stuck, Reads: true, Count: 1})
	ctx, cancel := context.WithCancel(context.Background())
	batch := blockiotest.PageReads(t, f, 2)
	done := make(chan error, 1)
	go func() { done <- d.Do(ctx, batch) }()
	await(t, "no request is stuck", func() bool { return w.control.Counters().Faults > before })
	cancel()
	for i := range 20 { // more than there are slots
		if err := blockiotest.One(t, d, blockio.Read, f, int64(i%8)*page, testkit.AlignedBuffer(t, page)); err != nil {
			t.Fatal(err)
		}
		if err := blockiotest.One(t, d, blockio.Write, f, int64(i%8)*page, want[i%8*page:][:page]); err != nil {
			t.Fatal(err)
		}
	}
	closed := make(chan error, 1)
	go func() { closed <- d.Close() }()
	await(t, "the device does not close", func() bool {
		_, err := d.List()
		return errors.Is(err, blockio.ErrClosed)
	})
	select {
	case err := <-done:
		t.Errorf("Do returned %v while a request was in flight", err)
	case err := <-closed:
		t.Errorf("Close returned %v while a request was in flight", err)
	default:
	}
	w.control.Release(1)
	if err := errors.Join(<-done, <-closed, batch[0].Err, batch[1].Err); err != nil {
		t.Fatal(err)
	}
	for i, r := range batch {
		if !bytes.Equal(r.Bufs[0], want[i*page:(i+1)*page]) {
			t.Errorf("page %d differs", i)
		}
	}
}

// TestWaitingForABudget: a batch whose context ends while it waits behind stuck requests is not
// submitted.
func TestWaitingForABudget(t *testing.T) {
	w := loaded(t)
	d := w.open(t, Options{Slots: 4, SlotBytes: page, Budget: blockio.BudgetOptions{MinBytes: page, MaxBytes: page}})
	f := blockiotest.Create(t, d, "f", 2*page)
	before := w.control.Counters().Faults
	w.control.Set(usrbiotest.Fault{Kind: usrbiotest.Stuck, Count: 1})
	done := make(chan error, 1)
	first := blockiotest.PageReads(t, f, 1)
	go func() { done <- d.Do(context.Background(), first) }()
	await(t, "no request is stuck", func() bool { return w.control.Counters().Faults > before })
	prepared := w.control.Counters().Prepared
	ctx, cancel := context.WithCancel(context.Background())
	second := blockiotest.PageReads(t, f, 2)
	refused := make(chan error, 1)
	go func() { refused <- d.Do(ctx, second) }()
	cancel()
	if err := <-refused; !errors.Is(err, context.Canceled) {
		t.Errorf("a batch whose context ended: %v", err)
	}
	if n := w.control.Counters().Prepared; n != prepared {
		t.Errorf("%d requests of the refused batch were prepared", n-prepared)
	}
	w.control.Release(1)
	if err := errors.Join(<-done, first[0].Err); err != nil {
		t.Error(err)
	}
}

// TestCloseUnderLoad closes the device while slow batches are in flight: each one completes or is
// refused, and nothing is unmapped in flight.
func TestCloseUnderLoad(t *testing.T) {
	w := loaded(t)
	d := w.open(t, Options{Slots: 4, SlotBytes: 2 * page})
	f := blockiotest.Create(t, d, "f", 64*page)
	want := blockiotest.Pattern(t, 64, 4)
	if err := blockiotest.One(t, d, blockio.Write, f, 0, want); err != nil {
		t.Fatal(err)
	}
	w.control.Set(usrbiotest.Fault{Kind: usrbiotest.Slow, Count: always, Arg: 200})
	blockiotest.CloseUnderLoad(t, d, f, want, 6, 12)
}

// TestBrokenRing: after the library has failed in a way that leaves the requests in flight unknown,
// they and all later requests of that ring fail at once. The other ring works, Close returns, and
// the shared memory stays.
func TestBrokenRing(t *testing.T) {
	for name, fault := range map[string]usrbiotest.Fault{
		"wait":    {Kind: usrbiotest.RefusedWait, Reads: true, Count: 1, Arg: int64(unix.EIO)},
		"submit":  {Kind: usrbiotest.RefusedSubmit, Reads: true, Count: 1, Arg: int64(unix.EIO)},
		"slot":    {Kind: usrbiotest.Foreign, Count: 1, Arg: 1 << 20},
		"turn":    {Kind: usrbiotest.Foreign, Count: 1, Arg: 1 << 33},
		"no turn": {Kind: usrbiotest.Foreign, Count: 1, Arg: 1 << 32},
	} {
		t.Run(name, func(t *testing.T) {
			w := loadedToFail(t)
			w.mount = w.failing
			d := w.open(t, Options{Slots: 4, SlotBytes: page})
			f := blockiotest.Create(t, d, "f", 64*page)
			destroyed := w.control.Counters().Destroyed
			w.control.Set(fault)
			batch := blockiotest.PageReads(t, f, 64)
			if err := d.Do(t.Context(), batch); err != nil {
				t.Fatal(err)
			}
			failed := 0
			for _, r := range batch {
				if errors.Is(r.Err, errRing) {
					failed++
				} else if r.Err != nil {
					t.Errorf("%v", r.Err)
				}
			}
			if failed == 0 {
				t.Error("no request failed")
			}
			if err := blockiotest.One(t, d, blockio.Read, f, 0, testkit.AlignedBuffer(t, page)); !errors.Is(err, errRing) {
				t.Errorf("a later read: %v", err)
			}
			if err := blockiotest.One(t, d, blockio.Write, f, 0, blockiotest.Pattern(t, 1, 1)); err != nil {
				t.Errorf("a write on the other ring: %v", err)
			}
			if s := d.Stats(); s.InFlightBytes != 0 {
				t.Errorf("%d bytes are in flight", s.InFlightBytes)
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
			if n := w.control.Counters().Destroyed - destroyed; n != 0 {
				t.Errorf("%d rings or buffers were destroyed in flight", n)
			}
		})
	}
}

// TestTooManyBytes: a completion with more bytes than the request is an error.
func TestTooManyBytes(t *testing.T) {
	w := loaded(t)
	d := w.open(t, Options{})
	f := blockiotest.Create(t, d, "f", 4*page)
	w.control.Set(usrbiotest.Fault{Kind: usrbiotest.Long, Count: 1})
	if err := blockiotest.One(t, d, blockio.Read, f, 0, testkit.AlignedBuffer(t, page)); err == nil || !strings.Contains(err.Error(), "moved 8192 bytes of 4096") {
		t.Errorf("%v", err)
	}
}

// TestRefusals: a failure of a call that opens the device or a file is returned, and nothing is
// left.
func TestRefusals(t *testing.T) {
	w := loaded(t)
	dir := w.volume(t)
	for name, c := range map[string]struct {
		fault usrbiotest.Fault
		want  string
	}{
		"read ring":  {usrbiotest.Fault{Kind: usrbiotest.RefusedRing, Reads: true, Count: 1, Arg: int64(unix.ENOENT)}, "ring of 32 entries for " + w.mount},
		"write ring": {usrbiotest.Fault{Kind: usrbiotest.RefusedRing, Writes: true, Count: 1, Arg: int64(unix.ENOENT)}, "ring of 32 entries for " + w.mount},
		"memory":     {usrbiotest.Fault{Kind: usrbiotest.RefusedIOV, After: 2, Count: 1, Arg: int64(unix.EIO)}, "33554432 bytes of shared memory"},
	} {
		w.control.Set(c.fault)
		if _, err := Open(dir, Options{Library: w.library}); !errors.Is(err, unix.Errno(c.fault.Arg)) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", name, err, c.want)
		}
	}
	w.control.Set(usrbiotest.Fault{})
	d := w.open(t, Options{})
	w.control.Set(usrbiotest.Fault{Kind: usrbiotest.RefusedFD, Count: 1, Arg: int64(unix.EINVAL)})
	if _, err := d.Create("a", page); !errors.Is(err, unix.EINVAL) || !strings.Contains(err.Error(), "register a descriptor") {
		t.Errorf("create: %v", err)
	}
	if names, err := d.List(); err != nil || len(names) != 0 {
		t.Errorf("files %v, %v", names, err)
	}
}

// TestNumbersOfDescriptors: a descriptor's number can be used again for another file.
func TestNumbersOfDescriptors(t *testing.T) {
	d := loaded(t).open(t, Options{})
	got := testkit.AlignedBuffer(t, page)
	for i := range 20 {
		name := fmt.Sprintf("f%d", i%3)
		f := blockiotest.Create(t, d, name, page)
		want := blockiotest.Pattern(t, 1, byte(i))
		if err := errors.Join(blockiotest.One(t, d, blockio.Write, f, 0, want), blockiotest.One(t, d, blockio.Read, f, 0, got)); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("file %d: %v", i, err)
		}
		if err := errors.Join(f.Close(), d.Remove(name)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestTwoDevices: two devices of one process are independent.
func TestTwoDevices(t *testing.T) {
	w := loaded(t)
	a, err := arena.New(arena.Options{SizeBytes: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	var wg sync.WaitGroup
	for g := range 2 {
		d := w.open(t, Options{Slots: 4, SlotBytes: 4 * page})
		mem := a.Bytes()[g*(2<<20):][:2<<20] // huge pages of an arena
		wg.Go(func() {
			f, err := d.Create("f", 1<<20)
			if err != nil {
				t.Error(err)
				return
			}
			want, got := mem[:1<<20], mem[1<<20:]
			for round := range 20 {
				for i := range want {
					want[i] = byte(i>>8+i) ^ byte(round*2+g)
				}
				for op, b := range map[blockio.Op][]byte{blockio.Write: want} {
					batch := []blockio.Request{{Op: op, File: f, Bufs: [][]byte{b}}}
					if err := errors.Join(d.Do(context.Background(), batch), batch[0].Err); err != nil {
						t.Error(err)
					}
				}
				batch := []blockio.Request{{Op: blockio.Read, File: f, Bufs: [][]byte{got}}}
				if err := errors.Join(d.Do(context.Background(), batch), batch[0].Err); err != nil || !bytes.Equal(got, want) {
					t.Errorf("device %d, round %d: %v", g, round, err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// TestMissing: the error names the missing library or function.
func TestMissing(t *testing.T) {
	w := loaded(t)
	for name, c := range map[string]struct{ dir, library, want string }{
		"library":      {w.mount, "libhf3fs-that-is-not-there.so", "libhf3fs-that-is-not-there.so"},
		"functions":    {w.mount, "libc.so.6", "libc.so.6 has no hf3fs_extract_mount_point"},
		"mount of 3FS": {t.TempDir(), w.library, "not on a mount of 3FS"},
	} {
		_, err := Open(c.dir, Options{Library: c.library})
		if !errors.Is(err, blockio.ErrUnsupported) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", name, err, c.want)
		}
		if ok, why := Probe(c.dir, Options{Library: c.library}); ok || !strings.Contains(why, c.want) {
			t.Errorf("%s: probe %t, %q", name, ok, why)
		}
	}
	if ok, why := Probe("/nonexistent", Options{Library: w.library}); ok || !strings.Contains(why, "/nonexistent") {
		t.Errorf("probe of a directory that does not exist: %t, %q", ok, why)
	}
	if ok, why := Probe(w.mount, Options{Library: w.library}); !ok {
		t.Errorf("probe: %s", why)
	}
	entries, err := os.ReadDir(w.mount)
	if err != nil || len(entries) != 1 {
		t.Errorf("the probes left %v, %v", entries, err)
	}
	w.control.Set(usrbiotest.Fault{Kind: usrbiotest.Errno, Count: always, Arg: int64(unix.EIO)})
	if ok, why := Probe(w.mount, Options{Library: w.library}); ok || !strings.Contains(why, "input/output error") {
		t.Errorf("probe of a failing ring: %t, %q", ok, why)
	}
}

// TestInfo: Info has the mount and the memory.
func TestInfo(t *testing.T) {
	w := loaded(t)
	i := w.open(t, Options{Slots: 3, SlotBytes: 2 * page}).Info()
	if i.Backend != "usrbio" || !i.Direct || i.Volatile || i.Detail != "3FS at "+w.mount+"; rings of 3 reads and 3 writes, 8192 bytes each through shared memory" {
		t.Errorf("%+v", i)
	}
}

// childVolume is the environment variable with the volume of a child of TestProcessEnds.
const childVolume, childEnd = "PENSTOCK_TEST_USRBIO_VOLUME", "PENSTOCK_TEST_USRBIO_END"

// TestProcessEnds: no shared memory has a name while a device is open, so none is left when the
// process is killed, or ends without a Close. The registrations of the process are removed.
func TestProcessEnds(t *testing.T) {
	if dir := os.Getenv(childVolume); dir != "" {
		child(t, dir)
		return
	}
	w := loaded(t)
	before := w.control.Counters()
	for _, end := range []string{"kill", "exit", "close"} {
		dir := w.volume(t)
		cmd := exec.Command(os.Args[0], "-test.run=^TestProcessEnds$")
		cmd.Env = append(os.Environ(), childVolume+"="+dir, childEnd+"="+end, "LD_LIBRARY_PATH="+w.dir, "STANDIN_HF3FS_CONTROL=")
		stdin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		await(t, "the child is not ready", func() bool {
			_, err := os.Stat(filepath.Join(dir, "READY"))
			return err == nil
		})
		if links := usrbiotest.Links(t, w.mount); len(links) != 3 {
			t.Errorf("two rings and a buffer have the registrations %v", links)
		}
		if shared := usrbiotest.Shared(t, w.mount); len(shared) != 0 {
			t.Errorf("shared memory has names while the device is open: %v", shared)
		}
		if end == "kill" {
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
		stdin.Close()
		if err := cmd.Wait(); (err == nil) != (end != "kill") {
			t.Errorf("%s: %v", end, err)
		}
		await(t, "registrations are left", func() bool { return len(usrbiotest.Links(t, w.mount)) == 0 })
	}
	if after := w.control.Counters(); after != before {
		t.Errorf("the children used the control of the parent")
	}
}

// child opens a device and ends in the way that its parent wants, after the parent has closed the
// standard input.
func child(t *testing.T, dir string) {
	d, err := Open(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	f := blockiotest.Create(t, d, "f", page)
	if err := blockiotest.One(t, d, blockio.Write, f, 0, blockiotest.Pattern(t, 1, 1)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "READY"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(os.Stdin); err != nil {
		t.Fatal(err)
	}
	if os.Getenv(childEnd) == "exit" {
		os.Exit(0)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
}
