//go:build linux

package probe

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ifreq is struct ifreq with the pointer member of its union: 16 bytes of name, then a union of 24
// bytes.
type ifreq struct {
	name [unix.IFNAMSIZ]byte
	data unsafe.Pointer
	_    [24 - unsafe.Sizeof(uintptr(0))]byte
}

var _ [40]byte = [unsafe.Sizeof(ifreq{})]byte{}

// stringLen is ETH_GSTRING_LEN, the size of a counter's name in bytes.
const stringLen = 32

// countersMax is the largest number of counters that is accepted from a driver; mlx5 has about
// 2,000.
const countersMax = 1 << 16

// statistics is ETH_SS_STATS, the number of the string set that holds the names of counters.
const statistics = 1

// Counters returns the driver's counters of an interface, which ethtool -S prints.
func Counters(netdev string) (map[string]uint64, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	info, err := unix.IoctlGetEthtoolDrvinfo(fd, netdev)
	if err != nil {
		return nil, fmt.Errorf("probe: ask the driver of %s: %w", netdev, err)
	}
	n := int(info.N_stats)
	if n == 0 {
		return nil, fmt.Errorf("probe: the driver of %s has no counters", netdev)
	}
	if n > countersMax {
		return nil, fmt.Errorf("probe: the driver of %s claims %d counters", netdev, n)
	}
	// struct ethtool_gstrings: cmd, string_set, len; then the names.
	names := make([]byte, 12+n*stringLen)
	binary.NativeEndian.PutUint32(names, unix.ETHTOOL_GSTRINGS)
	binary.NativeEndian.PutUint32(names[4:], statistics)
	binary.NativeEndian.PutUint32(names[8:], uint32(n))
	// struct ethtool_stats: cmd, n_stats; then the values.
	values := make([]byte, 8+n*8)
	binary.NativeEndian.PutUint32(values, unix.ETHTOOL_GSTATS)
	binary.NativeEndian.PutUint32(values[4:], uint32(n))
	for _, b := range [][]byte{names, values} {
		if err := ethtool(fd, netdev, b); err != nil {
			return nil, fmt.Errorf("probe: read the counters of %s: %w", netdev, err)
		}
	}
	return zip(names, values, n), nil
}

// zip returns the counters by name. In names and values the kernel reports the number that it
// wrote, which is smaller than n if the driver has fewer counters by then.
func zip(names, values []byte, n int) map[string]uint64 {
	n = min(n, int(binary.NativeEndian.Uint32(names[8:])), int(binary.NativeEndian.Uint32(values[4:])))
	out := make(map[string]uint64, n)
	for i := range n {
		name := unix.ByteSliceToString(names[12+i*stringLen:][:stringLen])
		out[name] = binary.NativeEndian.Uint64(values[8+i*8:])
	}
	return out
}

// ethtool performs one request. b begins with the command and receives the answer.
//
// Safety: the kernel writes at most the lengths given in b, for which the caller has allocated b.
// Drivers write as many counters as they reported in N_stats, and the kernel's own buffer has the
// same length.
func ethtool(fd int, netdev string, b []byte) error {
	r := ifreq{data: unsafe.Pointer(&b[0])}
	if len(netdev) >= len(r.name) {
		return unix.ENODEV
	}
	copy(r.name[:], netdev)
	var pinned runtime.Pinner
	pinned.Pin(&b[0])
	defer pinned.Unpin()
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&r))); errno != 0 {
		return errno
	}
	return nil
}
