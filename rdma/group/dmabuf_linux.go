package group

import (
	"os"

	"github.com/penstock-kv/penstock/rdma"
	"golang.org/x/sys/unix"
)

// ownBuf returns a copy of b with a duplicated descriptor, which closeBuf closes.
func ownBuf(b *rdma.DMABuf) (*rdma.DMABuf, error) {
	own := *b
	var err error
	own.FD, err = unix.FcntlInt(uintptr(b.FD), unix.F_DUPFD_CLOEXEC, 0)
	return &own, os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
}

// closeBuf closes the descriptor that ownBuf made; b may be nil.
func closeBuf(b *rdma.DMABuf) {
	if b != nil {
		_ = unix.Close(b.FD)
	}
}
