//go:build linux

package tcp

import (
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// disconnect resets a connection with connect(2) to the address family AF_UNSPEC, and leaves the
// descriptor open. The kernel drops the socket's send and receive queues. When disconnect returns,
// the reset has been sent.
func disconnect(fd int) error {
	addr := unix.RawSockaddr{Family: unix.AF_UNSPEC}
	// Safety: the kernel reads sizeof(addr) bytes during the call.
	_, _, errno := syscall.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&addr)), unsafe.Sizeof(addr))
	if errno != 0 {
		return os.NewSyscallError("connect AF_UNSPEC", errno)
	}
	return nil
}

// sendQueued returns the number of bytes of a socket's packets in the queues between TCP and the
// wire. This is the kernel's sk_wmem_alloc, which decreases as the NIC reports each packet sent.
func sendQueued(fd int) (uint32, error) {
	// SO_MEMINFO fills an array of SK_MEMINFO_VARS = 9 words (linux/sock_diag.h).
	const wmemAlloc = 2
	var info [9]uint32
	size := uint32(unsafe.Sizeof(info))
	// Safety: the kernel writes at most size bytes to info, and the number of written bytes to
	// size.
	_, _, errno := syscall.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_MEMINFO,
		uintptr(unsafe.Pointer(&info[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return 0, os.NewSyscallError("getsockopt SO_MEMINFO", errno)
	}
	return info[wmemAlloc], nil
}
