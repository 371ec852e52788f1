package storage_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// restartWithout closes the node and opens it without the numbered devices. It returns these
// devices for restartWith.
func (r *rig) restartWithout(gone ...int) map[int]blockio.Device {
	r.t.Helper()
	r.close()
	r.reopenDevices()
	taken := map[int]blockio.Device{}
	for _, i := range gone {
		taken[i] = r.devices[i]
		r.devices[i] = blockstore.Absent("gone", errors.New("no such disk"))
	}
	r.opts.degraded = true
	r.open()
	return taken
}

// restartWith closes the node and opens it with the devices again.
func (r *rig) restartWith(back map[int]blockio.Device) {
	r.t.Helper()
	r.close()
	r.reopenDevices()
	for i, d := range back {
		r.devices[i] = d
	}
	r.open()
}

// TestDegraded: with any subset of eight volumes missing, the node serves the blocks of the other
// volumes. Blocks on missing volumes are misses and can be stored again. When the volumes are back,
// their blocks are hits again, except blocks that were deleted or stored again meanwhile. No read
// returns wrong bytes.
func TestDegraded(t *testing.T) {
	for seed := range uint64(16) {
		rng := rand.New(rand.NewPCG(seed, 21))
		r := newRig(t, rigOptions{capacityBytes: 16 << 20, segmentBytes: 128 << 10, durability: blockstore.DurabilitySync}, memories(8, seed)...)
		ns := r.namespace("m", kv.SingleGroup(2, 4, 500))
		var chains [][]kv.BlockID
		for i := range 40 {
			ids := chain(ns, 1, i, i+1, i+2)
			chains = append(chains, ids)
			r.mustPut(ns, ids[:2])
		}
		// The children are stored later, so that many of them are on another volume.
		for _, ids := range chains {
			r.mustPut(ns, ids)
		}
		gone := []int{rng.IntN(8)}
		if seed%2 == 1 {
			gone = append(gone, (gone[0]+1+rng.IntN(7))%8)
		}
		taken := r.restartWithout(gone...)
		for i, v := range r.node.Stats().Store.Volumes {
			if want := taken[i] != nil; (v.Health.State == health.Failed) != want {
				t.Errorf("seed %d: volume %d is %v", seed, i, v.Health.State)
			}
		}
		if got, want := r.node.Stats().Store.CapacityBytes, int64(16<<20)/8*int64(8-len(gone)); got != want {
			t.Errorf("seed %d: a capacity of %d bytes; want %d", seed, got, want)
		}
		hits := 0
		for _, ids := range chains {
			_, n := r.load(ns, ids)
			hits += n
		}
		if all := 3 * len(chains); hits == 0 || hits >= all || int64(all-hits) != r.node.Recovered().Hidden {
			t.Errorf("seed %d: %d of %d blocks are hits, %d hidden", seed, hits, all, r.node.Recovered().Hidden)
		}
		// The first was deleted while the index did not have it. The second was stored again.
		deleted, anew := chains[3][1], chains[4]
		if _, err := r.node.DeleteBlocks("m", deleted, false); err != nil && !errors.Is(err, trie.ErrAbsent) {
			t.Fatal(err)
		}
		r.mustPut(ns, anew)
		if _, n := r.load(ns, anew); n != 3 {
			t.Errorf("seed %d: %d of 3 blocks that were stored again are hits", seed, n)
		}
		for i := range 10 {
			r.mustPut(ns, chain(ns, 1, 1000+i)) // these may take slots that hidden entries refer to
		}
		if seed%4 == 3 {
			if _, err := r.node.BumpEpoch(context.Background(), "m", 0, 1); err != nil {
				t.Fatal(err)
			}
			if ns, _ = r.node.Namespace("m"); ns.Epoch != 2 {
				t.Errorf("epoch %d", ns.Epoch)
			}
		}
		r.restartWith(taken)
		again := 0
		for _, ids := range chains {
			result, n := r.load(ns, ids)
			again += n
			for _, p := range result.Pieces {
				if p.State == storage.Failed {
					t.Errorf("seed %d: %v", seed, p.Err)
				}
			}
		}
		switch {
		case ns.Epoch == 2 && again != 0:
			t.Errorf("seed %d: %d blocks of the old epoch are hits", seed, again)
		case ns.Epoch == 1 && again <= hits:
			t.Errorf("seed %d: %d blocks are hits with all volumes, %d were without", seed, again, hits)
		}
		if _, _, err := r.node.StatBlock("m", deleted); !errors.Is(err, trie.ErrAbsent) {
			t.Errorf("seed %d: the block that was deleted while its volume was missing is back: %v", seed, err)
		}
		r.close()
	}
}

// TestDegradedNeverReusesAGeneration: of two volumes first one is missing, then the other. Neither
// start assigns a generation that the other start has assigned.
func TestDegradedNeverReusesAGeneration(t *testing.T) {
	r := newRig(t, rigOptions{durability: blockstore.DurabilitySync}, memories(2, 1)...)
	ns := r.namespace("m", kv.SingleGroup(1, 4, 100))
	newest := r.store.NewestGeneration()
	for i := range 6 {
		taken := r.restartWithout(i % 2)
		if got := r.store.NewestGeneration(); got <= newest {
			t.Fatalf("restart %d: generation %d after %d", i, got, newest)
		}
		r.mustPut(ns, chain(ns, 1, i))
		newest = r.store.NewestGeneration()
		for j, d := range taken {
			r.close()
			r.reopenDevices()
			r.devices[j] = d
		}
		if r.node == nil {
			r.open()
		}
	}
}

// TestDegradedRefuses: without the option to serve with missing volumes, a node does not start.
// With the option, it does not start if all volumes are missing.
func TestDegradedRefuses(t *testing.T) {
	r := newRig(t, rigOptions{}, memories(2, 1)...)
	r.close()
	r.reopenDevices()
	good := r.devices
	r.devices = []blockio.Device{good[0], blockstore.Absent("gone", errors.New("no such disk"))}
	if err := r.tryOpen(); err == nil {
		t.Fatal("a node without its second volume started")
	}
	if err := good[0].Close(); err != nil {
		t.Fatal(err)
	}
	r.devices = []blockio.Device{blockstore.Absent("gone", errors.New("no such disk")), blockstore.Absent("gone", errors.New("no such disk"))}
	r.opts.degraded = true
	if err := r.tryOpen(); err == nil {
		t.Fatal("a node without volumes started")
	}
	r.devices = good
	r.reopenDevices()
	r.opts.degraded = false
	r.open()
}

// openSubset opens the store with the present devices only.
func openSubset(t *testing.T, all []blockio.Device, present ...int) *blockstore.Store {
	t.Helper()
	devices := make([]blockio.Device, len(all))
	for i := range devices {
		devices[i] = blockstore.Absent("gone", errors.New("no such disk"))
	}
	for _, i := range present {
		devices[i] = all[i].(*memio.Device).Reopen()
	}
	store, err := blockstore.Open(t.Context(), blockstore.Options{Devices: devices, Identity: "alone", CapacityBytes: 16 << 20, Degraded: true})
	if err != nil {
		t.Fatal(err)
	}
	return store
}

// TestUncertainCatalogue: an epoch is bumped while four of eight volumes fail. The other
// four volumes and the index hold the new epoch. A start with only the four stale
// volumes and without the index must fail, and so must a rebuild: the current epoch is
// on none of these volumes. With a fifth volume both find the new epoch.
func TestUncertainCatalogue(t *testing.T) {
	base := memories(8, 1)
	devices := slices.Clone(base)
	var stale []*faultio.Device
	for i := range 4 {
		stale = append(stale, faultio.Wrap(base[i], nil))
		devices[i] = stale[i]
	}
	r := newRig(t, rigOptions{segmentBytes: 128 << 10}, devices...)
	r.namespace("m", small)
	for _, d := range stale {
		d.SetRules(faultio.MustParse(`(Err EIO (Or Writes Syncs))`))
	}
	if _, err := r.node.BumpEpoch(t.Context(), "m", 0, 1); err != nil {
		t.Fatal(err)
	}
	r.close()
	for _, c := range []struct {
		present   []int
		uncertain bool
	}{{[]int{0, 1, 2, 3}, true}, {[]int{0, 1, 2, 3, 4}, false}} {
		store := openSubset(t, base, c.present...)
		for i, d := range base { // openSubset has opened the devices
			base[i] = d.(*memio.Device).Reopen()
		}
		fs := vfs.NewMem()
		index, err := trie.Open(trie.Options{Dir: "index", FS: fs})
		if err != nil {
			t.Fatal(err)
		}
		uncertain := func(err error) bool {
			return err != nil && strings.Contains(err.Error(), "too few volumes can be read")
		}
		if lost, err := storage.IndexLost(store, index); !lost || uncertain(err) != c.uncertain {
			t.Errorf("with volumes %v the index is lost: %v, %v", c.present, lost, err)
		}
		_, err = storage.Rebuild(t.Context(), storage.RebuildOptions{Store: store, Index: index})
		if uncertain(err) != c.uncertain || !c.uncertain && err != nil {
			t.Errorf("with volumes %v the rebuild returns %v", c.present, err)
		}
		if ns, err := index.Namespace("m"); !c.uncertain && (err != nil || ns.Epoch != 2) {
			t.Errorf("with volumes %v the rebuilt namespace is at epoch %d, %v", c.present, ns.Epoch, err)
		}
		if err := errors.Join(index.Close(), store.Close(t.Context())); err != nil {
			t.Error(err)
		}
	}
}

// TestSevenOfEight: while one of eight volumes fails, epochs, namespaces and quotas can
// be changed, and the node is ready. When the volume has recovered, it holds these
// changes too.
func TestSevenOfEight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		base := memories(8, 2)
		bad := faultio.Wrap(base[3], nil)
		devices := slices.Clone(base)
		devices[3] = bad
		r := newRig(t, rigOptions{segmentBytes: 128 << 10}, devices...)
		r.namespace("m", small)
		bad.SetRules(faultio.MustParse(`(Err EIO (Or Writes Syncs Creates))`))
		if _, err := r.node.BumpEpoch(t.Context(), "m", 0, 1); err != nil {
			t.Errorf("bump: %v", err)
		}
		r.namespace("other", small)
		if _, err := r.node.SetQuota(t.Context(), "m", 1<<30); err != nil {
			t.Errorf("quota: %v", err)
		}
		state := func() health.State { return r.node.Stats().Store.Volumes[3].Health.State }
		if err := r.node.Ready(); err != nil || state() != health.Failed {
			t.Errorf("the volume that missed changes is %v; ready: %v", state(), err)
		}
		time.Sleep(time.Hour)
		if got := state(); got != health.Failed {
			t.Errorf("after an hour of faults the volume is %v", got)
		}
		if bad, good := newestCatalogue(t, base[3]), newestCatalogue(t, base[0]); bad == good {
			t.Errorf("the volume has catalogue %s as the others (%s); want an older one", bad, good)
		}
		bad.SetRules(nil)
		r.awaitState("mem3", health.Suspect, 5*time.Minute)
		if bad, good := newestCatalogue(t, base[3]), newestCatalogue(t, base[0]); bad != good {
			t.Errorf("the volume takes writes again with catalogue %s; the others have %s", bad, good)
		}
		r.awaitState("mem3", health.OK, 5*time.Minute)
		if bad, good := newestCatalogue(t, base[3]), newestCatalogue(t, base[0]); bad != good {
			t.Errorf("the volume has catalogue %s, the others have %s", bad, good)
		}
	})
}

// newestCatalogue returns the checksum of the newest catalogue on the device.
func newestCatalogue(t *testing.T, dev blockio.Device) (sum string) {
	t.Helper()
	var b strings.Builder
	if err := blockstore.InspectVolume(t.Context(), dev, &b); err != nil {
		t.Fatal(err)
	}
	newest := 0
	for _, m := range regexp.MustCompile(`catalogue sequence (\d+), .* checksum (\w+)`).FindAllStringSubmatch(b.String(), -1) {
		if n, err := strconv.Atoi(m[1]); err != nil || n > newest {
			newest, sum = n, m[2]
		}
	}
	if sum == "" {
		t.Fatalf("no catalogue in\n%s", b.String())
	}
	return sum
}
