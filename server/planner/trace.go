package planner

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/dualpath"
)

// scope is the instrumentation scope of the spans.
const scope = "github.com/penstock-kv/penstock/server/planner"

// traceLocked begins the span of a job, as a child of the gateway's call. The span ends with the
// job. If the call is not recorded, the job has no span.
func (s *Service) traceLocked(ctx context.Context, j *job) {
	caller := trace.SpanFromContext(ctx)
	if j.span != nil || !caller.IsRecording() {
		return
	}
	r := j.submit
	_, j.span = caller.TracerProvider().Tracer(scope).Start(ctx, "planner.request", trace.WithAttributes(
		attribute.String("penstock.request", r.Id), attribute.String("penstock.namespace", r.Namespace),
		attribute.Int("penstock.tokens.prompt", int(r.PromptTokens)), attribute.Int("penstock.tokens.hit", int(r.HitTokens)),
		attribute.Int("penstock.tokens.output", int(r.OutputTokens)),
	))
}

// decidedLocked adds an action of the planner to the span, with the reason.
func (s *Service) decidedLocked(j *job, a *dualpath.Action) {
	if j.span == nil {
		return
	}
	attrs := make([]attribute.KeyValue, 0, 8)
	if a.Group != 0 {
		attrs = append(attrs, attribute.String("group", s.groups.of(uint32(a.Group))))
	}
	if a.Engine != 0 {
		attrs = append(attrs, attribute.String("engine", s.engines.of(uint32(a.Engine))))
	}
	if a.Kind == dualpath.Start {
		attrs = append(attrs, attribute.String("prefill_engine", s.engines.of(uint32(a.PE))), attribute.String("decode_engine", s.engines.of(uint32(a.DE))),
			attribute.Bool("split", a.NParts == 2))
	}
	if a.Side != 0 {
		attrs = append(attrs, attribute.String("side", a.Side.String()))
	}
	for _, p := range a.Parts[:a.NParts] {
		attrs = append(attrs, attribute.IntSlice("tokens."+p.Side.String(), []int{p.From, p.To}))
	}
	if a.Hedge {
		attrs = append(attrs, attribute.Bool("hedge", true))
	}
	if a.Why != dualpath.NoReason {
		attrs = append(attrs, attribute.String("reason", a.Why.String()))
	}
	j.span.AddEvent(a.Kind.String(), trace.WithAttributes(attrs...))
}

// reported adds a leader's report about one side of a job to the span. Reports of read progress are
// frequent, so a report is added only if the number of read tokens has changed.
func (j *job) reported(what string, side pb.Side, upto uint32) {
	if j.span == nil || what == "read" && (upto == 0 || j.read[side] == upto) {
		return
	}
	if what == "read" {
		if j.read == nil {
			j.read = make(map[pb.Side]uint32)
		}
		j.read[side] = upto
	}
	j.span.AddEvent(what, trace.WithAttributes(attribute.String("side", dualpath.Role(side).String()), attribute.Int("upto", int(upto))))
}

// tracedLocked ends the span of a job, with the planner's explanation of the request.
func (s *Service) tracedLocked(j *job) {
	if j.span == nil {
		return
	}
	if x, ok := s.planner.Explain(j.id); ok {
		var lines []string
		for _, l := range x.Lines() {
			lines = append(lines, (l.At-j.since).String()+" "+l.Text)
		}
		j.span.SetAttributes(attribute.StringSlice("penstock.explanation", lines))
	}
	j.span.End()
	j.span = nil
}
