//go:build verbs && cgo && linux

package verbs

import (
	"errors"
	"os"
	"testing"

	"github.com/penstock-kv/penstock/rdma/group/domaintest"
)

// envLab is set by `make test-rdma` in the guest, where the devices must exist.
const envLab = "PENSTOCK_RDMA_LAB"

// ports returns the names of n ports that are up. If there are fewer the test is skipped, or
// fails in the lab.
func ports(t testing.TB, n int) []string {
	t.Helper()
	devices, err := List()
	if err != nil {
		t.Fatal(err)
	}
	var up []string
	for _, d := range devices {
		if d.Up {
			up = append(up, d.Name)
		}
	}
	if len(up) >= n {
		return up[:n]
	}
	if os.Getenv(envLab) != "" {
		t.Fatalf("%d RDMA ports are up and %d are needed, in the lab: %+v", len(up), n, devices)
	}
	t.Skipf("%d RDMA ports are up and %d are needed: `make test-rdma` runs this test where there are four", len(up), n)
	return nil
}

// topologies are the pairs of ports for all tests: one port connected to itself, and two ends
// of a cable.
var topologies = []struct {
	name string
	a, b int
}{{"loopback", 0, 0}, {"cable", 0, 1}}

// openPorts opens a port for each of two sides: one polls for a long time before it sleeps, and
// one sleeps immediately.
func openPorts(t testing.TB, a, b string) (x, y *domain) {
	t.Helper()
	x, err := open(NICOptions{Device: a, Spin: maxSpin})
	if err != nil {
		t.Fatal(err)
	}
	y, err = open(NICOptions{Device: b, Spin: -1})
	if err != nil {
		t.Fatal(errors.Join(err, x.Close()))
	}
	return x, y
}

func TestDomain(t *testing.T) {
	for _, top := range topologies {
		t.Run(top.name, func(t *testing.T) {
			names := ports(t, 2)
			domaintest.Run(t, func(t testing.TB) domaintest.Pair {
				a, b := openPorts(t, names[top.a], names[top.b])
				return domaintest.Pair{A: a, B: b, KillB: func() {
					b.mu.Lock()
					b.doomLocked(errors.New("killed by the test"))
					b.mu.Unlock()
					b.Wake()
				}}
			})
		})
	}
}
