package ondisk

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/penstock-kv/penstock/kv"
)

var le = binary.LittleEndian

// The examples of doc.go: testdata/records.td shows the bytes of each.
var (
	exampleSuperblock = Superblock{
		Sequence: 3, Node: uuid(0x10), Volume: uuid(0x20), Index: 1, Count: 2, Boot: 2,
		SegmentBytes: 1 << 30, CatalogueBytes: 1 << 20,
	}
	exampleCatalogue = NewCatalogueHeader(5, []byte("namespaces"))
	exampleSegment   = SegmentHeader{Volume: uuid(0x20), Number: 7, Slots: 255, SlotBytes: 4 << 20, Cut: 1<<32 | 1}
	exampleSlot      = SlotHeader{
		SlotKey: SlotKey{
			Namespace: 9, Epoch: 4, ID: kv.BlockID(uuid(0x30)), Group: 1,
			Geometry: kv.GeometryDigest(uuid(0x50)), PayloadBytes: 12000, Layers: 3,
		},
		Generation: 1<<32 | 2, Born: 1 << 32, Extent: kv.MakeExtent(1, 7, 12), Class: ClassPrefix,
		Parent: kv.BlockID(uuid(0x40)), Depth: 6, LayerSums: []uint64{0xa, 0xb, 0xc},
	}
)

// The examples of encrypted records.
var (
	exampleEncrypted  = withKeys(exampleSuperblock)
	exampleSealedSlot = sealedOf(exampleSlot)
	exampleEpochs     = withEpochs(exampleEncrypted)
	exampleSecrets    = CatalogueHeader{Sequence: 6, BlobBytes: 200, BlobSum: 0xabcdef, Sealed: true, Epochs: true}
)

func withEpochs(s Superblock) Superblock {
	s.Keys = slices.Clone(s.Keys)
	s.Keys[1].Epochs = true
	return s
}

func withKeys(s Superblock) Superblock {
	s.Keys = []KeyPeriod{{From: 1, ID: MakeKeyID("2026-01"), Check: uuid(0x60)}, {From: 2, ID: MakeKeyID("2026-02"), Check: uuid(0x70)}}
	return s
}

func sealedOf(h SlotHeader) SlotHeader {
	h.Key = MakeKeyID("2026-02")
	return h
}

// encodeSealedSlot encodes an encrypted slot. The encrypted bytes of the header are parts, or
// numbers if parts is nil.
func encodeSealedSlot(t testing.TB, h SlotHeader, parts []byte) []byte {
	t.Helper()
	l, err := h.Layout()
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, l.HeaderBytes())
	if len(h.LayerSums) == 0 {
		h.LayerSums = make([]uint64, h.Layers)
	}
	err = h.EncodeSealed(b, func(p Sealed) error {
		if parts != nil {
			o := SealedParts(parts, h.Layers)
			copy(p.Salt, o.Salt)
			copy(p.Sums, o.Sums)
			copy(p.Tags, o.Tags)
			return nil
		}
		for i, part := range [][]byte{p.Salt, p.Sums, p.Tags} {
			for j := range part {
				part[j] = byte(0x80 + 0x20*i + j%16)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func uuid(first byte) (u UUID) {
	for i := range u {
		u[i] = first + byte(i)
	}
	return u
}

func encodeSlot(t testing.TB, h SlotHeader) []byte {
	t.Helper()
	l, err := h.Layout()
	if err != nil {
		t.Fatal(err)
	}
	b := bytes.Repeat([]byte{0xEE}, int(l.HeaderBytes()))
	if err := h.EncodeTo(b); err != nil {
		t.Fatal(err)
	}
	return b
}

// TestRecords shows the bytes of the examples in doc.go, and decodes them again.
func TestRecords(t *testing.T) {
	datadriven.RunTest(t, "testdata/records.td", func(t *testing.T, d *datadriven.TestData) string {
		var b []byte
		var s fmt.Stringer
		switch d.Cmd {
		case "superblock":
			b = exampleSuperblock.Encode()
			v, err := DecodeSuperblock(b)
			if err != nil || !reflect.DeepEqual(v, exampleSuperblock) {
				t.Fatalf("decoded %+v, %v; want %+v", v, err, exampleSuperblock)
			}
			s = v
		case "catalogue":
			b = exampleCatalogue.Encode()
			v, err := DecodeCatalogueHeader(b)
			if err != nil || v != exampleCatalogue {
				t.Fatalf("decoded %+v, %v; want %+v", v, err, exampleCatalogue)
			}
			s = v
		case "encrypted-superblock":
			b = exampleEncrypted.Encode()
			v, err := DecodeSuperblock(b)
			if err != nil || !reflect.DeepEqual(v, exampleEncrypted) {
				t.Fatalf("decoded %+v, %v; want %+v", v, err, exampleEncrypted)
			}
			s = v
		case "epochs-superblock":
			b = exampleEpochs.Encode()
			v, err := DecodeSuperblock(b)
			if err != nil || !reflect.DeepEqual(v, exampleEpochs) {
				t.Fatalf("decoded %+v, %v; want %+v", v, err, exampleEpochs)
			}
			s = v
		case "epochs-catalogue":
			b = exampleSecrets.Encode()
			v, err := DecodeCatalogueHeader(b)
			if err != nil || v != exampleSecrets {
				t.Fatalf("decoded %+v, %v; want %+v", v, err, exampleSecrets)
			}
			s = v
		case "encrypted-slot":
			b = encodeSealedSlot(t, exampleSealedSlot, nil)
			v, err := DecodeSlotHeader(b, nil)
			want := exampleSealedSlot
			want.LayerSums = nil
			if err != nil || !equalSlots(v, want) {
				t.Fatalf("decoded %+v, %v; want %+v", v, err, want)
			}
			s = &v
		case "segment":
			b = exampleSegment.Encode()
			v, err := DecodeSegmentHeader(b)
			if err != nil || v != exampleSegment {
				t.Fatalf("decoded %+v, %v; want %+v", v, err, exampleSegment)
			}
			s = v
		case "slot":
			b = encodeSlot(t, exampleSlot)
			v, err := DecodeSlotHeader(b, nil)
			if err != nil || !equalSlots(v, exampleSlot) {
				t.Fatalf("decoded %+v, %v; want %+v", v, err, exampleSlot)
			}
			s = &v
		default:
			t.Fatalf("unknown command %q", d.Cmd)
		}
		return dump(b) + s.String()
	})
}

// dump is a hex dump without the zeroes at the end.
func dump(b []byte) string {
	n := len(b)
	for n > 0 && b[n-1] == 0 {
		n--
	}
	var w strings.Builder
	w.WriteString(hex.Dump(b[:n]))
	fmt.Fprintf(&w, "and %d zeroes\n", len(b)-n)
	return w.String()
}

func equalSlots(a, b SlotHeader) bool {
	sums := slices.Equal(a.LayerSums, b.LayerSums)
	return sums && a.SlotKey == b.SlotKey && a.Ref() == b.Ref() && a.Class == b.Class && a.Parent == b.Parent && a.Depth == b.Depth && a.Born == b.Born
}

// TestEveryBitCounts flips each bit of each record: every flip is detected.
func TestEveryBitCounts(t *testing.T) {
	for name, c := range map[string]struct {
		record []byte
		decode func([]byte) error
	}{
		"superblock": {exampleSuperblock.Encode(), func(b []byte) error { _, err := DecodeSuperblock(b); return err }},
		"catalogue":  {exampleCatalogue.Encode(), func(b []byte) error { _, err := DecodeCatalogueHeader(b); return err }},
		"epochs":     {exampleEpochs.Encode(), func(b []byte) error { _, err := DecodeSuperblock(b); return err }},
		"secrets":    {exampleSecrets.Encode(), func(b []byte) error { _, err := DecodeCatalogueHeader(b); return err }},
		"segment":    {exampleSegment.Encode(), func(b []byte) error { _, err := DecodeSegmentHeader(b); return err }},
		"slot":       {encodeSlot(t, exampleSlot), func(b []byte) error { _, err := DecodeSlotHeader(b, nil); return err }},
	} {
		t.Run(name, func(t *testing.T) {
			for bit := range 8 * len(c.record) {
				c.record[bit/8] ^= 1 << (bit % 8)
				err := c.decode(c.record)
				want := ErrDamaged
				if bit < 64 {
					want = ErrBlank
				}
				if !errors.Is(err, want) {
					t.Fatalf("byte %d bit %d flipped: %v; want %v", bit/8, bit%8, err, want)
				}
				c.record[bit/8] ^= 1 << (bit % 8)
			}
			if err := c.decode(c.record[:Page-1]); !errors.Is(err, ErrDamaged) {
				t.Errorf("a record cut short: %v; want ErrDamaged", err)
			}
		})
	}
}

// TestOtherVersion: decoding an intact record of another version returns ErrVersion.
func TestOtherVersion(t *testing.T) {
	b := exampleSuperblock.Encode()
	b[versionOff] = Version + 1
	putChecksum(b)
	if _, err := DecodeSuperblock(b); !errors.Is(err, ErrVersion) || !strings.Contains(err.Error(), "version 4") {
		t.Errorf("decode of version %d: %v; want ErrVersion that names it", Version+1, err)
	}
	slot := encodeSlot(t, exampleSlot)
	slot[versionOff] = Version
	putChecksum(slot)
	if _, err := DecodeSlotHeader(slot, nil); !errors.Is(err, ErrVersion) || !strings.Contains(err.Error(), "version 3") {
		t.Errorf("decode of a slot of version %d: %v; want ErrVersion that names it", Version, err)
	}
}

// TestEpochs: the secrets and erasures in a catalogue are decoded as they were encoded, bytes that are too few for
// them are refused, and no format prints a secret.
func TestEpochs(t *testing.T) {
	secrets := []EpochSecret{{Namespace: 1, Epoch: 2, Secret: [32]byte{0xab, 31: 0xab}}, {Namespace: 1, Epoch: 2, Secret: [32]byte{0xcd}}, {Namespace: 7, Epoch: kv.MaxEpoch}}
	erasures := []Erasure{{Namespace: 3, Epoch: 4, Volumes: [VolumeSetBytes]byte{0x81, 31: 0x80}, Since: time.UnixMilli(1764200000123)}}
	blob := []byte("namespaces")
	b := append(AppendEpochs([]byte("front"), secrets, erasures), blob...)[len("front"):]
	if n := int64(len(b) - len(blob)); n != EpochsBytes(3, 1) {
		t.Errorf("%d bytes; EpochsBytes returns %d", n, EpochsBytes(3, 1))
	}
	s, e, rest, err := DecodeEpochs(b)
	if err != nil || !slices.Equal(s, secrets) || !slices.Equal(e, erasures) || string(rest) != string(blob) {
		t.Errorf("decoded %v, %v, %q, %v", s, e, rest, err)
	}
	for n := range int(EpochsBytes(3, 1)) {
		if _, _, _, err := DecodeEpochs(b[:n]); !errors.Is(err, ErrDamaged) {
			t.Fatalf("%d bytes: %v; want ErrDamaged", n, err)
		}
	}
	if _, _, _, err := DecodeEpochs(bytes.Repeat([]byte{0xff}, 100)); !errors.Is(err, ErrDamaged) {
		t.Errorf("counts of 4 billion: %v; want ErrDamaged", err)
	}
	for _, verb := range []string{"%v", "%+v", "%#v", "%x", "%d"} {
		if text := fmt.Sprintf(verb, secrets[0]); strings.Contains(text, "ab") || strings.Contains(text, "171") {
			t.Errorf("%s prints the secret: %s", verb, text)
		}
	}
}

// TestPlainSuperblock: the superblock of a volume whose slots are not encrypted although the store has keys has the
// newest version, so that no older program encrypts its slots. It has no keys, and no unknown flag.
func TestPlainSuperblock(t *testing.T) {
	for _, shared := range []bool{false, true} {
		want := exampleSuperblock
		want.Shared, want.Plain = shared, true
		b := want.Encode()
		if got, err := DecodeSuperblock(b); err != nil || !reflect.DeepEqual(got, want) || le.Uint32(b[versionOff:]) != sealedVersion {
			t.Errorf("decoded %+v, %v, version %d; want %+v", got, err, le.Uint32(b[versionOff:]), want)
		}
		if !strings.Contains(want.String(), "slots are not encrypted") {
			t.Errorf("inspect prints\n%v", want)
		}
		want.Keys = []KeyPeriod{{From: 1, ID: MakeKeyID("k")}}
		if _, err := DecodeSuperblock(want.Encode()); !errors.Is(err, ErrDamaged) {
			t.Errorf("plain with a key: %v; want ErrDamaged", err)
		}
		le.PutUint32(b[flagsOffset:], le.Uint32(b[flagsOffset:])|4)
		putChecksum(b)
		if _, err := DecodeSuperblock(b); !errors.Is(err, ErrDamaged) {
			t.Errorf("an unknown flag: %v; want ErrDamaged", err)
		}
	}
}

// TestSharedSuperblock: the superblock of a shared volume has version 2, which older programs refuse,
// and the field shared exactly in version 2. A superblock of version 1 is read as before.
func TestSharedSuperblock(t *testing.T) {
	plain, shared := exampleSuperblock, exampleSuperblock
	shared.Shared = true
	for _, want := range []Superblock{plain, shared} {
		b := want.Encode()
		if got, err := DecodeSuperblock(b); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("decoded %+v, %v; want %+v", got, err, want)
		}
		if v := le.Uint32(b[versionOff:]); (v == 2) != want.Shared || (v == 1) == want.Shared {
			t.Errorf("shared %v has version %d", want.Shared, v)
		}
		le.PutUint32(b[versionOff:], 3-le.Uint32(b[versionOff:]))
		putChecksum(b)
		if _, err := DecodeSuperblock(b); !errors.Is(err, ErrDamaged) {
			t.Errorf("shared %v with the other version: %v; want ErrDamaged", want.Shared, err)
		}
	}
	slot := encodeSlot(t, exampleSlot)
	le.PutUint32(slot[versionOff:], 2)
	putChecksum(slot)
	if _, err := DecodeSlotHeader(slot, nil); !errors.Is(err, ErrVersion) {
		t.Errorf("a slot header of version 2: %v; want ErrVersion", err)
	}
	for _, base := range []string{SuperblockName, CatalogueName} {
		name := SharedName(base, 0xabc)
		if b, fence, ok := ParseSharedName(name); !ok || b != base || fence != 0xabc {
			t.Errorf("%s is parsed as %s of %x, %v", name, b, fence, ok)
		}
	}
	for _, name := range []string{SuperblockName, "superblock-1", "segment-00000001", "superblock-0000000g", "superblock-00000001-"} {
		if _, _, ok := ParseSharedName(name); ok {
			t.Errorf("%s is parsed as the name of a shared volume's file", name)
		}
	}
}

func putChecksum(b []byte) {
	le.PutUint64(b[checksumOff:], checksum(b))
}

// TestSealedNonsense: impossible values are refused although the checksum is valid.
func TestSealedNonsense(t *testing.T) {
	for name, spoil := range map[string]func() error{
		"superblock index": func() error { s := exampleSuperblock; s.Index = 2; _, err := DecodeSuperblock(s.Encode()); return err },
		"superblock count": func() error {
			s := exampleSuperblock
			s.Count = kv.MaxVolumes + 1
			_, err := DecodeSuperblock(s.Encode())
			return err
		},
		"superblock boot": func() error {
			s := exampleSuperblock
			s.Boot = MaxBoot + 1
			_, err := DecodeSuperblock(s.Encode())
			return err
		},
		"superblock segment": func() error {
			s := exampleSuperblock
			s.SegmentBytes = 100
			_, err := DecodeSuperblock(s.Encode())
			return err
		},
		"superblock catalogue": func() error {
			s := exampleSuperblock
			s.CatalogueBytes = -4096
			_, err := DecodeSuperblock(s.Encode())
			return err
		},
		"superblock reserved": func() error {
			b := exampleSuperblock.Encode()
			b[Page-1] = 1
			putChecksum(b)
			_, err := DecodeSuperblock(b)
			return err
		},
		"catalogue length": func() error {
			h := exampleCatalogue
			h.BlobBytes = -1
			_, err := DecodeCatalogueHeader(h.Encode())
			return err
		},
		"superblock cipher": func() error {
			b := exampleEncrypted.Encode()
			b[periodOffset+4] = 2
			putChecksum(b)
			_, err := DecodeSuperblock(b)
			return err
		},
		"superblock keys": func() error {
			s := exampleSuperblock
			s.Keys = make([]KeyPeriod, MaxKeyPeriods)
			for i := range s.Keys {
				s.Keys[i] = KeyPeriod{From: uint32(i), ID: MakeKeyID("k")}
			}
			b := s.Encode()
			if _, err := DecodeSuperblock(b); err != nil {
				return nil
			}
			le.PutUint32(b[keysOffset:], MaxKeyPeriods+1)
			putChecksum(b)
			_, err := DecodeSuperblock(b)
			return err
		},
		"superblock key order": func() error {
			s := withKeys(exampleSuperblock)
			s.Keys[1].From = s.Keys[0].From
			_, err := DecodeSuperblock(s.Encode())
			return err
		},
		"superblock key id": func() error {
			s := withKeys(exampleSuperblock)
			s.Keys[0].ID = KeyID{}
			_, err := DecodeSuperblock(s.Encode())
			return err
		},
		"encrypted slot without a key": func() error {
			h := exampleSlot
			_, err := DecodeSlotHeader(encodeSealedSlot(t, h, nil), nil)
			return err
		},
		"catalogue blob":  func() error { return exampleCatalogue.VerifyBlob([]byte("namespaceS")) },
		"catalogue short": func() error { return exampleCatalogue.VerifyBlob([]byte("name")) },
		"segment slots":   func() error { h := exampleSegment; h.Slots = 0; _, err := DecodeSegmentHeader(h.Encode()); return err },
		"segment overflow": func() error {
			h := exampleSegment
			h.Slots, h.SlotBytes = 1<<32-1, 1<<40
			_, err := DecodeSegmentHeader(h.Encode())
			return err
		},
		"segment number": func() error {
			h := exampleSegment
			h.Number = kv.MaxSegments
			_, err := DecodeSegmentHeader(h.Encode())
			return err
		},
		"slot reserved": func() error {
			b := encodeSlot(t, exampleSlot)
			b[46] = 1
			putChecksum(b)
			_, err := DecodeSlotHeader(b, nil)
			return err
		},
		"slot born later": func() error {
			b := encodeSlot(t, exampleSlot)
			b[127] = 1
			putChecksum(b)
			_, err := DecodeSlotHeader(b, nil)
			return err
		},
		"slot layers": func() error {
			b := encodeSlot(t, exampleSlot)
			b[112] = 7 // 12000 bytes are not 7 equal layers
			putChecksum(b)
			_, err := DecodeSlotHeader(b, nil)
			return err
		},
		"slot class": func() error {
			b := encodeSlot(t, exampleSlot)
			b[44] = 3
			putChecksum(b)
			_, err := DecodeSlotHeader(b, nil)
			return err
		},
	} {
		if err := spoil(); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: %v; want ErrDamaged", name, err)
		}
	}
}

// TestEncodeRefuses: a record that could not be decoded is not written.
func TestEncodeRefuses(t *testing.T) {
	for name, spoil := range map[string]func(*SlotHeader){
		"no generation": func(h *SlotHeader) { h.Generation = 0 },
		"born later":    func(h *SlotHeader) { h.Born = h.Generation },
		"no namespace":  func(h *SlotHeader) { h.Namespace = 0 },
		"no class":      func(h *SlotHeader) { h.Class = 0 },
		"group":         func(h *SlotHeader) { h.Group = kv.MaxGroups },
		"sums":          func(h *SlotHeader) { h.LayerSums = h.LayerSums[:2] },
		"layers":        func(h *SlotHeader) { h.Layers = 0 },
		"uneven":        func(h *SlotHeader) { h.PayloadBytes = 12001 },
		"huge":          func(h *SlotHeader) { h.PayloadBytes = kv.MaxPieceBytes + 3 },
	} {
		h := exampleSlot
		spoil(&h)
		b := bytes.Repeat([]byte{0xEE}, Page)
		if err := h.EncodeTo(b); !errors.Is(err, ErrLayout) {
			t.Errorf("%s: %v; want ErrLayout", name, err)
		}
		if bytes.Count(b, []byte{0xEE}) != Page {
			t.Errorf("%s: the buffer was touched", name)
		}
	}
}

func TestLayout(t *testing.T) {
	for _, c := range []struct {
		payload                       int64
		layers, first, count          int
		header, slot, offset, n, skip int64
	}{
		{1, 1, 0, 1, 4096, 8192, 4096, 4096, 0},
		{12000, 3, 1, 1, 4096, 16384, 4096, 8192, 4000},
		{12000, 3, 2, 1, 4096, 16384, 8192, 8192, 3904},
		{4 << 20, 64, 16, 16, 4096, 4096 + 4<<20, 4096 + 1<<20, 1 << 20, 0},
		{496 * 4096, 496, 0, 496, 4096, 497 * 4096, 4096, 496 * 4096, 0},
		{497 * 4096, 497, 496, 1, 8192, 499 * 4096, 498 * 4096, 4096, 0},
	} {
		l, err := NewLayout(c.payload, c.layers)
		if err != nil {
			t.Fatal(err)
		}
		offset, n, skip := l.Range(c.first, c.count)
		got := []int64{l.HeaderBytes(), l.SlotBytes(), offset, n, skip}
		if want := []int64{c.header, c.slot, c.offset, c.n, c.skip}; !slices.Equal(got, want) {
			t.Errorf("%d bytes in %d layers, layers %d+%d: header, slot, offset, bytes, skip = %v; want %v", c.payload, c.layers, c.first, c.count, got, want)
		}
	}
	if l := (Layout{PayloadBytes: kv.MaxLayers * 4, Layers: kv.MaxLayers}); l.HeaderBytes() != MaxSlotHeaderBytes {
		t.Errorf("MaxSlotHeaderBytes is %d; the longest header has %d", MaxSlotHeaderBytes, l.HeaderBytes())
	}
}

func TestSegmentNames(t *testing.T) {
	for _, n := range []uint32{0, 7, kv.MaxSegments - 1} {
		if got, ok := ParseSegmentName(SegmentName(n)); !ok || got != n {
			t.Errorf("ParseSegmentName(%q) = %d, %v; want %d", SegmentName(n), got, ok, n)
		}
	}
	for _, bad := range []string{"", "segment-", "segment-1", "segment-000000001", "segment-16777216", "segment-0000000x", "Segment-00000001", "segment-+0000001"} {
		if n, ok := ParseSegmentName(bad); ok {
			t.Errorf("ParseSegmentName(%q) = %d", bad, n)
		}
	}
}

// FuzzDecode feeds any bytes to every decoder, sealed and unsealed: there is no panic, errors are
// sentinels, and an accepted record encodes to the same bytes.
func FuzzDecode(f *testing.F) {
	f.Add(exampleSuperblock.Encode(), false)
	f.Add(exampleCatalogue.Encode(), false)
	f.Add(exampleSegment.Encode(), true)
	f.Add(encodeSlot(f, exampleSlot), true)
	f.Add(exampleEncrypted.Encode(), true)
	f.Add(exampleEpochs.Encode(), true)
	f.Add(exampleSecrets.Encode(), true)
	f.Add(encodeSealedSlot(f, exampleSealedSlot, nil), true)
	f.Add([]byte("PNSTKSLT"), true)
	f.Fuzz(func(t *testing.T, b []byte, reseal bool) {
		if n := len(b) % Page; n != 0 || len(b) == 0 {
			b = append(b, make([]byte, Page-n)...)
		}
		if reseal { // lets the fuzzer pass the checksum
			le.PutUint32(b[versionOff:], le.Uint32(b[versionOff:])%(Version+1))
			le.PutUint32(b[lengthOff:], uint32(len(b)))
			putChecksum(b)
		}
		SlotHeaderBytes(b)
		check := func(err error, encode func() []byte) {
			if err != nil {
				if !errors.Is(err, ErrBlank) && !errors.Is(err, ErrVersion) && !errors.Is(err, ErrDamaged) {
					t.Fatalf("an error without a name: %v", err)
				}
				return
			}
			if again := encode(); !bytes.Equal(again, b[:len(again)]) {
				t.Fatalf("decoded and encoded again, the bytes differ")
			}
		}
		sb, err := DecodeSuperblock(b)
		check(err, sb.Encode)
		ch, err := DecodeCatalogueHeader(b)
		check(err, ch.Encode)
		sg, err := DecodeSegmentHeader(b)
		check(err, sg.Encode)
		sl, err := DecodeSlotHeader(b, nil)
		check(err, func() []byte {
			if sl.Key == (KeyID{}) {
				return encodeSlot(t, sl)
			}
			return encodeSealedSlot(t, sl, b)
		})
	})
}

func BenchmarkDecodeSlotHeader(b *testing.B) {
	h := exampleSlot
	h.PayloadBytes, h.Layers, h.LayerSums = 61*41984, 61, make([]uint64, 61)
	rec := encodeSlot(b, h)
	var sums []uint64
	b.ReportAllocs()
	for b.Loop() {
		got, err := DecodeSlotHeader(rec, sums)
		if err != nil {
			b.Fatal(err)
		}
		sums = got.LayerSums
	}
}
