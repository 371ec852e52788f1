package client

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/arena"
)

// localSocket is the Store's connection to the unix socket of the node on this host.
type localSocket struct {
	// turn has one element while a goroutine connects, so that only one goroutine connects at a
	// time. No lock is held during the connect.
	turn chan struct{}

	mu     sync.Mutex
	link   *localLink // nil: not connected, or the link was lost
	closed bool
}

// localLink is one session on a node's unix socket, with the node's arena mapped into this process.
// It lasts as long as the Store or a LocalResult has a reference. While the connection is open, the
// node keeps the memory that it has lent to this process.
type localLink struct {
	socket        string
	conn          *net.UnixConn
	view          *arena.View
	node, session api.LocalID
	// next is the number of the most recent loan of node memory.
	next atomic.Uint64
	// calls is the number of the most recent call.
	calls atomic.Uint64
	// watched is closed when the watcher has ended.
	watched chan struct{}

	mu sync.Mutex
	// refs counts the Store's reference and one reference for each loan. When the last reference is
	// released, the connection and the mapping are closed.
	refs int
	// lost is set when the node has closed the connection, or does not have the session any more.
	lost bool
	// owed are the numbers of loans whose return could not be sent to the node.
	owed []uint64
	// call receives the reply of the running call on the socket; nil if there is none.
	call chan localReply
}

// localReply is the result of a call on the socket.
type localReply struct {
	msg []byte
	err error
}

// errSocketTaken reports that another call is running on the socket. The error never leaves the
// package.
var errSocketTaken = errors.New("a call is under way")

// read makes the Read RPC over the socket. Errors: errSocketTaken, errLinkLost, a gRPC status, the
// error of ctx.
func (l *localLink) read(ctx context.Context, req *pb.ReadRequest) (_ *pb.ReadResponse, err error) {
	ctx, span := startSpan(ctx, transportSocket, api.MethodRead)
	defer func() { endSpan(span, err) }()
	head, frame, err := localFrame(ctx, api.MethodRead, l.calls.Add(1), req, span)
	if err != nil {
		return nil, err
	}
	call := make(chan localReply, 1)
	l.mu.Lock()
	if l.call != nil || l.lost {
		l.mu.Unlock()
		return nil, errSocketTaken
	}
	l.call = call
	l.mu.Unlock()
	if _, err := l.conn.Write(frame); err != nil {
		l.lose()
		return nil, fmt.Errorf("%w: %w", errLinkLost, err)
	}
	select {
	case reply := <-call:
		resp := new(pb.ReadResponse)
		return resp, reply.decode(head.ID, resp)
	case <-ctx.Done():
		// The reply has not arrived, and no other call can use the socket until it has.
		return nil, ctx.Err()
	}
}

// decode decodes a reply into resp. Errors: errLinkLost, a gRPC status.
func (r localReply) decode(id uint64, resp proto.Message) error {
	if r.err != nil {
		return fmt.Errorf("%w: %w", errLinkLost, r.err)
	}
	head, body, err := api.ParseReply(r.msg)
	if err == nil && head.ID != id {
		err = fmt.Errorf("a reply to call %d; this is call %d: %w", head.ID, id, api.ErrCall)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errLinkLost, err)
	}
	if head.Code != 0 {
		return status.Error(codes.Code(head.Code), string(body))
	}
	if err := proto.Unmarshal(body, resp); err != nil {
		return fmt.Errorf("%w: %w", errLinkLost, err)
	}
	return nil
}

// sendReturns returns loans over the socket. If the write fails, the connection has ended, and the
// node has taken the loans back. If hundreds of returns are queued behind a call, sendReturns may
// block until the node has answered that call.
func (l *localLink) sendReturns(numbers []uint64) {
	if _, err := l.conn.Write(api.AppendReturn(nil, numbers)); err != nil {
		l.lose()
	}
}

// localLink returns the link with a reference. It connects if there is no link. Errors:
// ErrUnsupported, ErrClosed, the error of ctx.
func (s *Store) localLink(ctx context.Context) (*localLink, error) {
	path := s.opts.LocalSocket
	if path == "" {
		return nil, fmt.Errorf("client: read local: %w: Options.LocalSocket names no socket", ErrUnsupported)
	}
	if l, err := s.local.current(); l != nil || err != nil {
		return l, err
	}
	select {
	case s.local.turn <- struct{}{}:
		defer func() { <-s.local.turn }()
	case <-ctx.Done():
		return nil, fmt.Errorf("client: connect to %s: %w", path, ctx.Err())
	}
	if l, err := s.local.current(); l != nil || err != nil {
		return l, err
	}
	l, err := dialLocal(ctx, path, s.opts.DialTimeout)
	if err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, fmt.Errorf("client: connect to %s: %w", path, err)
	}
	return l, s.local.adopt(l)
}

// current returns the link with a reference; nil if there is none.
func (c *localSocket) current() (*localLink, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fmt.Errorf("client: read local: %w", ErrClosed)
	}
	if c.link == nil || !c.link.retain() {
		return nil, nil
	}
	return c.link, nil
}

// adopt makes l the Store's link and takes over the caller's reference to l. If the Store is
// closed, adopt releases this reference and returns an error.
func (c *localSocket) adopt(l *localLink) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		l.release()
		return fmt.Errorf("client: read local: %w", ErrClosed)
	}
	old := c.link
	c.link = l
	l.retain()
	c.mu.Unlock()
	if old != nil {
		old.release() // the old link was lost
	}
	go l.watch(c)
	return nil
}

// forget releases the Store's reference to a lost link.
func (c *localSocket) forget(l *localLink) {
	c.mu.Lock()
	mine := c.link == l
	if mine {
		c.link = nil
	}
	c.mu.Unlock()
	if mine {
		l.release()
	}
}

// close releases the Store's reference to the link. The link ends now, or when the last result is
// returned.
func (c *localSocket) close() {
	c.mu.Lock()
	l := c.link
	c.link, c.closed = nil, true
	c.mu.Unlock()
	if l != nil && l.release() {
		<-l.watched
	}
}

// dialLocal connects to the node's socket and maps its arena.
func dialLocal(ctx context.Context, path string, timeout time.Duration) (*localLink, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	conn := c.(*net.UnixConn)
	memfd, hello, err := receiveHello(ctx, conn)
	var view *arena.View
	if err == nil {
		view, err = mapArena(memfd, hello)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnsupported, errors.Join(err, conn.Close()))
	}
	return &localLink{socket: path, conn: conn, view: view, node: hello.Node, session: hello.Session, watched: make(chan struct{}), refs: 1}, nil
}

// receiveHello reads the first message of a node. If it returns no error, the memfd of the node's
// arena is not nil.
func receiveHello(ctx context.Context, conn *net.UnixConn) (*os.File, api.LocalHello, error) {
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	var hello api.LocalHello
	msg := make([]byte, api.LocalHelloBytes)
	memfd, err := arena.ReceiveFile(conn, msg)
	if err != nil {
		return nil, hello, err
	}
	err = hello.UnmarshalBinary(msg)
	switch {
	case err != nil:
	case hello.Status != api.LocalWelcome:
		err = errors.New(hello.Status.String())
	case memfd == nil:
		err = errors.New("the node sent no descriptor of its arena")
	case !stop():
		err = ctx.Err()
	}
	if err == nil {
		return memfd, hello, nil
	}
	if memfd != nil {
		err = errors.Join(err, memfd.Close())
	}
	return nil, hello, err
}

// mapArena maps the arena whose descriptor came with a hello, and closes memfd.
func mapArena(memfd *os.File, hello api.LocalHello) (*arena.View, error) {
	view, err := arena.Map(int(memfd.Fd()))
	err = errors.Join(err, memfd.Close())
	if have := int64(0); err == nil {
		if have = int64(len(view.Bytes())); have != hello.ArenaBytes {
			err = fmt.Errorf("the node says that its arena has %d bytes and sent one of %d", hello.ArenaBytes, have)
		}
	}
	if err == nil {
		return view, nil
	}
	if view != nil {
		err = errors.Join(err, view.Close())
	}
	return nil, err
}

// watch passes replies to their calls until the connection ends. Then it drops the Store's
// reference, so that the mapping does not keep the memory of a node that has ended.
func (l *localLink) watch(c *localSocket) {
	defer close(l.watched)
	in := bufio.NewReader(l.conn)
	for {
		msg, err := api.ReadLocalFrame(in)
		l.mu.Lock()
		call := l.call
		l.call = nil
		l.lost = l.lost || err != nil || call == nil
		lost := l.lost
		l.mu.Unlock()
		if call != nil {
			call <- localReply{msg, err}
		}
		if lost {
			c.forget(l)
			return
		}
	}
}

// retain takes a reference. It reports false if the link is lost or has ended.
func (l *localLink) retain() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lost || l.refs == 0 {
		return false
	}
	l.refs++
	return true
}

// release gives up a reference and reports whether it was the last.
func (l *localLink) release() (last bool) {
	l.mu.Lock()
	l.refs--
	last = l.refs == 0
	l.mu.Unlock()
	if last {
		_ = l.conn.Close() // when the connection closes, the node takes back its loans
		_ = l.view.Close() // Close fails only for a mapping that does not exist
	}
	return last
}

// lose marks the link as unusable for new reads.
func (l *localLink) lose() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lost = true
}

func (l *localLink) isLost() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lost
}
