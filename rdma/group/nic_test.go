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
	"github.com/penstock-kv/penstock/rdma/rdmatest/simrdma"
)

// TestNICReturns: a dead NIC is replaced, and memory has a key on the replacement. A Desc made
// before still works over the remaining NIC.
func TestNICReturns(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := fabricOf(t, 7, simrdma.FabricOptions{Delay: simrdma.Span{Max: 50 * time.Microsecond}})
				server := start(t, f, "s", true, 2, k.nic, nil)
				client := start(t, f, "c", false, 2, k.nic, nil)
				connect(t, client, server)
				src, mem := region(t, server, 4<<20, true)
				dst, got := region(t, client, 4<<20, false)
				for i := range mem {
					mem[i] = byte(i * 7)
				}
				old := dst.Desc()
				f.KillNIC(simrdma.NICName("c", 0))
				if err := write(t, server, rdma.Write{Src: src, Dst: old, Len: 4 << 20}); err != nil {
					t.Fatal(err)
				}
				until(t, "the NIC's death", func() bool { return !client.NICs()[0].Up && client.NICs()[0].Reason != "" })
				dead := client.NICs()[0]
				f.RepairNIC(simrdma.NICName("c", 0))
				until(t, "the NIC's return", func() bool { return client.NICs()[0].Up })
				fresh := dst.Desc()
				if len(fresh.NICs) != 2 || client.NICs()[0].Addr == dead.Addr || client.NICs()[0].BytesIn != 0 {
					t.Errorf("NICs %+v, keys %+v", client.NICs(), fresh.NICs)
				}
				until(t, "both NICs of the sender", func() bool { return server.NICs()[0].Up && server.NICs()[1].Up })
				before := server.NICs()[0].BytesOut
				for _, d := range []rdma.Desc{old, fresh} {
					clear(got)
					if err := write(t, server, rdma.Write{Src: src, Dst: d, Len: 4 << 20, Imm: rdma.ImmOf(1)}); err != nil || !bytes.Equal(got, mem) {
						t.Fatalf("after the return: %v", err)
					}
				}
				if server.NICs()[0].BytesOut == before {
					t.Error("the new NIC carried no bytes")
				}
			})
		})
	}
}

// TestStaleDesc: a Desc that names only a NIC that was replaced is refused. A new Desc is not.
func TestStaleDesc(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := fabricOf(t, 8, simrdma.FabricOptions{})
				server := start(t, f, "s", true, 1, k.nic, nil)
				client := start(t, f, "c", false, 1, k.nic, nil)
				connect(t, client, server)
				src, _ := region(t, server, 1000, true)
				dst, _ := region(t, client, 1000, true)
				win, err := dst.Window(10, 100)
				if err != nil {
					t.Fatal(err)
				}
				old, addr := win.Desc(), client.NICs()[0].Addr
				f.KillNIC(simrdma.NICName("c", 0))
				f.RepairNIC(simrdma.NICName("c", 0))
				until(t, "the NIC's return", func() bool {
					n := client.NICs()[0]
					return n.Up && n.Addr != addr && win.Desc().NICs[len(win.Desc().NICs)-1].Addr == n.Addr
				})
				if err := write(t, server, rdma.Write{Src: src, Dst: win.Desc(), Len: 100}); err != nil {
					t.Fatalf("a new Desc: %v", err)
				}
				if err := write(t, server, rdma.Write{Src: src, Dst: old, Len: 100}); !errors.Is(err, rdma.ErrRefused) {
					t.Fatalf("a stale Desc: %v", err)
				}
			})
		})
	}
}

// TestLinkCut: a link that is down for a while delays transfers over it. A link that stays down
// ends the session within IdleTimeout and a round of the watch, although the control connection
// works.
func TestLinkCut(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := fabricOf(t, 17, simrdma.FabricOptions{Delay: simrdma.Span{Max: time.Millisecond}, GhostChance: 0.5})
				down := make(chan error, 1)
				server := start(t, f, "s", true, 1, k.nic, func(o *group.Options) { o.OnPeerDown = func(_ rdma.EngineID, err error) { down <- err } })
				client := start(t, f, "c", false, 1, k.nic, nil)
				connect(t, client, server)
				const n, count = 10000, 100
				src, mem := region(t, server, n+count, true)
				for i := range mem {
					mem[i] = byte(i * 13)
				}
				dst, got := region(t, client, n*count, false)
				cut, heal := func() { f.CutLink("s/0", "c/0") }, func() { f.HealLink("s/0", "c/0") }
				var wg sync.WaitGroup
				var died atomic.Int64
				submit := func(i int) {
					wg.Add(1)
					if err := server.Write(t.Context(), rdma.Write{Src: src, SrcOffset: uint64(i), Dst: dst.Desc(), DstOffset: uint64(i * n), Len: n, Imm: rdma.ImmOf(1), Done: func(err error) {
						if errors.Is(err, rdma.ErrPeerDied) {
							died.Add(1)
						} else if err != nil {
							t.Errorf("write %d: %v", i, err)
						}
						wg.Done()
					}}); err != nil {
						t.Fatal(err)
					}
				}
				for i := range count {
					if i == count/2 {
						cut()
					}
					submit(i)
				}
				time.Sleep(3 * time.Second) // of the bubble's time, less than IdleTimeout
				if len(server.Peers()) != 1 {
					t.Fatal("the session ended too early")
				}
				heal()
				wg.Wait()
				synctest.Wait()
				for i := range count {
					if !bytes.Equal(got[i*n:(i+1)*n], mem[i:i+n]) {
						t.Fatalf("write %d: other bytes", i)
					}
				}
				if c := client.Stats().ImmediatesIn; c != count || died.Load() != 0 {
					t.Fatalf("%d immediates for %d writes, %d of them failed", c, count, died.Load())
				}
				cut()
				begin := time.Now()
				submit(0)
				wg.Wait()
				if err := <-down; !errors.Is(err, rdma.ErrPeerDied) || died.Load() != 1 {
					t.Errorf("ended with %v, %d writes failed", err, died.Load())
				}
				if d := time.Since(begin); d < 9*time.Second || d > 15*time.Second {
					t.Errorf("ended after %v, with an IdleTimeout of 10 s", d)
				}
			})
		})
	}
}

// silentDomain is a Domain whose endpoints accept Works and never complete them.
type silentDomain struct {
	group.Domain
	on *atomic.Bool
}

// silentEndpoint holds posted Works while its domain is mute. Shut completes them.
type silentEndpoint struct {
	group.Endpoint
	on *atomic.Bool
	d  *silentPollDomain
}

// silentPollDomain returns from Poll the completions of its domain, and the completions that
// silentEndpoint has held back.
type silentPollDomain struct {
	silentDomain
	mu    sync.Mutex
	lost  map[*silentEndpoint][]uint64
	ready []group.Completion
}

func (d *silentPollDomain) NewEndpoint(cookie uint64, class rdma.Class) (group.Endpoint, error) {
	e, err := d.Domain.NewEndpoint(cookie, class)
	if err != nil {
		return nil, err
	}
	return &silentEndpoint{e, d.on, d}, nil
}

func (e *silentEndpoint) Post(works []group.Work) (int, error) {
	if !e.on.Load() {
		return e.Endpoint.Post(works)
	}
	e.d.mu.Lock()
	defer e.d.mu.Unlock()
	for _, w := range works {
		e.d.lost[e] = append(e.d.lost[e], w.Cookie)
	}
	return len(works), nil
}

func (e *silentEndpoint) Shut() {
	e.Endpoint.Shut()
	e.d.mu.Lock()
	defer e.d.mu.Unlock()
	for _, c := range e.d.lost[e] {
		e.d.ready = append(e.d.ready, group.Completion{Kind: group.KindDone, Status: group.StatusBroken, Cookie: c})
	}
	delete(e.d.lost, e)
	e.d.Wake()
}

func (d *silentPollDomain) Poll(dst []group.Completion) (int, error) {
	d.mu.Lock()
	n := copy(dst, d.ready)
	d.ready = d.ready[n:]
	d.mu.Unlock()
	k, err := d.Domain.Poll(dst[n:])
	return n + k, err
}

// TestStall: an endpoint on which Works do not complete is closed after StallTimeout, and its
// Works are sent over another.
func TestStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fabricOf(t, 18, simrdma.FabricOptions{})
		nic := simrdma.NICOptions{}.LikeRC()
		server := start(t, f, "s", true, 2, nic, nil)
		on := new(atomic.Bool)
		var domains []group.Domain
		for i := range 2 {
			o := nic
			o.Host, o.Name = "c", simrdma.NICName("c", i)
			d, err := f.Open(o)
			if err != nil {
				t.Fatal(err)
			}
			domains = append(domains, d)
		}
		domains[0] = &silentPollDomain{silentDomain: silentDomain{domains[0], on}, lost: make(map[*silentEndpoint][]uint64)}
		c, err := f.Control("c", false)
		if err != nil {
			t.Fatal(err)
		}
		client, err := group.New(t.Context(), group.Options{Provider: simrdma.Provider, Domains: domains, Control: c, StallTimeout: 3 * time.Second, MessageBuffers: 4})
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		connect(t, client, server)
		src, _ := region(t, client, 1000, true)
		dst, _ := region(t, server, 1000, false)
		on.Store(true)
		begin := time.Now()
		for i := range 10 {
			if i == 9 {
				on.Store(false)
			}
			if err := write(t, client, rdma.Write{Src: src, Dst: dst.Desc(), Len: 1000, Imm: rdma.ImmOf(1)}); err != nil {
				t.Fatal(err)
			}
		}
		if d := time.Since(begin); d < 3*time.Second {
			t.Errorf("nothing stalled in %v", d)
		}
		synctest.Wait()
		if n := server.Stats().ImmediatesIn; n != 10 {
			t.Errorf("%d immediates for 10 writes", n)
		}
	})
}
