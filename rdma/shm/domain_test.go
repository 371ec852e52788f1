package shm

import (
	"errors"
	"testing"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma/group/domaintest"
)

// openPair opens two domains. With shared, the memory of the case is in an arena that both
// share; otherwise each reads the other's process.
func openPair(t testing.TB, shared bool) domaintest.Pair {
	t.Helper()
	a, b := openDomain(t), openDomain(t)
	p := domaintest.Pair{A: a, B: b, KillB: func() { b.fail(errors.New("killed by a test")) }}
	if !shared {
		return p
	}
	space := openArena(t, 64<<20)
	for _, d := range []*Domain{a, b} {
		if err := d.Share(space); err != nil {
			t.Fatal(err)
		}
	}
	p.Alloc = func(t testing.TB, n int) []byte { return take(t, space, n) }
	return p
}

// take returns n zeroed bytes of an arena, until t ends.
func take(t testing.TB, space *arena.Arena, n int) []byte {
	t.Helper()
	buf, err := space.TryAlloc(n)
	if err != nil {
		t.Fatal(err)
	}
	clear(buf.Bytes())
	t.Cleanup(buf.Release)
	return buf.Bytes()[:n:n]
}

func openDomain(t testing.TB) *Domain {
	t.Helper()
	d, err := NewDomain("shm0", nil)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func openArena(t testing.TB, bytes int64) *arena.Arena {
	t.Helper()
	a, err := arena.New(arena.Options{SizeBytes: bytes, Shared: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return a
}

// TestDomain: sources in a shared arena, and sources in the memory of the process.
func TestDomain(t *testing.T) {
	testkit.Long(t, "the whole suite of group.Domain")
	for name, shared := range map[string]bool{"shared arena": true, "process memory": false} {
		t.Run(name, func(t *testing.T) {
			domaintest.Run(t, func(t testing.TB) domaintest.Pair { return openPair(t, shared) })
		})
	}
}
