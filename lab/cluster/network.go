package cluster

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"

	"github.com/penstock-kv/penstock/lab/netlab"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/qos"
)

// network is the network on which the processes run.
type network interface {
	// String returns a description for people.
	String() string
	// place adds a network location for a process; rates are the rates of an engine's NICs.
	place(name string, role placeRole, rates nicRates) (*place, error)
	close() error
}

// nicRates are in bits per second; 0: no limit.
type nicRates struct {
	snicBits, cnicBits uint64
	// classes reserves the share collectiveShare of the compute NIC's bandwidth for collectives.
	classes bool
}

// collectiveShare is the share of a compute NIC's bandwidth that is reserved for collectives. With
// the tables of the DualPath paper, InfiniBand's arbiter reserves 99.6 % (appendix A.1). The tables
// of deploy/qos reserve 99 %, and tc does the same here.
const collectiveShare = 0.99

// placeRole determines the networks of a process. All processes are on the control network.
type placeRole uint8

const (
	service     placeRole = iota // planner, gateway
	storageNode                  // on the storage network
	engineNode                   // on storage and compute, with NICs of set rates
)

// place is the network location of one process: a network namespace, or a loopback address.
type place struct {
	name string
	// start starts a command at this place; nil: exec.Cmd.Start.
	start func(*exec.Cmd) error
	// listen is the host on which the process listens. control, storage and compute are its
	// addresses on the three networks.
	listen, control, storage, compute string
	// snic and cnic are an engine's NICs.
	snic, cnic nicPort
	// shapes holds the NICs that the process rate-limits itself; nil if the network limits them.
	shapes *shapes
}

// nicPort is one NIC.
type nicPort interface {
	// Counters returns the bytes that the NIC has received and sent so far.
	Counters() (netlab.Counters, error)
	// SetRate changes the limit of each direction, in bits per second.
	SetRate(bits uint64) error
	// SetUp(false) pulls the cable, SetUp(true) plugs it in.
	SetUp(up bool) error
}

// openNetwork returns a network of network namespaces. If namespaces cannot be created, it returns
// loopback with rate-limited connections; String of that network has the reason.
func openNetwork(loopback bool) (network, error) {
	if loopback {
		return newLoopback("as asked"), nil
	}
	n, err := newNamespaces()
	if err != nil && os.Geteuid() != 0 {
		return newLoopback(err.Error()), nil
	}
	return n, err
}

// namespaces is a network of network namespaces on three switches.
type namespaces struct {
	lab                       *netlab.Lab
	control, storage, compute *netlab.Switch
}

func newNamespaces() (_ *namespaces, err error) {
	n := &namespaces{}
	if n.lab, err = netlab.Open(); err != nil {
		return nil, err
	}
	for _, s := range []struct {
		name string
		at   **netlab.Switch
	}{{"control", &n.control}, {"storage", &n.storage}, {"compute", &n.compute}} {
		if *s.at, err = n.lab.Switch(s.name); err != nil {
			return nil, errors.Join(err, n.lab.Close())
		}
	}
	return n, nil
}

// String implements network.
func (*namespaces) String() string { return "network namespaces, rates by tc" }

func (n *namespaces) close() error { return n.lab.Close() }

// place implements network.
func (n *namespaces) place(name string, role placeRole, rates nicRates) (*place, error) {
	ns, err := n.lab.Namespace(name)
	if err != nil {
		return nil, fmt.Errorf("cluster: %s: %w", name, err)
	}
	p := &place{name: name, start: ns.Start}
	attach := func(s *netlab.Switch, o netlab.LinkOptions) (k *netlab.Link, host string) {
		if err == nil {
			if k, err = s.Attach(ns, o); err == nil {
				host = k.A.IP().String()
			}
		}
		return k, host
	}
	_, p.control = attach(n.control, netlab.LinkOptions{})
	p.listen = p.control
	switch role {
	case storageNode:
		_, p.storage = attach(n.storage, netlab.LinkOptions{})
		p.listen = "0.0.0.0" // all addresses of the namespace
	case engineNode:
		p.snic, _ = attach(n.storage, netlab.LinkOptions{RateBits: rates.snicBits})
		cnic := netlab.LinkOptions{RateBits: rates.cnicBits}
		if rates.classes && rates.cnicBits > 0 {
			marks := qos.Default()
			cnic.Classes = []netlab.Class{{DSCP: marks[rdma.ClassCollective].DSCP, Share: collectiveShare}, {DSCP: marks[rdma.ClassKV].DSCP, Share: (1 - collectiveShare) / 2}}
		}
		p.cnic, p.compute = attach(n.compute, cnic)
	}
	if err != nil {
		return nil, fmt.Errorf("cluster: %s: %w", name, err)
	}
	return p, nil
}

// loopback is a network on this machine's loopback interface, with an address for each process: all
// of 127.0.0.0/8 is local. Engines limit their own data connections (shaper); control traffic is
// not limited.
type loopback struct {
	why   string
	net   int // second byte of the addresses, so that two clusters do not collide
	hosts int
}

func newLoopback(why string) *loopback { return &loopback{why: why, net: 64 + os.Getpid()%128} }

// String implements network.
func (l *loopback) String() string { return "shaped connections on loopback: " + l.why }

func (*loopback) close() error { return nil }

// place implements network.
func (l *loopback) place(name string, role placeRole, rates nicRates) (*place, error) {
	l.hosts++
	host := fmt.Sprintf("127.%d.0.%d", l.net, l.hosts)
	p := &place{name: name, listen: host, control: host, storage: host, compute: host}
	if role == engineNode {
		p.shapes = &shapes{}
		p.snic, p.cnic = &remoteNIC{s: p.shapes, storage: true}, &remoteNIC{s: p.shapes}
	}
	return p, nil
}

// shapes holds the NICs that an engine's process rate-limits itself.
type shapes struct {
	mu         sync.Mutex
	snic, cnic netlab.Counters
	send       func(Order) error
}

// setCounters stores the counters that the process reported.
func (s *shapes) setCounters(n *NICCounters) {
	s.mu.Lock()
	s.snic, s.cnic = n.SNIC, n.CNIC
	s.mu.Unlock()
}

// remoteNIC is one NIC in shapes: the storage NIC if storage is set, otherwise the compute NIC.
type remoteNIC struct {
	s       *shapes
	storage bool
}

// Counters implements nicPort. It returns the counters that the process last reported.
func (r *remoteNIC) Counters() (netlab.Counters, error) {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	if r.storage {
		return r.s.snic, nil
	}
	return r.s.cnic, nil
}

// SetRate implements nicPort.
func (r *remoteNIC) SetRate(bits uint64) error {
	if r.storage {
		return r.s.send(Order{SNICBits: bits})
	}
	return r.s.send(Order{CNICBits: bits})
}

// SetUp implements nicPort.
func (r *remoteNIC) SetUp(bool) error {
	return errors.New("cluster: a shaped connection has no cable to pull; that needs network namespaces, which need root")
}

// at returns host:port.
func at(host string, port int) string { return fmt.Sprintf("%s:%d", host, port) }
