//go:build uring

package uring

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/io/blockio"
)

// refusedDir is set for the process that TestRefusedBySeccomp starts.
const refusedDir = "PENSTOCK_TEST_REFUSED_DIR"

// TestRefusedBySeccomp starts this test again under a filter like the default one
// of containers, which answers io_uring_setup with EPERM.
func TestRefusedBySeccomp(t *testing.T) {
	if dir := os.Getenv(refusedDir); dir != "" {
		checkRefused(t, dir)
		return
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestRefusedBySeccomp$", "-test.v")
	cmd.Env = append(os.Environ(), refusedDir+"="+t.TempDir())
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestRefusedBySeccomp") {
		t.Errorf("under the filter: %v\n%s", err, out)
	}
}

func checkRefused(t *testing.T, dir string) {
	if err := refuseRings(); err != nil {
		t.Fatal(err)
	}
	ok, why := Probe(dir)
	if ok || !strings.Contains(why, "seccomp") {
		t.Errorf("Probe = %t, %q; want the seccomp profile as the reason", ok, why)
	}
	d, err := Open(dir, Options{})
	if d != nil || !errors.Is(err, blockio.ErrUnsupported) || !errors.Is(err, unix.EPERM) {
		t.Errorf("Open = %v, %v; want ErrUnsupported and EPERM", d, err)
	}
}

// refuseRings installs, for all threads and until the process ends, a filter that
// makes io_uring_setup fail with EPERM.
func refuseRings() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	const ioUringSetup = 425 // on every architecture
	program := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}, // seccomp_data.nr
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: ioUringSetup, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
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
