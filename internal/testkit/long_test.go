package testkit

import "testing"

// TestLong: a long test is skipped only with -short, and fails with -short in CI.
func TestLong(t *testing.T) {
	for _, c := range []struct {
		short, ci bool
		want      verdict
	}{
		{false, false, run},
		{false, true, run},
		{true, false, skip},
		{true, true, refuse},
	} {
		if got := skipLong(c.short, c.ci); got != c.want {
			t.Errorf("short %v, CI %v: %d; want %d", c.short, c.ci, got, c.want)
		}
	}
}
