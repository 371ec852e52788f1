package sys

import (
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// SendFile sends msg, which is not empty, together with a descriptor of f over a unix socket. The
// caller still owns f.
func SendFile(conn *net.UnixConn, msg []byte, f *os.File) error {
	rights := unix.UnixRights(int(f.Fd()))
	n, oobn, err := conn.WriteMsgUnix(msg, rights, nil)
	if err != nil {
		return fmt.Errorf("sys: send a descriptor: %w", err)
	}
	if n != len(msg) || oobn != len(rights) {
		return fmt.Errorf("sys: send a descriptor: %d bytes of %d sent", n, len(msg))
	}
	return nil
}

// ReceiveFile fills msg from a unix socket. It returns the file that came with the message, or nil
// if there was none. The caller must close the file. A message with several files is refused.
func ReceiveFile(conn *net.UnixConn, msg []byte) (*os.File, error) {
	return receiveFile(msg, func(msg, oob []byte) (n, oobn, flags int, err error) {
		n, oobn, flags, _, err = conn.ReadMsgUnix(msg, oob)
		return n, oobn, flags, err
	})
}

// ReceiveFileBlocking is ReceiveFile for a socket that Blocking returned. It fails with EAGAIN if
// nothing arrives within the time that Blocking was given.
func ReceiveFileBlocking(socket *os.File, msg []byte) (*os.File, error) {
	raw, err := socket.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("sys: receive a descriptor: %w", err)
	}
	return receiveFile(msg, func(msg, oob []byte) (n, oobn, flags int, err error) {
		if rerr := raw.Read(func(fd uintptr) bool {
			for {
				n, oobn, flags, _, err = unix.Recvmsg(int(fd), msg, oob, unix.MSG_CMSG_CLOEXEC)
				if !errors.Is(err, unix.EINTR) {
					return true
				}
			}
		}); rerr != nil {
			err = rerr
		}
		return n, oobn, flags, err
	})
}

// receiveFile is ReceiveFile with the given receive call.
func receiveFile(msg []byte, receive func(msg, oob []byte) (n, oobn, flags int, err error)) (*os.File, error) {
	oob := make([]byte, unix.CmsgSpace(4*maxFiles))
	var files []*os.File
	for at := 0; at < len(msg); {
		n, oobn, flags, err := receive(msg[at:], oob)
		if err == nil && n == 0 {
			err = errors.New("the peer closed the connection")
		}
		if err == nil && flags&unix.MSG_CTRUNC != 0 {
			err = fmt.Errorf("more than %d descriptors in one message", maxFiles)
		}
		more, parseErr := receivedFiles(oob[:oobn])
		files = append(files, more...)
		if err = errors.Join(err, parseErr); err != nil {
			return nil, errors.Join(fmt.Errorf("sys: receive a descriptor: %w", err), closeAll(files))
		}
		at += n
	}
	switch len(files) {
	case 0:
		return nil, nil
	case 1:
		return files[0], nil
	}
	return nil, errors.Join(fmt.Errorf("sys: %d descriptors came, want one", len(files)), closeAll(files))
}

// maxFiles is the maximum number of descriptors that are accepted with one message. The kernel
// closes any further descriptors.
const maxFiles = 4

func receivedFiles(oob []byte) (files []*os.File, err error) {
	if len(oob) == 0 {
		return nil, nil
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return files, err
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	return files, nil
}

func closeAll(files []*os.File) error {
	var errs []error
	for _, f := range files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// WriteNow writes the part of p for which the socket has room, and returns the number of bytes
// written, which may be 0. It does not wait.
func WriteNow(conn *net.UnixConn, p []byte) (n int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, fmt.Errorf("sys: write to a unix socket: %w", err)
	}
	if cerr := raw.Write(func(fd uintptr) bool {
		for {
			if n, err = unix.SendmsgN(int(fd), p, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL); !errors.Is(err, unix.EINTR) {
				return true
			}
		}
	}); cerr != nil {
		err = cerr
	}
	switch {
	case errors.Is(err, unix.EAGAIN):
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("sys: write to a unix socket: %w", err)
	}
	return n, nil
}

// AwaitHangUp returns nil when the peer of a unix socket has closed its end, or when this end does not
// read any more (CloseRead). It reads nothing, so the socket may hold unread bytes. Error:
// os.ErrDeadlineExceeded after the read deadline of conn, net.ErrClosed after its Close.
func AwaitHangUp(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return fmt.Errorf("sys: wait for the end of a unix socket: %w", err)
	}
	var failed error
	if err := raw.Read(func(fd uintptr) bool {
		// The runtime calls this function again after each event of the socket.
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		for {
			if _, failed = unix.Poll(poll, 0); !errors.Is(failed, unix.EINTR) {
				return failed != nil || poll[0].Revents != 0
			}
		}
	}); err != nil {
		failed = err
	}
	if failed != nil {
		return fmt.Errorf("sys: wait for the end of a unix socket: %w", failed)
	}
	return nil
}

// PeerUID returns the user id of the process at the other end of a unix socket: the process that
// connected or that listens.
func PeerUID(conn *net.UnixConn) (uint32, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, fmt.Errorf("sys: peer of a unix socket: %w", err)
	}
	var cred *unix.Ucred
	if cerr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); cerr != nil {
		err = cerr
	}
	if err != nil {
		return 0, fmt.Errorf("sys: peer of a unix socket: %w", err)
	}
	return cred.Uid, nil
}

// Blocking returns the socket of conn as a file, and closes conn, also after an error. Read and Write
// of the file block the calling thread for at most patience, and then return EAGAIN. The file is not
// in the runtime's poller, which would wake a thread for each message that the file's reader gets
// and for each message that the peer takes.
func Blocking(conn *net.UnixConn, patience time.Duration) (*os.File, error) {
	fd, err := blockingDescriptor(conn, patience)
	// Close removes the socket from the poller.
	if err = errors.Join(err, conn.Close()); err == nil {
		return os.NewFile(uintptr(fd), "unix socket"), nil
	}
	if fd >= 0 {
		err = errors.Join(err, unix.Close(fd))
	}
	return nil, fmt.Errorf("sys: make a socket block: %w", err)
}

// blockingDescriptor returns a second descriptor of the socket of conn, which it has set to block,
// or -1.
func blockingDescriptor(conn *net.UnixConn, patience time.Duration) (fd int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd = -1
	limit := unix.NsecToTimeval(patience.Nanoseconds())
	if cerr := raw.Control(func(own uintptr) {
		if fd, err = unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 0); err != nil {
			fd = -1
			return
		}
		err = errors.Join(unix.SetNonblock(fd, false),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit))
	}); cerr != nil {
		err = cerr
	}
	return fd, err
}

// EndReads ends the reads of a socket that Blocking has returned, the running one and all later
// ones. It may be called while another goroutine uses the file.
func EndReads(file *os.File) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return fmt.Errorf("sys: end the reads of a socket: %w", err)
	}
	if cerr := raw.Control(func(fd uintptr) { err = unix.Shutdown(int(fd), unix.SHUT_RD) }); cerr != nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("sys: end the reads of a socket: %w", err)
	}
	return nil
}
