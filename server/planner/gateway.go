package planner

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/dualpath"
)

var (
	errClosing     = status.Error(codes.Unavailable, "this planner is shutting down, or leads no more; submit again with the same id when a planner serves")
	errNotPlanned  = status.Error(codes.Unavailable, "this planner is shutting down, or leads no more, and has changed nothing; repeat the call when a planner serves")
	errSlowGateway = status.Error(codes.ResourceExhausted, "the gateway read its updates too slowly; submit again with the same id")
	errTaken       = status.Error(codes.AlreadyExists, "a request with this id is in progress on another stream or in another namespace")
)

// Submit implements penstock.v1.Planner.
func (s *Service) Submit(r *pb.SubmitRequest, stream grpc.ServerStreamingServer[pb.RequestUpdate]) error {
	if err := checkSubmit(r); err != nil {
		return err
	}
	updates, lost, err := s.admit(stream.Context(), r)
	if err != nil {
		return err
	}
	ctx := stream.Context()
	for {
		select {
		case u, ok := <-updates:
			if !ok {
				return nil
			}
			if !s.leads() {
				return errClosing
			}
			if err := stream.Send(u); err != nil {
				s.giveUp(r.Id, updates)
				return err
			}
		case <-lost:
			return errSlowGateway
		case <-ctx.Done():
			s.giveUp(r.Id, updates)
			return status.FromContextError(context.Cause(ctx)).Err()
		case <-s.stop:
			return errClosing
		}
	}
}

// checkSubmit returns an error for a request whose fields are out of range. The planner itself
// rejects lengths that contradict each other.
func checkSubmit(r *pb.SubmitRequest) error {
	switch {
	case r.Id == "" || len(r.Id) > maxNameBytes:
		return status.Errorf(codes.InvalidArgument, "the request's id has %d bytes; it must have 1 to %d", len(r.Id), maxNameBytes)
	case len(r.Payload) > maxPayloadBytes:
		return status.Errorf(codes.InvalidArgument, "request %q: the payload has %d bytes; the maximum is %d", r.Id, len(r.Payload), maxPayloadBytes)
	case len(r.Resident) > maxResident:
		return status.Errorf(codes.InvalidArgument, "request %q: %d engines in resident; the maximum is %d", r.Id, len(r.Resident), maxResident)
	case len(r.Tenant) > maxNameBytes:
		return status.Errorf(codes.InvalidArgument, "request %q: the tenant's name has %d bytes; the maximum is %d", r.Id, len(r.Tenant), maxNameBytes)
	case r.PromptTokens > maxTokens || r.HitTokens > maxTokens || r.OutputTokens > maxTokens:
		return status.Errorf(codes.InvalidArgument, "request %q: %d prompt, %d cached and %d output tokens; the maximum is %d each", r.Id, r.PromptTokens, r.HitTokens, r.OutputTokens, maxTokens)
	}
	return nil
}

// maxTokens is the largest length in a request, in tokens. It is far above the limits of all
// models.
const maxTokens = 1 << 28

// admit creates a job for a request, or connects the gateway to a job of this request that has lost
// its gateway.
func (s *Service) admit(ctx context.Context, r *pb.SubmitRequest) (updates chan *pb.RequestUpdate, lost chan struct{}, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, nil, errClosing
	}
	ns, err := s.namespaces.id(r.Namespace)
	if err != nil {
		return nil, nil, err
	}
	j := s.byName[r.Id]
	if j != nil && (j.updates != nil || j.submit.Namespace != r.Namespace) {
		return nil, nil, errTaken
	}
	held := j != nil
	if !held && s.payload+len(r.Payload) > s.payloadMax {
		return nil, nil, status.Errorf(codes.ResourceExhausted, "the payloads of the requests in progress take %d of %d bytes; try again when some requests have ended", s.payload, s.payloadMax)
	}
	if !held {
		j = s.jobLocked(r)
	}
	s.traceLocked(ctx, j)
	updates, lost = make(chan *pb.RequestUpdate, gatewayUpdates), make(chan struct{})
	j.updates, j.lost = updates, lost
	delete(s.alone, j.id)
	s.updateLocked(j, &pb.RequestUpdate{Kind: pb.RequestUpdate_KIND_ACCEPTED})
	if !held {
		s.stepLocked(dualpath.Submit{At: s.now(), Request: s.request(j, ns)})
	}
	return updates, lost, nil
}

// request converts a job to the planner's request.
func (s *Service) request(j *job, ns uint32) dualpath.Request {
	r := j.submit
	q := dualpath.Request{
		ID: j.id, Namespace: dualpath.NamespaceID(ns), Epoch: r.Epoch,
		Prompt: int(r.PromptTokens), Hit: int(r.HitTokens), Output: int(r.OutputTokens),
		Exact: r.ExactEpoch, Tenant: r.Tenant, Priority: int(r.Priority),
	}
	within := func(ms uint64) time.Duration {
		if ms == 0 {
			return 0
		}
		return j.since + time.Duration(min(ms, 1<<40))*time.Millisecond
	}
	q.Deadline, q.FirstToken = within(r.DeadlineMilliseconds), within(r.FirstTokenMilliseconds)
	for _, h := range r.Resident {
		// An engine that has not registered is left out, because the planner cannot choose it.
		if id, ok := s.engines.ids[h.Engine]; ok {
			q.Resident = append(q.Resident, dualpath.Resident{Engine: dualpath.EngineID(id), Tokens: int(h.Tokens)})
		}
	}
	return q
}

// giveUp cancels a request whose gateway has disconnected, unless another stream has been connected
// to the request.
func (s *Service) giveUp(name string, updates chan *pb.RequestUpdate) {
	s.mu.Lock()
	defer s.mu.Unlock()
	j := s.byName[name]
	if j == nil || j.updates != updates {
		return
	}
	s.stepLocked(dualpath.Cancelled{At: s.now(), Request: j.id})
}

// Explain implements penstock.v1.Planner.
func (s *Service) Explain(_ context.Context, r *pb.ExplainRequest) (*pb.ExplainResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id, ok := s.recent.byName[r.Request]
	if !ok {
		return nil, status.Errorf(codes.NotFound, "request %q is not among the last %d; the id is the one that the gateway submitted", r.Request, len(s.recent.ring))
	}
	x, ok := s.planner.Explain(id)
	if !ok {
		return nil, status.Errorf(codes.NotFound, "request %q was refused before it was planned, or its record was dropped", r.Request)
	}
	out := &pb.ExplainResponse{Lost: uint32(x.Lost), Serving: s.jobs[id] != nil}
	for _, l := range x.Lines() {
		out.Lines = append(out.Lines, &pb.ExplainResponse_Line{Microseconds: uint64(max(0, l.At-x.Since).Microseconds()), Text: l.Text})
	}
	return out, nil
}

// RecentRequest is one of the last requests.
type RecentRequest struct {
	ID string
	// InProgress is set until the request has finished, or was rejected or cancelled.
	InProgress bool
	// Since is the time since its submission.
	Since time.Duration
	// Decisions has the planner's decisions about the request, in order.
	Decisions []Decision
	// Lost counts the later decisions, of which there is no record.
	Lost int
}

// Decision is one decision of the planner, and the time from the submission to it.
type Decision struct {
	After time.Duration
	Text  string
}

// Recent returns up to n of the last requests that were planned, the newest first.
func (s *Service) Recent(n int) ([]RecentRequest, error) {
	var out []RecentRequest
	var records []dualpath.Explanation
	s.mu.Lock()
	now := s.now()
	for _, r := range s.recent.last(n) {
		if x, ok := s.planner.Explain(r.id); ok {
			out = append(out, RecentRequest{ID: r.name, InProgress: s.jobs[r.id] != nil, Since: now - x.Since, Lost: x.Lost})
			records = append(records, x)
		}
	}
	s.mu.Unlock()
	// The texts take longer than all else, and the planner need not wait for them.
	for i := range out {
		for _, l := range records[i].Lines() {
			out[i].Decisions = append(out[i].Decisions, Decision{max(0, l.At-records[i].Since), l.Text})
		}
	}
	return out, nil
}

// topTenants is the largest number of tenants in the response of Top.
const topTenants = 32

// Top implements penstock.v1.Planner.
func (s *Service) Top(context.Context, *pb.TopRequest) (*pb.TopResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.planner.Stats()
	out := &pb.TopResponse{
		Waiting: uint32(st.Queued), Loading: uint32(st.Loading), Serving: uint32(st.Serving),
		Submitted: st.Submitted, Finished: st.Finished, Rejected: st.Rejected, Replanned: st.Replanned, Splits: st.Splits,
		PrefillSideTokens: st.TokensPrefill, DecodeSideTokens: st.TokensDecode, Cuts: st.Cuts, Hedges: st.Hedges, Recomputes: st.Recomputes,
		Late: st.Late, PrefillTokensPerSecond: st.PrefillRate,
	}
	tenants := s.planner.Tenants()
	shown := min(len(tenants), topTenants)
	out.MoreTenants = uint32(len(tenants) - shown)
	for _, v := range tenants[:shown] {
		out.Tenants = append(out.Tenants, &pb.TopResponse_Tenant{Tenant: v.Tenant, Priority: int32(v.Priority), Weight: v.Weight, Waiting: uint32(v.Waiting), Tokens: uint64(max(v.Work, 0))})
	}
	var sent, received imbalance
	for _, g := range s.planner.View() {
		t := &pb.TopResponse_Group{Group: s.groups.of(uint32(g.Group)), Role: pb.Side(g.Role), Queued: uint32(g.Queued), SilentMilliseconds: uint64(g.Silent.Milliseconds())}
		for _, e := range g.Engines {
			nics := s.nics[g.Group][e.Engine].loads()
			for _, n := range nics {
				sent.add(n.OutBytesPerSecond)
				received.add(n.InBytesPerSecond)
			}
			t.Engines = append(t.Engines, &pb.TopResponse_Engine{
				Engine: s.engines.of(uint32(e.Engine)), Node: s.nodes.of(uint32(e.Node)),
				Tokens: uint64(max(e.Tokens, 0)), Requests: uint32(max(e.Requests, 0)), HbmFreeTokens: int64(e.HBMFree),
				ComputeNics: nics,
			})
		}
		for _, n := range g.Nodes {
			t.Nodes = append(t.Nodes, &pb.TopResponse_Node{
				Node: s.nodes.of(uint32(n.Node)), ReadQueueTokens: uint64(max(n.ReadQueue, 0)), ReadTokensPerSecond: n.Rate, AssignedTokens: n.Assigned,
			})
		}
		out.Groups = append(out.Groups, t)
	}
	out.ComputeOutMostOverMean, out.ComputeInMostOverMean = sent.mostOverMean(), received.mostOverMean()
	return out, nil
}
