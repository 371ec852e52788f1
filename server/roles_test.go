package server_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/testetcd"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/membership"
	"github.com/penstock-kv/penstock/server/metrics"
	"github.com/penstock-kv/penstock/server/reload"
)

// TestNoRolesYet: a node that has read no roles document from etcd is not ready, and refuses every call with a code after
// which clients try again.
func TestNoRolesYet(t *testing.T) {
	var log testkit.Log
	h := newHost(t, func(o *server.Options) { o.Roles, o.Logger = access.None, slog.New(slog.NewTextHandler(&log, nil)) }, nil)
	if code, body := get(t, h.web+"/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, `"no_roles"`) {
		t.Errorf("/readyz: %d, %s", code, body)
	}
	if code, body := get(t, h.web+"/metrics"); code != http.StatusServiceUnavailable || !strings.Contains(body, "no roles document") {
		t.Errorf("/metrics: %d, %s", code, body)
	}
	if code, body := get(t, h.web+"/healthz"); code != http.StatusOK {
		t.Errorf("/healthz: %d, %s", code, body)
	}
	const calls = 200
	for i := range calls {
		principal := []string{"", "root"}[i%2]
		if _, err := h.admin.Status(as(t.Context(), principal), &pb.StatusRequest{}); status.Code(err) != codes.Unavailable {
			t.Errorf("a call with the token of %q: %v", principal, err)
		}
	}
	if n := strings.Count(log.String(), "call refused"); n == 0 || n > calls/2 {
		t.Errorf("%d lines of %d refused calls", n, calls)
	}
}

// TestReplaceRolesAfterRevocation: a principal whose roles the document in etcd lacks cannot take them back by a node
// that uses an earlier document.
func TestReplaceRolesAfterRevocation(t *testing.T) {
	document, err := membership.NewRoles(membership.RolesOptions{Endpoints: testetcd.Start(t, 1).Endpoints, Key: "/penstock/roles", Timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer document.Close()
	text := func(names ...string) []byte {
		text := "principals:\n"
		for _, name := range names {
			text += fmt.Sprintf("  - {name: %s, tokens: [sha256:%x], grants: [{roles: [operate, admin], namespaces: [\"*\"]}]}\n", name, sha256.Sum256([]byte(tokenOf(name))))
		}
		return []byte(text)
	}
	both := text("removed", "sre")
	policy, err := access.Parse("both", both)
	if err != nil {
		t.Fatal(err)
	}
	id, ok := policy.ByHeader("Bearer " + tokenOf("removed"))
	if !ok {
		t.Fatal("the principal has no credential")
	}
	replace := func(text []byte, revision int64) (int64, error) {
		_, now, err := server.ReplaceRoles(t.Context(), document, text, revision, &id.Credential, nil, false)
		return now, err
	}
	first, err := replace(both, 0)
	if err != nil {
		t.Fatal(err)
	}
	second, err := document.Set(t.Context(), text("sre"), first)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := replace(both, second); status.Code(err) != codes.PermissionDenied {
		t.Errorf("the removed principal replaces the document: %v", err)
	}
	if d, err := document.Get(t.Context()); err != nil || d.Revision != second {
		t.Errorf("the document has revision %d, %v; want %d", d.Revision, err, second)
	}
	// Without a valid document in etcd, the document that the node uses decides.
	third, err := document.Set(t.Context(), []byte("principals: 7"), second)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := replace(both, third); err != nil {
		t.Errorf("the document is damaged: %v", err)
	}
}

// TestRemovedWithoutEtcd: a principal that is removed from the document while a node cannot reach etcd is refused by each
// call that begins more than the time of the document after the removal. When the node reaches etcd again, the principal
// is refused because it is removed, and the others are admitted.
func TestRemovedWithoutEtcd(t *testing.T) {
	const bound = 2 * time.Second
	etcd := testetcd.Start(t, 1)
	gate := testetcd.NewGate(t, etcd.Endpoints[0])
	open := func(endpoint string, timeout time.Duration) *membership.Roles {
		d, err := membership.NewRoles(membership.RolesOptions{Endpoints: []string{endpoint}, Key: "/penstock/roles", Timeout: timeout})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
		return d
	}
	writer, follower := open(etcd.Endpoints[0], time.Minute), open(gate.Addr, bound)
	set := func(revision int64, names ...string) int64 {
		text := "principals:\n"
		for _, name := range names {
			text += fmt.Sprintf("  - {name: %s, tokens: [sha256:%x], grants: [{roles: [read, write, admin, operate], namespaces: [\"*\"]}]}\n", name, sha256.Sum256([]byte(tokenOf(name))))
		}
		next, err := writer.Set(t.Context(), []byte(text), revision)
		if err != nil {
			t.Fatal(err)
		}
		return next
	}
	revision := set(0, "stays", "removed")

	credentials, err := reload.OpenCredentials(config.Auth{RolesEtcd: "/penstock/roles"})
	if err != nil {
		t.Fatal(err)
	}
	reloader := reload.New(nil, reload.Options{Credentials: credentials, Metrics: metrics.NewReloads(prometheus.NewRegistry())})
	ctx, cancel := context.WithCancel(t.Context())
	var following sync.WaitGroup
	following.Go(func() {
		follower.Follow(ctx, func(d membership.RolesDocument) { reloader.TakeRoles(d.Text, d.Revision, d.Until) }, reloader.RolesFailed)
	})
	defer following.Wait()
	defer cancel()
	h := newHost(t, func(o *server.Options) { o.Roles = credentials.Roles }, nil)
	list := func(principal string) codes.Code {
		_, err := h.admin.ListNamespaces(as(t.Context(), principal), &pb.ListNamespacesRequest{})
		return status.Code(err)
	}
	await := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(time.Minute); !ok(); {
			if time.Now().After(end) {
				t.Fatalf("%s: not within a minute", what)
			}
		}
	}
	await("the document is in use", func() bool { return list("removed") == codes.OK })

	gate.Cut()
	set(revision, "stays")
	removed := time.Now()
	await("the removed principal is refused", func() bool {
		began := time.Now()
		code := list("removed")
		if code == codes.OK && began.Sub(removed) > bound {
			t.Fatalf("a call of the removed principal was admitted %v after the removal", began.Sub(removed))
		}
		return code == codes.Unavailable
	})
	if code := list("stays"); code != codes.Unavailable {
		t.Errorf("a call of another principal: %v", code)
	}
	if _, err := h.admin.Status(as(t.Context(), "stays"), &pb.StatusRequest{}); err != nil {
		t.Errorf("the status of the node: %v", err)
	}
	gate.Mend()
	await("the removed principal is unknown", func() bool { return list("removed") == codes.Unauthenticated })
	await("the other principal is admitted", func() bool { return list("stays") == codes.OK })
}

// TestOutdatedRoles: by an outdated document a principal with every role gets the state of the node and of the planner, and
// no other call and no other page, nor does a stream go on. Only one line per second has the refused calls.
func TestOutdatedRoles(t *testing.T) {
	var policy roles
	var log testkit.Log
	logger := slog.New(slog.NewTextHandler(&log, nil))
	h := newHost(t, func(o *server.Options) { o.Roles, o.Logger = policy.current, logger }, nil)
	h.namespace()
	policy.set(t, everyRole...)
	planned, plannedWeb := plannerHost(t, nil, policy.current, logger)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	events, err := h.cache.Events(as(ctx, "root"), &pb.EventsRequest{After: 1})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := h.admin.BumpEpoch(as(t.Context(), "root"), &pb.BumpEpochRequest{Name: "m"}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := events.Recv(); err != nil {
		t.Fatal(err)
	}
	policy.policy.Store(policy.current().Outdate())
	if _, err := h.node.BumpEpoch(t.Context(), "m", 0, 0); err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = events.Recv()
	}
	if status.Code(err) != codes.Unavailable {
		t.Errorf("the stream ends with %v", err)
	}
	early, err := h.conn.NewStream(as(ctx, "root"), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, pb.Cache_Reserve_FullMethodName)
	if err == nil {
		err = early.RecvMsg(&pb.AbortResponse{}) // no message was sent
	}
	if status.Code(err) != codes.Unavailable {
		t.Errorf("a call before its message: %v", err)
	}
	calls := 0
	try := func(name string, shown bool, err error) {
		t.Helper()
		calls++
		if code := status.Code(err); code == codes.Unavailable == shown || code == codes.PermissionDenied || code == codes.Unauthenticated {
			t.Errorf("%s: %v", name, err)
		}
	}
	shown := []string{"Admin/Status", "Admin/ListVolumes", "Admin/ListMembers", "Admin/DiffConfig", "Planner/Roles", "Planner/Top", "Planner/Election"}
	for _, s := range []grpc.ServiceDesc{pb.Cache_ServiceDesc, pb.Admin_ServiceDesc, pb.Planner_ServiceDesc} {
		conn := h.conn
		if s.ServiceName == pb.Planner_ServiceDesc.ServiceName {
			conn = planned
		}
		service := s.ServiceName[strings.LastIndex(s.ServiceName, ".")+1:]
		for _, m := range s.Methods {
			name := service + "/" + m.MethodName
			try(name, slices.Contains(shown, name), conn.Invoke(as(t.Context(), "root"), "/"+s.ServiceName+"/"+m.MethodName, &pb.StatusRequest{}, &pb.AbortResponse{}))
		}
		for _, m := range s.Streams {
			name := service + "/" + m.StreamName
			try(name, slices.Contains(shown, name), streamed(conn, "/"+s.ServiceName+"/"+m.StreamName, "", &pb.StatusRequest{}, nil).call(as(t.Context(), "root")))
		}
	}
	shown = []string{"GET /metrics", "GET /metrics/summary", "GET /", "GET /live/overview", "GET /live/dualpath", "GET /healthz", "GET /health", "GET /leaderz", "GET /console/style.css", "GET /console/live.js", "GET /console/icon.svg"}
	for _, d := range []door{{h.web, h.server.Patterns()}, plannedWeb} {
		for _, r := range d.rows(t) {
			if r.name == "GET /readyz" {
				continue // it is 503 for several reasons
			}
			err := r.call(as(t.Context(), "root"))
			var code webAnswer
			if errors.As(err, &code) && code == http.StatusServiceUnavailable {
				err = status.Error(codes.Unavailable, "503")
			}
			try(d.base+" "+r.name, slices.Contains(shown, r.name), err)
		}
	}
	if code, body := get(t, h.web+"/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, `"no_roles"`) {
		t.Errorf("/readyz: %d, %s", code, body)
	}
	lines := 0
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, "result=Unavailable") {
			lines++
			if !strings.Contains(line, "principal=root ") {
				t.Errorf("the line lacks the principal: %s", line)
			}
		}
	}
	if lines == 0 || lines > calls/2 {
		t.Errorf("%d lines of %d calls", lines, calls)
	}
}
