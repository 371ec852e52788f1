package group_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/rdmatest"
	"github.com/penstock-kv/penstock/rdma/rdmatest/simrdma"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// kinds of NICs that exist.
var kinds = []struct {
	name string
	nic  simrdma.NICOptions
}{
	{"rc", simrdma.NICOptions{}.LikeRC()},
	{"rxe", simrdma.NICOptions{}.LikeRXE()},
	{"srd", simrdma.NICOptions{}.LikeSRD()},
	{"shm", simrdma.NICOptions{}.LikeShm()},
}

// host is an engine on a fabric whose NICs can be killed.
type host struct {
	*group.Engine
	fabric *simrdma.Fabric
	name   string
}

// KillNIC implements rdmatest.NICKiller.
func (h host) KillNIC(i int) { h.fabric.KillNIC(simrdma.NICName(h.name, i)) }

// Vanish implements rdmatest.Vanisher.
func (h host) Vanish() { h.fabric.KillHost(h.name) }

// fabricOf returns a fabric that fails t for a broken rule.
func fabricOf(t testing.TB, seed uint64, o simrdma.FabricOptions) *simrdma.Fabric {
	f := simrdma.NewFabric(seed, o)
	t.Cleanup(func() {
		for _, v := range f.Violations() {
			t.Errorf("rule broken: %s", v)
		}
	})
	return f
}

// TestConformance: the promises of package rdma, over NICs of each kind.
func TestConformance(t *testing.T) {
	testkit.Long(t, "the whole suite of rdma")
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			f := fabricOf(t, 1, simrdma.FabricOptions{Delay: simrdma.Span{Max: 20 * time.Microsecond}, Pieces: 3, RepeatChance: 0.1, GhostChance: 0.5})
			var hosts atomic.Int64
			rdmatest.Provider{
				NICs: 2, Uneven: true, Vanishes: true,
				Open: func(t testing.TB, c rdmatest.Config) rdma.Engine {
					name := fmt.Sprintf("h%d", hosts.Add(1))
					o := simrdma.Options{Fabric: f, Host: name, Listen: c.Listen, Group: group.Options{
						Token: c.Token, InFlightOps: c.InFlightOps, InFlightBytes: c.InFlightBytes,
						EarlyImmediates: c.EarlyImmediates, OnPeerDown: c.OnPeerDown, Logger: c.Logger, IdleTimeout: c.IdleTimeout,
						MessageBuffers: 16,
					}}
					if c.IdleTimeout > 0 {
						o.Group.HeartbeatInterval = c.IdleTimeout / 4
					}
					for range max(c.NICs, 1) {
						o.NICs = append(o.NICs, k.nic)
					}
					e, err := simrdma.New(t.Context(), o)
					if err != nil {
						t.Fatal(err)
					}
					return host{e, f, name}
				},
			}.Run(t)
		})
	}
}
