//go:build fabric && cgo && linux

package fabric

import (
	"bytes"
	"errors"
	"sync"
	"testing"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// unconnected returns two endpoints of two domains that are not connected. The Connect
// of connector makes the handshake with other. Both are closed when the test ends.
func unconnected(t *testing.T) (connector, other *endpoint) {
	t.Helper()
	var ends [2]*endpoint
	for i := range ends {
		d := openDomain(t)
		if !d.quirks.connects {
			skipProvider(t, "makes no connections under its endpoints (quirks.connects), so it needs no handshake")
		}
		e, err := d.NewEndpoint(uint64(i), rdma.ClassKV)
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = e.(*endpoint)
	}
	t.Cleanup(func() {
		// Close both at the same time: each still sends to the other while it closes.
		var closing sync.WaitGroup
		for _, e := range ends {
			closing.Go(func() {
				e.Shut()
				if err := errors.Join(e.Close(), e.d.Close()); err != nil {
					t.Error(err)
				}
			})
		}
		closing.Wait()
	})
	if bytes.Compare(ends[0].address, ends[1].address) < 0 {
		return ends[1], ends[0]
	}
	return ends[0], ends[1]
}

// polling polls the endpoints' domains, at least once, until do returns. It returns all
// completions and the error of do.
func polling(t *testing.T, do func() error, all ...*endpoint) (polled []group.Completion, err error) {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- do() }()
	dst := make([]group.Completion, 16)
	for {
		for _, e := range all {
			n, err := e.d.Poll(dst)
			if err != nil {
				t.Fatal(err)
			}
			polled = append(polled, dst[:n]...)
		}
		select {
		case err := <-ended:
			return polled, err
		default:
		}
	}
}

// region registers 64 KiB filled with one byte value. It closes the region when the test
// ends.
func region(t *testing.T, d *domain, fill byte) ([]byte, group.Memory) {
	t.Helper()
	mem := bytes.Repeat([]byte{fill}, 64<<10)
	m, err := d.Register(mem, rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return mem, m
}

// TestShutBeforeHandshake: works that are posted before the handshake wait. If the endpoint
// is shut then, it does not read their sources after that, although libfabric's endpoint
// stays open until the handshake.
func TestShutBeforeHandshake(t *testing.T) {
	connector, other := unconnected(t)
	src, sm := region(t, other.d, 1)
	dst, dm := region(t, connector.d, 0)
	if err := other.Connect(connector.Local()); err != nil {
		t.Fatal(err)
	}
	if n, err := other.Post([]group.Work{{Op: group.OpWrite, Src: sm, Len: uint64(len(src)), RemoteAddr: dm.Base(), RemoteKey: dm.Key()}}); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	for range 1000 { // enough turns for a connection and the write
		if polled, _ := polling(t, func() error { return nil }, connector, other); len(polled) > 0 {
			t.Fatalf("polled %+v before the handshake", polled)
		}
	}
	other.Shut()
	copy(src, bytes.Repeat([]byte{0xCC}, len(src)))
	polled, err := polling(t, func() error { return connector.Connect(other.Local()) }, connector, other)
	if err != nil {
		t.Fatal(err)
	}
	if len(polled) == 0 || polled[0].Status != group.StatusBroken {
		t.Errorf("polled %+v, want the write as broken", polled)
	}
	if !bytes.Equal(dst, make([]byte, len(dst))) {
		t.Error("a write arrived after its endpoint was shut")
	}
}

// TestEarlyHandshake: a handshake that arrives before the endpoint's own Connect counts,
// and a write posted after Connect is sent.
func TestEarlyHandshake(t *testing.T) {
	connector, other := unconnected(t)
	src, sm := region(t, other.d, 1)
	dst, dm := region(t, connector.d, 0)
	if _, err := polling(t, func() error { return connector.Connect(other.Local()) }, connector, other); err != nil {
		t.Fatal(err)
	}
	other.d.poll.Lock()
	done := other.handshakeDone
	other.d.poll.Unlock()
	if !done {
		t.Fatal("the handshake has not arrived")
	}
	if err := other.Connect(connector.Local()); err != nil {
		t.Fatal(err)
	}
	if n, err := other.Post([]group.Work{{Op: group.OpWrite, Src: sm, Len: uint64(len(src)), RemoteAddr: dm.Base(), RemoteKey: dm.Key()}}); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	var polled []group.Completion
	for len(polled) == 0 {
		polled, _ = polling(t, func() error { return nil }, connector, other)
	}
	if polled[0].Status != group.StatusOK || !bytes.Equal(dst, src) {
		t.Errorf("the write ended as %+v", polled[0])
	}
}
