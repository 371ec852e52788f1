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

// envDrives names the emulated NVMe drives that a test may overwrite, separated by commas. make test-disks sets it in the
// guest. Nothing but a guest may set it: the tests write to the drives from their first sector.
const envDrives = "PENSTOCK_LAB_DRIVES"

// labDrives returns the drives of the guest, at least n.
func labDrives(t *testing.T, n int) []string {
	t.Helper()
	value := os.Getenv(envDrives)
	if value == "" {
		t.Skipf("%s is not set: block devices that may be overwritten are in the guest of make test-disks", envDrives)
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

// mapped is one device of the kernel's device mapper, /dev/mapper/name.
type mapped struct {
	name string
	path string
}

// mapDevice makes a device of the given tables, one per line, and removes it when the test ends.
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

// load gives the device another table. What is in flight is completed by the old table first, unless the old table never
// completes it (a suspended or delaying target): noflush then leaves it queued for the new one.
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

// remove ends the device. It may be called twice.
func (m mapped) remove(t *testing.T) {
	t.Helper()
	if _, err := os.Stat(m.path); err != nil {
		return
	}
	command(t, "dmsetup", "remove", "--retry", m.name)
}

// fileSystem is one of those that a node's volumes lie on.
type fileSystem struct {
	name string
	make []string // the command that makes it, without the device
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
		options = "discard,nouuid" // snapshots of one file system have one UUID
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
	// Between fork and exec a child of another goroutine has all our files open, also those on this file system.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	if err := syscall.Unmount(dir, 0); err != nil {
		return fmt.Errorf("unmount %s: %w", dir, err)
	}
	return nil
}
