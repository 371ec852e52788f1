package inbox

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/penstock-kv/penstock/rdma"
)

// TestInbox: a buffer holds one message at a time, and returns to the pool when its handler has
// returned.
func TestInbox(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, err := New(2, 4)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		hold := make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			p.Run(ctx, func(from rdma.EngineID, msg []byte) {
				got = append(got, string(from[:1])+string(msg))
				<-hold
			})
		}()
		for _, m := range []string{"one", "two"} {
			b := p.Take()
			p.Deliver(rdma.EngineID{'>'}, b[:copy(b, m)])
		}
		synctest.Wait()
		if p.Take() != nil {
			t.Fatal("a third buffer")
		}
		hold <- struct{}{}
		synctest.Wait()
		b := p.Take()
		if len(b) != p.Size() || len(got) != 2 || got[0] != ">one" || got[1] != ">two" {
			t.Errorf("buffer of %d bytes, handled %v", len(b), got)
		}
		p.Give(b[:1])
		close(hold)
		cancel()
		<-ended
	})
	for _, c := range [][2]int{{0, 1}, {1, 0}, {MaxCount + 1, 1}, {1, MaxSize + 1}, {MaxCount, MaxSize}} {
		if _, err := New(c[0], c[1]); !errors.Is(err, rdma.ErrRange) {
			t.Errorf("%d buffers of %d bytes: %v", c[0], c[1], err)
		}
	}
}
