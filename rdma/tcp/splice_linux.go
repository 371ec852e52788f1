package tcp

import (
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// canSplice is false in builds with the race detector, which does not observe reads by the kernel
// through pipes.
const canSplice = !raceEnabled

const (
	// pipeBytes is the capacity of a pipe in bytes: the most that one pair of system calls moves.
	pipeBytes = 1 << 20
	// maxPipes is the largest number of pipes of an engine. A pipe has two descriptors. A
	// connection that gets no pipe copies its payload.
	maxPipes = 64
	// smallVecs is the largest number of copied vectors in one system call (the kernel's
	// UIO_MAXIOV).
	smallVecs = 1024
)

// probeSplice checks whether the kernel and the system call filters permit splicing memory
// through a pipe into a socket.
func probeSplice() (err error) {
	x, err := newPipe()
	if err != nil {
		return err
	}
	defer x.close()
	fd, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socketpair", err)
	}
	defer func() { _, _ = unix.Close(fd[0]), unix.Close(fd[1]) }()
	word := []byte("penstock")
	iov := []unix.Iovec{{Base: &word[0]}}
	iov[0].SetLen(len(word))
	if _, err := unix.Vmsplice(x.w, iov, unix.SPLICE_F_NONBLOCK); err != nil {
		return os.NewSyscallError("vmsplice", err)
	}
	_, err = unix.Splice(x.r, nil, fd[0], nil, len(word), unix.SPLICE_F_NONBLOCK)
	return os.NewSyscallError("splice", err)
}

// pipes are the pipes through which an engine's connections splice. A free pipe is empty.
type pipes struct {
	mu     sync.Mutex
	free   []*pipe
	made   int
	closed bool
}

// take returns an empty pipe, or nil if no pipe is available.
func (p *pipes) take() *pipe {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.free); n > 0 {
		x := p.free[n-1]
		p.free = p.free[:n-1]
		return x
	}
	if p.made == maxPipes || p.closed {
		return nil
	}
	x, err := newPipe()
	if err != nil {
		return nil
	}
	p.made++
	return x
}

// give returns a pipe to the free pipes. A pipe that is not empty holds bytes of a failed
// connection; it is closed instead.
func (p *pipes) give(x *pipe) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if x.held > 0 || p.closed {
		p.made--
		x.close()
		return
	}
	p.free = append(p.free, x)
}

// close closes the free pipes. Pipes in use are closed when they are returned.
func (p *pipes) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, x := range p.free {
		x.close()
	}
	p.made -= len(p.free)
	p.free = nil
}

// pipe is a kernel pipe that refers to pages of registered memory.
type pipe struct {
	r, w int
	held int // bytes in it
}

// newPipe opens a pipe. If the user's pipes have reached the kernel's limit, the pipe has the
// default capacity.
func newPipe() (*pipe, error) {
	var fd [2]int
	if err := unix.Pipe2(fd[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, os.NewSyscallError("pipe2", err)
	}
	_, _ = unix.FcntlInt(uintptr(fd[1]), unix.F_SETPIPE_SZ, pipeBytes)
	return &pipe{r: fd[0], w: fd[1]}, nil
}

func (x *pipe) close() { _, _ = unix.Close(x.r), unix.Close(x.w) }

// splicer sends a batch without copying its large vectors: the socket's queue refers to the pages
// of the source until the peer has received them. Only the writer goroutine calls write.
type splicer struct {
	conn  *net.TCPConn
	raw   syscall.RawConn
	pipes *pipes
	pipe  *pipe
	// vec is the unsent part of a batch, and large marks its vectors that are spliced.
	vec   [][]byte
	large []bool
	iov   [1]unix.Iovec
	err   error
	// used is set before the first splice. dead is set by discard.
	used, dead atomic.Bool
	// resetFD is a duplicate of the socket's descriptor, kept from discard until forget or
	// awaitSent.
	resetFD atomic.Int64
	// step is the method value of send, bound once to avoid an allocation per call.
	step func(fd uintptr) bool
}

// newSplicer returns nil if p is nil, or if nc is not a plain TCP socket (TLS).
func newSplicer(nc net.Conn, p *pipes) *splicer {
	t, ok := nc.(*net.TCPConn)
	if !ok || p == nil {
		return nil
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return nil // closed already: the first plain write returns the error
	}
	s := &splicer{conn: t, raw: raw, pipes: p}
	s.resetFD.Store(noResetFD)
	s.step = s.send
	return s
}

// write sends vec and consumes it. A vector that large marks must not change until the peer has
// received it. write returns false, with nothing sent, if no pipe is available or the connection
// is about to be closed.
func (s *splicer) write(vec [][]byte, large []bool) (bool, error) {
	s.used.Store(true)
	if s.dead.Load() {
		return false, nil
	}
	if s.pipe = s.pipes.take(); s.pipe == nil {
		return false, nil
	}
	s.vec, s.large, s.err = vec, large, nil
	err := s.raw.Write(s.step)
	s.pipes.give(s.pipe)
	s.pipe, s.vec, s.large = nil, nil, nil
	if err == nil {
		err = s.err
	}
	return true, err
}

// send returns true if everything has been sent or an error occurred. If it returns false, the
// runtime calls it again when the socket is writable.
func (s *splicer) send(fd uintptr) bool {
	for len(s.vec) > 0 {
		var n int
		var err error
		if s.large[0] {
			n, err = s.splice(int(fd), s.vec[0])
		} else {
			small := s.small()
			n, err = unix.SendmsgBuffers(int(fd), s.vec[:small], nil, nil, s.more(small, unix.MSG_NOSIGNAL, unix.MSG_MORE))
		}
		switch err {
		case nil:
			s.sent(n)
		case unix.EINTR:
		case unix.EAGAIN:
			return false
		default:
			s.err = os.NewSyscallError("send", err)
			return true
		}
	}
	return true
}

// splice makes the pipe refer to the pages of b, unless the pipe still refers to earlier pages. It
// then makes the socket refer to the pages in the pipe.
func (s *splicer) splice(fd int, b []byte) (int, error) {
	p := s.pipe
	if p.held == 0 {
		s.iov[0].Base = &b[0]
		s.iov[0].SetLen(len(b))
		n, err := unix.Vmsplice(p.w, s.iov[:], unix.SPLICE_F_NONBLOCK)
		s.iov[0] = unix.Iovec{}
		if err != nil {
			return 0, err
		}
		p.held = n
	}
	more := p.held < len(b)
	flags := unix.SPLICE_F_MOVE | unix.SPLICE_F_NONBLOCK
	if more {
		flags |= unix.SPLICE_F_MORE
	} else {
		flags = s.more(1, flags, unix.SPLICE_F_MORE)
	}
	n, err := unix.Splice(p.r, nil, fd, nil, p.held, flags)
	p.held -= int(max(n, 0))
	return int(n), err
}

// small returns the number of vectors before the next spliced vector, at most as many as one
// system call takes.
func (s *splicer) small() int {
	n := 1
	for n < len(s.vec) && n < smallVecs && !s.large[n] {
		n++
	}
	return n
}

// more returns flags. Unless the next n vectors are the last of the batch, it adds the flag more,
// with which the kernel may put later vectors into the same packet.
func (s *splicer) more(n, flags, more int) int {
	if len(s.vec) > n {
		flags |= more
	}
	return flags
}

// sent removes the first n bytes of vec.
func (s *splicer) sent(n int) {
	for len(s.vec) > 0 && n >= len(s.vec[0]) {
		n -= len(s.vec[0])
		s.vec[0] = nil
		s.vec, s.large = s.vec[1:], s.large[1:]
	}
	if n > 0 {
		s.vec[0] = s.vec[0][n:]
	}
}

// discard resets the connection if any of its data was spliced. The reset drops the unsent data.
// After discard nothing is spliced.
func (s *splicer) discard() {
	// write sets used and then loads dead; discard sets dead and then loads used. So at least one
	// of the two loads the flag that the other has set.
	s.dead.Store(true)
	if !s.used.Load() {
		return
	}
	kept := -1
	var err error
	cerr := s.raw.Control(func(fd uintptr) {
		if err = disconnect(int(fd)); err == nil {
			kept, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0)
		}
	})
	if cerr != nil || err != nil {
		_ = s.conn.SetLinger(0)
	} else if !s.resetFD.CompareAndSwap(noResetFD, int64(kept)) {
		_ = unix.Close(kept)
	}
}

// Values of splicer.resetFD that are not a descriptor.
const (
	noResetFD       = -1 // discard has not reset the connection
	resetFDReleased = -2 // forget was called, so discard keeps no descriptor
)

// forget closes the descriptor that discard duplicated, when the packets of the connection no
// longer matter.
func (s *splicer) forget() {
	if fd := s.resetFD.Swap(resetFDReleased); fd >= 0 {
		_ = unix.Close(int(fd))
	}
}

// awaitSent returns when no packet of a reset connection waits in a queue of this host, or after
// limit. It is needed because packets refer to the source too.
func (s *splicer) awaitSent(limit time.Duration) {
	defer s.forget()
	fd := int(s.resetFD.Load())
	if fd < 0 {
		return
	}
	for pause := time.Millisecond; limit > 0; limit -= pause {
		n, err := sendQueued(fd)
		if n == 0 || err != nil {
			return // the queue is empty, or it cannot be observed because SO_MEMINFO is missing
		}
		time.Sleep(pause)
		pause = min(2*pause, 16*time.Millisecond)
	}
}
