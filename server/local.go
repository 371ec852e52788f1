package server

import (
	"context"
	"errors"
	"fmt"
	"sync"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/server/handoff"
	"github.com/penstock-kv/penstock/server/storage"
)

// session is the caller's session on the unix socket.
func (s *Server) session(id []byte) (*handoff.Session, error) {
	if s.opts.Local == nil {
		return nil, fmt.Errorf("this node has no local socket (local_socket): %w", handoff.ErrSession)
	}
	return s.opts.Local.Session(id)
}

// readLocal answers a Read of an engine that maps the arena: the pieces stay
// where they are, under the loan that the request numbers.
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
		return &pb.ReadResponse{Outcome: pb.Outcome_OUTCOME_BUSY, BusyReason: sentence(err)}, nil
	}
	if err != nil {
		return nil, statusOf(err)
	}
	l := &lending{loan: loan, offsets: make([]uint64, len(req.GetPieces()))}
	load.Keep = true
	result, err := s.node.Load(ctx, load, l.deliver)
	// The reply to a caller that has given up is lost. One that gives up later
	// returns the loan himself, which may come before this line: then what is
	// added to the loan is released at once.
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		loan.End()
		if errors.Is(err, storage.ErrBusy) {
			return &pb.ReadResponse{Outcome: pb.Outcome_OUTCOME_BUSY, BusyReason: sentence(err)}, nil
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

// lending puts the pieces of one Read into a loan.
type lending struct {
	loan *handoff.Loan

	mu sync.Mutex
	// offsets is where each piece lies; storage delivers a piece that is to be
	// kept as one part.
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

// ReturnLoans implements penstock.v1.Cache. Loans of a session that has ended
// were returned with it.
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
