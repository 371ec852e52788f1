//go:build verbs && cgo && linux

package verbs

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/penstock-kv/penstock/rdma/group"
)

// Built reports whether this program supports RDMA cards.
const Built = true

// New starts an engine over one or several ports.
func New(ctx context.Context, o Options) (*group.Engine, error) {
	return newEngine(ctx, o, func(_ int, n NICOptions) (port, error) { return openPort(n) })
}

// port is a group.Domain that can describe itself.
type port interface {
	group.Domain
	about() string
}

// Open opens a port.
func Open(o NICOptions) (group.Domain, error) { return openPort(o) }

func openPort(o NICOptions) (port, error) {
	d, err := open(o)
	if err != nil {
		return nil, err // a plain nil: an interface that holds a nil port would not be nil
	}
	return d, nil
}

func open(o NICOptions) (*domain, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	at, err := parseDevice(o.Device)
	if err != nil {
		return nil, err
	}
	nic, err := openNIC(at.name, at.port)
	if err != nil {
		if errors.Is(err, errNoDevice) {
			names, _ := deviceNames()
			err = fmt.Errorf("%w; this machine has %q (see rdma link, or penstock nic list)", err, names)
		}
		return nil, fmt.Errorf("verbs: %s: %w", o.Device, err)
	}
	return newDomain(o, at, nic)
}

// newEngine is New with a function that opens NIC i.
func newEngine(ctx context.Context, o Options, open func(int, NICOptions) (port, error)) (*group.Engine, error) {
	g := o.Group
	g.Provider, g.Domains = Provider, nil
	g.SeparateClasses = g.SeparateClasses || o.NIC.QoS != nil
	fail := func(err error) (*group.Engine, error) {
		for _, d := range g.Domains {
			err = errors.Join(err, d.Close())
		}
		if g.Control.Listener != nil {
			err = errors.Join(err, g.Control.Listener.Close())
		}
		return nil, err
	}
	nics, err := o.nics()
	if err != nil {
		return fail(err)
	}
	var about []string
	for i, n := range nics {
		d, err := open(i, n)
		if err != nil {
			return fail(err)
		}
		g.Domains = append(g.Domains, d)
		about = append(about, d.about())
	}
	g.Detail = strings.Join(about, ", ")
	g.Reopen = func(_ context.Context, i int) (group.Domain, error) { return open(i, nics[i]) }
	return group.New(ctx, g)
}

// nics returns the options of each NIC.
func (o *Options) nics() ([]NICOptions, error) {
	names := o.Devices
	if len(names) == 0 {
		all, err := List()
		if err != nil {
			return nil, err
		}
		var why []string
		for _, d := range all {
			if d.Up {
				names = append(names, d.Name)
			} else {
				why = append(why, d.Name+": "+d.Reason)
			}
		}
		if len(names) == 0 {
			return nil, fmt.Errorf("verbs: none of the %d RDMA devices can be used: %v", len(all), why)
		}
	}
	var nics []NICOptions
	for _, name := range names {
		n := o.NIC
		n.Device = name
		nics = append(nics, n)
	}
	return nics, nil
}

// about returns a one-line description of the port for logs and status.
func (d *domain) about() string {
	return fmt.Sprintf("%s %v GID %v (%v) MTU %d", d.name, d.port.layer, d.gid.addr(), d.gid.kind, mtuBytes(d.port.mtu))
}

// mtuBytes converts an ibv_mtu code to bytes.
func mtuBytes(code uint8) int { return 128 << code }

// List returns the ports of this machine's RDMA devices, in the library's order.
func List() ([]Device, error) {
	names, err := deviceNames()
	if err != nil {
		return nil, fmt.Errorf("verbs: %w", err)
	}
	var out []Device
	for _, name := range names {
		for port := uint8(1); ; port++ {
			d, ports, err := look(name, port)
			if err != nil {
				d.Reason = err.Error()
			}
			out = append(out, d)
			if port >= ports {
				break
			}
		}
	}
	return out, nil
}

// look returns the description of one port, and the number of ports of its device.
func look(name string, port uint8) (d Device, ports uint8, err error) {
	d.Name = name
	if port > 1 {
		d.Name = fmt.Sprintf("%s/%d", name, port)
	}
	n, err := openNIC(name, port)
	if err != nil {
		return d, 0, err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	dev, err := n.device()
	if err != nil {
		return d, 0, err
	}
	d.Windows = dev.windows
	p, err := n.portState()
	if err != nil {
		return d, dev.ports, err
	}
	d.Link, d.MTU, d.MaxWrite = p.layer.String(), mtuBytes(p.mtu), int64(p.maxWrite())
	table, err := n.gids()
	if err != nil {
		return d, dev.ports, err
	}
	g, why, err := chooseGID(table, -1)
	if err == nil {
		d.GID, d.GIDReason = g.addr().String(), why
	}
	if !p.active {
		return d, dev.ports, errPortDown
	}
	d.Up = err == nil
	return d, dev.ports, err
}
