//go:build !linux

package tcp

import (
	"net"
	"time"

	"github.com/penstock-kv/penstock/rdma"
)

// canSplice is false: splicing works on Linux only (splice_linux.go). On other systems all payload
// is copied.
const canSplice = false

func probeSplice() error { return rdma.ErrUnsupported }

type pipes struct{}

func (*pipes) close() {}

type splicer struct{}

func newSplicer(net.Conn, *pipes) *splicer { return nil }

func (*splicer) write([][]byte, []bool) (bool, error) { return false, nil }

func (*splicer) discard() {}

func (*splicer) awaitSent(time.Duration) {}

func (*splicer) forget() {}
