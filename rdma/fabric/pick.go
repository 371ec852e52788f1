package fabric

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// askedVersion is the version of libfabric whose behaviour is asked for, of a library of
// the given version: 1.18, from which on efa writes by the device's RDMA on p5 without being
// told to, or that of an older library.
func askedVersion(major, minor int) (int, int) {
	if major > 1 || minor > 18 {
		return 1, 18
	}
	return major, minor
}

// pickNICs returns all domains but the loopback, or that alone. More than an engine takes
// is an error: to leave some out would halve a host's bandwidth without a word.
func pickNICs(provider string, all []NIC) ([]NIC, error) {
	picked := slices.DeleteFunc(slices.Clone(all), func(n NIC) bool {
		a, err := netip.ParseAddr(n.Addr)
		return err == nil && a.IsLoopback()
	})
	if len(picked) == 0 {
		return all[:1], nil
	}
	if len(picked) <= group.MaxDomains {
		return picked, nil
	}
	var names []string
	for _, n := range picked {
		names = append(names, n.String())
	}
	return nil, fmt.Errorf("fabric: provider %q has %d domains (%s), and an engine takes %d: name those to use (data_plane.nics), and give the others to an engine of their own: %w",
		provider, len(picked), strings.Join(names, ", "), group.MaxDomains, rdma.ErrRange)
}
