package group_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/rdmatest/simrdma"
)

// slow is a network on which the payload of an accepted write is placed later, even if the
// write's sender is gone by then.
var slow = simrdma.FabricOptions{Delay: simrdma.Span{Min: 10 * time.Millisecond, Max: 12 * time.Millisecond}, GhostChance: 1, Pieces: 4}

// accepted waits until the targets have accepted the given number of writes since the counts
// before, or until ctx ends.
func accepted(ctx context.Context, f *simrdma.Fabric, before simrdma.Counts, writes int) {
	f.Await(ctx, func(c simrdma.Counts) bool { return c.Accepted >= before.Accepted+uint64(writes) })
}

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

// untouched poisons the memory of a revoked window, waits until no Work is on its way, and
// fails the test if a byte has changed. Works that are stuck behind an ended endpoint stay on
// their way, so the wait ends after a minute of the bubble's time.
func untouched(t *testing.T, f *simrdma.Fabric, win rdma.Window) {
	t.Helper()
	poison := bytes.Repeat([]byte{0xA5}, len(win.Bytes()))
	copy(win.Bytes(), poison)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	f.Await(ctx, func(c simrdma.Counts) bool { return c.Flying == 0 })
	if !bytes.Equal(win.Bytes(), poison) {
		t.Error("bytes changed after Revoke had returned")
	}
}

// TestRevokeStranger: an engine that has the Desc of a window but is not named in it cannot
// write with it. Revoke does not ask that engine, so none of its Works may be on its way.
func TestRevokeStranger(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := fabricOf(t, 21, slow)
				owner := start(t, f, "o", true, 2, k.nic, nil)
				named, stranger := start(t, f, "n", false, 2, k.nic, nil), start(t, f, "s", false, 2, k.nic, nil)
				connect(t, named, owner)
				connect(t, stranger, owner)
				dst, _ := region(t, owner, 1<<16, true)
				win, err := dst.Window(0, 1<<16, named.Addr().Engine)
				if err != nil {
					t.Fatal(err)
				}
				before := f.Counts()
				wait := fire(t, stranger, win.Desc(), 3)
				// The writes are refused. A write that is not refused is on its way now.
				ended, end := context.WithCancel(t.Context())
				var landed, refused int
				go func() {
					landed, refused = wait()
					end()
				}()
				accepted(ended, f, before, 1)
				if err := win.Revoke(t.Context()); err != nil {
					t.Fatal(err)
				}
				untouched(t, f, win)
				<-ended.Done()
				if landed != 0 || refused != 3 {
					t.Errorf("of 3 writes of an unknown peer %d arrived and %d were refused", landed, refused)
				}
			})
		})
	}
}

// TestRevokeSomePeers: of the peers of a window one answers, one is silent and one has gone.
// Revoke waits for the silent one once, and no write of the three lands later.
func TestRevokeSomePeers(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := fabricOf(t, 22, slow)
				owner := start(t, f, "o", true, 2, k.nic, nil)
				dst, _ := region(t, owner, 1<<16, true)
				var peers []*group.Engine
				var ids []rdma.EngineID
				for i := range 3 {
					p := start(t, f, fmt.Sprint("p", i), false, 2, k.nic, nil)
					connect(t, p, owner)
					peers, ids = append(peers, p), append(ids, p.Addr().Engine)
				}
				for _, names := range [][]rdma.EngineID{ids, nil} {
					win, err := dst.Window(0, 1<<16, names...)
					if err != nil {
						t.Fatal(err)
					}
					before := f.Counts()
					for _, p := range peers {
						fire(t, p, win.Desc(), 2)
					}
					accepted(t.Context(), f, before, len(peers))
					if names != nil {
						f.KillHost("p2")
						peers = peers[:2]
					}
					f.Part("o", "p1")
					begin := time.Now()
					if err := win.Revoke(t.Context()); err != nil {
						t.Fatal(err)
					}
					// RevokeTimeout is a second.
					if d := time.Since(begin); d > 1500*time.Millisecond {
						t.Errorf("revoked after %v", d)
					}
					untouched(t, f, win)
					f.Join("o", "p1")
				}
				if n := len(owner.Peers()); n < 2 {
					t.Errorf("%d sessions are left", n)
				}
			})
		})
	}
}

// lateShut is a Domain whose endpoints are shut only when open is closed.
type lateShut struct {
	group.Domain
	open chan struct{}
}

type lateShutEndpoint struct {
	group.Endpoint
	open chan struct{}
}

func (d lateShut) NewEndpoint(cookie uint64, class rdma.Class) (group.Endpoint, error) {
	e, err := d.Domain.NewEndpoint(cookie, class)
	return lateShutEndpoint{e, d.open}, err
}

func (e lateShutEndpoint) Shut() {
	<-e.open
	e.Endpoint.Shut()
}

// TestRevokeWhileSessionEnds: a session is ending, and its endpoints, through which the peer's
// payload still lands, are not shut yet. Revoke waits until they are.
func TestRevokeWhileSessionEnds(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := fabricOf(t, 23, slow)
				writer := start(t, f, "w", true, 1, k.nic, nil)
				nic := k.nic
				nic.Host, nic.Name = "o", "o/0"
				d, err := f.Open(nic)
				if err != nil {
					t.Fatal(err)
				}
				c, err := f.Control("o", false)
				if err != nil {
					t.Fatal(err)
				}
				shut := make(chan struct{})
				owner, err := group.New(t.Context(), group.Options{
					Provider: simrdma.Provider, Domains: []group.Domain{lateShut{d, shut}}, Control: c, MessageBuffers: 4,
				})
				if err != nil {
					t.Fatal(err)
				}
				defer owner.Close()
				connect(t, owner, writer)
				dst, _ := region(t, owner, 1<<16, true)
				win, err := dst.Window(0, 1<<16, writer.Addr().Engine)
				if err != nil {
					t.Fatal(err)
				}
				before := f.Counts()
				fire(t, writer, win.Desc(), 3)
				accepted(t.Context(), f, before, 1)
				owner.Disconnect(writer.Addr().Engine)
				time.AfterFunc(30*time.Second, func() { close(shut) })
				if err := win.Revoke(t.Context()); err != nil {
					t.Fatal(err)
				}
				untouched(t, f, win)
			})
		})
	}
}

// TestRevokeMany: more windows are revoked at once than a peer can hold withdrawals.
func TestRevokeMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fabricOf(t, 24, simrdma.FabricOptions{ControlDelay: simrdma.Span{Min: time.Second, Max: time.Second}})
		nic := simrdma.NICOptions{}.LikeSRD()
		patient := func(o *group.Options) { o.RevokeTimeout = time.Minute }
		owner, peer := start(t, f, "o", true, 1, nic, patient), start(t, f, "p", false, 1, nic, patient)
		connect(t, peer, owner)
		dst, _ := region(t, owner, 1<<16, true)
		for i := range uint64(20_000) {
			if _, err := dst.Window(i, 1, peer.Addr().Engine); err != nil {
				t.Fatal(err)
			}
		}
		if err := dst.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if n, st := len(owner.Peers()), peer.Stats(); n != 1 || st.MalformedFrames != 0 {
			t.Errorf("%d sessions, %d malformed frames", n, st.MalformedFrames)
		}
	})
}
