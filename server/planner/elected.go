package planner

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// Lease is the right to plan for one term. *membership.Term implements it.
type Lease interface {
	// Number is the number of the term. Each term has a higher number than all terms before it.
	Number() uint64
	// Held reports whether no other planner can plan at this moment.
	Held() bool
	// Lost is closed when the term has ended.
	Lost() <-chan struct{}
	// Keep stores a value for later terms, in place of the last one. It fails if the term has ended.
	Keep(ctx context.Context, value []byte) error
	// Kept returns the value that this or an earlier term has stored last; nil if there is none.
	Kept(ctx context.Context) ([]byte, error)
	// Deleted returns the names, among the given ones, whose namespaces the cluster has deleted. It leaves out names
	// that the cluster does not have.
	Deleted(ctx context.Context, names []string) ([]string, error)
	// Resign ends the term, so that another planner is elected.
	Resign()
}

// Leader is the leader of an election. The zero value means that there is none.
type Leader struct {
	Address string
	Term    uint64
	Since   time.Time
}

// Election elects one of several planners.
type Election interface {
	// Campaign waits until this planner is elected. It returns an error only if ctx ends.
	Campaign(ctx context.Context) (Lease, error)
	// Leader returns the present leader.
	Leader() Leader
	// Surpass ends this planner's term if it is below term, which a client has seen. Later terms of
	// this planner are above term.
	Surpass(term uint64)
}

// termBits is the number of low bits of an action's number that count the actions of one term. The
// high bits are the term. So planners that plan one after the other never assign the same number,
// also if the later planner has not seen the last actions of the earlier one.
const termBits = 40

// firstSeq returns the number below the actions of a term. Terms above maxTerm share their numbers.
func firstSeq(term uint64) uint64 {
	const maxTerm = maxSeq>>termBits - 1
	return min(term, maxTerm) << termBits
}

// ElectedOptions are the options of an Elected.
type ElectedOptions struct {
	Election Election
	// New opens a service without state for a term; closed, if not nil, is called after its Close. An
	// error comes without a service.
	New func(Lease) (s *Service, closed func() error, err error)
	// Failed is called if New or closed fails. The planner then ends the term and waits before it
	// campaigns again.
	Failed func(error)
	// Registry receives the metrics of the election. Nil means no metrics.
	Registry prometheus.Registerer
}

// Elected is a planner that serves while it is elected. Each of its terms has a Service without
// state, which gets its state as after a restart, and the epochs of BumpWeights from the lease. As a standby it refuses all calls except Election.
type Elected struct {
	pb.UnimplementedPlannerServer

	opts   ElectedOptions
	cancel context.CancelFunc
	done   chan struct{}
	once   sync.Once

	mu sync.Mutex
	// service is the service of the present term, nil on a standby. term is its number.
	service *Service
	term    uint64
	// terms is the number of terms of this planner.
	terms   uint64
	network *Network
}

// NewElected begins to campaign. Close ends it.
func NewElected(opts ElectedOptions) (*Elected, error) {
	ctx, cancel := context.WithCancel(context.Background())
	e := &Elected{opts: opts, cancel: cancel, done: make(chan struct{})}
	if opts.Registry != nil {
		if err := opts.Registry.Register(&electionCollector{e}); err != nil {
			cancel()
			return nil, fmt.Errorf("planner: register metrics: %w", err)
		}
	}
	go e.run(ctx)
	return e, nil
}

// Close ends the term and the campaign. It may be called twice.
func (e *Elected) Close() {
	e.once.Do(e.cancel)
	<-e.done
}

// run serves one term after the other until ctx ends.
func (e *Elected) run(ctx context.Context) {
	defer close(e.done)
	for {
		lease, err := e.opts.Election.Campaign(ctx)
		if err != nil {
			return
		}
		if err := e.serve(ctx, lease); err != nil {
			e.opts.Failed(err)
			select {
			case <-time.After(time.Second):
			case <-ctx.Done():
			}
		}
	}
}

// serve serves one term.
func (e *Elected) serve(ctx context.Context, lease Lease) error {
	// Resign follows the end of the service, so that two planners never plan at the same time.
	defer lease.Resign()
	kept, err := lease.Kept(ctx)
	if err != nil {
		return fmt.Errorf("term %d: the epochs that operators have ordered: %w", lease.Number(), err)
	}
	s, closed, err := e.opts.New(lease)
	if err == nil {
		err = s.resume(kept)
	}
	if err != nil {
		if s != nil {
			s.Close()
			s.unregister()
			if closed != nil {
				err = errors.Join(err, closed())
			}
		}
		return fmt.Errorf("term %d: %w", lease.Number(), err)
	}
	e.mu.Lock()
	e.service, e.term = s, lease.Number()
	e.terms++
	if e.network != nil {
		s.SetNetwork(*e.network)
	}
	e.mu.Unlock()
	select {
	case <-lease.Lost():
	case <-s.stop:
	case <-ctx.Done():
	}
	e.mu.Lock()
	e.service, e.term = nil, 0
	e.mu.Unlock()
	s.Close()
	s.unregister()
	if closed == nil {
		return nil
	}
	return closed()
}

// SetNetwork is Service.SetNetwork for the present and all later terms.
func (e *Elected) SetNetwork(n Network) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.network = &n
	if e.service != nil {
		e.service.SetNetwork(n)
	}
}

// leading returns the service of the present term, or an error that names the leader. If the caller is
// a gRPC client, it adds the term to the response's header.
func (e *Elected) leading(ctx context.Context) (*Service, error) {
	e.mu.Lock()
	s, term := e.service, e.term
	e.mu.Unlock()
	if s == nil || !s.leads() {
		return nil, e.standby()
	}
	if grpc.ServerTransportStreamFromContext(ctx) == nil {
		return s, nil
	}
	return s, grpc.SetHeader(ctx, api.TermPairs(term))
}

// standby returns the error with which a standby refuses a call.
func (e *Elected) standby() error {
	l := e.opts.Election.Leader()
	if l.Term == 0 {
		return status.Error(codes.Unavailable, "this planner is a standby, and finds no leader in etcd")
	}
	return status.Errorf(codes.Unavailable, "this planner is a standby; the planner at %s leads (term %d)", l.Address, l.Term)
}

// Election implements penstock.v1.Planner.
func (e *Elected) Election(context.Context, *pb.ElectionRequest) (*pb.ElectionResponse, error) {
	return e.state(), nil
}

// state returns this planner's part in the election.
func (e *Elected) state() *pb.ElectionResponse {
	e.mu.Lock()
	s, term := e.service, e.term
	e.mu.Unlock()
	l := e.opts.Election.Leader()
	r := &pb.ElectionResponse{Elected: true, Term: l.Term, Leader: l.Address}
	if l.Term > 0 {
		r.SinceUnixMs = l.Since.UnixMilli()
	}
	r.Leads = s != nil && s.leads() && term == l.Term
	return r
}

// Election implements penstock.v1.Planner.
func (s *Service) Election(context.Context, *pb.ElectionRequest) (*pb.ElectionResponse, error) {
	return &pb.ElectionResponse{Leads: true}, nil
}

// Submit implements penstock.v1.Planner.
func (e *Elected) Submit(r *pb.SubmitRequest, stream grpc.ServerStreamingServer[pb.RequestUpdate]) error {
	s, err := e.leading(stream.Context())
	if err != nil {
		return err
	}
	return s.Submit(r, stream)
}

// Lead implements penstock.v1.Planner. If the leader of the group has seen a higher term, this
// planner's term ends. Other callers cannot end a term, because they may have fewer rights.
func (e *Elected) Lead(stream grpc.BidiStreamingServer[pb.LeaderMessage, pb.LeaderAction]) error {
	header, _ := metadata.FromIncomingContext(stream.Context())
	if seen := api.Term(header); seen < maxSeq>>termBits {
		e.opts.Election.Surpass(seen)
	}
	s, err := e.leading(stream.Context())
	if err != nil {
		return err
	}
	return s.Lead(stream)
}

// unary makes a call of the service of the present term.
func unary[Q, R any](ctx context.Context, e *Elected, r Q, call func(*Service, context.Context, Q) (R, error)) (R, error) {
	s, err := e.leading(ctx)
	if err != nil {
		var none R
		return none, err
	}
	return call(s, ctx, r)
}

// BumpWeights implements penstock.v1.Planner.
func (e *Elected) BumpWeights(ctx context.Context, r *pb.BumpWeightsRequest) (*pb.BumpWeightsResponse, error) {
	return unary(ctx, e, r, (*Service).BumpWeights)
}

// SwitchRole implements penstock.v1.Planner.
func (e *Elected) SwitchRole(ctx context.Context, r *pb.SwitchRoleRequest) (*pb.SwitchRoleResponse, error) {
	return unary(ctx, e, r, (*Service).SwitchRole)
}

// Roles implements penstock.v1.Planner.
func (e *Elected) Roles(ctx context.Context, r *pb.RolesRequest) (*pb.RolesResponse, error) {
	return unary(ctx, e, r, (*Service).Roles)
}

// Explain implements penstock.v1.Planner.
func (e *Elected) Explain(ctx context.Context, r *pb.ExplainRequest) (*pb.ExplainResponse, error) {
	return unary(ctx, e, r, (*Service).Explain)
}

// Top implements penstock.v1.Planner.
func (e *Elected) Top(ctx context.Context, r *pb.TopRequest) (*pb.TopResponse, error) {
	return unary(ctx, e, r, (*Service).Top)
}

// Recent is Service.Recent of the present term. On a standby it is an error that names the leader.
func (e *Elected) Recent(n int) ([]RecentRequest, error) {
	s, err := e.leading(context.Background())
	if err != nil {
		return nil, err
	}
	return s.Recent(n)
}

var (
	descLeader = desc("leader", "1 if this planner leads, 0 if it is a standby. Only with cluster.etcd.")
	descTerm   = desc("term", "Term of the leader, as this planner has read it from etcd; each new leader has a higher one. 0: no planner leads, or etcd does not answer. Only with cluster.etcd.")
	descTerms  = desc("terms_total", "Times that this planner was elected. Only with cluster.etcd.")
)

// electionCollector reads the state of the election when the metrics are scraped.
type electionCollector struct{ e *Elected }

// Describe implements prometheus.Collector.
func (*electionCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- descLeader
	ch <- descTerm
	ch <- descTerms
}

// Collect implements prometheus.Collector.
func (c *electionCollector) Collect(ch chan<- prometheus.Metric) {
	st, leads := c.e.state(), 0.0
	if st.Leads {
		leads = 1
	}
	c.e.mu.Lock()
	terms := c.e.terms
	c.e.mu.Unlock()
	ch <- prometheus.MustNewConstMetric(descLeader, prometheus.GaugeValue, leads)
	ch <- prometheus.MustNewConstMetric(descTerm, prometheus.GaugeValue, float64(st.Term))
	ch <- prometheus.MustNewConstMetric(descTerms, prometheus.CounterValue, float64(terms))
}

var (
	_ pb.PlannerServer = (*Service)(nil)
	_ pb.PlannerServer = (*Elected)(nil)
)
