package client

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/sys"
)

const (
	// localConnsMax is the largest number of connections to one node's unix socket, and so of Read
	// tasks that copy from the node's arena at a time.
	localConnsMax = 16
	// localCheckEvery is how long a call on the socket blocks before the client checks that the node
	// is still connected.
	localCheckEvery = time.Second
	// owedFor is the longest time for which a loan of node memory is kept after its bytes have been
	// copied. The loan is returned together with the next call, which spares the node a wake-up, or
	// after owedFor if there is no next call.
	owedFor = 5 * time.Millisecond
)

// errNotLocal reports that a call was not made on a unix socket, or failed there, and that it can
// be made over another transport. It never leaves the package.
var errNotLocal = errors.New("not over a unix socket")

// localConns are the connections to the unix socket of one node. They carry Match calls, chunks of
// Writes, and the calls of Read tasks. The reply to a Read task's call has the position of each
// piece in the node's arena.
//
// Each connection carries one call at a time, which the caller's thread makes with
// blocking system calls. The runtime's poller would wake two threads for each reply: a
// small call would take several times as long.
type localConns struct {
	store *Store

	mu sync.Mutex
	// node identifies the run of the node (from a start to its end) to which all connections lead.
	node api.LocalID
	view *sharedView
	all  map[*localConn]struct{}
	idle []*localConn
	// dialing is the number of connections that are being made. After a failed attempt, no
	// connection is made before notBefore.
	dialing   int
	notBefore time.Time
	// stageAfter is the earliest time of the next request for staging memory. Zero: the node has
	// not refused such a request.
	stageAfter time.Time
	// repaying is set while a timer is pending that returns owed loans.
	repaying bool
	closed   bool
}

// sharedView is the mapping that all connections to one run of a node share.
type sharedView struct {
	*arena.View
	users int // guarded by localConns.mu
}

// localConn is a connection to a node's unix socket. The call that uses the connection owns the
// connection's fields; while the connection is idle, localConns owns them.
type localConn struct {
	owner *localConns
	// file is the socket. Its calls block the thread.
	file *os.File
	in   *bufio.Reader
	view *sharedView
	// staging is the memory into which the bytes of writes are copied; nil: not requested yet.
	staging *arena.Staging
	session api.LocalID
	calls   uint64
	// owed is the number of the loan (memory that the node has lent) that must be returned with the
	// next call; 0: none.
	owed uint64
	// up reports whether the node is still connected. It is set for each call.
	up func() bool
	// held is set while the loan of a call is in use. localConns.mu guards it.
	held bool
}

// take returns an idle connection to the node of a session. If there is none, it makes one in the
// background and returns an error, because mapping a large arena takes longer than a Read. Error:
// errNotLocal.
func (l *localConns) take(sess *session) (*localConn, error) {
	return l.takeWhere(sess, func(*localConn) bool { return true })
}

// takeStaging is take, but prefers a connection that has staging memory.
func (l *localConns) takeStaging(sess *session) (*localConn, error) {
	return l.takeWhere(sess, func(c *localConn) bool { return c.staging != nil })
}

// takeWhere is take, but prefers the most recently used connection for which prefer returns true.
func (l *localConns) takeWhere(sess *session, prefer func(*localConn) bool) (*localConn, error) {
	path := l.path(sess)
	if path == "" {
		return nil, errNotLocal
	}
	var old []*localConn
	defer func() { closeConns(old) }()
	l.mu.Lock()
	defer l.mu.Unlock()
	old = l.followLocked(sess)
	if n := len(l.idle); n > 0 {
		at := n - 1
		for i, c := range slices.Backward(l.idle) {
			if prefer(c) {
				at = i
				break
			}
		}
		c := l.idle[at]
		l.idle = slices.Delete(l.idle, at, at+1)
		return c, nil
	}
	l.dialLocked(path, sess)
	return nil, errNotLocal
}

// followLocked prepares l for connections to the run of the node in sess. If the present
// connections lead to another run, it retires them and returns the idle ones, which the caller
// closes after it has released the lock.
func (l *localConns) followLocked(sess *session) (old []*localConn) {
	if l.node != sess.localID {
		old = l.retireLocked()
		l.node, l.notBefore, l.stageAfter = sess.localID, time.Time{}, time.Time{}
	}
	return old
}

// dialLocked starts to make one more connection in the background. It does nothing if l is closed
// or has localConnsMax connections, while another connection is being made, and until notBefore.
func (l *localConns) dialLocked(path string, sess *session) {
	if !l.closed && len(l.all)+l.dialing < localConnsMax && l.dialing == 0 && !time.Now().Before(l.notBefore) {
		if l.store.spawn(func() { l.dial(path, sess.localID) }) {
			l.dialing++
		}
	}
}

// chunkBytes returns the largest chunk in bytes for the socket of the node of a session, or 0 if
// chunks do not go over the socket. It starts to make a connection if there is none.
func (l *localConns) chunkBytes(sess *session) int64 {
	path := l.path(sess)
	if path == "" || sess.stagingBytes == 0 {
		return 0
	}
	var old []*localConn
	defer func() { closeConns(old) }()
	l.mu.Lock()
	defer l.mu.Unlock()
	old = l.followLocked(sess)
	if len(l.all) > 0 {
		return sess.stagingBytes
	}
	l.dialLocked(path, sess)
	return 0
}

// path returns the path of the node's unix socket; empty if the socket is not used.
func (l *localConns) path(sess *session) string {
	if l.store.opts.NoLocal {
		return ""
	}
	return cmp.Or(l.store.opts.LocalSocket, sess.localSocket)
}

// dial makes an idle connection to a run of the node.
func (l *localConns) dial(path string, node api.LocalID) {
	ctx, cancel := context.WithTimeout(l.store.ctx, l.store.opts.DialTimeout)
	defer cancel()
	c, err := l.connect(ctx, path, node)
	l.mu.Lock()
	l.dialing--
	first := l.notBefore.IsZero()
	if err != nil {
		l.notBefore = time.Now().Add(l.store.opts.DeadFor)
	}
	l.mu.Unlock()
	switch {
	case err == nil:
		l.put(c, true)
	case first && ctx.Err() == nil:
		l.store.opts.Logger.Info("reads do not use the node's unix socket", "socket", path, "err", err)
	}
}

func (l *localConns) connect(ctx context.Context, path string, node api.LocalID) (*localConn, error) {
	raw, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	conn := raw.(*net.UnixConn)
	memfd, hello, err := receiveHello(ctx, conn)
	var view *sharedView
	if err == nil {
		view, err = l.share(memfd, hello, node)
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	file, err := sys.Blocking(conn, localCheckEvery)
	if err != nil {
		return nil, errors.Join(err, l.unshare(view))
	}
	c := &localConn{owner: l, file: file, view: view, session: hello.Session}
	c.in = bufio.NewReader(c)
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed && l.node == node {
		l.all[c], l.view = struct{}{}, view
	}
	return c, nil
}

// share returns the shared mapping of the node's arena, takes a reference to the mapping, and
// closes memfd.
func (l *localConns) share(memfd *os.File, hello api.LocalHello, node api.LocalID) (*sharedView, error) {
	if hello.Node != node {
		return nil, errors.Join(errors.New("another node listens on this socket"), memfd.Close())
	}
	l.mu.Lock()
	v := l.view // of the run l.node
	if l.node != node {
		v = nil
	}
	if v != nil {
		v.users++
	}
	l.mu.Unlock()
	if v != nil {
		return v, memfd.Close()
	}
	mapped, err := mapArena(memfd, hello)
	if err != nil {
		return nil, err
	}
	return &sharedView{View: mapped, users: 1}, nil
}

// unshare releases a reference to a mapping. The last release unmaps it.
func (l *localConns) unshare(v *sharedView) error {
	l.mu.Lock()
	v.users--
	last := v.users == 0
	if last && l.view == v {
		l.view = nil
	}
	l.mu.Unlock()
	if !last {
		return nil
	}
	return v.Close()
}

// hold keeps the connection open until put, so that the node does not take back the memory that the
// connection's last call borrowed. It reports false if the connection has been retired.
func (l *localConns) hold(c *localConn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, c.held = l.all[c]
	return c.held
}

// put returns a connection after a call. It closes the connection if usable is false or the
// connection has been retired.
func (l *localConns) put(c *localConn, usable bool) {
	l.mu.Lock()
	c.held = false
	_, current := l.all[c]
	if usable && current {
		l.idle = append(l.idle, c)
		if c.owed != 0 && !l.repaying {
			l.repaying = true
			time.AfterFunc(owedFor, func() { l.store.spawn(l.repay) })
		}
		l.mu.Unlock()
		return
	}
	delete(l.all, c)
	l.mu.Unlock()
	c.close()
}

// repay returns the memory that the node has lent to connections that are idle (localConn.owed).
func (l *localConns) repay() {
	l.mu.Lock()
	l.repaying = false
	var owing []*localConn
	l.idle = slices.DeleteFunc(l.idle, func(c *localConn) bool {
		if c.owed != 0 {
			owing = append(owing, c)
		}
		return c.owed != 0
	})
	l.mu.Unlock()
	for _, c := range owing {
		_, err := c.file.Write(api.AppendReturn(nil, []uint64{c.owed}))
		c.owed = 0
		l.put(c, err == nil)
	}
}

// retireLocked retires all connections. It returns the idle connections, which the caller closes
// after it has released the lock. It ends the calls in progress; put then closes their connections.
func (l *localConns) retireLocked() (idle []*localConn) {
	idle, l.idle, l.view = l.idle, nil, nil
	for c := range l.all {
		if !c.held {
			c.end()
		}
	}
	clear(l.all)
	return idle
}

// close ends all calls. No connection is made afterwards.
func (l *localConns) close() {
	l.mu.Lock()
	l.closed = true
	idle := l.retireLocked()
	l.mu.Unlock()
	closeConns(idle)
}

func closeConns(conns []*localConn) {
	for _, c := range conns {
		c.close()
	}
}

// end fails the running call on the connection. The node takes its loans back when the connection
// is closed.
func (c *localConn) end() {
	_ = sys.EndReads(c.file) // fails if the node has gone
}

func (c *localConn) close() {
	_ = c.file.Close()          // nothing is in flight on it
	_ = c.owner.unshare(c.view) // fails only for a mapping that does not exist
	if c.staging != nil {
		_ = c.staging.Close()
	}
}

// Read reads from the socket. If a read times out, Read tries again as long as the node is
// connected.
func (c *localConn) Read(p []byte) (int, error) {
	for {
		n, err := c.file.Read(p)
		if !errors.Is(err, syscall.EAGAIN) || !c.up() {
			return n, err
		}
	}
}

// call makes a call, and returns the owed loan with it. If ctx ends, the connection ends too.
// Errors: errLinkLost, a gRPC status, the error of ctx.
func (c *localConn) call(ctx context.Context, m api.Method, req, resp proto.Message, up func() bool) (err error) {
	ctx, span := startSpan(ctx, transportSocket, m)
	defer func() { endSpan(span, err) }()
	var frames []byte
	if c.owed != 0 {
		frames = api.AppendReturn(frames, []uint64{c.owed})
	}
	c.calls++
	c.owed, c.up = 0, up
	// The deadline of ctx is not sent: a deadline would cost the node a timer and a goroutine, and
	// the connection ends with ctx anyway.
	head, frame, err := localFrame(context.WithoutCancel(ctx), m, c.calls, req, span)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, c.end)
	var reply localReply
	if _, err = c.file.Write(append(frames, frame...)); err == nil {
		reply.msg, reply.err = api.ReadLocalFrame(c.in)
	}
	if !stop() {
		return ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errLinkLost, err)
	}
	return reply.decode(head.ID, resp)
}

// ended handles the error of a call and puts the connection back. Errors: errNotLocal, the error of
// ctx.
func (c *localConn) ended(ctx context.Context, what string, err error) error {
	// A node that refuses a call has lent no memory. The call is repeated over another transport,
	// which returns the reason for the refusal again.
	c.owner.put(c, !errors.Is(err, errLinkLost) && ctx.Err() == nil)
	if ctx.Err() != nil {
		return fmt.Errorf("client: %s: %w", what, ctx.Err())
	}
	return errNotLocal
}

// callLocal calls the node over the unix socket. The call transfers no bytes of blocks. Errors use
// the name of the call, what. Errors: errNotLocal, the error of ctx.
func (n *node) callLocal(ctx context.Context, sess *session, what string, m api.Method, req, resp proto.Message) error {
	c, err := n.local.take(sess)
	if err != nil {
		return err
	}
	if err := c.call(ctx, m, req, resp, func() bool { return n.dataConnected(sess) }); err != nil {
		return c.ended(ctx, what, err)
	}
	n.local.put(c, true)
	return nil
}

// matchLocal makes the call of a Match on the unix socket. Errors: errNotLocal, the error of ctx.
func (n *node) matchLocal(ctx context.Context, sess *session, req *pb.MatchRequest) (*pb.MatchResponse, error) {
	if !sess.localMatch || req.GetPin() {
		return nil, errNotLocal
	}
	resp := new(pb.MatchResponse)
	if err := n.callLocal(ctx, sess, "match", api.MethodMatch, req, resp); err != nil {
		return nil, err
	}
	n.store.stats.localMatches.Add(1)
	return resp, nil
}

// existsLocal makes the call of an Exists on the unix socket. Errors: errNotLocal, the error of
// ctx.
func (n *node) existsLocal(ctx context.Context, sess *session, req *pb.ExistsRequest) (*pb.ExistsResponse, error) {
	resp := new(pb.ExistsResponse)
	if err := n.callLocal(ctx, sess, "exists", api.MethodExists, req, resp); err != nil {
		return nil, err
	}
	n.store.stats.localExists.Add(1)
	return resp, nil
}

// copyTask performs a task by copying its pieces from the arena of a node on this host, and
// verifies the copies. Errors: errNotLocal, the error of ctx.
func (r *reading) copyTask(ctx context.Context, t *readTask, sess *session) error {
	c, err := t.node.local.take(sess)
	if err != nil {
		return err
	}
	refs := make([]*pb.PieceRef, len(t.pieces))
	for k, i := range t.pieces {
		refs[k] = &pb.PieceRef{Block: uint32(t.local[k]), Group: uint32(r.pieces[i].Group)}
	}
	req, resp := r.request(t, refs), new(pb.ReadResponse)
	loan := c.calls + 1
	req.LocalSession, req.Loan = c.session[:], loan
	if err := c.call(ctx, api.MethodRead, req, resp, func() bool { return t.node.dataConnected(sess) }); err != nil {
		return c.ended(ctx, "read", err)
	}
	c.owed = loan
	if !t.node.local.hold(c) {
		t.node.local.put(c, false)
		return errNotLocal
	}
	counted, delivered := r.progress.attempt(), int64(0)
	defer func() { counted.end(delivered) }()
	zones := r.zones(t)
	arrival := r.newArrival(t, zones)
	answered := len(resp.GetPieces()) == len(t.pieces) && !refused(resp) && (!anyFailed(resp) || t.node.dataConnected(sess))
	whole := answered && r.copyPieces(t, resp, c.view.Bytes(), arrival, zones, counted)
	t.node.local.put(c, true)
	if !whole {
		return errNotLocal
	}
	r.store.stats.localReads.Add(1)
	r.verify(t, resp, arrival)
	if counted != nil {
		delivered = r.delivered(t)
		r.progress.verified(r.prefix())
	}
	return nil
}

// refused reports whether the node had no room for a piece, or did not lend the piece.
func refused(resp *pb.ReadResponse) bool {
	return resp.GetBusyReason() != "" && slices.ContainsFunc(resp.GetPieces(), func(p *pb.PieceResult) bool {
		return p.GetState() == pb.PieceResult_STATE_FAILED && p.GetReason() == resp.GetBusyReason()
	})
}

// layerCopy is the copy of one layer from an arena.
type layerCopy struct {
	from   []byte
	target int
	offset int64 // in the target
}

// copyPieces copies the pieces that the response delivers, layer by layer, and hashes each layer
// while the layer is in the CPU cache. It reports false if the response names a range outside of
// the arena.
func (r *reading) copyPieces(t *readTask, resp *pb.ReadResponse, mem []byte, arrival *arrival, zones []zone, counted *attemptBytes) bool {
	var layers []layerCopy
	var one [1]run
	total := int64(0)
	for k, i := range t.pieces {
		result := resp.GetPieces()[k]
		if result.GetState() != pb.PieceResult_STATE_DELIVERED {
			continue
		}
		group := r.pieces[i].Group
		size := r.pieceBytes(group)
		from := slice(mem, result.GetArenaOffset(), size)
		if from == nil {
			return false
		}
		total += size
		n := r.req.Namespace.Geometry.LayerBytes(group)
		for _, f := range r.runs(i, &one) {
			for x := range int64(f.layers) {
				layers = append(layers, layerCopy{from: from[:n:n], target: f.target, offset: f.offset + x*n})
				from = from[n:]
			}
		}
	}
	r.store.workers.Do(len(layers), total, func(from, to int) {
		for _, c := range layers[from:to] {
			copy(r.targets[c.target].Bytes()[c.offset:], c.from)
			at, n := uint64(c.offset-zones[c.target].lo), uint64(len(c.from))
			if arrival != nil {
				arrival.landed(c.target, at, n)
			}
			if counted != nil {
				counted.add(int64(n))
			}
		}
	})
	return true
}

// localFrame returns a call encoded for a unix socket.
func localFrame(ctx context.Context, m api.Method, id uint64, req proto.Message, span trace.Span) (api.Call, []byte, error) {
	head := newCall(ctx, m, id, api.LocalFrameMax, span)
	frame := make([]byte, api.LocalFrameHeaderBytes, api.LocalFrameHeaderBytes+api.CallHeaderBytes+proto.Size(req))
	frame, err := head.Append(frame, req)
	if err == nil {
		api.PutLocalFrame(frame)
	}
	return head, frame, err
}

var _ io.Reader = (*localConn)(nil)
