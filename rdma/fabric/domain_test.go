//go:build fabric && cgo && linux

package fabric

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/group/domaintest"
	"github.com/penstock-kv/penstock/rdma/rdmatest/simrdma"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(envChild); role != "" {
		if err := child(role); err != nil {
			fmt.Fprintln(os.Stderr, role+":", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	// Call List first: the provider opens descriptors once in a process and never closes them,
	// which is no leak of a test.
	_, _ = List(provider)
	testkit.Main(m)
}

// provider is a libfabric provider that needs no hardware.
const provider = "tcp"

// loopback is the NIC of every test.
var loopback = NIC{Addr: "127.0.0.1"}

// openDomain opens a domain for a test.
func openDomain(t testing.TB) *domain {
	t.Helper()
	d, err := open(DomainOptions{Provider: provider, NIC: loopback})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestDomain(t *testing.T) {
	domaintest.Run(t, func(t testing.TB) domaintest.Pair {
		a, b := openDomain(t), openDomain(t)
		return domaintest.Pair{A: a, B: b, KillB: func() { kill(b) }}
	})
}

// TestDomainPolled: domains whose completion queue has no descriptor are polled, and pass
// the same suite. EFA's queues have none.
func TestDomainPolled(t *testing.T) {
	polled := func(t testing.TB) *domain {
		d := openDomain(t)
		w, err := newWaiter(d.native, -1)
		if err = errors.Join(err, d.wait.close()); err != nil {
			t.Fatal(err)
		}
		d.wait = w
		return d
	}
	domaintest.Run(t, func(t testing.TB) domaintest.Pair {
		a, b := polled(t), polled(t)
		return domaintest.Pair{A: a, B: b, KillB: func() { kill(b) }}
	})
}

// TestAPIVersion: a domain has the behaviour of the requested version.
func TestAPIVersion(t *testing.T) {
	d := openDomain(t)
	if major, minor := requestedVersion(libraryVersion()); d.traits.api != uint32(major)<<16|uint32(minor) {
		t.Errorf("the domain has the behaviour of version %d.%d; %d.%d is requested", d.traits.api>>16, d.traits.api&0xffff, major, minor)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// TestBackoffWaiter: a poller whose completion queue has no descriptor does not pause just after a
// work, and later for 50 us at a time. Wake ends a pause. The time is virtual.
func TestBackoffWaiter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &native{}
		w := &backoffWaiter{n: n, woken: make(chan struct{}, 1)}
		took := func() time.Duration {
			began := time.Now()
			w.wait(time.Hour)
			return time.Since(began)
		}
		if d := took(); d != 50*time.Microsecond {
			t.Errorf("without work a wait took %v", d)
		}
		n.taken.Add(1)
		for range 3 {
			if d := took(); d != 0 {
				t.Errorf("behind a work a wait took %v", d)
			}
		}
		for range 3 {
			w.worked = w.worked.Add(-time.Millisecond)
			if d := took(); d != 50*time.Microsecond {
				t.Errorf("1 ms behind the last work a wait took %v", d)
			}
		}
		w.wake()
		if d := took(); d != 0 {
			t.Errorf("a wait that was woken took %v", d)
		}
	})
}

// TestDeclared: the EFA of package simrdma has the limits that this package reports for the
// provider efa, with the properties in efa's manual.
func TestDeclared(t *testing.T) {
	efa := &domain{
		traits: traits{provider: "efa", maxWrite: 1 << 30, virtAddr: true, providerKeys: true, localKeys: true, source: true, keyBytes: 8, dataBytes: 4, depth: 256},
		quirks: quirksOf("efa"), opts: DomainOptions{Provider: "efa"},
	}
	efa.opts.EnsureDefaults()
	if err := efa.usable(); err != nil {
		t.Error(err)
	}
	want := efa.limitsOf()
	o := simrdma.NICOptions{Name: "efa", MaxWrite: want.MaxWrite, MaxMessage: want.MaxMessage, QueueDepth: want.QueueDepth}.LikeSRD()
	d, err := simrdma.NewFabric(1, simrdma.FabricOptions{}).Open(o)
	if err != nil {
		t.Fatal(err)
	}
	if got := d.Limits(); got != want {
		t.Errorf("efa is simulated with the limits %+v; it has %+v", got, want)
	}
	if o.VirtualAddresses != efa.traits.virtAddr {
		t.Errorf("efa is simulated with virtual addresses %t", o.VirtualAddresses)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// errKilled is the error of a domain after kill.
var errKilled = errors.New("killed by a test")

// kill makes the next Poll of d fail, as if d's queue had failed.
func kill(d *domain) {
	d.poll.Lock()
	d.fatal = errKilled
	d.poll.Unlock()
	d.Wake()
}

// TestSenderBesideImmediate: for a provider without source addresses, the tag sent with
// an immediate names the sender. An immediate with an unknown tag is dropped.
func TestSenderBesideImmediate(t *testing.T) {
	theirs := endpoint{d: &domain{quirks: quirks{noSourceAddress: true}}}
	d := &domain{quirks: quirks{noSourceAddress: true}, byTag: map[uint32]*endpoint{7: {cookie: 70}, 8: {cookie: 80}}}
	for _, tag := range []uint32{7, 8, 9} {
		theirs.peerTag = tag
		var ev event
		ev.kind, ev.has_data, ev.len = evRemote, 1, 100
		*(*uint64)(&ev.data) = theirs.data(&group.Work{Imm: 1 << 31, Len: 100})
		d.handle(&ev)
	}
	want := []group.Completion{{Kind: group.KindImmediate, Cookie: 70, Imm: 1 << 31, Len: 100}, {Kind: group.KindImmediate, Cookie: 80, Imm: 1 << 31, Len: 100}}
	if !slices.Equal(d.backlog, want) {
		t.Errorf("%+v, want %+v", d.backlog, want)
	}
}
