package server_test

import (
	"bufio"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/handoff"
)

// TestSocketReadsOnly: a caller of the local socket has proved no token. It may ask for reads and
// matches. Every other call, and a pin, is refused and changes nothing.
func TestSocketReadsOnly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "local.sock")
	h := newHost(t, func(o *server.Options) {
		var err error
		if o.Local, err = handoff.Listen(handoff.Options{Path: path, Arena: o.Arena}); err != nil {
			t.Fatal(err)
		}
	}, nil)
	ns := h.namespace()
	h.write(ns, 1)
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	view, err := arena.Receive(conn, make([]byte, api.LocalHelloBytes))
	if err != nil {
		t.Fatal(err)
	}
	defer view.Close()
	in := bufio.NewReader(conn)
	one := []*pb.PieceRef{{}}
	for _, c := range []struct {
		m    api.Method
		req  proto.Message
		code codes.Code
	}{
		{api.MethodRead, &pb.ReadRequest{Namespace: "m", BlockIds: chain(ns, 1), Pieces: one, Loan: 1}, codes.OK},
		{api.MethodMatch, &pb.MatchRequest{Namespace: "m", BlockIds: chain(ns, 1), LeaseTtlMs: 1000}, codes.OK},
		{api.MethodMatch, &pb.MatchRequest{Namespace: "m", BlockIds: chain(ns, 1), Pin: true}, codes.PermissionDenied},
		{api.MethodReserve, &pb.ReserveRequest{Namespace: "m", BlockIds: chain(ns, 2), GeometryDigest: digestOf(ns), Pieces: []*pb.PieceRef{{Block: 1}}}, codes.PermissionDenied},
		{api.MethodCommit, &pb.CommitRequest{Reservation: 1}, codes.PermissionDenied},
	} {
		m := c.m
		frame, err := api.Call{Method: m, ID: 7, ReplyMax: 4096}.Append(make([]byte, api.LocalFrameHeaderBytes), c.req)
		if err != nil {
			t.Fatal(err)
		}
		api.PutLocalFrame(frame)
		if _, err := conn.Write(frame); err != nil {
			t.Fatal(err)
		}
		msg, err := api.ReadLocalFrame(in)
		if err != nil {
			t.Fatal(err)
		}
		reply, body, err := api.ParseReply(msg)
		if err != nil || codes.Code(reply.Code) != c.code {
			t.Errorf("%v: %v %q, %v; want %v", m, codes.Code(reply.Code), body, err, c.code)
		}
		if c.code != codes.OK && !strings.Contains(string(body), "gRPC") {
			t.Errorf("%v: %q does not say how else", m, body)
		}
	}
	if s := h.node.Stats(); s.Reservations != 0 {
		t.Errorf("%d reservations were made over the socket", s.Reservations)
	}
}
