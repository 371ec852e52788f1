package blockio

import "testing"

// TestIdentityShowsNoFlags: a token on the command line does not reach the lock.
func TestIdentityShowsNoFlags(t *testing.T) {
	for _, c := range []struct {
		want string
		args []string
	}{
		{"an unnamed command", nil},
		{"penstock serve", []string{"/usr/bin/penstock", "serve", "--token=secret", "x"}},
		{"penstock", []string{"penstock"}},
	} {
		if got := command(c.args); got != c.want {
			t.Errorf("command(%q) = %q, want %q", c.args, got, c.want)
		}
	}
}
