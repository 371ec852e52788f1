package tcp

import (
	"context"
	"crypto/rand"
	"errors"
	"hash/crc32"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/rdma"
)

// rawPeer is a hand-made peer that may violate the protocol.
type rawPeer struct {
	t     testing.TB
	id    rdma.EngineID
	conns []net.Conn
}

// newRawPeer opens a session of n connections.
func newRawPeer(t testing.TB, e *Engine, n int) *rawPeer {
	t.Helper()
	p := &rawPeer{t: t}
	_, _ = rand.Read(p.id[:])
	var session [16]byte
	_, _ = rand.Read(session[:])
	var wg sync.WaitGroup
	p.conns = make([]net.Conn, n)
	for i := range n {
		nc, err := net.Dial("tcp", string(e.nics[0].addr))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = nc.Close() })
		p.conns[i] = nc
		h := hello{index: i, conns: n, lanes: 1, rails: 1, generation: 1, engine: p.id, session: session}
		wg.Go(func() {
			dialer := &Engine{id: p.id}
			if _, err := dialer.authenticate(nc, e.id, rdma.Token(testToken), h); err != nil {
				t.Errorf("handshake: %v", err)
			}
		})
	}
	wg.Wait()
	return p
}

// send writes raw bytes on a connection.
func (p *rawPeer) send(i int, b ...[]byte) {
	p.t.Helper()
	for _, x := range b {
		if _, err := p.conns[i].Write(x); err != nil {
			p.t.Fatalf("write: %v", err)
		}
	}
}

// raw returns the bytes of a header.
func (h header) raw() []byte {
	b := make([]byte, headerSize)
	h.encode(b)
	return b
}

// next reads frames of connection i up to the first that is not a heartbeat, and returns that
// one with its payload.
func (p *rawPeer) next(i int) (header, []byte) {
	p.t.Helper()
	b := make([]byte, headerSize)
	for {
		if _, err := io.ReadFull(p.conns[i], b); err != nil {
			p.t.Fatalf("read: %v", err)
		}
		var h header
		if err := h.decode(b); err != nil {
			p.t.Fatal(err)
		}
		if h.kind == frameHeartbeat {
			continue
		}
		payload := make([]byte, int(h.runs)*runSize+int(h.length))
		if _, err := io.ReadFull(p.conns[i], payload); err != nil {
			p.t.Fatalf("read: %v", err)
		}
		return h, payload
	}
}

// nextAck reads an ack frame of one entry.
func (p *rawPeer) nextAck(i int) ack {
	p.t.Helper()
	h, b := p.next(i)
	if h.kind != frameAck || len(b) != ackSize {
		p.t.Fatalf("frame of type %d with %d bytes, want one ack", h.kind, len(b))
	}
	a, err := decodeAck(b)
	if err != nil {
		p.t.Fatal(err)
	}
	return a
}

// closed waits until the engine has closed connection i.
func (p *rawPeer) closed(i int) {
	p.t.Helper()
	_ = p.conns[i].SetReadDeadline(time.Now().Add(30 * time.Second))
	_, err := io.Copy(io.Discard, p.conns[i])
	if errors.Is(err, context.DeadlineExceeded) || (err != nil && strings.Contains(err.Error(), "timeout")) {
		p.t.Fatal("the connection is still open")
	}
}

// tableSum is the checksum of a table.
func tableSum(table []byte) uint32 { return crc32.Checksum(table, castagnoli) }
