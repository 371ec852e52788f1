package usrbio

import (
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/io/blockio"
)

// TestTypeOf: the mount with the longest matching path has the file, and the last of several at one
// place.
func TestTypeOf(t *testing.T) {
	const mounts = `22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
31 22 0:45 / /3fs/stage rw,nosuid shared:9 - fuse.hf3fs hf3fs.stage rw,user_id=0
32 22 0:46 / /3fs/with\040space rw - fuse.hf3fs hf3fs rw
33 31 0:47 / /3fs/stage/scratch rw - tmpfs none rw
34 22 0:48 / /over rw - fuse.hf3fs hf3fs rw
35 34 0:49 / /over rw - xfs /dev/vdb rw
a line that is not of this form - fuse.hf3fs x
`
	for path, want := range map[string]string{
		"/3fs/stage":                "fuse.hf3fs",
		"/3fs/stage/a/b":            "fuse.hf3fs",
		"/3fs/stage2":               "ext4",
		"/3fs/with space/volume":    "fuse.hf3fs",
		"/3fs/stage/scratch/volume": "tmpfs",
		"/over/volume":              "xfs",
		"/":                         "ext4",
	} {
		if got := typeOf(strings.NewReader(mounts), path); got != want {
			t.Errorf("%s is on %q, want %q", path, got, want)
		}
	}
	if Mounted(t.TempDir()) || Mounted("/nonexistent") {
		t.Error("a directory outside of 3FS counts as mounted")
	}
}

func TestOptions(t *testing.T) {
	for _, o := range []Options{{}, {Slots: 1, SlotBytes: blockio.Align}, {SlotBytes: slotBytesMax}, {Budget: blockio.BudgetOptions{MinBytes: 1 << 30}}} {
		o.EnsureDefaults()
		if err := o.Validate(); err != nil {
			t.Errorf("%+v: %v", o, err)
		}
	}
	for _, o := range []Options{{Slots: -1}, {Slots: slotsMax + 1}, {SlotBytes: blockio.Align + 1}, {SlotBytes: 2 * slotBytesMax}, {Budget: blockio.BudgetOptions{MinBytes: 1}}} {
		o.EnsureDefaults()
		if err := o.Validate(); err == nil {
			t.Errorf("%+v is accepted", o)
		}
	}
}
