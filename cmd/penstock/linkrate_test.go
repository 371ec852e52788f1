package main

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/topo"
	"github.com/penstock-kv/penstock/rdma/topo/topotest"
)

// TestLinkRates: the rate of a NIC is found by the name of its RDMA device, by its interface, and by
// its address; the rate of any other NIC is unknown.
func TestLinkRates(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join(testkit.RepositoryRoot(t), "rdma", "topo", "testdata", "dgx-h100.host"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir() + "/sys"
	if err := topotest.Write(dir, string(raw)); err != nil {
		t.Fatal(err)
	}
	r := &linkRates{options: topo.Options{Sysfs: os.DirFS(dir), Addrs: func(netdev string) []netip.Prefix {
		if netdev == "ens6f0np0" {
			return []netip.Prefix{netip.MustParsePrefix("10.10.0.1/24")}
		}
		return nil
	}}}
	for _, c := range []struct {
		nic  rdma.NIC
		want int64
	}{
		{rdma.NIC{Name: "mlx5_0"}, 400e9},
		{rdma.NIC{Name: "ens6f0np0", Addr: "1.2.3.4:7421"}, 200e9},
		{rdma.NIC{Name: "10.10.0.1:7421", Addr: "10.10.0.1:7421"}, 200e9},
		{rdma.NIC{Name: "tls", Addr: "tls://10.10.0.1:7421"}, 200e9},
		{rdma.NIC{Name: "0.0.0.0:7421", Addr: "0.0.0.0:7421"}, 0},
		{rdma.NIC{Name: "mlx5_", Addr: "no address"}, 0},
	} {
		if got := r.of(c.nic); got != c.want {
			t.Errorf("%+v: %d b/s; want %d", c.nic, got, c.want)
		}
	}
}
