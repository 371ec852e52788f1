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
	// Bytes are the piece, or the layers asked for. They are read-only: a write
	// is a fault that ends the process. They are valid until Return.
	Bytes []byte
}

// LocalResult is what was borrowed.
type LocalResult struct {
	// ReadResult says what was found, as from Read.
	ReadResult
	// Pieces were found and verified, in the order of the request, also behind a
	// lost block.
	Pieces []LocalPiece

	loan *loan
}

// Return gives the pieces back: their Bytes must not be touched any more,
// whatever it returns. It may be called again, and costs nothing then. An error
// says that the node was not told; it will be with the next Return, or when the
// Store is closed.
func (r *LocalResult) Return(ctx context.Context) error {
	if r.loan == nil {
		return nil
	}
	return r.loan.end(ctx)
}

// ReadLocal borrows pieces of a chain where they lie in the memory of the node on
// this host (Options.LocalSocket), verified, instead of having them moved. Into,
// Base and the pieces' Offset are not used. The node keeps the pieces until
// Return, or until this process ends, and lends a bounded amount of memory: Busy
// is an outcome, as is a prefix that is shorter than what is cached. Return
// promptly, and Read what is to be kept.
//
// Errors are those of Read, and ErrUnsupported if the socket cannot be reached,
// or is that of another node than the sequence's: Read still works.
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

// errLinkLost says that the connection to the unix socket has ended. It never
// leaves the package.
var errLinkLost = errors.New("local session has ended")

func hideLink(err error) error {
	if errors.Is(err, errLinkLost) {
		return fmt.Errorf("client: %w: %s", ErrUnsupported, inner(err))
	}
	return err
}

// borrowing is the local part of a reading.
type borrowing struct {
	link *localLink
	loan *loan
	// pieces are where the node says that each piece lies. Each is written by
	// the task that the piece belongs to.
	pieces [][]byte
}

// loan is what one ReadLocal has borrowed. It holds a reference to the link.
type loan struct {
	store *Store
	link  *localLink

	mu sync.Mutex
	// node lent the numbers; nil: nothing was borrowed.
	node     *node
	borrowed numbers
	ended    bool
}

// numbers are loans by the way on which they were asked for. They are given back
// on the same: so a return cannot overtake the call that made the loan, whose
// reply may never have been seen.
type numbers struct{ socket, grpc []uint64 }

// runLocal performs a checked ReadLocal.
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

// borrow is one Read RPC that moves no bytes: call, look there, verify.
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
	// From here on the number is ours to return, whatever comes of the call.
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

// slice returns the memory that a node names; nil if it is not all in the node's arena mem.
func slice(mem []byte, offset uint64, sizeBytes int64) []byte {
	if sizeBytes < 0 || offset > math.MaxInt64 || int64(offset) > int64(len(mem))-sizeBytes {
		return nil
	}
	return mem[offset : int64(offset)+sizeBytes]
}

// add notes the number of a loan from the node.
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

// take ends the loan on our side and returns what the node has to be told. It
// does so once.
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

// abandon is end in the background, for a loan that nobody will see.
func (l *loan) abandon() {
	n, back, first := l.take()
	if !first {
		return
	}
	background := n != nil && l.store.spawn(func() {
		defer l.link.release()
		ctx, cancel := context.WithTimeout(l.store.ctx, l.store.opts.DialTimeout)
		defer cancel()
		// What it cannot tell the node is told with the next Return.
		_ = l.link.giveBack(ctx, n, back)
	})
	if !background {
		l.link.release()
	}
}

// giveBack tells the node that loans, and those of which it could not be told
// before, have ended.
func (l *localLink) giveBack(ctx context.Context, n *node, back numbers) error {
	if n == nil || l.isLost() {
		return nil
	}
	if len(back.socket) > 0 {
		l.tell(back.socket)
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
