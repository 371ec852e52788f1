package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/handshake"
)

// nic is one network interface of an engine. Without Options.NICs an engine has one nic, which
// stands for all interfaces; the system's routes choose among them.
type nic struct {
	name     string
	device   string
	listener net.Listener // nil in an engine that does not listen
	addr     rdma.NetAddr // advertised address in Desc and Addr; "" without a listener
	local    net.Addr     // source address of dialed connections; nil: chosen by the routes

	// bytesOut and bytesIn are the payload sent and received, in bytes, including repeated frames.
	bytesOut, bytesIn atomic.Uint64
	// broken is the reason why the interface is unusable, as the last call of look found it.
	broken atomic.Pointer[error]
}

// openNICs opens the listeners and sets the advertised addresses.
func (e *Engine) openNICs(ctx context.Context) error {
	for _, o := range e.opts.nics() {
		n := &nic{name: o.Name, device: o.Device}
		e.nics = append(e.nics, n)
		err := e.listen(ctx, n, o)
		if err == nil {
			err = n.dialFrom(o, len(e.opts.NICs) > 0)
		}
		if err != nil {
			for _, n := range e.nics {
				n.close()
			}
			return err
		}
		for _, name := range []string{o.Device, string(n.addr), o.Local, "any"} {
			if n.name == "" {
				n.name = name
			}
		}
	}
	return nil
}

// listen opens the listener of a NIC if o.Listen is set.
func (e *Engine) listen(ctx context.Context, n *nic, o NIC) error {
	if o.Listen == "" {
		return nil
	}
	lc := net.ListenConfig{Control: e.control(n)}
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(ctx, "tcp", o.Listen)
	if err != nil {
		return fmt.Errorf("tcp: listen on %s: %w", o.Listen, err)
	}
	n.listener = l
	n.addr = rdma.NetAddr(o.Advertise)
	if n.addr == "" {
		n.addr = rdma.NetAddr(l.Addr().String())
	}
	if e.opts.TLS != nil {
		n.addr = handshake.TLSScheme + n.addr
	}
	if len(n.addr) > rdma.MaxNetAddr {
		return fmt.Errorf("tcp: address %q of %d bytes to advertise; at most %d", n.addr, len(n.addr), rdma.MaxNetAddr)
	}
	return nil
}

// HostPort returns the host:port of an address of this provider, and whether the address must be
// dialed with TLS.
func HostPort(a rdma.NetAddr) (hostPort string, secure bool) {
	return strings.CutPrefix(string(a), handshake.TLSScheme)
}

// dialFrom sets the source address of the NIC's dialed connections. A NIC in Options.NICs that
// listens on one address also dials from this address.
func (n *nic) dialFrom(o NIC, named bool) error {
	host := o.Local
	if host == "" && n.listener != nil && named {
		if tcp, ok := n.listener.Addr().(*net.TCPAddr); ok && !tcp.IP.IsUnspecified() {
			host = tcp.IP.String()
		}
	}
	if host == "" {
		return nil
	}
	ip := net.ParseIP(host)
	if ip == nil {
		return fmt.Errorf("tcp: NIC dials from %q, which is no IP address", host)
	}
	n.local = &net.TCPAddr{IP: ip}
	return nil
}

// close closes the listener.
func (n *nic) close() {
	if n.listener != nil {
		_ = n.listener.Close()
	}
}

// errNoCarrier: the interface is down or has no link.
var errNoCarrier = errors.New("has no carrier")

// interfaceByName queries the kernel for an interface.
var interfaceByName = net.InterfaceByName

// look checks whether the interface is usable. The kernel reports a lost link immediately, while a
// connection detects it only when nothing has arrived for some time.
func (n *nic) look() {
	var why error
	if dev, err := interfaceByName(n.device); err != nil {
		why = fmt.Errorf("tcp: interface %s: %w", n.device, err)
	} else if dev.Flags&net.FlagRunning == 0 {
		why = fmt.Errorf("tcp: interface %s %w", n.device, errNoCarrier)
	}
	if why == nil {
		n.broken.Store(nil)
	} else {
		n.broken.Store(&why)
	}
}

// fault returns the last error of look.
func (n *nic) fault() error {
	if p := n.broken.Load(); p != nil {
		return *p
	}
	return nil
}

// NICs implements rdma.Engine. A NIC is down if its interface has no carrier, or if each rail that
// uses it is down.
func (e *Engine) NICs() []rdma.NIC {
	out := make([]rdma.NIC, len(e.nics))
	for i, n := range e.nics {
		out[i] = rdma.NIC{Name: n.name, Addr: n.addr, Up: true, BytesOut: n.bytesOut.Load(), BytesIn: n.bytesIn.Load()}
		why := n.fault()
		if why == nil {
			why = e.railFault(n)
		}
		if why != nil {
			out[i].Up, out[i].Reason = false, why.Error()
		}
	}
	return out
}

// railFault returns why no rail that uses n is up. It returns nil if one is up or no session has a
// rail for n.
func (e *Engine) railFault(n *nic) (why error) {
	for _, s := range e.core.Sessions() {
		s.Mu.Lock()
		for _, r := range s.rails {
			switch {
			case r.nic != n:
			case r.state == railUp:
				s.Mu.Unlock()
				return nil
			case r.why != nil:
				why = r.why
			}
		}
		s.Mu.Unlock()
	}
	return why
}
