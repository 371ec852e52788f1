package storage_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// stormFaults are the faults of one volume in a storm. Each %d is a seed.
var stormFaults = []string{
	`(Err EIO Any)`,
	`(Err EIO (And Reads (Offset 0 65536)))`,
	`(Err EIO (And Writes (Offset 65536 262144)))`,
	`(Err EIO (And Any (Prob 0.3 %d)))`,
	`(Err EIO Syncs)`,
	`(Err EIO (And Syncs (Prob 0.5 %d)))`,
	`(Err EROFS (Or Writes Creates Removes))`,
	`(ENOSPC (Or Writes Creates))`,
	`(ENOSPC (And Writes (Prob 0.5 %d)))`,
	`(Err EMFILE (Or Creates Opens))`,
	`(Err ESTALE Any)`,
	`(Err ENOENT (Or Creates Opens Removes))`,
	`(Delay 4s (And Any (Prob 0.3 %d)))`,
	`(Delay 30s (And Reads (Prob 0.3 %d)))`,
	`(Delay 30s (And Writes (Prob 0.3 %d)))`,
	`(Delay 30s Syncs)`,
	`(Stall Any)`,
	`(Stall Reads)`,
	`(Torn (And Writes (Prob 0.5 %d)))`,
	`(Torn (And Writes (File "catalogue") (Prob 0.5 %d)))`,
	`(Flip (And Writes (Prob 0.3 %d)))`,
	`(Flip (And Reads (Prob 0.3 %d)))`,
	`(Short (And Any (Prob 0.3 %d)))`,
}

// TestStorm: faults of one to three volumes come and go, in random order, beside writes, reads, deletions, bumps,
// quotas, leases, drains, scrubs and restarts. Every second storm is of encrypted volumes. No call takes longer than its
// limit, and no read returns wrong bytes. After the faults each volume is ok, each block that matches can be read, each
// namespace takes blocks, and when the namespaces are deleted, all space is free and nothing is counted as held.
func TestStorm(t *testing.T) {
	for seed := range uint64(24) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStorm(t, seed)
				for range 120 {
					s.step()
				}
				s.calm()
			})
		})
	}
}

// storm is a node on volumes with faults.
type storm struct {
	*rig
	rng     *rand.Rand
	names   []string
	devices []*faultio.Device
	inner   []*memio.Device
	faults  []string // by volume, empty: none
	leases  []trie.LeaseID
}

// stormPrompts is the number of prompts of a storm, and stormSeeds of the different parts of a prompt.
const stormPrompts, stormSeeds = stormSeeds * stormSeeds * stormSeeds, 5

func newStorm(t *testing.T, seed uint64) *storm {
	s := &storm{rng: rand.New(rand.NewPCG(seed, 77)), names: []string{"a", "b", "c"}}
	n := 1 + s.rng.IntN(3)
	s.rig = &rig{}
	for i := range n {
		s.inner = append(s.inner, memio.New(memio.Options{Path: fmt.Sprint("volume", i), Seed: seed}))
	}
	s.faults, s.devices = make([]string, n), make([]*faultio.Device, n)
	s.attach()
	opts := rigOptions{
		index: vfs.NewMem(), degraded: true, capacityBytes: int64(n) << 20, segmentBytes: 128 << 10,
		durability: []blockstore.Durability{blockstore.DurabilitySync, blockstore.DurabilityBatch, blockstore.DurabilityAsync}[s.rng.IntN(3)],
	}
	if seed%2 == 1 {
		opts.keys, opts.epochKeys = keyring(t, "k"), new(true)
	}
	s.rig = newRig(t, opts, s.rig.devices...)
	s.namespace("a", small)
	s.namespace("b", kv.SingleGroup(3, 4, 1000))
	s.namespace("c", kv.SingleGroup(2, 4, 3000))
	return s
}

// attach gives the rig the volumes with their present faults.
func (s *storm) attach() {
	s.rig.devices = nil
	for i := range s.inner {
		s.inner[i] = s.inner[i].Reopen()
		s.devices[i] = faultio.Wrap(s.inner[i], nil)
		s.setFault(i, s.faults[i])
		s.rig.devices = append(s.rig.devices, s.devices[i])
	}
}

func (s *storm) setFault(volume int, rules string) {
	s.faults[volume] = rules
	s.devices[volume].SetRules(faultio.MustParse(rules))
}

// within calls f, which may fail, with a context of two minutes.
func (s *storm) within(what string, f func(ctx context.Context) error) {
	const limit = 2 * time.Minute
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	began := time.Now()
	if err := f(ctx); time.Since(began) > limit {
		s.t.Errorf("%s took %v with faults %q: %v", what, time.Since(began), s.faults, err)
	}
}

// prompt returns a namespace and one of its prompts.
func (s *storm) prompt(name string, number int) (kv.Namespace, []kv.BlockID) {
	ns := must(s.node.Namespace(name))
	return ns, chain(ns, 2, number%stormSeeds, number/stormSeeds%stormSeeds, number/stormSeeds/stormSeeds)
}

// step makes one random change or call.
func (s *storm) step() {
	volume := s.rng.IntN(len(s.inner))
	ns, ids := s.prompt(s.names[s.rng.IntN(len(s.names))], s.rng.IntN(stormPrompts))
	switch op := s.rng.IntN(30); op {
	default:
		s.within("write", func(context.Context) error { _, err := s.put(ns, ids, 0); return err })
	case 10, 11, 12, 13, 14, 15:
		s.within("read", func(ctx context.Context) error { _, _, err := s.tryLoad(ctx, ns, ids); return err })
	case 16, 17:
		rules := stormFaults[s.rng.IntN(len(stormFaults))]
		s.setFault(volume, strings.ReplaceAll(rules, "%d", fmt.Sprint(s.rng.IntN(1000))))
	case 18, 19:
		s.setFault(volume, "")
	case 20:
		s.within("delete", func(context.Context) error {
			_, err := s.node.DeleteBlocks(ns.Name, ids[s.rng.IntN(len(ids))], false)
			return err
		})
	case 21:
		s.within("bump", func(ctx context.Context) error {
			_, err := s.node.BumpEpoch(ctx, ns.Name, 0, 1+s.rng.IntN(2))
			return err
		})
	case 22:
		s.within("quota", func(ctx context.Context) error {
			_, err := s.node.SetQuota(ctx, ns.Name, int64(s.rng.IntN(3))<<18)
			return err
		})
	case 23:
		req := storage.MatchRequest{Namespace: ns.Name, IDs: ids, TTL: time.Duration(1+s.rng.IntN(60)) * time.Second, Pin: s.rng.IntN(2) == 0}
		if _, m, err := s.node.Match(req); err == nil && m.Lease != 0 {
			s.leases = append(s.leases, m.Lease)
		}
	case 24:
		s.release()
	case 25:
		// The passing of time is the input: leases expire, volumes are probed, ended epochs are reclaimed.
		<-time.After(time.Duration(1+s.rng.IntN(40)) * time.Second)
	case 26:
		s.within("sync", s.node.Sync)
	case 27:
		change := s.node.DrainVolume
		if s.rng.IntN(2) == 0 {
			change = s.node.UndrainVolume
		}
		s.within("drain", func(ctx context.Context) error { return change(ctx, uint32(volume)) })
	case 28:
		s.within("scrub", func(ctx context.Context) error { return s.node.Scrub(ctx, 0, func(_, _, _ int64) error { return nil }) })
	case 29:
		s.restart()
	}
}

func (s *storm) release() {
	for _, l := range s.leases {
		_ = s.node.Release(l) // it may have expired
	}
	s.leases = nil
}

// restart closes the node and opens it again, if possible with the present faults.
func (s *storm) restart() {
	for i, rules := range s.faults {
		if strings.HasPrefix(rules, "(Stall") { // a request that never completes holds up the close
			s.setFault(i, "")
		}
	}
	s.within("close", s.node.Close)
	s.leases = nil
	before := s.trie
	s.attach()
	if err := s.tryOpen(); err == nil {
		return
	}
	if s.trie != before { // the node was refused with index and store open
		_ = errors.Join(s.trie.Close(), s.store.Close(context.Background()))
	}
	clear(s.faults)
	for _, d := range s.devices {
		_ = d.Close()
	}
	s.attach()
	s.open()
}

// settles waits until missing returns "", at most ten minutes of virtual time. missing describes what is not reached yet.
func (s *storm) settles(missing func() string) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 10*time.Minute)
	defer cancel()
	for {
		why := missing()
		if why == "" {
			return
		}
		select {
		case <-ctx.Done():
			s.t.Errorf("after ten minutes: %s", why)
			return
		case <-time.After(time.Second): // the states have no common signal
		}
	}
}

// ailing describes the volumes that are not in one of the states, "" if there is none.
func (s *storm) ailing(states ...health.State) string {
	for _, v := range s.node.Stats().Store.Volumes {
		if !slices.Contains(states, v.Health.State) {
			return fmt.Sprintf("volume %s is %v: %v", v.Path, v.Health.State, v.Health.Cause)
		}
	}
	return ""
}

// calm ends the faults, waits until the node has recovered, and checks what is left.
func (s *storm) calm() {
	t, ctx := s.t, context.Background()
	for i := range s.devices {
		s.setFault(i, "")
	}
	if s.node.Stats().Store.LostBytes > 0 { // a volume was missing at the last start
		s.restart()
	}
	s.settles(func() string { return s.ailing(health.OK, health.Draining) })
	s.release()
	for i := range s.devices {
		if err := s.node.UndrainVolume(ctx, uint32(i)); err != nil {
			t.Error(err)
		}
	}
	s.settles(func() string { return s.ailing(health.OK) })
	s.settles(func() string {
		state, why := s.node.WriteState()
		if err := s.node.Ready(); state != "serving" || err != nil {
			return fmt.Sprintf("the node is %s: %s; ready: %v", state, why, err)
		}
		return ""
	})
	if err := s.node.Sync(ctx); err != nil {
		t.Error(err)
	}
	// The first read of a block that cannot be read drops it.
	for _, dropped := range []bool{false, true} {
		for i := range stormPrompts * len(s.names) {
			ns, ids := s.prompt(s.names[i%len(s.names)], i/len(s.names))
			if result, got := s.load(ns, ids); dropped && got != len(result.Pieces) {
				t.Errorf("%d of %d matched pieces of namespace %s are read: %+v", got, len(result.Pieces), ns.Name, result.Pieces)
			}
		}
	}
	for _, name := range s.names {
		ns, err := s.node.SetQuota(ctx, name, 0)
		if err != nil {
			t.Error(err)
		}
		ids := chain(ns, 2, 7, 8, 9)
		s.mustPut(ns, ids)
		if _, got := s.load(ns, ids); got != len(ids) {
			t.Errorf("%d of %d new blocks of namespace %s are read", got, len(ids), name)
		}
		if _, err := s.node.DeleteNamespace(ctx, name, false); err != nil {
			t.Error(err)
		}
	}
	s.settles(func() string {
		st := s.node.Stats()
		x := st.Index
		if x.Pieces != 0 || x.Bytes != 0 || x.Unmatchable != 0 || x.Leases != 0 || x.Pins != 0 || st.Reservations != 0 || st.RunningReads != 0 || st.WaitingReads != 0 || st.Loans != 0 {
			return fmt.Sprintf("still held: %+v", st)
		}
		if used := st.Store.Slots.UsedBytes(); used != 0 {
			return fmt.Sprintf("%d bytes of slots are not free: %+v", used, st.Store.Slots)
		}
		if k := s.node.EpochKeys(); len(k.Erasures) != 0 {
			return fmt.Sprintf("pending erasures: %+v", k.Erasures)
		}
		return ""
	})
}
