package blockstore

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/penstock-kv/penstock/blockstore/crypt"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/zeebo/xxh3"
)

// keyring makes a keyring whose keys have the given ids. The secret of a key is derived from its id.
func keyring(t testing.TB, ids ...string) *crypt.Keyring {
	t.Helper()
	var keys []*crypt.Key
	for _, id := range ids {
		keys = append(keys, key(t, id, id))
	}
	r, err := crypt.NewKeyring(keys...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func key(t testing.TB, id, secret string) *crypt.Key {
	t.Helper()
	sum := sha256.Sum256([]byte(secret))
	k, err := crypt.NewKey(id, sum[:])
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// content returns the bytes of every file of a device.
func content(t testing.TB, d *memio.Device) map[string][]byte {
	t.Helper()
	names, err := d.List()
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string][]byte)
	for _, name := range names {
		f, err := d.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		if all[name], err = readPages(t.Context(), d, f, 0, int(f.Size()/ondisk.Page*ondisk.Page)); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// TestNoPlainBytesOnDisk: neither a part of a payload, nor a checksum of it, nor a part of the
// catalogue is in a file of an encrypted volume. The same search finds each of them in a plain volume.
func TestNoPlainBytesOnDisk(t *testing.T) {
	for _, encrypted := range []bool{false, true} {
		devs := []*memio.Device{memio.New(memio.Options{Path: "a"}), memio.New(memio.Options{Path: "b"})}
		opts := Options{StripeBytes: 16 << 10}
		if encrypted {
			opts.Keys = keyring(t, "one")
		}
		s, err := open(t, opts, devs...)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Ready(); err != nil {
			t.Fatal(err)
		}
		secret := []byte("the salt of a tenant's namespace")
		for range 2 {
			if err := s.SetCatalogue(t.Context(), secret); err != nil {
				t.Fatal(err)
			}
		}
		needles := map[string][]byte{"catalogue": secret}
		for i, size := range []struct {
			piece  int64
			layers int
		}{{4096, 1}, {8192, 2}, {12000, 3}, {40, 4}, {162 * 64, 162}} {
			blocks := []*block{newBlock(fmt.Sprint("a", i), size.piece, size.layers), newBlock(fmt.Sprint("b", i), size.piece, size.layers)}
			if err := put(t, s, nil, blocks...); err != nil {
				t.Fatal(err)
			}
			for _, b := range blocks {
				if err := get(t, s, b, 0, 0); err != nil {
					t.Fatal(err)
				}
				n := len(b.payload) / size.layers
				for layer := range size.layers {
					bytes := b.payload[layer*n:][:n]
					needles[fmt.Sprintf("%s layer %d", b.name, layer)] = bytes[:min(n, 16)]
					needles[fmt.Sprintf("%s end of layer %d", b.name, layer)] = bytes[max(0, n-16):]
					needles[fmt.Sprintf("%s checksum of layer %d", b.name, layer)] = binary.LittleEndian.AppendUint64(nil, ondisk.LayerSum(bytes))
				}
			}
		}
		if err := s.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		for what, needle := range needles {
			found := false
			for _, d := range devs {
				for name, file := range content(t, d) {
					if bytes.Contains(file, needle) {
						found = true
						if encrypted {
							t.Errorf("%s is in %s in plain", what, name)
						}
					}
				}
			}
			if !found && !encrypted {
				t.Errorf("the search does not find %s in a plain volume", what)
			}
		}
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// slotFile returns the file of a block's segment and the offset of its slot.
func slotFile(t testing.TB, s *Store, ref kv.Ref) (string, int64) {
	t.Helper()
	g, err := s.segmentOf(ref)
	if err != nil {
		t.Fatal(err)
	}
	return ondisk.SegmentName(ref.Extent.Segment()), g.header.SlotOffset(ref.Extent.Slot())
}

// overwrite writes bytes into a file of a device.
func overwrite(t testing.TB, d *memio.Device, name string, offset int64, content []byte) {
	t.Helper()
	f, err := d.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	buf := aligned(int64(len(content)))
	copy(buf, content)
	if err := doOne(t.Context(), d, blockio.Request{Op: blockio.Write, File: f, Offset: offset, Bufs: [][]byte{buf}}); err != nil {
		t.Fatal(err)
	}
}

// reseal gives a slot's header the checksum of its bytes, as an attacker does.
func reseal(slot []byte) {
	n := binary.LittleEndian.Uint32(slot[20:])
	binary.LittleEndian.PutUint64(slot[8:], xxh3.Hash(slot[16:n]))
}

// miss fails the test unless all reads of a block, of all layers and of each layer, are misses or
// exact, and the read of all layers is a miss.
func miss(t *testing.T, s *Store, b *block, what string) {
	t.Helper()
	if err := get(t, s, b, 0, 0); !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrStale) {
		t.Errorf("%s: the read returned %v; want a miss", what, err)
	}
	for i := range b.key.Layers {
		if err := get(t, s, b, i, 1); err != nil && !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrStale) {
			t.Errorf("%s: the read of layer %d returned %v; want a miss", what, i, err)
		}
	}
}

// TestChangedSlots: a changed byte of an encrypted slot, or a slot of another block, is a miss, even if
// the checksum of the header is that of the changed bytes.
func TestChangedSlots(t *testing.T) {
	d := memio.New(memio.Options{})
	s := mustOpen(t, Options{Keys: keyring(t, "one", "two")}, d)
	a, b := newBlock("a", 3*4096, 3), newBlock("b", 3*4096, 3)
	if err := put(t, s, nil, a, b); err != nil {
		t.Fatal(err)
	}
	name, at := slotFile(t, s, a.ref)
	_, atB := slotFile(t, s, b.ref)
	file := content(t, d)[name]
	n := a.layout(t).SlotBytes()
	slotA, slotB := slices.Clone(file[at:at+n]), slices.Clone(file[atB:atB+n])
	restore := func() {
		overwrite(t, d, name, at, slotA)
		overwrite(t, d, name, atB, slotB)
		for _, blk := range []*block{a, b} {
			if err := get(t, s, blk, 0, 0); err != nil {
				t.Fatalf("the restored block %s: %v", blk.name, err)
			}
		}
	}
	header := int(a.layout(t).HeaderBytes())
	for i := 0; i < int(n); i++ {
		if i > 300 && i%97 != 0 {
			continue
		}
		for _, again := range []bool{false, true} {
			if again && i >= 8 && i < 16 || again && i >= header {
				continue // the checksum itself, and bytes that it does not cover
			}
			bad := slices.Clone(slotA)
			bad[i] ^= 0x20
			if again {
				if i >= 20 && i < 24 {
					continue // the length of the header
				}
				reseal(bad)
			}
			overwrite(t, d, name, at, bad)
			miss(t, s, a, fmt.Sprintf("byte %d changed, checksum renewed %v", i, again))
		}
	}
	restore()

	// The payloads of two slots are exchanged.
	overwrite(t, d, name, at, slices.Concat(slotA[:header], slotB[header:]))
	overwrite(t, d, name, atB, slices.Concat(slotB[:header], slotA[header:]))
	miss(t, s, a, "payload of another slot")
	miss(t, s, b, "payload of another slot")
	restore()

	// The test exchanges two slots, and writes into each header the clear fields that the reader expects.
	for _, fields := range []int{128, 160, 192} {
		moved := slices.Concat(slotA[:fields], slotB[fields:])
		reseal(moved)
		overwrite(t, d, name, at, moved)
		miss(t, s, a, fmt.Sprintf("%d bytes of the own header, and the rest of another slot", fields))
	}
	restore()

	// Two layers with their tags are exchanged.
	swapped := slices.Clone(slotA)
	parts := ondisk.SealedParts(swapped, 3)
	own := ondisk.SealedParts(slotA, 3)
	copy(parts.Tag(0), own.Tag(1))
	copy(parts.Tag(1), own.Tag(0))
	copy(swapped[header:], slotA[header+4096:][:4096])
	copy(swapped[header+4096:], slotA[header:][:4096])
	reseal(swapped)
	overwrite(t, d, name, at, swapped)
	miss(t, s, a, "two layers exchanged")
	restore()

	// A plain slot with the right checksums.
	w := a.write(t)
	w.Header.Extent, w.Header.Generation = a.ref.Extent, a.ref.Generation
	if err := w.Header.EncodeTo(w.Buf); err != nil {
		t.Fatal(err)
	}
	overwrite(t, d, name, at, w.Buf)
	miss(t, s, a, "a plain slot")

	var reported int64
	r, err := s.Scrub(t.Context(), ScrubOptions{Report: func(kv.Ref, error) { reported++ }})
	if err != nil || r.Corrupt != 1 || reported != 1 || r.Slots != 2 {
		t.Errorf("scrub: %+v, %v, %d reports; want one corrupt of two slots", r, err, reported)
	}
}

// reopenWith closes a store and opens its volume again with keys, with the blocks as the index.
func reopenWith(t *testing.T, s *Store, d *memio.Device, ring *crypt.Keyring, blocks ...*block) (*Store, *memio.Device, error) {
	t.Helper()
	if s != nil {
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	d = d.Reopen()
	s, err := open(t, Options{Keys: ring}, d)
	if err != nil {
		return nil, d, errors.Join(err, d.Close())
	}
	for _, b := range blocks {
		if err := s.Adopt(b.ref, b.key.PayloadBytes, b.key.Layers); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Ready(); err != nil {
		return nil, d, errors.Join(err, s.Close(t.Context()))
	}
	return s, d, nil
}

// wantKeyError fails the test unless err is ErrKey with a text.
func wantKeyError(t *testing.T, err error, text string) {
	t.Helper()
	if !errors.Is(err, ErrKey) || !strings.Contains(fmt.Sprint(err), text) {
		t.Fatalf("error %v; want ErrKey with %q", err, text)
	}
}

func keysOf(s *Store) string {
	var all []string
	for _, u := range s.KeyUse() {
		text := fmt.Sprintf("%s=%d", u.ID, u.Slots)
		if u.Newest {
			text += "*"
		}
		all = append(all, text)
	}
	return strings.Join(all, " ")
}

// TestRotation encrypts a plain volume, rotates its keys at starts and while it is open, and removes
// keys: blocks of all keys stay readable, and no key can be removed that a block or the catalogue needs.
func TestRotation(t *testing.T) {
	d := memio.New(memio.Options{})
	s, d, err := reopenWith(t, nil, d, nil)
	if err != nil {
		t.Fatal(err)
	}
	blocks := make(map[string]*block)
	add := func(name string) {
		t.Helper()
		b := newBlock(name, 12000, 3)
		if err := put(t, s, nil, b); err != nil {
			t.Fatal(err)
		}
		blocks[name] = b
	}
	remove := func(name string) {
		t.Helper()
		if err := s.Free(blocks[name].ref); err != nil {
			t.Fatal(err)
		}
		delete(blocks, name)
	}
	index := func() (all []*block) {
		for _, b := range blocks {
			all = append(all, b)
		}
		return all
	}
	check := func(want string) {
		t.Helper()
		for _, b := range blocks {
			if err := get(t, s, b, 0, 0); err != nil {
				t.Fatalf("block %s: %v", b.name, err)
			}
			if err := get(t, s, b, 1, 2); err != nil {
				t.Fatalf("layers of block %s: %v", b.name, err)
			}
		}
		if got := keysOf(s); got != want {
			t.Fatalf("keys in use: %s; want %s", got, want)
		}
		older, outdated := int64(0), int64(0)
		for _, u := range s.KeyUse() {
			if !u.Newest {
				older += u.Slots
			}
		}
		for _, b := range blocks {
			if s.Outdated(b.ref) {
				outdated++
			}
		}
		if n := s.OutdatedSlots(0); n != older || outdated != older {
			t.Fatalf("%d slots and %d blocks have an older key than new ones; want %d", n, outdated, older)
		}
		if string(s.Catalogue()) != "names" {
			t.Fatalf("catalogue %q", s.Catalogue())
		}
	}
	if err := s.SetCatalogue(t.Context(), []byte("names")); err != nil {
		t.Fatal(err)
	}
	add("plain")
	check("")

	reopen := func(ring *crypt.Keyring) error {
		t.Helper()
		next, dev, err := reopenWith(t, s, d, ring, index()...)
		s, d = next, dev
		return err
	}
	if err := reopen(keyring(t, "k1")); err != nil {
		t.Fatal(err)
	}
	add("first")
	check("=1 k1=1*")
	wantKeyError(t, reopen(nil), "its newest key is k1")
	wantKeyError(t, reopen(keyring(t, "other")), "the catalogue is encrypted with key k1, which is not given")
	other, err := crypt.NewKeyring(key(t, "k1", "another secret"))
	if err != nil {
		t.Fatal(err)
	}
	wantKeyError(t, reopen(other), "key k1 is another key than the one with this id")
	if err := reopen(keyring(t, "k1", "k2")); err != nil {
		t.Fatal(err)
	}
	add("second")
	check("=1 k1=1 k2=1*")
	wantKeyError(t, reopen(keyring(t, "k2")), "1 blocks are encrypted with key k1, which is not given")
	if err := reopen(keyring(t, "k1", "k2")); err != nil {
		t.Fatal(err)
	}

	// While the store is open.
	reserved, err := reserve(t.Context(), s, nil, newBlock("late", 12000, 3))
	if err != nil {
		t.Fatal(err)
	}
	wantKeyError(t, s.SetKeys(t.Context(), keyring(t, "k1", "k3")), "key k2 encrypts new blocks")
	wantKeyError(t, s.SetKeys(t.Context(), keyring(t, "k2", "k3")), "1 blocks are encrypted with key k1")
	check("=1 k1=1 k2=2*")
	if err := s.SetKeys(t.Context(), keyring(t, "k1", "k2", "k3")); err != nil {
		t.Fatal(err)
	}
	late := newBlock("late", 12000, 3)
	late.ref = reserved[0]
	late.fill()
	w := []Write{late.write(t)}
	if err := errors.Join(s.Write(t.Context(), w), s.Commit(late.ref)); err != nil {
		t.Fatal(err)
	}
	blocks["late"] = late
	add("third")
	check("=1 k1=1 k2=2 k3=1*")
	if err := reopen(keyring(t, "k1", "k2", "k3")); err != nil {
		t.Fatal(err)
	}
	check("=1 k1=1 k2=2 k3=1*")
	remove("first")
	if err := s.SetKeys(t.Context(), keyring(t, "k2", "k3")); err != nil {
		t.Fatal(err)
	}
	check("=1 k2=2 k3=1*")
	remove("second")
	remove("late")
	if err := reopen(keyring(t, "k3")); err != nil {
		t.Fatal(err)
	}
	check("=1 k3=1*")
	if keys := s.volumes[0].superblock.Keys; len(keys) != 1 {
		t.Errorf("the superblock has the keys %v", keys)
	}
	// A scan finds the freed slots of k1 and k2 and cannot decrypt them.
	found := 0
	st, err := s.Scan(t.Context(), ScanOptions{Verify: true}, func(_ kv.Ref, h *ondisk.SlotHeader) error {
		if found++; len(h.LayerSums) != 3 {
			t.Errorf("a slot with %d checksums", len(h.LayerSums))
		}
		return nil
	})
	if err != nil || st.Damaged != 0 || found < 2 {
		t.Errorf("scan found %d slots: %+v, %v", found, st, err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestTooManyLayers: a block whose tags do not fit the header is refused when its layout is computed.
func TestTooManyLayers(t *testing.T) {
	s := mustOpen(t, Options{Keys: keyring(t, "k")}, memio.New(memio.Options{}))
	if _, err := s.SlotLayout(648, ondisk.MaxSealedLayers); err != nil {
		t.Error(err)
	}
	if _, err := s.SlotLayout(652, ondisk.MaxSealedLayers+1); !errors.Is(err, ErrTooLarge) {
		t.Errorf("%v; want ErrTooLarge", err)
	}
}

// witness records what a device is given to write, and fails the test if one key and nonce encrypt two
// contents.
type witness struct {
	t    *testing.T
	mu   sync.Mutex
	seen map[string][32]byte
}

// witnessed is a device whose writes a witness records.
type witnessed struct {
	blockio.Device
	*witness
}

func (d *witnessed) Do(ctx context.Context, batch []blockio.Request) error {
	for _, r := range batch {
		if r.Op != blockio.Write {
			continue
		}
		for _, b := range r.Bufs {
			d.record(b)
		}
	}
	return d.Device.Do(ctx, batch)
}

func (d *witnessed) record(b []byte) {
	h, err := ondisk.DecodeSlotHeader(b, nil)
	if err != nil || h.Key == (ondisk.KeyID{}) {
		return
	}
	// The salts are equal, so the generation alone makes the derived keys of two contents differ. The
	// nonces are the numbers of the layers.
	name := fmt.Sprintf("%v %v", h.Key, h.Generation)
	sum := sha256.Sum256(b)
	d.mu.Lock()
	defer d.mu.Unlock()
	if old, ok := d.seen[name]; ok && old != sum {
		d.t.Errorf("slot %v, generation %v: another content had this generation", h.Extent, h.Generation)
	}
	d.seen[name] = sum
}

// zeroes is a source of random bytes that fails to be random.
type zeroes struct{}

func (zeroes) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}

// TestNoncesAcrossCrashes runs stories with power failures on encrypted volumes and compares everything
// that is written: even with a constant salt, no key and nonce encrypt two contents. Each crash is also
// a test of exact-or-miss for encrypted blocks.
func TestNoncesAcrossCrashes(t *testing.T) {
	want := testkit.Rounds(2000, 25)
	points := 0
	for seed := uint64(1000); points < want; seed++ {
		mutations := int64(1)
		for at := int64(-1); at < mutations && points < want; at += 1 + mutations/8 {
			w := &witness{t: t, seen: make(map[string][32]byte)}
			c := newCrashRun(seed)
			rotations := 0
			c.tune = func(o *Options) {
				o.Keys = keyring(t, "k1")
				if rotations++; rotations > 1 {
					o.Keys = keyring(t, "k1", "k2")
				}
				o.salts = zeroes{}
				for i := range o.Devices {
					o.Devices[i] = &witnessed{Device: o.Devices[i], witness: w}
				}
			}
			if at >= 0 {
				c.devs[c.rng.IntN(len(c.devs))].PowerOffAfter(at)
				c.rng = rand.New(rand.NewPCG(seed, 7))
				c.rng.IntN(2)
			}
			if err := c.run(t, 30); err != nil && (at < 0 || !errors.Is(err, memio.ErrPowerLost)) {
				t.Fatalf("seed %d, power off after %d: %v", seed, at, err)
			}
			if at < 0 {
				for _, d := range c.devs {
					mutations = max(mutations, d.Mutations())
				}
			}
			old := slices.Clone(c.devs)
			c.crash(seed<<20 + uint64(at+1))
			if !t.Run(fmt.Sprintf("seed=%d,at=%d", seed, at), c.verify) || t.Failed() {
				return
			}
			if at < 0 && len(w.seen) < 10 {
				t.Fatalf("seed %d: only %d encrypted slots were written", seed, len(w.seen))
			}
			for _, d := range append(old, c.devs...) {
				d.Close()
			}
			points++
		}
	}
}

// TestSlotWrittenTwice: a slot whose write failed may be written again with other bytes and the same
// generation. The two writes have different salts.
func TestSlotWrittenTwice(t *testing.T) {
	d := memio.New(memio.Options{})
	s := mustOpen(t, Options{Keys: keyring(t, "k")}, d)
	salts := make(map[string]bool)
	for i := range 3 {
		b := newBlock("b", 4096, 1)
		refs, err := reserve(t.Context(), s, nil, b)
		if err != nil {
			t.Fatal(err)
		}
		b.ref = refs[0]
		for range 2 {
			b.fill()
			w := b.write(t)
			dst := aligned(int64(len(w.Buf)))
			w.Header.Extent, w.Header.Generation = b.ref.Extent, b.ref.Generation
			if err := s.volumes[0].sealSlot(key(t, "k", "k"), &w.Header, w.Buf, dst); err != nil {
				t.Fatal(err)
			}
			salts[string(ondisk.SealedParts(dst, 1).Salt)] = true
		}
		if want := 2 * (i + 1); len(salts) != want {
			t.Fatalf("%d salts for %d writes", len(salts), want)
		}
		if err := s.Abandon(b.ref); err != nil {
			t.Fatal(err)
		}
	}
}

// TestFailedRaise: a boot counter that could not be stored is not used.
func TestFailedRaise(t *testing.T) {
	d := memio.New(memio.Options{})
	s, err := open(t, Options{}, d)
	if err != nil {
		t.Fatal(err)
	}
	boot := s.boot
	d.PowerOffAfter(0)
	for range 2 {
		if got, err := s.raiseBoot(t.Context(), boot); err == nil {
			t.Errorf("raiseBoot returned %d although no volume stores it", got)
		}
	}
	if err := s.Close(t.Context()); !errors.Is(err, memio.ErrPowerLost) {
		t.Error(err)
	}
}

// TestScanWithoutKey: a scan, which may be for a new index, fails if a slot is encrypted with a key of the
// volume that is not given. When the key was removed in an orderly way, the slots are blank, also after
// a start that had dropped the key.
func TestScanWithoutKey(t *testing.T) {
	d := memio.New(memio.Options{})
	s, d, err := reopenWith(t, nil, d, keyring(t, "k1"))
	if err != nil {
		t.Fatal(err)
	}
	b := newBlock("b", 12000, 3)
	if err := errors.Join(s.SetCatalogue(t.Context(), []byte("names")), put(t, s, nil, b), s.SetKeys(t.Context(), keyring(t, "k1", "k2")), s.Close(t.Context())); err != nil {
		t.Fatal(err)
	}
	scan := func(s *Store) (ScanStats, error) {
		return s.Scan(t.Context(), ScanOptions{}, func(kv.Ref, *ondisk.SlotHeader) error { return nil })
	}
	d = d.Reopen()
	if s, err = open(t, Options{Keys: keyring(t, "k2")}, d); err != nil {
		t.Fatal(err)
	}
	_, err = scan(s)
	wantKeyError(t, err, "encrypted with key k1, which is not given: add the key to the keys of the node")
	if s, d, err = reopenWith(t, s, d, keyring(t, "k1", "k2"), b); err != nil {
		t.Fatal(err)
	}
	if st, err := scan(s); err != nil || st.Found != 1 {
		t.Fatalf("scan with all keys: %+v, %v", st, err)
	}
	if err := s.Free(b.ref); err != nil {
		t.Fatal(err)
	}
	if s, d, err = reopenWith(t, s, d, keyring(t, "k2")); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s, err = open(t, Options{Keys: keyring(t, "k2")}, d.Reopen()); err != nil {
		t.Fatal(err)
	}
	if st, err := scan(s); err != nil || st.Found != 0 || st.Damaged != 0 {
		t.Errorf("scan after the key was removed: %+v, %v", st, err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestEncryptionAcrossCrashes: after a crash during the start that begins to encrypt, and during a rotation,
// the next start leaves no catalogue that is plain or that needs the earlier key.
func TestEncryptionAcrossCrashes(t *testing.T) {
	secret := []byte("the salt of a tenant's namespace")
	s, err := open(t, Options{}, memio.New(memio.Options{}))
	if err != nil {
		t.Fatal(err)
	}
	base := s.opts.Devices[0].(*memio.Device)
	if err := s.Ready(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := s.SetCatalogue(t.Context(), secret); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, ids := range [][]string{{"k1"}, {"k1", "k2"}} {
		for at, done := int64(0), false; !done; at++ {
			d := base.Clone()
			d.PowerOffAfter(at)
			s, err := open(t, Options{Keys: keyring(t, ids...)}, d)
			if done = err == nil; done {
				if err := errors.Join(s.Ready(), s.Close(t.Context())); err != nil && !errors.Is(err, memio.ErrPowerLost) {
					t.Fatal(err)
				}
			}
			after := d.Crash(uint64(at))
			s, after, err = reopenWith(t, nil, after, keyring(t, ids...))
			if err != nil {
				t.Fatal(err)
			}
			if string(s.Catalogue()) != string(secret) {
				t.Errorf("catalogue %q", s.Catalogue())
			}
			if err := s.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			for name, file := range content(t, after.Reopen()) {
				if bytes.Contains(file, secret) {
					t.Errorf("keys %v, power off after %d mutations: the catalogue is in %s in plain", ids, at, name)
				}
			}
			if s, _, err = reopenWith(t, nil, after.Reopen(), keyring(t, ids[len(ids)-1])); err != nil {
				t.Fatalf("keys %v, power off after %d mutations: with the newest key alone: %v", ids, at, err)
			}
			if err := s.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			if done {
				base = after.Reopen()
			}
		}
	}
}

// TestVolumeWithAnEarlierKey: a volume that had failed when the keys were rotated, and whose blocks are
// not needed, does not prevent a start without the earlier key. While a volume is missing, no key can be
// removed, because the volume may have blocks of it.
func TestVolumeWithAnEarlierKey(t *testing.T) {
	devs := []*memio.Device{memio.New(memio.Options{Path: "a"}), memio.New(memio.Options{Path: "b"})}
	reopen := func(s *Store, ring *crypt.Keyring, n int) *Store {
		t.Helper()
		if s != nil {
			if err := s.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		for i := range devs {
			devs[i] = devs[i].Reopen()
		}
		s, err := open(t, Options{Keys: ring, Degraded: n < len(devs)}, devs[:n]...)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Ready(); err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := reopen(nil, keyring(t, "k1"), 2)
	for range 2 {
		if err := s.SetCatalogue(t.Context(), []byte("old")); err != nil {
			t.Fatal(err)
		}
	}
	s = reopen(s, keyring(t, "k1"), 1)
	if err := s.SetKeys(t.Context(), keyring(t, "k1", "k2")); err != nil {
		t.Fatal(err)
	}
	if err := s.SetCatalogue(t.Context(), []byte("new")); err != nil {
		t.Fatal(err)
	}
	wantKeyError(t, s.SetKeys(t.Context(), keyring(t, "k2")), "key k1 cannot be removed while the volume volume-1 is missing")
	s = reopen(s, keyring(t, "k2"), 2)
	if got := string(s.Catalogue()); got != "new" {
		t.Errorf("catalogue %q", got)
	}
	if err := s.SetKeys(t.Context(), keyring(t, "k2", "k3")); err != nil {
		t.Fatal(err)
	}
	s = reopen(s, keyring(t, "k3"), 2)
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestRotationWhileWriting rotates the keys, and removes old ones, while blocks are written, read and freed.
// Every block is read with its bytes, and a key with blocks is never removed.
func TestRotationWhileWriting(t *testing.T) {
	s := mustOpen(t, Options{CapacityBytes: 8 << 20, Keys: keyring(t, "k0")}, memio.New(memio.Options{Path: "a"}), memio.New(memio.Options{Path: "b"}))
	if err := s.SetCatalogue(t.Context(), []byte("names")); err != nil {
		t.Fatal(err)
	}
	const rotations = 20
	stop := make(chan struct{})
	var writers sync.WaitGroup
	for w := range 2 {
		writers.Go(func() {
			var kept []*block
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				b := newBlock(fmt.Sprint(w, "-", i), 12000, 3)
				if err := put(t, s, nil, b); err != nil {
					t.Errorf("put: %v", err)
					return
				}
				kept = append(kept, b)
				for _, b := range kept {
					if err := get(t, s, b, 0, 0); err != nil {
						t.Errorf("get %s: %v", b.name, err)
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
	ids, removed := []string{"k0"}, 0
	for i := range rotations {
		ids = append(ids, fmt.Sprint("k", i+1))
		if err := s.SetKeys(t.Context(), keyring(t, ids...)); err != nil {
			t.Error(err)
		}
		err := s.SetKeys(t.Context(), keyring(t, ids[1:]...))
		switch {
		case err == nil:
			ids = ids[1:]
			removed++
		case !errors.Is(err, ErrKey):
			t.Error(err)
		}
	}
	close(stop)
	writers.Wait()
	if use := s.KeyUse(); len(use) != 1+rotations-removed || !use[len(use)-1].Newest {
		t.Errorf("after %d rotations and %d removals: %+v", rotations, removed, use)
	}
}

// TestPlainVolume: a volume that is marked as plain has plain blocks and an encrypted catalogue, also after a
// rotation and after an Open that does not mark it. It can be encrypted later. An encrypted volume cannot
// become plain.
func TestPlainVolume(t *testing.T) {
	devs := []*memio.Device{memio.New(memio.Options{Path: "a"}), memio.New(memio.Options{Path: "b"})}
	var s *Store
	var blocks []*block
	reopen := func(ring *crypt.Keyring, plain ...bool) error {
		t.Helper()
		if s != nil {
			if err := s.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		s = nil
		for i := range devs {
			devs[i] = devs[i].Reopen()
		}
		next, err := open(t, Options{StripeBytes: 16 << 10, Keys: ring, Plain: plain}, devs...)
		if err != nil {
			for _, d := range devs {
				err = errors.Join(err, d.Close())
			}
			return err
		}
		for _, b := range blocks {
			if err := next.Adopt(b.ref, int64(len(b.payload)), b.key.Layers); err != nil {
				t.Fatal(err)
			}
		}
		s = next
		return s.Ready()
	}
	// write puts two blocks on each volume, and fails the test unless each volume has the key, and the first volume no
	// plain block.
	secret := []byte("the salt of a tenant's namespace")
	write := func(name string, keys ...string) {
		t.Helper()
		if err := s.SetCatalogue(t.Context(), secret); err != nil {
			t.Fatal(err)
		}
		on := make(map[int][]*block)
		for i := 0; len(on[0]) < 2 || len(on[1]) < 2; i++ {
			b := newBlock(fmt.Sprint(name, i), 4096, 1)
			if err := put(t, s, nil, b); err != nil {
				t.Fatal(err)
			}
			blocks = append(blocks, b)
			v := int(b.ref.Extent.Volume())
			on[v] = append(on[v], b)
			if s.Outdated(b.ref) {
				t.Errorf("new block %s on volume %d has an older key than new blocks", b.name, v)
			}
		}
		if err := s.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		for i, d := range devs {
			if got := s.Stats().Volumes[i].Key; got != keys[i] {
				t.Errorf("%s: volume %d has key %q, want %q", name, i, got, keys[i])
			}
			var all []byte
			for _, file := range content(t, d) {
				all = append(all, file...)
			}
			if bytes.Contains(all, secret) {
				t.Errorf("%s: the catalogue of volume %d is plain", name, i)
			}
			for _, b := range on[i] {
				if plain := bytes.Contains(all, b.payload[:64]); plain != (keys[i] == "") {
					t.Errorf("%s: block %s on volume %d is plain: %v", name, b.name, i, plain)
				}
			}
		}
		for _, b := range blocks {
			if err := get(t, s, b, 0, 0); err != nil {
				t.Errorf("%s: %s: %v", name, b.name, err)
			}
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(reopen(keyring(t, "k1"), false, true))
	write("first", "k1", "")
	must(s.SetKeys(t.Context(), keyring(t, "k1", "k2")))
	write("rotated", "k2", "")
	must(reopen(keyring(t, "k1", "k2")))
	write("adopted", "k2", "")
	wantKeyError(t, reopen(nil), "is encrypted, its newest key is k2: give the keys of the node")
	must(reopen(keyring(t, "k1", "k2"), false, false))
	write("encrypted", "k2", "k2")
	wantKeyError(t, reopen(keyring(t, "k1", "k2"), false, true), "volume b is encrypted, its newest key is k2, and encryption.plain_volumes names it: remove it")
	if err := reopen(nil, false, true); err == nil || !strings.Contains(err.Error(), "want all, and keys") {
		t.Errorf("a plain volume of a store without keys: %v", err)
	}
}

// TestAllVolumesPlain: a store whose volumes are all plain has an encrypted catalogue, so it needs its keys, which can
// be rotated and removed.
func TestAllVolumesPlain(t *testing.T) {
	d := memio.New(memio.Options{Path: "a"})
	s, err := open(t, Options{StripeBytes: 16 << 10, Keys: keyring(t, "k1"), Plain: []bool{true}}, d)
	if err != nil {
		t.Fatal(err)
	}
	b := newBlock("block", 4096, 1)
	if err := errors.Join(s.Ready(), s.SetCatalogue(t.Context(), []byte("catalogue")), put(t, s, nil, b)); err != nil {
		t.Fatal(err)
	}
	for _, ids := range [][]string{{"k1", "k2"}, {"k2"}} {
		if err := s.SetKeys(t.Context(), keyring(t, ids...)); err != nil {
			t.Fatal(err)
		}
	}
	if use := s.KeyUse(); len(use) != 2 || use[0].ID != "" || use[0].Slots != 1 || use[1].ID != "k2" || !use[1].Newest {
		t.Errorf("keys: %+v; want one plain slot, and k2", use)
	}
	if err := errors.Join(get(t, s, b, 0, 0), s.Close(t.Context())); err != nil {
		t.Fatal(err)
	}
	d = d.Reopen()
	_, err = open(t, Options{StripeBytes: 16 << 10}, d)
	wantKeyError(t, err, "the catalogue is encrypted with key k2, which is not given")
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	d = d.Reopen()
	if s, err = open(t, Options{StripeBytes: 16 << 10, Keys: keyring(t, "k2")}, d); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
}
