package group_test

import (
	"bytes"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/simrdma"
)

// admitted is a network on which a write is admitted after at most admittedAfter, and its
// payload is placed at least that much later, even if its sender is gone by then.
var admitted = simrdma.FabricOptions{Delay: simrdma.Span{Min: 10 * time.Millisecond, Max: 12 * time.Millisecond}, GhostChance: 1, Pieces: 4}

const admittedAfter = 15 * time.Millisecond

// fire submits writes of all of dst and returns how to wait for their ends.
func fire(t *testing.T, e *group.Engine, dst rdma.Desc, count int) (wait func() (landed, refused int)) {
	t.Helper()
	src, mem := region(t, e, int(dst.Len), true)
	for i := range mem {
		mem[i] = 0xEE
	}
	var ended sync.WaitGroup
	var ok, no atomic.Int64
	for range count {
		ended.Add(1)
		err := e.Write(t.Context(), rdma.Write{Src: src, Dst: dst, Len: dst.Len, Imm: rdma.ImmOf(1), Done: func(err error) {
			defer ended.Done()
			if err == nil {
				ok.Add(1)
			} else if errors.Is(err, rdma.ErrRefused) {
				no.Add(1)
			}
		}})
		if err != nil {
			t.Fatal(err)
		}
	}
	return func() (int, int) {
		ended.Wait()
		return int(ok.Load()), int(no.Load())
	}
}

// untouched poisons the memory of a revoked window, lets everything arrive that is on its
// way, and fails the test if a byte has changed.
func untouched(t *testing.T, win rdma.Window) {
	t.Helper()
	poison := bytes.Repeat([]byte{0xA5}, len(win.Bytes()))
	copy(win.Bytes(), poison)
	time.Sleep(time.Minute) // of the bubble's time
	if !bytes.Equal(win.Bytes(), poison) {
		t.Error("bytes changed after Revoke had returned")
	}
}

// TestRevokeStranger: an engine that has the Desc of a window without being named writes
// nothing with it. Revoke does not ask that engine, so nothing of it may be on its way.
func TestRevokeStranger(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := fabricOf(t, 21, admitted)
				owner := start(t, f, "o", true, 2, k.nic, nil)
				named, stranger := start(t, f, "n", false, 2, k.nic, nil), start(t, f, "s", false, 2, k.nic, nil)
				connect(t, named, owner)
				connect(t, stranger, owner)
				dst, _ := region(t, owner, 1<<16, true)
				win, err := dst.Window(0, 1<<16, named.Addr().Engine)
				if err != nil {
					t.Fatal(err)
				}
				ended := fire(t, stranger, win.Desc(), 3)
				time.Sleep(admittedAfter)
				if err := win.Revoke(t.Context()); err != nil {
					t.Fatal(err)
				}
				untouched(t, win)
				if landed, refused := ended(); landed != 0 || refused != 3 {
					t.Errorf("of 3 writes of a stranger %d landed and %d were refused", landed, refused)
				}
			})
		})
	}
}
