package planner_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/testplanner"
	"github.com/penstock-kv/penstock/server/planner"
)

// elected is a planner that the test elects, with a client.
type elected struct {
	*testing.T
	*testplanner.Elected
	pb.PlannerClient
	ctx      context.Context
	registry *prometheus.Registry
}

func newElected(t *testing.T) *elected {
	t.Helper()
	testkit.VerifyNone(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	registry := prometheus.NewRegistry()
	// The ticks do not end a term before the test has looked.
	e := testplanner.StartElected(t, testplanner.Options{Planner: planner.Options{TickEvery: time.Hour, Registry: registry}})
	conn, err := client.Dial(e.Addr, client.DialOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return &elected{t, e, pb.NewPlannerClient(conn), ctx, registry}
}

// lead registers a group of one engine, which may have requests.
func (e *elected) lead(group string, role pb.Side, holding ...*pb.HeldRequest) pb.Planner_LeadClient {
	e.Helper()
	s, err := e.Lead(e.ctx)
	if err == nil {
		err = s.Send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Register{Register: &pb.RegisterGroup{
			Group: group, Role: role, Engines: []*pb.EngineSpec{{Engine: group, Node: group, HbmTokens: 1 << 20}}, Holding: holding,
		}}})
	}
	if err == nil {
		_, err = s.Recv()
	}
	if err != nil {
		e.Fatal(err)
	}
	return s
}

// fetch sends a fetch for the group. If the planner has ended the stream, Recv returns its error.
func (e *elected) fetch(s pb.Planner_LeadClient, group string) {
	e.Helper()
	err := s.Send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Fetch{Fetch: &pb.FetchWork{
		Engines: []*pb.EngineState{{Engine: group, HbmFreeTokens: 1 << 20}}, Nodes: []*pb.NodeState{{Node: group}},
	}}})
	if err != nil && !errors.Is(err, io.EOF) {
		e.Fatal(err)
	}
}

// metric returns a metric's value, and -1 if there is none.
func (e *elected) metric(name string) float64 {
	e.Helper()
	all, err := e.registry.Gather()
	if err != nil {
		e.Fatal(err)
	}
	for _, f := range all {
		if f.GetName() == name {
			if g := f.Metric[0].Gauge; g != nil {
				return g.GetValue()
			}
			return f.Metric[0].Counter.GetValue()
		}
	}
	return -1
}

// TestStandby: a standby refuses all calls except Election, and names the leader.
func TestStandby(t *testing.T) {
	e := newElected(t)
	refused := func(text string) {
		t.Helper()
		_, err := e.Top(e.ctx, &pb.TopRequest{})
		errs := []error{err}
		s, err := e.Lead(e.ctx)
		if err == nil {
			_, err = s.Recv()
		}
		errs = append(errs, err)
		g, err := e.Submit(e.ctx, &pb.SubmitRequest{Id: "r", Namespace: "m", PromptTokens: 1})
		if err == nil {
			_, err = g.Recv()
		}
		for _, err := range append(errs, err) {
			if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), text) {
				t.Errorf("a standby returns %v; want %q", err, text)
			}
		}
	}
	refused("finds no leader in etcd")
	e.SetLeader(planner.Leader{Address: "other:7430", Term: 3})
	refused("the planner at other:7430 leads (term 3)")
	r, err := e.PlannerClient.Election(e.ctx, &pb.ElectionRequest{})
	if err != nil || r.Leads || !r.Elected || r.Term != 3 || r.Leader != "other:7430" {
		t.Errorf("Election returns %v, %v", r, err)
	}
	if leads, term, requests := e.metric("penstock_planner_leader"), e.metric("penstock_planner_term"), e.metric("penstock_planner_requests_total"); leads != 0 || term != 3 || requests != -1 {
		t.Errorf("metrics of a standby: leader %v, term %v, requests %v", leads, term, requests)
	}
}

// TestTerms: each term has a service without state, whose attempts have higher numbers than the
// attempts of the terms before it.
func TestTerms(t *testing.T) {
	e := newElected(t)
	var last uint64
	for term := uint64(1); term <= 2; term++ {
		lease := e.Elect(term)
		p, d := e.lead("p", pb.Side_SIDE_PREFILL), e.lead("d", pb.Side_SIDE_DECODE)
		g, err := e.Submit(e.ctx, &pb.SubmitRequest{Id: "r", Namespace: "m", PromptTokens: 100, OutputTokens: 10})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := g.Recv(); err != nil { // accepted
			t.Fatal(err)
		}
		e.fetch(p, "p")
		e.fetch(d, "d")
		u, err := g.Recv()
		if err != nil || u.Kind != pb.RequestUpdate_KIND_STARTED {
			t.Fatalf("%v, %v", u, err)
		}
		if u.Attempt <= last || u.Attempt>>40 != term {
			t.Errorf("attempt %#x in term %d, after %#x", u.Attempt, term, last)
		}
		last = u.Attempt
		if leads, requests, terms := e.metric("penstock_planner_leader"), e.metric("penstock_planner_requests_total"), e.metric("penstock_planner_terms_total"); leads != 1 || requests != 1 || terms != float64(term) {
			t.Errorf("metrics of the leader: leader %v, requests %v, terms %v", leads, requests, terms)
		}
		lease.Resign()
		if _, err := g.Recv(); status.Code(err) != codes.Unavailable {
			t.Errorf("at the end of the term the gateway's stream ends with %v", err)
		}
	}
}

// TestBumpsOutliveTerms: the next planner has the epochs of BumpWeights. A gateway that submits a request again with the
// older epoch gets it planned with the newest one, and the policy holds for running requests of older weights that
// groups list. A bump that cannot be kept changes nothing.
func TestBumpsOutliveTerms(t *testing.T) {
	e := newElected(t)
	bump := func(epoch uint64, policy pb.Drain, dry bool) error {
		_, err := e.BumpWeights(e.ctx, &pb.BumpWeightsRequest{Namespace: "m", Epoch: epoch, Policy: policy, DryRun: dry})
		return err
	}
	has := func(epoch uint64) {
		t.Helper()
		if err := bump(epoch, pb.Drain_DRAIN_FINISH, true); err != nil {
			t.Errorf("epoch %d is not the newest: %v", epoch, err)
		}
		if err := bump(epoch-1, pb.Drain_DRAIN_FINISH, true); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("epoch %d begins after epoch %d: %v", epoch-1, epoch, err)
		}
	}
	lease := e.Elect(1)
	if err := bump(2, pb.Drain_DRAIN_FINISH, false); err != nil {
		t.Fatal(err)
	}
	e.RefuseKeep(errors.New("etcd is away"))
	if err := bump(3, pb.Drain_DRAIN_FINISH, false); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "etcd is away") {
		t.Errorf("a bump that is not kept returns %v", err)
	}
	has(2)
	e.RefuseKeep(nil)
	lease.Resign()

	lease = e.Elect(2)
	has(2)
	p, d := e.lead("p", pb.Side_SIDE_PREFILL), e.lead("d", pb.Side_SIDE_DECODE)
	g, err := e.Submit(e.ctx, &pb.SubmitRequest{Id: "waits", Namespace: "m", Epoch: 1, PromptTokens: 100, OutputTokens: 10})
	if err != nil {
		t.Fatal(err)
	}
	for {
		u, err := g.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if u.Kind == pb.RequestUpdate_KIND_ACCEPTED {
			e.fetch(p, "p")
			e.fetch(d, "d")
			continue
		}
		if u.Kind != pb.RequestUpdate_KIND_STARTED || u.Epoch != 2 {
			t.Errorf("%v; want a start with epoch 2", u)
		}
		break
	}
	if err := bump(3, pb.Drain_DRAIN_ABORT, false); err != nil {
		t.Fatal(err)
	}
	lease.Resign()

	// The planner has ended before the leaders got its orders.
	e.Elect(3)
	has(3)
	held := func(engine, peer string) *pb.HeldRequest {
		return &pb.HeldRequest{
			Request: &pb.SubmitRequest{Id: "old", Namespace: "m", Epoch: 2, PromptTokens: 100, OutputTokens: 10},
			Engine:  engine, PeerEngine: peer, Attempt: 2<<40 + 7, Order: 2<<40 + 7,
		}
	}
	for _, s := range []pb.Planner_LeadClient{e.lead("p", pb.Side_SIDE_PREFILL, held("p", "d")), e.lead("d", pb.Side_SIDE_DECODE, held("d", "p"))} {
		if a, err := s.Recv(); err != nil || a.Kind != pb.LeaderAction_KIND_ABORT || a.Request != "old" {
			t.Errorf("a request of older weights gets %v, %v; want an abort", a, err)
		}
	}
	if want := `{"version":1,"bumps":[{"namespace":"m","epoch":3,"policy":"abort"}]}`; e.Kept() != want {
		t.Errorf("%s is kept; want %s", e.Kept(), want)
	}
}

// TestBumpsOfDeletedNamespaces: a bump removes those of deleted namespaces from the election, but not itself. If the
// namespaces cannot be read, it removes none.
func TestBumpsOfDeletedNamespaces(t *testing.T) {
	e := newElected(t)
	lease := e.Elect(1)
	bump := func(name string, epoch uint64) {
		t.Helper()
		if _, err := e.BumpWeights(e.ctx, &pb.BumpWeightsRequest{Namespace: name, Epoch: epoch, Policy: pb.Drain_DRAIN_FINISH}); err != nil {
			t.Fatal(err)
		}
	}
	kept := func(want string) {
		t.Helper()
		if got := e.Kept(); got != `{"version":1,"bumps":[`+want+`]}` {
			t.Errorf("%s is kept; want the bumps %s", got, want)
		}
	}
	bump("a", 2)
	bump("b", 2)
	e.DeleteNamespace("a")
	e.RefuseDeleted(errors.New("no right to read the namespaces"))
	bump("b", 3)
	kept(`{"namespace":"a","epoch":2,"policy":"finish"},{"namespace":"b","epoch":3,"policy":"finish"}`)
	e.RefuseDeleted(nil)
	bump("c", 5)
	kept(`{"namespace":"b","epoch":3,"policy":"finish"},{"namespace":"c","epoch":5,"policy":"finish"}`)
	bump("a", 3)
	kept(`{"namespace":"b","epoch":3,"policy":"finish"},{"namespace":"c","epoch":5,"policy":"finish"},{"namespace":"a","epoch":3,"policy":"finish"}`)
	lease.Resign()
	e.Elect(2)
	bump("b", 4)
	kept(`{"namespace":"c","epoch":5,"policy":"finish"},{"namespace":"b","epoch":4,"policy":"finish"}`)
}

// TestExpiredLease: a leader whose lease has ended while its process did not run plans nothing and
// sends nothing, although it has no notice of the end.
func TestExpiredLease(t *testing.T) {
	e := newElected(t)
	lease := e.Elect(1)
	p, d := e.lead("p", pb.Side_SIDE_PREFILL), e.lead("d", pb.Side_SIDE_DECODE)
	g, err := e.Submit(e.ctx, &pb.SubmitRequest{Id: "r", Namespace: "m", PromptTokens: 100, OutputTokens: 10})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.Recv(); err != nil { // accepted
		t.Fatal(err)
	}
	if list, err := e.Service.Recent(10); err != nil || len(list) != 1 || list[0].ID != "r" {
		t.Errorf("the leader has the requests %v, %v", list, err)
	}
	lease.Expire()
	if _, err := e.Top(e.ctx, &pb.TopRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("a leader with an expired lease returns %v", err)
	}
	if list, err := e.Service.Recent(10); status.Code(err) != codes.Unavailable {
		t.Errorf("a leader with an expired lease has the requests %v, %v", list, err)
	}
	e.fetch(p, "p") // the request would be granted
	e.fetch(d, "d")
	for name, recv := range map[string]func() (any, error){
		"p": func() (any, error) { return p.Recv() }, "d": func() (any, error) { return d.Recv() }, "the gateway": func() (any, error) { return g.Recv() },
	} {
		if m, err := recv(); status.Code(err) != codes.Unavailable {
			t.Errorf("%s got %v, %v from a leader with an expired lease", name, m, err)
		}
	}
}
