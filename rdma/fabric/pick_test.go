package fabric

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

func TestAskedVersion(t *testing.T) {
	for _, c := range []struct{ major, minor, wantMajor, wantMinor int }{{1, 17, 1, 17}, {1, 18, 1, 18}, {1, 22, 1, 18}, {2, 0, 1, 18}} {
		if major, minor := requestedVersion(c.major, c.minor); major != c.wantMajor || minor != c.wantMinor {
			t.Errorf("of a library %d.%d version %d.%d is requested", c.major, c.minor, major, minor)
		}
	}
}

// TestPickNICs: the loopback is used only if there is no other domain, and more domains than an
// engine takes are refused with their names.
func TestPickNICs(t *testing.T) {
	lo, eth := NIC{Domain: "lo", Addr: "127.0.0.1"}, NIC{Domain: "eth0", Addr: "10.0.0.1"}
	if got, err := pickNICs("tcp", []NIC{lo, eth}); err != nil || len(got) != 1 || got[0] != eth {
		t.Errorf("picked %v, %v", got, err)
	}
	if got, err := pickNICs("tcp", []NIC{lo}); err != nil || len(got) != 1 || got[0] != lo {
		t.Errorf("picked %v, %v", got, err)
	}
	var many []NIC
	for i := range group.MaxDomains {
		many = append(many, NIC{Domain: fmt.Sprintf("rdmap%ds0-rdm", i)})
	}
	if got, err := pickNICs("efa", many); err != nil || len(got) != group.MaxDomains {
		t.Errorf("picked %d, %v", len(got), err)
	}
	many = append(many, NIC{Domain: "rdmap99s0-rdm"})
	_, err := pickNICs("efa", many)
	if !errors.Is(err, rdma.ErrRange) || !strings.Contains(err.Error(), "17 domains") || !strings.Contains(err.Error(), "rdmap99s0-rdm") {
		t.Errorf("one more than an engine takes: %v", err)
	}
}
