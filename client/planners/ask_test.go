package planners_test

import (
	"context"
	"sync/atomic"
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
)

// askedRig is a rig whose connection asks the planners only when it seeks a leader.
type askedRig struct {
	*rig
	// asked counts the calls of Election at both planners. fail, if set, is received by the next stream of
	// Submit, which then fails with Unavailable.
	asked atomic.Int64
	fail  chan struct{}
}

func newAskedRig(t *testing.T) *askedRig {
	t.Helper()
	testkit.VerifyNone(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	r := &askedRig{rig: &rig{T: t, ctx: ctx}, fail: make(chan struct{}, 1)}
	o := testplanner.Options{Server: []grpc.ServerOption{
		grpc.UnaryInterceptor(func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			if info.FullMethod == pb.Planner_Election_FullMethodName {
				r.asked.Add(1)
			}
			return handle(ctx, req)
		}),
		grpc.StreamInterceptor(func(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
			if info.FullMethod == pb.Planner_Submit_FullMethodName {
				select {
				case <-r.fail:
				case <-s.Context().Done():
				}
				return status.Error(codes.Unavailable, "this stream fails alone")
			}
			return handle(srv, s)
		}),
	}}
	r.a, r.b = testplanner.StartElected(t, o), testplanner.StartElected(t, o)
	conn, err := planners.DialEvery(r.a.Addr+","+r.b.Addr, client.DialOptions{}, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	r.conn, r.PlannerClient = conn, pb.NewPlannerClient(conn)
	return r
}

// alive sends a report on the stream of a group, which the planner confirms.
func alive(s grpc.BidiStreamingClient[pb.LeaderMessage, pb.LeaderAction]) error {
	if err := s.Send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Finished{Finished: &pb.RequestFinished{Request: "none"}}}); err != nil {
		return err
	}
	_, err := s.Recv()
	return err
}

// TestStreamFailsAlone: a stream that fails with Unavailable, while the planner leads, does not end the
// other streams. It is opened again at the same planner.
func TestStreamFailsAlone(t *testing.T) {
	r := newAskedRig(t)
	r.a.Elect(1)
	s := r.lead("g")
	for range 5 {
		one, err := r.Submit(r.ctx, &pb.SubmitRequest{Id: "r", Namespace: "m", PromptTokens: 10})
		if err != nil {
			t.Fatal(err)
		}
		r.fail <- struct{}{}
		_, err = one.Recv()
		wantUnavailable(t, err, "fails alone")
		if _, err := r.Top(r.ctx, &pb.TopRequest{}); err != nil {
			t.Errorf("a call after the failure: %v", err)
		}
		if err := alive(s); err != nil {
			t.Fatalf("the other stream has ended: %v", err)
		}
	}
}

// TestAskedOnFailure: while a planner leads, no planner is asked whether it leads. After a failure all
// are asked until the leader is found.
func TestAskedOnFailure(t *testing.T) {
	r := newAskedRig(t)
	first := r.a.Elect(1)
	s := r.lead("g")
	found := r.asked.Load()
	begin := time.Now()
	for time.Since(begin) < 300*time.Millisecond {
		if _, err := r.Top(r.ctx, &pb.TopRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	// A call to each planner may have been in progress, or have followed a call in which no planner led. A busy machine takes
	// seconds, and the planners are asked at most once in a second.
	if n := r.asked.Load() - found; n > 2+2*int64(time.Since(begin)/time.Second) {
		t.Errorf("the planners were asked %d times while one led", n)
	}
	r.handOver(first.Resign, s)
}

// TestOthersEndWithLeader: a stream fails, and the planners answer that another one leads. Then the other
// streams end, though the earlier leader has no notice of the end of its term.
func TestOthersEndWithLeader(t *testing.T) {
	r := newAskedRig(t)
	r.a.Elect(1)
	s := r.lead("g")
	one, err := r.Submit(r.ctx, &pb.SubmitRequest{Id: "r", Namespace: "m", PromptTokens: 10})
	if err != nil {
		t.Fatal(err)
	}
	r.b.Elect(2)
	r.fail <- struct{}{}
	_, err = one.Recv()
	wantUnavailable(t, err)
	_, err = s.Recv()
	wantUnavailable(t, err, "the planner at "+r.b.Addr+" leads (term 2)")
}
