package planners_test

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/planners"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/testplanner"
	"github.com/penstock-kv/penstock/server/planner"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// rig is two standbys and a connection to the one that the test elects.
type rig struct {
	*testing.T
	ctx  context.Context
	a, b *testplanner.Elected
	conn *planners.Conn
	pb.PlannerClient
}

func newRig(t *testing.T) *rig {
	t.Helper()
	testkit.VerifyNone(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	r := &rig{T: t, ctx: ctx, a: testplanner.StartElected(t, testplanner.Options{}), b: testplanner.StartElected(t, testplanner.Options{})}
	r.conn = r.dial(r.a.Addr + "," + r.b.Addr)
	r.PlannerClient = pb.NewPlannerClient(r.conn)
	return r
}

func (r *rig) dial(addrs string) *planners.Conn {
	r.Helper()
	conn, err := planners.Dial(addrs, client.DialOptions{})
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() {
		if err := conn.Close(); err != nil {
			r.Error(err)
		}
	})
	return conn
}

// lead registers a group named name on the planner that leads.
func (r *rig) lead(name string) grpc.BidiStreamingClient[pb.LeaderMessage, pb.LeaderAction] {
	r.Helper()
	for {
		s, err := r.PlannerClient.Lead(r.ctx)
		if err == nil {
			_ = s.Send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Register{Register: &pb.RegisterGroup{
				Group: name, Role: pb.Side_SIDE_PREFILL, Confirm: true, Engines: []*pb.EngineSpec{{Engine: name, Node: name}},
			}}}) // Recv returns the error
			if _, err = s.Recv(); err == nil {
				return s
			}
		}
		if status.Code(err) != codes.Unavailable {
			r.Fatal(err)
		}
	}
}

// groups returns the groups of a planner, or -1 if it refuses the call.
func groups(ctx context.Context, c interface {
	Top(context.Context, *pb.TopRequest) (*pb.TopResponse, error)
}) int {
	top, err := c.Top(ctx, &pb.TopRequest{})
	if err != nil {
		return -1
	}
	return len(top.Groups)
}

// wantUnavailable checks an error.
func wantUnavailable(t *testing.T, err error, texts ...string) {
	t.Helper()
	if status.Code(err) != codes.Unavailable {
		t.Errorf("the error is %v; want Unavailable", err)
		return
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("the error is %v; it does not contain %q", err, text)
		}
	}
}

// handOver ends the term of planner a, which ends the stream s of group g, and begins one of planner b, at which g registers again.
func (r *rig) handOver(resign func(), s grpc.BidiStreamingClient[pb.LeaderMessage, pb.LeaderAction]) {
	r.Helper()
	resign()
	_, err := s.Recv()
	wantUnavailable(r.T, err)
	r.b.Elect(2)
	r.lead("g")
	if a, b := groups(r.ctx, r.a.Service), groups(r.ctx, r.b.Service); a != -1 || b != 1 {
		r.Errorf("the earlier leader has %d groups, the new leader %d", a, b)
	}
}

// TestFollowsLeader: calls go to the planner that leads. When another one leads, the streams end, and
// later calls go to the new leader.
func TestFollowsLeader(t *testing.T) {
	r := newRig(t)
	_, err := r.Top(r.ctx, &pb.TopRequest{})
	wantUnavailable(t, err, "no planner leads", r.a.Addr+": a standby", r.b.Addr+": a standby")
	first := r.a.Elect(1)
	s := r.lead("g")
	if n := groups(r.ctx, r.a.Service); n != 1 {
		t.Errorf("the leader has %d groups", n)
	}
	r.handOver(first.Resign, s)
}

// TestTwoLeaders: a planner whose term has ended, and that has no notice of its end, gets no call. The
// streams to it end when a later term begins.
func TestTwoLeaders(t *testing.T) {
	r := newRig(t)
	r.a.Elect(1)
	s := r.lead("g")
	r.b.Elect(2)
	_, err := s.Recv()
	wantUnavailable(t, err, "the planner at "+r.b.Addr+" leads (term 2)")
	r.lead("g")
	for range 20 {
		if _, err := r.Top(r.ctx, &pb.TopRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	if b := groups(r.ctx, r.b.Service); b != 1 {
		t.Errorf("the new leader has %d groups", b)
	}
}

// TestEarlierTerm: a connection with one address refuses the responses of an earlier term, and the
// planner of the earlier term ends its term.
func TestEarlierTerm(t *testing.T) {
	testkit.VerifyNone(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	a := testplanner.StartElected(t, testplanner.Options{})
	r := &rig{T: t, ctx: ctx, a: a}
	r.conn = r.dial(a.Addr)
	r.PlannerClient = pb.NewPlannerClient(r.conn)
	later := a.Elect(7)
	if _, err := r.Top(ctx, &pb.TopRequest{}); err != nil {
		t.Fatal(err)
	}
	later.Resign()
	earlier := a.Elect(6) // as another planner behind the same address
	_, err := r.Top(ctx, &pb.TopRequest{})
	wantUnavailable(t, err, "responds for term 6, but term 7 has begun")
	submit, err := r.Submit(ctx, &pb.SubmitRequest{Id: "r", Namespace: "m", PromptTokens: 10})
	if err == nil {
		_, err = submit.Recv()
	}
	wantUnavailable(t, err, "responds for term 6, but term 7 has begun")
	if !earlier.Held() {
		t.Error("a gateway has ended the term of a planner")
	}
	s, err := r.Lead(ctx)
	if err == nil {
		_, err = s.Recv()
	}
	wantUnavailable(t, err)
	if earlier.Held() || a.Seen() != 7 {
		t.Errorf("the planner of term 6 has seen term %d, and leads: %v", a.Seen(), earlier.Held())
	}
}

// TestTermsAfterDataLoss: etcd has lost its data, so the terms begin again. The leader of a group makes the planner
// of the earlier term end its term. The next term is above the last one, and the connection follows it.
func TestTermsAfterDataLoss(t *testing.T) {
	r := newRig(t)
	later := r.a.Elect(7)
	r.lead("g")
	later.Resign()
	earlier := r.b.Elect(1)
	// A gateway cannot end the term.
	for {
		_, err := r.Top(r.ctx, &pb.TopRequest{})
		if status.Code(err) != codes.Unavailable {
			t.Fatalf("a call to the planner of term 1: %v", err)
		}
		if strings.Contains(err.Error(), "leads in term 1, but term 7 has begun") {
			break
		}
	}
	if !earlier.Held() {
		t.Error("a gateway has ended the term of a planner")
	}
	for earlier.Held() {
		s, err := r.Lead(r.ctx)
		if err == nil {
			_, err = s.Recv()
		}
		if status.Code(err) != codes.Unavailable {
			t.Fatalf("the leader of a group gets %v", err)
		}
	}
	if seen := r.b.Seen(); seen != 7 {
		t.Errorf("the planner of term 1 has seen term %d", seen)
	}
	r.b.Elect(8)
	r.lead("g")
}

// TestCloseEndsSearch: Close ends a call that waits for a leader.
func TestCloseEndsSearch(t *testing.T) {
	testkit.VerifyNone(t)
	hung, err := net.Listen("tcp", "127.0.0.1:0") // it accepts connections, and does not answer
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = hung.Close() })
	conn, err := planners.Dial(hung.Addr().String()+","+testkit.Port(t), client.DialOptions{})
	if err != nil {
		t.Fatal(err)
	}
	calling, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		close(calling)
		_, err := pb.NewPlannerClient(conn).Top(context.Background(), &pb.TopRequest{})
		ended <- err
	}()
	<-calling
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	select {
	case err := <-ended:
		if status.Code(err) != codes.Canceled {
			t.Errorf("the call ended with %v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("a call waits for a leader after Close")
	}
	if _, err := pb.NewPlannerClient(conn).Top(context.Background(), &pb.TopRequest{}); status.Code(err) != codes.Canceled {
		t.Errorf("a call after Close: %v", err)
	}
}

// TestCloseEndsStreams: Close ends streams and later calls with Canceled, as that of a connection of gRPC does.
// A gateway and a leader would repeat a call that failed with Unavailable.
func TestCloseEndsStreams(t *testing.T) {
	r := newRig(t)
	r.a.Elect(1)
	for _, addrs := range []string{r.a.Addr, r.a.Addr + "," + r.b.Addr} {
		conn, err := planners.Dial(addrs, client.DialOptions{})
		if err != nil {
			t.Fatal(err)
		}
		c := pb.NewPlannerClient(conn)
		s, err := c.Submit(r.ctx, &pb.SubmitRequest{Id: addrs, Namespace: "m", PromptTokens: 10})
		if err == nil {
			_, err = s.Recv()
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		if _, err := s.Recv(); status.Code(err) != codes.Canceled {
			t.Errorf("%s: the stream ended with %v", addrs, err)
		}
		if _, err := c.Top(r.ctx, &pb.TopRequest{}); status.Code(err) != codes.Canceled {
			t.Errorf("%s: a call after Close: %v", addrs, err)
		}
	}
}

// TestNotElected: of several planners, each needs an election. One planner needs none.
func TestNotElected(t *testing.T) {
	r := newRig(t)
	alone := testplanner.Start(t, testplanner.Options{Planner: planner.Options{}, TCP: true})
	if _, err := pb.NewPlannerClient(r.dial(alone.Addr)).Top(r.ctx, &pb.TopRequest{}); err != nil {
		t.Error(err)
	}
	_, err := pb.NewPlannerClient(r.dial(alone.Addr+","+r.a.Addr)).Top(r.ctx, &pb.TopRequest{})
	wantUnavailable(t, err, alone.Addr+": not elected, but one of several planners: it needs cluster.etcd")
}

// TestCallerEnds: the end of the caller's context, and not of the leader's term, is the error of a call.
func TestCallerEnds(t *testing.T) {
	r := newRig(t)
	r.a.Elect(1)
	ctx, cancel := context.WithCancel(r.ctx)
	s, err := r.Submit(ctx, &pb.SubmitRequest{Id: "r", Namespace: "m", PromptTokens: 10})
	if err == nil {
		_, err = s.Recv()
	}
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := s.Recv(); status.Code(err) != codes.Canceled {
		t.Errorf("the stream ended with %v", err)
	}
	if _, err := r.Top(ctx, &pb.TopRequest{}); status.Code(err) != codes.Canceled {
		t.Errorf("the call ended with %v", err)
	}
}

// TestBadAddresses: Dial refuses addresses that are no addresses, and an address that is listed twice.
func TestBadAddresses(t *testing.T) {
	for _, addrs := range []string{"", "a", "a:1,", "a:1,a:1", "a:1,b"} {
		if _, err := planners.Dial(addrs, client.DialOptions{}); err == nil {
			t.Errorf("Dial accepts %q", addrs)
		}
	}
}
