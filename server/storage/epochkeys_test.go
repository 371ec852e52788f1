package storage_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
)

// epochRig is a node on volumes in memory whose blocks need the secrets of their epochs.
func epochRig(t *testing.T, volumes int, edit ...func(*rigOptions)) *rig {
	on := true
	opts := rigOptions{capacityBytes: 16 << 20, segmentBytes: 128 << 10, durability: blockstore.DurabilitySync, keys: keyring(t, "k"), epochKeys: &on}
	for _, f := range edit {
		f(&opts)
	}
	return newRig(t, opts, memories(volumes, 1)...)
}

// stolen returns the epochs of a namespace whose blocks can be read from a copy of the slots on the devices with all
// keys and the present catalogues. The copy is opened as a store, and each slot is read without regard to the
// index.
func stolen(t *testing.T, r *rig, copies []*memio.Device, ns kv.Namespace) []kv.Epoch {
	t.Helper()
	var devices []blockio.Device
	for i, c := range copies {
		now := r.devices[i].(*memio.Device).Clone()
		c = c.Clone()
		for _, name := range []string{ondisk.SuperblockName, ondisk.CatalogueName} {
			copyFile(t, now, c, name)
		}
		if err := now.Close(); err != nil {
			t.Fatal(err)
		}
		devices = append(devices, c.Reopen())
	}
	store, err := blockstore.Open(t.Context(), blockstore.Options{Devices: devices, CapacityBytes: r.opts.capacityBytes, Keys: r.opts.keys})
	if err != nil {
		t.Fatal(err)
	}
	found := make(map[kv.Epoch]bool)
	_, err = store.Scan(t.Context(), blockstore.ScanOptions{Verify: true}, func(_ kv.Ref, h *ondisk.SlotHeader) error {
		if h.Namespace == ns.ID {
			found[h.Epoch] = true
		}
		return nil
	})
	if err := errors.Join(err, store.Close(context.Background())); err != nil {
		t.Fatal(err)
	}
	var epochs []kv.Epoch
	for e := range found {
		epochs = append(epochs, e)
	}
	slices.Sort(epochs)
	return epochs
}

// copyFile replaces the content of a file on one device by that on another.
func copyFile(t *testing.T, from, to *memio.Device, name string) {
	t.Helper()
	src, err := from.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	dst, err := to.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	buf := bytes.Repeat([]byte{0}, int(src.Size())+blockio.Align)
	for !blockio.Aligned(buf) {
		buf = buf[1:]
	}
	buf = buf[:src.Size()]
	for _, d := range []struct {
		dev *memio.Device
		req blockio.Request
	}{
		{from, blockio.Request{Op: blockio.Read, File: src, Bufs: [][]byte{buf}}},
		{to, blockio.Request{Op: blockio.Write, File: dst, Bufs: [][]byte{buf}}},
	} {
		batch := []blockio.Request{d.req}
		if err := errors.Join(d.dev.Do(t.Context(), batch), batch[0].Err); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(src.Close(), dst.Close()); err != nil {
		t.Fatal(err)
	}
}

// copies returns copies of the devices as they are now.
func (r *rig) copies() (all []*memio.Device) {
	for _, d := range r.devices {
		all = append(all, d.(*memio.Device).Clone())
	}
	return all
}

// bump begins the next epoch of a namespace.
func (r *rig) bump(name string, keep int) kv.Namespace {
	r.t.Helper()
	if _, err := r.node.BumpEpoch(context.Background(), name, 0, keep); err != nil {
		r.t.Fatal(err)
	}
	return must(r.node.Namespace(name))
}

// erased fails the test unless no erasure is pending.
func (r *rig) erased(when string) {
	r.t.Helper()
	if k := r.node.EpochKeys(); len(k.Erasures) != 0 {
		r.t.Errorf("%s: pending erasures: %+v", when, k.Erasures)
	}
}

// TestEpochErasure: when epochs end by a bump, by retirement, by the end of a pin, or with their namespace, copies of the slots from
// before do not give their blocks any more, and blocks of live epochs are hits all the time: after a restart, a rebuild
// of the index, and a drain.
func TestEpochErasure(t *testing.T) {
	r := epochRig(t, 3)
	g := kv.SingleGroup(2, 4, 500)
	ns, other := r.namespace("m", g), r.namespace("other", g)
	chainOf := func(ns kv.Namespace) []kv.BlockID { return chain(ns, 1, int(ns.Epoch), 1, 2, 3, 4, 5) }
	r.mustPut(other, chainOf(other))
	r.mustPut(ns, chainOf(ns))
	lived := map[kv.Epoch]kv.Namespace{ns.Epoch: ns}
	before := r.copies()
	live := func(when string, want ...kv.Epoch) {
		t.Helper()
		got := stolen(t, r, before, ns)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s: a copy gives blocks of the epochs %v; want %v", when, got, want)
		}
		for _, e := range want {
			at := lived[e]
			if result, n := r.load(at, chainOf(at), func(l *storage.LoadRequest) { l.Epoch = e }); n != 6 {
				t.Errorf("%s: epoch %d: %d of 6 blocks, %+v", when, e, n, result.Match)
			}
		}
		if _, n := r.load(other, chainOf(other)); n != 6 {
			t.Errorf("%s: %d of 6 blocks of the other namespace", when, n)
		}
		r.erased(when)
	}
	next := func(keep int) {
		t.Helper()
		ns = r.bump("m", keep)
		lived[ns.Epoch] = ns
		r.mustPut(ns, chainOf(ns))
		before = r.copies()
	}
	live("at first", 1)
	next(2)
	next(3)
	live("three live epochs", 1, 2, 3)
	if _, err := r.node.RetireEpoch(t.Context(), "m", 2, false, false); err != nil {
		t.Fatal(err)
	}
	live("epoch 2 is retired", 1, 3)
	ns = r.bump("m", 1)
	live("after a bump that keeps no epoch")
	lived[ns.Epoch] = ns
	r.mustPut(ns, chainOf(ns))
	before = r.copies()
	r.close()
	r.reopenDevices()
	r.open()
	live("after a restart", 4)
	r.close()
	r.reopenDevices()
	r.rebuild()
	live("after a rebuild of the index", 4)
	if err := r.node.DrainVolume(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	r.drained(1)
	live("after a drain", 4)
	if _, err := r.node.DeleteNamespace(t.Context(), "m", false); err != nil {
		t.Fatal(err)
	}
	if got := stolen(t, r, before, ns); len(got) != 0 {
		t.Errorf("a copy gives blocks of the epochs %v of a deleted namespace", got)
	}
	again := r.namespace("m", g)
	r.mustPut(again, chainOf(again))
	if _, n := r.load(again, chainOf(again)); n != 6 {
		t.Errorf("%d of 6 blocks of a new namespace of the same name", n)
	}
	if got := stolen(t, r, r.copies(), again); again.Epoch != 5 || !slices.Equal(got, []kv.Epoch{5}) {
		t.Errorf("the search finds the epochs %v of the new namespace", got)
	}
	r.erased("at the end")
}

// TestPinnedEpochErasure: the secret of a pinned epoch is erased when its pin ends.
func TestPinnedEpochErasure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := epochRig(t, 2)
		ns := r.namespace("m", kv.SingleGroup(2, 4, 500))
		ids := chain(ns, 1, 1, 2, 3)
		r.mustPut(ns, ids)
		if _, _, err := r.node.PinEpoch(t.Context(), "me", "m", 0, 30*time.Second); err != nil {
			t.Fatal(err)
		}
		before := r.copies()
		r.bump("m", 1)
		if got := stolen(t, r, before, ns); len(got) != 1 {
			t.Errorf("pinned: a copy gives %v; want epoch 1", got)
		}
		<-time.After(time.Minute) // of the bubble's time: the pin lasts 30 s
		synctest.Wait()
		if got := stolen(t, r, before, ns); len(got) != 0 {
			t.Errorf("the pin has ended, and a copy gives %v", got)
		}
		r.erased("at the end")
	})
}

// TestReservationAcrossErasure: a writer that reserved in an epoch which ends before its commit is refused as in a node
// without secrets, and no corrupt block is counted.
func TestReservationAcrossErasure(t *testing.T) {
	for _, on := range []bool{false, true} {
		r := epochRig(t, 2, func(o *rigOptions) { o.epochKeys = &on })
		ns := r.namespace("m", kv.SingleGroup(2, 4, 500))
		ids := chain(ns, 1, 1, 2, 3)
		commit, err := r.reserve(ns, ids, 0)
		if err != nil {
			t.Fatal(err)
		}
		ns = r.bump("m", 1)
		stored, err := commit()
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range stored {
			if s.Stored || s.Reason != "stale_epoch" && s.Reason != "parent_absent" {
				t.Errorf("secrets %v: block %d: stored %v, %q, %v", on, s.Block, s.Stored, s.Reason, s.Err)
			}
		}
		r.mustPut(ns, ids)
		if _, n := r.load(ns, ids); n != 3 {
			t.Errorf("%d of 3 blocks of the new epoch", n)
		}
	}
}

// TestEpochKeysOnForStoredBlocks: when the secrets are switched on for a node with blocks, the rewriter gives all blocks a
// secret, and the status counts the ones without. When they are switched off, the blocks stay readable.
func TestEpochKeysOnForStoredBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		off, on := false, true
		r := epochRig(t, 2, func(o *rigOptions) { o.epochKeys = &off })
		prompts := r.fillTenants(4)
		r.close()
		r.reopenDevices()
		r.opts.epochKeys = &on
		r.open()
		without := r.node.EpochKeys()
		if !without.On || without.Without == 0 || without.WithoutBytes == 0 {
			t.Errorf("%+v; want blocks without a secret", without)
		}
		r.whole("switched on", prompts)
		r.rewriteAt(1 << 20)
		limit, tick := time.After(time.Hour), time.NewTicker(time.Second)
		defer tick.Stop()
		for r.node.EpochKeys().Without > 0 {
			select {
			case <-tick.C:
			case <-limit:
				t.Fatalf("%+v", r.node.EpochKeys())
			}
		}
		r.whole("rewritten", prompts)
		r.close()
		r.reopenDevices()
		r.opts.epochKeys = &off
		r.open()
		if k := r.node.EpochKeys(); k.On || k.Without != 0 {
			t.Errorf("switched off: %+v", k)
		}
		r.whole("switched off", prompts)
	})
}

// TestEpochErasureDegraded: an epoch that ends while a volume is missing is pending, with the volume's path, until the node was started
// with the volume. Its blocks on that volume are then misses.
func TestEpochErasureDegraded(t *testing.T) {
	r := epochRig(t, 4)
	g := kv.SingleGroup(2, 4, 500)
	ns, gone := r.namespace("m", g), r.namespace("gone", g)
	var chains [][]kv.BlockID
	for i := range 12 {
		chains = append(chains, chain(ns, 1, i, i+1))
		r.mustPut(ns, chains[i])
		r.mustPut(gone, chain(gone, 1, i))
	}
	taken, began := r.restartWithout(3), time.Now().Truncate(time.Millisecond)
	r.bump("m", 1)
	if _, err := r.node.DeleteNamespace(t.Context(), "gone", false); err != nil {
		t.Fatal(err)
	}
	check := func(when string, pending bool) {
		t.Helper()
		erasures := slices.Clone(r.node.EpochKeys().Erasures)
		for i := range erasures {
			if age := time.Since(erasures[i].Since); age < 0 || age > time.Since(began) {
				t.Errorf("%s: pending for %v", when, age)
			}
			erasures[i].Since = time.Time{}
		}
		text := fmt.Sprint(erasures)
		want := "[]"
		if pending {
			want = fmt.Sprint([]blockstore.Erasure{{Namespace: ns.ID, UpTo: 1, Volumes: []string{"gone"}}, {Namespace: gone.ID, UpTo: 1, Volumes: []string{"gone"}}})
		}
		if text != want {
			t.Errorf("%s: pending %s; want %s", when, text, want)
		}
	}
	check("after the end", true)
	again := r.restartWithout()
	if len(again) != 0 {
		t.Fatal("no further device is taken")
	}
	check("after a restart", true)
	r.restartWith(taken)
	check("with the volume", false)
	if got := append(stolen(t, r, r.copies(), ns), stolen(t, r, r.copies(), gone)...); len(got) != 0 {
		t.Errorf("blocks of the epochs %v can be read", got)
	}
	for _, ids := range chains {
		if _, n := r.load(ns, ids); n != 0 {
			t.Errorf("%d blocks of an ended epoch are hits", n)
		}
	}
}

// TestEraseAgain: an erasure that fails, because no volume takes writes, does not fail the bump, and is repeated when the volume has
// recovered.
func TestEraseAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		on := true
		mem := memio.New(memio.Options{})
		dev := faultio.Wrap(mem, faultio.MustParse(""))
		r := newRig(t, rigOptions{keys: keyring(t, "k"), epochKeys: &on}, dev)
		ns := r.namespace("m", kv.SingleGroup(2, 4, 500))
		ids := chain(ns, 1, 1, 2)
		r.mustPut(ns, ids)
		before := mem.Clone()
		dev.SetRules(faultio.MustParse(`(Err EIO (And Writes (File "catalogue") (After 1)))`))
		ns = r.bump("m", 1)
		if len(r.node.EpochKeys().Erasures) != 1 {
			t.Errorf("pending while the volume does not take the catalogue: %+v", r.node.EpochKeys())
		}
		dev.SetRules(faultio.MustParse(""))
		<-time.After(10 * time.Minute) // of the bubble's time: the volume is probed, and the node tries again
		synctest.Wait()
		r.erased("after the volume has recovered")
		r.devices = []blockio.Device{mem}
		if got := stolen(t, r, []*memio.Device{before}, ns); len(got) != 0 {
			t.Errorf("a copy gives blocks of the epochs %v", got)
		}
		r.mustPut(ns, ids)
		if _, n := r.load(ns, ids); n != 2 {
			t.Errorf("%d of 2 blocks of the new epoch", n)
		}
	})
}

// TestEpochErasureAcrossCrashes fails the power at each mutation of a bump and of a deletion. After the next start, the epochs that are
// not live cannot be read from a copy of before, and blocks of the live epochs are hits.
func TestEpochErasureAcrossCrashes(t *testing.T) {
	for _, doing := range []string{"bump", "delete"} {
		for at, done := int64(0), false; !done; at++ {
			fs := vfs.NewCrashableMem()
			r := epochRig(t, 2, func(o *rigOptions) { o.index = fs })
			ns, kept := r.namespace("m", kv.SingleGroup(2, 4, 500)), r.namespace("kept", kv.SingleGroup(2, 4, 500))
			ids, keptIDs := chain(ns, 1, 1, 2, 3), chain(kept, 1, 1, 2, 3)
			r.mustPut(ns, ids)
			r.mustPut(kept, keptIDs)
			before := r.copies()
			failing, allowed := r.devices[at%2].(*memio.Device), at/2
			mutations := failing.Mutations()
			failing.PowerOffAfter(allowed)
			var err error
			if doing == "bump" {
				_, err = r.node.BumpEpoch(t.Context(), "m", 0, 1)
			} else {
				_, err = r.node.DeleteNamespace(t.Context(), "m", false)
			}
			if err != nil { // the other volume is enough
				t.Errorf("%s, power of one volume off after %d: %v", doing, allowed, err)
			}
			done = at%2 == 1 && failing.Mutations()-mutations < allowed
			r.crash(uint64(at))
			now, err := r.node.Namespace("m")
			wanted := []kv.Epoch(nil)
			if err == nil && now.IsLive(1) {
				wanted = []kv.Epoch{1}
				if _, n := r.load(ns, ids); n != 3 {
					t.Errorf("%s, power off after %d: %d of 3 blocks of the live epoch", doing, at, n)
				}
			}
			if got := stolen(t, r, before, ns); !slices.Equal(got, wanted) {
				t.Errorf("%s, power off after %d: a copy gives blocks of the epochs %v; want %v", doing, at, got, wanted)
			}
			if _, n := r.load(kept, keptIDs); n != 3 {
				t.Errorf("%s, power off after %d: %d of 3 blocks of the other namespace", doing, at, n)
			}
			r.erased(fmt.Sprintf("%s, power off after %d", doing, at))
			r.close()
		}
	}
}
