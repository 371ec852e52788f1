package leader

import (
	"context"
	"errors"
	"fmt"
	"math/bits"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/kv"
)

// Request is one attempt at a request, on one engine. The engine reports progress and the end with
// the methods, which do not block and may be called concurrently.
type Request struct {
	// Name identifies the attempt. It is the same on both engines, and is the field Request of
	// their traffic jobs. ID identifies the request.
	Name, ID  string
	Namespace string
	// Role is the role of the engine in the request.
	Role Role
	// Epoch is the version of the weights that the request is computed and stored with. If it is
	// newer than the version of the cached prefix, the prefix is recomputed.
	Epoch kv.Epoch
	// Prompt is the length of the prompt and Output the expected length of the output, both in
	// tokens. Hit is the length of the cached prefix in blocks.
	Prompt, Output, Hit int
	// Parts are the ranges of the cached prefix that this engine reads from storage, in blocks.
	Parts []traffic.Part
	// Peer is the address of the traffic manager of the request's other engine, PeerEngine the name
	// of that engine.
	Peer       traffic.Peer
	PeerEngine string
	// Payload is the data that the gateway sent for the engines.
	Payload []byte

	leader  *Leader
	engine  Engine
	member  Member
	attempt uint64
	ctx     context.Context
	cancel  context.CancelFunc

	// Leader.mu guards the fields below. unread is the number of the request's tokens in the
	// reading queue. arrived has, for each part being read, the number of tokens that have arrived
	// and so left the queue.
	unread  int
	arrived map[traffic.Part]int
	// ordered has, for each part, the number of the action that ordered its read. brings are the
	// parts that the engine has read, is reading or computes, without the blocks that a stopped
	// read did not reach.
	ordered map[traffic.Part]uint64
	brings  []traffic.Part
	// progress is the report for the next fetch; nil: there is no new progress. last is the last
	// report about a read.
	progress *pb.ReadProgress
	last     *pb.LeaderMessage
	// order is the number of the last received action about the attempt.
	order uint64
	// buffer is the number of bytes that the request uses in its engine's buffer; 0 when
	// its KV has left the buffer.
	buffer int64
	ended  bool
}

// start begins an attempt: it handles the planner's START.
func (l *Leader) start(ctx context.Context, a *pb.LeaderAction) error {
	l.mu.Lock()
	h, role := l.held[a.Request], l.role
	l.mu.Unlock()
	if h == nil {
		return fmt.Errorf("leader: request %q was not assigned to an engine of group %q", a.Request, l.opts.Group)
	}
	peer, err := parsePeer(a.PeerAddress)
	if err != nil {
		return fmt.Errorf("leader: the address of engine %q cannot be read: %w", a.PeerEngine, err)
	}
	r := &Request{
		Name: api.AttemptName(a.Request, a.Seq), ID: a.Request, Namespace: h.submit.Namespace, Role: role, Epoch: kv.Epoch(a.Epoch),
		Prompt: int(h.submit.PromptTokens), Output: int(h.submit.OutputTokens), Hit: int(h.submit.HitTokens) / l.opts.Geometry.BlockTokens,
		Peer: peer, PeerEngine: a.PeerEngine, Payload: h.submit.Payload,
		leader: l, engine: h.member.Engine, member: h.member, attempt: a.Seq, order: a.Seq,
		arrived: make(map[traffic.Part]int), ordered: make(map[traffic.Part]uint64),
	}
	for _, p := range a.Parts {
		if Role(p.Side) == role {
			r.Parts = append(r.Parts, l.part(p))
		}
	}
	r.ctx, r.cancel = context.WithCancel(ctx)
	passing := l.blocksOf(r.Prompt) // the whole prompt passes through a decode engine's buffer
	if role == Prefill {
		passing = 0
		for _, p := range r.Parts {
			passing += p.Len()
		}
	}
	l.mu.Lock()
	if l.held[a.Request] != h {
		l.mu.Unlock()
		r.cancel()
		return fmt.Errorf("leader: engine %q, which had request %q, was removed from group %q", h.member.Name, a.Request, l.opts.Group)
	}
	h.cancel()
	h.attempt = r
	l.running++
	r.buffer = h.member.Footprint.Of(l.blocksOf(r.Prompt), passing)
	for _, p := range r.Parts {
		l.expectLocked(r, p, a.Seq)
	}
	l.mu.Unlock()
	h.member.Engine.Start(r.ctx, r)
	return nil
}

// expect records a part that the request's engine is going to read. order is the number of the
// action that ordered the read.
func (l *Leader) expect(r *Request, p traffic.Part, order uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.ended {
		return
	}
	l.expectLocked(r, p, order)
	if r.Role == Prefill {
		r.buffer += int64(p.Len()) * r.member.Footprint.Block
	}
}

func (l *Leader) expectLocked(r *Request, p traffic.Part, order uint64) {
	n := l.tokensOf(p.Len())
	r.unread += n
	r.arrived[p], r.ordered[p] = 0, order
	r.brings = append(r.brings, p)
	l.queueLocked(n)
}

// readLocked removes n tokens of a request from the reading queue.
func (l *Leader) readLocked(r *Request, n int) {
	n = min(n, r.unread)
	r.unread -= n
	l.queueLocked(-n)
}

// landed returns how many tokens of a part of a prefix of hit blocks have arrived: of the part's
// tokens, the fraction of its bytes that have arrived. The blocks may have different numbers of
// bytes, because layers with a sliding window need only the last ones.
func landed(g kv.Geometry, p traffic.Progress, hit int) int {
	whole := g.PartBytes(p.Part.From, p.Part.To, hit)
	// The product may exceed 64 bits.
	hi, lo := bits.Mul64(uint64(min(p.Bytes, whole)), uint64(p.Part.Len()*g.BlockTokens))
	tokens, _ := bits.Div64(hi, lo, uint64(whole))
	return int(tokens)
}

// Progress reports the progress of the read of a part (traffic.PrefillJob.Progress). The end of a
// part is sent to the planner at once, other progress with the next fetch.
func (r *Request) Progress(p traffic.Progress) {
	l := r.leader
	landed := landed(l.opts.Geometry, p, r.Hit)
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.ended {
		return
	}
	if n, reading := r.arrived[p.Part]; reading {
		l.meter.read += float64(landed - n)
		l.readLocked(r, landed-n)
		r.arrived[p.Part] = landed
	}
	r.progress = &pb.ReadProgress{
		Request: r.ID, Attempt: r.attempt, Side: pb.Side(r.Role), Upto: uint32(l.tokensOf(p.Upto)), Landed: uint32(landed), Read: r.ordered[p.Part],
	}
	if p.Upto == p.Part.To {
		delete(r.arrived, p.Part)
		l.sayLocked(report{r, progressOf(r)})
	}
}

// progressOf returns the waiting progress report of a request, and removes it from the request.
func progressOf(r *Request) *pb.LeaderMessage {
	r.last = &pb.LeaderMessage{Message: &pb.LeaderMessage_Progress{Progress: r.progress}}
	r.progress = nil
	return r.last
}

// Stopped informs the planner of a storage read that has ended before it delivered all of the
// tokens that it was ordered to read. It is the callback traffic.PrefillJob.Stopped.
func (r *Request) Stopped(s traffic.Stop) {
	l := r.leader
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.ended {
		return
	}
	l.readLocked(r, l.tokensOf(s.Part.Len())-r.arrived[s.Part])
	delete(r.arrived, s.Part)
	// Search from the end: the entry of an earlier read of the same part was shortened when that
	// read stopped.
	for i := len(r.brings) - 1; i >= 0; i-- {
		if r.brings[i] == s.Part {
			r.brings[i].To = s.Upto
			break
		}
	}
	r.progress = nil
	r.last = &pb.LeaderMessage{Message: &pb.LeaderMessage_Stopped{Stopped: &pb.ReadStopped{
		Request: r.ID, Attempt: r.attempt, Side: pb.Side(r.Role), Upto: uint32(l.tokensOf(s.Upto)), Failed: !s.Gone, Gone: s.Gone, Read: r.ordered[s.Part],
	}}}
	l.sayLocked(report{r, r.last})
}

// Passed reports that the request's KV has left the engine's buffer before the end of the request.
// A decode engine calls it when its traffic job has ended but the output is not complete.
func (r *Request) Passed() {
	r.leader.mu.Lock()
	defer r.leader.mu.Unlock()
	r.buffer = 0
}

// Done reports the end of the request on the engine. err is nil if the engine's work on the request
// is complete. The engine must have released the request's memory. After an error the planner plans
// the request again. If the error contains a *traffic.BlockError, the cached blocks before that
// block count as correct; without one, no block does. Further calls have no effect.
func (r *Request) Done(err error) {
	l := r.leader
	// Cancel last: an engine may call Done again when the context ends, and that call must have no
	// effect.
	defer r.cancel()
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.ended {
		return
	}
	aborted := r.ctx.Err() != nil
	r.ended, r.progress = true, nil
	l.readLocked(r, r.unread)
	h := l.held[r.ID]
	if h != nil && h.attempt == r {
		delete(l.held, r.ID)
	}
	l.running--
	signal(l.freed)
	var end report
	switch {
	case err == nil:
		end = report{r, &pb.LeaderMessage{Message: &pb.LeaderMessage_Finished{Finished: &pb.RequestFinished{Request: r.ID, Attempt: r.attempt, Role: pb.Side(r.Role)}}}}
	case aborted:
		return // the planner has aborted the attempt and expects no report
	default:
		l.log.Warn("a request failed on its engine", "group", l.opts.Group, "engine", r.member.Name, "request", r.ID, "err", err)
		upto := 0
		var wrong *traffic.BlockError
		if errors.As(err, &wrong) {
			upto = l.tokensOf(wrong.Block)
		}
		end = report{r, failed(r.ID, r.attempt, r.Role, upto)}
	}
	if h != nil && h.attempt == r && !h.aborted {
		l.ended[r.ID] = &ended{h, end}
	}
	l.sayLocked(end)
}

// failed returns the report that an attempt has failed. The cached tokens before upto are known to
// be correct.
func failed(request string, attempt uint64, role Role, upto int) *pb.LeaderMessage {
	return &pb.LeaderMessage{Message: &pb.LeaderMessage_Failed{Failed: &pb.RequestFailed{Request: request, Attempt: attempt, Role: pb.Side(role), Upto: uint32(upto)}}}
}

// queueReport queues a report for the planner.
func (l *Leader) queueReport(m report) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sayLocked(m)
}

func (l *Leader) sayLocked(m report) {
	l.reports = append(l.reports, m)
	signal(l.wake)
}
