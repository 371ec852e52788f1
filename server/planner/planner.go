package planner

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/dualpath"
)

// Limits that keep a caller from using more than its share.
const (
	maxNameBytes = 256
	maxNames     = 1 << 20
	// maxPayloadBytes bounds a payload, so that a Start with the payload fits into 4 MiB, the
	// default maximum of a gRPC client's messages. The ids of a prompt of 2 M tokens in blocks of
	// 16 take 2 MiB, or 2.7 MiB in base64.
	maxPayloadBytes = 3 << 20
	maxAddressBytes = 4 << 10
	maxGroupEngines = 4096
	maxResident     = 64
	// leaderActions is the largest number of unsent actions of a leader. One fetch causes far fewer
	// actions.
	leaderActions = 1 << 14
	// gatewayUpdates is the largest number of unsent updates of a gateway's request. A request
	// normally has fewer updates.
	gatewayUpdates = 64
)

// Options of a Service.
type Options struct {
	Planner dualpath.Options
	// TickEvery is the interval at which the planner checks deadlines, timeouts and slow reads.
	// Default 10 ms.
	TickEvery time.Duration
	// PayloadBytes is the largest total size of the payloads of all requests in progress. Above it
	// requests are refused. Default 256 MiB.
	PayloadBytes int
	// GatewayWait is the time after which a request in progress without a gateway is cancelled. A
	// request has no gateway after a restart of the planner, or after its gateway has read the
	// updates too slowly. Default 30 s, several times the longest pause between two connection
	// attempts of a gateway.
	GatewayWait time.Duration
	// Record, if not nil, receives every event with its actions.
	Record *Record
	// Lease is the right to plan of an elected planner. Nil: the planner is not elected.
	Lease  Lease
	Logger *slog.Logger
	// Registry receives the metrics. Nil means no metrics.
	Registry prometheus.Registerer
}

// Service implements the gRPC service penstock.v1.Planner.
type Service struct {
	pb.UnimplementedPlannerServer

	log        *slog.Logger
	payloadMax int
	start      time.Time
	// number identifies this planner process (LeaderAction.planner).
	number uint64
	steps  prometheus.Histogram
	// prefillRate is dualpath.Options.PrefillRate.
	prefillRate float64
	// gatewayWait is Options.GatewayWait.
	gatewayWait time.Duration
	// lease is Options.Lease.
	lease Lease
	// unregister removes the metrics from Options.Registry.
	unregister func()
	// stride is the most by which one call of now advances the planner's time.
	stride time.Duration

	// keeping is held while the lease stores bumps. kept has the bumps that the lease stored last.
	keeping sync.Mutex
	kept    []bump

	mu      sync.Mutex
	planner *dualpath.Planner
	// clock is the planner's time. looked is the real time since start at the last call of now.
	clock, looked time.Duration
	record        *recorder // nil: none
	closed        bool

	groups, nodes, namespaces names
	engines                   names
	// leaders has the session of each group. The map at has the group and the address of each
	// engine.
	leaders map[dualpath.GroupID]*leader
	// roles has an entry for each group that has registered.
	roles map[dualpath.GroupID]*roles
	// bumped has the last bump of each namespace.
	bumped map[string]bump
	// nics has the compute NICs of the engines of each registered group.
	nics   map[dualpath.GroupID]map[dualpath.EngineID]*engineNICs
	at     map[dualpath.EngineID]place
	jobs   map[dualpath.RequestID]*job
	byName map[string]*job
	// alone has, for each job without a gateway, the time since when the job has no gateway: the
	// time at which a group listed the job, or at which its gateway was lost.
	alone  map[dualpath.RequestID]time.Duration
	lastID dualpath.RequestID
	// network is the last description from SetNetwork, or nil.
	network *Network
	// payload is the total payload of all jobs, in bytes.
	payload int
	recent  recent

	stop chan struct{}
	done chan struct{}
}

// place is the group of an engine and the address that its peers use.
type place struct {
	group   dualpath.GroupID
	address []byte
	// cache is the engine's prefix cache for gateways, or nil.
	cache *pb.PrefixCache
}

// job is a request in progress.
type job struct {
	id     dualpath.RequestID
	submit *pb.SubmitRequest
	since  time.Duration
	// span is the request's span, or nil if the request is not traced.
	span trace.Span
	// read has the number of tokens that each side (prefill or decode) had read at the last event
	// of the span.
	read map[pb.Side]uint32
	// updates is the channel to the gateway, or nil if no gateway is connected. lost is closed when
	// the gateway reads too slowly.
	updates chan *pb.RequestUpdate
	lost    chan struct{}
}

// New returns a service without groups. Close ends it.
func New(opts Options) (*Service, error) {
	if opts.Lease != nil {
		opts.Planner.FirstSeq = firstSeq(opts.Lease.Number())
	}
	p, err := dualpath.New(opts.Planner)
	if err != nil {
		return nil, fmt.Errorf("planner: %w", err)
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	if opts.TickEvery == 0 {
		opts.TickEvery = 10 * time.Millisecond
	}
	if opts.PayloadBytes == 0 {
		opts.PayloadBytes = 256 << 20
	}
	if opts.GatewayWait == 0 {
		opts.GatewayWait = 30 * time.Second
	}
	if opts.GatewayWait < 0 {
		return nil, fmt.Errorf("planner: GatewayWait is %v; it must be positive", opts.GatewayWait)
	}
	if opts.TickEvery < time.Millisecond {
		return nil, fmt.Errorf("planner: TickEvery is %v; the minimum is 1ms", opts.TickEvery)
	}
	opts.Planner.EnsureDefaults()
	s := &Service{
		lease: opts.Lease, unregister: func() {}, log: opts.Logger, payloadMax: opts.PayloadBytes, start: time.Now(), number: rand.Uint64() | 1, planner: p,
		groups: newNames("groups"), nodes: newNames("nodes"), namespaces: newNames("namespaces"), engines: newNames("engines"),
		alone: make(map[dualpath.RequestID]time.Duration), gatewayWait: opts.GatewayWait,
		leaders: make(map[dualpath.GroupID]*leader), roles: make(map[dualpath.GroupID]*roles), prefillRate: opts.Planner.PrefillRate, stride: max(opts.Planner.GroupTimeout/4, 2*opts.TickEvery), at: make(map[dualpath.EngineID]place),
		nics: make(map[dualpath.GroupID]map[dualpath.EngineID]*engineNICs), jobs: make(map[dualpath.RequestID]*job), byName: make(map[string]*job), recent: newRecent(opts.Planner.MaxExplain),
		bumped: make(map[string]bump), stop: make(chan struct{}), done: make(chan struct{}),
	}
	s.steps = newSteps()
	if opts.Registry != nil {
		metrics := []prometheus.Collector{s.steps, &collector{s}}
		for _, c := range metrics {
			if err := opts.Registry.Register(c); err != nil {
				return nil, fmt.Errorf("planner: register metrics: %w", err)
			}
		}
		s.unregister = func() {
			for _, c := range metrics {
				opts.Registry.Unregister(c)
			}
		}
	}
	if opts.Record != nil {
		if s.record, err = newRecorder(opts.Record, opts.Planner, opts.Logger); err != nil {
			return nil, fmt.Errorf("planner: %w", err)
		}
	}
	go s.tick(opts.TickEvery)
	return s, nil
}

// Close ends every stream. It returns when the service's goroutines have ended and the record is
// written. It may be called twice.
func (s *Service) Close() {
	s.mu.Lock()
	s.closeLocked()
	s.mu.Unlock()
	<-s.done
	if s.record != nil {
		<-s.record.done
	}
}

func (s *Service) closeLocked() {
	if s.closed {
		return
	}
	s.closed = true
	close(s.stop)
	for _, j := range s.jobs {
		s.tracedLocked(j)
	}
	if s.record != nil {
		s.record.end(nil)
	}
}

// leads reports whether the planner may plan: it is not elected, or it holds its lease.
func (s *Service) leads() bool { return s.lease == nil || s.lease.Held() }

// tick passes the time to the planner at intervals.
func (s *Service) tick(every time.Duration) {
	defer close(s.done)
	t := time.NewTicker(every)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			s.mu.Lock()
			s.stepLocked(dualpath.Tick{At: s.now()})
			s.cancelAloneLocked()
			s.expireNICsLocked()
			s.mu.Unlock()
		case <-s.stop:
			return
		}
	}
}

// now returns the planner's time since the service began. The caller holds mu. now is called at
// each tick, and one call adds at most s.stride. So no timeout passes while this process does not
// run (suspended, or without a CPU). The messages of gateways and leaders wait during that time.
func (s *Service) now() time.Duration {
	real := time.Since(s.start)
	s.clock += min(real-s.looked, s.stride)
	s.looked = real
	return s.clock
}

// stepLocked applies one event and delivers its actions. If the planner does not hold its lease, the
// service ends instead: another planner may have planned the requests.
func (s *Service) stepLocked(ev dualpath.Event) {
	if !s.leads() {
		s.closeLocked()
	}
	if s.closed {
		return
	}
	begin := time.Now()
	actions := s.planner.Step(ev)
	if s.record != nil {
		s.record.step(ev, actions)
	}
	for _, a := range actions {
		s.deliverLocked(&a)
	}
	s.steps.Observe(time.Since(begin).Seconds())
}

// deliverLocked puts one action into the channels of its leaders and its gateway, or records it for
// the operator.
func (s *Service) deliverLocked(a *dualpath.Action) {
	switch a.Kind {
	case dualpath.Switch:
		s.sendLocked(a.Group, &pb.LeaderAction{Kind: pb.LeaderAction_KIND_SWITCH, Seq: a.Seq, Side: pb.Side(a.Side)})
		s.roles[a.Group].order = a.Seq
		return
	case dualpath.Announce:
		s.sendLocked(a.Group, &pb.LeaderAction{Kind: pb.LeaderAction_KIND_ANNOUNCE, Seq: a.Seq, Side: pb.Side(a.Side)})
		s.roles[a.Group].order = a.Seq
		return
	case dualpath.Switched:
		s.switchedLocked(a)
		return
	}
	j := s.jobs[a.Request]
	if j == nil {
		return // the action is an Abort of a request that has just ended
	}
	switch a.Kind {
	case dualpath.Prefilled:
		s.updateLocked(j, &pb.RequestUpdate{Kind: pb.RequestUpdate_KIND_PREFILLED})
		return
	case dualpath.Done:
		s.updateLocked(j, &pb.RequestUpdate{Kind: pb.RequestUpdate_KIND_FINISHED})
		s.forgetLocked(j)
		return
	}
	s.decidedLocked(j, a)
	switch a.Kind {
	case dualpath.Reject:
		s.updateLocked(j, &pb.RequestUpdate{
			Kind: pb.RequestUpdate_KIND_REJECTED, Reason: reasonOf(a), Refusal: refusalOf(a.Why), RetryAfterMilliseconds: retryAfterOf(a),
		})
		s.forgetLocked(j)
		return
	case dualpath.Start:
		s.startLocked(j, a)
		return
	case dualpath.Replan:
		s.updateLocked(j, &pb.RequestUpdate{Kind: pb.RequestUpdate_KIND_REPLANNED, Reason: a.Why.String()})
		return
	}
	m := &pb.LeaderAction{
		Kind: kindOf(a.Kind), Seq: a.Seq, Request: j.submit.Id, Engine: s.engines.of(uint32(a.Engine)), Side: pb.Side(a.Side),
		Parts: partsOf(a), Hedge: a.Hedge, Reason: a.Why.String(),
	}
	if a.Kind == dualpath.Assign {
		m.Submitted = j.submit
	}
	s.sendLocked(a.Group, m)
}

// reasonOf returns the reason for a rejection, with the sizes if the request was too large.
func reasonOf(a *dualpath.Action) string {
	switch a.Why {
	case dualpath.TooLong, dualpath.TooLongToPrefill, dualpath.PromptTooLong:
		return fmt.Sprintf("%v: %d tokens, and at most %d fit", a.Why, a.Need, a.Most)
	case dualpath.TooLarge:
		return fmt.Sprintf("%v: %d bytes, and at most %d fit", a.Why, a.Need, a.Most)
	}
	if a.Why == dualpath.FirstTokenLate && a.Need > 0 {
		return fmt.Sprintf("%v: it comes in %v at the earliest, and %v are left", a.Why, microseconds(a.Need), microseconds(a.Most))
	}
	return a.Why.String()
}

// microseconds returns n microseconds, in whole milliseconds.
func microseconds(n int) time.Duration {
	return (time.Duration(n) * time.Microsecond).Round(time.Millisecond)
}

// retryAfterOf returns the number of milliseconds by which the first token would have been late, by
// the planner's estimate, if the request was rejected for that reason. It returns 0 for other
// rejections, and if the lateness is unknown.
func retryAfterOf(a *dualpath.Action) uint64 {
	if a.Why != dualpath.FirstTokenLate {
		return 0
	}
	return uint64(max(a.Need-a.Most, 0)+999) / 1000
}

// refusalOf returns the refusal class of a rejection.
func refusalOf(r dualpath.Reason) pb.Refusal {
	switch r {
	case dualpath.QueueFull, dualpath.PastDeadline:
		return pb.Refusal_REFUSAL_BUSY
	case dualpath.TooLong, dualpath.TooLongToPrefill, dualpath.PromptTooLong, dualpath.TooLarge:
		return pb.Refusal_REFUSAL_TOO_LONG
	case dualpath.BadRequest:
		return pb.Refusal_REFUSAL_INVALID
	case dualpath.OldWeights:
		return pb.Refusal_REFUSAL_OLD_WEIGHTS
	case dualpath.FirstTokenLate:
		return pb.Refusal_REFUSAL_LATE
	}
	return pb.Refusal_REFUSAL_UNSPECIFIED
}

// startLocked sends START to both groups, and STARTED to the gateway.
func (s *Service) startLocked(j *job, a *dualpath.Action) {
	pe, de := s.engines.of(uint32(a.PE)), s.engines.of(uint32(a.DE))
	parts := partsOf(a)
	for _, side := range [...]struct {
		role       pb.Side
		engine     string
		at         dualpath.EngineID
		peer       string
		peerEngine dualpath.EngineID
	}{{pb.Side_SIDE_PREFILL, pe, a.PE, de, a.DE}, {pb.Side_SIDE_DECODE, de, a.DE, pe, a.PE}} {
		s.sendLocked(s.at[side.at].group, &pb.LeaderAction{
			Epoch: a.Epoch, Kind: pb.LeaderAction_KIND_START, Seq: a.Seq, Request: j.submit.Id, Engine: side.engine, Side: side.role, Parts: parts,
			PeerEngine: side.peer, PeerAddress: s.at[side.peerEngine].address,
		})
	}
	s.updateLocked(j, &pb.RequestUpdate{
		Kind: pb.RequestUpdate_KIND_STARTED, PrefillEngine: pe, DecodeEngine: de, Parts: parts, Attempt: a.Seq, Epoch: a.Epoch,
		DecodeCache: s.at[a.DE].cache,
	})
}

// sendLocked queues an action for the leader of a group. If the group has no session, the action is
// dropped: the planner sends it again when the group registers again.
func (s *Service) sendLocked(g dualpath.GroupID, m *pb.LeaderAction) {
	l := s.leaders[g]
	if l == nil {
		return
	}
	select {
	case l.out <- m:
	default:
		l.end(errSlowLeader)
		delete(s.leaders, g)
	}
}

// updateLocked queues an update for the gateway, if one is connected.
func (s *Service) updateLocked(j *job, u *pb.RequestUpdate) {
	if j.updates == nil {
		return
	}
	select {
	case j.updates <- u:
	default:
		close(j.lost)
		j.updates, j.lost = nil, nil
		s.alone[j.id] = s.now()
	}
}

// cancelAloneLocked cancels the requests that have had no gateway for GatewayWait. Otherwise their
// engines would work for no client.
func (s *Service) cancelAloneLocked() {
	now := s.now()
	for id, since := range s.alone {
		if now-since < s.gatewayWait {
			continue
		}
		if j := s.jobs[id]; j != nil {
			s.log.Warn("a request is cancelled, because no gateway has submitted it again", "request", j.submit.Id, "after", s.gatewayWait)
			s.stepLocked(dualpath.Cancelled{At: now, Request: id})
		}
		delete(s.alone, id)
	}
}

// forgetLocked removes a job. The job's gateway can still read the queued updates.
func (s *Service) forgetLocked(j *job) {
	if j.updates != nil {
		close(j.updates)
	}
	j.updates = nil
	s.tracedLocked(j)
	delete(s.jobs, j.id)
	delete(s.alone, j.id)
	delete(s.byName, j.submit.Id)
	s.payload -= len(j.submit.Payload)
}

// jobLocked makes a job of a request.
func (s *Service) jobLocked(r *pb.SubmitRequest) *job {
	s.lastID++
	j := &job{id: s.lastID, submit: r, since: s.now()}
	s.jobs[j.id], s.byName[r.Id] = j, j
	s.recent.add(r.Id, j.id)
	s.payload += len(r.Payload)
	return j
}

// kindOf converts the kind of a leader's action.
func kindOf(k dualpath.ActionKind) pb.LeaderAction_Kind {
	switch k {
	case dualpath.Assign:
		return pb.LeaderAction_KIND_ASSIGN
	case dualpath.Read:
		return pb.LeaderAction_KIND_READ
	case dualpath.Cut:
		return pb.LeaderAction_KIND_CUT
	case dualpath.Drop:
		return pb.LeaderAction_KIND_DROP
	case dualpath.Recompute:
		return pb.LeaderAction_KIND_RECOMPUTE
	case dualpath.Abort:
		return pb.LeaderAction_KIND_ABORT
	}
	return pb.LeaderAction_KIND_UNSPECIFIED
}

// partsOf converts an action's parts.
func partsOf(a *dualpath.Action) []*pb.Part {
	var out []*pb.Part
	for _, p := range a.Parts[:a.NParts] {
		out = append(out, &pb.Part{Side: pb.Side(p.Side), From: uint32(p.From), To: uint32(p.To)})
	}
	return out
}
