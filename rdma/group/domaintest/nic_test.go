package domaintest

import (
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// ledger is a Domain that only registers memory, and records which memory is open.
type ledger struct {
	group.Domain
	open   map[*entry]bool
	closed bool
	woken  chan struct{}
}

// entry is a registration of a ledger.
type entry struct {
	group.Memory
	of *ledger
}

func (l *ledger) Register([]byte, rdma.RegisterOptions) (group.Memory, error) {
	m := &entry{of: l}
	l.open[m] = true
	return m, nil
}

func (m *entry) Close() error {
	delete(m.of.open, m)
	return nil
}

func (l *ledger) Poll([]group.Completion) (int, error) { return 0, nil }
func (l *ledger) Wait()                                { <-l.woken }
func (l *ledger) Wake()                                { l.woken <- struct{}{} }

func (l *ledger) Close() error {
	l.closed = true
	return nil
}

// TestAbandon: no memory stays registered after a failed case.
func TestAbandon(t *testing.T) {
	l := &ledger{open: make(map[*entry]bool), woken: make(chan struct{}, 1)}
	n := newNIC(&env{T: t}, "a", l)
	for range 3 {
		n.memory(64)
	}
	if len(l.open) != 3 {
		t.Fatalf("%d are registered", len(l.open))
	}
	n.abandon()
	if len(l.open) != 0 || !l.closed {
		t.Errorf("%d are still registered, closed: %v", len(l.open), l.closed)
	}
}
