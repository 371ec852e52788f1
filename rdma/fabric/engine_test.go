//go:build fabric && cgo && linux

package fabric

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
	"github.com/penstock-kv/penstock/rdma/rdmatest"
)

// testEngine is an engine whose NICs a case may kill.
type testEngine struct {
	*group.Engine
	mu      sync.Mutex
	domains []*domain
	killed  map[int]bool
}

// open opens NIC i, unless it was killed.
func (e *testEngine) open(i int, o DomainOptions) (*domain, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.killed[i] {
		return nil, errKilled
	}
	d, err := open(o)
	if err != nil {
		return nil, err
	}
	for i >= len(e.domains) {
		e.domains = append(e.domains, nil)
	}
	e.domains[i] = d
	return d, nil
}

// KillNIC implements rdmatest.NICKiller: the NIC fails and cannot be opened again.
func (e *testEngine) KillNIC(i int) {
	e.mu.Lock()
	e.killed[i] = true
	d := e.domains[i]
	e.mu.Unlock()
	kill(d)
}

// skipProvider skips a test that the installed provider cannot run. Debian's libfabric
// 1.17, which continuous integration installs, has the provider that each test needs,
// so under CI=true the test fails.
func skipProvider(t *testing.T, missing string) {
	t.Helper()
	major, minor := libraryVersion()
	text := fmt.Sprintf("provider %s of libfabric %d.%d %s; Debian's libfabric 1.17 has one that runs this test", candidates(provider, major, minor)[0], major, minor, missing)
	if os.Getenv("CI") == "true" {
		t.Fatal(text)
	}
	t.Skip(text)
}

// engineOver starts an engine over n NICs.
func engineOver(t testing.TB, n int, g group.Options, listen bool) *testEngine {
	t.Helper()
	at := ""
	if listen {
		at = "127.0.0.1:0"
	}
	var err error
	if g.Control, err = group.TCP(t.Context(), at, "", nil); err != nil {
		t.Fatal(err)
	}
	o := Options{Domain: DomainOptions{Provider: provider}, Group: g}
	for range max(n, 1) {
		o.NICs = append(o.NICs, loopback)
	}
	e := &testEngine{killed: make(map[int]bool)}
	if e.Engine, err = newEngine(t.Context(), o, e.open); err != nil {
		t.Fatal(err)
	}
	return e
}

func TestConformance(t *testing.T) {
	s := rdmatest.Provider{NICs: 4, Uneven: true}
	s.Open = func(t testing.TB, c rdmatest.Config) rdma.Engine {
		return engineOver(t, c.NICs, group.Options{
			Token: c.Token, InFlightOps: c.InFlightOps, InFlightBytes: c.InFlightBytes, EarlyImmediates: c.EarlyImmediates,
			OnPeerDown: c.OnPeerDown, IdleTimeout: c.IdleTimeout, HeartbeatInterval: c.IdleTimeout / 4, Logger: c.Logger,
		}, c.Listen)
	}
	for _, c := range rdmatest.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			testkit.VerifyNone(t)
			c.Run(t, s)
		})
	}
}

// TestUnmarked: Open refuses traffic classes over a provider that accepts them but marks
// no packet. The test also checks that the provider marks none.
func TestUnmarked(t *testing.T) {
	marks := [rdma.Classes]uint32{rdma.ClassCollective: 0x100 | 26} // DSCP 26, as fi_tc_dscp_set has it
	major, minor := libraryVersion()
	if !quirksOf(candidates(provider, major, minor)[0]).unmarked {
		skipProvider(t, "is not known to ignore traffic classes (quirks.unmarked)")
	}
	d, err := Open(DomainOptions{Provider: provider, NIC: loopback, TrafficClass: marks})
	if err == nil {
		err = d.Close()
	}
	if !errors.Is(err, rdma.ErrUnsupported) || !strings.Contains(err.Error(), "TrafficClass") {
		t.Errorf("with marks: %v", err)
	}
	a := engineOver(t, 1, group.Options{Token: rdma.Token(childToken), SeparateClasses: true}, true)
	defer closeEngine(t, a)
	b := engineOver(t, 1, group.Options{}, false)
	defer closeEngine(t, b)
	a.domains[0].opts.TrafficClass, b.domains[0].opts.TrafficClass = marks, marks
	if _, err := b.Connect(t.Context(), a.Addr(), rdma.Token(childToken)); err != nil {
		t.Fatal(err)
	}
	if n := markedSockets(t); n != 0 {
		t.Errorf("%d sockets are marked: %s no longer has the quirk unmarked; remove it from quirksOf", n, provider)
	}
}

// markedSockets returns how many connected sockets of this process have a type of service.
func markedSockets(t *testing.T) (marked int) {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	sockets := 0
	for _, f := range files {
		fd, err := strconv.Atoi(f.Name())
		if err != nil {
			t.Fatal(err)
		}
		tos, err := unix.GetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TOS)
		if err != nil {
			continue
		}
		if _, err := unix.Getpeername(fd); err != nil {
			continue // it is not connected
		}
		if sockets++; tos != 0 {
			marked++
		}
	}
	if want := 2 * (1 + rdma.Classes); sockets < want {
		t.Fatalf("%d connected sockets; the control connection and one of each class have %d ends here", sockets, want)
	}
	return marked
}

// TestNoProvider: New and Open fail for unknown providers, foreign addresses and bad
// options.
func TestNoProvider(t *testing.T) {
	if _, err := New(t.Context(), Options{Domain: DomainOptions{Provider: "nosuch"}}); err == nil {
		t.Error("an engine over no such provider")
	}
	if _, err := Open(DomainOptions{NIC: NIC{Addr: "192.0.2.254"}}); err == nil {
		t.Error("a domain with a foreign address")
	}
	if _, err := Open(DomainOptions{QueueDepth: 1000}); err == nil {
		t.Error("a queue too deep")
	}
	for _, o := range []Options{{Domain: DomainOptions{Provider: "shm"}}, {Domain: DomainOptions{Provider: "shm"}, NICs: []NIC{{}}}} {
		if _, err := New(t.Context(), o); !errors.Is(err, rdma.ErrUnsupported) || !strings.Contains(err.Error(), "use rdma/shm") {
			t.Errorf("an engine over libfabric's shm: %v", err)
		}
	}
}
