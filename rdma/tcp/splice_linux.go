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

// canSplice: not in builds with the race detector, which does not see what the
// kernel reads through pipes.
const canSplice = !raceEnabled

const (
	// pipeBytes is the capacity that a pipe is given: what one pair of system calls
	// moves.
	pipeBytes = 1 << 20
	// maxPipes bounds the pipes of an engine, two descriptors each. A connection
	// that finds none free copies.
	maxPipes = 64
	// smallVecs is how many vectors that are copied go in one system call (the
	// kernel's UIO_MAXIOV).
	smallVecs = 1024
)

// probeSplice finds out whether this kernel, and what filters system calls here,
// lets memory go through a pipe into a socket.
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

// pipes are the pipes through which an engine's connections splice, empty when
// nobody has them.
type pipes struct {
	mu     sync.Mutex
	free   []*pipe
	made   int
	closed bool
}

// take returns an empty pipe, or nil if there can be none.
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

// give takes a pipe back. One that is not empty holds the bytes of a connection
// that has failed, and is closed.
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

// close closes the free pipes; those that are in use are closed when they are given
// back.
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

// pipe is a pipe that pages of registered memory pass through, held by reference.
type pipe struct {
	r, w int
	held int // bytes in it
}

// newPipe opens a pipe. Where the kernel gives a user no more large ones, it is as
// large as it comes.
func newPipe() (*pipe, error) {
	var fd [2]int
	if err := unix.Pipe2(fd[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, os.NewSyscallError("pipe2", err)
	}
	_, _ = unix.FcntlInt(uintptr(fd[1]), unix.F_SETPIPE_SZ, pipeBytes)
	return &pipe{r: fd[0], w: fd[1]}, nil
}

func (x *pipe) close() { _, _ = unix.Close(x.r), unix.Close(x.w) }

// splicer sends a batch without copying what is large of it: the socket's queue
// refers to the pages of the source until the peer has them. It belongs to the
// writer.
type splicer struct {
	conn  *net.TCPConn
	raw   syscall.RawConn
	pipes *pipes
	pipe  *pipe
	// vec is what is left to send of a batch, and large says which of it is
	// spliced.
	vec   [][]byte
	large []bool
	iov   [1]unix.Iovec
	err   error
	// used is set before anything is spliced, dead by discard.
	used, dead atomic.Bool
	// rest is a descriptor of the socket that discard made, until forget or awaitSent.
	rest atomic.Int64
	// step is the method of that name, made once.
	step func(fd uintptr) bool
}

// newSplicer returns nil where nothing is spliced (p is nil), or the stream is not
// the socket's (TLS).
func newSplicer(nc net.Conn, p *pipes) *splicer {
	t, ok := nc.(*net.TCPConn)
	if !ok || p == nil {
		return nil
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return nil // closed already: the first plain write says so
	}
	s := &splicer{conn: t, raw: raw, pipes: p}
	s.rest.Store(noRest)
	s.step = s.send
	return s
}

// write sends vec and consumes it. Where large is set a vector must stay as it is
// until the peer has it. false: there is no pipe, or the connection is about to be
// closed, and nothing was sent.
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

// send reports whether everything has been sent, or what keeps it from being;
// otherwise the runtime calls it again when the socket takes more.
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

// splice refers the pipe to the pages of b, unless it holds some still, and the
// socket to those of the pipe.
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

// small returns how many vectors come before the next that is spliced, as many of them
// as one system call takes.
func (s *splicer) small() int {
	n := 1
	for n < len(s.vec) && n < smallVecs && !s.large[n] {
		n++
	}
	return n
}

// more adds a flag unless the next n vectors are the last: what follows may share
// their packet.
func (s *splicer) more(n, flags, more int) int {
	if len(s.vec) > n {
		flags |= more
	}
	return flags
}

// sent takes n bytes off what is left.
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

// discard resets the connection, if any of what was written to it was spliced: what has
// not been sent is dropped. From here on nothing is spliced.
func (s *splicer) discard() {
	// write looks the other way round: one of the two sees the other.
	s.dead.Store(true)
	if !s.used.Load() {
		return
	}
	rest := -1
	var err error
	cerr := s.raw.Control(func(fd uintptr) {
		if err = disconnect(int(fd)); err == nil {
			rest, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0)
		}
	})
	if cerr != nil || err != nil {
		_ = s.conn.SetLinger(0)
	} else if !s.rest.CompareAndSwap(noRest, int64(rest)) {
		_ = unix.Close(rest)
	}
}

// Values of splicer.rest that are no descriptor.
const (
	noRest  = -1 // discard has not reset the connection
	restEnd = -2 // nobody waits for what discard leaves
)

// forget ends what discard left: no packet of the connection matters any more.
func (s *splicer) forget() {
	if fd := s.rest.Swap(restEnd); fd >= 0 {
		_ = unix.Close(int(fd))
	}
}

// awaitSent returns once no packet of a connection that discard reset waits in a queue of
// this host, or when limit has passed: packets refer to the source too.
func (s *splicer) awaitSent(limit time.Duration) {
	defer s.forget()
	fd := int(s.rest.Load())
	if fd < 0 {
		return
	}
	for pause := time.Millisecond; limit > 0; limit -= pause {
		n, err := sendQueued(fd)
		if n == 0 || err != nil {
			return // a kernel that cannot tell leaves nothing to wait for
		}
		time.Sleep(pause)
		pause = min(2*pause, 16*time.Millisecond)
	}
}
