package planner

import (
	"context"
	"errors"
	"io"
	"math"
	"math/rand/v2"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/dualpath"
)

var (
	errSlowLeader = status.Error(codes.ResourceExhausted, "the leader read its actions too slowly; register again with the requests that the engines hold")
	errReplaced   = status.Error(codes.Aborted, "another session has registered this group; only one leader may register a group")
	errNoRegister = status.Error(codes.InvalidArgument, "the first message of a leader must register its group")
	errSilent     = status.Error(codes.Aborted, "the planner received no message of the group for schedule.group_timeout and plans its requests again; register again with the requests that the engines hold")
	errTwice      = status.Error(codes.InvalidArgument, "this session has already registered a group; a leader has one group")
)

// leader is the planner's session with the leader of one group of engines. (A leader is the process
// through which a group's engines are controlled.)
type leader struct {
	group dualpath.GroupID
	out   chan *pb.LeaderAction
	// confirm is set if the leader expects CONFIRMED actions.
	confirm bool
	// gone is cancelled when the session must end. The cause is the reason.
	gone context.Context
	end  context.CancelCauseFunc
}

// Lead implements penstock.v1.Planner.
func (s *Service) Lead(stream grpc.BidiStreamingServer[pb.LeaderMessage, pb.LeaderAction]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	if first.GetRegister() == nil {
		return errNoRegister
	}
	l, err := s.register(stream.Context(), first.GetRegister())
	if err != nil {
		return err
	}
	received := make(chan error, 1)
	go func() { received <- s.receive(stream, l) }()
	for {
		select {
		case a := <-l.out:
			if !s.leads() { // the action may have waited while this process did not run
				s.leave(l, false)
				return errClosing
			}
			if err := stream.Send(a); err != nil {
				s.leave(l, false)
				return err
			}
		case err := <-received:
			s.leave(l, err == nil)
			return err
		case <-l.gone.Done():
			s.leave(l, false)
			return context.Cause(l.gone)
		case <-s.stop:
			return errClosing
		}
	}
}

// receive handles a leader's messages until the stream ends. It returns nil if the leader has
// closed its side of the stream, and otherwise the error of the stream. When the call Lead ends,
// the stream ends, so receive returns soon afterwards.
func (s *Service) receive(stream grpc.BidiStreamingServer[pb.LeaderMessage, pb.LeaderAction], l *leader) error {
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := s.message(l, m); err != nil {
			return err
		}
	}
}

// register registers a group, and makes this session the only session of the group.
func (s *Service) register(ctx context.Context, r *pb.RegisterGroup) (*leader, error) {
	if err := checkGroup(r); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errClosing
	}
	g, err := s.groups.id(r.Group)
	if err != nil {
		return nil, err
	}
	up := dualpath.GroupUp{At: s.now(), Group: dualpath.GroupID(g), Role: dualpath.Role(r.Role)}
	places := make(map[dualpath.EngineID]place, len(r.Engines))
	for _, e := range r.Engines {
		id, err := s.engines.id(e.Engine)
		if err != nil {
			return nil, err
		}
		// Two leaders with one engine would take it from each other for ever, and no request of theirs would end.
		if other, ok := s.planner.GroupOf(dualpath.EngineID(id)); ok && other != up.Group && s.leaders[other] != nil {
			return nil, status.Errorf(codes.AlreadyExists, "group %q: engine %q is in group %q, whose leader is connected; give each engine a name of its own, or stop that leader first", r.Group, e.Engine, s.groups.of(uint32(other)))
		}
		node, err := s.nodes.id(e.Node)
		if err != nil {
			return nil, err
		}
		if _, twice := places[dualpath.EngineID(id)]; twice {
			return nil, status.Errorf(codes.InvalidArgument, "group %q: engine %q is listed twice", r.Group, e.Engine)
		}
		places[dualpath.EngineID(id)] = place{up.Group, e.Address, s.cacheLocked(dualpath.EngineID(id), e.PrefixCacheTokens, r.Planner != 0)}
		up.Engines = append(up.Engines, dualpath.EngineSpec{
			Engine: dualpath.EngineID(id), Node: dualpath.NodeID(node), HBMTokens: tokens(e.HbmTokens), PromptTokens: tokens(e.PromptTokens), Buffer: bufferOf(e.Buffer),
		})
	}
	up.Again, up.Returns, up.Seen, up.Switching = r.Planner == s.number, r.Planner != 0, r.Seen, dualpath.Role(r.Switching)
	up.Announced = dualpath.Role(r.Announced)
	held, over, err := s.heldLocked(r, places)
	if err != nil {
		return nil, err
	}
	up.Holding = held
	l := &leader{group: up.Group, out: make(chan *pb.LeaderAction, leaderActions), confirm: r.Confirm}
	l.gone, l.end = context.WithCancelCause(ctx)
	if old := s.leaders[up.Group]; old != nil {
		old.end(errReplaced)
	}
	s.leaders[up.Group] = l
	if s.roles[up.Group] == nil {
		s.roles[up.Group] = &roles{}
	}
	s.roles[up.Group].switches = r.Switches
	s.roles[up.Group].heardLocked(r.Seen)
	for id, p := range places {
		s.at[id] = p
	}
	s.keepNICsLocked(up.Group, places, up.Again)
	l.out <- &pb.LeaderAction{Kind: pb.LeaderAction_KIND_REGISTERED, Planner: s.number}
	s.reportNetworkLocked() // the operator's network may have positions for machines that are new with this group
	s.stepLocked(up)
	listed := make([]string, len(r.Holding))
	for i, h := range r.Holding {
		listed[i] = h.Request.Namespace
	}
	s.rebumpLocked(listed)
	for _, id := range over {
		delete(s.jobs, id) // the Abort is queued
	}
	s.log.Info("group registered", "group", r.Group, "role", up.Role.String(), "engines", len(r.Engines), "holding", len(r.Holding))
	return l, nil
}

// heldLocked converts the requests in a registration and creates a job for each request that is new
// to this planner. over are requests that this planner has already ended: their jobs exist only so
// that an Abort can be sent. If the registration is refused, no job is created, because nothing
// would end the job.
func (s *Service) heldLocked(r *pb.RegisterGroup, places map[dualpath.EngineID]place) (held []dualpath.Held, over []dualpath.RequestID, err error) {
	held = make([]dualpath.Held, 0, len(r.Holding))
	namespaces, peers := make([]uint32, len(r.Holding)), make([]uint32, len(r.Holding))
	for i, h := range r.Holding {
		id, ok := s.engines.ids[h.Engine]
		if _, ours := places[dualpath.EngineID(id)]; !ok || !ours {
			return nil, nil, status.Errorf(codes.InvalidArgument, "group %q holds request %q with engine %q, which is not in the group", r.Group, h.Request.Id, h.Engine)
		}
		ns, err := s.namespaces.id(h.Request.Namespace)
		if err != nil {
			return nil, nil, err
		}
		namespaces[i] = ns
		if h.PeerEngine != "" {
			if peers[i], err = s.engines.id(h.PeerEngine); err != nil {
				return nil, nil, err
			}
		}
	}
	for i, h := range r.Holding {
		j := s.byName[h.Request.Id]
		switch {
		case j != nil:
		case h.Ended:
			continue // the request has ended too, or its gateway will submit the request again
		case r.Planner == s.number:
			s.lastID++
			j = &job{id: s.lastID, submit: h.Request}
			s.jobs[j.id] = j
			over = append(over, j.id)
		default:
			j = s.jobLocked(h.Request)
			s.alone[j.id] = s.now()
		}
		q := s.request(j, namespaces[i])
		q.Hit = int(h.Request.HitTokens) // not the hit of a gateway that has submitted the request again: it may have matched another prefix
		as := dualpath.Held{Request: q, Engine: dualpath.EngineID(s.engines.ids[h.Engine]), Attempt: h.Attempt, Order: h.Order, Peer: dualpath.EngineID(peers[i]), Ended: h.Ended}
		if read := h.Reading; read != nil {
			as.Reading, as.Read, as.Landed = partOf(read.Part), read.Read, int(read.Landed)
		}
		for _, part := range h.Parts {
			as.Parts = append(as.Parts, partOf(part))
		}
		held = append(held, as)
	}
	return held, over, nil
}

// cacheLocked returns the prefix cache of an engine that registers. returns is set if the engine's
// leader has registered before: then the cache is the same as before.
func (s *Service) cacheLocked(e dualpath.EngineID, size uint64, returns bool) *pb.PrefixCache {
	if size == 0 {
		return nil
	}
	c := &pb.PrefixCache{Tokens: size, Number: rand.Uint64()}
	if old := s.at[e].cache; returns && old != nil {
		c.Number = old.Number
	}
	return c
}

// partOf converts a part.
func partOf(p *pb.Part) dualpath.Part {
	return dualpath.Part{Side: dualpath.Role(p.GetSide()), From: int(p.GetFrom()), To: int(p.GetTo())}
}

// checkGroup returns an error for a registration whose fields are out of range.
func checkGroup(r *pb.RegisterGroup) error {
	if r.Role != pb.Side_SIDE_PREFILL && r.Role != pb.Side_SIDE_DECODE {
		return status.Errorf(codes.InvalidArgument, "group %q: the role is %v; it must be SIDE_PREFILL or SIDE_DECODE", r.Group, r.Role)
	}
	if r.Switching != pb.Side_SIDE_UNSPECIFIED && r.Switching != pb.Side_SIDE_PREFILL && r.Switching != pb.Side_SIDE_DECODE {
		return status.Errorf(codes.InvalidArgument, "group %q: switching is %v; it must be SIDE_PREFILL, SIDE_DECODE, or left out", r.Group, r.Switching)
	}
	if r.Announced != pb.Side_SIDE_UNSPECIFIED && r.Announced != pb.Side_SIDE_PREFILL && r.Announced != pb.Side_SIDE_DECODE {
		return status.Errorf(codes.InvalidArgument, "group %q: announced is %v; it must be SIDE_PREFILL, SIDE_DECODE, or left out", r.Group, r.Announced)
	}
	if len(r.Engines) == 0 || len(r.Engines) > maxGroupEngines {
		return status.Errorf(codes.InvalidArgument, "group %q: %d engines; it must have 1 to %d", r.Group, len(r.Engines), maxGroupEngines)
	}
	for _, e := range r.Engines {
		if len(e.Address) > maxAddressBytes {
			return status.Errorf(codes.InvalidArgument, "engine %q: the address has %d bytes; the maximum is %d", e.Engine, len(e.Address), maxAddressBytes)
		}
		if b := e.Buffer; b != nil && (max(b.BlockBytes, b.SumsBytes, b.RequestBytes) > maxBlockBytes) {
			return status.Errorf(codes.InvalidArgument, "engine %q: a block takes %d bytes of the buffer, its checksums %d, a request %d; the maximum is %d each", e.Engine, b.BlockBytes, b.SumsBytes, b.RequestBytes, maxBlockBytes)
		}
		if r.Role == pb.Side_SIDE_DECODE && e.HbmTokens == 0 {
			return status.Errorf(codes.InvalidArgument, "decode engine %q: hbm_tokens is 0, so no request can be placed on the engine", e.Engine)
		}
	}
	if r.Seen > maxSeq {
		return status.Errorf(codes.InvalidArgument, "group %q has seen action %d; action numbers end at %d", r.Group, r.Seen, uint64(maxSeq))
	}
	for _, h := range r.Holding {
		if h.Request == nil {
			return status.Errorf(codes.InvalidArgument, "group %q: an element of holding has no request", r.Group)
		}
		if highest := max(h.Attempt, h.Order); highest > maxSeq {
			return status.Errorf(codes.InvalidArgument, "group %q holds request %q with action %d; action numbers end at %d", r.Group, h.Request.Id, highest, uint64(maxSeq))
		}
		if err := checkSubmit(h.Request); err != nil {
			return err
		}
		if h.Request.PromptTokens == 0 || h.Request.HitTokens > h.Request.PromptTokens {
			return status.Errorf(codes.InvalidArgument, "group %q holds request %q with %d prompt tokens, %d of them cached; register it as it was submitted",
				r.Group, h.Request.Id, h.Request.PromptTokens, h.Request.HitTokens)
		}
	}
	return nil
}

// maxSeq is the largest action number that a registration may contain. The planner numbers its
// actions from above the numbers of earlier planners, so they must not overflow. At a million
// actions per second the bound is reached after 146,000 years.
const maxSeq = 1 << 62

// maxBlockBytes is the largest buffer size of one block. It is far above the needs of all models,
// and the sum of this size over all blocks of 2^28 tokens does not overflow.
const maxBlockBytes = 1 << 32

// leave ends a session. If the leader closed the stream, its group is removed. If the connection
// was lost, the leader may reconnect within dualpath.Options.GroupTimeout.
func (s *Service) leave(l *leader, closed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l.end(nil)
	if s.leaders[l.group] != l {
		return
	}
	delete(s.leaders, l.group)
	s.log.Info("leader left", "group", s.groups.of(uint32(l.group)), "removed", closed)
	if closed {
		s.stepLocked(dualpath.GroupDown{At: s.now(), Group: l.group})
	}
}

// message handles one message of a registered leader.
func (s *Service) message(l *leader, m *pb.LeaderMessage) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leaders[l.group] != l {
		return context.Cause(l.gone) // a newer session has replaced this one, or the leader reads too slowly; Lead returns the reason
	}
	switch m := m.Message.(type) {
	case *pb.LeaderMessage_Fetch:
		if !s.planner.Has(l.group) {
			return errSilent
		}
		s.roles[l.group].heardLocked(m.Fetch.Seen)
		s.nicsLocked(l.group, m.Fetch)
		s.stepLocked(s.fetchLocked(l, m.Fetch))
	case *pb.LeaderMessage_Progress:
		if j := s.byName[m.Progress.Request]; j != nil {
			j.reported("read", m.Progress.Side, m.Progress.Upto)
			s.stepLocked(dualpath.Progress{At: s.now(), Request: j.id, Attempt: m.Progress.Attempt, Side: dualpath.Role(m.Progress.Side), Upto: int(m.Progress.Upto), Landed: int(m.Progress.Landed), Read: m.Progress.Read})
		}
	case *pb.LeaderMessage_Stopped:
		if j := s.byName[m.Stopped.Request]; j != nil {
			j.reported("stopped", m.Stopped.Side, m.Stopped.Upto)
			s.stepLocked(dualpath.Stopped{
				At: s.now(), Request: j.id, Attempt: m.Stopped.Attempt, Side: dualpath.Role(m.Stopped.Side), Upto: int(m.Stopped.Upto), Failed: m.Stopped.Failed, Gone: m.Stopped.Gone, Read: m.Stopped.Read,
			})
		}
	case *pb.LeaderMessage_Failed:
		if j := s.byName[m.Failed.Request]; j != nil {
			j.reported("failed", m.Failed.Role, m.Failed.Upto)
			s.stepLocked(dualpath.Failed{At: s.now(), Request: j.id, Attempt: m.Failed.Attempt, Role: dualpath.Role(m.Failed.Role), Upto: int(m.Failed.Upto)})
		}
		s.confirmLocked(l, m.Failed.Request, m.Failed.Attempt)
	case *pb.LeaderMessage_Finished:
		if j := s.byName[m.Finished.Request]; j != nil {
			j.reported("finished", m.Finished.Role, 0)
			s.stepLocked(dualpath.Finished{At: s.now(), Request: j.id, Attempt: m.Finished.Attempt, Role: dualpath.Role(m.Finished.Role)})
		}
		s.confirmLocked(l, m.Finished.Request, m.Finished.Attempt)
	case *pb.LeaderMessage_RoleRefused:
		s.refusedLocked(l, m.RoleRefused)
	case *pb.LeaderMessage_Register:
		return errTwice
	default:
		return status.Error(codes.InvalidArgument, "the leader's message has no content that this planner supports; the leader may have a later version")
	}
	return nil
}

// confirmLocked confirms to a leader that the planner has recorded the end of an attempt, so that
// the leader does not report it again.
func (s *Service) confirmLocked(l *leader, request string, attempt uint64) {
	if l.confirm {
		s.sendLocked(l.group, &pb.LeaderAction{Kind: pb.LeaderAction_KIND_CONFIRMED, Request: request, Attempt: attempt})
	}
}

// fetchLocked converts a fetch. It leaves out unknown engines and nodes.
func (s *Service) fetchLocked(l *leader, f *pb.FetchWork) dualpath.Fetch {
	out := dualpath.Fetch{At: s.now(), Group: l.group, Seen: f.Seen}
	for _, e := range f.Engines {
		if id, ok := s.engines.ids[e.Engine]; ok {
			out.Engines = append(out.Engines, dualpath.EngineReport{
				Engine: dualpath.EngineID(id), Tokens: tokens(e.Tokens), Requests: int(min(e.Requests, math.MaxInt32)), HBMFree: tokens(e.HbmFreeTokens),
				BufferFree: tokens(e.BufferFreeBytes),
			})
		}
	}
	for _, n := range f.Nodes {
		if id, ok := s.nodes.ids[n.Node]; ok {
			rate := n.ReadTokensPerSecond
			if math.IsNaN(rate) || math.IsInf(rate, 0) {
				rate = 0
			}
			out.Nodes = append(out.Nodes, dualpath.NodeReport{Node: dualpath.NodeID(id), ReadQueue: tokens(n.ReadQueueTokens), Rate: rate})
		}
	}
	return out
}

// bufferOf converts an engine's buffer.
func bufferOf(b *pb.EngineBuffer) dualpath.Buffer {
	return dualpath.Buffer{
		Bytes: tokens(b.GetBytes()), Block: tokens(b.GetBlockBytes()), Sums: tokens(b.GetSumsBytes()), Request: tokens(b.GetRequestBytes()),
	}
}

// tokens limits a number of tokens or bytes from a message to 2^40, so that sums in the planner do
// not overflow.
func tokens(n uint64) int { return int(min(n, 1<<40)) }
