package tcp

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
)

// jam is a NIC whose sockets each stop sending after 256 KiB until lifted is closed.
type jam struct {
	lifted, stuck chan struct{}
	once          sync.Once
}

// jammedConn is a socket of a jam.
type jammedConn struct {
	net.Conn
	jam    *jam
	sent   int
	closed chan struct{}
	once   sync.Once
}

func (j *jam) wrap(c net.Conn) net.Conn {
	return &jammedConn{Conn: c, jam: j, closed: make(chan struct{})}
}

func (c *jammedConn) NetConn() net.Conn { return c.Conn }

func (c *jammedConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

func (c *jammedConn) Write(b []byte) (int, error) {
	if c.sent += len(b); c.sent > 256<<10 {
		c.jam.once.Do(func() { close(c.jam.stuck) })
		select {
		case <-c.jam.lifted:
		case <-c.closed:
			return 0, net.ErrClosed
		}
	}
	return c.Conn.Write(b)
}

// TestMessagesPassBulk: while every payload connection is stuck in one direction or the other, and
// writes have the whole in-flight budget and wait for more, messages are delivered and acked in both
// directions.
func TestMessagesPassBulk(t *testing.T) {
	testkit.VerifyNone(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, conns := range []int{1, 4} {
		j := &jam{lifted: make(chan struct{}), stuck: make(chan struct{})}
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		token := rdma.Token("messages pass what is large")
		server, err := New(ctx, Options{Listen: "127.0.0.1:0", Token: token, Conns: conns, Wrap: j.wrap, InFlightOps: 2, InFlightBytes: 16 << 20})
		must(err)
		client, err := New(ctx, Options{Conns: conns, Wrap: j.wrap, InFlightOps: 2, InFlightBytes: 16 << 20})
		must(err)
		took := make(chan string, 100)
		for _, e := range []*Engine{server, client} {
			must(e.Recv(8, 1<<10, func(_ rdma.EngineID, msg []byte) { took <- string(msg) }))
		}
		peer, err := client.Connect(ctx, server.Addr(), token)
		must(err)
		mem := make([]byte, 16<<20)
		var bulk []*rdma.Flag
		for _, way := range [][2]*Engine{{client, server}, {server, client}} {
			dst, err := way[1].Register(make([]byte, len(mem)), rdma.RegisterOptions{})
			must(err)
			src, err := way[0].Register(mem, rdma.RegisterOptions{Local: true})
			must(err)
			landed, later := rdma.NewFlag(), rdma.NewFlag()
			must(way[0].Write(ctx, rdma.Write{Src: src, Dst: dst.Desc(), Len: uint64(len(mem)), Done: landed.Set}))
			w := rdma.Write{Src: src, Dst: dst.Desc(), Len: uint64(len(mem)), Done: later.Set, NoWait: true}
			if err := way[0].Write(ctx, w); !errors.Is(err, rdma.ErrBusy) {
				t.Fatalf("a write beyond the budget: %v", err)
			}
			w.NoWait = false
			go func() {
				if err := way[0].Write(ctx, w); err != nil {
					later.Set(err)
				}
			}()
			bulk = append(bulk, landed, later)
		}
		<-j.stuck
		for range 20 {
			for e, to := range map[*Engine]rdma.EngineID{client: peer, server: client.Addr().Engine} {
				acked := rdma.NewFlag()
				must(e.Send(ctx, to, []byte("hello"), acked.Set))
				if err := acked.Wait(ctx); err != nil {
					t.Fatalf("%d connections: a message after stuck payload: %v", conns, err)
				}
				<-took
			}
		}
		close(j.lifted)
		for _, landed := range bulk {
			must(landed.Wait(ctx))
		}
		must(client.Close())
		must(server.Close())
	}
}
