//go:build !uring

package uring

import (
	"errors"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/io/blockio"
)

func TestStub(t *testing.T) {
	d, err := Open(t.TempDir(), Options{})
	if d != nil || !errors.Is(err, blockio.ErrUnsupported) || !strings.Contains(err.Error(), "-tags uring") {
		t.Errorf("Open = %v, %v; want ErrUnsupported and how to build", d, err)
	}
	if ok, why := Probe(t.TempDir()); ok || why != notBuilt {
		t.Errorf("Probe = %t, %q", ok, why)
	}
}
