package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/fabric"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/qos"
	"github.com/penstock-kv/penstock/rdma/shm"
	"github.com/penstock-kv/penstock/rdma/tcp"
	"github.com/penstock-kv/penstock/rdma/topo"
	"github.com/penstock-kv/penstock/rdma/topo/probe"
	"github.com/penstock-kv/penstock/rdma/verbs"
	"github.com/penstock-kv/penstock/server/config"
)

// Names of the providers, in config and in the engines.
const (
	providerAuto   = "auto"
	providerTCP    = "tcp"
	providerSHM    = shm.Provider
	providerVerbs  = verbs.Provider
	providerFabric = fabric.Provider
)

// plane describes a data plane that is not open: the provider of its transfer engine and its NICs.
// It is chosen before any slow step of the start, so that an invalid setting is reported at once.
type plane struct {
	provider string
	// reason is the reason for the choice, as text.
	reason string
	// tcpNICs, devices and fabricNICs are the NICs for the providers tcp, verbs and fabric. Without
	// NICs the provider uses its default.
	tcpNICs    []tcp.NIC
	devices    []string
	fabricNICs []fabric.NIC
	libfabric  string
	// marks has the DSCP and priority of each traffic class. Nil means that packets are not marked.
	marks *qos.Map
}

// planeWorld has the inputs of choosePlane in addition to the configuration.
type planeWorld struct {
	host func() topo.Host
	// verbs and fabric report whether this program was built with the providers of these names.
	verbs, fabric bool
}

// thisHost returns the host on which the program runs.
func thisHost() planeWorld {
	return planeWorld{
		host:  func() topo.Host { return topo.Read(topo.Options{Addrs: probe.Addrs}) },
		verbs: verbs.Built, fabric: fabric.Built,
	}
}

// The kinds of NICs of the providers.
var (
	verbsKinds  = []topo.Kind{topo.InfiniBand, topo.RoCE, topo.IWARP}
	fabricKinds = []topo.Kind{topo.EFA}
)

// choosePlane chooses the data plane for a configuration.
func choosePlane(cfg *config.Config, w planeWorld) (plane, error) {
	p := plane{provider: cfg.DataPlane.Provider, reason: "configured"}
	var err error
	if p.marks, err = marksOf(cfg.DataPlane.QoS); err != nil {
		return p, err
	}
	if p.provider == providerAuto {
		p.provider, p.reason = autoProvider(w, cfg.Encrypted())
	}
	switch p.provider {
	case providerTCP:
		err = p.chooseTCP(cfg)
		return p, err
	case providerSHM:
		return p, nil
	}
	if cfg.Encrypted() {
		return p, fmt.Errorf("config: data_plane.provider: %s: it cannot encrypt, but data_plane.tls is %s; use provider tcp or, on an isolated network, data_plane.tls off: %w",
			p.provider, cfg.DataPlane.TLS, config.ErrConfig)
	}
	err = p.chooseRDMA(cfg.DataPlane.NICs, cfg.DataPlane.Libfabric, w)
	return p, err
}

// autoProvider returns the fastest provider that this program and this host support, with the
// reason. If the only RDMA NICs are in software (rxe, siw), the provider is TCP.
func autoProvider(w planeWorld, encrypted bool) (provider, reason string) {
	if encrypted {
		return providerTCP, "the data plane is encrypted, and NICs would write in plain text"
	}
	if !w.verbs && !w.fabric {
		return providerTCP, "this program was built with neither verbs nor fabric"
	}
	h := w.host()
	for _, c := range []struct {
		provider string
		built    bool
		kinds    []topo.Kind
	}{{providerVerbs, w.verbs, verbsKinds}, {providerFabric, w.fabric, fabricKinds}} {
		nics, err := h.Choose(topo.Want{RDMA: true, Role: topo.SNIC, Kinds: c.kinds})
		hardware := slices.DeleteFunc(nics, func(n topo.NIC) bool { return n.Software })
		if err == nil && c.built && len(hardware) > 0 {
			return c.provider, fmt.Sprintf("%s reaches storage", hardware[0].Name)
		}
	}
	return providerTCP, "no NIC that this program can drive by RDMA reaches storage"
}

// marksOf parses data_plane.qos.
func marksOf(text string) (*qos.Map, error) {
	switch text {
	case "off", "":
		return nil, nil
	case "default":
		text = ""
	}
	m, err := qos.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("config: data_plane.qos: %w: %w", err, config.ErrConfig)
	}
	return &m, nil
}

// chooseTCP determines the addresses of the NICs.
func (p *plane) chooseTCP(cfg *config.Config) error {
	if len(cfg.DataPlane.NICs) > tcp.MaxNICs {
		return fmt.Errorf("config: data_plane.nics: %d NICs; the maximum is %d: %w", len(cfg.DataPlane.NICs), tcp.MaxNICs, config.ErrConfig)
	}
	for _, name := range cfg.DataPlane.NICs {
		_, port, err := net.SplitHostPort(cfg.DataListen)
		if err != nil {
			return fmt.Errorf("config: data_listen: %w: %w", err, config.ErrConfig)
		}
		n, err := tcpNIC(name, port)
		if err != nil {
			return err
		}
		p.tcpNICs = append(p.tcpNICs, n)
	}
	return nil
}

// tcpNIC returns the NIC for an address or for the name of an interface. For an address,
// connections follow the routing table. For an interface, they are bound to the interface.
func tcpNIC(name, port string) (tcp.NIC, error) {
	if ip, err := netip.ParseAddr(name); err == nil {
		return tcp.NIC{Name: name, Listen: net.JoinHostPort(name, port), Local: ip.WithZone("").String()}, nil
	}
	best := -1
	var ip netip.Addr
	for _, a := range probe.Addrs(name) {
		rank := 0
		switch {
		case a.Addr().IsLinkLocalUnicast():
			continue
		case a.Addr().Is4():
			rank = 1
		}
		if rank > best {
			best, ip = rank, a.Addr()
		}
	}
	if best < 0 {
		h := thisHost().host()
		return tcp.NIC{}, fmt.Errorf("config: data_plane.nics: this host has no interface %s with an IP address: %w. It has:\n%v", name, config.ErrConfig, h)
	}
	return tcp.NIC{Name: name, Device: name, Listen: net.JoinHostPort(ip.String(), port), Local: ip.String()}, nil
}

// chooseRDMA determines the devices of the provider verbs or fabric: the named devices, or all
// devices that reach storage. If there is none, the error lists the host's NICs.
func (p *plane) chooseRDMA(names []string, libfabric string, w planeWorld) error {
	kinds, built := verbsKinds, w.verbs
	if p.provider == providerFabric {
		kinds, built = fabricKinds, w.fabric
	}
	if !built {
		return fmt.Errorf("data_plane.provider: %w", p.notBuilt())
	}
	h := w.host()
	want := topo.Want{RDMA: true, Role: topo.SNIC, Kinds: kinds, NICs: names}
	if p.provider == providerVerbs {
		nics, err := h.Choose(want)
		if err != nil {
			return fmt.Errorf("data_plane.provider verbs: %w", err)
		}
		for _, n := range nics {
			p.devices = append(p.devices, verbsDevice(n))
		}
		return nil
	}
	nics, err := h.Choose(want)
	if p.libfabric = libfabric; libfabric == "auto" && err == nil {
		p.libfabric = "efa"
	} else if libfabric == "auto" {
		p.libfabric = "tcp"
	}
	o := fabric.DomainOptions{Provider: p.libfabric}
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return fmt.Errorf("data_plane.libfabric: %w", err)
	}
	if p.libfabric != "efa" {
		for _, name := range names {
			p.fabricNICs = append(p.fabricNICs, fabricNIC(name))
		}
		return nil // without names, the provider chooses the NIC
	}
	if err != nil {
		return fmt.Errorf("data_plane.provider fabric: %w", err)
	}
	for _, n := range nics {
		p.fabricNICs = append(p.fabricNICs, fabric.NIC{Domain: n.Name + "-rdm"}) // libfabric's name of the reliable datagrams of an EFA device
	}
	return nil
}

// notBuilt returns the error of the provider's package for a program that was built without the
// provider.
func (p *plane) notBuilt() error {
	var err error
	if p.provider == providerVerbs {
		_, err = verbs.List()
	} else {
		_, err = fabric.List(providerTCP)
	}
	if err == nil {
		err = fmt.Errorf("%s: %w", p.provider, rdma.ErrUnsupported)
	}
	return err
}

// verbsDevice returns a port in the form of verbs.NICOptions.Device.
func verbsDevice(n topo.NIC) string {
	name, _, _ := strings.Cut(n.Name, ":")
	if n.Port > 1 {
		name = fmt.Sprintf("%s/%d", name, n.Port)
	}
	if n.Kind == topo.RoCE && n.GID != nil {
		name = fmt.Sprintf("%s@%d", name, n.GID.Index)
	}
	return name
}

// fabricNIC returns the NIC for a libfabric provider over sockets. name is an interface or an
// address.
func fabricNIC(name string) fabric.NIC {
	if _, err := netip.ParseAddr(name); err == nil {
		return fabric.NIC{Addr: name}
	}
	return fabric.NIC{Domain: name}
}

// planeOptions are the options for opening a data plane. A client's data plane has no listen
// address.
type planeOptions struct {
	listen, advertise, congestion string
	admission                     *rdma.Admission
	tls                           *tls.Config
	memory                        *arena.Arena
	log                           *slog.Logger
}

// open starts the transfer engine.
func (p *plane) open(ctx context.Context, o planeOptions) (rdma.Engine, error) {
	switch p.provider {
	case providerTCP:
		t := tcp.Options{
			Listen: o.listen, Advertise: o.advertise, NICs: p.tcpNICs, QoS: p.marks,
			Admission: o.admission, TLS: o.tls, Congestion: o.congestion, Logger: o.log, ZeroCopy: true,
		}
		if len(t.NICs) > 0 {
			t.Listen, t.Advertise = "", ""
		}
		return started(tcp.New(ctx, t))
	case providerSHM:
		s := shm.Options{Listen: o.listen, Group: group.Options{Admission: o.admission, Logger: o.log}}
		if o.memory != nil {
			s.Arenas = []*arena.Arena{o.memory}
		}
		if err := removeStale(o.listen); err != nil {
			return nil, err
		}
		return started(shm.New(ctx, s))
	}
	g := group.Options{Admission: o.admission, Logger: o.log}
	var err error
	if g.Control, err = group.TCP(ctx, o.listen, o.advertise, o.tls); err != nil {
		return nil, err
	}
	var e *group.Engine
	if p.provider == providerVerbs {
		e, err = verbs.New(ctx, verbs.Options{Devices: p.devices, NIC: verbs.NICOptions{QoS: p.marks}, Group: g})
	} else {
		f := fabric.Options{Domain: fabric.DomainOptions{Provider: p.libfabric}, NICs: p.fabricNICs, Group: g}
		if p.marks != nil {
			for c := range f.Domain.TrafficClass {
				f.Domain.TrafficClass[c] = fabricDSCP | uint32(p.marks.Lane(rdma.Class(c)).DSCP)
			}
			f.Group.SeparateClasses = true
		}
		e, err = fabric.New(ctx, f)
	}
	if err != nil {
		h := thisHost().host()
		return nil, fmt.Errorf("%w. This host has:\n%v", err, h)
	}
	return e, nil
}

// fabricDSCP is the offset from a DSCP to a traffic class of libfabric (fi_tc_dscp_set).
const fabricDSCP = 0x100

// started converts an engine to the interface type. After an error the interface is nil, and not a
// nil pointer in an interface.
func started[E rdma.Engine](e E, err error) (rdma.Engine, error) {
	if err != nil {
		return nil, err
	}
	return e, nil
}

// removeStale removes a socket file on which no process listens, such as the file of a killed
// process. Any other file is left; the listener then reports the error.
func removeStale(path string) error {
	info, err := os.Lstat(path)
	if path == "" || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil || info.Mode().Type() != os.ModeSocket {
		return err
	}
	c, err := net.Dial("unix", path)
	switch {
	case err == nil:
		_ = c.Close() // the connection was a probe
		return fmt.Errorf("another process listens on %s; give each node its own data_listen", path)
	case errors.Is(err, syscall.ECONNREFUSED):
		return os.Remove(path)
	}
	return err
}

// listensOn returns the address on which an engine listens, host:port or a path, or "" if it does
// not listen.
func listensOn(e rdma.Engine) string {
	nics := e.Addr().NICs
	if len(nics) == 0 {
		return ""
	}
	where, _ := tcp.HostPort(nics[0])
	where, _, _ = strings.Cut(where, "#") // an engine with several NICs appends "#" and the NIC to the address
	return where
}

// clientPlane returns the data plane of a client.
func clientPlane(provider string, w planeWorld) (plane, error) {
	p := plane{provider: provider, reason: "the node uses this provider"}
	switch provider {
	case providerTCP, providerSHM:
		return p, nil
	case providerVerbs, providerFabric:
		err := p.chooseRDMA(nil, "auto", w)
		return p, err
	}
	return p, fmt.Errorf("provider %q is unknown to this program; use a program of the node's version", provider)
}

// providerOf returns the name of the provider that the nodes use: the answer of the first node that
// responds. If no node responds, it returns TCP, and the caller's next call reports the error.
func (c *connection) providerOf(ctx context.Context) string {
	for _, target := range c.list() {
		conn, err := c.dial(target)
		if err != nil {
			continue
		}
		ask, cancel := context.WithTimeout(ctx, providerTimeout)
		d, err := pb.NewCacheClient(conn).Describe(ask, &pb.DescribeRequest{})
		cancel()
		_ = conn.Close() // no call is in progress
		if err == nil && d.GetDataProvider() != "" {
			return d.GetDataProvider()
		}
		if err == nil {
			break
		}
	}
	return providerTCP
}

// providerTimeout is the time limit of the call to one node. It is short, because the client then
// tries to connect with its own time limit.
const providerTimeout = 5 * time.Second

// engine opens the transfer engine that the nodes use.
func (c *connection) engine(ctx context.Context, secure *tls.Config) (rdma.Engine, error) {
	p, err := clientPlane(c.providerOf(ctx), thisHost())
	var e rdma.Engine
	if err == nil {
		e, err = p.open(ctx, planeOptions{tls: secure})
	}
	if err != nil {
		return nil, fmt.Errorf("the data plane of %s has provider %s: %w", c.servers, p.provider, err)
	}
	return e, nil
}
