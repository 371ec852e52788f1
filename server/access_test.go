package server_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/access"
	"github.com/penstock-kv/penstock/server/front"
	"github.com/penstock-kv/penstock/server/planner"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the table of docs/access.md from the node's answers")

// roles is a roles file that a test changes.
type roles struct{ policy atomic.Pointer[access.Policy] }

func (r *roles) current() *access.Policy { return r.policy.Load() }

// set replaces the policy. Each line is: principal, roles with commas, pattern. The first line of a
// principal may have a further key of the principal besides. The token of a principal is tokenOf(its name), or tokenOf(text) if
// the principal is written name:text.
func (r *roles) set(t testing.TB, lines ...string) {
	t.Helper()
	var b strings.Builder
	b.WriteString("principals:\n")
	last := ""
	for _, line := range lines {
		f := strings.Fields(line)
		if f[0] != last {
			name, token, ok := strings.Cut(f[0], ":")
			if !ok {
				token = name
			}
			fmt.Fprintf(&b, "  - name: %s\n    tokens: [sha256:%x]\n", name, sha256.Sum256([]byte(tokenOf(token))))
			if len(f) > 3 {
				fmt.Fprintf(&b, "    %s\n", strings.Join(f[3:], " "))
			}
			b.WriteString("    grants:\n")
		}
		last = f[0]
		fmt.Fprintf(&b, "      - {roles: [%s], namespaces: [%q]}\n", f[1], f[2])
	}
	p, err := access.Parse("roles.yaml", []byte(b.String()))
	if err != nil {
		t.Fatal(err)
	}
	r.policy.Store(p)
}

func tokenOf(principal string) string { return "0123456789abcdef-" + principal }

// as returns a context for calls of a principal.
func as(ctx context.Context, principal string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+tokenOf(principal))
}

// column is a kind of caller of the table.
type column struct{ title, principal string }

// gatewayColumns are the callers of a gateway, which has a list of tokens and no roles.
var gatewayColumns = []column{{"no token", ""}, {"unknown token", "unknown"}, {"token of the gateway", "gateway"}}

// columns are the callers of the other tables.
var columns = []column{
	{"no token", ""}, {"unknown token", "unknown"}, {"read", "reader"}, {"write", "writer"}, {"admin", "admin"}, {"operate", "operator"}, {"read, write, admin on another namespace", "other"}, {"all on every namespace", "everything"},
}

// everyRole are the principals of columns, and root, which sets up the state for each call.
var everyRole = []string{
	"reader read m*", "writer write m*", "admin admin m*", "operator operate *", "other read,write,admin other*", "everything read,write,admin,operate *", "root read,write,admin,operate *",
}

// row is a call of the table. call makes the call as the principal of ctx.
type row struct {
	name, on string
	call     func(ctx context.Context) error
}

// unary makes a row of one unary call. request is called before each call and may prepare the state
// that the call needs.
func (h *host) unary(method, on string, request func() proto.Message) row {
	return row{method[strings.LastIndex(method, ".")+1:], on, func(ctx context.Context) error {
		// An empty message is a valid encoding of every response, and unknown fields are kept.
		return h.conn.Invoke(ctx, method, request(), &pb.AbortResponse{})
	}}
}

// streamed makes a row of one call of a stream, which ends after the first message of the node.
func streamed(conn *grpc.ClientConn, method, on string, request proto.Message, meanwhile func()) row {
	return row{method[strings.LastIndex(method, ".")+1:], on, func(ctx context.Context) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		s, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
		if err != nil {
			return err
		}
		if err := s.SendMsg(request); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if err := s.CloseSend(); err != nil {
			return err
		}
		if meanwhile != nil {
			done := make(chan struct{})
			defer func() { cancel(); <-done }()
			go func() {
				defer close(done)
				for ctx.Err() == nil {
					meanwhile()
				}
			}()
		}
		err = s.RecvMsg(&pb.AbortResponse{})
		if errors.Is(err, io.EOF) {
			return nil
		}
		return err
	}}
}

// rows are the calls of the node. prepared is set up for each attempt of a call.
func (h *host) rows(t *testing.T, ids []byte, digest []byte) []row {
	root := as(t.Context(), "root")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	engine := h.engine.Addr().Engine
	reserve := func() uint64 {
		r, err := h.cache.Reserve(root, &pb.ReserveRequest{Namespace: "m", BlockIds: ids[16:], Parent: ids[:16], GeometryDigest: digest, DataEngine: engine[:]})
		must(err)
		if r.GetReservation() == 0 {
			t.Fatalf("no reservation: %v", r)
		}
		t.Cleanup(func() {
			_, _ = h.cache.Abort(as(context.Background(), "root"), &pb.AbortRequest{Reservation: r.GetReservation()}) // the test may have ended it
		})
		return r.GetReservation()
	}
	lease := func(pin bool) uint64 {
		r, err := h.cache.Match(root, &pb.MatchRequest{Namespace: "m", BlockIds: ids[:16], LeaseTtlMs: 60_000, Pin: pin})
		must(err)
		if r.GetLease() == 0 {
			t.Fatalf("no lease: %v", r)
		}
		return r.GetLease()
	}
	window, err := h.memory.Window(0, 1<<16)
	must(err)
	dst, err := window.Desc().MarshalBinary()
	must(err)
	fixed := func(m proto.Message) func() proto.Message { return func() proto.Message { return m } }
	event := func() {
		for _, name := range []string{"m-events", "other-events"} {
			if _, err := h.admin.BumpEpoch(as(context.Background(), "root"), &pb.BumpEpochRequest{Name: name}); err != nil {
				t.Error(err)
			}
		}
	}
	one := []*pb.PieceRef{{}}
	return []row{
		h.unary(pb.Cache_Describe_FullMethodName, "", fixed(&pb.DescribeRequest{})),
		h.unary(pb.Cache_Match_FullMethodName, "its namespace", fixed(&pb.MatchRequest{Namespace: "m", BlockIds: ids})),
		h.unary(pb.Cache_Match_FullMethodName, "its namespace, with a pin", fixed(&pb.MatchRequest{Namespace: "m", BlockIds: ids, Pin: true})),
		h.unary(pb.Cache_RenewLease_FullMethodName, "a lease", func() proto.Message { return &pb.RenewLeaseRequest{Lease: lease(false), TtlMs: 1000} }),
		h.unary(pb.Cache_ReleaseLease_FullMethodName, "a lease", func() proto.Message { return &pb.ReleaseLeaseRequest{Lease: lease(false)} }),
		h.unary(pb.Cache_RenewLease_FullMethodName, "a pin", func() proto.Message { return &pb.RenewLeaseRequest{Lease: lease(true), TtlMs: 1000} }),
		h.unary(pb.Cache_ReleaseLease_FullMethodName, "a pin", func() proto.Message { return &pb.ReleaseLeaseRequest{Lease: lease(true)} }),
		h.unary(pb.Cache_Read_FullMethodName, "its namespace", fixed(&pb.ReadRequest{Namespace: "m", BlockIds: ids, Pieces: one})),
		h.unary(pb.Cache_Read_FullMethodName, "an engine of another principal", fixed(&pb.ReadRequest{Namespace: "m", BlockIds: ids, Pieces: one, Destination: dst})),
		h.unary(pb.Cache_ReturnLoans_FullMethodName, "", fixed(&pb.ReturnLoansRequest{LocalSession: make([]byte, 16)})),
		h.unary(pb.Cache_Reserve_FullMethodName, "its namespace", fixed(&pb.ReserveRequest{Namespace: "m", BlockIds: ids, GeometryDigest: digest})),
		h.unary(pb.Cache_Reserve_FullMethodName, "an engine of another principal", fixed(&pb.ReserveRequest{Namespace: "m", BlockIds: ids, GeometryDigest: digest, DataEngine: engine[:]})),
		h.unary(pb.Cache_Commit_FullMethodName, "a reservation", func() proto.Message {
			return &pb.CommitRequest{Reservation: reserve(), Pieces: []*pb.PieceSums{{Block: 99}}}
		}),
		h.unary(pb.Cache_Abort_FullMethodName, "a reservation", func() proto.Message { return &pb.AbortRequest{Reservation: reserve()} }),
		h.unary(pb.Cache_PinEpoch_FullMethodName, "its namespace", fixed(&pb.PinEpochRequest{Namespace: "m", TtlMs: 1000})),
		h.unary(pb.Cache_Delivered_FullMethodName, "its namespace", fixed(&pb.DeliveredRequest{Namespace: "m", Epoch: 1, BlockIds: make([]byte, 16)})),
		h.unary(pb.Cache_Demote_FullMethodName, "its namespace", fixed(&pb.DemoteRequest{Namespace: "m", Epoch: 1, BlockIds: make([]byte, 16)})),
		h.unary(pb.Cache_Exists_FullMethodName, "its namespace", fixed(&pb.ExistsRequest{Namespace: "m", BlockIds: ids})),
		h.unary(pb.Cache_Delete_FullMethodName, "its namespace", fixed(&pb.DeleteRequest{Namespace: "m", BlockIds: make([]byte, 16)})),
		streamed(h.conn, pb.Cache_Events_FullMethodName, "its namespace", &pb.EventsRequest{Namespace: "m-none"}, nil),
		streamed(h.conn, pb.Cache_Events_FullMethodName, "all namespaces", &pb.EventsRequest{}, event),
		h.unary(pb.Admin_CreateNamespace_FullMethodName, "its namespace", fixed(&pb.CreateNamespaceRequest{Namespace: &pb.Namespace{Name: "m", Geometry: api.GeometryProto(geometry)}})),
		h.unary(pb.Admin_GetNamespace_FullMethodName, "its namespace", fixed(&pb.GetNamespaceRequest{Name: "m"})),
		h.unary(pb.Admin_ListNamespaces_FullMethodName, "", fixed(&pb.ListNamespacesRequest{})),
		h.unary(pb.Admin_DeleteNamespace_FullMethodName, "its namespace", fixed(&pb.DeleteNamespaceRequest{Name: "m", DryRun: true})),
		h.unary(pb.Admin_BumpEpoch_FullMethodName, "its namespace", fixed(&pb.BumpEpochRequest{Name: "m", To: 1})),
		h.unary(pb.Admin_RetireEpoch_FullMethodName, "its namespace", fixed(&pb.RetireEpochRequest{Name: "m", Epoch: 1, DryRun: true})),
		h.unary(pb.Admin_SetQuota_FullMethodName, "its namespace", fixed(&pb.SetQuotaRequest{Name: "m"})),
		h.unary(pb.Admin_SetReplicas_FullMethodName, "its namespace", fixed(&pb.SetReplicasRequest{Name: "m"})),
		h.unary(pb.Admin_DeleteBlocks_FullMethodName, "its namespace", fixed(&pb.DeleteBlocksRequest{Namespace: "m", BlockId: ids[:16], DryRun: true})),
		h.unary(pb.Admin_Evict_FullMethodName, "its namespace", fixed(&pb.EvictRequest{Namespace: "m", Bytes: 1, DryRun: true})),
		h.unary(pb.Admin_Evict_FullMethodName, "all namespaces", fixed(&pb.EvictRequest{Bytes: 1, DryRun: true})),
		h.unary(pb.Admin_Status_FullMethodName, "", fixed(&pb.StatusRequest{})),
		h.unary(pb.Admin_StatBlock_FullMethodName, "its namespace", fixed(&pb.StatBlockRequest{Namespace: "m", BlockId: ids[:16]})),
		h.unary(pb.Admin_ListBlocks_FullMethodName, "its namespace", fixed(&pb.ListBlocksRequest{Namespace: "m"})),
		h.unary(pb.Admin_VerifyBlocks_FullMethodName, "its namespace", fixed(&pb.VerifyBlocksRequest{Namespace: "m", BlockIds: ids[:16]})),
		h.unary(pb.Admin_ListTenants_FullMethodName, "", fixed(&pb.ListTenantsRequest{})),
		h.unary(pb.Admin_ListPins_FullMethodName, "its namespace", fixed(&pb.ListPinsRequest{Namespace: "m"})),
		h.unary(pb.Admin_ListPins_FullMethodName, "all namespaces", fixed(&pb.ListPinsRequest{})),
		h.unary(pb.Admin_ListMembers_FullMethodName, "", fixed(&pb.ListMembersRequest{})),
		h.unary(pb.Admin_DrainMember_FullMethodName, "", fixed(&pb.DrainMemberRequest{Name: "n"})),
		h.unary(pb.Admin_FillMembers_FullMethodName, "", fixed(&pb.FillMembersRequest{Names: []string{"n"}, DryRun: true})),
		h.unary(pb.Admin_RemoveMember_FullMethodName, "", fixed(&pb.RemoveMemberRequest{Name: "n", DryRun: true})),
		streamed(h.conn, pb.Admin_Scrub_FullMethodName, "", &pb.ScrubRequest{BytesPerSecond: -1}, nil),
		h.unary(pb.Admin_ListVolumes_FullMethodName, "", fixed(&pb.ListVolumesRequest{})),
		h.unary(pb.Admin_DrainVolume_FullMethodName, "", fixed(&pb.DrainVolumeRequest{Volume: "0", DryRun: true})),
		h.unary(pb.Admin_AdoptVolume_FullMethodName, "", fixed(&pb.AdoptVolumeRequest{Path: "/mnt/shared", DryRun: true})),
		h.unary(pb.Admin_RemoveVolume_FullMethodName, "", fixed(&pb.RemoveVolumeRequest{Volume: "0", DryRun: true})),
		h.unary(pb.Admin_DiffConfig_FullMethodName, "", fixed(&pb.DiffConfigRequest{})),
		h.unary(pb.Admin_ReloadConfig_FullMethodName, "", fixed(&pb.ReloadConfigRequest{})),
		h.unary(pb.Admin_GetRoles_FullMethodName, "", fixed(&pb.GetRolesRequest{})),
		h.unary(pb.Admin_SetRoles_FullMethodName, "", fixed(&pb.SetRolesRequest{})),
	}
}

// plannerHost is a planner node with bearer tokens or roles.
func plannerHost(t *testing.T, tokens server.Tokens, policy server.Roles, log *slog.Logger) (conn *grpc.ClientConn, web door) {
	t.Helper()
	service, err := planner.New(planner.Options{})
	if err != nil {
		t.Fatal(err)
	}
	n := server.NewPlannerNode(server.PlannerOptions{Service: service, Tokens: tokens, Roles: policy, Registry: prometheus.NewRegistry(), Logger: log})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- n.Serve(l, w) }()
	conn, err = grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		if err := errors.Join(conn.Close(), n.Shutdown(context.Background())); err != nil {
			t.Error(err)
		}
		if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Error(err)
		}
	})
	return conn, door{"http://" + w.Addr().String(), n.Patterns()}
}

// gatewayHost is a gateway with the token of the principal "gateway". No engine listens at its engine's address, so it
// answers requests itself.
func gatewayHost(t *testing.T, log *slog.Logger) (api, web door) {
	t.Helper()
	f, err := front.New(front.Options{
		Engines: []front.Engine{{URL: "http://" + testkit.Port(t)}}, Tokens: func() []string { return []string{tokenOf("gateway")} }, Logger: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	n := server.NewFrontNode(server.FrontOptions{Front: f, Registry: prometheus.NewRegistry()})
	var listeners [2]net.Listener
	for i := range listeners {
		if listeners[i], err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
	}
	served := make(chan error, 1)
	go func() { served <- n.Serve(listeners[0], listeners[1]) }()
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		if err := errors.Join(n.Shutdown(context.Background()), <-served); err != nil {
			t.Error(err)
		}
	})
	return door{"http://" + listeners[0].Addr().String(), f.Patterns()}, door{"http://" + listeners[1].Addr().String(), n.Patterns()}
}

// door is an HTTP listener with the patterns of its paths.
type door struct {
	base     string
	patterns []string
}

// rows are one request for each pattern, and one for a path without a pattern, sorted by path.
func (d door) rows(t *testing.T) (rows []row) {
	t.Helper()
	// The profiles end early.
	queries := map[string]string{"/debug/pprof/profile": "?seconds=1", "/debug/pprof/trace": "?seconds=0.001"}
	for _, pattern := range append(slices.Clone(d.patterns), "/other") {
		method, path, ok := strings.Cut(pattern, " ")
		if !ok {
			// A pattern without a method gets one that no other pattern of the path has.
			method, path = http.MethodGet, pattern
			if slices.Contains(d.patterns, method+" "+path) {
				method = http.MethodPost
			}
		}
		path = strings.TrimSuffix(path, "{$}")
		if strings.Contains(path, "{") {
			t.Fatalf("the test makes no request for the pattern %q", pattern)
		}
		rows = append(rows, webRow(d.base, method, path+queries[path]))
	}
	slices.SortFunc(rows, func(a, b row) int {
		method, path, _ := strings.Cut(a.name, " ")
		other, at, _ := strings.Cut(b.name, " ")
		return cmp.Or(cmp.Compare(path, at), cmp.Compare(method, other))
	})
	return rows
}

func plannerRows(conn *grpc.ClientConn) []row {
	h := &host{conn: conn}
	fixed := func(m proto.Message) func() proto.Message { return func() proto.Message { return m } }
	return []row{
		streamed(conn, pb.Planner_Submit_FullMethodName, "its namespace", &pb.SubmitRequest{Namespace: "m"}, nil),
		streamed(conn, pb.Planner_Lead_FullMethodName, "all namespaces", &pb.LeaderMessage{}, nil),
		h.unary(pb.Planner_BumpWeights_FullMethodName, "its namespace", fixed(&pb.BumpWeightsRequest{Namespace: "m", Epoch: 3, Policy: pb.Drain_DRAIN_FINISH})),
		h.unary(pb.Planner_SwitchRole_FullMethodName, "", fixed(&pb.SwitchRoleRequest{Group: "g", Role: pb.Side_SIDE_DECODE})),
		h.unary(pb.Planner_Roles_FullMethodName, "", fixed(&pb.RolesRequest{})),
		h.unary(pb.Planner_Explain_FullMethodName, "", fixed(&pb.ExplainRequest{Request: "r"})),
		h.unary(pb.Planner_Top_FullMethodName, "", fixed(&pb.TopRequest{})),
		h.unary(pb.Planner_Election_FullMethodName, "", fixed(&pb.ElectionRequest{})),
	}
}

// webAnswer is the status of an HTTP response to a request that was admitted.
type webAnswer int

func (a webAnswer) Error() string { return http.StatusText(int(a)) }

// webRow makes a row of one request.
func webRow(base, method, path string) row {
	return row{method + " " + path, "", func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, method, base+path, nil)
		if err != nil {
			return err
		}
		md, _ := metadata.FromOutgoingContext(ctx)
		for _, v := range md.Get("authorization") {
			req.Header.Add("Authorization", v)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		switch resp.StatusCode {
		case http.StatusUnauthorized:
			return status.Error(codes.Unauthenticated, "401")
		case http.StatusForbidden:
			return status.Error(codes.PermissionDenied, "403")
		}
		return webAnswer(resp.StatusCode)
	}}
}

// TestAccessTable makes every call of the services and every request of the HTTP listeners as every
// kind of caller, and compares the table of the answers with docs/access.md. The requests are made from the
// patterns of the listeners, so a new path is missing in the page until it is rewritten. Each refused call
// leaves one line in the audit log or, if the caller has no identity, is counted by a later line. To
// rewrite the page: go test ./server -run TestAccessTable -rewrite
func TestAccessTable(t *testing.T) {
	var log testkit.Log
	logger := slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
	var policy roles
	h := newHost(t, func(o *server.Options) { o.Roles, o.Logger = policy.current, logger }, nil)
	ns := h.namespace()
	h.write(ns, 1)
	for _, name := range []string{"m-events", "other-events"} {
		if _, err := h.admin.CreateNamespace(t.Context(), &pb.CreateNamespaceRequest{Namespace: &pb.Namespace{Name: name, Geometry: api.GeometryProto(geometry)}}); err != nil {
			t.Fatal(err)
		}
	}
	policy.set(t, everyRole...)
	h.server.EndRemovedSessions()
	for len(h.engine.Peers()) > 0 {
		runtime.Gosched()
	}
	if err := h.connectAs(as(t.Context(), "root"), h.engine); err != nil {
		t.Fatal(err)
	}
	planned, plannedWeb := plannerHost(t, nil, policy.current, logger)
	gatewayAPI, gatewayWeb := gatewayHost(t, logger)
	sections := []struct {
		title   string
		columns []column
		rows    []row
	}{
		{"Storage node: gRPC", columns, h.rows(t, chain(ns, 2), digestOf(ns))},
		{"Planner: gRPC", columns, plannerRows(planned)},
		{"Storage node: HTTP", columns, door{h.web, h.server.Patterns()}.rows(t)},
		{"Planner: HTTP", columns, plannedWeb.rows(t)},
		{"Gateway: API", gatewayColumns, gatewayAPI.rows(t)},
		{"Gateway: HTTP", gatewayColumns, gatewayWeb.rows(t)},
	}
	var table strings.Builder
	seen := make(map[string]bool)
	unidentified := 0 // refused calls without an identity that are neither logged nor counted yet
	for _, section := range sections {
		fmt.Fprintf(&table, "\n### %s\n\n| call | concerns |", section.title)
		for _, c := range section.columns {
			fmt.Fprintf(&table, " %s |", c.title)
		}
		table.WriteString("\n| --- | --- |" + strings.Repeat(" --- |", len(section.columns)) + "\n")
		for _, r := range section.rows {
			seen[r.name] = true
			path, _, _ := strings.Cut(r.name, "?")
			fmt.Fprintf(&table, "| %s | %s |", path, r.on)
			for _, c := range section.columns {
				ctx := t.Context()
				if c.principal != "" {
					ctx = as(ctx, c.principal)
				}
				log.Take()
				err := r.call(ctx)
				answer, refused := "yes", false
				var web webAnswer
				switch status.Code(err) {
				case codes.Unauthenticated, codes.PermissionDenied:
					answer, refused = "**no**", true
				case codes.NotFound:
					if r.on == "a lease" || r.on == "a pin" || r.on == "a reservation" {
						answer, refused = "**not found**", true
					}
				}
				if errors.As(err, &web) && (web == http.StatusNotFound || web == http.StatusMethodNotAllowed) {
					answer = strconv.Itoa(int(web))
				}
				fmt.Fprintf(&table, " %s |", answer)
				refusals := 0
				for line := range strings.Lines(log.Take()) {
					if strings.Contains(line, "refused=") {
						refusals++
						if !strings.Contains(line, "principal=") {
							unidentified -= 1 + leftOut(t, line)
						}
						if c.principal != "" && c.principal != "unknown" && !strings.Contains(line, "principal="+c.principal+" ") {
							t.Errorf("%s as %s: the principal is not in the line %s", r.name, c.title, line)
						}
					}
				}
				want := map[bool]int{true: 1}[refused]
				if c.principal == "" || c.principal == "unknown" {
					unidentified += want
					want = min(want, refusals) // the rate of these lines is limited
				}
				if refusals != want {
					t.Errorf("%s (%s) as %s: %v; %d lines of a refusal in the log, want %d", r.name, r.on, c.title, err, refusals, want)
				}
			}
			table.WriteString("\n")
		}
	}
	for _, last := range []row{sections[0].rows[0], sections[1].rows[0], webRow(gatewayAPI.base, http.MethodGet, "/v1/models")} {
		for counted := false; !counted; {
			if err := last.call(t.Context()); status.Code(err) != codes.Unauthenticated {
				t.Fatal(err)
			}
			unidentified++
			for line := range strings.Lines(log.Take()) {
				unidentified -= 1 + leftOut(t, line)
				counted = leftOut(t, line) > 0
			}
		}
	}
	if unidentified != 0 {
		t.Errorf("%d refused calls without an identity are neither logged nor counted", unidentified)
	}
	for _, s := range []grpc.ServiceDesc{pb.Cache_ServiceDesc, pb.Admin_ServiceDesc, pb.Planner_ServiceDesc} {
		for _, m := range s.Methods {
			if !seen[s.ServiceName[strings.LastIndex(s.ServiceName, ".")+1:]+"/"+m.MethodName] {
				t.Errorf("%s of %s is not in the table", m.MethodName, s.ServiceName)
			}
		}
		for _, m := range s.Streams {
			if !seen[s.ServiceName[strings.LastIndex(s.ServiceName, ".")+1:]+"/"+m.StreamName] {
				t.Errorf("%s of %s is not in the table", m.StreamName, s.ServiceName)
			}
		}
	}
	comparePage(t, table.String())
}

// comparePage compares the table with the end of docs/access.md, or rewrites it.
func comparePage(t *testing.T, table string) {
	t.Helper()
	const mark = "<!-- The table below is written by: go test ./server -run TestAccessTable -rewrite -->\n"
	path := filepath.Join(testkit.RepositoryRoot(t), "docs", "access.md")
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text, old, ok := bytes.Cut(page, []byte(mark))
	if !ok {
		t.Fatalf("docs/access.md lacks the line %s", mark)
	}
	if *rewrite {
		if err := os.WriteFile(path, slices.Concat(text, []byte(mark), []byte(table)), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if string(old) != table {
		t.Errorf("the table of docs/access.md differs from the node's answers:\n%s", table)
	}
}

// accessClient is a principal with an engine of its own.
type accessClient struct {
	h      *host
	ctx    context.Context
	engine rdma.Engine
	memory rdma.Region
	dst    []byte
}

// client returns a principal whose engine is connected with the principal's token.
func (h *host) client(principal string) *accessClient {
	h.t.Helper()
	e, err := tcp.New(context.Background(), tcp.Options{})
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _ = e.Close() }) // the node has ended the session, or ends it
	c := &accessClient{h: h, ctx: as(h.t.Context(), principal), engine: e}
	if c.memory, err = e.Register(make([]byte, 1<<16), rdma.RegisterOptions{}); err != nil {
		h.t.Fatal(err)
	}
	if c.dst, err = c.memory.Desc().MarshalBinary(); err != nil {
		h.t.Fatal(err)
	}
	if err := h.connectAs(c.ctx, e); err != nil {
		h.t.Fatal(err)
	}
	return c
}

// replies collects the node's replies to the client's engine.
func (c *accessClient) replies() *replies {
	c.h.t.Helper()
	d, err := c.h.cache.Describe(c.ctx, &pb.DescribeRequest{})
	if err != nil {
		c.h.t.Fatal(err)
	}
	var addr rdma.Addr
	if err := addr.UnmarshalBinary(d.GetDataAddress()); err != nil {
		c.h.t.Fatal(err)
	}
	own := *c.h
	own.engine = c.engine
	r := &replies{h: &own, node: addr.Engine, ch: make(chan []byte, 256)}
	if err := c.engine.Recv(256, 64<<10, func(_ rdma.EngineID, msg []byte) { r.ch <- append([]byte(nil), msg...) }); err != nil {
		c.h.t.Fatal(err)
	}
	return r
}

// TestMessagesHaveTheRolesOfTheirClient: a call by message is decided by the roles of the client
// whose token opened the session, and by the roles file in use at the time of the call. A call of a
// client that is not in that file ends the session.
func TestMessagesHaveTheRolesOfTheirClient(t *testing.T) {
	var log testkit.Log
	var policy roles
	h := newHost(t, func(o *server.Options) {
		o.Roles, o.Logger = policy.current, slog.New(slog.NewTextHandler(&log, nil))
	}, nil)
	ns := h.namespace()
	h.write(ns, 1)
	policy.set(t, everyRole...)
	owner := h.client("writer")
	ids := chain(ns, 2)
	one := []*pb.PieceRef{{}}
	for _, c := range []struct {
		principal string
		want      map[api.Method]codes.Code
	}{
		{"reader", map[api.Method]codes.Code{api.MethodMatch: 0, api.MethodExists: 0, api.MethodRead: 0, api.MethodReserve: codes.PermissionDenied, api.MethodCommit: codes.PermissionDenied}},
		{"writer", map[api.Method]codes.Code{api.MethodMatch: codes.PermissionDenied, api.MethodExists: codes.PermissionDenied, api.MethodRead: codes.PermissionDenied, api.MethodReserve: 0, api.MethodCommit: codes.InvalidArgument}},
		{"operator", map[api.Method]codes.Code{api.MethodMatch: codes.PermissionDenied, api.MethodExists: codes.PermissionDenied, api.MethodRead: codes.PermissionDenied, api.MethodReserve: codes.PermissionDenied, api.MethodCommit: codes.PermissionDenied}},
		{"other", map[api.Method]codes.Code{api.MethodMatch: codes.PermissionDenied, api.MethodExists: codes.PermissionDenied, api.MethodRead: codes.PermissionDenied, api.MethodReserve: codes.PermissionDenied, api.MethodCommit: codes.NotFound}},
	} {
		client := h.client(c.principal)
		r := client.replies()
		for m, want := range c.want {
			var req, resp proto.Message
			switch m {
			case api.MethodMatch:
				req, resp = &pb.MatchRequest{Namespace: "m", BlockIds: ids}, &pb.MatchResponse{}
			case api.MethodExists:
				req, resp = &pb.ExistsRequest{Namespace: "m", BlockIds: ids}, &pb.ExistsResponse{}
			case api.MethodRead:
				req, resp = &pb.ReadRequest{Namespace: "m", BlockIds: ids[:16], Pieces: one, Destination: client.dst}, &pb.ReadResponse{}
			case api.MethodReserve:
				req, resp = &pb.ReserveRequest{Namespace: "m", BlockIds: ids[16:], Parent: ids[:16], GeometryDigest: digestOf(ns)}, &pb.ReserveResponse{}
			case api.MethodCommit:
				res, err := h.cache.Reserve(owner.ctx, &pb.ReserveRequest{Namespace: "m", BlockIds: ids[16:], Parent: ids[:16], GeometryDigest: digestOf(ns)})
				if err != nil {
					t.Fatal(err)
				}
				req, resp = &pb.CommitRequest{Reservation: res.GetReservation(), Pieces: []*pb.PieceSums{{Block: 99}}}, &pb.CommitResponse{}
			}
			log.Take()
			code, text := r.ask(m, req, resp)
			if code != want {
				t.Errorf("%v as %s: %v %s; want %v", m, c.principal, code, text, want)
			}
			if line := log.Take(); strings.Contains(line, "refused=") != (code == codes.PermissionDenied || code == codes.NotFound) || code != 0 && code != codes.InvalidArgument && (!strings.Contains(line, "principal="+c.principal) || !strings.Contains(line, "call="+m.String())) {
				t.Errorf("%v as %s: the log is %s", m, c.principal, line)
			}
		}
		if c.principal != "reader" {
			continue
		}
		policy.set(t, slices.DeleteFunc(slices.Clone(everyRole), func(l string) bool { return strings.HasPrefix(l, "reader ") })...)
		log.Take()
		r.send(api.Call{Method: api.MethodMatch, ID: 43, ReplyMax: 64 << 10}, &pb.MatchRequest{Namespace: "m", BlockIds: ids})
		r.connected(false)
		if line := log.Take(); !strings.Contains(line, "call=Match") || !strings.Contains(line, "result=Unauthenticated") {
			t.Errorf("the call of a removed principal is not in the log: %s", line)
		}
		policy.set(t, everyRole...)
		if err := h.connectAs(client.ctx, client.engine); err != nil {
			t.Fatal(err)
		}
		if code, text := r.ask(api.MethodMatch, &pb.MatchRequest{Namespace: "m", BlockIds: ids}, &pb.MatchResponse{}); code != 0 {
			t.Errorf("a match of a principal that is listed again: %v %s", code, text)
		}
	}
}

// TestSessionsOfPrincipals: a principal can neither take over an engine of another one, nor have bytes
// sent to it or a window opened to it, nor connect with the token of another principal or with one
// that was valid before the node had a roles file.
func TestSessionsOfPrincipals(t *testing.T) {
	var policy roles
	h := newHost(t, func(o *server.Options) { o.Roles = policy.current }, nil)
	ns := h.namespace()
	h.write(ns, 1)
	before, err := h.cache.Describe(t.Context(), &pb.DescribeRequest{})
	if err != nil {
		t.Fatal(err)
	}
	policy.set(t, "a read,write m*", "b read,write m*")
	tokens := make(map[string]bool)
	for _, p := range []string{"a", "b"} {
		d, err := h.cache.Describe(as(t.Context(), p), &pb.DescribeRequest{})
		if err != nil {
			t.Fatal(err)
		}
		tokens[string(d.GetDataToken())] = true
	}
	if tokens[string(before.GetDataToken())] = true; len(tokens) != 3 {
		t.Errorf("%d different data tokens, want 3", len(tokens))
	}
	var addr rdma.Addr
	if err := addr.UnmarshalBinary(before.GetDataAddress()); err != nil {
		t.Fatal(err)
	}
	stranger, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	if _, err := stranger.Connect(t.Context(), addr, before.GetDataToken()); !errors.Is(err, rdma.ErrAuth) {
		t.Errorf("the token of the time before the roles file: %v", err)
	}
	a, b := h.client("a"), h.client("b")
	ids, one := chain(ns, 2), []*pb.PieceRef{{}}
	if r, err := h.cache.Read(a.ctx, &pb.ReadRequest{Namespace: "m", BlockIds: ids[:16], Pieces: one, Destination: a.dst}); err != nil || r.GetPieces()[0].GetState() != pb.PieceResult_STATE_DELIVERED {
		t.Errorf("a reads into its own memory: %v, %v", r, err)
	}
	if _, err := h.cache.Read(b.ctx, &pb.ReadRequest{Namespace: "m", BlockIds: ids[:16], Pieces: one, Destination: a.dst}); status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), `principal "b"`) {
		t.Errorf("b reads into the memory of a: %v", err)
	}
	engineA := a.engine.Addr().Engine
	reserve := &pb.ReserveRequest{Namespace: "m", BlockIds: ids[16:], Parent: ids[:16], GeometryDigest: digestOf(ns)}
	res, err := h.cache.Reserve(a.ctx, reserve)
	if err != nil {
		t.Fatal(err)
	}
	var window rdma.Desc
	if err := window.UnmarshalBinary(res.GetWindow()); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		client *accessClient
		want   error
	}{{b, rdma.ErrRefused}, {a, nil}} {
		done := rdma.NewFlag()
		if err := c.client.engine.Write(t.Context(), rdma.Write{Src: c.client.memory, Dst: window, Len: 64, Done: done.Set}); err != nil {
			t.Fatal(err)
		}
		if err := done.Wait(t.Context()); !errors.Is(err, c.want) {
			t.Errorf("write into a window of a that names no engine: %v, want %v", err, c.want)
		}
	}
	reserve.DataEngine = engineA[:]
	if _, err := h.cache.Reserve(b.ctx, reserve); status.Code(err) != codes.PermissionDenied {
		t.Errorf("b opens a window to the engine of a: %v", err)
	}
}

// TestRemovedClientsLoseTheirSessions: EndRemovedSessions ends the sessions of the clients that the
// roles file has no more, and no others. A removed token opens no session, and one that stays does.
func TestRemovedClientsLoseTheirSessions(t *testing.T) {
	var policy roles
	h := newHost(t, func(o *server.Options) { o.Roles = policy.current }, nil)
	h.namespace() // its session has no principal
	policy.set(t, "a read m*", "b read m*")
	a, b := h.client("a"), h.client("b")
	d, err := h.cache.Describe(a.ctx, &pb.DescribeRequest{})
	if err != nil {
		t.Fatal(err)
	}
	policy.set(t, "b read m*")
	h.server.EndRemovedSessions()
	ended(t, a.engine)
	ended(t, h.engine)
	if len(b.engine.Peers()) != 1 {
		t.Error("the session of the client that stays was ended")
	}
	var addr rdma.Addr
	if err := addr.UnmarshalBinary(d.GetDataAddress()); err != nil {
		t.Fatal(err)
	}
	if _, err := a.engine.Connect(t.Context(), addr, d.GetDataToken()); !errors.Is(err, rdma.ErrAuth) {
		t.Errorf("the token of a removed client: %v", err)
	}
	if code, _ := b.replies().ask(api.MethodMatch, &pb.MatchRequest{Namespace: "m", BlockIds: make([]byte, 16)}, &pb.MatchResponse{}); code != 0 {
		t.Errorf("a call of the client that stays: %v", code)
	}
}

// ended waits until an engine has no session.
func ended(t *testing.T, e rdma.Engine) {
	t.Helper()
	for len(e.Peers()) > 0 {
		if t.Context().Err() != nil {
			t.Fatal("the session stays")
		}
		runtime.Gosched()
	}
}

// watchedEngine is a data plane whose sessions a test hides or whose Disconnect it holds.
type watchedEngine struct {
	rdma.Engine
	// hide makes the next call of Peers return no session, as while a handshake is in progress.
	hide atomic.Bool
	// hold, if not nil, is called by Disconnect before the session ends.
	hold func()
}

func (e *watchedEngine) Peers() []rdma.Peer {
	if e.hide.CompareAndSwap(true, false) {
		return nil
	}
	return e.Engine.Peers()
}

func (e *watchedEngine) Disconnect(peer rdma.EngineID) {
	if e.hold != nil {
		e.hold()
	}
	e.Engine.Disconnect(peer)
}

// TestHandshakeDuringReload: a session whose handshake was in progress at the reload that removed its
// client ends later.
func TestHandshakeDuringReload(t *testing.T) {
	var policy roles
	var data *watchedEngine
	h := newHost(t, func(o *server.Options) {
		data = &watchedEngine{Engine: o.Data}
		o.Roles, o.Data = policy.current, data
	}, nil)
	policy.set(t, "a read m*", "b read m*")
	a, b := h.client("a"), h.client("b")
	policy.set(t, "b read m*")
	data.hide.Store(true)
	h.server.EndAgainAfter(time.Millisecond)
	h.server.EndRemovedSessions()
	ended(t, a.engine)
	if len(b.engine.Peers()) != 1 {
		t.Error("the session of the client that stays was ended")
	}
}

// TestSessionsEndConcurrently: a client whose session takes long to end does not delay the end of the
// others.
func TestSessionsEndConcurrently(t *testing.T) {
	var policy roles
	const clients = 3
	var calls atomic.Int32
	all := make(chan struct{})
	h := newHost(t, func(o *server.Options) {
		o.Roles, o.Data = policy.current, &watchedEngine{Engine: o.Data, hold: func() {
			if calls.Add(1) == clients {
				close(all)
			}
			select {
			case <-all:
			case <-time.After(10 * time.Second):
				t.Error("a session ends only after another one")
			}
		}}
	}, nil)
	policy.set(t, "a read m*", "b read m*")
	for range clients {
		h.client("a")
	}
	policy.set(t, "b read m*")
	h.server.EndRemovedSessions()
	if n := calls.Load(); n != clients {
		t.Errorf("%d sessions ended, want %d", n, clients)
	}
}

// TestEnginesStayTheirs: after a reload that renames a principal or removes the roles file, an engine
// reads and reserves in its old session, and connects again with the same id.
func TestEnginesStayTheirs(t *testing.T) {
	var policy roles
	var data rdma.Engine
	h := newHost(t, func(o *server.Options) { o.Roles, data = policy.current, o.Data }, nil)
	ns := h.namespace()
	h.write(ns, 1)
	policy.set(t, "a read,write m*")
	c := h.client("a")
	id, ids := c.engine.Addr().Engine, chain(ns, 2)
	for _, reload := range []struct {
		name  string
		apply func()
	}{
		{"rename", func() { policy.set(t, "new:a read,write m*", "a:b read,write m*") }},
		{"no roles file", func() { policy.policy.Store(nil) }},
	} {
		reload.apply()
		h.server.EndRemovedSessions()
		for _, session := range []string{"old", "new"} {
			if session == "new" {
				c.engine.Disconnect(data.Addr().Engine)
				for slices.ContainsFunc(data.Peers(), func(p rdma.Peer) bool { return p.ID == id }) {
					runtime.Gosched()
				}
				if err := h.connectAs(c.ctx, c.engine); err != nil {
					t.Fatalf("%s: the engine cannot connect again: %v", reload.name, err)
				}
			}
			if r, err := h.cache.Read(c.ctx, &pb.ReadRequest{Namespace: "m", BlockIds: ids[:16], Pieces: []*pb.PieceRef{{}}, Destination: c.dst}); err != nil || r.GetPieces()[0].GetState() != pb.PieceResult_STATE_DELIVERED {
				t.Errorf("%s: a read in the %s session: %v, %v", reload.name, session, r, err)
			}
			for _, named := range [][]byte{id[:], nil} {
				res, err := h.cache.Reserve(c.ctx, &pb.ReserveRequest{Namespace: "m", BlockIds: ids[16:], Parent: ids[:16], GeometryDigest: digestOf(ns), DataEngine: named})
				if err != nil {
					t.Errorf("%s: a reservation in the %s session, engine %x: %v", reload.name, session, named, err)
					continue
				}
				if _, err := h.cache.Abort(c.ctx, &pb.AbortRequest{Reservation: res.GetReservation()}); err != nil {
					t.Error(err)
				}
			}
		}
		if reload.name == "rename" {
			if _, err := h.cache.Read(as(t.Context(), "b"), &pb.ReadRequest{Namespace: "m", BlockIds: ids[:16], Pieces: []*pb.PieceRef{{}}, Destination: c.dst}); status.Code(err) != codes.PermissionDenied {
				t.Errorf("the principal that got the name reads into the engine: %v", err)
			}
		}
	}
}

// TestListsShowOwnNamespaces: lists without a namespace, the events and the readiness show a caller
// only what its roles concern.
func TestListsShowOwnNamespaces(t *testing.T) {
	var policy roles
	h := newHost(t, func(o *server.Options) { o.Roles = policy.current }, nil)
	ns := h.namespace()
	h.write(ns, 1)
	for _, name := range []string{"m2", "other"} {
		if _, err := h.admin.CreateNamespace(t.Context(), &pb.CreateNamespaceRequest{Namespace: &pb.Namespace{Name: name, Geometry: api.GeometryProto(geometry)}}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := h.cache.Match(t.Context(), &pb.MatchRequest{Namespace: "m", BlockIds: chain(ns, 1), Pin: true}); err != nil {
		t.Fatal(err)
	}
	policy.set(t, everyRole...)
	for principal, want := range map[string][]string{"reader": {"m", "m2"}, "admin": {"m", "m2"}, "other": {"other"}, "operator": {"m", "m2", "other"}} {
		for limit := range uint32(3) {
			req := &pb.ListNamespacesRequest{Limit: limit}
			var got []string
			for {
				l, err := h.admin.ListNamespaces(as(t.Context(), principal), req)
				if err != nil || limit > 0 && len(l.GetNamespaces()) > int(limit) {
					t.Fatal(l, err)
				}
				for _, n := range l.GetNamespaces() {
					got = append(got, n.GetName())
				}
				if req.After = l.GetNext(); req.After == "" {
					break
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("namespaces of %s in pages of %d: %q; want %q", principal, limit, got, want)
			}
		}
	}
	for principal, want := range map[string]int{"admin": 1, "other": 0, "root": 1} {
		if l, err := h.admin.ListPins(as(t.Context(), principal), &pb.ListPinsRequest{}); err != nil || len(l.GetPins()) != want {
			t.Errorf("pins of %s: %v, %v; want %d", principal, l, err, want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	first := h.node.Events().Last()
	for _, name := range []string{"m", "other"} {
		if _, err := h.admin.BumpEpoch(as(t.Context(), "root"), &pb.BumpEpochRequest{Name: name}); err != nil {
			t.Fatal(err)
		}
	}
	for principal, want := range map[string]string{"reader": "m", "other": "other"} {
		s, err := h.cache.Events(as(ctx, principal), &pb.EventsRequest{After: max(first, 1)})
		if err != nil {
			t.Fatal(err)
		}
		if e, err := s.Recv(); err != nil || e.GetNamespace() != want {
			t.Errorf("the first event of %s: %v, %v; want one of %q", principal, e, err, want)
		}
	}
	for principal, want := range map[string]bool{"": false, "reader": false, "operator": true} {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, h.web+"/readyz", nil)
		if err != nil {
			t.Fatal(err)
		}
		if principal != "" {
			req.Header.Set("Authorization", "Bearer "+tokenOf(principal))
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		if err = errors.Join(err, resp.Body.Close()); err != nil || resp.StatusCode != http.StatusOK || strings.Contains(string(body), "volumes") != want {
			t.Errorf("/readyz for %q: %s %s, %v", principal, resp.Status, body, err)
		}
	}
}

// TestEventsEndWithTheRole: a stream of events sends nothing more when its principal has lost the
// role.
func TestEventsEndWithTheRole(t *testing.T) {
	var policy roles
	h := newHost(t, func(o *server.Options) { o.Roles = policy.current }, nil)
	h.namespace()
	policy.set(t, everyRole...)
	s, err := h.cache.Events(as(t.Context(), "reader"), &pb.EventsRequest{After: 1})
	if err != nil {
		t.Fatal(err)
	}
	bump := func() {
		if _, err := h.admin.BumpEpoch(as(t.Context(), "root"), &pb.BumpEpochRequest{Name: "m"}); err != nil {
			t.Fatal(err)
		}
	}
	bump()
	bump()
	if _, err := s.Recv(); err != nil {
		t.Fatal(err)
	}
	policy.set(t, slices.DeleteFunc(slices.Clone(everyRole), func(l string) bool { return strings.HasPrefix(l, "reader ") })...)
	bump()
	for err == nil {
		_, err = s.Recv()
	}
	if status.Code(err) != codes.Unauthenticated {
		t.Errorf("the stream ends with %v", err)
	}
}

// TestSubjects: a client certificate is a principal by its subject. A token decides before the
// certificate. A certificate of the CA whose subject has no principal is refused.
func TestSubjects(t *testing.T) {
	ca := testkit.NewAuthority(t)
	policy, err := access.Parse("roles.yaml", []byte(fmt.Sprintf(`principals:
  - {name: engines, subjects: [CN=engine], grants: [{roles: [read], namespaces: [m]}]}
  - {name: sre, tokens: [sha256:%x], grants: [{roles: [operate], namespaces: ["*"]}]}
`, sha256.Sum256([]byte(tokenOf("sre"))))))
	if err != nil {
		t.Fatal(err)
	}
	creds := func(name string) credentials.TransportCredentials {
		c := ca.Issue(func(c *x509.Certificate) { c.Subject = pkix.Name{CommonName: name} })
		return credentials.NewTLS(&tls.Config{RootCAs: ca.Pool, Certificates: []tls.Certificate{c}})
	}
	h := newHost(t, func(o *server.Options) {
		o.TLS = &tls.Config{Certificates: []tls.Certificate{ca.Issue(nil)}, ClientCAs: ca.Pool, ClientAuth: tls.RequireAndVerifyClientCert}
		o.Roles = func() *access.Policy { return policy }
	}, creds("engine"))
	match := &pb.MatchRequest{Namespace: "m", BlockIds: make([]byte, 16)}
	for name, c := range map[string]struct {
		ctx           context.Context
		match, status codes.Code
	}{
		"by its subject":           {t.Context(), codes.NotFound, codes.PermissionDenied},
		"with a token":             {as(t.Context(), "sre"), codes.PermissionDenied, codes.OK},
		"with an unknown token":    {as(t.Context(), "other"), codes.Unauthenticated, codes.Unauthenticated},
		"with another kind of key": {metadata.AppendToOutgoingContext(t.Context(), "authorization", "Basic x"), codes.Unauthenticated, codes.Unauthenticated},
	} {
		if _, err := h.cache.Match(c.ctx, match); status.Code(err) != c.match {
			t.Errorf("%s: match: %v, want %v", name, err, c.match)
		}
		if _, err := h.admin.Status(c.ctx, &pb.StatusRequest{}); status.Code(err) != c.status {
			t.Errorf("%s: status: %v, want %v", name, err, c.status)
		}
	}
	conn, err := grpc.NewClient(h.control, grpc.WithTransportCredentials(creds("stranger")))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := pb.NewCacheClient(conn).Match(t.Context(), match); status.Code(err) != codes.Unauthenticated || !strings.Contains(err.Error(), `"CN=stranger" is of no principal`) {
		t.Errorf("a certificate without a principal: %v", err)
	}
}

// TestHeadersAreLimited: a call with two Authorization headers is refused, although one of them has a
// token of a principal, over gRPC and over HTTP. A call with large headers is refused, also without a
// roles file and by a planner.
func TestHeadersAreLimited(t *testing.T) {
	var policy roles
	h := newHost(t, func(o *server.Options) { o.Roles = policy.current }, nil)
	planned, _ := plannerHost(t, nil, nil, nil)
	top := func(ctx context.Context) error {
		_, err := pb.NewPlannerClient(planned).Top(ctx, &pb.TopRequest{})
		return err
	}
	describe := func(ctx context.Context) error {
		_, err := h.cache.Describe(ctx, &pb.DescribeRequest{})
		return err
	}
	for name, call := range map[string]func(context.Context) error{"node": describe, "planner": top} {
		if err := call(metadata.AppendToOutgoingContext(t.Context(), "large", strings.Repeat("x", 16<<10))); err != nil {
			t.Errorf("%s: a header of 16 KiB: %v", name, err)
		}
		if err := call(metadata.AppendToOutgoingContext(t.Context(), "large", strings.Repeat("x", 65<<10))); err == nil {
			t.Errorf("%s: a header of 65 KiB was accepted", name)
		}
	}
	policy.set(t, everyRole...)
	for _, second := range []string{"root", "unknown"} {
		ctx := as(as(t.Context(), "root"), second)
		if err := describe(ctx); status.Code(err) != codes.Unauthenticated || !strings.Contains(err.Error(), "2 Authorization headers") {
			t.Errorf("gRPC with the tokens of root and %s: %v", second, err)
		}
		if err := webRow(h.web, http.MethodGet, "/metrics").call(ctx); status.Code(err) != codes.Unauthenticated {
			t.Errorf("HTTP with the tokens of root and %s: %v", second, err)
		}
	}
	if err := describe(as(t.Context(), "root")); err != nil {
		t.Errorf("with one token: %v", err)
	}
}

// TestRefusedBeforeTheMessage: a caller without the role on any namespace is refused by the headers of
// its call, so that its messages take no memory.
func TestRefusedBeforeTheMessage(t *testing.T) {
	var policy roles
	h := newHost(t, func(o *server.Options) { o.Roles = policy.current }, nil)
	policy.set(t, everyRole...)
	for _, c := range []struct {
		principal, method string
		want              codes.Code
	}{
		{"reader", pb.Cache_Reserve_FullMethodName, codes.PermissionDenied},
		{"unknown", pb.Cache_Reserve_FullMethodName, codes.Unauthenticated},
		{"operator", pb.Cache_Events_FullMethodName, codes.PermissionDenied},
	} {
		s, err := h.conn.NewStream(as(t.Context(), c.principal), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, c.method)
		if err == nil {
			err = s.RecvMsg(&pb.AbortResponse{}) // no message was sent
		}
		if status.Code(err) != c.want {
			t.Errorf("%s as %s: %v, want %v", c.method, c.principal, err, c.want)
		}
	}
}

// TestRolesEndOlderStreams: a stream of a caller that began before the node had a roles file ends with
// the next event.
func TestRolesEndOlderStreams(t *testing.T) {
	var policy roles
	h := newHost(t, func(o *server.Options) { o.Roles = policy.current }, nil)
	h.namespace()
	s, err := h.cache.Events(t.Context(), &pb.EventsRequest{After: 1})
	if err != nil {
		t.Fatal(err)
	}
	bump := func(ctx context.Context) {
		if _, err := h.admin.BumpEpoch(ctx, &pb.BumpEpochRequest{Name: "m"}); err != nil {
			t.Fatal(err)
		}
	}
	bump(t.Context())
	bump(t.Context())
	if _, err := s.Recv(); err != nil {
		t.Fatal(err)
	}
	policy.set(t, everyRole...)
	bump(as(t.Context(), "root"))
	for err == nil {
		_, err = s.Recv()
	}
	if status.Code(err) != codes.Unauthenticated {
		t.Errorf("the stream ends with %v", err)
	}
}

// TestForeignMatch: a Match in a namespace on which the caller has no role is refused before the index
// is read, with one answer for namespaces that exist and others.
func TestForeignMatch(t *testing.T) {
	var policy roles
	h := newHost(t, func(o *server.Options) { o.Roles = policy.current }, nil)
	ns := h.namespace()
	h.write(ns, 2)
	policy.set(t, "a read,write,admin m", "b read,write,admin other*")
	match := func(principal, name string) (*pb.MatchResponse, error) {
		return h.cache.Match(as(t.Context(), principal), &pb.MatchRequest{Namespace: name, BlockIds: chain(ns, 2)})
	}
	matches := func() int64 {
		st, ok := h.node.NamespaceStats(ns.ID)
		if !ok {
			t.Fatal("the node has no statistics of the namespace")
		}
		return st.Live[0].Matches
	}
	before := matches()
	var answers []string
	for _, name := range []string{"m", "absent"} {
		_, err := match("b", name)
		if status.Code(err) != codes.PermissionDenied {
			t.Errorf("a match of b in %s: %v", name, err)
		}
		answers = append(answers, strings.ReplaceAll(fmt.Sprint(err), `"`+name+`"`, "NAME"))
	}
	if answers[0] != answers[1] {
		t.Errorf("the answers show whether the namespace exists: %q", answers)
	}
	if n := matches() - before; n != 0 {
		t.Errorf("%d refused matches have reached the index", n)
	}
	if r, err := match("a", "m"); err != nil || r.GetMatchedBlocks() != 2 {
		t.Errorf("a match of a: %v, %v", r, err)
	}
	if n := matches() - before; n != 1 {
		t.Errorf("%d matches were counted; want 1", n)
	}
}
