package arena

import (
	"os"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/sys"
)

// stagings returns the modes of the mappings of staging memory in this process.
func stagings(t testing.TB) (modes []string) {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, "memfd:penstock-staging") {
			modes = append(modes, strings.Fields(line)[1])
		}
	}
	return modes
}

// TestStaging: bytes written by one process are read by the other, whose mapping is read-only.
// Neither process can shrink the memory.
func TestStaging(t *testing.T) {
	owner, err := NewStaging(2 * sys.HugePageSize)
	if err != nil {
		t.Fatal(err)
	}
	from, to := pair(t)
	if err := owner.Send(from, []byte("here")); err != nil {
		t.Fatal(err)
	}
	msg := make([]byte, 4)
	file, err := sys.ReceiveFile(to, msg)
	if err != nil || file == nil || string(msg) != "here" {
		t.Fatalf("received %q, %v, %v", msg, file, err)
	}
	if err := file.Truncate(4096); err == nil {
		t.Error("the memory was shrunk")
	}
	other, err := MapStaging(file)
	if err != nil {
		t.Fatal(err)
	}
	if len(owner.Bytes()) != 2*sys.HugePageSize || len(other.Bytes()) != len(owner.Bytes()) {
		t.Errorf("%d and %d bytes", len(owner.Bytes()), len(other.Bytes()))
	}
	copy(other.Bytes()[sys.HugePageSize:], "from the writer")
	if got := owner.Bytes()[sys.HugePageSize:][:15]; string(got) != "from the writer" {
		t.Errorf("the owner reads %q", got)
	}
	if got := strings.Join(stagings(t), " "); got != "rw-s r--s" && got != "r--s rw-s" {
		t.Errorf("mappings %s; want the owner's to be read-only", got)
	}
	for range 2 {
		if err := owner.Close(); err != nil {
			t.Error(err)
		}
		if err := other.Close(); err != nil {
			t.Error(err)
		}
	}
	if left := stagings(t); len(left) > 0 {
		t.Errorf("mappings are left: %v", left)
	}
}

// TestStagingRefused: invalid sizes, and files that are not staging memory.
func TestStagingRefused(t *testing.T) {
	for _, size := range []int64{-sys.HugePageSize, 0, 4096, sys.HugePageSize + 1, StagingMaxBytes + sys.HugePageSize} {
		if _, err := NewStaging(size); err == nil || !strings.Contains(err.Error(), "choose") {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
	small, err := sys.Memfd("small", 4096, false)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := MapStaging(small); err == nil || !strings.Contains(err.Error(), "4096 bytes") {
		t.Errorf("a smaller file: %v", err)
	}
	unsealed, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	if err := unsealed.Truncate(sys.HugePageSize); err != nil {
		t.Fatal(err)
	}
	if _, err := MapStaging(unsealed); err == nil {
		t.Error("a file that its owner can shrink was mapped")
	}
	for _, f := range []*os.File{small, unsealed} {
		if err := f.Close(); err == nil {
			t.Errorf("%s was left open", f.Name())
		}
	}
	if left := stagings(t); len(left) > 0 {
		t.Errorf("mappings are left: %v", left)
	}
}
