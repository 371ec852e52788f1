package group_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
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
			t.Error("a write past the end was taken")
		}
		if n := posts.Load(); n != 3 {
			t.Errorf("%d posts for 3 writes and one that is refused before", n)
		}
	})
}

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
			t.Errorf("%d immediates counted before, %d after; %d writes landed, %d were refused, %d ended otherwise", counted, n, landed.Load(), refused.Load(), other.Load())
		}
		again, _ := region(t, client, 1000, false)
		if err := write(t, server, rdma.Write{Src: src, Dst: again.Desc(), Len: 1000}); err != nil {
			t.Errorf("the session does not continue: %v", err)
		}
	})
}

// TestRevokeAsksItsPeer: revoking a window that names its peer asks no other peer, although
// another peer is silent and would delay the revocation.
func TestRevokeAsksItsPeer(t *testing.T) {
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
			t.Errorf("%d taken, %d refused, %d different ones arrived", taken.Load(), refused.Load(), len(got))
		}
		for m, n := range got {
			if n != 1 {
				t.Errorf("%q arrived %d times", m, n)
			}
		}
	})
}

// TestMaxPeers: one session beyond MaxPeers is refused with the reason.
func TestMaxPeers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fabricOf(t, 12, simrdma.FabricOptions{})
		server := start(t, f, "s", true, 1, kinds[0].nic, func(o *group.Options) { o.MaxPeers = 2 })
		for i := range 2 {
			connect(t, start(t, f, fmt.Sprint("c", i), false, 1, kinds[0].nic, nil), server)
		}
		late := start(t, f, "late", false, 1, kinds[0].nic, nil)
		if _, err := late.Connect(t.Context(), server.Addr(), testToken); !errors.Is(err, rdma.ErrBusy) {
			t.Fatalf("the third of two: %v", err)
		}
	})
}

// TestKindsDiffer: engines whose NICs have different guarantees do not connect.
func TestKindsDiffer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := fabricOf(t, 13, simrdma.FabricOptions{})
		server := start(t, f, "s", true, 1, simrdma.NICOptions{}.LikeRC(), nil)
		client := start(t, f, "c", false, 1, simrdma.NICOptions{}.LikeSRD(), nil)
		if _, err := client.Connect(t.Context(), server.Addr(), testToken); !errors.Is(err, rdma.ErrUnsupported) {
			t.Fatal(err)
		}
	})
}

// controls returns transports for sessions; each has the listener's and the dialer's side.
func controls(t *testing.T) map[string][2]group.Control {
	t.Helper()
	out := make(map[string][2]group.Control)
	pair := func(name string, listen, dial func() (group.Control, error)) {
		l, err := listen()
		if err != nil {
			t.Fatal(err)
		}
		d, err := dial()
		if err != nil {
			t.Fatal(err)
		}
		out[name] = [2]group.Control{l, d}
	}
	ctx := t.Context()
	pair("tcp", func() (group.Control, error) { return group.TCP(ctx, "127.0.0.1:0", "", nil) },
		func() (group.Control, error) { return group.TCP(ctx, "", "", nil) })
	path := filepath.Join(t.TempDir(), "engine.sock")
	pair("unix", func() (group.Control, error) { return group.Unix(ctx, path) }, func() (group.Control, error) { return group.Unix(ctx, "") })
	serverTLS, clientTLS := selfSigned(t)
	pair("tls", func() (group.Control, error) { return group.TCP(ctx, "127.0.0.1:0", "", serverTLS) },
		func() (group.Control, error) { return group.TCP(ctx, "", "", clientTLS) })
	return out
}

// TestControls: sessions begin over TCP, with and without TLS, and over a unix
// socket, in real time.
func TestControls(t *testing.T) {
	for name, c := range controls(t) {
		t.Run(name, func(t *testing.T) {
			f := fabricOf(t, 14, simrdma.FabricOptions{})
			open := func(host string, c group.Control) *group.Engine {
				d, err := f.Open(simrdma.NICOptions{Host: host, Name: host}.LikeRC())
				if err != nil {
					t.Fatal(err)
				}
				e, err := group.New(t.Context(), group.Options{Provider: "sim", Domains: []group.Domain{d}, Control: c, Token: testToken})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() {
					if err := e.Close(); err != nil {
						t.Error(err)
					}
				})
				return e
			}
			server, client := open("s"+name, c[0]), open("c"+name, c[1])
			connect(t, client, server)
			src, _ := region(t, client, 1000, true)
			dst, _ := region(t, server, 1000, false)
			if err := write(t, client, rdma.Write{Src: src, Dst: dst.Desc(), Len: 1000, Imm: rdma.ImmOf(1)}); err != nil {
				t.Fatal(err)
			}
			if name != "tls" {
				return
			}
			plain, err := group.TCP(t.Context(), "", "", nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := open("plain", plain).Connect(t.Context(), server.Addr(), testToken); !errors.Is(err, rdma.ErrAuth) || !strings.Contains(err.Error(), "TLS") {
				t.Errorf("without TLS: %v", err)
			}
			stranger, err := group.TCP(t.Context(), "", "", &tls.Config{})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := open("stranger", stranger).Connect(t.Context(), server.Addr(), testToken); !errors.Is(err, rdma.ErrAuth) {
				t.Errorf("with another authority: %v", err)
			}
		})
	}
}

// TestIntruders: connections that send nothing, close, send invalid bytes or do not hold the
// token are refused, and other sessions are not affected.
func TestIntruders(t *testing.T) {
	c, err := group.TCP(t.Context(), "127.0.0.1:0", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	f := fabricOf(t, 15, simrdma.FabricOptions{})
	d, err := f.Open(simrdma.NICOptions{Host: "s", Name: "s"}.LikeRC())
	if err != nil {
		t.Fatal(err)
	}
	server, err := group.New(t.Context(), group.Options{Provider: "sim", Domains: []group.Domain{d}, Control: c, Token: testToken, HandshakeTimeout: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	for name, say := range map[string][]byte{"silent": {}, "nonsense": bytes.Repeat([]byte("GET / HTTP/1.1\r\n"), 20), "half a hello": []byte("PGD1")} {
		nc, err := net.Dial("tcp", c.Addr)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := nc.Write(say); err != nil {
			t.Fatal(err)
		}
		// The engine closes the connection, at the latest after HandshakeTimeout.
		if _, err := io.Copy(io.Discard, nc); err != nil && !strings.Contains(err.Error(), "reset") {
			t.Errorf("%s: %v", name, err)
		}
		nc.Close()
	}
	if n := server.Stats().AuthFailures; n != 3 {
		t.Errorf("%d failures counted", n)
	}
	if nc, err := net.Dial("tcp", c.Addr); err != nil {
		t.Fatal(err)
	} else {
		nc.Close()
	}
	if len(server.Peers()) != 0 {
		t.Error("there is a session")
	}
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
				time.Sleep(3 * time.Second)
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
					t.Fatalf("%d immediates for %d writes, %d of them died", c, count, died.Load())
				}
				cut()
				begin := time.Now()
				submit(0)
				wg.Wait()
				if err := <-down; !errors.Is(err, rdma.ErrPeerDied) || died.Load() != 1 {
					t.Errorf("ended with %v, %d writes died", err, died.Load())
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

// silentPollDomain adds the held completions to those that Poll returns.
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
