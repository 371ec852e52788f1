package cluster

import (
	"errors"
	"fmt"
	"os/exec"

	"github.com/penstock-kv/penstock/internal/netlab"
)

// network is the three networks and the places on them.
type network struct {
	lab                       *netlab.Lab
	control, storage, compute *netlab.Switch
}

// place is where one process runs.
type place struct {
	name string
	ns   *netlab.Namespace
	// ctl, snic and cnic are its NICs; nil where it has none.
	ctl, snic, cnic *netlab.Link
}

// newNetwork makes the switches.
func newNetwork() (_ *network, err error) {
	n := &network{}
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

// place adds one, with a NIC on the control network.
func (n *network) place(name string) (*place, error) {
	p := &place{name: name}
	var err error
	if p.ns, err = n.lab.Namespace(name); err == nil {
		p.ctl, err = n.control.Attach(p.ns, netlab.LinkOptions{})
	}
	if err != nil {
		return nil, fmt.Errorf("cluster: %s: %w", name, err)
	}
	return p, nil
}

// start starts a command there.
func (p *place) start(cmd *exec.Cmd) error { return p.ns.Start(cmd) }

// at is an address on one of the place's NICs.
func at(k *netlab.Link, port int) string { return fmt.Sprintf("%v:%d", k.A.IP(), port) }
