//go:build fabric && cgo && linux

package fabric

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/penstock-kv/penstock/rdma/group"
)

// Built reports whether this program supports libfabric.
const Built = true

// New starts an engine over one or several domains of a provider.
func New(ctx context.Context, o Options) (*group.Engine, error) {
	return newEngine(ctx, o, func(_ int, d DomainOptions) (*domain, error) { return open(d) })
}

// newEngine is New with a function that opens NIC i.
func newEngine(ctx context.Context, o Options, open func(int, DomainOptions) (*domain, error)) (*group.Engine, error) {
	g := o.Group
	g.Provider, g.Domains = Provider, nil
	g.SeparateClasses = o.separate()
	fail := func(err error) (*group.Engine, error) {
		for _, d := range g.Domains {
			err = errors.Join(err, d.Close())
		}
		if g.Control.Listener != nil {
			err = errors.Join(err, g.Control.Listener.Close())
		}
		return nil, err
	}
	o.Domain.EnsureDefaults()
	if err := o.Domain.Validate(); err != nil {
		return fail(err)
	}
	nics := o.NICs
	if len(nics) == 0 {
		var err error
		if nics, err = defaultNICs(o.Domain.Provider); err != nil {
			return fail(err)
		}
	}
	openNIC := func(i int) (*domain, error) {
		n := o.Domain
		n.NIC = nics[i]
		d, err := open(i, n)
		if err != nil {
			return nil, err
		}
		if before := count(nics[:i], nics[i]); before > 0 {
			d.name = fmt.Sprintf("%s.%d", d.name, before)
		}
		return d, nil
	}
	var about []string
	for i := range nics {
		d, err := openNIC(i)
		if err != nil {
			return fail(err)
		}
		g.Domains = append(g.Domains, d)
		about = append(about, d.about())
	}
	g.Detail = strings.Join(about, ", ")
	g.Reopen = func(_ context.Context, i int) (group.Domain, error) {
		d, err := openNIC(i)
		if err != nil {
			return nil, err // a plain nil: an interface that holds a nil domain would not be nil
		}
		return d, nil
	}
	return group.New(ctx, g)
}

// count returns how many times all contains n.
func count(all []NIC, n NIC) (times int) {
	for _, x := range all {
		if x == n {
			times++
		}
	}
	return times
}

// about returns a one-line description of the domain for logs and status.
func (d *domain) about() string {
	major, minor := libraryVersion()
	return fmt.Sprintf("%s of %s (libfabric %d.%d)", d.name, d.traits.provider, major, minor)
}

// defaultNICs returns all domains except the loopback, or only the loopback if there is no other.
func defaultNICs(provider string) ([]NIC, error) {
	all, err := List(provider)
	if err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("fabric: provider %q has no domain on this host; see `fi_info -p %s`", provider, provider)
	}
	return pickNICs(provider, all)
}

// List returns the domains of a provider, each once, with the address that peers are most likely
// to reach. IPv4 comes before IPv6, and link-local addresses are omitted.
func List(provider string) ([]NIC, error) {
	major, minor := libraryVersion()
	var all []NIC
	for _, name := range candidates(provider, major, minor) {
		domains, err := list(name)
		if err != nil {
			return nil, err
		}
		for _, f := range domains {
			if f.provider == name {
				all = addNIC(all, NIC{Domain: f.domain, Addr: f.addr})
			}
		}
	}
	return all, nil
}

// addNIC adds n to all, unless n's address is link-local. If all already has an entry for the
// domain of n, n replaces this entry if peers are more likely to reach n's address.
func addNIC(all []NIC, n NIC) []NIC {
	rank := func(addr string) int {
		a, err := netip.ParseAddr(addr)
		switch {
		case err != nil || a.IsLinkLocalUnicast():
			return 0
		case a.Is6():
			return 1
		}
		return 2
	}
	if addr, err := netip.ParseAddr(n.Addr); err == nil && addr.IsLinkLocalUnicast() {
		return all
	}
	for i := range all {
		if all[i].Domain == n.Domain {
			if rank(n.Addr) > rank(all[i].Addr) {
				all[i] = n
			}
			return all
		}
	}
	return append(all, n)
}
