package main

import (
	"strings"
	"testing"
)

// TestServeShowsNICs: a start on an address that the host does not have lists the host's NICs and
// their addresses.
func TestServeShowsNICs(t *testing.T) {
	node, r := tryServed(t, nil, append(small(t.TempDir()), "--data-listen", "198.51.100.77:7431", "--insecure")...)
	if node != nil {
		t.Fatal("the node runs on an address of the documentation's")
	}
	if r.code != exitFailed || !strings.Contains(r.err, "no NIC of this host has that address") || !strings.Contains(r.err, "ROLE") && !strings.Contains(r.err, "no NIC\n") {
		t.Errorf("exit %d\n%s", r.code, r.err)
	}
}
