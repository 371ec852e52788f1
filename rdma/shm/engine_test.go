package shm

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/rdmatest"
)

// engine is an engine whose NICs a case may kill.
type engine struct {
	*group.Engine
	host   *host
	reopen sync.Mutex
	killed map[int]bool
}

// KillNIC implements rdmatest.NICKiller: the NIC dies and can't be opened again.
func (e *engine) KillNIC(i int) {
	e.reopen.Lock()
	e.killed[i] = true
	e.reopen.Unlock()
	e.host.mu.Lock()
	d := e.host.domains[i]
	e.host.mu.Unlock()
	d.fail(errors.New("killed by a test"))
}

// mayOpen returns an error if a NIC was killed.
func (e *engine) mayOpen(i int) error {
	e.reopen.Lock()
	defer e.reopen.Unlock()
	if e.killed[i] {
		return errors.New("killed by a test")
	}
	return nil
}

// provider is the provider under test. With space, sources are in it.
func provider(space *arena.Arena) rdmatest.Provider {
	p := rdmatest.Provider{NICs: 4, Uneven: true}
	p.Open = func(t testing.TB, c rdmatest.Config) rdma.Engine {
		o := Options{Pollers: c.NICs, Group: group.Options{
			Token: c.Token, InFlightOps: c.InFlightOps, InFlightBytes: c.InFlightBytes, EarlyImmediates: c.EarlyImmediates,
			OnPeerDown: c.OnPeerDown, IdleTimeout: c.IdleTimeout, Logger: c.Logger,
			HandshakeTimeout: time.Minute, // many engines run concurrently, each with a poller
		}}
		if c.IdleTimeout > 0 {
			o.Group.HeartbeatInterval = c.IdleTimeout / 4
		}
		if c.Listen {
			o.Listen = filepath.Join(t.TempDir(), "s")
		}
		if space != nil {
			o.Arenas = []*arena.Arena{space}
		}
		e := &engine{killed: make(map[int]bool)}
		var err error
		if e.Engine, e.host, err = start(t.Context(), o, e.mayOpen); err != nil {
			t.Fatal(err)
		}
		return e
	}
	if space != nil {
		p.Alloc = func(t testing.TB, n int) []byte { return take(t, space, n) }
	}
	return p
}

// TestConformance: sources in a shared arena, and sources in the memory of the
// process.
func TestConformance(t *testing.T) {
	testkit.Long(t, "the whole suite of rdma, several times")
	for _, shared := range []bool{true, false} {
		t.Run(fmt.Sprintf("shared=%v", shared), func(t *testing.T) {
			var space *arena.Arena
			if shared {
				space = openArena(t, 256<<20)
			}
			provider(space).Run(t)
		})
	}
}

// connected returns two engines with a session and the same arena, of which the first one listens.
func connected(t *testing.T, space *arena.Arena) (engines [2]*group.Engine, hosts [2]*host) {
	t.Helper()
	for i := range engines {
		o := Options{Arenas: []*arena.Arena{space}, Group: group.Options{Token: rdma.Token(testToken)}}
		if i == 0 {
			o.Listen = filepath.Join(t.TempDir(), "s")
		}
		var err error
		if engines[i], hosts[i], err = start(t.Context(), o, func(int) error { return nil }); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = engines[i].Close() })
	}
	if _, err := engines[1].Connect(t.Context(), engines[0].Addr(), rdma.Token(testToken)); err != nil {
		t.Fatal(err)
	}
	return engines, hosts
}

// TestNICComesBack: a domain that dies is replaced. The new domain has the arenas of the dead
// one, and waiting writes land.
func TestNICComesBack(t *testing.T) {
	testkit.VerifyNone(t)
	space := openArena(t, 4<<20)
	engines, hosts := connected(t, space)
	mem := space.Bytes()
	fill(1, mem[:2<<20])
	src, err := engines[1].Register(mem[:2<<20], rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	dst, err := engines[0].Register(mem[2<<20:], rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for round, h := range []*host{hosts[0], hosts[1], hosts[0]} {
		h.mu.Lock()
		d := h.domains[0]
		h.mu.Unlock()
		d.fail(errors.New("killed by a test"))
		clear(mem[2<<20:])
		// The key of the dead domain is invalid. A Desc made now has the key of the new one, or
		// none yet.
		err := rdma.ErrNoPeer
		for err != nil {
			landed := rdma.NewFlag()
			if err = engines[1].Write(t.Context(), rdma.Write{Src: src, Dst: dst.Desc(), Len: 2 << 20, Done: landed.Set}); err == nil {
				err = landed.Wait(t.Context())
			}
			if t.Context().Err() != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(mem[:2<<20], mem[2<<20:]) {
			t.Errorf("round %d: other bytes", round)
		}
	}
}

// TestUnreadableSourceError: a write whose source the peer can't read, but which the peer
// would otherwise accept, ends with the NIC's error. The next write lands.
func TestUnreadableSourceError(t *testing.T) {
	testkit.VerifyNone(t)
	space := openArena(t, 2<<20)
	engines, hosts := connected(t, space)
	for _, e := range *hosts[0].domains[0].live.Load() {
		e.forbid()
	}
	dst, err := engines[0].Register(make([]byte, 1<<20), rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	write := func(mem []byte) error {
		t.Helper()
		src, err := engines[1].Register(mem, rdma.RegisterOptions{Local: true})
		if err != nil {
			t.Fatal(err)
		}
		landed := rdma.NewFlag()
		if err := engines[1].Write(t.Context(), rdma.Write{Src: src, Dst: dst.Desc(), Len: uint64(len(mem)), Done: landed.Set}); err != nil {
			t.Fatal(err)
		}
		return landed.Wait(t.Context())
	}
	err = write(make([]byte, 1<<20))
	var refused *rdma.RefusedError
	if !errors.As(err, &refused) || refused.Reason != rdma.ReasonNone || !errors.Is(err, rdma.ErrRefused) || !strings.Contains(err.Error(), "Options.Shared") {
		t.Errorf("a source that the peer can't read: %v", err)
	}
	if err := write(space.Bytes()[:1<<20]); err != nil {
		t.Errorf("the next write: %v", err)
	}
}
