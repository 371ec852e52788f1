//go:build uring

package uring

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/blockiotest"
)

// kernelDir and kernelName are set for the processes that TestOtherKernels starts.
const (
	kernelDir  = "PENSTOCK_TEST_KERNEL_DIR"
	kernelName = "PENSTOCK_TEST_KERNEL"
)

// otherKernel is a seccomp filter that fails system calls as another kernel or a container does,
// with a check of the package's behaviour under the filter.
type otherKernel struct {
	name   string
	filter []unix.SockFilter
	check  func(t *testing.T, dir string)
}

const (
	ioUringSetup    = 425 // on every architecture
	ioUringRegister = 427
)

func otherKernels() []otherKernel {
	const argument1 = 24 // offset of seccomp_data.args[1], lower half
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	unless := func(value uint32, skip uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: value, Jf: skip}
	}
	answer := func(errno unix.Errno) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(errno)}
	}
	allow := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW}
	setup := func(errno unix.Errno) []unix.SockFilter {
		return []unix.SockFilter{load(0), unless(ioUringSetup, 1), answer(errno), allow}
	}
	return []otherKernel{
		{"container's default filter", setup(unix.EPERM), func(t *testing.T, dir string) { checkRefused(t, dir, unix.EPERM, "seccomp") }},
		{"before 5.1", setup(unix.ENOSYS), func(t *testing.T, dir string) { checkRefused(t, dir, unix.ENOSYS, "no io_uring") }},
		{"before 5.18", setup(unix.EINVAL), func(t *testing.T, dir string) { checkRefused(t, dir, unix.EINVAL, "SUBMIT_ALL") }},
		{"before 6.12", []unix.SockFilter{load(0), unless(ioUringRegister, 3), load(argument1), unless(registerCloneBuffers, 1), answer(unix.EINVAL), allow}, checkNoCloning},
	}
}

// TestOtherKernels starts this test again under each filter.
func TestOtherKernels(t *testing.T) {
	for _, k := range otherKernels() {
		if os.Getenv(kernelName) == k.name {
			if err := install(k.filter); err != nil {
				t.Fatal(err)
			}
			k.check(t, os.Getenv(kernelDir))
			return
		}
	}
	requireRings(t)
	for _, k := range otherKernels() {
		t.Run(k.name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestOtherKernels$", "-test.v")
			cmd.Env = append(os.Environ(), kernelDir+"="+t.TempDir(), kernelName+"="+k.name)
			out, err := cmd.CombinedOutput()
			if err != nil || !strings.Contains(string(out), "--- PASS: TestOtherKernels") {
				t.Errorf("under the filter: %v\n%s", err, out)
			}
		})
	}
}

// checkRefused requires that neither Probe nor Open makes a ring, and that both name
// the reason.
func checkRefused(t *testing.T, dir string, errno unix.Errno, reason string) {
	ok, why := Probe(dir)
	if ok || !strings.Contains(why, reason) {
		t.Errorf("Probe = %t, %q; want %q as the reason", ok, why, reason)
	}
	d, err := Open(dir, Options{})
	if d != nil || !errors.Is(err, blockio.ErrUnsupported) || !errors.Is(err, errno) {
		t.Errorf("Open = %v, %v; want ErrUnsupported and %v", d, err, errno)
	}
}

// checkNoCloning requires that some rings register the regions, that the others work
// without a registration, and that Info reports it.
func checkNoCloning(t *testing.T, dir string) {
	if ok, why := Probe(dir); !ok {
		t.Errorf("Probe: %s", why)
	}
	mem := testkit.AlignedBuffer(t, 8*page)
	d := openDevice(t, dir, Options{Regions: [][]byte{mem}})
	var lent []*caller
	registered := 0
	for range ownMax + 2 {
		c, err := d.engine.callers.get(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if lent = append(lent, c); c.registered {
			registered++
		}
	}
	detail := d.Info().Detail
	if registered == 0 && strings.Contains(detail, "not registered") {
		skipWithout(t, "registered buffers: ulimit -l of 32 KiB, or CAP_IPC_LOCK")
	}
	if registered != ownMax || !strings.Contains(detail, "registered with at most 4 of 64 rings") {
		t.Errorf("%d rings of %d have a registration, want %d: %q", registered, len(lent), ownMax, detail)
	}
	f := blockiotest.Create(t, d, "f", 16*page)
	for _, c := range lent { // the pool lends the last returned ring first, so both kinds are used
		d.engine.callers.put(c)
		want := blockiotest.Pattern(t, 8, byte(len(lent)))
		copy(mem, want)
		if err := blockiotest.One(t, d, blockio.Write, f, 0, mem); err != nil {
			t.Fatal(err)
		}
		clear(mem)
		if err := blockiotest.One(t, d, blockio.Read, f, 0, mem); err != nil || !bytes.Equal(mem, want) {
			t.Errorf("through a ring with registration %t: %v, or other bytes", c.registered, err)
		}
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

// install applies the filter to all threads until the process ends.
func install(program []unix.SockFilter) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return os.NewSyscallError("prctl", err)
	}
	prog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	// Safety: prog and program live until the call returns.
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog)))
	runtime.KeepAlive(program)
	if errno != 0 {
		return os.NewSyscallError("seccomp", errno)
	}
	return nil
}
