package simrdma

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// Provider is what Info tells of an engine on a fabric.
const Provider = "sim"

// Options configure an engine on a fabric.
type Options struct {
	// Fabric is what the engine's NICs are plugged into.
	Fabric *Fabric
	// Host is the engine's machine, unique in the fabric.
	Host string
	// Listen makes the engine reachable as Host.
	Listen bool
	// NICs are its NICs: default one. Host is filled in, and where Name is
	// empty it is the host's and a number.
	NICs []NICOptions
	// Group is the rest of the engine's options; Provider, Domains, Reopen and
	// Control are overwritten.
	Group group.Options
}

// New starts an engine on a fabric.
func New(ctx context.Context, o Options) (*group.Engine, error) {
	if o.Fabric == nil || o.Host == "" {
		return nil, errors.New("simrdma: an engine needs a fabric and a host")
	}
	nics := append([]NICOptions(nil), o.NICs...)
	if len(nics) == 0 {
		nics = make([]NICOptions, 1)
	}
	g := o.Group
	g.Provider, g.Domains = Provider, nil
	for i := range nics {
		nics[i].Host = o.Host
		if nics[i].Name == "" {
			nics[i].Name = NICName(o.Host, i)
		}
		d, err := o.Fabric.Open(nics[i])
		if err != nil {
			closeAll(g.Domains)
			return nil, err
		}
		g.Domains = append(g.Domains, d)
	}
	g.Reopen = func(_ context.Context, i int) (group.Domain, error) { return o.Fabric.Open(nics[i]) }
	var err error
	if g.Control, err = o.Fabric.Control(o.Host, o.Listen); err != nil {
		closeAll(g.Domains)
		return nil, err
	}
	return group.New(ctx, g)
}

// NICName is the name of a host's NIC that was given none.
func NICName(host string, i int) string { return fmt.Sprintf("%s/%d", host, i) }

func closeAll(domains []group.Domain) {
	for _, d := range domains {
		_ = d.Close()
	}
}

// Control is how an engine on host reaches others, and, with listen, they it.
func (f *Fabric) Control(host string, listen bool) (group.Control, error) {
	c := group.Control{Dial: func(ctx context.Context, addr string) (net.Conn, error) { return f.Dial(ctx, host, addr) }}
	if !listen {
		return c, nil
	}
	l, err := f.Listen(host)
	if err != nil {
		return group.Control{}, fmt.Errorf("%w: %w", err, rdma.ErrExists)
	}
	c.Listener = l
	return c, nil
}
