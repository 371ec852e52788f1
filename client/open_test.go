package client_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// TestServersAreAddresses: Open and Dial refuse a text that is not an address of a node. The error
// has the text and advice.
func TestServersAreAddresses(t *testing.T) {
	engine, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	for server, want := range map[string]string{
		"":                     "host:port",
		"foo":                  "not host:port",
		"foo:":                 "port",
		":7420":                "no host",
		"foo:bar":              `port "bar"`,
		"foo:0":                `port "0"`,
		"foo:70000":            `port "70000"`,
		"foo:7420 ":            "port",
		"fo o:7420":            "not the name",
		"a:1,b:2":              "not host:port",
		"::1:7420":             "not host:port",
		"http://node:7420":     "scheme http",
		"dns:///node":          "not host:port",
		"unix:":                "no socket",
		"foo:7420/path":        "port",
		"user@foo:7420":        "not the name",
		"passthrough:///x:y:z": "not host:port",
	} {
		s, err := client.Open(t.Context(), client.Options{Servers: []string{"127.0.0.1:1", server}, Engine: engine, DialTimeout: time.Second})
		if err == nil {
			s.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), server) {
			t.Errorf("open with server %q: %v; want an error with %q", server, err, want)
		}
		if conn, err := client.Dial(server, client.DialOptions{}); err == nil {
			conn.Close()
			t.Errorf("dial of %q succeeds", server)
		}
	}
	for _, server := range []string{"node:7420", "10.0.0.1:1", "[::1]:7420", "[fe80::1%eth0]:7420", "unix:/run/penstock.sock", "unix:///run/penstock.sock", "dns:///node.rack_1:7420", "dns://8.8.8.8/node:7420", "passthrough:///node:7420"} {
		conn, err := client.Dial(server, client.DialOptions{})
		if err != nil {
			t.Errorf("dial of %q: %v", server, err)
			continue
		}
		if err := errors.Join(conn.Close()); err != nil {
			t.Error(err)
		}
	}
}

// TestNoAnswer: a Store all of whose nodes are down logs it once, also without a
// Logger. A Store with a node that is up logs nothing.
func TestNoAnswer(t *testing.T) {
	const said = "no storage node answers"
	h := newHost(t, nil)
	for name, c := range map[string]struct {
		servers []string
		logger  bool
		warns   int
	}{
		"all down, no logger":   {[]string{testkit.Port(t), testkit.Port(t)}, false, 1},
		"all down, a logger":    {[]string{testkit.Port(t)}, true, 1},
		"one of two is up":      {[]string{testkit.Port(t), h.control}, false, 0},
		"one is up, one logger": {[]string{testkit.Port(t), h.control}, true, 0},
	} {
		var own, global testkit.Log
		before := slog.Default()
		slog.SetDefault(slog.New(slog.NewTextHandler(&global, nil)))
		newRig(t, func(o *client.Options) {
			o.Servers = c.servers
			if c.logger {
				o.Logger = slog.New(slog.NewTextHandler(&own, nil))
			}
		})
		slog.SetDefault(before)
		text, other := &global, &own
		if c.logger {
			text, other = other, text
		}
		if n := strings.Count(text.String(), said); n != c.warns || n > 0 && !strings.Contains(text.String(), "WARN") {
			t.Errorf("%s: said %d times, want %d: %s", name, n, c.warns, text)
		}
		if other.String() != "" {
			t.Errorf("%s: the other logger got %s", name, other)
		}
	}
}

// TestOpenPassesOverSilentMembers: Open with Discover returns although a seed and a member do not answer
// within DialTimeout, if others do. Calls do not wait for the silent member. It has a session when it
// answers.
func TestOpenPassesOverSilentMembers(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0") // the kernel accepts connections, and nothing reads from them
	if err != nil {
		t.Fatal(err)
	}
	f := newFake(t)
	f.members = []*pb.Member{{Name: "a", Addr: silent.Addr().String(), State: "serving"}, {Name: "b", Addr: f.addr, State: "serving"}}
	engine, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = engine.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := client.Open(ctx, client.Options{Servers: []string{silent.Addr().String(), f.addr}, Discover: true, MembersEvery: time.Hour, DialTimeout: time.Hour, Engine: engine})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	nodes := s.Nodes()
	if len(nodes) != 2 || nodes[0].Err == nil || !strings.Contains(nodes[0].Err.Error(), "has not answered yet") || nodes[1].Err != nil {
		t.Fatalf("nodes %+v; want the silent one with an error", nodes)
	}
	answering := newFake(t)
	answering.serveAt(silent)
	for s.Nodes()[0].Err != nil {
		select {
		case <-ctx.Done():
			t.Fatalf("the member answers and is not used: %+v", s.Nodes()[0])
		case <-time.After(time.Millisecond):
		}
	}
}
