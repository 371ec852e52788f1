package handoff

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/penstock-kv/penstock/api"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/sys"
)

// Sentinel errors, one for each reaction of a caller.
var (
	// ErrSession: the session does not exist or has ended. Connect again.
	ErrSession = errors.New("local session unknown")
	// ErrLoan: the session already has a loan (memory lent for one Read) with that number. Choose
	// another number.
	ErrLoan = errors.New("loan number in use")
	// ErrFull: the session has LoansMax loans, or the staging memory of all sessions has reached
	// StagingBytesMax. Return some loans, or write over the data plane.
	ErrFull = errors.New("limit reached")
	// ErrInUse: another process listens at the socket. Choose another path.
	ErrInUse = errors.New("socket in use")
)

// Options are the options of a Listener. Path and Arena are required. Every other field has a
// default for its zero value.
type Options struct {
	// Path is the path of the unix socket. A socket file left by an ended process is replaced.
	Path string
	// Arena is the arena to lend. It must be Shared.
	Arena *arena.Arena
	// SessionsMax is the maximum number of connected engines. Default 256.
	SessionsMax int
	// LoansMax is the maximum number of open loans (memory lent for one Read each) of one session.
	// Default 65,536. storage.Options.LoanBytesMax limits the size of their memory.
	LoansMax int
	// StagingBytesMax is the maximum size of the staging memory of all sessions together, in bytes.
	// Default: a quarter of the arena's size.
	StagingBytesMax int64
	// UID is the user whose processes may connect. Default: the user of this process.
	UID *uint32
	// Logger receives messages that need an operator's action. Default: discard.
	Logger *slog.Logger
}

// EnsureDefaults sets the fields that are zero to their defaults.
func (o *Options) EnsureDefaults() {
	if o.SessionsMax == 0 {
		o.SessionsMax = 256
	}
	if o.LoansMax == 0 {
		o.LoansMax = 1 << 16
	}
	if o.StagingBytesMax == 0 && o.Arena != nil {
		o.StagingBytesMax = int64(len(o.Arena.Bytes())) / 4
	}
	if o.UID == nil {
		uid := uint32(os.Geteuid())
		o.UID = &uid
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

// Validate returns an error for the first invalid field of o, or nil.
func (o *Options) Validate() error {
	switch {
	case o.Path == "":
		return errors.New("handoff: Options.Path is required")
	case o.Arena == nil || o.Arena.FD() < 0:
		return errors.New("handoff: Options.Arena must be Shared, to be mapped by another process")
	case o.SessionsMax < 1 || o.LoansMax < 1 || o.StagingBytesMax < 1:
		return fmt.Errorf("handoff: SessionsMax is %d, LoansMax %d, StagingBytesMax %d; all must be positive", o.SessionsMax, o.LoansMax, o.StagingBytesMax)
	}
	return nil
}

// Listener is the node's end of the unix socket. Its methods may be called concurrently.
type Listener struct {
	opts    Options
	id      api.LocalID
	unix    *net.UnixListener
	serving sync.WaitGroup // connections

	mu     sync.Mutex
	closed bool
	// conns are the open connections, including connections without a session.
	conns    map[*net.UnixConn]struct{}
	sessions map[api.LocalID]*Session
	// connected counts all connections. refused counts the connections that got no session.
	connected, refused uint64
	// staged is the staging memory of all sessions, in bytes. Invariant: staged <= StagingBytesMax.
	staged int64
	// ctx ends at Close.
	ctx    context.Context
	cancel context.CancelFunc
}

// Listen binds the socket. Serve accepts connections.
func Listen(opts Options) (*Listener, error) {
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	l := &Listener{opts: opts, conns: make(map[*net.UnixConn]struct{}), sessions: make(map[api.LocalID]*Session)}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	_, _ = rand.Read(l.id[:]) // never fails
	var err error
	if l.unix, err = bind(opts.Path); err != nil {
		return nil, fmt.Errorf("handoff: %w", err)
	}
	// Until the mode is set, a process of another user could connect. serve refuses such a
	// connection.
	if err := os.Chmod(opts.Path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("handoff: %w", err), l.unix.Close())
	}
	return l, nil
}

// bind listens at path. It replaces a socket on which no process listens.
func bind(path string) (*net.UnixListener, error) {
	addr := &net.UnixAddr{Name: path, Net: "unix"}
	l, err := net.ListenUnix("unix", addr)
	if !errors.Is(err, syscall.EADDRINUSE) {
		return l, err
	}
	conn, dialErr := net.DialUnix("unix", nil, addr)
	if dialErr == nil {
		_ = conn.Close() // the connection was a probe
		return nil, fmt.Errorf("%s: %w: another process listens there; give each node a local_socket of its own", path, ErrInUse)
	}
	info, statErr := os.Lstat(path)
	if statErr != nil || info.Mode().Type() != os.ModeSocket || !errors.Is(dialErr, syscall.ECONNREFUSED) {
		return nil, fmt.Errorf("%s exists and is not the socket of an ended process: %w", path, errors.Join(dialErr, statErr))
	}
	if err := os.Remove(path); err != nil {
		return nil, fmt.Errorf("remove the socket of an ended process: %w", err)
	}
	return net.ListenUnix("unix", addr)
}

// ID returns a random id that identifies this run of the node.
func (l *Listener) ID() api.LocalID { return l.id }

// Path returns the path of the socket.
func (l *Listener) Path() string { return l.opts.Path }

// stagingBytes is the maximum size of a session's staging memory, in bytes. If StagingBytesMax has
// no room for stagingShare sessions of that size, a session gets StagingBytesMax/stagingShare, but
// at least 2 MiB.
const (
	stagingBytes = 8 << 20
	stagingShare = 8
)

// StagingBytes returns the size of a session's staging memory in bytes, a multiple of 2 MiB. 0
// means that sessions get no staging memory.
func (l *Listener) StagingBytes() int64 {
	size := min(stagingBytes, l.opts.StagingBytesMax/stagingShare)
	size = max(size/sys.HugePageSize, 1) * sys.HugePageSize
	if size > l.opts.StagingBytesMax {
		return 0
	}
	return size
}

// A Handler performs a call that an engine sent over the socket. msg is an api.Call, which the
// Handler may keep. The Handler appends the api.Reply to dst and returns the result. ctx ends when
// the engine's connection ends or the Listener is closed. The first call of ctx.Done starts a
// goroutine.
type Handler func(ctx context.Context, session api.LocalID, msg, dst []byte) []byte

// Serve accepts connections until Close.
func (l *Listener) Serve(handle Handler) error {
	for {
		conn, err := l.unix.AcceptUnix()
		if err != nil {
			if l.waitOut(err) {
				continue
			}
			select {
			case <-l.ctx.Done():
				return nil
			default:
				return fmt.Errorf("handoff: accept: %w", err)
			}
		}
		if !l.enter(conn) {
			_ = conn.Close() // the listener is closed
			return nil
		}
		go func() {
			defer l.leave(conn)
			if err := l.serve(conn, handle); err != nil {
				l.opts.Logger.Warn("local session ended", "socket", l.opts.Path, "err", err)
			}
		}()
	}
}

// waitOut reports whether Serve should call accept again after err: err is a temporary shortage,
// such as of file descriptors. In that case waitOut first logs err and waits for acceptAgain.
func (l *Listener) waitOut(err error) bool {
	shortages := []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED}
	if !slices.ContainsFunc(shortages, func(e error) bool { return errors.Is(err, e) }) {
		return false
	}
	l.opts.Logger.Warn("local socket cannot accept", "socket", l.opts.Path, "err", err)
	timer := time.NewTimer(acceptAgain)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-l.ctx.Done():
		return false
	}
}

// acceptAgain is the pause between a failed accept and the next one.
const acceptAgain = 100 * time.Millisecond

// enter records a connection, so that Close can end it.
func (l *Listener) enter(conn *net.UnixConn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.conns[conn] = struct{}{}
	l.connected++
	l.serving.Add(1)
	return true
}

func (l *Listener) leave(conn *net.UnixConn) {
	_ = conn.Close() // no call is in progress
	l.mu.Lock()
	delete(l.conns, conn)
	l.mu.Unlock()
	l.serving.Done()
}

// helloWithin is the maximum time for sending the hello of 56 bytes to a new connection. The socket
// buffer has room for the hello, so the send normally does not wait at all.
const helloWithin = 5 * time.Second

// serve sends the hello to a connection and serves its session until it ends.
func (l *Listener) serve(conn *net.UnixConn, handle Handler) error {
	uid, err := sys.PeerUID(conn)
	if err != nil {
		return err
	}
	hello := api.LocalHello{ArenaBytes: int64(len(l.opts.Arena.Bytes())), Node: l.id}
	var s *Session
	if uid != *l.opts.UID {
		hello.Status = api.LocalWrongUser
	} else if s = l.begin(); s == nil {
		hello.Status = api.LocalFull
	} else {
		defer l.end(s)
		hello.Session = s.id
	}
	msg, err := hello.MarshalBinary()
	if err != nil {
		return err
	}
	if err := conn.SetDeadline(time.Now().Add(helloWithin)); err != nil {
		return err
	}
	if s == nil {
		l.mu.Lock()
		l.refused++
		l.mu.Unlock()
		_, err := conn.Write(msg)
		return errors.Join(fmt.Errorf("handoff: user %d refused: %v", uid, hello.Status), err)
	}
	if err := l.opts.Arena.Send(conn, msg); err != nil {
		return err
	}
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return err
	}
	return l.converse(conn, s, handle)
}

// readBufferBytes is the size of the read buffer of a connection. It is enough for a typical
// request.
const readBufferBytes = 16 << 10

// replyWithin is the maximum time for which an engine may leave a reply unread. After that time its
// session and its loans end.
const replyWithin = 30 * time.Second

// converse handles an engine's calls until the connection ends or the engine violates the protocol.
func (l *Listener) converse(conn *net.UnixConn, s *Session, handle Handler) error {
	ctx, cancel := context.WithCancel(l.ctx)
	defer cancel()
	in := bufio.NewReaderSize(conn, readBufferBytes)
	var out []byte
	var back []uint64
	for {
		msg, err := api.ReadLocalFrame(in)
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed), errors.Is(err, syscall.ECONNRESET):
			return nil
		case err != nil:
			return fmt.Errorf("handoff: ended a session: %w", err)
		case msg[0] == api.KindReturn:
			if back, err = api.ParseReturn(back[:0], msg); err != nil {
				return fmt.Errorf("handoff: ended a session: %w", err)
			}
			s.Return(back)
		case msg[0] == api.KindStage && len(msg) == 1:
			if err := l.stage(conn, s); err != nil {
				return fmt.Errorf("handoff: ended a session: %w", err)
			}
		case msg[0] == api.KindCall:
			call := &callContext{Context: ctx, conn: conn, cancel: cancel}
			out = handle(call, s.id, msg, append(out[:0], make([]byte, api.LocalFrameHeaderBytes)...))
			call.end()
			if !reply(conn, out) {
				return nil
			}
			if cap(out) > keptReplyBytes {
				out = nil
			}
		default:
			return fmt.Errorf("handoff: ended a session: a message of kind %d with %d bytes", msg[0], len(msg))
		}
	}
}

// callContext is the context of one call. It ends with the connection. Only the first call of Done
// starts the goroutine that watches the connection. Most calls do not use Done, and so need no
// goroutine.
type callContext struct {
	context.Context
	conn   *net.UnixConn
	cancel context.CancelFunc

	mu    sync.Mutex
	ended bool
	// watched is closed when the watch has ended. It is nil if there is no watch.
	watched chan struct{}
}

// Done implements context.Context.
func (c *callContext) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.ended && c.watched == nil {
		c.watched = make(chan struct{})
		go c.watch(c.watched)
	}
	return c.Context.Done()
}

// watch cancels the context when the engine has closed the connection. It does not read from the
// connection, because messages of the engine may wait behind the call (KindReturn). Without the watch
// the end of the stream would be noticed only after these messages.
func (c *callContext) watch(watched chan struct{}) {
	defer close(watched)
	if err := sys.AwaitHangUp(c.conn); !errors.Is(err, os.ErrDeadlineExceeded) {
		c.cancel()
	}
}

// end is called when the call has been handled. After it no watch is running, and the connection has
// no read deadline.
func (c *callContext) end() {
	c.mu.Lock()
	c.ended = true
	watched := c.watched
	c.mu.Unlock()
	if watched == nil {
		return
	}
	// SetReadDeadline fails only on a closed connection, on which the next read fails too.
	_ = c.conn.SetReadDeadline(time.Unix(1, 0)) // ends the watch
	<-watched
	_ = c.conn.SetReadDeadline(time.Time{})
}

// keptReplyBytes is the maximum size of a reply buffer that is kept for reuse.
const keptReplyBytes = 64 << 10

// reply sends a frame. It returns false if the engine has disconnected or does not read.
func reply(conn *net.UnixConn, frame []byte) bool {
	api.PutLocalFrame(frame)
	// A deadline is a timer, for which the runtime wakes a thread. So reply sets none while the
	// socket has room.
	n, err := sys.WriteNow(conn, frame)
	if err == nil && n < len(frame) {
		err = inTime(conn, func() error {
			_, err := conn.Write(frame[n:])
			return err
		})
	}
	return err == nil
}

// inTime calls write, which fails if it does not end within replyWithin.
func inTime(conn *net.UnixConn, write func() error) error {
	if err := conn.SetWriteDeadline(time.Now().Add(replyWithin)); err != nil {
		return err // closed concurrently
	}
	if err := write(); err != nil {
		return err
	}
	return conn.SetWriteDeadline(time.Time{})
}

// stage makes staging memory for a session and sends its descriptor to the engine. If the session
// gets none, the reply has the reason, and the session continues. An error ends the session.
func (l *Listener) stage(conn *net.UnixConn, s *Session) error {
	refused := l.newStaging(s)
	answer, text := api.Reply{}, ""
	if refused != nil {
		answer.Code, text = uint32(codes.ResourceExhausted), refused.Error()
	}
	frame := append(answer.Append(make([]byte, api.LocalFrameHeaderBytes)), text...)
	api.PutLocalFrame(frame)
	return inTime(conn, func() error {
		if refused != nil {
			_, err := conn.Write(frame)
			return err
		}
		return s.staging.Send(conn, frame)
	})
}

// newStaging makes the staging memory of a session, within StagingBytesMax.
func (l *Listener) newStaging(s *Session) error {
	if s.staging != nil {
		return fmt.Errorf("handoff: the session already has %d bytes of staging memory: %w", len(s.staging.Bytes()), ErrFull)
	}
	size := l.StagingBytes()
	l.mu.Lock()
	defer l.mu.Unlock()
	if free := l.opts.StagingBytesMax - l.staged; size > free {
		return fmt.Errorf("handoff: %d bytes of staging memory requested, %d of %d are free (limits.staging_bytes): %w", size, free, l.opts.StagingBytesMax, ErrFull)
	}
	var err error
	if s.staging, err = arena.NewStaging(size); err != nil {
		return err
	}
	l.staged += size
	return nil
}

// begin opens a session. It returns nil if there are SessionsMax sessions.
func (l *Listener) begin() *Session {
	s := &Session{max: l.opts.LoansMax, loans: make(map[uint64]*Loan)}
	_, _ = rand.Read(s.id[:]) // never fails
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.sessions) >= l.opts.SessionsMax {
		return nil
	}
	l.sessions[s.id] = s
	return s
}

func (l *Listener) end(s *Session) {
	l.mu.Lock()
	delete(l.sessions, s.id)
	l.mu.Unlock()
	s.end()
	if s.staging == nil {
		return
	}
	size := int64(len(s.staging.Bytes()))
	if err := s.staging.Close(); err != nil {
		l.opts.Logger.Error("staging memory", "socket", l.opts.Path, "err", err)
	}
	l.mu.Lock()
	l.staged -= size
	l.mu.Unlock()
}

// Session returns the session with the given id. Error: ErrSession.
func (l *Listener) Session(id []byte) (*Session, error) {
	if len(id) != len(api.LocalID{}) {
		return nil, fmt.Errorf("handoff: the session's id has %d bytes: %w", len(id), ErrSession)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s, ok := l.sessions[api.LocalID(id)]
	if !ok {
		return nil, fmt.Errorf("handoff: %w: the connection to %s has ended, or was to another node", ErrSession, l.opts.Path)
	}
	return s, nil
}

// Stats has counters and the current state of a Listener.
type Stats struct {
	// Sessions is the number of open sessions, and Loans the number of their loans (memory lent for
	// one Read each).
	Sessions, Loans int
	// StagingBytes is the staging memory of all sessions.
	StagingBytes int64
	// Connections counts all accepted connections. Refused counts the connections of other users
	// and the connections above SessionsMax.
	Connections, Refused uint64
}

// Stats returns the current values.
func (l *Listener) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := Stats{Sessions: len(l.sessions), Connections: l.connected, Refused: l.refused, StagingBytes: l.staged}
	for _, session := range l.sessions {
		s.Loans += session.count()
	}
	return s
}

// Close removes the socket, ends every session, returns all loans, and waits for the sessions to
// end. It may be called twice.
func (l *Listener) Close() error {
	l.mu.Lock()
	first := !l.closed
	l.closed = true
	l.cancel()
	for conn := range l.conns {
		_ = conn.CloseRead() // ends the session after the call in progress
	}
	l.mu.Unlock()
	var err error
	if first {
		err = l.unix.Close()
	}
	l.serving.Wait()
	return err
}
