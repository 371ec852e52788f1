package simrdma

import (
	"flag"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/group/domaintest"
	"github.com/penstock-kv/penstock/rdma/rdmatest"
)

// The networks that the tests of seeds run on. A seed that fails prints the
// command that runs it again.
var (
	seedCount = flag.Int("sim.seeds", 0, "on how many networks to run the suites; 0: a few")
	firstSeed = flag.Uint64("sim.seed", 1, "the seed of the first network")
)

// eachSeed runs f for every seed in a subtest.
func eachSeed(t *testing.T, few int, f func(t *testing.T, seed uint64)) {
	n := *seedCount
	if n == 0 {
		n = few
	}
	for i := range uint64(n) {
		seed := *firstSeed + i
		ok := t.Run(fmt.Sprint(seed), func(t *testing.T) {
			f(t, seed)
		})
		if !ok {
			t.Errorf("again: go test ./rdma/rdmatest/simrdma -run '^%s$' -sim.seed=%d -sim.seeds=1", t.Name(), seed)
		}
	}
}

// world is a fabric and the engines on it.
type world struct {
	f     *Fabric
	nic   NICOptions
	nics  int // default number of NICs
	hosts int
	drawn bool
}

// newWorld returns the network of a seed.
func newWorld(t testing.TB, seed uint64) *world {
	t.Helper()
	d := drawsOf(seed, hash("world"))
	w := &world{f: NewFabric(seed, RandomFabric(seed)), nic: RandomNIC(seed), nics: 1 + d.below(3)}
	failOnViolation(t, w.f)
	return w
}

// engine is an engine of a world. Its NICs can be killed, and its host.
type engine struct {
	*group.Engine
	t    testing.TB
	w    *world
	host string
}

// Close draws the fabric if the case has failed, before its state is lost.
func (e *engine) Close() error {
	if e.t.Failed() && !e.w.drawn {
		e.w.drawn = true
		e.t.Logf("%v", e.w.f)
	}
	return e.Engine.Close()
}

func (e *engine) KillNIC(i int) { e.w.f.KillNIC(NICName(e.host, i)) }
func (e *engine) Vanish()       { e.w.f.KillHost(e.host) }

// open starts an engine on its own host.
func (w *world) open(t testing.TB, c rdmatest.Config) rdma.Engine {
	t.Helper()
	w.hosts++
	e := &engine{t: t, w: w, host: fmt.Sprint("h", w.hosts)}
	nics := c.NICs
	if nics == 0 {
		nics = w.nics
	}
	o := Options{Fabric: w.f, Host: e.host, Listen: c.Listen, NICs: make([]NICOptions, nics), Group: group.Options{
		Token: c.Token, InFlightOps: c.InFlightOps, InFlightBytes: c.InFlightBytes, EarlyImmediates: c.EarlyImmediates, OnPeerDown: c.OnPeerDown,
		IdleTimeout: c.IdleTimeout, Logger: c.Logger, SeparateClasses: w.hosts%2 == 0,
		// Small, because zeroing buffers would take most of the time of many seeds.
		PieceBytes: 64 << 10, MaxMessage: 4 << 10, MessageBuffers: 8, SpinPolls: -1,
	}}
	if c.IdleTimeout > 0 {
		o.Group.HeartbeatInterval = c.IdleTimeout / 4
	}
	for i := range o.NICs {
		o.NICs[i] = w.nic
	}
	g, err := New(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	e.Engine = g
	return e
}

// TestConformance: the engine keeps its promises over every kind of NIC, in real time.
func TestConformance(t *testing.T) {
	testkit.Long(t, "the whole suite of rdma")
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			worlds := make(map[string]*world)
			rdmatest.Provider{NICs: 2, Uneven: true, Vanishes: true, Quick: true, Device: device, Open: func(t testing.TB, c rdmatest.Config) rdma.Engine {
				w := worlds[t.Name()]
				if w == nil {
					w = &world{f: NewFabric(1, FabricOptions{Delay: Span{Max: 20 * time.Microsecond}, Pieces: 3, RepeatChance: 0.2, GhostChance: 0.5}), nic: k.nic, nics: 2}
					worlds[t.Name()] = w
					failOnViolation(t, w.f)
				}
				return w.open(t, c)
			}}.Run(t)
		})
	}
}

// TestSeeds: the engine keeps its promises on random networks, in virtual time.
func TestSeeds(t *testing.T) {
	testkit.Long(t, "many simulated networks")
	eachSeed(t, 3, func(t *testing.T, seed uint64) {
		for _, c := range rdmatest.Cases() {
			t.Run(c.Name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(t, seed)
					c.Run(t, rdmatest.Provider{NICs: 3, Uneven: true, Vanishes: true, Quick: true, Device: device, Open: w.open})
				})
			})
		}
	})
}

// TestDomainSeeds: random NICs on random networks keep the promises of
// group.Domain.
func TestDomainSeeds(t *testing.T) {
	testkit.Long(t, "many simulated networks")
	eachSeed(t, 10, func(t *testing.T, seed uint64) {
		for _, c := range domaintest.Cases() {
			t.Run(c.Name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					c.Run(t, func(t testing.TB) domaintest.Pair {
						return twoNICs(t, NewFabric(seed, RandomFabric(seed)), RandomNIC(seed))
					})
				})
			})
		}
	})
}
