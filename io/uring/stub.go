//go:build !uring

package uring

import (
	"fmt"

	"github.com/penstock-kv/penstock/io/blockio"
)

// notBuilt is the reason why this binary has no io_uring.
const notBuilt = "built without uring (go build -tags uring -ldflags=-checklinkname=0)"

// Open returns blockio.ErrUnsupported: this binary was built without uring.
func Open(dir string, _ Options) (blockio.Device, error) {
	return nil, fmt.Errorf("uring: open %s: %s: %w", dir, notBuilt, blockio.ErrUnsupported)
}

// Probe reports that this binary was built without uring.
func Probe(string) (ok bool, reason string) { return false, notBuilt }
