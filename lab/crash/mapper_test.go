package crash

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// envDrives lists the emulated NVMe drives that a test may overwrite, separated by commas. make test-disks sets it in the
// guest. It must not be set outside a guest: the tests overwrite the drives from their first sector.
const envDrives = "PENSTOCK_LAB_DRIVES"

// labDrives returns the drives of the guest, at least n. Outside a guest it skips the test.
func labDrives(t *testing.T, n int) []string {
	t.Helper()
	value := os.Getenv(envDrives)
	switch {
	case value == "" && os.Getenv(envBinary) != "":
		t.Fatalf("%s is set, so this is the guest of make test-disks, but %s is not: the drives to overwrite are missing", envBinary, envDrives)
	case value == "":
		t.Skipf("%s is not set: this test needs drives that it may overwrite, which only the guest of make test-disks has", envDrives)
	}
	drives := strings.Split(value, ",")
	if len(drives) < n {
		t.Fatalf("%s=%s names %d drives; this test needs %d", envDrives, value, len(drives), n)
	}
	return drives
}

// command runs a program of the guest and fails the test if the program fails.
func command(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := tryCommand(name, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func tryCommand(name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return string(out), nil
}

// mapped is a device of the kernel's device mapper, /dev/mapper/name.
type mapped struct {
	name string
	path string
}

// mapDevice creates a device with the given table, a target on each line, and removes it when the test ends.
func mapDevice(t *testing.T, name, table string) mapped {
	t.Helper()
	m, err := tryMapDevice(name, table)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.remove(t) })
	return m
}

func tryMapDevice(name, table string) (mapped, error) {
	cmd := exec.Command("dmsetup", "create", name)
	cmd.Stdin = strings.NewReader(table + "\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		return mapped{}, fmt.Errorf("dmsetup create %s with table %q: %w: %s", name, table, err, bytes.TrimSpace(out))
	}
	return mapped{name, "/dev/mapper/" + name}, nil
}

// load replaces the device's table. The old table completes the requests in flight. A request that the old table
// never completes stays queued for the new table, because of --noflush.
func (m mapped) load(t *testing.T, table string) {
	t.Helper()
	cmd := exec.Command("dmsetup", "load", m.name)
	cmd.Stdin = strings.NewReader(table + "\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("dmsetup load %s with table %q: %v: %s", m.name, table, err, bytes.TrimSpace(out))
	}
	command(t, "dmsetup", "suspend", "--noflush", "--nolockfs", m.name)
	command(t, "dmsetup", "resume", m.name)
}

func (m mapped) message(t *testing.T, words ...string) {
	t.Helper()
	command(t, "dmsetup", append([]string{"message", m.name, "0"}, words...)...)
}

// remove removes the device. It may be called twice.
func (m mapped) remove(t *testing.T) {
	t.Helper()
	if _, err := os.Stat(m.path); err != nil {
		return
	}
	command(t, "dmsetup", "remove", "--retry", m.name)
}

// fileSystem is a kind of file system under a node's volumes.
type fileSystem struct {
	name string
	make []string // the mkfs command, without the device
}

var (
	ext4 = fileSystem{"ext4", []string{"mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"}}
	xfs  = fileSystem{"xfs", []string{"mkfs.xfs", "-q", "-f"}}
)

func (f fileSystem) format(t *testing.T, device string) {
	t.Helper()
	command(t, f.make[0], append(f.make[1:len(f.make):len(f.make)], device)...)
}

// mount mounts a device and unmounts it when the test ends.
func (f fileSystem) mount(t *testing.T, device, dir string) {
	t.Helper()
	if err := f.tryMount(device, dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unmount(t, dir) })
}

func (f fileSystem) tryMount(device, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	options := "discard"
	if f.name == "xfs" {
		options = "discard,nouuid" // snapshots of one file system have the same UUID
	}
	if err := syscall.Mount(device, dir, f.name, 0, options); err != nil {
		return fmt.Errorf("mount %s on %s as %s: %w", device, dir, f.name, err)
	}
	return nil
}

// unmount may be called twice.
func unmount(t *testing.T, dir string) {
	t.Helper()
	if err := tryUnmount(dir); err != nil && !errors.Is(err, syscall.EINVAL) {
		t.Error(err)
	}
}

func tryUnmount(dir string) error {
	// Between fork and exec, a child process holds the open files of this process, including those on
	// this file system.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	if err := syscall.Unmount(dir, 0); err != nil {
		return fmt.Errorf("unmount %s: %w", dir, err)
	}
	return nil
}
