//go:build linux

package probe

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma/topo"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestCounters compares the counters of an interface, any that has some, with its counter
// names.
func TestCounters(t *testing.T) {
	if _, err := Counters("no-such-if0"); err == nil {
		t.Error("counters of an interface that does not exist")
	}
	if _, err := Counters("a-name-that-is-longer-than-any"); err == nil {
		t.Error("counters of a name that can't be")
	}
	all, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, i := range all {
		c, err := Counters(i.Name)
		if err != nil {
			t.Log(err)
			continue
		}
		seen++
		for name := range c {
			if name == "" || len(name) >= stringLen {
				t.Errorf("%s has a counter named %q", i.Name, name)
			}
		}
		again, err := Counters(i.Name)
		if err != nil || len(again) != len(c) {
			t.Errorf("%s: %d counters, then %d, %v", i.Name, len(c), len(again), err)
		}
		for name, v := range c {
			if again[name] < v {
				t.Errorf("%s %s went from %d to %d", i.Name, name, v, again[name])
			}
		}
	}
	if seen == 0 {
		t.Skip("no interface here has driver counters (ethtool -S)")
	}
}

func TestZip(t *testing.T) {
	names, values := make([]byte, 12+2*stringLen), make([]byte, 8+2*8)
	binary.NativeEndian.PutUint32(names[8:], 2)
	binary.NativeEndian.PutUint32(values[4:], 1) // a counter was removed in between
	copy(names[12:], "rx_prio3_pause")
	copy(names[12+stringLen:], "tx_prio3_pause")
	binary.NativeEndian.PutUint64(values[8:], 7)
	if got := zip(names, values, 2); len(got) != 1 || got["rx_prio3_pause"] != 7 {
		t.Errorf("%v", got)
	}
}

func TestFacts(t *testing.T) {
	h := topo.Read(topo.Options{Addrs: Addrs})
	f, err := Facts(t.Context(), h, time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	if f.Kernel == "" || f.MemlockBytes == nil || f.After == nil {
		t.Errorf("%+v", f)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Facts(ctx, h, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want it to end with the context", err)
	}
}

func TestAddrs(t *testing.T) {
	loopback := ""
	all, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range all {
		if i.Flags&net.FlagLoopback != 0 {
			loopback = i.Name
		}
	}
	if loopback == "" {
		t.Skip("no loopback interface in this network namespace")
	}
	found := false
	for _, p := range Addrs(loopback) {
		found = found || p.Addr().IsLoopback()
	}
	if !found {
		t.Errorf("%s has %v", loopback, Addrs(loopback))
	}
	if a := Addrs("no-such-if0"); a != nil {
		t.Errorf("an interface that does not exist has %v", a)
	}
}

func TestOpenable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "uverbs0")
	if err := openable(path); err == nil {
		t.Error("a device that does not exist can be opened")
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := openable(path); err != nil {
		t.Error(err)
	}
}
