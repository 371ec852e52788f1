//go:build !cgo || !linux

package usrbio

import (
	"fmt"

	"github.com/penstock-kv/penstock/io/blockio"
)

// notBuilt is the reason why this binary cannot load 3FS's library.
const notBuilt = "built without cgo, which is needed to load 3FS's library (go build with CGO_ENABLED=1 and a C compiler)"

// Open returns blockio.ErrUnsupported: this binary was built without cgo.
func Open(dir string, _ Options) (blockio.Device, error) {
	return nil, fmt.Errorf("usrbio: open %s: %s: %w", dir, notBuilt, blockio.ErrUnsupported)
}

// Probe reports that this binary was built without cgo.
func Probe(string, Options) (ok bool, reason string) { return false, notBuilt }
