package binding

import (
	"bytes"
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// authority issues certificates as files.
type authority struct {
	*testkit.Authority
	t  *testing.T
	ca string // the authority's own certificate
}

func newAuthority(t *testing.T) *authority {
	a := &authority{Authority: testkit.NewAuthority(t), t: t}
	a.ca = a.file(t.TempDir(), "ca.crt", a.PEM)
	return a
}

// issue returns the files of a certificate and its key.
func (a *authority) issue() (cert, key string) {
	a.t.Helper()
	c, k := testkit.PairPEM(a.t, a.Issue(nil))
	dir := a.t.TempDir()
	return a.file(dir, "engine.crt", c), a.file(dir, "engine.key", k)
}

func (a *authority) file(dir, name string, text []byte) string {
	a.t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, text, 0o600); err != nil {
		a.t.Fatal(err)
	}
	return path
}

// wire records the bytes on the sockets of compute NICs.
type wire struct {
	mu   sync.Mutex
	sent bytes.Buffer
}

type recorded struct {
	net.Conn
	wire *wire
}

// Write implements net.Conn.
func (c recorded) Write(b []byte) (int, error) {
	c.wire.mu.Lock()
	c.wire.sent.Write(b)
	c.wire.mu.Unlock()
	return c.Conn.Write(b)
}

// options returns those of a traffic manager whose compute NIC is recorded.
func (w *wire) options(ca, cert, key string) func(*pair) (TrafficOptions, []byte) {
	return func(p *pair) (TrafficOptions, []byte) {
		o, mem := p.trafficOptions()
		o.CAFile, o.CertFile, o.KeyFile = ca, cert, key
		o.Compute = func(ctx context.Context, secure *tls.Config, log *slog.Logger) (rdma.Engine, error) {
			wrap := func(c net.Conn) net.Conn { return recorded{c, w} }
			return tcp.New(ctx, tcp.Options{Listen: "127.0.0.1:0", Token: o.Token, TLS: secure, TLSOnly: secure != nil, Wrap: wrap, Logger: log})
		}
		return o, mem
	}
}

// TestTrafficTLS: with TLS between two engines no part of the KV is on the wire in plaintext, and
// without TLS it is.
func TestTrafficTLS(t *testing.T) {
	a := newAuthority(t)
	cert, key := a.issue()
	for _, secure := range []bool{false, true} {
		var w wire
		options := w.options("", "", "")
		if secure {
			options = w.options(a.ca, cert, key)
		}
		p := newPairIn(t, options)
		if addr := p.prefill.peer().Addr.NICs[0]; strings.HasPrefix(string(addr), "tls://") != secure {
			t.Errorf("the address is %s", addr)
		}
		p.testTransfers()
		seen := 0
		for block := range 9 {
			for layer := range 2 {
				if bytes.Contains(w.sent.Bytes(), computed(layer, block)[:256]) {
					seen++
				}
			}
		}
		if w.sent.Len() < 10*int(geo.LayerBytes(0)) {
			t.Errorf("%d bytes are recorded", w.sent.Len())
		}
		if secure && seen > 0 || !secure && seen < 10 {
			t.Errorf("with TLS %v, %d layers of blocks are on the wire in plaintext", secure, seen)
		}
	}
}

// TestTrafficTLSRefuses: an engine is refused if it has no TLS or no certificate of the cluster's CA.
func TestTrafficTLSRefuses(t *testing.T) {
	a, other := newAuthority(t), newAuthority(t)
	cert, key := a.issue()
	foreign, foreignKey := other.issue()
	var w wire
	none, good := w.options("", "", ""), w.options(a.ca, cert, key)
	p := &pair{rig: newRig(t, testnode.Start(t, testnode.Options{}).Addr)}
	p.ensure()
	for _, s := range []struct {
		name            string
		prefill, decode func(*pair) (TrafficOptions, []byte)
		code            Code
		want            string
	}{
		{"decode has no TLS", good, none, Auth, "requires TLS"},
		{"prefill has no TLS", none, good, Auth, "has no TLS"},
		{"prefill has another CA's certificate", w.options(a.ca, foreign, foreignKey), good, Auth, "unknown authority"},
		{"decode has another CA's certificate", good, w.options(a.ca, foreign, foreignKey), Unavailable, "unknown certificate authority"},
	} {
		t.Run(s.name, func(t *testing.T) {
			p.prefill, p.decode = p.open(s.prefill), p.open(s.decode)
			h, err := p.decode.of.Decode(traffic.DecodeJob{Request: "r", Blocks: 1, Pages: pagesFrom(0, 1), Peer: p.prefill.peer()}, time.Minute)
			dec := valueOf(t, p.library.Transfer, h, err)
			if err := p.decode.failed(dec, s.code); err == nil || !strings.Contains(err.Error(), s.want) {
				t.Errorf("%v; want %q", err, s.want)
			}
			p.must(p.decode.of.Close())
			p.must(p.prefill.of.Close())
		})
	}
	for _, files := range [][3]string{{a.ca, "", ""}, {"", cert, key}, {a.ca, cert, ""}, {a.ca, key, key}, {key, cert, key}, {"/no/such", cert, key}} {
		o, _ := p.trafficOptions()
		o.CAFile, o.CertFile, o.KeyFile = files[0], files[1], files[2]
		if _, err := p.ns.OpenTraffic(o); CodeOf(err) != Invalid || !strings.Contains(err.Error(), "_file") {
			t.Errorf("%v: %v", files, err)
		}
	}
}

// TestTrafficTLSRenewed: a certificate that is replaced in its files is used by the next connection of
// an engine that runs. Before, both engines are refused.
func TestTrafficTLSRenewed(t *testing.T) {
	a, other := newAuthority(t), newAuthority(t)
	cert, key := other.issue()
	var w wire
	p := newPairIn(t, w.options(a.ca, cert, key))
	h, err := p.decode.of.Decode(traffic.DecodeJob{Request: "before", Blocks: 1, Pages: pagesFrom(0, 1), Peer: p.prefill.peer()}, time.Minute)
	if err := p.decode.failed(valueOf(t, p.library.Transfer, h, err), Auth); err == nil || !strings.Contains(err.Error(), "unknown authority") {
		t.Errorf("with another CA's certificate: %v", err)
	}
	newCert, newKey := a.issue()
	p.must(os.Rename(newCert, cert))
	p.must(os.Rename(newKey, key))
	p.testTransfers()
}
