package server_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/planner"
)

// audited returns the log lines of admin calls since the previous call of audited.
func audited(log *testkit.Log) (lines []string) {
	for line := range strings.Lines(log.Take()) {
		if strings.Contains(line, `msg="admin call"`) {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

// leftOut returns the number in the attribute left_out of a log line, 0 if the line has none.
func leftOut(t *testing.T, line string) int {
	t.Helper()
	_, text, ok := strings.Cut(line, "left_out=")
	if !ok {
		return 0
	}
	n, err := strconv.Atoi(strings.TrimSpace(text))
	if err != nil {
		t.Fatalf("%v in %s", err, line)
	}
	return n
}

// TestEachAdminCallIsAudited calls every method of the service with the token and without the token. A
// refused call has a line or is counted by a later line.
func TestEachAdminCallIsAudited(t *testing.T) {
	var log testkit.Log
	h := newHost(t, func(o *server.Options) {
		o.Tokens = func() []string { return []string{"right"} }
		o.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}, nil)
	with := func(token string) context.Context {
		return metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer "+token)
	}
	methods := make(map[string]bool)
	call := func(ctx context.Context, name string) error {
		full := "/" + pb.Admin_ServiceDesc.ServiceName + "/" + name
		for _, m := range pb.Admin_ServiceDesc.Methods {
			if m.MethodName == name {
				// An empty message is a valid encoding of every request and response.
				return h.conn.Invoke(ctx, full, &pb.StatusRequest{}, &pb.DeleteNamespaceResponse{})
			}
		}
		s, err := h.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, full)
		if err != nil {
			return err
		}
		if err := s.SendMsg(&pb.StatusRequest{}); err != nil {
			return err
		}
		if err := s.CloseSend(); err != nil {
			return err
		}
		for err == nil {
			err = s.RecvMsg(&pb.ScrubProgress{})
		}
		return err
	}
	for _, m := range pb.Admin_ServiceDesc.Methods {
		methods[m.MethodName] = true
	}
	for _, s := range pb.Admin_ServiceDesc.Streams {
		methods[s.StreamName] = true
	}
	refused := 0 // calls that are neither logged nor counted yet
	for name := range methods {
		if err := call(with("wrong"), name); status.Code(err) != codes.Unauthenticated {
			t.Errorf("%s with a wrong token: %v", name, err)
		}
		refused++
		for _, line := range audited(&log) {
			refused -= 1 + leftOut(t, line)
			if !strings.Contains(line, "level=WARN") || !strings.Contains(line, "call="+name+" ") ||
				!strings.Contains(line, "result=Unauthenticated") || !strings.Contains(line, "peer=127.0.0.1:") {
				t.Errorf("%s refused: line %s; want one with method, peer and result", name, line)
			}
		}
		_ = call(with("right"), name) // the code of the response to an empty request does not matter
		if lines := audited(&log); len(lines) != 1 || !strings.Contains(lines[0], "call="+name+" ") || !strings.Contains(lines[0], "peer=127.0.0.1:") {
			t.Errorf("%s: lines %q; want one, with method and peer", name, lines)
		}
	}
	for counted := false; !counted; {
		if err := call(with("wrong"), "Status"); status.Code(err) != codes.Unauthenticated {
			t.Fatal(err)
		}
		refused++
		for _, line := range audited(&log) {
			refused -= 1 + leftOut(t, line)
			counted = leftOut(t, line) > 0
		}
	}
	if refused != 0 {
		t.Errorf("%d refused calls are neither logged nor counted", refused)
	}
	ctx := with("right")
	m := &pb.Namespace{Name: "m", Salt: []byte("the secret"), Index: pb.IndexKind_INDEX_KIND_TRIE, Geometry: api.GeometryProto(geometry)}
	for _, c := range []struct {
		name string
		call func() error
		want []string
	}{
		{"create", func() error {
			_, err := h.admin.CreateNamespace(ctx, &pb.CreateNamespaceRequest{Namespace: m})
			return err
		}, []string{"level=INFO", "request.namespace.name=m", `request.namespace.salt="10 bytes"`, "request.namespace.index=INDEX_KIND_TRIE", "result=OK"}},
		{"bump", func() error {
			_, err := h.admin.BumpEpoch(ctx, &pb.BumpEpochRequest{Name: "m", To: 7})
			return err
		}, []string{"level=INFO", "request.name=m", "request.to=7", "response.old_epoch=1", "response.new_epoch=7"}},
		{"bump back", func() error {
			_, err := h.admin.BumpEpoch(ctx, &pb.BumpEpochRequest{Name: "m", To: 3})
			if err == nil {
				return status.Error(codes.Internal, "taken")
			}
			return nil
		}, []string{"level=WARN", "request.to=3", "result=InvalidArgument", "err="}},
		{"long name", func() error {
			_, err := h.admin.DeleteNamespace(ctx, &pb.DeleteNamespaceRequest{Name: strings.Repeat("x", 100_000)})
			if err == nil {
				return status.Error(codes.Internal, "taken")
			}
			return nil
		}, []string{"level=WARN", "result=NotFound", "…"}},
		{"show", func() error {
			_, err := h.admin.GetNamespace(ctx, &pb.GetNamespaceRequest{Name: "m"})
			return err
		}, []string{"level=DEBUG", "request.name=m"}},
		{"delete", func() error {
			_, err := h.admin.DeleteNamespace(ctx, &pb.DeleteNamespaceRequest{Name: "m", DryRun: true})
			return err
		}, []string{"level=INFO", "request.dry_run=true"}},
	} {
		if err := c.call(); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		lines := audited(&log)
		if len(lines) != 1 || len(lines[0]) > 2000 {
			t.Errorf("%s: %d lines: %.3000q; want a short one", c.name, len(lines), lines)
			continue
		}
		for _, want := range c.want {
			if !strings.Contains(lines[0], want) {
				t.Errorf("%s: %s; want %s in it", c.name, lines[0], want)
			}
		}
		if strings.Contains(lines[0], "secret") {
			t.Errorf("%s: the salt is in the log: %s", c.name, lines[0])
		}
	}
}

// TestPlannerChangesAreAudited: a planner logs the calls that change weights or roles, and no other
// calls.
func TestPlannerChangesAreAudited(t *testing.T) {
	var log testkit.Log
	service, err := planner.New(planner.Options{})
	if err != nil {
		t.Fatal(err)
	}
	n := server.NewPlannerNode(server.PlannerOptions{Service: service, Registry: prometheus.NewRegistry(), Logger: slog.New(slog.NewTextHandler(&log, nil))})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- n.Serve(l, nil) }()
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	c := pb.NewPlannerClient(conn)
	if _, err := c.Top(t.Context(), &pb.TopRequest{}); err != nil {
		t.Error(err)
	}
	if _, err := c.BumpWeights(t.Context(), &pb.BumpWeightsRequest{Namespace: "m", Epoch: 3, Policy: pb.Drain_DRAIN_FINISH}); err != nil {
		t.Error(err)
	}
	if _, err := c.SwitchRole(t.Context(), &pb.SwitchRoleRequest{Group: "g", Role: pb.Side_SIDE_DECODE}); status.Code(err) != codes.NotFound {
		t.Error(err)
	}
	lines := audited(&log)
	for i, want := range [][]string{
		{"level=INFO", "call=BumpWeights", "peer=127.0.0.1:", "request.namespace=m", "request.epoch=3", "request.policy=DRAIN_FINISH", "result=OK"},
		{"level=WARN", "call=SwitchRole", "request.group=g", "request.role=SIDE_DECODE", "result=NotFound"},
	} {
		for _, word := range want {
			if len(lines) != 2 || !strings.Contains(lines[i], word) {
				t.Errorf("lines %q; want %s in line %d of 2", lines, word, i)
			}
		}
	}
	if err := errors.Join(conn.Close(), n.Shutdown(t.Context())); err != nil {
		t.Error(err)
	}
	if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		t.Error(err)
	}
}

// TestRecentActions: the console shows the last 256 calls that changed the node or failed to, with
// their principals, and no call that reads.
func TestRecentActions(t *testing.T) {
	var policy roles
	h := newHost(t, func(o *server.Options) { o.Roles, o.ConsoleInterval = policy.current, time.Nanosecond }, nil)
	h.namespace()
	policy.set(t, everyRole...)
	ctx := as(t.Context(), "root")
	page := func() string {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, h.web+"/actions", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.SetBasicAuth("any", tokenOf("root"))
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		if err = errors.Join(err, resp.Body.Close()); err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s, %v", resp.Status, err)
		}
		return string(body)
	}
	for i := range int64(260) {
		if _, err := h.admin.SetQuota(ctx, &pb.SetQuotaRequest{Name: "m", QuotaBytes: 1<<20 + i}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := h.admin.Status(ctx, &pb.StatusRequest{}); err != nil {
		t.Fatal(err)
	}
	if _, err := h.admin.BumpEpoch(as(t.Context(), "reader"), &pb.BumpEpochRequest{Name: "m"}); status.Code(err) != codes.PermissionDenied {
		t.Fatal(err)
	}
	if _, err := h.admin.DeleteNamespace(ctx, &pb.DeleteNamespaceRequest{Name: "missing"}); err == nil {
		t.Fatal("a namespace that does not exist was deleted")
	}
	got := page()
	if n := strings.Count(got, `<th scope="row">`); n != 256 {
		t.Errorf("the page has %d calls", n)
	}
	if failed, newest, oldest := strings.Index(got, "DeleteNamespace"), strings.Index(got, "quota_bytes=1048835"), strings.Index(got, "quota_bytes=1048581"); failed < 0 || newest < failed || oldest < newest || strings.Contains(got, "quota_bytes=1048580") {
		t.Errorf("the failed call is at %d, the newest at %d, the oldest at %d of\n%s", failed, newest, oldest, got)
	}
	if !strings.Contains(got, "<td>root</td>") || !strings.Contains(got, "NotFound") || strings.Contains(got, "Status</td>") || strings.Contains(got, "BumpEpoch") {
		t.Errorf("the page is\n%s", got)
	}
}
