package simrdma

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// Provider is the value of Info.Provider for engines on a fabric.
const Provider = "sim"

// Options configure an engine on a fabric.
type Options struct {
	// Fabric is the network of the engine's NICs.
	Fabric *Fabric
	// Host is the name of the engine's machine, unique in the fabric.
	Host string
	// Listen makes the engine reachable under the address Host.
	Listen bool
	// NICs are the engine's NICs. Default: one NIC. In each, Host is overwritten, and an empty
	// Name is replaced by the host's name and a number.
	NICs []NICOptions
	// Group holds the engine's other options. Provider, Domains, Reopen and Control are
	// overwritten.
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

// NICName is the default name of a host's NIC.
func NICName(host string, i int) string { return fmt.Sprintf("%s/%d", host, i) }

func closeAll(domains []group.Domain) {
	for _, d := range domains {
		_ = d.Close()
	}
}

// Control returns the transport for sessions of an engine on host. If listen is set, the transport
// also accepts connections.
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
