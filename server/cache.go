package server

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// cacheService implements penstock.v1.Cache.
type cacheService struct {
	pb.UnimplementedCacheServer
	*Server
	imms atomic.Uint32 // the immediate of the newest reservation; incremented for each
}

var _ pb.CacheServer = (*cacheService)(nil)

func (s *cacheService) Describe(ctx context.Context, _ *pb.DescribeRequest) (*pb.DescribeResponse, error) {
	addr, err := s.data.Addr().MarshalBinary()
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.DescribeResponse{
		Node:           s.opts.Node,
		Version:        s.opts.Version,
		DataAddress:    addr,
		DataToken:      s.sessions.token(ctx),
		DataPort:       uint32(s.opts.DataPort),
		DataProvider:   s.data.Info().Provider,
		MaxReadBytes:   s.opts.Limits.ReadBytes,
		MaxWriteBytes:  s.opts.Limits.WriteBytes,
		MaxChainBlocks: uint32(s.opts.Limits.ChainBlocks),
		Fragments:      true,
		Suffixes:       true,
	}
	if s.messages.Load() {
		resp.CallVersion, resp.CallBytes = api.CallVersion, callBytes
	}
	resp.ExistsCalls = true
	resp.Cluster = s.opts.Cluster != nil
	if s.opts.Local != nil {
		id := s.opts.Local.ID()
		resp.LocalId, resp.LocalSocket, resp.LocalMatch = id[:], s.opts.Local.Path(), true
		resp.StagingBytes = s.opts.Local.StagingBytes()
	}
	return resp, nil
}

func (s *cacheService) chain(b []byte) ([]kv.BlockID, error) {
	ids, err := api.IDs(b, s.opts.Limits.ChainBlocks)
	if err != nil {
		return nil, invalid(err)
	}
	return ids, nil
}

func (s *cacheService) Match(ctx context.Context, req *pb.MatchRequest) (*pb.MatchResponse, error) {
	return s.match(ctx, caller{}, req)
}

// match implements Match for every transport. by identifies the sender; for gRPC it is the zero
// caller.
func (s *cacheService) match(ctx context.Context, by caller, req *pb.MatchRequest) (*pb.MatchResponse, error) {
	resp, err := s.find(ctx, by, req)
	if req.GetPin() {
		s.audit.pin(ctx, "Pin", by.owner(ctx), req, resp, err)
	}
	return resp, err
}

func (s *cacheService) find(ctx context.Context, by caller, req *pb.MatchRequest) (*pb.MatchResponse, error) {
	ids, err := s.chain(req.GetBlockIds())
	if err != nil {
		return nil, err
	}
	ttl := time.Duration(min(req.GetLeaseTtlMs(), maxMillis)) * time.Millisecond
	owner := ""
	if ttl > 0 || req.GetPin() {
		owner = by.owner(ctx)
	}
	ns, m, err := s.node.Match(storage.MatchRequest{
		Namespace: req.GetNamespace(), Epoch: kv.Epoch(req.GetEpoch()), Oldest: kv.Epoch(req.GetOldestEpoch()),
		Mix: req.GetMix(), IDs: ids, TTL: ttl, Pin: req.GetPin(), Owner: owner, NoTouch: req.GetNoTouch(),
	})
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.MatchResponse{
		Outcome:       pb.Outcome_OUTCOME_HIT,
		MatchedBlocks: uint32(m.Blocks),
		MatchedTokens: uint64(m.Tokens),
		Cut:           m.Cut.String(),
		Lease:         uint64(m.Lease),
		Epoch:         uint64(m.Epoch),
		Bytes:         ns.Geometry.NeededBytes(m.Blocks),
	}
	for _, r := range m.Epochs {
		resp.Epochs = append(resp.Epochs, &pb.EpochRun{Epoch: uint64(r.Epoch), Blocks: uint32(r.Blocks)})
	}
	if m.Lease != 0 && !req.GetPin() {
		resp.LeaseTtlMs = uint64(s.node.LeaseTTL(ttl).Milliseconds())
	}
	if !req.GetMix() {
		resp.Hot = s.hot(ns, m.Epoch, ids[:m.Blocks])
	}
	switch {
	case m.Cut == trie.CutLeaseDenied:
		resp.Outcome = pb.Outcome_OUTCOME_BUSY
	case m.Blocks == 0:
		resp.Outcome = pb.Outcome_OUTCOME_MISS
	}
	return resp, nil
}

// hot returns the copies of the first of ids on other nodes, nil if there are none.
func (s *cacheService) hot(ns kv.Namespace, epoch kv.Epoch, ids []kv.BlockID) *pb.HotPrefix {
	hint, ok := s.node.HotHint(ns.ID, epoch, ids)
	if !ok {
		return nil
	}
	return &pb.HotPrefix{Blocks: uint32(hint.Blocks), Replicas: uint32(hint.Replicas), TtlMs: uint64(hint.TTL.Milliseconds())}
}

// maxMillis is the largest number of milliseconds that does not overflow a time.Duration.
const maxMillis = uint64(1<<63-1) / uint64(time.Millisecond)

func (s *cacheService) PinEpoch(ctx context.Context, req *pb.PinEpochRequest) (*pb.PinEpochResponse, error) {
	ttl := time.Duration(min(req.GetTtlMs(), maxMillis)) * time.Millisecond
	owner := caller{}.owner(ctx)
	var resp *pb.PinEpochResponse
	lease, epoch, err := s.node.PinEpoch(ctx, owner, req.GetNamespace(), kv.Epoch(req.GetEpoch()), ttl)
	if err == nil {
		resp = &pb.PinEpochResponse{Lease: uint64(lease), Epoch: uint64(epoch), TtlMs: uint64(s.node.LeaseTTL(ttl).Milliseconds())}
	}
	err = statusOf(err)
	s.audit.pin(ctx, "PinEpoch", owner, req, resp, err)
	return resp, err
}

func (s *cacheService) RenewLease(_ context.Context, req *pb.RenewLeaseRequest) (*pb.RenewLeaseResponse, error) {
	ttl := time.Duration(min(req.GetTtlMs(), maxMillis)) * time.Millisecond
	return &pb.RenewLeaseResponse{}, statusOf(s.node.Renew(trie.LeaseID(req.GetLease()), ttl))
}

func (s *cacheService) ReleaseLease(ctx context.Context, req *pb.ReleaseLeaseRequest) (*pb.ReleaseLeaseResponse, error) {
	id := trie.LeaseID(req.GetLease())
	pin := s.node.IsPin(id)
	err := statusOf(s.node.Release(id))
	if pin {
		s.audit.pin(ctx, "Unpin", callerName(ctx), req, nil, err)
	}
	return &pb.ReleaseLeaseResponse{}, err
}

// pieceRefs converts pieces without checks. Package storage checks the block and group numbers.
func pieceRefs(pieces []*pb.PieceRef) []storage.PieceRef {
	if len(pieces) == 0 {
		return nil
	}
	out := make([]storage.PieceRef, len(pieces))
	for i, p := range pieces {
		out[i] = storage.PieceRef{Block: int(p.GetBlock()), Group: int(p.GetGroup())}
	}
	return out
}

func (s *cacheService) Read(ctx context.Context, req *pb.ReadRequest) (*pb.ReadResponse, error) {
	return s.read(ctx, caller{}, req)
}

// read implements Read for every transport. by identifies the sender; for gRPC it is the zero
// caller. For a call by message, the response is sent as soon as all transfers have started. The
// pieces that it reports as delivered are in the client's memory only when the client has counted
// all immediates.
func (s *cacheService) read(ctx context.Context, by caller, req *pb.ReadRequest) (*pb.ReadResponse, error) {
	ids, err := s.chain(req.GetBlockIds())
	if err != nil {
		return nil, err
	}
	if len(req.GetPieces()) == 0 {
		return nil, invalid(errors.New("a Read needs the pieces and a destination for each"))
	}
	var geometry kv.GeometryDigest
	if n := len(req.GetGeometryDigest()); n != 0 && n != len(geometry) {
		return nil, invalid(fmt.Errorf("geometry digest of %d bytes; want %d", n, len(geometry)))
	}
	copy(geometry[:], req.GetGeometryDigest())
	if err := s.spenderOf(ctx).mayRead(); err != nil {
		return busyRead(err), nil
	}
	load := storage.LoadRequest{
		Share:      s.shareOf(ctx),
		Geometry:   geometry,
		Namespace:  req.GetNamespace(),
		Epoch:      kv.Epoch(req.GetEpoch()),
		IDs:        ids,
		Pieces:     pieceRefs(req.GetPieces()),
		FirstLayer: int(min(req.GetFirstLayer(), kv.MaxLayers)),
		Layers:     int(min(req.GetLayers(), kv.MaxLayers+1)),
		Alone:      req.GetAlone(),
		Suffix:     req.GetSuffix(),
	}
	if by.transport == transportSocket {
		// The call came over the unix socket, whose connection identifies the session.
		return s.readLocal(ctx, by.session[:], req, load)
	}
	if len(req.GetLocalSession()) > 0 {
		if by.transport == transportMessage {
			return nil, invalid(errors.New("a loan can be requested only over the local socket or gRPC"))
		}
		return s.readLocal(ctx, req.GetLocalSession(), req, load)
	}
	d, err := s.newDelivery(ctx, by, req)
	if err != nil {
		return nil, err
	}
	load.Early = by.transport == transportMessage
	result, err := s.node.Load(ctx, load, s.spenderOf(ctx).reads(d.deliver))
	if errors.Is(err, storage.ErrBusy) {
		return busyRead(err), nil
	}
	if err != nil {
		return nil, statusOf(err)
	}
	immediates := d.counted.Load()
	if result.UnderWay {
		immediates = d.posted.Load()
	}
	resp := readResponse(result, immediates)
	s.addHot(req, ids, result.Match, resp)
	return resp, nil
}

// addHot adds to the reply to a Read the copies of its chain on other nodes, and counts the payload of a Read
// of copies.
func (s *cacheService) addHot(req *pb.ReadRequest, ids []kv.BlockID, m storage.MatchResult, resp *pb.ReadResponse) {
	if req.GetAlone() || req.GetSuffix() && !req.GetCopy() {
		return
	}
	ns, err := s.node.Namespace(req.GetNamespace())
	if err != nil {
		return
	}
	if !req.GetSuffix() {
		resp.Hot = s.hot(ns, m.Epoch, ids[:m.Blocks])
	}
	if !req.GetCopy() {
		return
	}
	var size int64
	for _, p := range resp.GetPieces() {
		// A namespace of this name that was created during the Read may have fewer groups.
		if p.GetState() == pb.PieceResult_STATE_DELIVERED && int(p.GetGroup()) < len(ns.Geometry.Groups) {
			size += int64(len(p.GetLayerSums())) * ns.Geometry.LayerBytes(int(p.GetGroup()))
		}
	}
	s.opts.Metrics.HotReadBytes.Add(float64(size))
}

// busyRead is the answer to a read that the node does not perform at present.
func busyRead(err error) *pb.ReadResponse {
	return &pb.ReadResponse{Outcome: pb.Outcome_OUTCOME_BUSY, BusyReason: sentence(err)}
}

func readResponse(result storage.LoadResult, immediates uint32) *pb.ReadResponse {
	resp := &pb.ReadResponse{
		Outcome:       pb.Outcome_OUTCOME_MISS,
		MatchedBlocks: uint32(result.Match.Blocks),
		MatchedTokens: uint64(result.Match.Tokens),
		Cut:           result.Match.Cut.String(),
		Epoch:         uint64(result.Match.Epoch),
		Immediates:    immediates,
		Pieces:        make([]*pb.PieceResult, len(result.Pieces)),
	}
	busy := 0
	var texts reasons
	for i, p := range result.Pieces {
		r := &pb.PieceResult{Block: uint32(p.Block), Group: uint32(p.Group), LayerSums: p.LayerSums}
		switch p.State {
		case storage.Delivered:
			r.State = pb.PieceResult_STATE_DELIVERED
			resp.Outcome = pb.Outcome_OUTCOME_HIT
		case storage.Absent:
			r.State = pb.PieceResult_STATE_MISS
		case storage.Corrupt:
			r.State = pb.PieceResult_STATE_CORRUPT
		default:
			r.State = pb.PieceResult_STATE_FAILED
			if errors.Is(p.Err, storage.ErrBusy) {
				busy++
				resp.BusyReason = sentence(p.Err)
			}
		}
		r.Reason = texts.of("", p.Err)
		resp.Pieces[i] = r
	}
	if busy > 0 && resp.Outcome == pb.Outcome_OUTCOME_MISS {
		resp.Outcome = pb.Outcome_OUTCOME_BUSY
	}
	return resp
}

// openWindow is the window over the memory of one reservation, to which the client writes over the
// data plane.
type openWindow struct {
	window rdma.Window
	expect *rdma.Expectation
	landed *rdma.Flag
	once   sync.Once
}

// close revokes the window. The memory may be reused only after the revocation, so close ignores
// the caller's deadline. It waits for writes that are in progress, at most for the data plane's
// idle timeout.
func (w *openWindow) close() error {
	var err error
	w.once.Do(func() {
		err = w.window.Revoke(context.Background())
		w.expect.Cancel()
	})
	return err
}

func (s *cacheService) Reserve(ctx context.Context, req *pb.ReserveRequest) (*pb.ReserveResponse, error) {
	return s.reserve(ctx, caller{}, req)
}

// reserve implements Reserve for gRPC and for messages over the data plane. The window of a
// reservation made by message is open to the sender only. A call over gRPC names the writing engine
// in data_engine.
func (s *cacheService) reserve(ctx context.Context, by caller, req *pb.ReserveRequest) (*pb.ReserveResponse, error) {
	r, err := s.reserveRequest(req)
	if err != nil {
		return nil, err
	}
	writers, err := writersOf(by, req.GetDataEngine())
	if err != nil {
		return nil, invalid(err)
	}
	if writers, err = s.ownWriters(ctx, writers); err != nil {
		return nil, err
	}
	resp := new(pb.ReserveResponse)
	spender := s.spenderOf(ctx)
	if err := spender.mayWrite(); err != nil {
		resp.Outcome, resp.BusyReason = pb.Outcome_OUTCOME_BUSY, sentence(err)
		return resp, nil
	}
	r.Share = s.shareOf(ctx)
	r.Attach = func(res *storage.Reservation) error {
		if err := s.attach(res, writers, resp); err != nil {
			return err
		}
		spender.wrote(len(res.Bytes()))
		return nil
	}
	if _, err := s.reserveFor(ctx, r, resp); err != nil {
		return nil, err
	}
	return resp, nil
}

// reserveRequest converts a request to the request of package storage.
func (s *cacheService) reserveRequest(req *pb.ReserveRequest) (storage.ReserveRequest, error) {
	ids, err := s.chain(req.GetBlockIds())
	if err != nil {
		return storage.ReserveRequest{}, err
	}
	r := storage.ReserveRequest{
		Namespace: req.GetNamespace(),
		Epoch:     kv.Epoch(req.GetEpoch()),
		IDs:       ids,
		Pieces:    pieceRefs(req.GetPieces()),
	}
	if len(req.GetParent()) > 0 {
		if r.Parent, err = kv.BlockIDFromBytes(req.GetParent()); err != nil {
			return r, invalid(fmt.Errorf("parent: %w", err))
		}
	}
	if len(req.GetGeometryDigest()) != len(r.Geometry) {
		return r, invalid(fmt.Errorf("geometry digest of %d bytes; want %d", len(req.GetGeometryDigest()), len(r.Geometry)))
	}
	r.Geometry = kv.GeometryDigest(req.GetGeometryDigest())
	if req.GetBlockClass() == pb.BlockClass_BLOCK_CLASS_TRANSFER {
		r.Class = trie.Transfer
	}
	return r, nil
}

// reserveFor makes a reservation and fills in the response. The returned id is 0 if no piece is
// granted or no reservation is made. An error is a gRPC status.
func (s *cacheService) reserveFor(ctx context.Context, r storage.ReserveRequest, resp *pb.ReserveResponse) (storage.ReservationID, error) {
	resp.Outcome = pb.Outcome_OUTCOME_HIT
	res, err := s.node.Reserve(ctx, r)
	switch {
	case errors.Is(err, storage.ErrBusy):
		proto.Reset(resp)
		resp.Outcome, resp.BusyReason = pb.Outcome_OUTCOME_BUSY, sentence(err)
		return 0, nil
	case errors.Is(err, storage.ErrReadOnly):
		resp.Pieces = refuseAll(r, err)
		return 0, nil
	case err != nil:
		return 0, statusOf(err)
	}
	resp.Pieces = grants(res.Grants)
	return res.ID, nil
}

// refuseAll returns a refusal for each piece when the node takes no writes. The call itself
// succeeds, so that the client does not treat the node as failed.
func refuseAll(r storage.ReserveRequest, why error) (refused []*pb.PieceResult) {
	pieces := r.Pieces
	if pieces == nil {
		pieces = make([]storage.PieceRef, len(r.IDs))
		for i := range pieces {
			pieces[i].Block = i
		}
	}
	var texts reasons
	for _, p := range pieces {
		refused = append(refused, &pb.PieceResult{
			Block: uint32(p.Block), Group: uint32(p.Group), State: pb.PieceResult_STATE_REFUSED, Reason: texts.of("read_only", why),
		})
	}
	return refused
}

// writersOf returns the engines that may write to the reservation's window. An empty result means
// every engine. named is the data_engine field of the request.
func writersOf(by caller, named []byte) ([]rdma.EngineID, error) {
	var id rdma.EngineID
	switch {
	case len(named) > 0 && len(named) != len(id):
		return nil, fmt.Errorf("data_engine of %d bytes; want %d", len(named), len(id))
	case len(named) > 0:
		id = rdma.EngineID(named)
		if by.transport == transportMessage && id != by.peer {
			return nil, fmt.Errorf("data_engine is %v, but a reservation by message is for its sender, %v", id, by.peer)
		}
	case by.transport == transportMessage:
		id = by.peer
	default:
		return nil, nil
	}
	return []rdma.EngineID{id}, nil
}

// ownWriters returns the engines of the caller that may write to a window, if the node has a roles
// file: the named ones, or else all of them.
func (s *cacheService) ownWriters(ctx context.Context, writers []rdma.EngineID) ([]rdma.EngineID, error) {
	for _, w := range writers {
		if err := s.sessions.own(ctx, w); err != nil {
			return nil, err
		}
	}
	if len(writers) > 0 {
		return writers, nil
	}
	own, all := s.sessions.ownAll(ctx, s.data.Peers)
	if !all && len(own) == 0 {
		return nil, status.Error(codes.FailedPrecondition, "the caller has no data-plane session that could write to the window; connect the engine with the token that Describe returns")
	}
	return own, nil
}

// attach opens a window over the reservation's memory for the client, and registers for the
// immediates of the client's writes into the window.
func (s *cacheService) attach(res *storage.Reservation, writers []rdma.EngineID, resp *pb.ReserveResponse) error {
	window, err := s.region.Window(uint64(res.ArenaOffset()), uint64(len(res.Bytes())), writers...)
	if err != nil {
		return err
	}
	w := &openWindow{window: window, landed: rdma.NewFlag()}
	// The counter of immediates wraps around. A value that another reservation still expects is
	// skipped.
	for {
		resp.Imm = s.imms.Add(1)
		w.expect, err = s.data.ExpectImm(rdma.Expect{Imm: resp.Imm, Count: uint32(res.Granted), Done: w.landed.Set})
		if !errors.Is(err, rdma.ErrExists) {
			break
		}
	}
	if err != nil {
		return errors.Join(err, window.Revoke(context.Background()))
	}
	s.windows.Store(res.ID, w)
	res.OnEnd(func() {
		s.windows.Delete(res.ID)
		if err := w.close(); err != nil {
			s.opts.Logger.Error("revoke window", "reservation", res.ID, "err", err)
		}
	})
	resp.Reservation = uint64(res.ID)
	resp.TtlMs = uint64(time.Until(res.Expires).Milliseconds())
	resp.Window, err = window.Desc().MarshalBinary()
	return err
}

func grants(all []storage.Grant) []*pb.PieceResult {
	out := make([]*pb.PieceResult, len(all))
	for i, g := range all {
		r := &pb.PieceResult{Block: uint32(g.Block), Group: uint32(g.Group), Offset: uint64(g.Offset)}
		switch g.Status {
		case trie.Added:
			r.State = pb.PieceResult_STATE_GRANTED
		case trie.Exists:
			r.State = pb.PieceResult_STATE_EXISTS
		default:
			r.State, r.Reason = pb.PieceResult_STATE_REFUSED, g.Status.String()
		}
		out[i] = r
	}
	return out
}

func (s *cacheService) Commit(ctx context.Context, req *pb.CommitRequest) (*pb.CommitResponse, error) {
	id := storage.ReservationID(req.GetReservation())
	return s.commit(ctx, id, req.GetPieces(), func(ctx context.Context) error {
		w, ok := s.windows.Load(id)
		if !ok {
			return fmt.Errorf("reservation %d has no window: %w", id, storage.ErrReservation)
		}
		win := w.(*openWindow)
		ctx, cancel := context.WithTimeout(ctx, time.Duration(s.landWithin.Load()))
		defer cancel()
		if err := win.landed.Wait(ctx); err != nil {
			return err
		}
		return win.close()
	})
}

// commit stores the pieces of a reservation with their checksums. closed is passed to
// storage.Node.Commit.
func (s *cacheService) commit(ctx context.Context, id storage.ReservationID, sums []*pb.PieceSums, closed func(context.Context) error) (*pb.CommitResponse, error) {
	pieces := make([]storage.PieceSums, len(sums))
	for i, p := range sums {
		pieces[i] = storage.PieceSums{PieceRef: storage.PieceRef{Block: int(p.GetBlock()), Group: int(p.GetGroup())}, LayerSums: p.GetLayerSums()}
	}
	stored, err := s.node.Commit(ctx, id, pieces, closed)
	if errors.Is(err, storage.ErrBusy) {
		return &pb.CommitResponse{Outcome: pb.Outcome_OUTCOME_BUSY, BusyReason: sentence(err)}, nil
	}
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.CommitResponse{Outcome: pb.Outcome_OUTCOME_HIT}
	var texts reasons
	for _, p := range stored {
		r := &pb.PieceResult{Block: uint32(p.Block), Group: uint32(p.Group), Reason: texts.of(p.Reason, p.Err)}
		switch {
		case p.Stored:
			r.State = pb.PieceResult_STATE_STORED
		case p.Reason == trie.Exists.String():
			r.State = pb.PieceResult_STATE_EXISTS
		default:
			r.State = pb.PieceResult_STATE_REFUSED
		}
		resp.Pieces = append(resp.Pieces, r)
	}
	return resp, nil
}

func (s *cacheService) Abort(_ context.Context, req *pb.AbortRequest) (*pb.AbortResponse, error) {
	return &pb.AbortResponse{}, statusOf(s.node.Abort(storage.ReservationID(req.GetReservation())))
}

func (s *cacheService) Delivered(_ context.Context, req *pb.DeliveredRequest) (*pb.DeliveredResponse, error) {
	ids, err := s.chain(req.GetBlockIds())
	if err != nil {
		return nil, err
	}
	removed, err := s.node.Delivered(req.GetNamespace(), kv.Epoch(req.GetEpoch()), ids)
	return &pb.DeliveredResponse{Dropped: uint32(removed.Blocks)}, statusOf(err)
}

func (s *cacheService) Demote(_ context.Context, req *pb.DemoteRequest) (*pb.DemoteResponse, error) {
	ids, err := s.chain(req.GetBlockIds())
	if err != nil {
		return nil, err
	}
	return &pb.DemoteResponse{}, statusOf(s.node.Demote(req.GetNamespace(), kv.Epoch(req.GetEpoch()), ids))
}

func (s *cacheService) Exists(_ context.Context, req *pb.ExistsRequest) (*pb.ExistsResponse, error) {
	ids, err := s.chain(req.GetBlockIds())
	if err != nil {
		return nil, err
	}
	present, epoch, err := s.node.Exists(req.GetNamespace(), kv.Epoch(req.GetEpoch()), ids, req.GetTouch())
	if err != nil {
		return nil, statusOf(err)
	}
	out := &pb.ExistsResponse{Present: make([]byte, len(present)), Epoch: uint64(epoch)}
	mask := trie.GroupSet(1)
	if req.GetGroups() {
		mask = ^trie.GroupSet(0)
	}
	for i, groups := range present {
		out.Present[i] = byte(groups & mask)
	}
	return out, nil
}

func (s *cacheService) Delete(_ context.Context, req *pb.DeleteRequest) (*pb.DeleteResponse, error) {
	ids, err := s.chain(req.GetBlockIds())
	if err != nil {
		return nil, err
	}
	deleted, err := s.node.Delete(req.GetNamespace(), kv.Epoch(req.GetEpoch()), ids)
	if err != nil {
		return nil, statusOf(err)
	}
	return &pb.DeleteResponse{Deleted: flags(deleted)}, nil
}

// flags returns one byte for each element of set, 1 for true and 0 for false.
func flags(set []bool) []byte {
	out := make([]byte, len(set))
	for i, ok := range set {
		if ok {
			out[i] = 1
		}
	}
	return out
}

// eventBatch is the maximum number of events in one read from the log for one consumer.
const eventBatch = 256

func (s *cacheService) Events(req *pb.EventsRequest, stream pb.Cache_EventsServer) error {
	ctx, cancel := context.WithCancelCause(stream.Context())
	defer cancel(nil)
	go func() {
		select {
		case <-s.stopping:
			cancel(errStopping)
		case <-ctx.Done():
		}
	}()
	events := s.node.Events()
	after := req.GetAfter()
	if after == 0 {
		after = events.Last()
	}
	for {
		if err := s.sourceOfEvents(req.GetNamespace(), after); err != nil {
			return err
		}
		batch, err := events.After(ctx, after, eventBatch)
		if err != nil {
			return statusOf(context.Cause(ctx))
		}
		// The events that a caller without the role may not see are not sent, so the stream of a caller
		// that has lost the role would otherwise never end.
		if err := s.guard.check(ctx, pb.Cache_Events_FullMethodName, req); err != nil {
			return err
		}
		viewer := s.guard.refresh(stream.Context())
		for _, e := range batch {
			after = e.Sequence
			if e.Kind == storage.Gap {
				e.Time = time.Now() // a Gap has no time, so it gets the time at which it was detected
				s.opts.Metrics.EventsDropped.Inc()
			} else if req.GetNamespace() != "" && e.Namespace != req.GetNamespace() || !showsEvent(viewer, e) {
				continue
			}
			if err := stream.Send(eventProto(e)); err != nil {
				return err
			}
		}
	}
}

// showsEvent reports whether a call may show an event to its caller: an event of a namespace if the
// caller has the role read there, and an event of a volume if it operates the node.
func showsEvent(ctx context.Context, e storage.Event) bool {
	if e.Volume != nil {
		return operates(ctx)
	}
	return sees(ctx, access.Read, e.Namespace)
}

// sourceOfEvents returns an error if a consumer that has read all events up to seq would wait
// forever: there are no later events, and the consumer's namespace does not exist.
func (s *cacheService) sourceOfEvents(namespace string, seq uint64) error {
	if namespace == "" || seq < s.node.Events().Last() {
		return nil
	}
	_, err := s.node.Namespace(namespace)
	return statusOf(err)
}

func eventProto(e storage.Event) *pb.Event {
	m := &pb.Event{
		Sequence:   e.Sequence,
		Kind:       pb.Event_Kind(e.Kind),
		Namespace:  e.Namespace,
		Epoch:      uint64(e.Epoch),
		BlockIds:   api.AppendIDs(nil, e.IDs),
		Reason:     e.Reason,
		TimeUnixMs: e.Time.UnixMilli(),
	}
	if !e.Parent.IsZero() {
		m.Parent = e.Parent[:]
	}
	if e.Kind == storage.BlockStored || e.Kind == storage.BlockRemoved {
		m.Medium = "ssd"
	}
	if v := e.Volume; v != nil {
		m.Volume = &pb.VolumeState{Volume: v.Volume, Path: v.Path, Was: v.Was.String(), State: v.Is.State.String()}
		if v.Is.Cause != nil {
			m.Reason = sentence(v.Is.Cause)
		}
	}
	return m
}
