package tcp

import (
	"errors"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
)

// TestWindowOfOnePeer: a window that names its peer takes that peer's writes and refuses
// those of another that has got hold of its Desc.
func TestWindowOfOnePeer(t *testing.T) {
	testkit.VerifyNone(t)
	ctx := testContext(t)
	server := newServer(t, Options{})
	named, other := closing(t, newEngine(t, Options{})), closing(t, newEngine(t, Options{}))
	dst, err := server.Register(make([]byte, 4096), rdma.RegisterOptions{Local: true})
	if err != nil {
		t.Fatal(err)
	}
	win, err := dst.Window(0, 4096, named.Addr().Engine)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		e       *Engine
		refused bool
	}{{named, false}, {other, true}, {named, false}} {
		if _, err := c.e.Connect(ctx, server.Addr(), rdma.Token(testToken)); err != nil {
			t.Fatal(err)
		}
		src, err := c.e.Register(make([]byte, 4096), rdma.RegisterOptions{Local: true})
		if err != nil {
			t.Fatal(err)
		}
		done := rdma.NewFlag()
		if err := c.e.Write(ctx, rdma.Write{Src: src, Dst: win.Desc(), Len: 4096, Done: done.Set}); err != nil {
			t.Fatal(err)
		}
		if err := done.Wait(ctx); c.refused != errors.Is(err, rdma.ErrRefused) || !c.refused && err != nil {
			t.Errorf("write ended with %v, refused should be %v", err, c.refused)
		}
	}
}
