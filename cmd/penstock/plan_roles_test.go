package main

import (
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/lab/testplanner"
	"github.com/penstock-kv/penstock/server/planner"
)

// planned is a planner with groups whose leaders the test plays.
type planned struct {
	*testing.T
	addr   string
	client pb.PlannerClient
}

func startPlanned(t *testing.T) *planned {
	p := testplanner.Start(t, testplanner.Options{TCP: true, Planner: planner.Options{Planner: dualpath.Options{GroupTimeout: time.Hour}}})
	return &planned{t, p.Addr, pb.NewPlannerClient(p.Conn)}
}

// plan runs penstock plan.
func (p *planned) plan(args ...string) result {
	p.Helper()
	return penstock(p.T, "", nil, append(append([]string{"plan"}, args...), "--planner", p.addr)...)
}

// apply runs penstock plan roles --apply beside the test.
func (p *planned) apply(args ...string) <-chan result {
	done := make(chan result, 1)
	go func() { done <- p.plan(append([]string{"roles", "--apply"}, args...)...) }()
	return done
}

// lead registers a group of one engine, whose leader has the actions up to the number seen.
func (p *planned) lead(group string, role pb.Side, switches bool, seen uint64) grpc.BidiStreamingClient[pb.LeaderMessage, pb.LeaderAction] {
	p.Helper()
	s, err := p.client.Lead(p.Context())
	if err != nil {
		p.Fatal(err)
	}
	r := &pb.RegisterGroup{Group: group, Role: role, Switches: switches, Seen: seen, Engines: []*pb.EngineSpec{{Engine: group, Node: group, HbmTokens: 10_000}}}
	p.send(s, &pb.LeaderMessage{Message: &pb.LeaderMessage_Register{Register: r}})
	p.next(s, pb.LeaderAction_KIND_REGISTERED)
	return s
}

func (p *planned) send(s grpc.BidiStreamingClient[pb.LeaderMessage, pb.LeaderAction], m *pb.LeaderMessage) {
	p.Helper()
	if err := s.Send(m); err != nil {
		p.Fatal(err)
	}
}

func (p *planned) next(s grpc.BidiStreamingClient[pb.LeaderMessage, pb.LeaderAction], kind pb.LeaderAction_Kind) *pb.LeaderAction {
	p.Helper()
	a, err := s.Recv()
	if err != nil || a.Kind != kind {
		p.Fatalf("got %v, %v; want %v", a, err, kind)
	}
	return a
}

// confirm receives an action and confirms it to the planner.
func (p *planned) confirm(s grpc.BidiStreamingClient[pb.LeaderMessage, pb.LeaderAction], kind pb.LeaderAction_Kind) {
	p.Helper()
	p.send(s, &pb.LeaderMessage{Message: &pb.LeaderMessage_Fetch{Fetch: &pb.FetchWork{Seen: p.next(s, kind).Seq}}})
}

// fails fails the test unless a command ended with the code and its error has these texts.
func fails(t *testing.T, r result, code int, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if r.code != code || !strings.Contains(r.err, text) {
			t.Errorf("exit %d, %q; want exit %d, %q", r.code, r.err, code, text)
		}
	}
}

// start starts a request on two groups.
func (p *planned) start(pe, de grpc.BidiStreamingClient[pb.LeaderMessage, pb.LeaderAction]) {
	p.Helper()
	s, err := p.client.Submit(p.Context(), &pb.SubmitRequest{Id: "r", Namespace: "m", PromptTokens: 100, OutputTokens: 10})
	if err != nil {
		p.Fatal(err)
	}
	if _, err := s.Recv(); err != nil { // accepted
		p.Fatal(err)
	}
	fetch := &pb.LeaderMessage{Message: &pb.LeaderMessage_Fetch{Fetch: &pb.FetchWork{}}}
	p.send(pe, fetch)
	for _, l := range []grpc.BidiStreamingClient[pb.LeaderMessage, pb.LeaderAction]{pe, de} {
		p.next(l, pb.LeaderAction_KIND_ASSIGN)
		p.next(l, pb.LeaderAction_KIND_START)
	}
}

// finish reports the end of the request's decode.
func (p *planned) finish(de grpc.BidiStreamingClient[pb.LeaderMessage, pb.LeaderAction]) {
	p.send(de, &pb.LeaderMessage{Message: &pb.LeaderMessage_Finished{Finished: &pb.RequestFinished{Request: "r", Role: pb.Side_SIDE_DECODE}}})
}

// TestPlanBump: a dry run and a bump report the affected requests. --wait ends with --timeout while
// a request is left, and without an error when none is.
func TestPlanBump(t *testing.T) {
	p := startPlanned(t)
	pe, de := p.lead("P", pb.Side_SIDE_PREFILL, false, 0), p.lead("D", pb.Side_SIDE_DECODE, false, 0)
	p.start(pe, de)
	bump := func(args ...string) result { return p.plan(append([]string{"bump", "m", "--epoch", "1"}, args...)...) }
	b := decode[planBumped](t, bump("--policy", "abort", "--dry-run", "--format", "json"))
	if want := (planBumped{Namespace: "m", Epoch: 1, Policy: "abort", DryRun: true, Prefilling: 1, Aborted: 1}); b != want {
		t.Errorf("a dry run: %+v; want %+v", b, want)
	}
	if out := bump("--policy", "finish").must(t); !strings.Contains(out, "going on with older weights") || !strings.Contains(out, "left") {
		t.Errorf("finish printed\n%s", out)
	}
	fails(t, bump("--policy", "finish", "--wait", "--timeout", "3s"), exitFailed, "1 requests of weights older than epoch 1 are left", "the planner continues")
	p.finish(de)
	bump("--policy", "finish", "--wait").must(t)
	p.plan("bump", "m", "--epoch", "5").must(t)
	fails(t, bump(), exitFailed, "the planner has already seen epoch 5")
	fails(t, p.plan("bump", "n", "--epoch", "5", "--dry-run"), exitMiss, `no gateway has submitted a request of namespace "n"`)
	fails(t, p.plan("bump", "m", "--epoch", "0"), exitUsage, "epochs begin at 1")
	fails(t, bump("--dry-run", "--wait"), exitUsage, "exclude each other")
	fails(t, bump("--policy", "hope"), exitUsage, "want recompute, finish or abort")
}

// TestPlanRoles: the command shows the groups, refuses impossible switches, switches, and reports a
// leader's refusal.
func TestPlanRoles(t *testing.T) {
	p := startPlanned(t)
	pe, de := p.lead("P", pb.Side_SIDE_PREFILL, false, 0), p.lead("D", pb.Side_SIDE_DECODE, true, 0)
	fails(t, p.plan("roles", "D=prefill", "--apply"), exitFailed, "no other group has its role")
	p.start(pe, de)
	p.lead("E", pb.Side_SIDE_DECODE, false, 0)
	out := p.plan("roles").must(t)
	for _, want := range []string{"fixed role", "0 requests with an output have finished", "PrfaaS's long-term controller"} {
		if !strings.Contains(out, want) {
			t.Errorf("roles printed\n%s\nwant %q", out, want)
		}
	}
	p.plan("roles", "--apply").must(t) // there is no proposal
	if out := p.plan("roles", "D=prefill").must(t); !strings.Contains(out, "D would change to prefill when its 1 requests have ended") {
		t.Errorf("roles D=prefill printed\n%s", out)
	}
	applied := p.apply("D=prefill")
	p.confirm(de, pb.LeaderAction_KIND_ANNOUNCE)
	(<-applied).must(t)
	if out := p.plan("roles").must(t); !strings.Contains(out, "drained for prefill, 1 requests left") || !strings.Contains(out, "group D is changing its role") {
		t.Errorf("while D is drained, roles printed\n%s", out)
	}
	applied = p.apply("D=prefill", "--wait", "--timeout", "3s")
	p.confirm(de, pb.LeaderAction_KIND_ANNOUNCE)
	fails(t, <-applied, exitFailed, `group "D" has not changed its role`, "the planner continues")
	p.finish(de)
	p.next(de, pb.LeaderAction_KIND_SWITCH)
	p.send(de, &pb.LeaderMessage{Message: &pb.LeaderMessage_RoleRefused{RoleRefused: &pb.RoleRefused{Reason: "not now"}}})
	p.send(de, &pb.LeaderMessage{Message: &pb.LeaderMessage_Fetch{Fetch: &pb.FetchWork{}}})
	for !strings.Contains(p.plan("roles").must(t), "the last switch failed: its leader refused: not now") {
	}
	applied = p.apply("D=prefill", "--wait")
	order := p.next(de, pb.LeaderAction_KIND_SWITCH)
	p.lead("D", pb.Side_SIDE_PREFILL, true, order.Seq)
	r := <-applied
	if out := r.must(t); !strings.Contains(out, "D has changed to prefill") {
		t.Errorf("the switch printed\n%s", out)
	}
	fails(t, p.plan("roles", "E=prefill"), exitFailed, "no other group has its role")
	fails(t, p.plan("roles", "P=decode"), exitFailed, "fixed role")
	fails(t, p.plan("roles", "X=decode"), exitMiss, `no group "X" is up`)
	fails(t, p.plan("roles", "D=judge"), exitUsage, "want GROUP=prefill or GROUP=decode")
	fails(t, p.plan("roles", "--wait"), exitUsage, "--apply")
}

// timesOut is a planner whose responses stop at the deadline of a call. Its responses to a bump
// have one remaining request.
type timesOut struct {
	pb.PlannerClient
	answers int
}

func (p *timesOut) BumpWeights(context.Context, *pb.BumpWeightsRequest, ...grpc.CallOption) (*pb.BumpWeightsResponse, error) {
	if p.answers--; p.answers < 0 {
		return nil, status.Error(codes.DeadlineExceeded, "context deadline exceeded")
	}
	return &pb.BumpWeightsResponse{GoingOn: 1}, nil
}

func (*timesOut) Roles(context.Context, *pb.RolesRequest, ...grpc.CallOption) (*pb.RolesResponse, error) {
	return nil, status.Error(codes.DeadlineExceeded, "context deadline exceeded")
}

// TestWaitOutOfTime: the planner has a call's deadline too, and may respond with it before the
// command's own time limit. The error still names the remaining requests.
func TestWaitOutOfTime(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 250*time.Millisecond)
	defer cancel()
	cmd := &cobra.Command{}
	cmd.SetErr(io.Discard)
	err := (&planBumped{Epoch: 7}).wait(ctx, cmd, &timesOut{answers: 1})
	if err == nil || !strings.Contains(err.Error(), "1 requests of weights older than epoch 7 are left") {
		t.Errorf("bump --wait: %v", err)
	}
	_, err = awaitSwitch(ctx, cmd, &timesOut{}, &planSwitched{Group: "D", Role: "prefill"})
	if err == nil || !strings.Contains(err.Error(), `group "D" has not changed its role`) {
		t.Errorf("roles --wait: %v", err)
	}
}

// TestProposal: the side that limits the throughput gets the least used group of the other side
// that can change its role.
func TestProposal(t *testing.T) {
	group := func(name string, role pb.Side, use float64, switches bool) *pb.RolesResponse_Group {
		return &pb.RolesResponse_Group{Group: name, Role: role, Engines: 2, Use: use, Switches: switches, DeviceTokens: 200_000}
	}
	cluster := func(step float64) *pb.RolesResponse {
		r := &pb.RolesResponse{MeanTokens: 5000, MeanOutputTokens: 500, StepSeconds: step, PrefillTokensPerSecond: 8000}
		for range leastFinished {
			r.UncachedTokens = append(r.UncachedTokens, 4000)
		}
		for i := range 3 {
			r.Groups = append(r.Groups, group("P"+string(rune('0'+i)), pb.Side_SIDE_PREFILL, 0.9-float64(i)/10, true), group("D"+string(rune('0'+i)), pb.Side_SIDE_DECODE, 0.2+float64(i)/10, i > 0))
		}
		return r
	}
	// A group prefills 4 requests a second, and decodes 40 in 500 steps.
	fast := propose(cluster(0.005))
	if fast.Group != "D1" || fast.Role != "prefill" || fast.Gain <= 0 {
		t.Errorf("prefill limits: %+v", fast)
	}
	slow := cluster(0.1)
	for _, g := range slow.Groups {
		g.Use = 1 - g.Use
	}
	if p := propose(slow); p.Group != "P0" || p.Role != "decode" {
		t.Errorf("decode limits: %+v", p)
	}
	if p := propose(cluster(0.02)); p.Group != "" || p.Why == "" {
		t.Errorf("the division is the best: %+v", p)
	}
	fixed := cluster(0.005)
	for _, g := range fixed.Groups {
		g.Switches = false
	}
	if p := propose(fixed); p.Group != "" || !strings.Contains(p.Why, "fixed role") {
		t.Errorf("groups with fixed roles: %+v", p)
	}
	few := cluster(0.005)
	few.UncachedTokens = few.UncachedTokens[1:]
	if p := propose(few); p.Group != "" || !strings.Contains(p.Why, "a proposal takes 32") {
		t.Errorf("few requests: %+v", p)
	}
}
