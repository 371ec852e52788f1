package suite

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/lab/bench"
)

// TestVLLMOptions: a value outside of its range is an error with the flag and the value.
func TestVLLMOptions(t *testing.T) {
	good := VLLMOptions{Agents: 1, PromptTokens: 128, RateBits: 1e6}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(o *VLLMOptions){
		"--agents 0:":    func(o *VLLMOptions) { o.Agents = 0 },
		"--agents 1001:": func(o *VLLMOptions) { o.Agents = 1001 },
		"--prompt 127:":  func(o *VLLMOptions) { o.PromptTokens = 127 },
		"--prompt 8193:": func(o *VLLMOptions) { o.PromptTokens = 8193 },
		"--rate 0:":      func(o *VLLMOptions) { o.RateBits = 1e6 - 1 },
		"--rate 1001:":   func(o *VLLMOptions) { o.RateBits = 1001e6 },
	} {
		o := good
		change(&o)
		if err := o.Validate(); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
}

// TestUsage: with reads by prefill engines only, the NICs of decode engines are not part of the capacity.
func TestUsage(t *testing.T) {
	const rate = 80e6 // 10 MB/s
	engines := map[string]float64{"p0": 0, "d0": 0, "d1": 0}
	for policy, want := range map[dualpath.ReadPolicy]float64{dualpath.PrefillOnly: 0.9, dualpath.Shorter: 0.3} {
		if got := usage(18e6, 2, engines, policy, rate); math.Abs(got-want) > 1e-9 {
			t.Errorf("%v: %v; want %v", policy, got, want)
		}
	}
	if got := usage(18e6, 2, engines, dualpath.PrefillOnly, 3*rate); math.Abs(got-0.3) > 1e-9 {
		t.Errorf("at three times the rate: %v; want 0.3", got)
	}
	if got := usage(1, 0, engines, dualpath.PrefillOnly, rate); math.IsInf(got, 0) || math.IsNaN(got) {
		t.Errorf("a replay without a duration: %v", got)
	}
}

// TestFaultList: each fault has a name of its own, and only the first does nothing.
func TestFaultList(t *testing.T) {
	names := make(map[string]bool)
	for i, f := range (&clusterSuite{suiteRun: newRun(testWorld(t), "cluster")}).faultList() {
		if names[f.name] || f.name == "" || (f.do == nil) != (i == 0) {
			t.Errorf("fault %d: %q", i, f.name)
		}
		names[f.name] = true
	}
	if len(names) != 13 {
		t.Errorf("%d faults", len(names))
	}
}

// TestKeep: keep returns the contenders that match, in their order.
func TestKeep(t *testing.T) {
	in := []bench.Contender{{Name: "a"}, {Name: "b"}, {Name: "c"}}
	out := keep(in, func(c bench.Contender) bool { return c.Name != "b" })
	if len(out) != 2 || out[0].Name != "a" || out[1].Name != "c" {
		t.Errorf("%v", out)
	}
}

// TestPause: pause returns the cause of an ended context.
func TestPause(t *testing.T) {
	why := errors.New("the user has pressed Ctrl-C")
	ctx, cancel := context.WithCancelCause(t.Context())
	if err := pause(ctx, time.Nanosecond); err != nil {
		t.Error(err)
	}
	cancel(why)
	if err := pause(ctx, time.Hour); !errors.Is(err, why) {
		t.Error(err)
	}
}
