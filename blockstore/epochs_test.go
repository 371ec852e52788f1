package blockstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/blockstore/crypt"
	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
)

// withEpochs are options of a store with keys, in which new slots need the secrets of their epochs or not.
func withEpochs(ring *crypt.Keyring, on bool) Options {
	return Options{Keys: ring, EpochKeys: &on, StripeBytes: 16 << 10, SegmentBytes: 64 << 10, CatalogueBytes: 8192, CapacityBytes: 4 << 20}
}

func epoch(ns kv.NamespaceID, e kv.Epoch) EpochID { return EpochID{ns, e} }

// blockOf makes a block of an epoch.
func blockOf(id EpochID, name string) *block {
	b := newBlock(fmt.Sprintf("%s of %v", name, id), 12000, 3)
	b.key.Namespace, b.key.Epoch = id.Namespace, id.Epoch
	return b
}

// reopenAll opens the content of devices again, with the blocks as the index.
func reopenAll(t *testing.T, opts Options, devs []*memio.Device, blocks ...*block) *Store {
	t.Helper()
	for i := range devs {
		devs[i] = devs[i].Reopen()
	}
	s, err := open(t, opts, devs...)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range blocks {
		if err := s.Adopt(b.ref, b.key.PayloadBytes, b.key.Layers); err != nil && !errors.Is(err, ErrStale) {
			t.Fatal(err)
		}
	}
	if err := s.Ready(); err != nil {
		t.Fatal(err)
	}
	return s
}

func closeStore(t *testing.T, s *Store) {
	t.Helper()
	if err := s.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// secretsOn returns the secrets in each catalogue area of a device that the keys decrypt.
func secretsOn(t *testing.T, ring *crypt.Keyring, d *memio.Device) (areas [2][]ondisk.EpochSecret) {
	t.Helper()
	d = d.Reopen()
	defer d.Close()
	return secretsIn(t, ring, d, ondisk.CatalogueName)
}

// secretsIn is secretsOn for one of the catalogues of a device.
func secretsIn(t *testing.T, ring *crypt.Keyring, d blockio.Device, name string) (areas [2][]ondisk.EpochSecret) {
	t.Helper()
	c, err := probe(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	f, err := d.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for area := range 2 {
		h, blob, err := readCatalogueArea(t.Context(), d, f, area, c.superblock.CatalogueBytes)
		if err != nil {
			continue
		}
		o, err := openCatalogue(ring, c.superblock.Node, h, blob)
		if err != nil {
			t.Fatal(err)
		}
		areas[area] = o.secrets
	}
	return areas
}

// hasSecret reports whether an area of a device has a secret of the epoch.
func hasSecret(t *testing.T, ring *crypt.Keyring, d *memio.Device, id EpochID) bool {
	t.Helper()
	areas := secretsOn(t, ring, d)
	return slices.ContainsFunc(slices.Concat(areas[0], areas[1]), func(s ondisk.EpochSecret) bool {
		return EpochID{s.Namespace, s.Epoch} == id
	})
}

// decryptable tries each slot of a device with a key, alone and with each of the secrets, as an attacker does who
// has all of them. It returns the epochs of the slots that it can decrypt.
func decryptable(t *testing.T, key *crypt.Key, secrets []ondisk.EpochSecret, d *memio.Device) map[EpochID]int {
	t.Helper()
	d = d.Reopen()
	defer d.Close()
	keys := []*crypt.Key{key}
	for i := range secrets {
		s := crypt.Secret(secrets[i].Secret)
		keys = append(keys, key.With(&s))
	}
	found := make(map[EpochID]int)
	for name, file := range content(t, d) {
		if _, ok := ondisk.ParseSegmentName(name); !ok {
			continue
		}
		sh, err := ondisk.DecodeSegmentHeader(file)
		if err != nil {
			continue
		}
		for slot := range sh.Slots {
			for _, k := range keys {
				b := bytes.Clone(file[sh.SlotOffset(slot):][:sh.SlotBytes])
				h, err := ondisk.DecodeSlotHeader(b, nil)
				if err != nil || h.Key == (ondisk.KeyID{}) {
					break
				}
				if _, err := openSealed(k, sh.Volume, &h, b); err == nil {
					found[EpochID{h.Namespace, h.Epoch}]++
				}
			}
		}
	}
	return found
}

// wantErased fails the test unless a read of the block is a miss because its epoch has ended.
func wantErased(t *testing.T, s *Store, b *block) {
	t.Helper()
	for _, layers := range []int{0, 2} {
		if err := get(t, s, b, min(layers, 1), layers); !errors.Is(err, ErrErased) || !errors.Is(err, ErrStale) || errors.Is(err, ErrCorrupt) {
			t.Errorf("block %s: %v; want ErrErased", b.name, err)
		}
	}
}

// TestEraseEpochs: when an epoch has ended, neither the volumes nor a copy of their slots that was made before
// give its blocks, with all keys and with the catalogue of after the end. Blocks of the other epochs stay.
func TestEraseEpochs(t *testing.T) {
	ring := keyring(t, "k")
	for _, on := range []bool{false, true} { // without the secrets, the same search finds the blocks
		devs := []*memio.Device{memio.New(memio.Options{Path: "a"}), memio.New(memio.Options{Path: "b"})}
		s := reopenAll(t, withEpochs(ring, on), devs)
		first, second, other := epoch(1, 1), epoch(1, 2), epoch(2, 1)
		if err := s.SetCatalogue(t.Context(), []byte("one"), first, other); err != nil {
			t.Fatal(err)
		}
		var old, kept []*block
		for i := range 8 {
			old = append(old, blockOf(first, fmt.Sprint(i)))
			kept = append(kept, blockOf(other, fmt.Sprint(i)))
		}
		if err := errors.Join(put(t, s, nil, old...), put(t, s, nil, kept...), s.Sync(t.Context())); err != nil {
			t.Fatal(err)
		}
		var copies []*memio.Device
		for _, d := range devs {
			copies = append(copies, d.Clone())
		}
		// The epoch ends in the catalogue, then in the index, and then its secret is erased.
		if err := s.SetCatalogue(t.Context(), []byte("two"), second, other); err != nil {
			t.Fatal(err)
		}
		for _, b := range old {
			if err := get(t, s, b, 0, 0); err != nil {
				t.Fatalf("before the erasure: %v", err)
			}
		}
		if err := s.EraseEpochs(t.Context(), second, other); err != nil {
			t.Fatal(err)
		}
		fresh := blockOf(second, "new")
		if err := put(t, s, nil, fresh); err != nil {
			t.Fatal(err)
		}
		var secrets []ondisk.EpochSecret
		for i, d := range devs {
			areas := secretsOn(t, ring, d)
			secrets = slices.Concat(secrets, areas[0], areas[1])
			if hasSecret(t, ring, d, first) {
				t.Errorf("volume %d has the secret of the ended epoch", i)
			}
			if on && hasSecret(t, ring, copies[i], first) != true {
				t.Errorf("the copy of volume %d, from before the end, has no secret of the epoch", i)
			}
		}
		for i := range devs {
			for _, d := range []*memio.Device{devs[i], copies[i]} {
				if n := decryptable(t, ring.Newest(), secrets, d); (n[first] > 0) == on || n[other] == 0 {
					t.Errorf("epoch keys %v: slots of %v can be decrypted", on, n)
				}
			}
		}
		for _, b := range append(kept, fresh) {
			if err := get(t, s, b, 0, 0); err != nil {
				t.Errorf("block %s of a live epoch: %v", b.name, err)
			}
		}
		if !on {
			closeStore(t, s)
			continue
		}
		for _, b := range old {
			wantErased(t, s, b)
		}
		if k := s.EpochKeys(); !k.On || k.Without != 0 || len(k.Erasures) != 0 {
			t.Errorf("%+v; want a complete erasure", k)
		}
		st, err := s.Scan(t.Context(), ScanOptions{Verify: true}, func(_ kv.Ref, h *ondisk.SlotHeader) error {
			if (EpochID{h.Namespace, h.Epoch}) == first {
				t.Errorf("the scan found block %v of the ended epoch", h.ID)
			}
			return nil
		})
		if err != nil || st.Damaged != 0 || st.Found != 9 {
			t.Errorf("scan: %+v, %v", st, err)
		}
		r, err := s.Scrub(t.Context(), ScrubOptions{Report: func(ref kv.Ref, err error) { t.Errorf("the scrubber reports %v: %v", ref, err) }})
		if err != nil || r.Slots != 9 {
			t.Errorf("scrub: %+v, %v; want the 9 slots of live epochs", r, err)
		}
		late := blockOf(first, "late")
		if err := put(t, s, nil, late); !errors.Is(err, ErrErased) {
			t.Errorf("a write in the ended epoch: %v; want ErrErased", err)
		}
		closeStore(t, s)

		// The copy gets the superblocks and catalogues of after the end, as an attacker finds them.
		for i, d := range devs {
			from := content(t, d.Reopen())
			for _, name := range []string{ondisk.SuperblockName, ondisk.CatalogueName} {
				overwrite(t, copies[i], name, 0, from[name])
			}
		}
		s = reopenAll(t, withEpochs(ring, true), copies, slices.Concat(old, kept)...)
		for _, b := range old {
			wantErased(t, s, b)
		}
		for _, b := range kept {
			if err := get(t, s, b, 0, 0); err != nil {
				t.Errorf("block %s of a live epoch in the copy: %v", b.name, err)
			}
		}
		closeStore(t, s)
	}
}

// TestEpochKeysSwitched switches the secrets on for a volume with blocks, and off again. All blocks stay readable,
// blocks without a secret are outdated while the secrets are on, the keys can be rotated meanwhile, and when the last epoch with a
// secret has ended, the catalogue has the format of a store without secrets.
func TestEpochKeysSwitched(t *testing.T) {
	devs := []*memio.Device{memio.New(memio.Options{})}
	var blocks []*block
	var s *Store
	step := func(name string, opts Options, secrets bool, want EpochKeys, live ...EpochID) {
		t.Helper()
		if s != nil {
			closeStore(t, s)
		}
		s = reopenAll(t, opts, devs, blocks...)
		if err := errors.Join(s.SetCatalogue(t.Context(), []byte(name), live...), s.EraseEpochs(t.Context(), live...)); err != nil {
			t.Fatal(err)
		}
		for _, id := range live {
			b := blockOf(id, name)
			if err := put(t, s, nil, b); err != nil {
				t.Fatal(err)
			}
			if s.Outdated(b.ref) {
				t.Errorf("%s: a new block is outdated", name)
			}
			blocks = append(blocks, b)
		}
		for _, b := range blocks {
			if err := get(t, s, b, 0, 0); err != nil {
				t.Errorf("%s: block %s: %v", name, b.name, err)
			}
		}
		if got := s.EpochKeys(); got.On != want.On || got.Without != want.Without || len(got.Erasures) != 0 {
			t.Errorf("%s: %+v; want %+v", name, got, want)
		}
		var newest ondisk.CatalogueHeader
		for area := range 2 {
			page := content(t, devs[0])[ondisk.CatalogueName][ondisk.CatalogueOffset(area, 8192):]
			if h, err := ondisk.DecodeCatalogueHeader(page); err == nil && h.Sequence > newest.Sequence {
				newest = h
			}
		}
		if newest.Epochs != secrets {
			t.Errorf("%s: %v", name, newest)
		}
	}
	one, two, three := epoch(1, 1), epoch(1, 2), epoch(1, 3)
	step("without", Options{Keys: keyring(t, "k"), SegmentBytes: 64 << 10, CatalogueBytes: 8192, CapacityBytes: 4 << 20}, false, EpochKeys{}, one)
	step("on", withEpochs(keyring(t, "k"), true), true, EpochKeys{On: true, Without: 1}, one, two)
	if !s.Outdated(blocks[0].ref) || s.OutdatedSlots(0) != 1 {
		t.Error("a block without a secret is not outdated")
	}
	if got := s.volumes[0].superblock.String(); !strings.Contains(got, "superblock version 4") || !strings.Contains(got, "with the secrets of epochs") {
		t.Errorf("superblock %s", got)
	}
	if err := s.SetKeys(t.Context(), keyring(t, "k", "l")); err != nil {
		t.Fatal(err)
	}
	// The choice is kept if the options have none.
	step("kept", Options{Keys: keyring(t, "k", "l"), CapacityBytes: 4 << 20}, true, EpochKeys{On: true, Without: 1}, one, two)
	step("off", withEpochs(keyring(t, "k", "l"), false), true, EpochKeys{}, one, two)
	// The blocks of k are removed, and then k, and the blocks with secrets of the key l stay.
	blocks = slices.DeleteFunc(blocks, func(b *block) bool {
		if s.volumes[0].keyPeriods().of(b.ref.Generation).ID.String() != "k" {
			return false
		}
		if err := s.Free(b.ref); err != nil {
			t.Error(err)
		}
		return true
	})
	if err := s.SetKeys(t.Context(), keyring(t, "l")); err != nil {
		t.Fatal(err)
	}
	step("one key", withEpochs(keyring(t, "l"), false), true, EpochKeys{}, one, two)
	ended := slices.Clone(blocks)
	for _, b := range blocks {
		if s.volumes[0].keyPeriods().of(b.ref.Generation).Epochs {
			if err := s.Free(b.ref); err != nil {
				t.Fatal(err)
			}
		}
	}
	blocks = nil
	step("ended", withEpochs(keyring(t, "l"), false), false, EpochKeys{}, three)
	for _, b := range ended {
		if hasSecret(t, keyring(t, "l"), devs[0], EpochID{b.key.Namespace, b.key.Epoch}) {
			t.Errorf("the secret of block %s is left", b.name)
		}
	}
	closeStore(t, s)
}

// TestSameBytesWithoutEpochKeys: a store that does not use the secrets writes the bytes that it wrote before they existed.
func TestSameBytesWithoutEpochKeys(t *testing.T) {
	bytesOf := func(opts Options, live ...EpochID) map[string][]byte {
		d := memio.New(memio.Options{})
		opts.SegmentBytes, opts.CatalogueBytes = 64<<10, 8192
		s, err := openTuned(t, opts, func(o *Options) { o.salts = rand.NewChaCha8([32]byte{2}) }, d)
		if err != nil {
			t.Fatal(err)
		}
		b := blockOf(epoch(1, 1), "b")
		if err := errors.Join(s.Ready(), s.SetCatalogue(t.Context(), []byte("names"), live...), put(t, s, nil, b), s.EraseEpochs(t.Context()), s.Close(t.Context())); err != nil {
			t.Fatal(err)
		}
		return content(t, d.Reopen())
	}
	off := false
	for _, ring := range []*crypt.Keyring{nil, keyring(t, "k")} {
		want := bytesOf(Options{Keys: ring})
		got := bytesOf(Options{Keys: ring, EpochKeys: &off}, epoch(1, 1))
		if len(want) != len(got) {
			t.Fatalf("%d files; want %d", len(got), len(want))
		}
		for name, file := range want {
			if !bytes.Equal(file, got[name]) {
				t.Errorf("%s differs", name)
			}
		}
	}
}

// TestErasureOfAMissingVolume: while a volume is missing, the erasure of an epoch that ends is pending, also after a restart. When the
// volume is back, its secrets are erased, and its blocks of the epoch are misses.
func TestErasureOfAMissingVolume(t *testing.T) {
	ring := keyring(t, "k")
	all := []*memio.Device{memio.New(memio.Options{Path: "a"}), memio.New(memio.Options{Path: "b"}), memio.New(memio.Options{Path: "c"})}
	s := reopenAll(t, withEpochs(ring, true), all)
	first, second := epoch(1, 1), epoch(1, 2)
	if err := s.SetCatalogue(t.Context(), []byte("one"), first); err != nil {
		t.Fatal(err)
	}
	var old []*block
	for i := range 9 {
		old = append(old, blockOf(first, fmt.Sprint(i)))
	}
	if err := put(t, s, nil, old...); err != nil {
		t.Fatal(err)
	}
	closeStore(t, s)
	degraded := withEpochs(ring, true)
	degraded.Degraded = true
	began, since, upTo := time.Now(), time.Time{}, kv.Epoch(1)
	pending := func(when string, want int) {
		t.Helper()
		e := s.EpochKeys().Erasures
		if want > 0 && len(e) > 0 {
			if since.IsZero() {
				since = e[0].Since
			}
			if !e[0].Since.Truncate(time.Millisecond).Equal(since.Truncate(time.Millisecond)) || since.Before(began) || since.After(time.Now()) {
				t.Errorf("%s: pending since %v; want the end of the first epoch, %v", when, e[0].Since, since)
			}
		}
		if len(e) != want || want > 0 && (e[0].Namespace != 1 || e[0].UpTo != upTo || !slices.Equal(e[0].Volumes, []string{"volume-2"}) && !slices.Equal(e[0].Volumes, []string{"c"})) {
			t.Errorf("%s: pending erasures %+v; want %d", when, e, want)
		}
	}
	present := all[:2:2]
	s = reopenAll(t, degraded, present)
	pending("before the end", 0)
	// The epochs of a namespace that is created and deleted meanwhile leave no erasure: the missing volume never had their secrets.
	for n := range kv.Epoch(3) {
		if err := errors.Join(s.SetCatalogue(t.Context(), []byte("other"), first, epoch(9, n+1)), s.EraseEpochs(t.Context(), first)); err != nil {
			t.Fatal(err)
		}
		pending("after the end of an epoch that the missing volume never had", 0)
	}
	if err := errors.Join(s.SetCatalogue(t.Context(), []byte("two"), second), s.EraseEpochs(t.Context(), second)); err != nil {
		t.Fatal(err)
	}
	pending("after the end", 1)
	closeStore(t, s)
	s = reopenAll(t, degraded, present)
	pending("after a restart", 1)
	if err := errors.Join(s.SetCatalogue(t.Context(), []byte("three"), second), s.EraseEpochs(t.Context(), second)); err != nil {
		t.Fatal(err)
	}
	pending("after another change", 1)
	third := epoch(1, 3)
	if err := errors.Join(s.SetCatalogue(t.Context(), []byte("three"), third), s.EraseEpochs(t.Context(), third)); err != nil {
		t.Fatal(err)
	}
	upTo = 2
	pending("after the end of another epoch", 1)
	closeStore(t, s)

	copy(all, present)
	if !hasSecret(t, ring, all[2], first) {
		t.Fatal("the missing volume has no secret of the ended epoch")
	}
	s = reopenAll(t, withEpochs(ring, true), all, old...)
	if err := errors.Join(s.SetCatalogue(t.Context(), []byte("four"), third), s.EraseEpochs(t.Context(), third)); err != nil {
		t.Fatal(err)
	}
	pending("when the volume is back", 0)
	for _, b := range old {
		wantErased(t, s, b)
	}
	closeStore(t, s)
	for i, d := range all {
		if hasSecret(t, ring, d, first) {
			t.Errorf("volume %d has the secret of the ended epoch", i)
		}
	}
	s = reopenAll(t, withEpochs(ring, true), all)
	pending("after the last restart", 0)
	closeStore(t, s)
}

// TestErasureInAFullCatalogue: an erasure needs no room that SetCatalogue has not counted.
func TestErasureInAFullCatalogue(t *testing.T) {
	ring := keyring(t, "k")
	all := []*memio.Device{memio.New(memio.Options{Path: "a"})}
	s := reopenAll(t, withEpochs(ring, true), all)
	defer closeStore(t, s)
	var live []EpochID
	for ns := range kv.NamespaceID(20) {
		live = append(live, epoch(ns+1, 1))
	}
	blob := make([]byte, 8192)
	for err := ErrTooLarge; err != nil; blob = blob[1:] {
		if err = s.SetCatalogue(t.Context(), blob, live...); err != nil && !errors.Is(err, ErrTooLarge) {
			t.Fatal(err)
		}
	}
	if err := s.EraseEpochs(t.Context(), live[0]); err != nil {
		t.Errorf("the end of epochs beside a catalogue of %d bytes: %v", len(blob)+1, err)
	}
	if e := s.Erasures(); len(e) != 0 {
		t.Errorf("pending: %v", e)
	}
}

// TestSecretsOfApartVolumes: if two volumes get different secrets of one epoch, because each was missing while the
// other one was present, all blocks stay readable.
func TestSecretsOfApartVolumes(t *testing.T) {
	ring := keyring(t, "k")
	devs := []*memio.Device{memio.New(memio.Options{Path: "a"}), memio.New(memio.Options{Path: "b"})}
	closeStore(t, reopenAll(t, withEpochs(ring, true), devs))
	degraded := withEpochs(ring, true)
	degraded.Degraded = true
	var blocks []*block
	for i := range devs {
		s := reopenAll(t, degraded, devs[i:i+1])
		b := blockOf(epoch(1, 1), fmt.Sprint("on ", i))
		if i > 0 { // the catalogue of this volume is the newest one
			if err := s.SetCatalogue(t.Context(), []byte("c")); err != nil {
				t.Fatal(err)
			}
		}
		if err := errors.Join(s.SetCatalogue(t.Context(), []byte("c"), epoch(1, 1)), s.EraseEpochs(t.Context(), epoch(1, 1)), put(t, s, nil, b)); err != nil {
			t.Fatal(err)
		}
		blocks = append(blocks, b)
		closeStore(t, s)
	}
	for range 2 {
		s := reopenAll(t, withEpochs(ring, true), devs, blocks...)
		if n := len(s.epochs.Load().secrets[epoch(1, 1)]); n != 2 {
			t.Errorf("%d secrets of the epoch; want that of each volume", n)
		}
		b := blockOf(epoch(1, 1), fmt.Sprint("later ", len(blocks)))
		if err := errors.Join(s.SetCatalogue(t.Context(), []byte("c"), epoch(1, 1)), s.EraseEpochs(t.Context(), epoch(1, 1)), put(t, s, nil, b)); err != nil {
			t.Fatal(err)
		}
		blocks = append(blocks, b)
		for _, b := range blocks {
			if err := errors.Join(get(t, s, b, 0, 0), get(t, s, b, 1, 1)); err != nil {
				t.Errorf("block %s: %v", b.name, err)
			}
		}
		closeStore(t, s)
	}
}

// TestErasureOfAFailedVolume: the erasure of an epoch that ends while a volume does not take writes is pending
// until the volume has recovered. Both areas of its catalogue are then written before it is used again.
func TestErasureOfAFailedVolume(t *testing.T) {
	for _, fault := range []string{`(Err EIO Writes)`, `(Err EIO Syncs)`, `(Err EIO (And Writes (File "catalogue") (After 1)))`, `(Err EIO (And Writes (File "catalogue") (After 2)))`} {
		synctest.Test(t, func(t *testing.T) {
			ring := keyring(t, "k")
			dev := [2]*memio.Device{memio.New(memio.Options{Path: "bad"}), memio.New(memio.Options{Path: "good"})}
			bad := faultio.Wrap(dev[0], rules(t, ""))
			s := mustOpenBroken(t, withEpochs(ring, true), bad, dev[1])
			first, second := epoch(1, 1), epoch(1, 2)
			for range 2 { // both areas
				if err := s.SetCatalogue(t.Context(), []byte("one"), first); err != nil {
					t.Fatal(err)
				}
			}
			bad.SetRules(rules(t, fault))
			if err := errors.Join(s.SetCatalogue(t.Context(), []byte("two"), second), s.EraseEpochs(t.Context(), second)); err != nil {
				t.Fatal(err)
			}
			pending := s.EpochKeys().Erasures
			clean := !hasSecret(t, ring, dev[0], first)
			if (len(pending) == 0) != clean {
				t.Errorf("%s: pending %+v; the volume has no secret of the epoch: %v", fault, pending, clean)
			}
			if hasSecret(t, ring, dev[1], first) {
				t.Errorf("%s: the other volume has the secret", fault)
			}
			bad.SetRules(rules(t, ""))
			// The first good probe makes the volume suspect. It takes blocks again then.
			for _, state := range []health.State{health.Suspect, health.OK} {
				awaitState(t, s, 0, state, 10*time.Minute)
				if hasSecret(t, ring, dev[0], first) {
					t.Errorf("%s: the volume has the secret when it is %v again", fault, state)
				}
				if e := s.EpochKeys().Erasures; len(e) != 0 {
					t.Errorf("%s: pending when the volume is %v again: %+v", fault, state, e)
				}
			}
		})
	}
}

// TestEraseWithoutQuorum: an erasure that too few volumes store fails, is complete when it is repeated, and loses no
// secret of a live epoch.
func TestEraseWithoutQuorum(t *testing.T) {
	for after := range 4 {
		synctest.Test(t, func(t *testing.T) {
			ring := keyring(t, "k")
			mem := memio.New(memio.Options{})
			bad := faultio.Wrap(mem, rules(t, ""))
			s := mustOpenBroken(t, withEpochs(ring, true), bad)
			first, second := epoch(1, 1), epoch(1, 2)
			if err := s.SetCatalogue(t.Context(), []byte("one"), first, second); err != nil {
				t.Fatal(err)
			}
			b := blockOf(second, "b")
			if err := put(t, s, nil, b); err != nil {
				t.Fatal(err)
			}
			bad.SetRules(rules(t, fmt.Sprintf(`(Err EIO (And Writes (File "catalogue") (After %d)))`, after)))
			err := s.EraseEpochs(t.Context(), second)
			if (err == nil) != (after == 3) {
				t.Errorf("erasure with a fault after %d writes: %v", after, err)
			}
			if pending := s.EpochKeys().Erasures; (len(pending) == 0) != (after >= 2) {
				t.Errorf("erasure with a fault after %d writes: pending %+v", after, pending)
			}
			bad.SetRules(rules(t, ""))
			awaitState(t, s, 0, health.OK, 10*time.Minute)
			if err := s.EraseEpochs(t.Context(), second); err != nil {
				t.Fatal(err)
			}
			if hasSecret(t, ring, mem, first) || !hasSecret(t, ring, mem, second) || len(s.EpochKeys().Erasures) != 0 {
				t.Errorf("after the repeated erasure: %v, pending %+v", secretsOn(t, ring, mem), s.EpochKeys().Erasures)
			}
			if err := get(t, s, b, 0, 0); err != nil {
				t.Error(err)
			}
		})
	}
}

// epochStory bumps the epoch of a namespace again and again, as the engine does, until the power fails.
type epochStory struct {
	devs []*memio.Device
	rng  *rand.Rand
	// blocks has all blocks that were written, and synced those of them that a Sync covered.
	blocks []*block
	synced map[*block]bool
}

func (c *epochStory) opts(t *testing.T) Options { return withEpochs(keyring(t, "k"), true) }

// live reads the live epochs from a catalogue of the story.
func (c *epochStory) live(blob []byte) (live []EpochID) {
	var newest, oldest kv.Epoch
	if _, err := fmt.Sscanf(string(blob), "%d to %d", &oldest, &newest); err != nil {
		return nil
	}
	for e := oldest; e <= newest; e++ {
		live = append(live, epoch(1, e))
	}
	return live
}

func (c *epochStory) run(t *testing.T, steps int) error {
	s, err := open(t, c.opts(t), c.devs...)
	if err != nil {
		return err
	}
	defer s.Close(context.Background())
	if err := s.Ready(); err != nil {
		return err
	}
	newest := kv.Epoch(0)
	var oldest kv.Epoch = 1
	for range steps {
		switch p := c.rng.IntN(10); {
		case p < 4 || newest == 0:
			newest++
			oldest = max(oldest, newest-kv.Epoch(c.rng.IntN(2)))
			blob := fmt.Appendf(nil, "%d to %d", oldest, newest)
			live := c.live(blob)
			if err := s.SetCatalogue(t.Context(), blob, live...); err != nil {
				return err
			}
			if err := s.EraseEpochs(t.Context(), live...); err != nil {
				return err
			}
		case p < 8:
			b := blockOf(epoch(1, newest-kv.Epoch(c.rng.IntN(int(newest-oldest)+1))), fmt.Sprint(len(c.blocks)))
			err := put(t, s, nil, b)
			if errors.Is(err, ErrFull) {
				continue
			}
			if b.ref.Generation != 0 {
				c.blocks = append(c.blocks, b)
			}
			if err != nil {
				return err
			}
		default:
			if err := s.Sync(t.Context()); err != nil {
				return err
			}
			for _, b := range c.blocks {
				c.synced[b] = true
			}
		}
	}
	return nil
}

// verify opens the volumes after the power failure: synced blocks of live epochs are there, and after the erasure
// that each start makes, no volume has a secret of another epoch.
func (c *epochStory) verify(t *testing.T) {
	s := reopenAll(t, c.opts(t), c.devs, c.blocks...)
	blob := s.Catalogue()
	live := c.live(blob)
	for _, erased := range []bool{false, true} {
		if erased {
			if err := errors.Join(s.SetCatalogue(t.Context(), blob, live...), s.EraseEpochs(t.Context(), live...)); err != nil {
				t.Fatal(err)
			}
		}
		for _, b := range c.blocks {
			err := get(t, s, b, 0, 0)
			id := EpochID{b.key.Namespace, b.key.Epoch}
			switch {
			case err != nil && !errors.Is(err, ErrStale) && !errors.Is(err, ErrCorrupt):
				t.Fatalf("block %s: %v", b.name, err)
			case slices.Contains(live, id) && c.synced[b] && err != nil:
				t.Fatalf("erased %v: block %s of a live epoch was synced, and is lost: %v", erased, b.name, err)
			case !slices.Contains(live, id) && erased && err == nil:
				t.Fatalf("block %s of an ended epoch is readable; live are %v", b.name, live)
			}
		}
	}
	if e := s.EpochKeys().Erasures; len(e) != 0 {
		t.Fatalf("pending %+v", e)
	}
	for _, id := range live {
		if err := put(t, s, nil, blockOf(id, "after")); err != nil && !errors.Is(err, ErrFull) {
			t.Fatal(err)
		}
	}
	closeStore(t, s)
	for _, d := range c.devs {
		for area, secrets := range secretsOn(t, keyring(t, "k"), d) {
			for _, secret := range secrets {
				if !slices.Contains(live, EpochID{secret.Namespace, secret.Epoch}) {
					t.Fatalf("area %d has a %v; live are %v", area, secret, live)
				}
			}
		}
	}
}

// TestEpochCrashPoints fails the power at every mutation of stories of bumps.
func TestEpochCrashPoints(t *testing.T) {
	const steps = 14
	want := testkit.Rounds(3000, 600)
	if testing.Short() || invariants.Enabled {
		want = min(want, 600)
	}
	story := func(seed uint64) *epochStory {
		c := &epochStory{rng: rand.New(rand.NewPCG(seed, 3)), synced: make(map[*block]bool)}
		for i := range 1 + c.rng.IntN(3) {
			c.devs = append(c.devs, memio.New(memio.Options{Path: fmt.Sprint("mem", i), Seed: seed}))
		}
		return c
	}
	points := 0
	for seed := uint64(1); points < want; seed++ {
		whole := story(seed)
		if err := whole.run(t, steps); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		mutations := int64(0)
		for _, d := range whole.devs {
			mutations = max(mutations, d.Mutations())
			d.Close()
		}
		for at := range mutations {
			c := story(seed)
			c.devs[at%int64(len(c.devs))].PowerOffAfter(at)
			if err := c.run(t, steps); err != nil && !errors.Is(err, memio.ErrPowerLost) && !errors.Is(err, ErrFloor) && !errors.Is(err, ErrVolumeFailed) {
				t.Fatalf("seed %d, power off after %d: %v", seed, at, err)
			}
			old := slices.Clone(c.devs)
			for i, d := range c.devs {
				c.devs[i] = d.Crash(seed<<20 + uint64(at) + uint64(i))
			}
			if !t.Run(fmt.Sprintf("seed=%d,at=%d", seed, at), c.verify) {
				return
			}
			for _, d := range append(old, c.devs...) {
				d.Close()
			}
			points++
		}
	}
	t.Logf("%d crash points", points)
}

// TestBumpsWhileWriting ends epochs while blocks are written and read, and the keys are rotated: a block of a live epoch is
// always read, and a block of an ended one is exact or a miss.
func TestBumpsWhileWriting(t *testing.T) {
	opts := withEpochs(keyring(t, "k0"), true)
	opts.CapacityBytes = 8 << 20
	s := mustOpen(t, opts, memio.New(memio.Options{Path: "a"}), memio.New(memio.Options{Path: "b"}))
	var mu sync.Mutex // held by bump while it ends an epoch
	newest := kv.Epoch(1)
	if err := s.SetCatalogue(t.Context(), []byte("c"), epoch(1, 1)); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var workers sync.WaitGroup
	for w := range 2 {
		workers.Go(func() {
			var kept []*block
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				mu.Lock()
				at := newest
				mu.Unlock()
				b := blockOf(epoch(1, at), fmt.Sprint(w, "-", i))
				switch err := put(t, s, nil, b); {
				case err == nil:
					kept = append(kept, b)
				case !errors.Is(err, ErrErased):
					t.Errorf("put: %v", err)
					return
				}
				for _, b := range kept {
					err := get(t, s, b, 0, 0)
					mu.Lock()
					ended := b.key.Epoch != newest
					mu.Unlock()
					if err != nil && !(ended && errors.Is(err, ErrErased)) {
						t.Errorf("get %s of epoch %d: %v", b.name, b.key.Epoch, err)
						return
					}
				}
				if len(kept) == 4 {
					if err := s.Free(kept[0].ref); err != nil {
						t.Errorf("free: %v", err)
						return
					}
					kept = kept[1:]
				}
			}
		})
	}
	ids := []string{"k0"}
	for i := range 30 {
		mu.Lock()
		newest++
		live := epoch(1, newest)
		mu.Unlock()
		if err := errors.Join(s.SetCatalogue(t.Context(), []byte("c"), live), s.EraseEpochs(t.Context(), live)); err != nil {
			t.Error(err)
		}
		if i%10 == 9 {
			ids = append(ids, fmt.Sprint("k", i))
			if err := s.SetKeys(t.Context(), keyring(t, ids...)); err != nil {
				t.Error(err)
			}
		}
		s.EpochKeys()
	}
	close(stop)
	workers.Wait()
}

// TestInspectEpochSlot: a slot that needs the secret of its epoch is verified with the catalogue of its volume, and the
// verdict names an epoch that has ended.
func TestInspectEpochSlot(t *testing.T) {
	ring := keyring(t, "k")
	d := memio.New(memio.Options{})
	s := reopenAll(t, withEpochs(ring, true), []*memio.Device{d})
	d = s.opts.Devices[0].(*memio.Device)
	b := blockOf(epoch(1, 1), "b")
	if err := errors.Join(s.SetCatalogue(t.Context(), []byte("c"), epoch(1, 1)), put(t, s, nil, b)); err != nil {
		t.Fatal(err)
	}
	verdict := func(want string) {
		t.Helper()
		var out strings.Builder
		if err := InspectSlot(t.Context(), d, b.ref.Extent.Segment(), b.ref.Extent.Slot(), ring, &out); err != nil || !strings.Contains(out.String(), want) {
			t.Errorf("%v: %s; want %q", err, out.String(), want)
		}
	}
	verdict("every layer has its checksum")
	if err := s.EraseEpochs(t.Context()); err != nil {
		t.Fatal(err)
	}
	verdict("no secret of epoch 1 of namespace 1")
	closeStore(t, s)
}

// TestWritesOfAnEnd: the end of an epoch writes the catalogue of a volume four times with the secrets, and once without.
func TestWritesOfAnEnd(t *testing.T) {
	for _, on := range []bool{false, true} {
		d := memio.New(memio.Options{})
		s := mustOpen(t, withEpochs(keyring(t, "k"), on), d)
		if err := s.SetCatalogue(t.Context(), []byte("c"), epoch(1, 1)); err != nil {
			t.Fatal(err)
		}
		before := d.Mutations()
		if err := errors.Join(s.SetCatalogue(t.Context(), []byte("c"), epoch(1, 2)), s.EraseEpochs(t.Context(), epoch(1, 2))); err != nil {
			t.Fatal(err)
		}
		want := int64(2) // a write and a sync
		if on {
			want = 8
		}
		if n := d.Mutations() - before; n != want {
			t.Errorf("secrets %v: %d writes and syncs; want %d", on, n, want)
		}
	}
}

// TestTooManyEpochs: a catalogue without room for the secrets is refused, and the earlier one stays.
func TestTooManyEpochs(t *testing.T) {
	s := mustOpen(t, withEpochs(keyring(t, "k"), true), memio.New(memio.Options{}))
	if err := s.SetCatalogue(t.Context(), []byte("c"), epoch(1, 1)); err != nil {
		t.Fatal(err)
	}
	var many []EpochID
	for i := range 200 {
		many = append(many, epoch(1, kv.Epoch(i+1)))
	}
	if err := s.SetCatalogue(t.Context(), []byte("d"), many...); !errors.Is(err, ErrTooLarge) {
		t.Errorf("%v; want ErrTooLarge", err)
	}
	b := blockOf(epoch(1, 1), "b")
	if err := errors.Join(put(t, s, nil, b), get(t, s, b, 0, 0)); err != nil || string(s.Catalogue()) != "c" {
		t.Errorf("catalogue %q, %v", s.Catalogue(), err)
	}
}

// TestEpochKeysOfAVolumeThatBecomesShared: the secrets that a local volume had when it became shared are erased when their
// epochs end.
func TestEpochKeysOfAVolumeThatBecomesShared(t *testing.T) {
	dir, ring, on := t.TempDir(), keyring(t, "k"), true
	first, second := epoch(1, 1), epoch(1, 2)
	use := func(owner Owner, live EpochID) {
		t.Helper()
		s, err := Open(t.Context(), Options{Devices: []blockio.Device{sharedDevice(t, dir)}, CapacityBytes: 1 << 20, Owner: owner, Keys: ring, EpochKeys: &on})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Ready(); err != nil {
			t.Fatal(err)
		}
		for range 2 { // both areas
			if err := errors.Join(s.SetCatalogue(t.Context(), []byte("c"), live), s.EraseEpochs(t.Context(), live)); err != nil {
				t.Fatal(err)
			}
		}
		if e := s.Erasures(); len(e) != 0 {
			t.Errorf("pending: %+v", e)
		}
		closeStore(t, s)
	}
	use(nil, first)
	use(&claim{ledger: newLedger()}, second)
	d := sharedDevice(t, dir)
	defer d.Close()
	names, err := d.List()
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, name := range names {
		if !strings.HasPrefix(name, ondisk.CatalogueName) {
			continue
		}
		for area, secrets := range secretsIn(t, ring, d, name) {
			found += len(secrets)
			for _, s := range secrets {
				if (EpochID{s.Namespace, s.Epoch}) != second {
					t.Errorf("area %d of %s has the secret of %d", area, name, s.Epoch)
				}
			}
		}
	}
	if found == 0 {
		t.Errorf("no catalogue of %q has a secret", names)
	}
}

// TestErasureOfAFailedSharedVolume: the catalogue of the earlier owner of a volume that fails while the new owner opens it has
// the secrets of epochs that end meanwhile. The erasure is pending until that catalogue is removed too.
func TestErasureOfAFailedSharedVolume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ring, l := keyring(t, "k"), newLedger()
		dirs := []string{t.TempDir(), t.TempDir()}
		first, second := epoch(1, 1), epoch(1, 2)
		own := func(faults string) (*Store, *claim, *faultio.Device) {
			t.Helper()
			opts, c := withEpochs(ring, true), &claim{ledger: l}
			opts.Owner = c
			bad := faultio.Wrap(sharedDevice(t, dirs[0]), rules(t, faults))
			return mustOpenBroken(t, opts, bad, sharedDevice(t, dirs[1])), c, bad
		}
		s, c, _ := own("")
		if err := s.SetCatalogue(t.Context(), []byte("one"), first); err != nil {
			t.Fatal(err)
		}
		closeStore(t, s)
		c.end()
		s, c, bad := own(`(Err EIO Writes)`)
		if err := errors.Join(s.SetCatalogue(t.Context(), []byte("two"), second), s.EraseEpochs(t.Context(), second)); err != nil {
			t.Fatal(err)
		}
		if e := s.Erasures(); len(e) != 1 || !slices.Equal(e[0].Volumes, dirs[:1]) {
			t.Errorf("pending while the volume is failed: %+v", e)
		}
		bad.SetRules(rules(t, ""))
		awaitState(t, s, 0, health.Suspect, 10*time.Minute)
		if e := s.Erasures(); len(e) != 0 {
			t.Errorf("pending after the volume has recovered: %+v", e)
		}
		closeStore(t, s)
		c.end()
		d := sharedDevice(t, dirs[0])
		defer d.Close()
		names, err := d.List()
		if err != nil {
			t.Fatal(err)
		}
		names = slices.DeleteFunc(names, func(name string) bool { return !strings.HasPrefix(name, ondisk.CatalogueName) })
		if want := []string{ondisk.SharedName(ondisk.CatalogueName, 2)}; !slices.Equal(names, want) {
			t.Errorf("catalogues %q; want %q", names, want)
		}
	})
}

// TestEpochKeysOfAdoptedStore: a process that adopts a shared store keeps the secrets, and erases those of epochs that end
// there. The next owner has the rest.
func TestEpochKeysOfAdoptedStore(t *testing.T) {
	dir, l, ring := t.TempDir(), newLedger(), keyring(t, "k")
	own := func(opts Options, index ...*block) (*Store, *claim) {
		t.Helper()
		c := &claim{ledger: l}
		opts.Devices, opts.CapacityBytes, opts.Owner, opts.Keys = append(opts.Devices, sharedDevice(t, dir)), 1<<20, c, ring
		s, err := Open(t.Context(), opts)
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range index {
			if err := s.Adopt(b.ref, b.key.PayloadBytes, b.key.Layers); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Ready(); err != nil {
			t.Fatal(err)
		}
		return s, c
	}
	on := true
	s, c := own(Options{EpochKeys: &on})
	first, second := blockOf(epoch(1, 1), "first"), blockOf(epoch(1, 2), "second")
	if err := errors.Join(s.SetCatalogue(t.Context(), []byte("c"), epoch(1, 1), epoch(1, 2)), put(t, s, nil, first, second)); err == nil {
		err = s.Close(context.Background())
		c.end()
		if err != nil {
			t.Fatal(err)
		}
	} else {
		t.Fatal(err)
	}
	s, c = own(Options{SharedOnly: true}, first, second)
	if err := errors.Join(get(t, s, first, 0, 0), get(t, s, second, 0, 0), s.SetCatalogue(t.Context(), []byte("d"), epoch(1, 2)), s.EraseEpochs(t.Context(), epoch(1, 2))); err != nil {
		t.Fatal(err)
	}
	wantErased(t, s, first)
	third := blockOf(epoch(1, 2), "third")
	if err := errors.Join(put(t, s, nil, third), get(t, s, third, 0, 0)); err != nil {
		t.Fatal(err)
	}
	if k := s.EpochKeys(); !k.On || k.Without != 0 || len(k.Erasures) != 0 {
		t.Errorf("%+v", k)
	}
	closeStore(t, s)
	c.end()
	s, c = own(Options{EpochKeys: &on}, first, second, third)
	wantErased(t, s, first)
	if err := errors.Join(get(t, s, second, 0, 0), get(t, s, third, 0, 0)); err != nil {
		t.Error(err)
	}
	closeStore(t, s)
	c.end()
}
