//go:build fabric && cgo && linux

package fabric

import (
	"sync"
	"testing"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// A write allocates nothing, from Post to the completions on both sides. A closure on this
// path, or an event that is copied, would break that.
func TestWriteAllocatesNothing(t *testing.T) {
	a, b := openDomain(t), openDomain(t)
	t.Cleanup(func() {
		// Poll both concurrently, because each must receive the other's frames.
		var closing sync.WaitGroup
		for _, d := range []*domain{a, b} {
			closing.Go(func() {
				if err := d.Close(); err != nil {
					t.Error(err)
				}
			})
		}
		closing.Wait()
	})
	dst := make([]group.Completion, 16)
	polled := func(d *domain) (n int) {
		n, err := d.Poll(dst)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	ea, eb := joined(t, a, b, func() { polled(a); polled(b) })
	_, ma := region(t, a, 0)
	_, mb := region(t, b, 0)
	works := []group.Work{{Op: group.OpWriteImm, Imm: 1, Src: ma, Len: 4096, RemoteAddr: mb.Base(), RemoteKey: mb.Key()}}
	if n := testing.AllocsPerRun(200, func() {
		if n, err := ea.Post(works); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		for done, counted := 0, 0; done == 0 || counted == 0; {
			done, counted = done+polled(a), counted+polled(b)
		}
	}); n != 0 {
		t.Errorf("%v allocations a write", n)
	}
	for _, e := range []group.Endpoint{ea, eb} {
		e.Shut()
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
}

// joined connects two endpoints while poll is called.
func joined(t *testing.T, a, b *domain, poll func()) (ea, eb group.Endpoint) {
	t.Helper()
	ea, err := a.NewEndpoint(1, rdma.ClassKV)
	if err != nil {
		t.Fatal(err)
	}
	eb, err = b.NewEndpoint(2, rdma.ClassKV)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 2)
	go func() { ended <- ea.Connect(eb.Local()) }()
	go func() { ended <- eb.Connect(ea.Local()) }()
	for left := 2; left > 0; poll() {
		select {
		case err := <-ended:
			if err != nil {
				t.Fatal(err)
			}
			left--
		default:
		}
	}
	return ea, eb
}
