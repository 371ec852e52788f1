package group_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/rdmatest/simrdma"
)

var testToken = rdma.Token("a token for the tests of group")

// start starts an engine on a host of the fabric, with NICs of one kind.
func start(t testing.TB, f *simrdma.Fabric, name string, listen bool, nics int, nic simrdma.NICOptions, change func(*group.Options)) *group.Engine {
	t.Helper()
	o := simrdma.Options{Fabric: f, Host: name, Listen: listen, Group: group.Options{Token: testToken, MessageBuffers: 16}}
	for range nics {
		o.NICs = append(o.NICs, nic)
	}
	if change != nil {
		change(&o.Group)
	}
	e, err := simrdma.New(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Errorf("close %s: %v", name, err)
		}
	})
	return e
}

// connect joins two engines.
func connect(t testing.TB, from, to *group.Engine) {
	t.Helper()
	if _, err := from.Connect(t.Context(), to.Addr(), testToken); err != nil {
		t.Fatal(err)
	}
}

// region registers n bytes.
func region(t testing.TB, e rdma.Engine, n int, local bool) (rdma.Region, []byte) {
	t.Helper()
	mem := make([]byte, n)
	r, err := e.Register(mem, rdma.RegisterOptions{Local: local})
	if err != nil {
		t.Fatal(err)
	}
	return r, mem
}

// write performs one write.
func write(t testing.TB, e rdma.Engine, w rdma.Write) error {
	t.Helper()
	f := rdma.NewFlag()
	w.Done = f.Set
	if err := e.Write(t.Context(), w); err != nil {
		return err
	}
	return f.Wait(t.Context())
}

// until waits for ok inside a synctest bubble.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for range 1000 {
		if ok() {
			return
		}
		time.Sleep(10 * time.Millisecond) // of the bubble's time
	}
	t.Fatalf("%s: not in ten seconds", what)
}

// TestOnPost: OnPost is called before the NIC has the Work, and not when there is no Work to
// post.
func TestOnPost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fabricOf(t, 9, simrdma.FabricOptions{})
		a := start(t, f, "a", true, 1, kinds[0].nic, nil)
		var posts, ended atomic.Int64
		b := start(t, f, "b", false, 1, kinds[0].nic, func(o *group.Options) {
			o.OnPost = func() {
				if posts.Add(1) != ended.Load()+1 {
					t.Error("a post after the end of its write")
				}
			}
		})
		connect(t, b, a)
		dst, _ := region(t, a, 1<<10, false)
		src, _ := region(t, b, 1<<10, true)
		for range 3 {
			if err := write(t, b, rdma.Write{Src: src, Dst: dst.Desc(), Len: 1 << 10}); err != nil {
				t.Fatal(err)
			}
			ended.Add(1)
		}
		if err := write(t, b, rdma.Write{Src: src, Dst: dst.Desc(), DstOffset: 1, Len: 1 << 10}); err == nil {
			t.Error("a write past the end was accepted")
		}
		if n := posts.Load(); n != 3 {
			t.Errorf("%d posts for 3 writes and one that is refused before", n)
		}
	})
}

// TestUnconfirmedRevocation: if a peer does not confirm that it withdrew a key, its endpoints
// are shut. Revoke ends in time, nothing lands after it, and the session continues when the
// peer is reachable again.
func TestUnconfirmedRevocation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fabricOf(t, 9, simrdma.FabricOptions{Delay: simrdma.Span{Max: time.Millisecond}, GhostChance: 0.9, Pieces: 8})
		nic := simrdma.NICOptions{}.LikeSRD()
		server := start(t, f, "s", true, 2, nic, nil)
		client := start(t, f, "c", false, 2, nic, nil)
		connect(t, client, server)
		src, _ := region(t, server, 1<<20, true)
		dst, mem := region(t, client, 1<<20, true)
		win, err := dst.Window(0, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		var refused, landed, other atomic.Int64
		var wg sync.WaitGroup
		for range 64 {
			wg.Add(1)
			err := server.Write(t.Context(), rdma.Write{Src: src, Dst: win.Desc(), Len: 1 << 20, Imm: rdma.ImmOf(1), Done: func(err error) {
				switch {
				case err == nil:
					landed.Add(1)
				case errors.Is(err, rdma.ErrRefused):
					refused.Add(1)
				default:
					other.Add(1)
				}
				wg.Done()
			}})
			if err != nil {
				t.Fatal(err)
			}
		}
		f.Part("s", "c")
		begin := time.Now()
		if err := win.Revoke(t.Context()); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(begin); d < time.Second || d > 2*time.Second {
			t.Errorf("revoked after %v, with a RevokeTimeout of 1 s", d)
		}
		poison := bytes.Repeat([]byte{0xA5}, 1<<20)
		copy(mem, poison)
		counted := client.Stats().ImmediatesIn
		time.Sleep(time.Second)
		f.Join("s", "c")
		wg.Wait()
		if !bytes.Equal(mem, poison) {
			t.Error("bytes changed after Revoke had returned")
		}
		if n := client.Stats().ImmediatesIn; n != counted || int64(n) != landed.Load() || other.Load() != 0 {
			t.Errorf("%d immediates counted before, %d after; %d writes arrived, %d were refused, %d ended otherwise", counted, n, landed.Load(), refused.Load(), other.Load())
		}
		again, _ := region(t, client, 1000, false)
		if err := write(t, server, rdma.Write{Src: src, Dst: again.Desc(), Len: 1000}); err != nil {
			t.Errorf("the session does not continue: %v", err)
		}
	})
}

// TestRevokeContactsItsPeer: revoking a window that names its peer contacts no other peer, although
// another peer is silent and would delay the revocation.
func TestRevokeContactsItsPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fabricOf(t, 11, simrdma.FabricOptions{Delay: simrdma.Span{Max: time.Millisecond}})
		nic := simrdma.NICOptions{}.LikeSRD()
		late := func(o *group.Options) { o.RevokeTimeout, o.IdleTimeout = time.Hour, 3*time.Hour }
		server := start(t, f, "s", true, 1, nic, late)
		writer := start(t, f, "w", false, 1, nic, late)
		connect(t, writer, server)
		for i := range 8 {
			name := fmt.Sprintf("stranger%d", i)
			stranger := start(t, f, name, false, 1, nic, late)
			connect(t, stranger, server)
			f.Part("s", name)
			defer f.Join("s", name)
		}
		dst, _ := region(t, server, 1<<20, true)
		src, _ := region(t, writer, 1<<20, true)
		begin := time.Now()
		for range 10 {
			win, err := dst.Window(0, 1<<20, writer.Addr().Engine)
			if err != nil {
				t.Fatal(err)
			}
			if err := write(t, writer, rdma.Write{Src: src, Dst: win.Desc(), Len: 1 << 20}); err != nil {
				t.Fatal(err)
			}
			if err := win.Revoke(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := write(t, writer, rdma.Write{Src: src, Dst: win.Desc(), Len: 1}); !errors.Is(err, rdma.ErrRefused) {
				t.Errorf("a write to a revoked window: %v", err)
			}
		}
		if d := time.Since(begin); d >= time.Hour {
			t.Errorf("10 windows were revoked after %v: a peer that never saw their keys was waited for", d)
		}
	})
}

// TestWindowsByPart: a part for which a NIC makes no window, because it is too long or device
// memory, is registered separately and is isolated as a window is.
func TestWindowsByPart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fabricOf(t, 12, simrdma.FabricOptions{})
		nic := simrdma.NICOptions{}.LikeRC()
		nic.WindowMax = 1000
		server := start(t, f, "s", true, 2, nic, nil)
		client := start(t, f, "c", false, 2, nic, nil)
		connect(t, client, server)
		src, want := region(t, client, 4096, true)
		for i := range want {
			want[i] = byte(i)
		}
		dst, mem := region(t, server, 4096, false) // the region's own key gives access to more than 1000 bytes
		if err := write(t, client, rdma.Write{Src: src, Dst: dst.Desc(), Len: 4096}); err != nil || !bytes.Equal(mem, want) {
			t.Errorf("all of a long region: %v", err)
		}
		for _, n := range []uint64{1000, 1001} {
			win, err := dst.Window(100, n)
			if err != nil {
				t.Fatal(err)
			}
			if err := write(t, client, rdma.Write{Src: src, SrcOffset: 7, Dst: win.Desc(), Len: n}); err != nil || !bytes.Equal(mem[100:100+n], want[7:7+n]) {
				t.Errorf("window of %d bytes: %v", n, err)
			}
			beyond := win.Desc()
			beyond.Len++
			if err := write(t, client, rdma.Write{Src: src, Dst: beyond, DstOffset: n, Len: 1}); !errors.Is(err, rdma.ErrRefused) {
				t.Errorf("behind a window of %d bytes: %v", n, err)
			}
			if err := win.Revoke(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := write(t, client, rdma.Write{Src: src, Dst: win.Desc(), Len: 1}); !errors.Is(err, rdma.ErrRefused) {
				t.Errorf("a revoked window of %d bytes: %v", n, err)
			}
		}
	})
}

// TestManyImmediates: more immediates than tallies hold are each counted once, although NICs
// die during the test.
func TestManyImmediates(t *testing.T) {
	testkit.Long(t, "20,000 immediates on each kind of simulated NIC")
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := fabricOf(t, 10, simrdma.FabricOptions{Delay: simrdma.Span{Max: 20 * time.Microsecond}, GhostChance: 0.5, RepeatChance: 0.2})
				server := start(t, f, "s", true, 2, k.nic, func(o *group.Options) { o.EarlyImmediates = 1 << 20 })
				client := start(t, f, "c", false, 2, k.nic, nil)
				connect(t, client, server)
				src, _ := region(t, client, 100, true)
				dst, _ := region(t, server, 100, false)
				const count = 20000
				var wg sync.WaitGroup
				for i := range uint32(count) {
					if i%6000 == 3000 {
						name := simrdma.NICName([]string{"s", "c"}[i/6000%2], int(i/6000)%2)
						f.KillNIC(name)
						f.RepairNIC(name)
					}
					wg.Add(1)
					if err := client.Write(t.Context(), rdma.Write{Src: src, Dst: dst.Desc(), Len: uint64(i%2) * 100, Imm: rdma.ImmOf(i / 3), Done: func(err error) {
						if err != nil {
							t.Errorf("write %d: %v", i, err)
						}
						wg.Done()
					}}); err != nil {
						t.Fatal(err)
					}
				}
				wg.Wait()
				until(t, "the last immediate", func() bool { return server.Stats().ImmediatesIn >= count })
				synctest.Wait()
				if n := server.Stats().ImmediatesIn; n != count {
					t.Errorf("%d immediates for %d writes", n, count)
				}
				for v := range uint32(count / 3) {
					x := rdma.NewFlag()
					if _, err := server.ExpectImm(rdma.Expect{Imm: v, Count: 3, Done: x.Set}); err != nil {
						t.Fatal(err)
					}
					if ok, _ := x.Poll(); !ok {
						t.Fatalf("immediate %d was counted less than three times", v)
					}
				}
			})
		})
	}
}

// TestMessageFlood: several peers send more messages than the NIC has buffers. Each message
// arrives once, or is refused because no receive buffer is free.
func TestMessageFlood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fabricOf(t, 11, simrdma.FabricOptions{Delay: simrdma.Span{Max: time.Millisecond}, GhostChance: 0.5})
		nic := simrdma.NICOptions{}.LikeSRD()
		server := start(t, f, "s", true, 2, nic, func(o *group.Options) { o.MessageBuffers = 2 })
		const peers, each = 4, 200
		var mu sync.Mutex
		got := make(map[string]int)
		if err := server.Recv(8, 100, func(from rdma.EngineID, msg []byte) {
			mu.Lock()
			defer mu.Unlock()
			got[from.String()+string(msg)]++
		}); err != nil {
			t.Fatal(err)
		}
		var taken, refused atomic.Int64
		var wg sync.WaitGroup
		for i := range peers {
			c := start(t, f, fmt.Sprint("c", i), false, 2, nic, nil)
			connect(t, c, server)
			wg.Go(func() {
				for k := range each {
					wg.Add(1)
					if err := c.Send(t.Context(), server.Addr().Engine, fmt.Append(nil, k), func(err error) {
						switch {
						case err == nil:
							taken.Add(1)
						case errors.Is(err, rdma.ErrRefused):
							refused.Add(1)
						default:
							t.Errorf("message: %v", err)
						}
						wg.Done()
					}); err != nil {
						t.Errorf("send: %v", err)
						wg.Done()
					}
					if i == 0 && k == each/2 {
						f.KillNIC(simrdma.NICName("s", 0))
					}
				}
			})
		}
		wg.Wait()
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		if taken.Load()+refused.Load() != peers*each || len(got) != int(taken.Load()) {
			t.Errorf("%d accepted, %d refused, %d different ones arrived", taken.Load(), refused.Load(), len(got))
		}
		for m, n := range got {
			if n != 1 {
				t.Errorf("%q arrived %d times", m, n)
			}
		}
	})
}

// TestNewFails: New closes its domains and its listener when it fails.
func TestNewFails(t *testing.T) {
	f := fabricOf(t, 16, simrdma.FabricOptions{})
	c, err := group.TCP(t.Context(), "127.0.0.1:0", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, o := range map[string]group.Options{
		"no token":       {},
		"short token":    {Token: rdma.Token("short")},
		"messages":       {Token: testToken, MaxMessage: 1 << 20},
		"ended context":  {Token: testToken},
		"no memory":      {Token: testToken, Alloc: func(int) ([]byte, func(), error) { return nil, nil, errors.New("no memory") }},
		"a bad interval": {Token: testToken, HeartbeatInterval: 1},
	} {
		ctx := t.Context()
		if name == "ended context" {
			ctx = ended
		}
		d, err := f.Open(simrdma.NICOptions{Host: name, Name: name, MaxMessage: 128 << 10}.LikeRC())
		if err != nil {
			t.Fatal(err)
		}
		o.Provider, o.Domains, o.Control = "sim", []group.Domain{d}, c
		if e, err := group.New(ctx, o); err == nil {
			t.Errorf("%s: New succeeded", name)
			_ = e.Close()
		}
		// The name is free again only if the domain was closed.
		again, err := f.Open(simrdma.NICOptions{Host: name, Name: name}.LikeRC())
		if err != nil {
			t.Fatalf("%s: the domain was not closed: %v", name, err)
		}
		if err := again.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := net.Dial("tcp", c.Addr); err == nil {
		t.Error("the listener was not closed")
	}
}
