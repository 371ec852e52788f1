//go:build verbs && cgo && linux

package verbs

import (
	"errors"
	"flag"
	"sync"
	"testing"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/rdmatest"
)

// full runs the conformance suite at its full size, which takes minutes on emulated CPUs.
var full = flag.Bool("verbs.full", false, "run the conformance suite of engines at its full size")

// errKilled is the reason of a killed NIC in a test.
var errKilled = errors.New("killed by the test")

// killable is an engine whose NICs can be killed. A killed NIC dies and cannot be opened again.
type killable struct {
	*group.Engine

	mu      sync.Mutex
	domains map[int]*domain
	killed  map[int]bool
	// watched: firstPost is called before each Post.
	watched   bool
	firstPost func()
}

// KillNIC implements rdmatest.NICKiller.
func (k *killable) KillNIC(i int) {
	k.mu.Lock()
	k.killed[i] = true
	d := k.domains[i]
	k.mu.Unlock()
	d.mu.Lock()
	d.doomLocked(errKilled)
	d.mu.Unlock()
	d.Wake()
}

// open opens NIC i unless it was killed.
func (k *killable) open(i int, n NICOptions) (port, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.killed[i] {
		return nil, errKilled
	}
	d, err := open(n)
	if err != nil {
		return nil, err
	}
	k.domains[i] = d
	if k.watched {
		return &watchedPort{domain: d, k: k}, nil
	}
	return d, nil
}

// watched, as group.Options.Detail, makes startEngine watch posts.
const watched = "watched"

// watchedPort calls firstPost before each Post.
type watchedPort struct {
	*domain
	k *killable
}

// NewEndpoint implements group.Domain.
func (p *watchedPort) NewEndpoint(cookie uint64, class rdma.Class) (group.Endpoint, error) {
	e, err := p.domain.NewEndpoint(cookie, class)
	if err != nil {
		return nil, err
	}
	return &watchedEndpoint{e, p.k}, nil
}

type watchedEndpoint struct {
	group.Endpoint
	k *killable
}

// Post implements group.Endpoint.
func (e *watchedEndpoint) Post(works []group.Work) (int, error) {
	if f := e.k.firstPost; f != nil {
		f()
	}
	return e.Endpoint.Post(works)
}

// startEngine starts an engine over devices. A listening engine is reached over the loopback
// interface.
func startEngine(t testing.TB, devices []string, listen bool, g group.Options) *killable {
	t.Helper()
	at := ""
	if listen {
		at = "127.0.0.1:0"
	}
	var err error
	if g.Control, err = group.TCP(t.Context(), at, "", nil); err != nil {
		t.Fatal(err)
	}
	k := &killable{domains: make(map[int]*domain), killed: make(map[int]bool), watched: g.Detail == watched}
	k.Engine, err = newEngine(t.Context(), Options{Devices: devices, Group: g}, k.open)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// TestConformance: the promises of package rdma. Servers have the ports a, and clients b.
func TestConformance(t *testing.T) {
	for _, top := range []struct {
		name string
		a, b [2]int
	}{{"loopback", [2]int{0, 2}, [2]int{0, 2}}, {"cable", [2]int{0, 2}, [2]int{1, 3}}} {
		t.Run(top.name, func(t *testing.T) {
			names := ports(t, 4)
			rdmatest.Provider{
				NICs: 2, Quick: !*full,
				Open: func(t testing.TB, c rdmatest.Config) rdma.Engine {
					side := top.b
					if c.Listen {
						side = top.a
					}
					var devices []string
					for _, i := range side[:max(c.NICs, 1)] {
						devices = append(devices, names[i])
					}
					return startEngine(t, devices, c.Listen, group.Options{
						Token: c.Token, InFlightOps: c.InFlightOps, InFlightBytes: c.InFlightBytes,
						EarlyImmediates: c.EarlyImmediates, OnPeerDown: c.OnPeerDown, Logger: c.Logger, MessageBuffers: 16,
					})
				},
			}.Run(t)
		})
	}
}
