package usrbiotest

import (
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/testkit"
)

//go:embed testdata/standin.c
var source []byte

// LibraryName is the file name of the library, which is that of 3FS's.
const LibraryName = "libhf3fs_api_shared.so"

// Variables of the library.
const (
	controlVariable = "STANDIN_HF3FS_CONTROL"
	mountsVariable  = "STANDIN_HF3FS_MOUNTS"
)

// Build compiles the library into the directory dir and returns its path.
func Build(dir string, flags ...string) (string, error) {
	c, so := filepath.Join(dir, "standin.c"), filepath.Join(dir, LibraryName)
	if err := os.WriteFile(c, source, 0o600); err != nil {
		return "", err
	}
	args := append([]string{"-std=gnu11", "-shared", "-fPIC", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror", "-o", so, c}, flags...)
	if out, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("gcc: %w\n%s", err, out)
	}
	return so, nil
}

// NewControl makes a control file in the directory dir and names it in the environment of this
// process, for libraries that are loaded later.
func NewControl(dir string) (*Control, error) {
	c := &Control{Path: filepath.Join(dir, "control")}
	f, err := os.Create(c.Path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := f.Truncate(4096); err != nil {
		return nil, err
	}
	if c.mem, err = unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, err
	}
	return c, os.Setenv(controlVariable, c.Path)
}

// Directories makes the directories in the environment of this process count as mounts of 3FS, for
// libraries of this process and its children. Each needs a directory 3fs-virt (Virtual).
func Directories(dirs ...string) error {
	return os.Setenv(mountsVariable, strings.Join(dirs, ":"))
}

// Virtual makes the directories of a mount that 3FS's daemon has.
func Virtual(mount string) error { return os.MkdirAll(filepath.Join(mount, "3fs-virt", "iovs"), 0o700) }

// Links returns the names of the registrations of a mount.
func Links(t testing.TB, mount string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(mount, "3fs-virt", "iovs"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// Shared returns the names below /dev/shm of the buffers that the registrations of a mount refer to.
func Shared(t testing.TB, mount string) (names []string) {
	t.Helper()
	for _, link := range Links(t, mount) {
		target, err := os.Readlink(filepath.Join(mount, "3fs-virt", "iovs", link))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(target); err == nil {
			names = append(names, target)
		}
	}
	return names
}

// Mount returns a FUSE mount of type fuse.hf3fs for the test, with the directories of 3FS. It needs
// bindfs, FUSE and the right to mount. If one of them is missing, Mount skips the test, or fails it under CI=true.
func Mount(t testing.TB) string {
	t.Helper()
	bindfs := testkit.Program(t, "bindfs", "bindfs")
	lacks := func(format string, args ...any) {
		t.Helper()
		if os.Getenv("CI") == "true" {
			t.Fatalf(format, args...)
		}
		t.Skipf(format, args...)
	}
	if f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0); err != nil {
		lacks("this test needs FUSE: %v", err)
	} else {
		f.Close()
	}
	base := t.TempDir()
	behind, at := filepath.Join(base, "behind"), filepath.Join(base, "3fs")
	if err := errors.Join(os.MkdirAll(behind, 0o700), os.MkdirAll(at, 0o700), Virtual(behind)); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bindfs, "-f", "-o", "subtype=hf3fs", behind, at)
	var log strings.Builder
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	mounted := func() bool {
		_, err := os.Stat(filepath.Join(at, "3fs-virt"))
		return err == nil
	}
	for !mounted() {
		select {
		case err := <-ended:
			if os.Geteuid() != 0 {
				lacks("this test needs root to mount: bindfs: %v\n%s", err, log.String())
			}
			t.Fatalf("bindfs: %v\n%s", err, log.String())
		default:
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(at, 0); err != nil {
			t.Errorf("unmount %s: %v", at, err)
			_ = unix.Unmount(at, unix.MNT_DETACH)
			_ = cmd.Process.Kill() // it may have ended
		}
		<-ended
	})
	return at
}
