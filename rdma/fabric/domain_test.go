//go:build fabric && cgo && linux

package fabric

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma/group/domaintest"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(envChild); role != "" {
		if err := child(role); err != nil {
			fmt.Fprintln(os.Stderr, role+":", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	// Providers open descriptors of their own, once in a process and for good.
	for _, p := range providers {
		_, _ = list(p.name)
	}
	testkit.Main(m)
}

// providers are those of libfabric that need no hardware.
var providers = []struct {
	name string
	nic  NIC
}{
	{"tcp", NIC{Addr: "127.0.0.1"}},
	{"shm", NIC{}},
}

// openDomain opens a domain for a test.
func openDomain(t testing.TB, provider string, nic NIC) *domain {
	t.Helper()
	d, err := open(DomainOptions{Provider: provider, NIC: nic})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestDomain(t *testing.T) {
	for _, p := range providers {
		t.Run(p.name, func(t *testing.T) {
			domaintest.Run(t, func(t testing.TB) domaintest.Pair {
				a, b := openDomain(t, p.name, p.nic), openDomain(t, p.name, p.nic)
				return domaintest.Pair{A: a, B: b, KillB: func() { kill(b) }}
			})
		})
	}
}

// errKilled is what kill ends a domain with.
var errKilled = errors.New("killed by a test")

// kill makes d die in its next Poll, as if its queue had failed.
func kill(d *domain) {
	d.poll.Lock()
	d.fatal = errKilled
	d.poll.Unlock()
	d.Wake()
}
