package client

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// LocalPiece is one layer group of one block in the memory of the node.
type LocalPiece struct {
	// Block is the index in the chain, Group the layer group.
	Block, Group int
	// Bytes are the piece, or its requested layers. The memory is read-only: a write is a fault
	// that ends the process. It is valid until Return.
	Bytes []byte
}

// LocalResult is the result of ReadLocal.
type LocalResult struct {
	// ReadResult is the result as Read returns it.
	ReadResult
	// Pieces are the pieces that were found and verified, in the order of the request. Pieces
	// behind a lost block are included.
	Pieces []LocalPiece

	loan *loan
}

// Return returns the pieces to the node. Their Bytes must not be touched any more, whatever Return
// returns. A second call has no effect. An error means that the return could not be sent to the
// node; it is sent with the next Return, or the loan ends when the Store is closed.
func (r *LocalResult) Return(ctx context.Context) error {
	if r.loan == nil {
		return nil
	}
	return r.loan.end(ctx)
}

// ReadLocal verifies pieces of a chain in the memory of the node on this host (Options.LocalSocket)
// and returns them in place, without a copy. Into, Base and the pieces' Offset are not used. The
// node keeps the pieces until Return, or until this process ends. The node lends a bounded amount
// of memory, so the outcome may be Busy, and the prefix may be shorter than the cached prefix.
// Callers should call Return soon, and use Read for KV that they keep.
//
// Errors are those of Read. In addition, the error is ErrUnsupported if the socket cannot be
// reached, or if another node than the socket's stores the sequence. Read works in these two cases.
func (s *Store) ReadLocal(ctx context.Context, req ReadRequest) (LocalResult, error) {
	s.stats.reads.Add(1)
	for attempt := 0; ; attempt++ {
		if req.Epochs != nil {
			return LocalResult{}, fmt.Errorf("client: read local: %w: Epochs; use Read for a mixed match", ErrRequest)
		}
		r, err := s.newReading(req)
		if err != nil {
			return LocalResult{}, err
		}
		out, err := r.runLocal(ctx)
		if !errors.Is(err, errLinkLost) || attempt >= s.opts.RetryMax {
			return out, hideLink(err)
		}
		s.stats.retries.Add(1)
	}
}

// errLinkLost reports that the connection to the unix socket has ended. The error never leaves the
// package.
var errLinkLost = errors.New("local session has ended")

func hideLink(err error) error {
	if errors.Is(err, errLinkLost) {
		return fmt.Errorf("client: %w: %s", ErrUnsupported, inner(err))
	}
	return err
}

// borrowing is the additional state of a reading for ReadLocal.
type borrowing struct {
	link *localLink
	loan *loan
	// pieces are the memory ranges of the pieces, from the node's replies. Each entry is written
	// by the task that reads the piece.
	pieces [][]byte
}

// loan is the memory that one ReadLocal has borrowed. It holds a reference to the link.
type loan struct {
	store *Store
	link  *localLink

	mu sync.Mutex
	// node is the node that lent the memory; nil: nothing was borrowed.
	node *node
	// borrowed are the numbers of the loans that the node has made.
	borrowed numbers
	ended    bool
}

// numbers are loan numbers. A number identifies the loan of one Read call in the session with the
// node. Each loan is returned over the transport of its Read call, so that the return cannot overtake
// a call whose reply was never received.
type numbers struct{ socket, grpc []uint64 }

// runLocal performs a ReadLocal whose request was checked.
func (r *reading) runLocal(ctx context.Context) (LocalResult, error) {
	if len(r.pieces) == 0 {
		result, err := r.run(ctx)
		return LocalResult{ReadResult: result}, err
	}
	link, err := r.store.localLink(ctx)
	if err != nil {
		return LocalResult{}, err
	}
	l := &loan{store: r.store, link: link}
	r.local = &borrowing{link: link, loan: l, pieces: make([][]byte, len(r.pieces))}
	result, err := r.run(ctx)
	if err != nil {
		l.abandon()
		return LocalResult{}, err
	}
	out := LocalResult{ReadResult: result, loan: l}
	for i, p := range r.pieces {
		if r.states[i].delivered {
			size := r.pieceBytes(p.Group)
			out.Pieces = append(out.Pieces, LocalPiece{Block: p.Block, Group: p.Group, Bytes: r.local.pieces[i][:size:size]})
		}
	}
	if len(out.Pieces) == 0 {
		l.abandon()
		out.loan = nil
	}
	return out, nil
}

// borrow makes one Read RPC that moves no bytes: it makes the call, finds the pieces in the arena,
// and verifies them.
func (r *reading) borrow(ctx context.Context, t *readTask, sess *session) error {
	link := r.local.link
	if sess.localID != link.node {
		if link.isLost() {
			return fmt.Errorf("client: read local: %s: %w", link.socket, errLinkLost)
		}
		return fmt.Errorf("client: read local: %w: the sequence lives on %s, and %s is another node's socket", ErrUnsupported, t.node.target, link.socket)
	}
	refs := make([]*pb.PieceRef, len(t.pieces))
	for k, i := range t.pieces {
		refs[k] = &pb.PieceRef{Block: uint32(t.local[k]), Group: uint32(r.pieces[i].Group)}
	}
	// From here on the loan number must be returned to the node, even if the call fails.
	number := link.next.Add(1)
	req := r.request(t, refs)
	req.LocalSession, req.Loan = link.session[:], number
	resp, err := link.read(ctx, req)
	taken := errors.Is(err, errSocketTaken)
	if taken {
		resp, err = sess.cache.Read(ctx, req)
	}
	r.local.loan.add(t.node, number, !taken)
	if errors.Is(err, errLinkLost) {
		return fmt.Errorf("client: read local: %s: %w", link.socket, err)
	}
	if status.Code(err) == codes.Aborted {
		link.lose()
		return fmt.Errorf("client: read local: %s: %w", t.node.target, inWords(errLinkLost, status.Convert(err).Message()))
	}
	if err != nil {
		return callError(ctx, "read local", t.node.target, err)
	}
	pieces := resp.GetPieces()
	if len(pieces) == 0 && resp.GetOutcome() == pb.Outcome_OUTCOME_BUSY {
		return fmt.Errorf("client: read local: %s: %w", t.node.target, inWords(errBusy, resp.GetBusyReason()))
	}
	if len(pieces) != len(t.pieces) {
		return fmt.Errorf("client: read local: %s answered for %d pieces of %d", t.node.target, len(pieces), len(t.pieces))
	}
	for k, i := range t.pieces {
		r.local.pieces[i] = slice(link.view.Bytes(), pieces[k].GetArenaOffset(), r.pieceBytes(r.pieces[i].Group))
	}
	r.verify(t, resp, nil)
	return nil
}

// slice returns sizeBytes of mem, a node's arena, from offset; nil if the range is not within mem.
func slice(mem []byte, offset uint64, sizeBytes int64) []byte {
	if sizeBytes < 0 || offset > math.MaxInt64 || int64(offset) > int64(len(mem))-sizeBytes {
		return nil
	}
	return mem[offset : int64(offset)+sizeBytes]
}

// add records the number of a loan from the node.
func (l *loan) add(n *node, number uint64, overSocket bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.node = n
	if overSocket {
		l.borrowed.socket = append(l.borrowed.socket, number)
	} else {
		l.borrowed.grpc = append(l.borrowed.grpc, number)
	}
}

// take marks the loan as ended and returns the loan numbers that must be returned to the node. first
// is true in the first call only.
func (l *loan) take() (n *node, back numbers, first bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	first = !l.ended
	l.ended = true
	return l.node, l.borrowed, first
}

// end returns the loan to the node.
func (l *loan) end(ctx context.Context) error {
	n, back, first := l.take()
	if !first {
		return nil
	}
	defer l.link.release()
	if l.store.ctx.Err() != nil {
		return nil // the Store is closed: the link ends with its last loan
	}
	return l.link.giveBack(ctx, n, back)
}

// abandon returns the loan to the node in the background. It is for a loan that the caller of
// ReadLocal does not get.
func (l *loan) abandon() {
	n, back, first := l.take()
	if !first {
		return
	}
	background := n != nil && l.store.spawn(func() {
		defer l.link.release()
		ctx, cancel := context.WithTimeout(l.store.ctx, l.store.opts.DialTimeout)
		defer cancel()
		// Loan numbers that could not be sent now are sent with the next Return.
		_ = l.link.giveBack(ctx, n, back)
	})
	if !background {
		l.link.release()
	}
}

// giveBack returns loans to the node, including earlier loans whose return could not be sent.
func (l *localLink) giveBack(ctx context.Context, n *node, back numbers) error {
	if n == nil || l.isLost() {
		return nil
	}
	if len(back.socket) > 0 {
		l.sendReturns(back.socket)
	}
	l.mu.Lock()
	numbers := append(back.grpc, l.owed...)
	l.owed = nil
	l.mu.Unlock()
	if len(numbers) == 0 {
		return nil
	}
	sess, err := n.use(ctx)
	if err == nil {
		_, err = sess.cache.ReturnLoans(ctx, &pb.ReturnLoansRequest{LocalSession: l.session[:], Loans: numbers})
		err = n.failed(sess, callError(ctx, "return loans", n.target, err))
	}
	if err != nil && !l.isLost() {
		l.mu.Lock()
		l.owed = append(l.owed, numbers...)
		l.mu.Unlock()
		return hideInternal(err)
	}
	return nil
}
