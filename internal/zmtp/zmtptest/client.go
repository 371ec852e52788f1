// Package zmtptest is the client end of package zmtp, for tests: SUB, DEALER and REQ sockets. It
// uses the code of package zmtp for frames, so tests with zmtptest cannot find errors in that code.
// Other tests use libzmq for that.
package zmtptest

import (
	"net"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/zmtp"
)

// Client is a connection that is closed at the end of the test.
type Client struct {
	*zmtp.Conn
	t testing.TB
}

// Dial connects a socket of the type kind (SUB, DEALER, REQ) to an endpoint, tcp:// or ipc://. The
// socket at the endpoint must have one of the types peers.
func Dial(t testing.TB, endpoint, kind string, peers ...string) *Client {
	t.Helper()
	scheme, address, _ := strings.Cut(endpoint, "://")
	network := "tcp"
	if scheme == "ipc" {
		network = "unix"
	}
	c, err := net.Dial(network, address)
	if err != nil {
		t.Fatal(err)
	}
	return New(t, c, kind, peers...)
}

// New performs the handshake on a connection and returns a Client.
func New(t testing.TB, c net.Conn, kind string, peers ...string) *Client {
	t.Helper()
	t.Cleanup(func() { _ = c.Close() })
	// A publisher sends larger messages than it accepts, so the default is too small here.
	z, err := zmtp.Handshake(c, kind, peers, zmtp.Options{MessageBytes: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	return &Client{Conn: z, t: t}
}

// Subscribe connects a SUB socket and subscribes to topics that begin with prefix.
func Subscribe(t testing.TB, endpoint, prefix string) *Client {
	t.Helper()
	c := Dial(t, endpoint, "SUB", "PUB")
	c.MustSend(append([]byte{1}, prefix...))
	return c
}

// MustSend sends one message without buffering.
func (c *Client) MustSend(frames ...[]byte) {
	c.t.Helper()
	if err := c.Send(frames...); err != nil {
		c.t.Fatal(err)
	}
	if err := c.Flush(); err != nil {
		c.t.Fatal(err)
	}
}

// MustReceive waits for a message.
func (c *Client) MustReceive() [][]byte {
	c.t.Helper()
	m, err := c.Receive()
	if err != nil {
		c.t.Fatal(err)
	}
	return m
}
