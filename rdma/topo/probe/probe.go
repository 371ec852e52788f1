package probe

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"time"

	"github.com/penstock-kv/penstock/rdma/topo"
)

// ErrUnsupported: the system is not Linux.
var ErrUnsupported = errors.New("probe: only Linux is asked")

// Addrs returns the addresses of an interface in the kernel's order. If there is no such interface
// it returns none.
func Addrs(netdev string) []netip.Prefix {
	i, err := net.InterfaceByName(netdev)
	if err != nil {
		return nil
	}
	addrs, err := i.Addrs()
	if err != nil {
		return nil
	}
	var out []netip.Prefix
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			out = append(out, p)
		}
	}
	return out
}

// Facts collects the inputs of topo.Check. It reads the counters of the NICs' interfaces twice,
// interval apart, or once if interval is zero. It returns early if ctx ends.
func Facts(ctx context.Context, h topo.Host, interval time.Duration) (topo.Facts, error) {
	f := topo.Facts{Kernel: kernel(), DeviceErr: map[string]error{}, Interval: interval}
	if n, err := memlock(); err == nil {
		f.MemlockBytes = &n
	}
	for _, n := range h.NICs {
		if n.IsRDMA() && n.VerbsDevice != "" {
			f.DeviceErr[n.Name] = openable("/dev/infiniband/" + n.VerbsDevice)
		}
	}
	if interval <= 0 {
		return f, nil
	}
	f.Before = counters(h)
	wait := time.NewTimer(interval)
	defer wait.Stop()
	select {
	case <-wait.C:
	case <-ctx.Done():
		return f, ctx.Err()
	}
	f.After = counters(h)
	return f, nil
}

// counters returns the counters of the interfaces of all NICs. It skips interfaces whose driver
// has no counters.
func counters(h topo.Host) map[string]map[string]uint64 {
	all := make(map[string]map[string]uint64)
	for _, n := range h.NICs {
		names := []string{n.Netdev}
		if n.Bond != nil {
			names = append(names, n.Bond.Members...)
		}
		for _, name := range names {
			if all[name] != nil || name == "" {
				continue
			}
			if c, err := Counters(name); err == nil {
				all[name] = c
			}
		}
	}
	return all
}
