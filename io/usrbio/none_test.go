//go:build !cgo || !linux

package usrbio

import (
	"errors"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/io/blockio"
)

func TestWithoutCgo(t *testing.T) {
	d, err := Open(t.TempDir(), Options{})
	if d != nil || !errors.Is(err, blockio.ErrUnsupported) || !strings.Contains(err.Error(), "CGO_ENABLED=1") {
		t.Errorf("Open = %v, %v; want ErrUnsupported and how to build", d, err)
	}
	if ok, why := Probe(t.TempDir(), Options{}); ok || why != notBuilt {
		t.Errorf("Probe = %t, %q", ok, why)
	}
}
