package main

import (
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
	"github.com/penstock-kv/penstock/rdma/topo"
	"github.com/penstock-kv/penstock/rdma/topo/probe"
)

// linkRates returns the rates of the links of this host's NICs. It reads sysfs at most once in
// linkRatesAge, because a reading takes milliseconds on a host with many devices.
type linkRates struct {
	options topo.Options

	mu   sync.Mutex
	host topo.Host
	read time.Time
}

// linkRatesAge is the age at which a reading of sysfs is replaced. The rate of a link changes only
// when a cable or a switch port does.
const linkRatesAge = 30 * time.Second

// newLinkRates returns the rates of this host.
func newLinkRates() *linkRates {
	return &linkRates{options: topo.Options{Addrs: probe.Addrs}}
}

// of returns the rate of the link of a NIC of a transfer engine, in bits per second, or 0 if it is
// unknown. A TCP NIC that listens on all addresses has no link of its own.
func (r *linkRates) of(n rdma.NIC) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := time.Now(); r.read.IsZero() || now.Sub(r.read) > linkRatesAge {
		r.host, r.read = topo.Read(r.options), now
	}
	for _, known := range r.host.NICs {
		if n.Name == known.Name || n.Name == known.Netdev || strings.HasPrefix(known.Name, n.Name+":") {
			return int64(known.RateGbps * 1e9)
		}
	}
	hostPort, _ := tcp.HostPort(n.Addr)
	host, _, err := net.SplitHostPort(hostPort)
	if err != nil {
		return 0
	}
	addr, err := netip.ParseAddr(host)
	if err != nil {
		return 0
	}
	for _, known := range r.host.NICs {
		for _, p := range known.Addrs {
			if p.Addr() == addr {
				return int64(known.RateGbps * 1e9)
			}
		}
	}
	return 0
}
