package server_test

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"net"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/planner"
)

// clientCA is auth.client_ca of a process, which a test replaces.
type clientCA struct {
	t       *testing.T
	own     *testkit.Authority // of the process
	current atomic.Pointer[tls.Config]
	hashes  atomic.Pointer[[][sha256.Size]byte]
}

func newClientCA(t *testing.T, all ...*testkit.Authority) *clientCA {
	c := &clientCA{t: t, own: testkit.NewAuthority(t)}
	c.set(all...)
	return c
}

// set replaces the authorities.
func (c *clientCA) set(all ...*testkit.Authority) {
	c.t.Helper()
	next := &tls.Config{Certificates: []tls.Certificate{c.own.Issue(nil)}, ClientCAs: x509.NewCertPool(), ClientAuth: tls.RequireAndVerifyClientCert}
	var hashes [][sha256.Size]byte
	for _, a := range all {
		block, _ := pem.Decode(a.PEM)
		next.ClientCAs.AppendCertsFromPEM(a.PEM)
		hashes = append(hashes, sha256.Sum256(block.Bytes))
	}
	c.hashes.Store(&hashes)
	c.current.Store(next)
}

func (c *clientCA) authorities() [][sha256.Size]byte { return *c.hashes.Load() }

func (c *clientCA) server() *tls.Config {
	return &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return c.current.Load(), nil }}
}

// client returns the credentials of a client with a certificate of an authority, whose name is that of a principal too.
func (c *clientCA) client(a *testkit.Authority, name string) credentials.TransportCredentials {
	cert := a.Issue(func(c *x509.Certificate) { c.Subject = pkix.Name{CommonName: name} })
	return credentials.NewTLS(&tls.Config{RootCAs: c.own.Pool, Certificates: []tls.Certificate{cert}})
}

// TestReplacedClientCAEndsSessions: when auth.client_ca is replaced, the connections, event streams and data-plane sessions of
// the clients end that it does not verify, whether they have a bearer token, a principal or neither, and the data plane's
// token of such a client opens no session. Those of other clients go on.
func TestReplacedClientCAEndsSessions(t *testing.T) {
	for name, edit := range map[string]func(o *server.Options, policy *roles){
		"a certificate alone": func(*server.Options, *roles) {},
		"bearer tokens":       func(o *server.Options, _ *roles) { o.Tokens = func() []string { return []string{tokenOf("x")} } },
		"principals":          func(o *server.Options, policy *roles) { o.Roles = policy.current },
	} {
		t.Run(name, func(t *testing.T) {
			left, stays := testkit.NewAuthority(t), testkit.NewAuthority(t)
			ca := newClientCA(t, left, stays)
			var policy roles
			policy.set(t, "x read,write,admin *")
			data := new(watchedEngine)
			h := newHost(t, func(o *server.Options) {
				o.TLS, o.ClientCAs = ca.server(), ca.authorities
				data.Engine = o.Data
				o.Data = data
				edit(o, &policy)
			}, ca.client(stays, "x"))
			if _, err := h.admin.CreateNamespace(as(t.Context(), "x"), &pb.CreateNamespaceRequest{Namespace: &pb.Namespace{Name: "m", Geometry: api.GeometryProto(geometry)}}); err != nil {
				t.Fatal(err)
			}
			conn, err := grpc.NewClient(h.control, grpc.WithTransportCredentials(ca.client(left, "x")))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			removed := *h
			removed.cache, removed.admin = pb.NewCacheClient(conn), pb.NewAdminClient(conn)
			events := func(h *host) grpc.ServerStreamingClient[pb.Event] {
				t.Helper()
				s, err := h.cache.Events(as(t.Context(), "x"), &pb.EventsRequest{After: 99})
				if err == nil {
					_, err = s.Recv() // a Gap, because the sequence 99 is from another run
				}
				if err != nil {
					t.Fatal(err)
				}
				return s
			}
			endless, endlessToo := events(&removed), events(h)
			a, b, early := removed.client("x"), h.client("x"), removed.client("x")
			served, unserved := b.replies(), early.replies()
			d, err := removed.cache.Describe(a.ctx, &pb.DescribeRequest{})
			if err != nil {
				t.Fatal(err)
			}
			match := &pb.MatchRequest{Namespace: "m", BlockIds: make([]byte, 16)}

			ca.set(stays)
			// A call before the sessions are ended is not served, and ends its session.
			unserved.send(api.Call{Method: api.MethodMatch, ID: 43, ReplyMax: 64 << 10}, match)
			unserved.connected(false)
			if len(unserved.ch) > 0 {
				t.Error("a call of a client whose CA was removed is answered")
			}
			h.server.EndRemovedSessions()
			ended(t, a.engine)
			if _, err := endless.Recv(); status.Code(err) != codes.Unavailable {
				t.Errorf("the event stream of a client whose CA was removed: %v", err)
			}
			if _, err := removed.cache.Describe(a.ctx, &pb.DescribeRequest{}); status.Code(err) != codes.Unavailable {
				t.Errorf("a call of a client whose CA was removed: %v", err)
			}
			var addr rdma.Addr
			if err := addr.UnmarshalBinary(d.GetDataAddress()); err != nil {
				t.Fatal(err)
			}
			if _, err := a.engine.Connect(t.Context(), addr, d.GetDataToken()); !errors.Is(err, rdma.ErrAuth) {
				t.Errorf("the data plane's token of a client whose CA was removed: %v", err)
			}
			var m pb.MatchResponse
			if code, text := served.ask(api.MethodMatch, match, &m); code != codes.OK {
				t.Errorf("a call of the client that stays: %v %s", code, text)
			}
			if _, err := h.admin.BumpEpoch(as(t.Context(), "x"), &pb.BumpEpochRequest{Name: "m"}); err != nil {
				t.Fatal(err)
			}
			if _, err := endlessToo.Recv(); err != nil {
				t.Errorf("the event stream of the client that stays: %v", err)
			}

			ca.set() // no certificate is verified any more
			h.server.EndRemovedSessions()
			if _, err := h.cache.Describe(as(t.Context(), "x"), &pb.DescribeRequest{}); err != nil {
				t.Errorf("without a CA: %v", err)
			}
		})
	}
}

// TestReplacedClientCAEndsLeaders: when auth.client_ca of a planner is replaced, the streams of the groups end whose certificates it
// does not verify, and the others go on.
func TestReplacedClientCAEndsLeaders(t *testing.T) {
	left, stays := testkit.NewAuthority(t), testkit.NewAuthority(t)
	ca := newClientCA(t, left, stays)
	service, err := planner.New(planner.Options{})
	if err != nil {
		t.Fatal(err)
	}
	n := server.NewPlannerNode(server.PlannerOptions{Service: service, TLS: ca.server(), ClientCAs: ca.authorities, Registry: prometheus.NewRegistry()})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- n.Serve(l, nil) }()
	defer func() {
		if err := n.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
		<-served
	}()
	lead := func(a *testkit.Authority) (stream grpc.BidiStreamingClient[pb.LeaderMessage, pb.LeaderAction], done chan error) {
		conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(ca.client(a, "engines")))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		if stream, err = pb.NewPlannerClient(conn).Lead(t.Context()); err != nil {
			t.Fatal(err)
		}
		done = make(chan error, 1)
		go func() {
			_, err := stream.Recv()
			done <- err
		}()
		return stream, done
	}
	_, removed := lead(left)
	stream, other := lead(stays)
	ca.set(stays)
	n.EndUnverified()
	if err := <-removed; status.Code(err) != codes.Unavailable {
		t.Errorf("the stream of a group whose CA was removed ends with %v", err)
	}
	if err := stream.Send(new(pb.LeaderMessage)); err != nil { // it is refused, so it has arrived
		t.Error(err)
	}
	if err := <-other; status.Code(err) != codes.InvalidArgument && status.Code(err) != codes.FailedPrecondition {
		t.Errorf("an empty message of a group that stays: %v", err)
	}
}
