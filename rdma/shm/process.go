package shm

import (
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// process is the peer's process. Sources that are in no shared arena are read from its memory
// (process_vm_readv), if the kernel permits this.
type process struct {
	pid int
	// fd is a pidfd, which shows whether pid is still the peer's process. -1: the process cannot
	// be read.
	fd int

	// Arguments of system calls, kept here to avoid allocations; only the poller uses them.
	local  [1]unix.Iovec
	remote [1]unix.RemoteIovec
	poll   [1]unix.PollFd
}

// peerProcess finds the peer's process and tries to read the probe that the peer's hello names.
// Only this test shows that the pid from the socket (SO_PEERCRED) is the peer's pid in our pid
// namespace and that we may read the peer's memory.
func peerProcess(conn *net.UnixConn, h *hello) *process {
	p := &process{fd: -1}
	var err error
	if p.pid, err = peerPID(conn); err != nil {
		return p
	}
	fd, err := unix.PidfdOpen(p.pid, 0)
	if err != nil {
		return p
	}
	var probe id
	if err := p.read(probe[:], h.where); err != nil || probe != h.probe {
		_ = unix.Close(fd)
		return p
	}
	p.fd = fd
	return p
}

func peerPID(conn *net.UnixConn) (int, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	if cerr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); cerr != nil {
		err = cerr
	}
	if err == nil && cred.Pid <= 0 {
		err = errors.New("it is in another PID namespace")
	}
	if err != nil {
		return 0, err
	}
	return int(cred.Pid), nil
}

// read reads len(b) bytes from an address of the process.
func (p *process) read(b []byte, at uint64) error {
	for len(b) > 0 {
		p.local[0].Base = &b[0]
		p.local[0].SetLen(len(b))
		p.remote[0] = unix.RemoteIovec{Base: uintptr(at), Len: len(b)}
		n, err := unix.ProcessVMReadv(p.pid, p.local[:], p.remote[:], 0)
		p.local[0].Base = nil
		if err == unix.EINTR {
			continue
		}
		if err == nil && n == 0 {
			err = unix.EFAULT
		}
		if err != nil {
			return err
		}
		b, at = b[n:], at+uint64(n)
	}
	return nil
}

// gone reports whether the process has ended. After that, pid may belong to another process.
func (p *process) gone() bool {
	p.poll[0] = unix.PollFd{Fd: int32(p.fd), Events: unix.POLLIN}
	n, err := unix.Poll(p.poll[:], 0)
	return n != 0 || err != nil && err != unix.EINTR
}

func (p *process) close() {
	if p != nil && p.fd >= 0 {
		_ = unix.Close(p.fd)
		p.fd = -1
	}
}

// unreadable returns the error of a Work whose source the peer could not read.
func unreadable() error {
	return fmt.Errorf("shm: the source is in no shared arena, and the peer could not read it in this process: allocate it in an arena.Arena made "+
		"with Options.Shared and named in shm.Options.Arenas, or let the peer read this process (kernel.yama.ptrace_scope is %s)", yama())
}

func yama() string {
	b, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope")
	if err != nil {
		return "not there"
	}
	return string(b[:1])
}
