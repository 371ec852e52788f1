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

// lead registers a group of one engine.
func (e *elected) lead(group string, role pb.Side) pb.Planner_LeadClient {
	e.Helper()
	s, err := e.Lead(e.ctx)
	if err == nil {
		err = s.Send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Register{Register: &pb.RegisterGroup{
			Group: group, Role: role, Engines: []*pb.EngineSpec{{Engine: group, Node: group, HbmTokens: 1 << 20}},
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
