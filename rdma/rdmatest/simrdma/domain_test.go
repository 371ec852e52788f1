package simrdma

import (
	"fmt"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma/group/domaintest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// failOnViolation fails t at its end if the user of f violated a rule.
func failOnViolation(t testing.TB, f *Fabric) {
	t.Cleanup(func() {
		for _, v := range f.Violations() {
			t.Errorf("seed %d: rule broken: %s", f.Seed(), v)
		}
	})
}

// twoNICs opens a pair for the suite.
func twoNICs(t testing.TB, f *Fabric, o NICOptions) domaintest.Pair {
	t.Helper()
	failOnViolation(t, f)
	var pair [2]*Domain
	for i := range pair {
		o.Host, o.Name = fmt.Sprint("h", i), fmt.Sprint("n", i)
		d, err := f.Open(o)
		if err != nil {
			t.Fatal(err)
		}
		pair[i] = d
	}
	return domaintest.Pair{A: pair[0], B: pair[1], KillB: func() { f.KillNIC("n1") }}
}

// kinds are the NICs that exist.
var kinds = []struct {
	name string
	nic  NICOptions
}{
	{"rc", NICOptions{}.LikeRC()},
	{"srd", NICOptions{}.LikeSRD()},
	{"shm", NICOptions{}.LikeShm()},
}

// TestDomain: every kind of NIC keeps its promises in real time.
func TestDomain(t *testing.T) {
	testkit.Long(t, "the whole suite of group.Domain")
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			domaintest.Run(t, func(t testing.TB) domaintest.Pair {
				f := NewFabric(1, FabricOptions{Delay: Span{Max: 50 * time.Microsecond}, Pieces: 5, RepeatChance: 0.3, GhostChance: 0.5})
				return twoNICs(t, f, k.nic)
			})
		})
	}
}
