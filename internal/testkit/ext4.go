package testkit

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// SmallExt4 mounts an ext4 of so many MiB on a loop device for the test and
// returns where. It skips without root or loop devices, and says so; in CI
// (CI=true), where .ci/run installs what it needs, a missing mkfs.ext4 fails.
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
		t.Skipf("needs loop devices: mount: %v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", mount).CombinedOutput(); err != nil {
			t.Errorf("umount: %v: %s", err, out)
		}
	})
	return mount
}
