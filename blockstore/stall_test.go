package blockstore

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/io/memio"
)

// stallRig is a store on volumes that fail by rules. It logs the changes of their states.
type stallRig struct {
	*Store
	dev []*faultio.Device
	n   int

	mu      sync.Mutex
	changes []string
	// changed gets a value when the state of a volume has changed since the last receive.
	changed chan struct{}
}

func openStallRig(t *testing.T, volumes int, o health.Options) *stallRig {
	r := &stallRig{changed: make(chan struct{}, 1)}
	var devs []blockio.Device
	for i := range volumes {
		r.dev = append(r.dev, faultio.Wrap(memio.New(memio.Options{Path: fmt.Sprint("disk", i)}), nil))
		devs = append(devs, r.dev[i])
	}
	r.Store = mustOpenBroken(t, Options{SegmentBytes: 64 << 10, StripeBytes: 16 << 10, Health: o}, devs...)
	r.OnVolumeChange(func(c VolumeChange) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.changes = append(r.changes, fmt.Sprintf("%s %v", c.Path, c.Is.State))
		select {
		case r.changed <- struct{}{}:
		default:
		}
	})
	t.Cleanup(func() { r.set(t, "") }) // before Close of mustOpenBroken
	return r
}

// set makes the rules those of the given volumes, or of all if none is given.
func (r *stallRig) set(t *testing.T, text string, volumes ...int) {
	if volumes == nil {
		for i := range r.dev {
			volumes = append(volumes, i)
		}
	}
	for _, i := range volumes {
		r.dev[i].SetRules(rules(t, text))
	}
}

// states returns the states of the volumes, in the order of their devices.
func (r *stallRig) states() string {
	words := make([]string, len(r.dev))
	for _, v := range r.Stats().Volumes {
		words[v.Path[len("disk")]-'0'] = v.Health.State.String()
	}
	return strings.Join(words, " ")
}

// history returns the changes of states since its last call.
func (r *stallRig) history() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer func() { r.changes = nil }()
	return strings.Join(r.changes, ", ")
}

// put stores a new block, frees the slot, and returns the path of its volume.
func (r *stallRig) put(t *testing.T) (path string, err error) {
	r.n++
	b := newBlock(fmt.Sprint(r.n), 12000, 3)
	if err := put(t, r.Store, nil, b); err != nil {
		return "", err
	}
	return r.Stats().Volumes[b.ref.Extent.Volume()].Path, r.Free(b.ref)
}

// load stores blocks and syncs every second until the returned function is called. It ignores errors.
func (r *stallRig) load(t *testing.T) (stop func()) {
	done := make(chan struct{})
	var wg sync.WaitGroup
	start := func(f func()) {
		wg.Go(func() {
			for {
				select {
				case <-done:
					return
				case <-time.After(time.Second):
					f()
				}
			}
		})
	}
	for i := range 2 * len(r.dev) {
		n := 0
		start(func() {
			b := newBlock(fmt.Sprint("load ", i, n), 12000, 3)
			n++
			if put(t, r.Store, nil, b) == nil {
				_ = r.Free(b.ref)
			}
		})
	}
	start(func() { _ = r.Sync(t.Context()) })
	return func() { close(done); wg.Wait() }
}

// await waits until done, which depends on the states of the volumes, returns true. It returns the time that
// this took, and fails the test after limit.
func (r *stallRig) await(t *testing.T, limit time.Duration, done func() bool) time.Duration {
	t.Helper()
	began, end := time.Now(), time.After(limit)
	for !done() {
		select {
		case <-r.changed:
		case <-end:
			t.Fatalf("after %v the volumes are %s; their changes: %s", limit, r.states(), r.history())
		}
	}
	return time.Since(began)
}

// inUse reports whether the store takes new blocks and changes of the catalogue.
func (r *stallRig) inUse() bool { return r.Writable() == nil && r.Quorate() == nil }

func (r *stallRig) allOK() bool {
	return !slices.ContainsFunc(r.Stats().Volumes, func(v VolumeStats) bool { return v.Health.State != health.OK })
}

// TestSlowVolumeStaysInUse: the only volume of a store is slow, so that each probe takes longer than
// SlowAfter, but no request takes HungAfter. It stays suspect and takes writes and changes of the
// catalogue, for as long as it is slow.
func TestSlowVolumeStaysInUse(t *testing.T) {
	for _, c := range []struct {
		delay string
		hung  time.Duration
	}{{"1s", 10 * time.Second}, {"4s", 10 * time.Second}, {"9s", time.Minute}} {
		t.Run(fmt.Sprintf("%s hung after %v", c.delay, c.hung), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := openStallRig(t, 1, health.Options{HungAfter: c.hung})
				if _, err := r.put(t); err != nil { // makes a segment, which takes three requests
					t.Fatal(err)
				}
				r.set(t, "(Delay 4s (And Writes (Count 1)))\n(Delay "+c.delay+" Any)")
				for i := range 20 {
					if _, err := r.put(t); err != nil {
						t.Fatalf("put %d: %v", i, err)
					}
					if err := r.SetCatalogue(t.Context(), fmt.Append(nil, i)); err != nil {
						t.Fatalf("catalogue %d: %v", i, err)
					}
				}
				if got := r.history(); got != "disk0 suspect" {
					t.Errorf("the states were: %s", got)
				}
				r.set(t, "")
				awaitState(t, r.Store, 0, health.OK, 2*time.Minute)
			})
		})
	}
}

// TestHungVolumeIsSlowAfterwards: the only volume stalls for longer than HungAfter, and answers slowly
// from then on. It takes writes after its first slow probe.
func TestHungVolumeIsSlowAfterwards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := openStallRig(t, 1, health.Options{})
		stop := r.load(t)
		r.set(t, "(Stall Any)")
		r.await(t, time.Minute, func() bool { return r.states() == "failed" })
		r.set(t, "(Delay 2s Any)") // a probe takes 10 s
		r.await(t, time.Minute, func() bool { return r.states() == "suspect" })
		stop()
		if _, err := r.put(t); err != nil {
			t.Errorf("put: %v", err)
		}
	})
}

// TestSharedStall: all volumes stall at the same moment, as on a host whose disk stalls. A stall below
// HungAfter makes them suspect only. After a longer one the store takes writes within the time between
// two probes, however long the stall was, and however often the volumes stall.
func TestSharedStall(t *testing.T) {
	within := time.Second + watchEvery // ProbeEvery, rounded up to a Tick
	for _, volumes := range []int{1, 2, 3} {
		for _, stall := range []time.Duration{8 * time.Second, 12 * time.Second, 20 * time.Second, 25 * time.Second, 30 * time.Second, 5 * time.Minute} {
			t.Run(fmt.Sprintf("%d volumes %v", volumes, stall), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := openStallRig(t, volumes, health.Options{})
					stop := r.load(t)
					defer stop()
					for range 4 {
						r.set(t, "(Stall Any)")
						<-time.After(stall) // of the bubble's time: the length of the stall is the input
						r.set(t, "")
						took := r.await(t, time.Minute, r.inUse)
						synctest.Wait() // the calls that hung have ended
						if took > within {
							t.Errorf("after the stall the store took no writes for %v; %s", took, r.history())
						}
						t.Logf("writes again after %v: %s", took, r.history())
						if _, err := r.put(t); err != nil {
							t.Errorf("put: %v", err)
						}
						if err := r.SetCatalogue(t.Context(), []byte("after")); err != nil {
							t.Errorf("catalogue: %v", err)
						}
						// The other volumes may wait for ProbeMax.
						r.await(t, time.Minute, r.allOK)
					}
				})
			})
		}
	}
}

// TestStalledVolumeBesideOthers: of two volumes that stall together, one answers again. The store takes
// writes although the other volume still hangs.
func TestStalledVolumeBesideOthers(t *testing.T) {
	for _, first := range []int{0, 1} {
		for _, stall := range []time.Duration{13 * time.Second, 15 * time.Second, 40 * time.Second} {
			t.Run(fmt.Sprintf("volume %d after %v", first, stall), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := openStallRig(t, 2, health.Options{})
					stop := r.load(t)
					r.set(t, "(Stall Any)")
					<-time.After(stall) // of the bubble's time: the length of the stall is the input
					r.set(t, "", first)
					// A probe of the other volume may hold the right to write catalogues for HungAfter.
					if took := r.await(t, time.Minute, r.inUse); took > 12*time.Second {
						t.Errorf("the store took no writes for %v: %s", took, r.history())
					}
					synctest.Wait() // the calls that hung on the volume that answers have ended
					if path, err := r.put(t); err != nil || path != fmt.Sprint("disk", first) {
						t.Errorf("put: on %s, %v", path, err)
					}
					if err := r.SetCatalogue(t.Context(), []byte("one of two")); err != nil {
						t.Errorf("catalogue: %v", err)
					}
					r.set(t, "")
					stop()
				})
			})
		}
	}
}

// TestSlowVolumesBesideOthers: a slow volume stays in use as long as the others cannot do its work: while
// they are slow too, or while without it no change of the catalogue has a quorum. A volume that the
// others can replace fails, so that syncs and changes of the catalogue do not wait for it.
func TestSlowVolumesBesideOthers(t *testing.T) {
	for _, c := range []struct {
		name   string
		rules  []string // of each volume
		states string
	}{
		{"one of two is slow", []string{"", slowly}, "ok failed"},
		{"both are slow", []string{slowly, slowly}, "suspect suspect"},
		{"one of three is slow", []string{"", "", slowly}, "ok ok failed"},
		{"two of three are slow", []string{"", slowly, slowly}, "ok suspect suspect"},
		{"one of three is slow, one fails", []string{"", "(Err EIO (Or Writes Syncs))", slowly}, "ok failed suspect"},
		{"one of two is slow, the other fails", []string{"(Err EIO (Or Writes Syncs))", slowly}, "failed suspect"},
		{"one of four is slow, one fails", []string{"", "", "(Err EIO (Or Writes Syncs))", slowly}, "ok ok failed failed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := openStallRig(t, len(c.rules), health.Options{})
				for i := range c.rules {
					r.set(t, c.rules[i], i)
				}
				stop := r.load(t)
				<-time.After(3 * time.Minute) // of the bubble's time: the states after it are the final ones
				stop()
				for i := range 20 {
					if _, err := r.put(t); err != nil {
						t.Fatalf("put %d: %v", i, err)
					}
				}
				if err := r.SetCatalogue(t.Context(), []byte("new")); err != nil {
					t.Errorf("catalogue: %v", err)
				}
				if got := r.states(); got != c.states {
					t.Errorf("the volumes are %s; want %s; their changes: %s", got, c.states, r.history())
				}
				// The good volumes take all blocks.
				for i := range 10 {
					path, err := r.put(t)
					if err != nil {
						t.Fatal(err)
					}
					if at := int(path[len("disk")] - '0'); strings.HasPrefix(c.states, "ok") && c.rules[at] != "" {
						t.Errorf("block %d is on %s, which is %s", i, path, strings.Fields(c.states)[at])
					}
				}
				r.set(t, "")
				r.await(t, time.Minute, r.allOK)
				if err := r.Close(context.Background()); err != nil {
					t.Errorf("close: %v", err)
				}
			})
		})
	}
}

// slowly makes a write take longer than SlowAfter once, and each probe.
const slowly = "(Delay 4s (And Writes (Count 1)))\n(Delay 1s Any)"
