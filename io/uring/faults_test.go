//go:build uring

package uring

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/blockiotest"
)

const page = blockio.Align

// ways returns the options under which every test of this file runs.
func ways(o Options) map[string]Options {
	shared, auto := o, o
	shared.Wait = WaitShared
	auto.Wait, auto.AutoThreshold = WaitAuto, 1
	return map[string]Options{"caller": o, "shared": shared, "auto": auto}
}

// eachWay runs f on a device opened each way.
func eachWay(t *testing.T, o Options, f func(t *testing.T, d *Device)) {
	requireRings(t)
	for name, o := range ways(o) {
		t.Run(name, func(t *testing.T) { f(t, openDevice(t, t.TempDir(), o)) })
	}
}

func openDevice(t testing.TB, dir string, o Options) *Device {
	t.Helper()
	d, err := Open(dir, o)
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

// TestShortCompletionsAreResumed shortens every transfer longer than a page to an
// odd number of bytes.
func TestShortCompletionsAreResumed(t *testing.T) {
	var shortened atomic.Uint64
	eachWay(t, Options{Hook: func(_ blockio.Op, _ string, _ int64, n int, err error) (int, error) {
		if n > page {
			shortened.Add(1)
			return n/2 + 1, err
		}
		return n, err
	}}, func(t *testing.T, d *Device) {
		before := shortened.Load()
		f := blockiotest.Create(t, d, "f", 64*page)
		want := blockiotest.Pattern(t, 20, 7)
		if err := blockiotest.One(t, d, blockio.Write, f, 4*page, want[:3*page], want[3*page:4*page], want[4*page:]); err != nil {
			t.Fatal(err)
		}
		got := testkit.AlignedBuffer(t, 20*page)
		if err := blockiotest.One(t, d, blockio.Read, f, 4*page, got); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Error("after a resumed write or read, the bytes differ from the written bytes")
		}
		clear(got)
		if err := blockiotest.One(t, d, blockio.Read, f, 4*page, got[:page], got[page:9*page], got[9*page:]); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Error("after a resumed scattered read, the bytes differ from the written bytes")
		}
		if n, resumed := shortened.Load()-before, d.Stats().Resumed; n == 0 || n != resumed {
			t.Errorf("%d transfers were shortened, %d resumed", n, resumed)
		}
	})
}

// TestPassingErrorsAreRetried fails each request a few times before letting it pass.
func TestPassingErrorsAreRetried(t *testing.T) {
	var n atomic.Int64
	eachWay(t, Options{Hook: func(_ blockio.Op, _ string, _ int64, moved int, err error) (int, error) {
		switch n.Add(1) % 4 {
		case 1:
			return 0, unix.EAGAIN
		case 2:
			return 0, unix.EINTR
		case 3:
			return 0, unix.ECANCELED
		}
		return moved, err
	}}, func(t *testing.T, d *Device) {
		f := blockiotest.Create(t, d, "f", 16*page)
		want, got := blockiotest.Pattern(t, 16, 1), testkit.AlignedBuffer(t, 16*page)
		if err := errors.Join(blockiotest.One(t, d, blockio.Write, f, 0, want), blockiotest.One(t, d, blockio.Read, f, 0, got)); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Error("the bytes that were read differ from the written bytes")
		}
	})
}

// TestFailuresSurface: an error affects one request only, names that request, and is counted.
func TestFailuresSurface(t *testing.T) {
	for _, c := range []struct {
		name   string
		answer func() (int, error)
		want   error
	}{
		{"EIO", func() (int, error) { return 0, unix.EIO }, unix.EIO},
		{"ENOSPC", func() (int, error) { return 0, unix.ENOSPC }, blockio.ErrNoSpace},
		{"EDQUOT", func() (int, error) { return 0, unix.EDQUOT }, blockio.ErrNoSpace},
		{"EAGAIN for ever", func() (int, error) { return 0, unix.EAGAIN }, unix.EAGAIN},
		{"nothing for ever", func() (int, error) { return 0, nil }, io.ErrUnexpectedEOF},
	} {
		t.Run(c.name, func(t *testing.T) {
			eachWay(t, Options{Hook: func(op blockio.Op, name string, _ int64, n int, err error) (int, error) {
				if name == "bad" {
					return c.answer()
				}
				return n, err
			}}, func(t *testing.T, d *Device) {
				good, bad := blockiotest.Create(t, d, "good", 4*page), blockiotest.Create(t, d, "bad", 4*page)
				batch := []blockio.Request{
					{Op: blockio.Read, File: good, Bufs: [][]byte{testkit.AlignedBuffer(t, page)}},
					{Op: blockio.Read, File: bad, Offset: 2 * page, Bufs: [][]byte{testkit.AlignedBuffer(t, page)}},
					{Op: blockio.Read, File: good, Offset: page, Bufs: [][]byte{testkit.AlignedBuffer(t, page)}},
				}
				if err := d.Do(t.Context(), batch); err != nil {
					t.Fatal(err)
				}
				if batch[0].Err != nil || batch[2].Err != nil {
					t.Errorf("requests beside the failed one: %v, %v", batch[0].Err, batch[2].Err)
				}
				err := batch[1].Err
				if !errors.Is(err, c.want) || !strings.Contains(err.Error(), "4096 bytes at 8192 of bad") {
					t.Errorf("%v; want %v, naming the request", err, c.want)
				}
				if s := d.Stats(); s.ReadRequests != 3 || s.ReadFailures != 1 || s.ReadBytes != 2*page {
					t.Errorf("counted %+v; want 3 reads, 1 failed, 2 pages", s)
				}
			})
		})
	}
}

// TestCutFile: reading a file that another process truncates is an error and does not return
// zeroes.
func TestCutFile(t *testing.T) {
	eachWay(t, Options{}, func(t *testing.T, d *Device) {
		f := blockiotest.Create(t, d, "f", 8*page)
		if err := os.Truncate(d.Path()+"/f", 2*page); err != nil {
			t.Fatal(err)
		}
		if err := blockiotest.One(t, d, blockio.Read, f, 0, testkit.AlignedBuffer(t, 4*page)); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("read beyond the cut: %v", err)
		}
	})
}

// hookPool makes every ring of the pool, also later ones, enter the kernel through hook.
func (e *engine) hookPool(hook func() error) {
	made := e.callers.make
	e.callers.make = func() (*caller, error) {
		c, err := made()
		if c != nil {
			c.ring.enterHook = hook
		}
		return c, err
	}
	for c := e.callers.pop(); c != nil; c = e.callers.pop() {
		c.ring.close()
	}
}

// hookShared makes the shared ring enter the kernel through hook.
func (e *engine) hookShared(hook func() error) {
	e.shared.mu.Lock()
	defer e.shared.mu.Unlock()
	e.shared.ring.enterHook = hook
}

// TestShortageInTheKernel: EINTR, EAGAIN and EBUSY of the submitting call are retried.
func TestShortageInTheKernel(t *testing.T) {
	eachWay(t, Options{Entries: 4, SharedEntries: 4}, func(t *testing.T, d *Device) {
		var n atomic.Int64
		hook := func() error {
			return []error{unix.EINTR, unix.EAGAIN, unix.EBUSY, nil}[n.Add(1)%4]
		}
		d.engine.hookPool(hook)
		if d.engine.shared != nil {
			d.engine.hookShared(hook)
		}
		f := blockiotest.Create(t, d, "f", 64*page)
		want := blockiotest.Pattern(t, 64, 3)
		if err := blockiotest.One(t, d, blockio.Write, f, 0, want); err != nil {
			t.Fatal(err)
		}
		batch := blockiotest.PageReads(t, f, 64)
		if err := d.Do(t.Context(), batch); err != nil {
			t.Fatal(err)
		}
		for i, r := range batch {
			if r.Err != nil || !bytes.Equal(r.Bufs[0], want[i*page:(i+1)*page]) {
				t.Fatalf("page %d: %v", i, r.Err)
			}
		}
	})
}

// TestRefusedRing: when the kernel refuses a ring permanently in the middle of a batch, accepted
// requests complete, the others fail, nothing stays in flight, and the next batch gets another
// ring.
func TestRefusedRing(t *testing.T) {
	eachWay(t, Options{Entries: 4, SharedEntries: 4}, func(t *testing.T, d *Device) {
		f := blockiotest.Create(t, d, "f", 64*page)
		want := blockiotest.Pattern(t, 64, 9)
		if err := blockiotest.One(t, d, blockio.Write, f, 0, want); err != nil {
			t.Fatal(err)
		}
		var n atomic.Int64
		hook := func() error {
			if n.Add(1) == 3 {
				return unix.EBADF
			}
			return nil
		}
		if d.engine.opts.Wait == WaitShared {
			d.engine.hookShared(hook)
		} else {
			d.engine.hookPool(hook)
		}
		batch := blockiotest.PageReads(t, f, 64)
		if err := d.Do(t.Context(), batch); err != nil {
			t.Fatal(err)
		}
		failed := 0
		for i, r := range batch {
			switch {
			case r.Err != nil:
				failed++
				if !errors.Is(r.Err, unix.EBADF) {
					t.Errorf("page %d: %v; want EBADF", i, r.Err)
				}
			case !bytes.Equal(r.Bufs[0], want[i*page:(i+1)*page]):
				t.Errorf("page %d differs from the written bytes", i)
			}
		}
		if failed == 0 || failed == 64 {
			t.Errorf("%d of 64 failed; want some, and some done before", failed)
		}
		if got := d.Stats().InFlightBytes; got != 0 {
			t.Errorf("%d bytes still in flight", got)
		}
		again := blockiotest.PageReads(t, f, 64)
		if err := d.Do(t.Context(), again); err != nil {
			t.Fatal(err)
		}
		for i, r := range again {
			if r.Err != nil {
				t.Fatalf("page %d of the next batch: %v", i, r.Err)
			}
		}
	})
}

// TestNoMoreRings: if no ring can be made, the batch is refused, and the pool loses no ticket.
func TestNoMoreRings(t *testing.T) {
	requireRings(t)
	d := openDevice(t, t.TempDir(), Options{Rings: 1})
	f := blockiotest.Create(t, d, "f", page)
	d.engine.hookPool(nil)
	made := d.engine.callers.make
	d.engine.callers.make = func() (*caller, error) { return nil, unix.EMFILE }
	for range 3 {
		if err := d.Do(t.Context(), blockiotest.PageReads(t, f, 1)); !errors.Is(err, unix.EMFILE) {
			t.Fatalf("%v; want EMFILE", err)
		}
	}
	d.engine.callers.make = made
	if err := blockiotest.One(t, d, blockio.Read, f, 0, testkit.AlignedBuffer(t, page)); err != nil {
		t.Error(err)
	}
}

// TestRegions reads into registered memory, beside it, and across the boundary of
// two registered buffers.
func TestRegions(t *testing.T) {
	a, err := arena.New(arena.Options{SizeBytes: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	mem := a.Bytes()
	half := len(mem) / 2
	eachWay(t, Options{Regions: [][]byte{mem[:half], mem[half:]}}, func(t *testing.T, d *Device) {
		if !strings.Contains(d.Info().Detail, "buffers registered") {
			skipWithout(t, fmt.Sprintf("registered buffers: ulimit -l of at least %d KiB, or CAP_IPC_LOCK (%s)", len(mem)>>10, d.Info().Detail))
		}
		f := blockiotest.Create(t, d, "f", 64*page)
		want := blockiotest.Pattern(t, 64, 5)
		copy(mem, want)
		if err := blockiotest.One(t, d, blockio.Write, f, 0, mem[:64*page]); err != nil {
			t.Fatal(err)
		}
		for _, got := range [][]byte{
			mem[half+page:][:64*page],         // inside the second region
			mem[half-8*page:][:64*page],       // across both regions
			testkit.AlignedBuffer(t, 64*page), // not registered
		} {
			clear(got)
			if err := blockiotest.One(t, d, blockio.Read, f, 0, got); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Error("the bytes that were read differ from the written bytes")
			}
		}
	})
}

func TestChunks(t *testing.T) {
	big := make([]byte, 0)
	if got := chunks([][]byte{big}); len(got) != 0 {
		t.Errorf("an empty region gave %d buffers", len(got))
	}
	mem, err := unix.Mmap(-1, 0, regionMax+page, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	got := chunks([][]byte{mem})
	if len(got) != 2 || len(got[0]) != regionMax || len(got[1]) != page {
		t.Errorf("a region of 1 GiB and a page gave %d buffers", len(got))
	}
}

// TestThreadsEnd: threads of goroutines that are locked to them end while requests are in flight.
// No request is lost.
func TestThreadsEnd(t *testing.T) {
	eachWay(t, Options{Entries: 8, SharedEntries: 8}, func(t *testing.T, d *Device) {
		f := blockiotest.Create(t, d, "f", 64*page)
		want := blockiotest.Pattern(t, 64, 2)
		if err := blockiotest.One(t, d, blockio.Write, f, 0, want); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for range 32 {
			batch := blockiotest.PageReads(t, f, 64)
			wg.Go(func() {
				runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
				if err := d.Do(context.Background(), batch); err != nil {
					t.Error(err)
				}
				for i, r := range batch {
					if r.Err != nil || !bytes.Equal(r.Bufs[0], want[i*page:(i+1)*page]) {
						t.Errorf("page %d: %v", i, r.Err)
					}
				}
			})
		}
		wg.Wait()
	})
}

// TestCloseUnderLoad closes the device while batches of all sizes are in progress: each one
// completes or is refused.
func TestCloseUnderLoad(t *testing.T) {
	eachWay(t, Options{Entries: 8, SharedEntries: 16}, func(t *testing.T, d *Device) {
		f := blockiotest.Create(t, d, "f", 64*page)
		want := blockiotest.Pattern(t, 64, 4)
		if err := blockiotest.One(t, d, blockio.Write, f, 0, want); err != nil {
			t.Fatal(err)
		}
		blockiotest.CloseUnderLoad(t, d, f, want, 8, 100)
	})
}

func TestProbe(t *testing.T) {
	requireRings(t)
	if ok, why := Probe(t.TempDir()); !ok {
		t.Error(why)
	}
	if ok, why := Probe("/nonexistent"); ok || !strings.Contains(why, "/nonexistent") {
		t.Errorf("a directory that does not exist: %t, %q", ok, why)
	}
}

func TestExplain(t *testing.T) {
	for errno, want := range map[unix.Errno]string{
		unix.EPERM:  "refused by",
		unix.ENOSYS: "no io_uring",
		unix.ENOMEM: "ulimit -l",
		unix.EINVAL: "invalid",
	} {
		err := explain(fmt.Errorf("io_uring_setup: %w", errno))
		if !errors.Is(err, blockio.ErrUnsupported) || !errors.Is(err, errno) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v; want %q", errno, err, want)
		}
	}
}

// TestDoAllocatesNothing: tables of requests are reused and completions are values. An escaping
// closure, or a new batch, would allocate.
func TestDoAllocatesNothing(t *testing.T) {
	if invariants.Enabled {
		t.Skip("checks of builds with the tag invariants allocate")
	}
	requireRings(t)
	for name, o := range ways(Options{}) {
		t.Run(name, func(t *testing.T) {
			d := openDevice(t, t.TempDir(), o)
			batch := blockiotest.PageReads(t, blockiotest.Create(t, d, "f", 16*page), 16)
			if n := testing.AllocsPerRun(100, func() {
				if err := d.Do(context.Background(), batch); err != nil {
					t.Fatal(err)
				}
			}); n != 0 {
				t.Errorf("%v allocations per batch of 16; want 0", n)
			}
		})
	}
}
