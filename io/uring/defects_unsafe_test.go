//go:build uring

package uring

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"github.com/pawelgaczynski/giouring"
	"golang.org/x/sys/unix"
)

// Each test of this file shows one known defect of giouring, and how ring_unsafe.go avoids it. When
// a test fails because the defect was fixed, the work-around can be removed.

// newTestRing returns a ring with the given number of entries; with one entry, each request reuses
// it.
func newTestRing(t *testing.T, entries int) *ring {
	t.Helper()
	requireRings(t)
	r, err := newRing(entries)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.close)
	return r
}

// result submits the prepared entry and returns the result of its completion. A signal may end the
// wait after the submission: then io_uring_enter returns without an error and without a completion.
func (r *ring) result(t *testing.T) int32 {
	t.Helper()
	var res int32
	var n uint32
	for n == 0 {
		if err := r.enter(1); err != nil {
			t.Fatal(err)
		}
		n = r.reap(func(_ uint64, got int32) { res = got })
	}
	if n != 1 {
		t.Fatalf("%d completions; want 1", n)
	}
	return res
}

// textFile returns an open file with the given content.
func textFile(t *testing.T, content string) *os.File {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// Defect 1: go:linkname to syscall.mmap and syscall.munmap, which the linker of
// Go 1.23 and later refuses without -checklinkname=0.
func TestDefectLinkname(t *testing.T) {
	goTool, err := exec.LookPath("go")
	if err != nil {
		skipWithout(t, fmt.Sprintf("the go command in PATH, to link a program: %v", err))
	}
	cmd := exec.CommandContext(t.Context(), goTool, "test", "-c", "-tags", "uring", "-o", filepath.Join(t.TempDir(), "x"), ".")
	cmd.Env = append(os.Environ(), "GOFLAGS=")
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "invalid reference to syscall.m") {
		t.Errorf("linking without -checklinkname=0: %v\n%s", err, out)
	}
}

// Defect 2: prepareRW does not reset rw_flags, addr3 and the padding from an entry's last use.
func TestDefectStaleEntry(t *testing.T) {
	f := textFile(t, "content")
	buf := make([]byte, 7)
	use := func(r *ring, next func() *giouring.SubmissionQueueEntry) int32 {
		e := next()
		e.PrepareFsync(int(f.Fd()), giouring.FsyncDatasync)
		e.OpcodeFlags |= 1 << 30 // a flag that is invalid for a read
		r.result(t)
		e = next()
		prepareSpan(e, false, int(f.Fd()), buf, 0, -1)
		return r.result(t)
	}
	bare, shim := newTestRing(t, 1), newTestRing(t, 1)
	if got := use(bare, bare.g.GetSQE); got >= 0 {
		t.Errorf("a read on a used entry: %d; the defect is gone", got)
	}
	if got := use(shim, shim.next); got != 7 || string(buf) != "content" {
		t.Errorf("through the shim: %d, %q", got, buf)
	}
}

// readFixed reads through a registered file.
func readFixed(t *testing.T, r *ring, index int, buf []byte) int32 {
	e := r.next()
	prepareSpan(e, false, index, buf, 0, -1)
	e.Flags |= giouring.SqeFixedFile
	return r.result(t)
}

// registerFiles registers descriptors, as s32, under their indices. The device does not use them:
// BenchmarkRegisteredFile shows no gain.
func (r *ring) registerFiles(fds []int32) error {
	return r.register(giouring.RegisterFiles, unsafe.Pointer(unsafe.SliceData(fds)), len(fds))
}

// Defect 3: RegisterFiles passes 64-bit ints where the kernel reads s32, so index 1 is the upper
// half of the first value: descriptor 0.
func TestDefectRegisterFilesWidth(t *testing.T) {
	a, b := textFile(t, "first"), textFile(t, "other")
	buf := make([]byte, 5)
	bare := newTestRing(t, 1)
	if _, err := bare.g.RegisterFiles([]int{int(a.Fd()), int(b.Fd())}); err != nil {
		t.Fatal(err)
	}
	if got := readFixed(t, bare, 1, buf); got == 5 && string(buf) == "other" {
		t.Error("index 1 is the second file; the defect is gone")
	}
	shim := newTestRing(t, 1)
	if err := shim.registerFiles([]int32{int32(a.Fd()), int32(b.Fd())}); err != nil {
		t.Fatal(err)
	}
	if got := readFixed(t, shim, 1, buf); got != 5 || string(buf) != "other" {
		t.Errorf("through the shim: %d, %q", got, buf)
	}
}

// Defect 4: RegisterFiles returns an error of the kernel as a large number and a nil error.
func TestDefectRegisterResult(t *testing.T) {
	r := newTestRing(t, 1)
	if n, err := r.g.RegisterFiles([]int{1 << 30}); err != nil || n < 1<<63 {
		t.Errorf("registering a descriptor that is not open: %d, %v; the defect is gone", n, err)
	}
	if err := r.registerFiles([]int32{1 << 30}); !errors.Is(err, unix.EBADF) {
		t.Errorf("through the shim: %v; want EBADF", err)
	}
}

// Defect 5: Openat and others pass the address of the slice's header.
func TestDefectSliceHeader(t *testing.T) {
	f := textFile(t, "content")
	path := append([]byte(f.Name()), 0)
	r := newTestRing(t, 1)
	e := r.next()
	e.PrepareOpenat(unix.AT_FDCWD, path, unix.O_RDONLY, 0)
	if got := r.result(t); got >= 0 {
		unix.Close(int(got))
		t.Errorf("openat: descriptor %d; the defect is gone", got)
	}
	e = r.next()
	e.PrepareOpenat(unix.AT_FDCWD, path, unix.O_RDONLY, 0)
	e.Addr = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(path))))
	got := r.result(t)
	if got < 0 {
		t.Fatalf("with the address set by hand: %v", unix.Errno(-got))
	}
	unix.Close(int(got))
}

// Defect 6: PrepareTimeout passes the address of a local pointer to the time.
func TestDefectTimeout(t *testing.T) {
	r := newTestRing(t, 1)
	ts := &unix.Timespec{Nsec: 1}
	at := uint64(uintptr(unsafe.Pointer(ts)))
	e := r.next()
	e.PrepareTimeout((*syscall.Timespec)(unsafe.Pointer(ts)), 0, 0)
	if e.Addr == at {
		t.Error("the entry points to the time; the defect is gone")
	}
	e.Addr = at
	if got := r.result(t); unix.Errno(-got) != unix.ETIME {
		t.Errorf("with the address set by hand: %d; want ETIME", got)
	}
}

// Defect 7: UnregisterRingFd refuses exactly the ring that was registered.
func TestDefectUnregisterRingFd(t *testing.T) {
	r := newTestRing(t, 1)
	if _, err := r.g.RegisterRingFd(); err != nil {
		t.Fatal(err)
	}
	if _, err := r.g.UnregisterRingFd(); !errors.Is(err, unix.EINVAL) {
		t.Errorf("unregister: %v; the defect is gone", err)
	}
}

// Defect 8: the fields of Params are private, so neither the features nor the sizes that the kernel
// chose can be read. The type params can read them.
func TestDefectPrivateParams(t *testing.T) {
	p := params{}
	g := giouring.NewRing()
	if err := g.QueueInitParams(3, (*giouring.Params)(unsafe.Pointer(&p))); err != nil {
		t.Fatal(err)
	}
	g.QueueExit()
	if p.sqEntries != 4 || p.cqEntries != 8 || p.features&featuresNeeded != featuresNeeded {
		t.Errorf("the mirror reads %+v; want 4 and 8 entries and the features", p)
	}
}

// Defect 9: some calls have wrong widths or operations. RegisterIOWQMaxWorkers passes two u64
// instead of two u32, so the kernel never gets the second bound.
func TestDefectWidths(t *testing.T) {
	bounds := func(r *ring, set [2]uint32) [2]uint32 {
		if err := r.register(giouring.RegisterIOWQMaxWorkers, unsafe.Pointer(&set), 2); err != nil {
			t.Fatal(err)
		}
		return set // the kernel returns the previous bounds in set; 0 changes nothing
	}
	runtime.LockOSThread() // the bounds belong to the thread, not to the ring
	defer runtime.UnlockOSThread()
	bare := newTestRing(t, 1)
	bounds(bare, [2]uint32{7, 7})
	if _, err := bare.g.RegisterIOWQMaxWorkers([]uint{3, 5}); err != nil {
		t.Fatal(err)
	}
	if got := bounds(bare, [2]uint32{}); got[1] == 5 {
		t.Errorf("bounds %v; the defect is gone", got)
	}
	shim := newTestRing(t, 1)
	bounds(shim, [2]uint32{3, 5})
	if got := bounds(shim, [2]uint32{}); got != [2]uint32{3, 5} {
		t.Errorf("through the shim: %v", got)
	}
}
