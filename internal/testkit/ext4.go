package testkit

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// SmallExt4 mounts an ext4 file system of the given MiB on a loop device for the test, and returns
// the mount point. Without root or loop devices it skips the test with the reason. In CI (CI=true)
// the test fails instead if mkfs.ext4 is missing, because .ci/run installs it, or if the mount
// fails although the kernel has loop devices.
func SmallExt4(t testing.TB, mib int64) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root, to mount a small file system")
	}
	if _, err := exec.LookPath("mkfs.ext4"); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("CI without mkfs.ext4: %v", err)
		}
		t.Skipf("needs mkfs.ext4 (Debian: e2fsprogs): %v", err)
	}
	dir := t.TempDir()
	image, mount := filepath.Join(dir, "image"), filepath.Join(dir, "mount")
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, mib<<20), os.Mkdir(mount, 0o700)); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.ext4", "-q", "-F", image).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.ext4: %v: %s", err, out)
	}
	if out, err := exec.Command("mount", "-o", "loop", image, mount).CombinedOutput(); err != nil {
		reason, ok := noLoopMount(loopControl, os.Getenv("CI") == "true")
		if !ok {
			t.Fatalf("%s: mount: %v: %s", reason, err, out)
		}
		t.Skipf("%s: mount: %v: %s", reason, err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", mount).CombinedOutput(); err != nil {
			t.Errorf("umount: %v: %s", err, out)
		}
	})
	return mount
}

// loopControl provides loop devices. A kernel or a container without this file has no loop devices.
const loopControl = "/dev/loop-control"

// noLoopMount returns the likely reason why root could not mount a loop device, and whether the
// test may be skipped for that reason.
func noLoopMount(control string, ci bool) (reason string, skip bool) {
	if _, err := os.Stat(control); err != nil {
		return "needs loop devices (modprobe loop, or a container that has " + control + ")", true
	}
	return "root cannot mount although there is " + control + " (a container needs CAP_SYS_ADMIN; losetup -a says which devices are taken)", !ci
}
