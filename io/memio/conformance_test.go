package memio_test

import (
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/blockiotest"
	"github.com/penstock-kv/penstock/io/memio"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestConformance(t *testing.T) {
	blockiotest.Run(t, func(*testing.T) blockiotest.Volume {
		d := memio.New(memio.Options{CapacityBytes: 1 << 30})
		return blockiotest.Volume{Open: func() (blockio.Device, error) { return d.Reopen(), nil }}
	})
}
