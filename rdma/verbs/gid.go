package verbs

import (
	"fmt"
	"net/netip"
	"slices"
)

// gidType is the format of packets whose source is the GID, with the values of ibv_gid_type.
type gidType uint32

// Types of GIDs.
const (
	gidInfiniBand gidType = 0
	gidRoCEv1     gidType = 1
	gidRoCEv2     gidType = 2
)

// String returns the usual name.
func (t gidType) String() string {
	switch t {
	case gidInfiniBand:
		return "InfiniBand"
	case gidRoCEv1:
		return "RoCE v1"
	case gidRoCEv2:
		return "RoCE v2"
	}
	return fmt.Sprintf("GID type %d", uint32(t))
}

// gidEntry is one row of a port's GID table.
type gidEntry struct {
	index uint32
	kind  gidType
	gid   gid
}

// addr returns the GID as an IP address. A GID that maps an IPv4 address is returned as that IPv4
// address.
func (e gidEntry) addr() netip.Addr { return netip.AddrFrom16(e.gid).Unmap() }

// rank returns the rank of a row, and the reason for the rank as text. The row with the lowest rank
// is chosen. On Ethernet, RoCE v2 is routable and passes through switches as UDP. IPv4 addresses
// are assigned by operators. Link-local addresses exist automatically and may not reach the peer.
// RoCE v1 needs a separate network and comes last.
func (e gidEntry) rank() (int, string) {
	switch a := e.addr(); {
	case e.kind == gidInfiniBand:
		return 0, "InfiniBand"
	case e.kind == gidRoCEv2 && a.Is4() && !a.IsLinkLocalUnicast():
		return 1, "RoCE v2 with an IPv4 address"
	case e.kind == gidRoCEv2 && a.Is6() && !a.IsLinkLocalUnicast():
		return 2, "RoCE v2 with a global IPv6 address"
	case e.kind == gidRoCEv2:
		return 3, "RoCE v2 with a link-local address: no better one is in the table"
	}
	return 4, e.kind.String() + ": no RoCE v2 in the table"
}

// chooseGID returns the row of a port's table to use, and the reason for the choice. asked is the
// index of the row that the user requested, or negative.
func chooseGID(table []gidEntry, asked int) (gidEntry, string, error) {
	if asked >= 0 {
		for _, e := range table {
			if e.index == uint32(asked) {
				return e, "asked for", nil
			}
		}
		return gidEntry{}, "", fmt.Errorf("GID index %d is not in the port's table of %d rows: omit it for an automatic choice, or see `rdma link` and /sys/class/infiniband/*/ports/*/gids", asked, len(table))
	}
	if len(table) == 0 {
		return gidEntry{}, "", fmt.Errorf("the port has no GID: give its network interface an address, or bring it up")
	}
	best := slices.MinFunc(table, func(a, b gidEntry) int {
		x, _ := a.rank()
		y, _ := b.rank()
		if x != y {
			return x - y
		}
		return int(a.index) - int(b.index)
	})
	_, why := best.rank()
	return best, why, nil
}
