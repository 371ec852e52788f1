package planner

import (
	"context"
	"io"
	"slices"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/dualpath"
)

// tracedStream is a stream whose context has a span.
type tracedStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s tracedStream) Context() context.Context { return s.ctx }

// traced gives every call a span of the provider, as otelgrpc does.
func traced(p trace.TracerProvider) grpc.ServerOption {
	return grpc.StreamInterceptor(func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		ctx, span := p.Tracer("test").Start(ss.Context(), info.FullMethod)
		defer span.End()
		return handler(srv, tracedStream{ss, ctx})
	})
}

// TestSpan: the span of a request has every decision about the request and the engines' reports, in
// order. It is a child of the gateway's call.
func TestSpan(t *testing.T) {
	recorder := tracetest.NewSpanRecorder()
	provider := sdk.NewTracerProvider(sdk.WithSpanProcessor(recorder))
	h := newHost(t, Options{Planner: dualpath.Options{MinPart: 64}}, traced(provider))
	pe, de := h.lead("P", pb.Side_SIDE_PREFILL), h.lead("D", pb.Side_SIDE_DECODE)
	gw := h.submit("r1")
	de.fetch(0)
	pe.fetch(0)
	de.want(pb.LeaderAction_KIND_ASSIGN, "r1", "D/0")
	pe.want(pb.LeaderAction_KIND_ASSIGN, "r1", "P/0")
	start := pe.want(pb.LeaderAction_KIND_START, "r1", "P/0")
	gw.want(pb.RequestUpdate_KIND_STARTED)
	for _, p := range start.Parts {
		pe.send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Progress{Progress: &pb.ReadProgress{Request: "r1", Attempt: start.Seq, Side: p.Side, Upto: p.To}}})
	}
	pe.send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Finished{Finished: &pb.RequestFinished{Request: "r1", Attempt: start.Seq, Role: pb.Side_SIDE_PREFILL}}})
	gw.want(pb.RequestUpdate_KIND_PREFILLED)
	pe.send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Finished{Finished: &pb.RequestFinished{Request: "r1", Attempt: start.Seq, Role: pb.Side_SIDE_DECODE}}})
	gw.want(pb.RequestUpdate_KIND_FINISHED)
	if _, err := gw.stream.Recv(); err != io.EOF {
		t.Errorf("after the end: %v", err)
	}
	refused := h.ask(&pb.SubmitRequest{Id: "r2", Namespace: "m", PromptTokens: 10, HitTokens: 11})
	refused.want(pb.RequestUpdate_KIND_ACCEPTED)
	refused.want(pb.RequestUpdate_KIND_REJECTED)
	h.submit("r3") // waits until the service is closed
	h.close()

	spans := map[string]sdk.ReadOnlySpan{}
	parents := map[trace.SpanID]string{}
	for _, s := range recorder.Ended() {
		parents[s.SpanContext().SpanID()] = s.Name()
		if s.Name() == "planner.request" {
			spans[attr(s.Attributes(), "penstock.request").AsString()] = s
		}
	}
	if len(spans) != 3 {
		t.Fatalf("%d spans of requests, want 3", len(spans))
	}
	s := spans["r1"]
	if got := parents[s.Parent().SpanID()]; got != pb.Planner_Submit_FullMethodName {
		t.Errorf("below %q", got)
	}
	if n := attr(s.Attributes(), "penstock.tokens.hit").AsInt64(); n != 4096 {
		t.Errorf("%d cached tokens", n)
	}
	story := strings.Join(attr(s.Attributes(), "penstock.explanation").AsStringSlice(), "\n")
	for _, want := range []string{"prefill engine", "short reading queue", "decode engine", "read up to"} {
		if !strings.Contains(story, want) {
			t.Errorf("the explanation does not contain %q:\n%s", want, story)
		}
	}
	var names []string
	for _, e := range s.Events() {
		names = append(names, e.Name)
		if e.Name == "start" && (attr(e.Attributes, "prefill_engine").AsString() != "P/0" || attr(e.Attributes, "decode_engine").AsString() != "D/0" ||
			!attr(e.Attributes, "split").AsBool() || len(attr(e.Attributes, "tokens.prefill").AsInt64Slice()) != 2) {
			t.Errorf("the start says %v", e.Attributes)
		}
	}
	if want := []string{"assign", "assign", "start", "read", "read", "finished", "finished"}; !slices.Equal(names, want) {
		t.Errorf("events %v, want %v", names, want)
	}
	r := spans["r2"].Events()
	if len(r) != 1 || r[0].Name != "reject" || !strings.Contains(attr(r[0].Attributes, "reason").AsString(), "inconsistent") {
		t.Errorf("the rejected request's events: %v", r)
	}
}

// attr returns the value of one of the attributes, or an empty value.
func attr(all []attribute.KeyValue, key attribute.Key) attribute.Value {
	for _, a := range all {
		if a.Key == key {
			return a.Value
		}
	}
	return attribute.Value{}
}

// life runs a request from its submission to its end, without streams.
func life(tb testing.TB, s *Service, ctx context.Context, leaders []*leader) {
	if _, _, err := s.admit(ctx, &pb.SubmitRequest{Id: "r", Namespace: "m", PromptTokens: 4200, HitTokens: 4096, OutputTokens: 100}); err != nil {
		tb.Fatal(err)
	}
	for _, l := range []*leader{leaders[1], leaders[0]} { // decode first, because the fetch of the prefill group grants the request
		if err := s.message(l, &pb.LeaderMessage{Message: &pb.LeaderMessage_Fetch{Fetch: &pb.FetchWork{Seen: 1 << 60}}}); err != nil {
			tb.Fatal(err)
		}
	}
	attempt := uint64(0)
	for _, l := range leaders {
		for len(l.out) > 0 {
			if a := <-l.out; a.Kind == pb.LeaderAction_KIND_START {
				attempt = a.Seq
			}
		}
	}
	for i, side := range []pb.Side{pb.Side_SIDE_PREFILL, pb.Side_SIDE_DECODE} {
		err := s.message(leaders[i], &pb.LeaderMessage{Message: &pb.LeaderMessage_Finished{Finished: &pb.RequestFinished{Request: "r", Attempt: attempt, Role: side}}})
		if err != nil {
			tb.Fatal(err)
		}
	}
	if len(s.jobs) != 0 {
		tb.Fatal("the request has not ended")
	}
}

// newLife returns a service with a group of each role.
func newLife(tb testing.TB) (*Service, []*leader) {
	s, err := New(Options{})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(s.Close)
	var leaders []*leader
	for _, g := range []struct {
		name string
		role pb.Side
	}{{"P", pb.Side_SIDE_PREFILL}, {"D", pb.Side_SIDE_DECODE}} {
		l, err := s.register(context.Background(), &pb.RegisterGroup{Group: g.name, Role: g.role, Engines: []*pb.EngineSpec{{Engine: g.name, Node: g.name, HbmTokens: 1 << 20}}})
		if err != nil {
			tb.Fatal(err)
		}
		leaders = append(leaders, l)
	}
	return s, leaders
}

// TestSpanOff: a call that is not recorded has no span, and the events of its request allocate
// nothing.
func TestSpanOff(t *testing.T) {
	s, leaders := newLife(t)
	life(t, s, context.Background(), leaders)
	j, a := &job{submit: &pb.SubmitRequest{}}, &dualpath.Action{Kind: dualpath.Start, NParts: 2}
	if n := testing.AllocsPerRun(100, func() {
		s.mu.Lock()
		s.traceLocked(context.Background(), j)
		s.decidedLocked(j, a)
		j.reported("read", pb.Side_SIDE_PREFILL, 1)
		s.tracedLocked(j)
		s.mu.Unlock()
	}); n != 0 || j.span != nil {
		t.Errorf("%v allocations without a span", n)
	}
}

// BenchmarkSpan runs a request from its submission to its end with spans off and on, and reports
// the ratio of the times.
func BenchmarkSpan(b *testing.B) {
	provider := sdk.NewTracerProvider() // records spans without exporting them
	for _, on := range []bool{false, true} {
		b.Run(map[bool]string{false: "off", true: "on"}[on], func(b *testing.B) {
			s, leaders := newLife(b)
			ctx := context.Background()
			b.ReportAllocs()
			for b.Loop() {
				call := ctx
				if on {
					call, _ = provider.Tracer("bench").Start(ctx, "call")
				}
				life(b, s, call, leaders)
			}
		})
	}
}
