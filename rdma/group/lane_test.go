package group_test

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/rdmatest/simrdma"
)

// TestMessagesPassWrites sends messages after large writes, over one and several NICs of
// each kind. The messages must arrive before the writes that were still in the lanes'
// queues: only writes that were posted to the NIC may end before them.
func TestMessagesPassWrites(t *testing.T) {
	const depth = 4
	for _, k := range kinds {
		for _, nics := range []int{1, 2} {
			t.Run(fmt.Sprintf("%s, %d NICs", k.name, nics), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					// Each packet takes a millisecond, and few Works are posted at a time.
					f := fabricOf(t, 3, simrdma.FabricOptions{Delay: simrdma.Span{Min: time.Millisecond, Max: time.Millisecond}})
					nic := k.nic
					nic.QueueDepth = depth
					small := func(o *group.Options) { o.PieceBytes = 64 << 10 }
					a, b := start(t, f, "a", true, nics, nic, small), start(t, f, "b", false, nics, nic, small)
					connect(t, b, a)
					// With one NIC, each write is one Work; with two, each gets pieces of it.
					const size, writes, messages = 4 << 20, 12, 3
					dst, _ := region(t, a, writes*size, false)
					src, _ := region(t, b, size, true)
					var mu sync.Mutex
					var order []string
					note := func(what string) {
						mu.Lock()
						order = append(order, what)
						mu.Unlock()
					}
					if err := a.Recv(16, 1<<10, func(_ rdma.EngineID, msg []byte) { note(string(msg)) }); err != nil {
						t.Fatal(err)
					}
					var ended sync.WaitGroup
					for i := range writes {
						ended.Add(1)
						err := b.Write(t.Context(), rdma.Write{Src: src, Dst: dst.Desc(), DstOffset: uint64(i * size), Len: size, Done: func(err error) {
							if err != nil {
								t.Error(err)
							}
							note("write")
							ended.Done()
						}})
						if err != nil {
							t.Fatal(err)
						}
					}
					for i := range messages {
						ended.Add(1)
						err := b.Send(t.Context(), a.Addr().Engine, fmt.Appendf(nil, "message %d", i), func(err error) {
							if err != nil {
								t.Error(err)
							}
							ended.Done()
						})
						if err != nil {
							t.Fatal(err)
						}
					}
					ended.Wait()
					mu.Lock()
					defer mu.Unlock()
					before := slices.Index(order, fmt.Sprintf("message %d", messages-1)) - (messages - 1)
					if len(order) != writes+messages || before < 0 || before > depth {
						t.Errorf("arrived and ended in this order: %q", order)
					}
				})
			})
		}
	}
}

// TestTailsPassWrites: the last bytes of a large write are sent with its immediate after the
// rest of the write is in place. They must not wait for all writes that are queued by then: the
// first write ends before half of the writes have ended.
func TestTailsPassWrites(t *testing.T) {
	for _, k := range kinds {
		for _, nics := range []int{1, 2} {
			t.Run(fmt.Sprintf("%s, %d NICs", k.name, nics), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					f := fabricOf(t, 4, simrdma.FabricOptions{Delay: simrdma.Span{Min: time.Millisecond, Max: time.Millisecond}})
					small := func(o *group.Options) { o.PieceBytes = 64 << 10 }
					a, b := start(t, f, "a", true, nics, k.nic, small), start(t, f, "b", false, nics, k.nic, small)
					connect(t, b, a)
					const size, writes = 2 << 20, 12
					dst, _ := region(t, a, writes*size, false)
					src, _ := region(t, b, size, true)
					begin := time.Now()
					ends := make(chan time.Duration, writes)
					for i := range writes {
						err := b.Write(t.Context(), rdma.Write{Src: src, Dst: dst.Desc(), DstOffset: uint64(i * size), Len: size, Imm: rdma.ImmOf(1), Done: func(err error) {
							if err != nil {
								t.Error(err)
							}
							ends <- time.Since(begin)
						}})
						if err != nil {
							t.Fatal(err)
						}
					}
					first := <-ends
					last := first
					for range writes - 1 {
						last = max(last, <-ends)
					}
					if first > last/2 {
						t.Errorf("the first of %d writes ended after %v, the last after %v", writes, first, last)
					}
				})
			})
		}
	}
}
