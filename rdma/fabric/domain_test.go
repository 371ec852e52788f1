//go:build fabric && cgo && linux

package fabric

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/group/domaintest"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(envChild); role != "" {
		if err := child(role); err != nil {
			fmt.Fprintln(os.Stderr, role+":", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	// List first: the provider opens descriptors once in a process and never closes them,
	// which is no leak of a test.
	_, _ = List(provider)
	testkit.Main(m)
}

// provider is libfabric's provider that needs no hardware.
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
	theirs := endpoint{d: &domain{quirks: quirks{sourceLies: true}}}
	d := &domain{quirks: quirks{sourceLies: true}, byTag: map[uint32]*endpoint{7: {cookie: 70}, 8: {cookie: 80}}}
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
