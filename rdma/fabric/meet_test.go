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

// strangers are two endpoints of two domains which do not know each other yet:
// knocker is the one whose Connect knocks, other the one it knocks at. The end of
// the test closes all.
func strangers(t *testing.T) (knocker, other *endpoint) {
	t.Helper()
	var ends [2]*endpoint
	for i := range ends {
		d := openDomain(t)
		if !d.quirks.connects {
			t.Skip("needs a provider with connections underneath")
		}
		e, err := d.NewEndpoint(uint64(i), rdma.ClassKV)
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = e.(*endpoint)
	}
	t.Cleanup(func() {
		// At once: what one still says to the other, the other has to hear.
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

// polling polls the endpoints' domains while do runs, at least once, and returns
// all completions and what do does.
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

// region registers memory full of a byte until the test ends.
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

// TestShutBeforeMet: what is posted before the peer has knocked waits, so that an
// endpoint which is shut then reads no source any more, although libfabric's is
// kept until the knock.
func TestShutBeforeMet(t *testing.T) {
	knocker, other := strangers(t)
	src, sm := region(t, other.d, 1)
	dst, dm := region(t, knocker.d, 0)
	if err := other.Connect(knocker.Local()); err != nil {
		t.Fatal(err)
	}
	if n, err := other.Post([]group.Work{{Op: group.OpWrite, Src: sm, Len: uint64(len(src)), RemoteAddr: dm.Base(), RemoteKey: dm.Key()}}); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	for range 1000 { // would be enough for a connection and the write
		if polled, _ := polling(t, func() error { return nil }, knocker, other); len(polled) > 0 {
			t.Fatalf("polled %+v before the knock", polled)
		}
	}
	other.Shut()
	copy(src, bytes.Repeat([]byte{0xCC}, len(src)))
	polled, err := polling(t, func() error { return knocker.Connect(other.Local()) }, knocker, other)
	if err != nil {
		t.Fatal(err)
	}
	if len(polled) == 0 || polled[0].Status != group.StatusBroken {
		t.Errorf("polled %+v, want the write as broken", polled)
	}
	if !bytes.Equal(dst, make([]byte, len(dst))) {
		t.Error("a write landed after its endpoint was shut")
	}
}

// TestEarlyKnock: a knock counts though the endpoint does not know its peer yet,
// and what is posted after Connect goes on its way.
func TestEarlyKnock(t *testing.T) {
	knocker, other := strangers(t)
	src, sm := region(t, other.d, 1)
	dst, dm := region(t, knocker.d, 0)
	if _, err := polling(t, func() error { return knocker.Connect(other.Local()) }, knocker, other); err != nil {
		t.Fatal(err)
	}
	other.d.poll.Lock()
	met := other.met
	other.d.poll.Unlock()
	if !met {
		t.Fatal("the knock was not seen")
	}
	if err := other.Connect(knocker.Local()); err != nil {
		t.Fatal(err)
	}
	if n, err := other.Post([]group.Work{{Op: group.OpWrite, Src: sm, Len: uint64(len(src)), RemoteAddr: dm.Base(), RemoteKey: dm.Key()}}); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	var polled []group.Completion
	for len(polled) == 0 {
		polled, _ = polling(t, func() error { return nil }, knocker, other)
	}
	if polled[0].Status != group.StatusOK || !bytes.Equal(dst, src) {
		t.Errorf("the write ended as %+v", polled[0])
	}
}
