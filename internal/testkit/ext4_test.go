package testkit

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestNoLoopMount: after a failed mount a test may skip if there are no loop devices. If there are,
// it may not skip in CI.
func TestNoLoopMount(t *testing.T) {
	dir := t.TempDir()
	absent, there := filepath.Join(dir, "absent"), filepath.Join(dir, "loop-control")
	if err := os.WriteFile(there, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		control string
		ci      bool
		skip    bool
		says    string
	}{
		{absent, false, true, "modprobe loop"},
		{absent, true, true, "modprobe loop"},
		{there, false, true, "CAP_SYS_ADMIN"},
		{there, true, false, "CAP_SYS_ADMIN"},
	} {
		if reason, skip := noLoopMount(c.control, c.ci); skip != c.skip || !strings.Contains(reason, c.says) || !strings.Contains(reason, c.control) {
			t.Errorf("%+v: skip %v, %q", c, skip, reason)
		}
	}
}
