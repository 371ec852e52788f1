package storage_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
)

// newPair returns a rig on two volumes. The first, bad, fails by rules. The hot set is off.
func newPair(t *testing.T, opts rigOptions) (*rig, *faultio.Device) {
	bad := faultio.Wrap(memio.New(memio.Options{Path: "bad"}), nil)
	opts.edit = func(o *storage.Options) { o.HotBytes = -1 }
	return newRig(t, opts, bad, memio.New(memio.Options{Path: "good"})), bad
}

// health returns the state of the volume with that path.
func (r *rig) health(path string) health.Status {
	for _, v := range r.node.Stats().Store.Volumes {
		if v.Path == path {
			return v.Health
		}
	}
	r.t.Fatalf("no volume %q", path)
	return health.Status{}
}

// awaitState waits until the volume with that path has the state. It fails the test if
// that takes longer than limit.
func (r *rig) awaitState(path string, want health.State, limit time.Duration) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), limit)
	defer cancel()
	for seq := r.node.Events().Last(); r.health(path).State != want; {
		events, err := r.node.Events().After(ctx, seq, 1000)
		if err != nil {
			r.t.Fatalf("volume %s is %+v; want %v: %v", path, r.health(path), want, err)
		}
		seq = events[len(events)-1].Sequence
	}
}

// TestCommitReleasesMemory: when Commit returns, the memory of the writes that the devices have
// completed is free, so the next Reserve is not refused for lack of it.
func TestCommitReleasesMemory(t *testing.T) {
	r := newRig(t, rigOptions{}, memio.New(memio.Options{}), memio.New(memio.Options{}))
	ns := r.namespace("m", small)
	for i := range testkit.Rounds(3000, 1000) {
		r.mustPut(ns, chain(ns, 6, i))
		if used := r.arena.Stats().UsedBytes; used != 0 {
			t.Fatalf("after commit %d: %d bytes are in use", i, used)
		}
	}
}

// TestHungWrites: if a volume does not complete a write, the same Commit writes the
// piece to another volume. The memory and the slot of the first write are not reused
// until the volume has completed that write.
func TestHungWrites(t *testing.T) {
	for _, d := range []blockstore.Durability{blockstore.DurabilityBatch, blockstore.DurabilitySync} {
		t.Run(d.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, bad := newPair(t, rigOptions{durability: d})
				ns := r.namespace("m", small)
				var chains [][]kv.BlockID
				for i := range 4 {
					chains = append(chains, chain(ns, 6, i))
					r.mustPut(ns, chains[i])
				}
				idle := r.arena.Stats().UsedBytes
				bad.SetRules(faultio.MustParse(`(Delay 5m (And Writes (File "segment-*")))`))
				for i := range 8 {
					ids := chain(ns, 6, 100+i)
					began := time.Now()
					r.mustPut(ns, ids)
					if took := time.Since(began); took > 15*time.Second {
						t.Errorf("a put took %v", took)
					}
					chains = append(chains, ids)
				}
				if used := r.arena.Stats().UsedBytes; used == idle {
					t.Error("no memory is kept for the writes that hang")
				}
				if n := r.store.Stats().Slots.CondemnedBytes; n == 0 {
					t.Error("the slots of the writes that hang are free")
				}
				read := func() {
					t.Helper()
					for i, ids := range chains {
						if _, n := r.load(ns, ids); n != len(ids) {
							t.Errorf("chain %d: %d of %d blocks", i, n, len(ids))
						}
					}
				}
				read()
				bad.SetRules(nil)
				time.Sleep(10 * time.Minute)
				if used, slots := r.arena.Stats().UsedBytes, r.store.Stats().Slots.CondemnedBytes; used != idle || slots != 0 {
					t.Errorf("after the writes have completed, %d bytes of memory and %d of slots are not given back", used-idle, slots)
				}
				read()
			})
		})
	}
}

// TestHungSegment: a volume does not complete writes to its segments or to the header of
// a new segment. Its other files work, so a probe makes the volume healthy again. No
// Commit waits for the header.
func TestHungSegment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, bad := newPair(t, rigOptions{capacityBytes: 64 << 20})
		ns := r.namespace("m", small)
		r.mustPut(ns, chain(ns, 6, 1))
		bad.SetRules(faultio.MustParse(`(Delay 1h (And Writes (File "segment-*")))`))
		for i := range 30 {
			began := time.Now()
			r.mustPut(ns, chain(ns, 32, 100+i))
			if took := time.Since(began); took > 15*time.Second {
				t.Errorf("put %d took %v; the volume is %v", i, took, r.health("bad").State)
			}
			time.Sleep(10 * time.Second)
		}
		bad.SetRules(nil)
		time.Sleep(2 * time.Hour)
	})
}

// TestSyncFailsDuringCommit: a volume completes a write, and then a sync of the volume
// fails before the Commit has ended. The Commit writes the piece to the other volume.
func TestSyncFailsDuringCommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := faultio.Wrap(memio.New(memio.Options{Path: "slow"}), nil)
		bad := faultio.Wrap(memio.New(memio.Options{Path: "bad"}), nil)
		r := newRig(t, rigOptions{capacityBytes: 64 << 20, edit: func(o *storage.Options) { o.HotBytes, o.SyncEvery = -1, time.Hour }}, slow, bad)
		// The pieces of one group go to one volume, those of the other group to the other.
		ns := r.namespace("m", kv.Geometry{BlockTokens: 4, Groups: []kv.Group{
			{Kind: kv.Full, Layers: 2, TokenBytes: 300}, {Kind: kv.Window, Layers: 2, TokenBytes: 300, WindowTokens: 64},
		}})
		for i := range 4 {
			r.putAll(ns, chain(ns, 6, i))
		}
		if err := r.node.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		slow.SetRules(faultio.MustParse(`(Delay 1s (And Writes (File "segment-*")))`))
		bad.SetRules(faultio.MustParse(`(Err EIO Syncs)`))
		ids := chain(ns, 4, 100)
		var wg sync.WaitGroup
		wg.Go(func() { r.putAll(ns, ids) })
		synctest.Wait() // the Commit waits for the slow volume
		if err := r.node.Sync(t.Context()); err == nil || r.health("bad").State != health.Failed {
			t.Errorf("sync: %v; the volume is %v", err, r.health("bad").State)
		}
		wg.Wait()
		if result, n := r.load(ns, ids); result.Match.Blocks != len(ids) || n != 2*len(ids) {
			t.Errorf("%d of %d blocks match, %d pieces were delivered", result.Match.Blocks, len(ids), n)
		}
		bad.SetRules(nil)
	})
}

// TestRecoveredVolumeIsSynced: blocks are committed on a volume, and the volume fails
// before the next sync. After the volume has recovered, the blocks are durable, without
// another write.
func TestRecoveredVolumeIsSynced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := memio.New(memio.Options{Path: "bad"})
		bad := faultio.Wrap(disk, nil)
		r := newRig(t, rigOptions{}, bad, memio.New(memio.Options{Path: "good"}))
		ns := r.namespace("m", small)
		for i := range 8 {
			r.mustPut(ns, chain(ns, 6, i))
		}
		bad.SetRules(faultio.MustParse(`(Err EIO (Or Writes Syncs))`))
		r.awaitState("bad", health.Failed, time.Minute)
		bad.SetRules(nil)
		r.awaitState("bad", health.OK, 10*time.Minute)
		time.Sleep(time.Minute) // SyncEvery passes several times
		want := segmentsOf(t, disk.Clone())
		for seed := range uint64(8) {
			if got := segmentsOf(t, disk.Clone().Crash(seed)); !maps.EqualFunc(got, want, bytes.Equal) {
				t.Errorf("seed %d: the segments are other ones after a power loss", seed)
			}
		}
	})
}

// segmentsOf returns the content of each segment file of a volume, by name.
func segmentsOf(t *testing.T, d *memio.Device) map[string][]byte {
	names, err := d.List()
	if err != nil {
		t.Fatal(err)
	}
	out := make(map[string][]byte)
	for _, name := range names {
		if !strings.HasPrefix(name, "segment-") {
			continue
		}
		f, err := d.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		memory, err := arena.New(arena.Options{SizeBytes: f.Size()})
		if err != nil {
			t.Fatal(err)
		}
		batch := []blockio.Request{{Op: blockio.Read, File: f, Bufs: [][]byte{memory.Bytes()[:f.Size()]}}}
		if err := errors.Join(d.Do(t.Context(), batch), batch[0].Err); err != nil {
			t.Fatal(err)
		}
		out[name] = bytes.Clone(batch[0].Bufs[0])
		if err := errors.Join(f.Close(), memory.Close()); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// TestOneDiskFailsWrites: with one of two disks failing every write, or every
// sync, no block is refused, with any durability.
func TestOneDiskFailsWrites(t *testing.T) {
	for _, fault := range []string{`(Err EIO Writes)`, `(Err EIO Syncs)`, `(Err EIO (Or Writes Syncs))`, `(Short Writes)`} {
		for _, d := range []blockstore.Durability{blockstore.DurabilityBatch, blockstore.DurabilitySync} {
			t.Run(fault+" "+d.String(), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r, bad := newPair(t, rigOptions{durability: d})
					ns := r.namespace("m", small)
					bad.SetRules(faultio.MustParse(fault))
					for i := range 200 {
						r.mustPut(ns, chain(ns, 3, i))
					}
					if err := r.node.Sync(t.Context()); err != nil && d == blockstore.DurabilitySync {
						t.Errorf("sync after the volume has failed: %v", err)
					}
					if err := r.node.Sync(t.Context()); err != nil {
						t.Errorf("second sync: %v", err)
					}
					if got := r.health("bad").State; got == health.OK {
						t.Errorf("the failing volume is %v", got)
					}
					if state, why := r.node.WriteState(); state != "serving" {
						t.Errorf("the node is %s: %s", state, why)
					}
					if _, err := r.node.BumpEpoch(t.Context(), "m", 0, 1); err != nil {
						t.Errorf("epoch bump: %v", err)
					}
					if _, err := r.node.SetQuota(t.Context(), "m", 1<<30); err != nil {
						t.Errorf("quota: %v", err)
					}
					r.namespace("other", small)
					bad.SetRules(nil)
					r.awaitState("bad", health.OK, 2*time.Minute)
				})
			})
		}
	}
}

// TestUnreadableBlockIsDropped: a block that its device cannot read is a miss, is
// counted apart from corrupt ones, and the next write puts it elsewhere.
func TestUnreadableBlockIsDropped(t *testing.T) {
	for _, by := range []string{"read", "scrub", "verify"} {
		t.Run(by, func(t *testing.T) {
			r, dev := faulty(t, rigOptions{})
			ns := r.namespace("m", small)
			ids := chain(ns, 1, 7)
			r.mustPut(ns, ids)
			r.mustPut(ns, chain(ns, 1, 8))
			_, infos, err := r.node.StatBlock("m", ids[0])
			if err != nil {
				t.Fatal(err)
			}
			first := infos[0].Ref
			dev.SetRules(faultio.MustParse(`(Err EIO (And Reads (File "segment-*") (Offset 4096 16384)))`))
			switch by {
			case "read":
				if _, n := r.load(ns, ids); n != 0 {
					t.Fatal("the fault did not fall on the block")
				}
			case "scrub":
				if err := r.node.Scrub(t.Context(), 0, func(_, _, _ int64) error { return nil }); err != nil {
					t.Fatal(err)
				}
			case "verify":
				if _, err := r.node.Verify(t.Context(), "m", 0, ids); err != nil {
					t.Fatal(err)
				}
			}
			if got := testutil.ToFloat64(r.stats.UnreadableBlocks.WithLabelValues(by)); got != 1 {
				t.Errorf("%v unreadable blocks were counted, want 1", got)
			}
			if got := testutil.ToFloat64(r.stats.CorruptBlocks.WithLabelValues(by)); got != 0 {
				t.Errorf("%v corrupt blocks were counted", got)
			}
			r.mustPut(ns, ids)
			_, infos, err = r.node.StatBlock("m", ids[0])
			if err != nil || infos[0].Ref == first {
				t.Errorf("the block was not written again: %v, %v", infos, err)
			}
			dev.SetRules(nil)
			if _, n := r.load(ns, ids); n != 1 {
				t.Error("the block that was written again cannot be read")
			}
		})
	}
}

// TestLostMount: a mount that loses its backend makes the node read-only, and it
// writes again, without a restart, when the mount is back.
func TestLostMount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dev := faultio.Wrap(memio.New(memio.Options{Path: "bad"}), nil)
		r := newRig(t, rigOptions{edit: func(o *storage.Options) { o.HotBytes = -1 }}, dev)
		ns := r.namespace("m", small)
		ids := chain(ns, 4, 1)
		r.mustPut(ns, ids)
		dev.SetRules(faultio.MustParse(`(Err ENOTCONN Any)`))
		for i := range 10 {
			if _, err := r.put(ns, chain(ns, 4, 100+i), 0); errors.Is(err, storage.ErrReadOnly) {
				break
			}
		}
		if state, why := r.node.WriteState(); state == "serving" || why == "" {
			t.Errorf("the node is %s (%s)", state, why)
		}
		time.Sleep(10 * time.Minute)
		if got := r.health("bad").State; got != health.Failed {
			t.Errorf("the volume is %v", got)
		}
		dev.SetRules(nil)
		r.awaitState("bad", health.OK, 2*time.Minute)
		if state, why := r.node.WriteState(); state != "serving" {
			t.Errorf("the mount is back, and the node is %s: %s", state, why)
		}
		if _, n := r.load(ns, ids); n != 4 {
			t.Errorf("%d of 4 blocks are left; no block was read during the fault, so none may be dropped", n)
		}
		r.mustPut(ns, chain(ns, 4, 2))
	})
}

// TestStalledDisk: the only disk stalls under load, for less and for longer than the time after which it has
// failed. A slow disk stays writable. After a long stall the node takes writes again soon, and has lost no
// block.
func TestStalledDisk(t *testing.T) {
	for _, stall := range []time.Duration{9 * time.Second, 25 * time.Second} {
		t.Run(stall.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dev := faultio.Wrap(memio.New(memio.Options{Path: "bad"}), nil)
				r := newRig(t, rigOptions{edit: func(o *storage.Options) { o.HotBytes = -1 }}, dev)
				ns := r.namespace("m", small)
				ids := chain(ns, 4, 1)
				r.mustPut(ns, ids)
				dev.SetRules(faultio.MustParse(`(Stall Any)`))
				var wg sync.WaitGroup
				for i := range 4 {
					// A write or a sync of them hangs. It may fail, or the blocks may be refused.
					wg.Go(func() { _, _ = r.put(ns, chain(ns, 4, 100+i), 0) })
				}
				<-time.After(stall) // of the bubble's time: the length of the stall is the input
				want := health.Suspect
				if stall > 10*time.Second {
					want = health.Failed
				}
				if got := r.health("bad"); got.State != want {
					t.Errorf("after %v the volume is %v: %v; want %v", stall, got.State, got.Cause, want)
				}
				dev.SetRules(nil)
				r.awaitState("bad", health.Suspect, 1250*time.Millisecond)
				synctest.Wait()
				if state, why := r.node.WriteState(); state != "serving" || r.node.Ready() != nil {
					t.Errorf("after the stall the node is %s: %s, %v", state, why, r.node.Ready())
				}
				wg.Wait()
				r.mustPut(ns, chain(ns, 4, 2))
				if _, n := r.load(ns, ids); n != 4 {
					t.Errorf("%d of 4 blocks are left", n)
				}
				r.awaitState("bad", health.OK, time.Minute)
			})
		})
	}
}

// TestVolumeStateEvents: the log of events has each change of the state of the faulty
// volume, and no event of the other volume.
func TestVolumeStateEvents(t *testing.T) {
	for _, tc := range []struct {
		fault string
		lasts time.Duration
		want  []string
	}{
		{`(Err EIO Syncs)`, 0, []string{"bad: ok to failed: a sync failed", "bad: failed to suspect: recovering", "bad: suspect to ok"}},
		{`(Err EIO (And Writes (File "segment-*")))`, 0, []string{"bad: ok to suspect: a write failed", "bad: suspect to ok"}},
		{`(Err EIO (Or Writes Creates))`, time.Minute, []string{"bad: ok to suspect", "bad: suspect to failed", "bad: failed to suspect: recovering", "bad: suspect to ok"}},
	} {
		t.Run(tc.fault, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, bad := newPair(t, rigOptions{})
				ns := r.namespace("m", small)
				for i := range 8 {
					r.mustPut(ns, chain(ns, 1, i))
				}
				after := r.node.Events().Last()
				bad.SetRules(faultio.MustParse(tc.fault))
				r.mustPut(ns, chain(ns, 1, 100))
				r.mustPut(ns, chain(ns, 1, 101))
				_ = r.node.Sync(t.Context()) // fails in some of the cases
				time.Sleep(tc.lasts)
				bad.SetRules(nil)
				r.awaitState("bad", health.OK, 5*time.Minute)
				events, err := r.node.Events().After(t.Context(), after, 1000)
				if err != nil {
					t.Fatal(err)
				}
				var got []string
				for _, e := range events {
					if e.Kind != storage.VolumeState {
						continue
					}
					c := e.Volume
					line := fmt.Sprintf("%s: %v to %v", c.Path, c.Was, c.Is.State)
					if c.Is.Cause != nil {
						line += ": " + c.Is.Cause.Error()
					}
					got = append(got, line)
				}
				if !slices.EqualFunc(got, tc.want, strings.HasPrefix) {
					t.Errorf("%q\nwant %q", got, tc.want)
				}
			})
		})
	}
}

// TestNamespaceChangesCanBeGivenUp: while a volume hangs and a change of the catalogue waits for it, other changes
// of namespaces wait until their contexts end, and do nothing afterwards.
func TestNamespaceChangesCanBeGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, bad := newPair(t, rigOptions{})
		ns := r.namespace("m", small)
		r.mustPut(ns, chain(ns, 1, 1))
		bad.SetRules(faultio.MustParse(`(Stall Any)`))
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := r.node.BumpEpoch(context.Background(), "m", 0, 1); err != nil {
				t.Errorf("the bump that waits for the volume: %v", err)
			}
		})
		synctest.Wait()
		for name, change := range map[string]func(context.Context) error{
			"bump":   func(ctx context.Context) error { _, err := r.node.BumpEpoch(ctx, "m", 0, 1); return err },
			"retire": func(ctx context.Context) error { _, err := r.node.RetireEpoch(ctx, "m", 1, false, false); return err },
			"quota":  func(ctx context.Context) error { _, err := r.node.SetQuota(ctx, "m", 1<<20); return err },
			"delete": func(ctx context.Context) error { _, err := r.node.DeleteNamespace(ctx, "m", false); return err },
			"create": func(ctx context.Context) error {
				_, err := r.node.CreateNamespace(ctx, kv.Namespace{Name: "n", Geometry: small, Index: kv.IndexTrie})
				return err
			},
			"pin": func(ctx context.Context) error {
				_, _, err := r.node.PinEpoch(ctx, "me", "m", 0, time.Minute)
				return err
			},
		} {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			began := time.Now()
			if err := change(ctx); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != time.Second {
				t.Errorf("%s with a limit of 1 s returned %v after %v", name, err, time.Since(began))
			}
			cancel()
		}
		wg.Wait()
		bad.SetRules(nil)
		r.awaitState("bad", health.OK, 5*time.Minute)
		if all := r.node.Namespaces(); len(all) != 1 || all[0].Epoch != 2 || all[0].QuotaBytes != 0 {
			t.Errorf("the namespaces are %+v; want only m, at epoch 2 without a quota", all)
		}
	})
}
