package emulate

import (
	"context"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// wire is a connection to a planner that receives a leader's messages and sends none.
type wire struct {
	grpc.ClientConnInterface
	grpc.ClientStream
	ctx context.Context
	// sent is called with each message before SendMsg returns.
	sent func(*pb.LeaderMessage)
}

func (w *wire) NewStream(ctx context.Context, _ *grpc.StreamDesc, _ string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	w.ctx = ctx
	return w, nil
}

func (w *wire) SendMsg(m any) error {
	w.sent(m.(*pb.LeaderMessage))
	return nil
}

func (w *wire) RecvMsg(any) error {
	<-w.ctx.Done()
	return w.ctx.Err()
}

func (w *wire) CloseSend() error { return nil }

// TestEndDuringRegistration: a registration lists a request as held, and the request ends
// while the registration is being sent. The new session reports the end of the request.
func TestEndDuringRegistration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		h := &held{submit: &pb.SubmitRequest{Id: "r"}, member: Member{Engine: new(Engine)}, attempt: 1}
		finished := make(chan *pb.RequestFinished, 1)
		var l *Leader
		w := &wire{sent: func(m *pb.LeaderMessage) {
			if r := m.GetRegister(); r != nil {
				if len(r.Holding) != 1 {
					t.Errorf("registered with %d requests; want 1", len(r.Holding))
				}
				l.done("r", h, nil)
			}
			if f := m.GetFinished(); f != nil {
				finished <- f
			}
		}}
		l = NewLeader(LeaderOptions{Group: "d", Role: pb.Side_SIDE_DECODE, Planner: w})
		l.held["r"] = h
		ended := make(chan error, 1)
		go func() { ended <- l.Run(ctx) }()
		synctest.Wait()
		select {
		case f := <-finished:
			if f.Request != "r" || f.Attempt != 1 {
				t.Errorf("finished: %v", f)
			}
		default:
			t.Error("the end of the request was not reported")
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
