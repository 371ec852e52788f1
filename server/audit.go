package server

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/ratelog"
	"github.com/penstock-kv/penstock/server/console"
)

// audit logs each call of the Admin service on one line, with the caller, the request and the
// result. A successful call that changes state is logged at level info, and a refused call at level
// warn. A call that only reads is logged at level debug, because monitors poll Status. Calls of the
// Cache service that make or end a pin are logged in the same way, and so are the calls that change
// weights or roles of the planner. Leases on blocks with a TTL, which engines request, are not
// logged. With a roles file, a line has the caller's principal, and each refused call of every
// service, of the data plane and of HTTP is logged. At most one call in a second is logged of the calls without
// an identity, and of the calls that are refused because the roles document from etcd is outdated. The line has the number of
// such calls since the line before.
type audit struct {
	log *slog.Logger
	// unidentified logs the refused calls of which only one per second is logged. The kind is the message.
	unidentified *ratelog.Log[string]
	// recent has the last calls that changed state, also while log does not have them.
	recent *recentActions
}

// newAudit returns an audit that writes to log. Nil disables it. All services of a process share one
// audit, and so one rate.
func newAudit(log *slog.Logger) audit {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return audit{log: log, unidentified: ratelog.New[string](log), recent: new(recentActions)}
}

// adminPrefix begins the full name of each method of the Admin service.
var adminPrefix = "/" + pb.Admin_ServiceDesc.ServiceName + "/"

// adminReads are the methods of the Admin service that change nothing.
var adminReads = map[string]bool{
	"GetNamespace":   true,
	"ListNamespaces": true,
	"Status":         true,
	"StatBlock":      true,
	"ListBlocks":     true,
	"ListTenants":    true,
	"ListPins":       true,
	"ListVolumes":    true,
	"ListMembers":    true,
	"DiffConfig":     true,
	"GetRoles":       true,
}

// plannerChanges are the methods of the Planner service with which an operator changes the
// planner's state.
var plannerChanges = map[string]bool{
	pb.Planner_BumpWeights_FullMethodName: true,
	pb.Planner_SwitchRole_FullMethodName:  true,
}

// unary is a grpc.UnaryServerInterceptor.
func (a audit) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	resp, err := next(ctx, req)
	a.line(ctx, info.FullMethod, req, resp, err)
	return resp, err
}

// stream is a grpc.StreamServerInterceptor. It logs the call when the stream ends.
func (a audit) stream(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	if !strings.HasPrefix(info.FullMethod, adminPrefix) {
		err := next(srv, s)
		if refused(err) != nil {
			a.line(s.Context(), info.FullMethod, nil, nil, err)
		}
		return err
	}
	seen := &auditedStream{ServerStream: s}
	err := next(srv, seen)
	a.line(s.Context(), info.FullMethod, seen.request, seen.last, err)
	return err
}

// auditedStream keeps the first request and the last response of a stream for the log line.
type auditedStream struct {
	grpc.ServerStream
	request, last any
}

// RecvMsg implements grpc.ServerStream.
func (s *auditedStream) RecvMsg(m any) error {
	err := s.ServerStream.RecvMsg(m)
	if err == nil {
		s.request = m
	}
	return err
}

// SendMsg implements grpc.ServerStream.
func (s *auditedStream) SendMsg(m any) error {
	s.last = m
	return s.ServerStream.SendMsg(m)
}

// line logs one call, if calls of the method are audited. req is nil if no request was received.
// resp is nil if the call failed.
func (a audit) line(ctx context.Context, method string, req, resp any, err error) {
	name, ok := strings.CutPrefix(method, adminPrefix)
	switch {
	case plannerChanges[method]:
		name = path.Base(method)
	case ok:
	case refused(err) != nil:
		name = path.Base(method)
	default:
		return
	}
	level := slog.LevelInfo
	switch {
	case err != nil:
		level = slog.LevelWarn
	case adminReads[name]:
		level = slog.LevelDebug
	}
	a.record(ctx, level, name, callerName(ctx), req, resp, err)
}

// refusal logs a call that did not come over gRPC and that the guard has refused.
func (a audit) refusal(ctx context.Context, name, peer string, req any, err error) {
	if refused(err) != nil {
		a.record(ctx, slog.LevelWarn, name, peer, req, nil, err)
	}
}

// pin logs a call that makes or ends a pin.
func (a audit) pin(ctx context.Context, name, peer string, req, resp any, err error) {
	level := slog.LevelInfo
	if err != nil {
		level = slog.LevelWarn
	}
	a.record(ctx, level, name, peer, req, resp, err)
}

func (a audit) record(ctx context.Context, level slog.Level, name, peer string, req, resp any, err error) {
	if refused(err) == nil && !adminReads[name] {
		action := console.Action{At: time.Now(), Call: name, Peer: peer, Result: status.Code(err).String(), Request: attrsText(auditFields(req))}
		if id, ok := identityOf(ctx); ok {
			action.Principal = id.Principal.Name()
		}
		if err != nil {
			action.Failure = shorten(status.Convert(err).Message())
		}
		a.recent.add(action)
	}
	if !a.log.Enabled(ctx, level) {
		return
	}
	attrs := []slog.Attr{slog.String("call", shorten(name)), slog.String("peer", peer)}
	id, ok := identityOf(ctx)
	known := ok && id.Principal.Name() != ""
	if known {
		attrs = append(attrs, slog.String("principal", id.Principal.Name()))
	}
	attrs = append(attrs, slog.String("result", status.Code(err).String()))
	if asked := auditFields(req); len(asked) > 0 {
		attrs = append(attrs, slog.Attr{Key: "request", Value: slog.GroupValue(asked...)})
	}
	switch {
	case refused(err) != nil:
		attrs = append(attrs, slog.String("refused", shorten(refused(err).logged)))
	case err != nil:
		attrs = append(attrs, slog.String("err", shorten(status.Convert(err).Message())))
	case level == slog.LevelInfo:
		if got := auditFields(resp); len(got) > 0 {
			attrs = append(attrs, slog.Attr{Key: "response", Value: slog.GroupValue(got...)})
		}
	}
	text := "admin call"
	if refused(err) != nil {
		text = "call refused"
	}
	code := status.Code(err)
	if !known && code == codes.Unauthenticated || code == codes.Unavailable && refused(err) != nil {
		args := make([]any, len(attrs))
		for i := range attrs {
			args[i] = attrs[i]
		}
		a.unidentified.Warn(text, text, args...)
		return
	}
	a.log.LogAttrs(ctx, level, text, attrs...)
}

// refused returns the refusal in err, nil if there is none.
func refused(err error) *refusal {
	var r *refusal
	if errors.As(err, &r) {
		return r
	}
	return nil
}

// callerName returns the caller's address, and the subject of its certificate if the caller has
// one. Without a roles file it cannot distinguish callers with a bearer token, because all of them
// use the same tokens.
func callerName(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok || p.Addr == nil {
		return "unknown"
	}
	if t, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(t.State.PeerCertificates) > 0 {
		return fmt.Sprintf("%v (%s)", p.Addr, shorten(t.State.PeerCertificates[0].Subject.String()))
	}
	return p.Addr.String()
}

// auditFields returns the fields of a message that are set. For a salt, which is secret, and for a
// list, which may be long, it returns only the length.
func auditFields(m any) []slog.Attr {
	msg, ok := m.(proto.Message)
	if !ok || !msg.ProtoReflect().IsValid() {
		return nil
	}
	var attrs []slog.Attr
	fields := msg.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if !msg.ProtoReflect().Has(f) {
			continue
		}
		attrs = append(attrs, auditField(f, msg.ProtoReflect().Get(f)))
	}
	return attrs
}

func auditField(f protoreflect.FieldDescriptor, v protoreflect.Value) slog.Attr {
	name := string(f.Name())
	switch {
	case f.IsList():
		return slog.String(name, fmt.Sprintf("%d elements", v.List().Len()))
	case f.Kind() == protoreflect.MessageKind:
		return slog.Attr{Key: name, Value: slog.GroupValue(auditFields(v.Message().Interface())...)}
	case f.Kind() == protoreflect.BytesKind && (name == "salt" || len(v.Bytes()) > 32):
		return slog.String(name, fmt.Sprintf("%d bytes", len(v.Bytes())))
	case f.Kind() == protoreflect.BytesKind:
		return slog.String(name, hex.EncodeToString(v.Bytes()))
	case f.Kind() == protoreflect.StringKind:
		return slog.String(name, shorten(v.String()))
	case f.Kind() == protoreflect.EnumKind:
		if word := f.Enum().Values().ByNumber(v.Enum()); word != nil {
			return slog.String(name, string(word.Name()))
		}
		return slog.Int(name, int(v.Enum()))
	}
	return slog.Any(name, v.Interface())
}

// shorten limits the length of a text that the caller sent, so that a caller cannot fill the log.
func shorten(text string) string {
	const most = 256
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}
