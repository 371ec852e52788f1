package server

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/server/handoff"
	"github.com/penstock-kv/penstock/server/storage"
)

// session returns the session on the unix socket with the given id.
func (s *Server) session(id []byte) (*handoff.Session, error) {
	if s.opts.Local == nil {
		return nil, fmt.Errorf("this node has no local socket (local_socket): %w", handoff.ErrSession)
	}
	return s.opts.Local.Session(id)
}

// readLocal performs a Read for an engine that maps the arena. The pieces are not copied: they stay
// in the arena, under the loan whose number is in the request.
func (s *cacheService) readLocal(ctx context.Context, sessionID []byte, req *pb.ReadRequest, load storage.LoadRequest) (*pb.ReadResponse, error) {
	if len(req.GetDestination()) > 0 {
		return nil, invalid(errors.New("a local read has no destination: the pieces stay in the arena"))
	}
	session, err := s.session(sessionID)
	if err != nil {
		return nil, statusOf(err)
	}
	loan, err := session.Open(req.GetLoan())
	if errors.Is(err, handoff.ErrFull) {
		return busyRead(err), nil
	}
	if err != nil {
		return nil, statusOf(err)
	}
	l := &lending{loan: loan, offsets: make([]uint64, len(req.GetPieces()))}
	load.Keep = true
	result, err := s.node.Load(ctx, load, s.spenderOf(ctx).reads(l.deliver))
	// If ctx has ended, the caller does not get this reply, so the loan ends here. If the caller
	// stops waiting after this point, it returns the loan itself. If the caller has returned the
	// loan already, pieces that are added to the loan are released at once.
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		loan.End()
		if errors.Is(err, storage.ErrBusy) {
			return busyRead(err), nil
		}
		return nil, statusOf(err)
	}
	resp := readResponse(result, 0)
	lent := false
	for i, p := range resp.GetPieces() {
		if p.GetState() == pb.PieceResult_STATE_DELIVERED {
			p.ArenaOffset = l.offsets[i]
			lent = true
		}
	}
	if !lent {
		loan.End()
	}
	return resp, nil
}

// lending adds the pieces of one Read to a loan and records their offsets in the arena.
type lending struct {
	loan *handoff.Loan

	mu sync.Mutex
	// offsets has the arena offset of each piece. A piece has one offset, because with
	// LoadRequest.Keep storage delivers it as one part.
	offsets []uint64
}

func (l *lending) deliver(_ context.Context, parts []storage.Part) {
	for i := range parts {
		p := &parts[i]
		release, err := p.Keep()
		if err == nil {
			l.loan.Add(release)
			l.mu.Lock()
			l.offsets[p.Piece] = uint64(p.ArenaOffset)
			l.mu.Unlock()
		}
		p.Done(err)
	}
}

// write performs Reserve and Commit in one call. The engine has put the bytes of the pieces into
// the staging memory of its session.
func (s *cacheService) write(ctx context.Context, by caller, req *pb.WriteRequest) (*pb.WriteResponse, error) {
	session, err := s.session(by.session[:])
	if err != nil {
		return nil, statusOf(err)
	}
	offered := req.GetReserve().GetPieces()
	if len(offered) == 0 || len(req.GetSums()) != len(offered) {
		return nil, invalid(fmt.Errorf("the write has %d pieces and sums for %d", len(offered), len(req.GetSums())))
	}
	for i, p := range req.GetSums() {
		if o := offered[i]; p.GetBlock() != o.GetBlock() || p.GetGroup() != o.GetGroup() {
			return nil, invalid(fmt.Errorf("the sums are for block %d, group %d, but piece %d is block %d, group %d", p.GetBlock(), p.GetGroup(), i, o.GetBlock(), o.GetGroup()))
		}
	}
	r, err := s.reserveRequest(req.GetReserve())
	if err != nil {
		return nil, err
	}
	r.Attach = func(res *storage.Reservation) error { return res.TakeFrom(session.Staging()) }
	resp := &pb.WriteResponse{Reserve: new(pb.ReserveResponse)}
	id, err := s.reserveFor(ctx, r, resp.Reserve)
	if err != nil {
		return nil, err
	}
	if id == 0 {
		return resp, nil
	}
	var granted []*pb.PieceSums
	for i, p := range resp.Reserve.GetPieces() {
		if p.GetState() == pb.PieceResult_STATE_GRANTED {
			granted = append(granted, req.GetSums()[i])
		}
	}
	// The bytes have arrived. The commit continues even if the engine ends, as it does over the
	// data plane.
	resp.Commit, err = s.commit(context.WithoutCancel(ctx), id, granted, nil)
	if err != nil {
		st := status.Convert(statusOf(err))
		resp.CommitCode, resp.CommitError = uint32(st.Code()), st.Message()
	}
	return resp, nil
}

// ReturnLoans implements penstock.v1.Cache. A session that has ended has returned all its loans, so
// ReturnLoans for such a session is not an error.
func (s *cacheService) ReturnLoans(_ context.Context, req *pb.ReturnLoansRequest) (*pb.ReturnLoansResponse, error) {
	session, err := s.session(req.GetLocalSession())
	if errors.Is(err, handoff.ErrSession) {
		return &pb.ReturnLoansResponse{}, nil
	}
	if err != nil {
		return nil, statusOf(err)
	}
	session.Return(req.GetLoans())
	return &pb.ReturnLoansResponse{}, nil
}
