//go:build uring

package uring

import (
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/blockiotest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// requireRings skips the test, with the reason, where the kernel refuses rings. CI has rings.
func requireRings(t testing.TB) {
	t.Helper()
	if ok, why := Probe(t.TempDir()); !ok {
		skipUnlessNew(t, why)
	}
}

func TestConformance(t *testing.T) {
	requireRings(t)
	tiny := blockio.BudgetOptions{MinBytes: 2 * page, MaxBytes: 2 * page}
	for name, o := range map[string]Options{
		"caller":    {},
		"shared":    {Wait: WaitShared},
		"auto":      {Wait: WaitAuto, AutoThreshold: 1},
		"small":     {Entries: 2, Rings: 1, Budget: tiny},
		"few-slots": {Wait: WaitShared, SharedEntries: 2},
		"few-bytes": {Wait: WaitAuto, AutoThreshold: 1, Rings: 1, Budget: tiny},
	} {
		t.Run(name, func(t *testing.T) {
			blockiotest.Run(t, func(t *testing.T) blockiotest.Volume {
				dir := t.TempDir()
				return blockiotest.Volume{Open: func() (blockio.Device, error) { return Open(dir, o) }}
			})
		})
	}
}
