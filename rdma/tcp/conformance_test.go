package tcp

import (
	"runtime"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/rdmatest"
)

func TestConformance(t *testing.T) {
	testkit.Long(t, "the whole suite of rdma")
	rdmatest.Run(t, func(t testing.TB, c rdmatest.Config) rdma.Engine {
		return newEngine(t, optionsOf(c))
	})
}

// TestConformanceZeroCopy runs the suite with the product's options. If splicing is not
// available (canSplice) it is the same as TestConformance.
func TestConformanceZeroCopy(t *testing.T) {
	testkit.Long(t, "the whole suite of rdma")
	if raceEnabled {
		t.Skip("the race detector does not see reads by splice(2), so it is off: TestConformance is the same test")
	}
	if !canSplice {
		if runtime.GOOS == "linux" {
			t.Fatal("canSplice is false on Linux, where splice(2) is expected")
		}
		t.Skip("no splice(2) on " + runtime.GOOS + ": TestConformance is the same test")
	}
	rdmatest.Run(t, func(t testing.TB, c rdmatest.Config) rdma.Engine {
		o := optionsOf(c)
		o.ZeroCopy = true
		return newEngine(t, o)
	})
}

// optionsOf converts the suite's configuration to options.
func optionsOf(c rdmatest.Config) Options {
	o := Options{
		Token: c.Token, InFlightOps: c.InFlightOps, InFlightBytes: c.InFlightBytes,
		EarlyImmediates: c.EarlyImmediates, OnPeerDown: c.OnPeerDown, Logger: c.Logger, HandshakeTimeout: time.Minute,
	}
	if c.Listen {
		o.Listen = "127.0.0.1:0"
	}
	return o
}

// newEngine starts an engine.
func newEngine(t testing.TB, o Options) *Engine {
	t.Helper()
	e, err := New(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return e
}
