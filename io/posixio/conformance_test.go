package posixio_test

import (
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/blockiotest"
	"github.com/penstock-kv/penstock/io/posixio"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestConformance(t *testing.T) {
	testkit.Long(t, "the whole suite of blockio on a disk")
	for name, opts := range map[string]posixio.Options{
		"direct":      {},
		"buffered":    {Buffered: true},
		"one worker":  {Workers: 1},
		"tiny budget": {Budget: blockio.BudgetOptions{MinBytes: 2 * blockio.Align, MaxBytes: 2 * blockio.Align}},
	} {
		t.Run(name, func(t *testing.T) {
			blockiotest.Run(t, func(t *testing.T) blockiotest.Volume {
				dir := t.TempDir()
				return blockiotest.Volume{Open: func() (blockio.Device, error) { return posixio.Open(dir, opts) }}
			})
		})
	}
}
