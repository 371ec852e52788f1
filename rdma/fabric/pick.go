package fabric

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// requestedVersion returns the version of libfabric whose behaviour is requested from a library of
// the given version. It requests 1.18, because from that version on, efa uses the device's RDMA
// writes on p5 by default. From an older library it requests the library's own version.
func requestedVersion(major, minor int) (int, int) {
	if major > 1 || minor > 18 {
		return 1, 18
	}
	return major, minor
}

// pickNICs returns all domains except the loopback, or only the loopback if there is no other. It
// returns an error if there are more domains than an engine supports: omitting some silently would
// reduce the host's bandwidth.
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
	return nil, fmt.Errorf("fabric: provider %q has %d domains (%s), and an engine takes at most %d: name the ones to use (data_plane.nics), and give the others to an engine of their own: %w",
		provider, len(picked), strings.Join(names, ", "), group.MaxDomains, rdma.ErrRange)
}
