package blockstore

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/io/memio"
)

// TestHungRequest: a request that has not completed changes the state of its
// volume, and of no other.
func TestHungRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bad := faultio.Wrap(memio.New(memio.Options{Path: "bad"}), rules(t, ""))
		var mu sync.Mutex
		var seen []string
		s := mustOpenBroken(t, Options{SegmentBytes: 64 << 10, StripeBytes: 16 << 10, OnHealth: func(_ int, st health.Status) {
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, st.State.String())
		}}, bad, memio.New(memio.Options{Path: "good"}))
		var onBad *block
		for _, name := range []string{"0", "1"} {
			b := newBlock(name, 12000, 3)
			if err := put(t, s, nil, b); err != nil {
				t.Fatal(err)
			}
			if s.Stats().Volumes[b.ref.Extent.Volume()].Path == "bad" {
				onBad = b
			}
		}
		volume := onBad.ref.Extent.Volume()
		bad.SetRules(rules(t, `(Delay 60s (And Reads (File "segment-*")))`))
		done := make(chan error)
		go func() { done <- get(t, s, onBad, 0, 0) }()
		state := func() health.Status { return s.Stats().Volumes[volume].Health }
		for _, want := range []struct {
			after time.Duration
			state health.State
		}{{2 * time.Second, health.OK}, {2 * time.Second, health.Suspect}, {7 * time.Second, health.Failed}} {
			time.Sleep(want.after)
			if got := state(); got.State != want.state {
				t.Errorf("after another %v: %v, want %v", want.after, got.State, want.state)
			}
		}
		if got := state(); got.Reads() || !strings.Contains(got.Cause, "10s") {
			t.Errorf("a hung volume: reads %v, cause %q", got.Reads(), got.Cause)
		}
		if other := s.Stats().Volumes[1-volume].Health; other.State != health.OK {
			t.Errorf("the other volume: %v: %s", other.State, other.Cause)
		}
		if err := <-done; err != nil {
			t.Errorf("the read that hung: %v", err)
		}
		mu.Lock()
		if got := strings.Join(seen, " "); got != "suspect failed" {
			t.Errorf("reported: %q", got)
		}
		mu.Unlock()
		if err := s.Close(context.Background()); err != nil {
			t.Errorf("close: %v", err)
		}
	})
}
