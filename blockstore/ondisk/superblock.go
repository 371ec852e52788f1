package ondisk

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/penstock-kv/penstock/kv"
)

// Names and sizes of a volume's files.
const (
	// SuperblockName is the file with both superblock copies.
	SuperblockName = "superblock"
	// SuperblockFileBytes is the size of that file.
	SuperblockFileBytes = 2 * Page
	// MaxBoot is the largest boot counter, which has 16 bits: a kv.Generation is the boot counter
	// above a sequence number of 32 bits.
	MaxBoot = 1<<16 - 1
)

// UUID is 16 random bytes.
type UUID [16]byte

// NewUUID reads 16 bytes from r; nil means crypto/rand.
func NewUUID(r io.Reader) (UUID, error) {
	if r == nil {
		r = rand.Reader
	}
	var u UUID
	if _, err := io.ReadFull(r, u[:]); err != nil {
		return UUID{}, fmt.Errorf("ondisk: random bytes for a uuid: %w", err)
	}
	return u, nil
}

// String returns the uuid in hexadecimal.
func (u UUID) String() string { return hex.EncodeToString(u[:]) }

// Superblock identifies a directory as a volume of a store.
type Superblock struct {
	// Sequence orders the two copies of the superblock: the copy with the higher one is newer.
	Sequence uint64
	// Node identifies the store, Volume the directory.
	Node, Volume UUID
	// Index is the position of the volume among the Count volumes of the node.
	Index, Count uint32
	// Boot is the number of starts, at most MaxBoot. In a shared volume it is the fencing number of
	// the owner that wrote the superblock.
	Boot uint32
	// SegmentBytes is the file size of a full segment.
	SegmentBytes int64
	// CatalogueBytes is the room for the blob in each catalogue area.
	CatalogueBytes int64
	// MembershipVersion orders changes of the two sets: of all volumes, the sets with the highest
	// version are valid. Draining and Removed have one bit for each volume of the node.
	MembershipVersion uint32
	Draining, Removed [VolumeSetBytes]byte
	// Shared: the volume is on a file system that several hosts mount, and a lease decides which
	// process owns it. A shared volume has a superblock and a catalogue for each owner (SharedName).
	Shared bool
	// Keys are the periods in which the volume was encrypted, oldest first; at most MaxKeyPeriods.
	Keys []KeyPeriod
	// Plain: the slots of the volume are not encrypted although the store has keys. Keys is then empty.
	Plain bool
}

// KeyID is the id of a key, padded with zeroes. The zero KeyID means that content is not encrypted.
type KeyID [32]byte

// MakeKeyID returns the KeyID of an id of at most 32 bytes.
func MakeKeyID(id string) (k KeyID) {
	copy(k[:], id)
	return k
}

// String returns the id without padding.
func (k KeyID) String() string { return strings.TrimRight(string(k[:]), "\x00") }

// KeyPeriod states which key encrypts the slots whose generations have a boot counter of From or
// more, up to the next period. Slots with a lower boot counter than the first period are plain.
type KeyPeriod struct {
	From uint32
	ID   KeyID
	// Epochs: the key of a slot is derived from the key of the period and from the secret of the slot's
	// epoch (EpochSecret), so that no slot of the epoch can be decrypted when the secret is erased.
	Epochs bool
	// Check is the key check value. It shows that a key with the right id is another key.
	Check [16]byte
}

// MaxKeyPeriods is the maximum number of periods in a superblock.
const MaxKeyPeriods = 64

// VolumeSetBytes is the size of a set of volumes, one bit each.
const VolumeSetBytes = kv.MaxVolumes / 8

// The offsets of the sets in a superblock.
const (
	drainingOffset = 104
	removedOffset  = drainingOffset + VolumeSetBytes
	flagsOffset    = removedOffset + VolumeSetBytes
	keysOffset     = flagsOffset + 4
	periodOffset   = keysOffset + 4
	periodBytes    = 56
)

// The flags of a superblock.
const (
	flagShared = 1 << iota
	flagPlain
)

// The ciphers of a KeyPeriod: AES-256-GCM with the key of the period, or with that key and the secret of
// the slot's epoch.
const (
	cipherAES256GCM = iota + 1
	cipherAES256GCMEpochs
)

// SharedName returns the name of the superblock or catalogue that the owner with a fencing number
// writes in a shared volume. base is SuperblockName or CatalogueName.
func SharedName(base string, fence uint32) string { return fmt.Sprintf("%s-%08x", base, fence) }

// ParseSharedName is the inverse of SharedName.
func ParseSharedName(name string) (base string, fence uint32, ok bool) {
	base, digits, ok := strings.Cut(name, "-")
	if !ok || len(digits) != 8 || base != SuperblockName && base != CatalogueName {
		return "", 0, false
	}
	n, err := strconv.ParseUint(digits, 16, 32)
	return base, uint32(n), err == nil
}

// Encode returns the page that holds s.
func (s Superblock) Encode() []byte {
	b := make([]byte, Page)
	le := binary.LittleEndian
	le.PutUint64(b[24:], s.Sequence)
	copy(b[32:], s.Node[:])
	copy(b[48:], s.Volume[:])
	le.PutUint32(b[64:], s.Index)
	le.PutUint32(b[68:], s.Count)
	le.PutUint32(b[72:], s.Boot)
	le.PutUint64(b[80:], uint64(s.SegmentBytes))
	le.PutUint64(b[88:], uint64(s.CatalogueBytes))
	le.PutUint32(b[96:], s.MembershipVersion)
	copy(b[drainingOffset:], s.Draining[:])
	copy(b[removedOffset:], s.Removed[:])
	var flags uint32
	if s.Shared {
		flags |= flagShared
	}
	if s.Plain {
		flags |= flagPlain
	}
	le.PutUint32(b[flagsOffset:], flags)
	le.PutUint32(b[keysOffset:], uint32(len(s.Keys)))
	for i, k := range s.Keys {
		p := b[periodOffset+i*periodBytes:][:periodBytes]
		le.PutUint32(p, k.From)
		le.PutUint32(p[4:], k.cipher())
		copy(p[8:], k.ID[:])
		copy(p[40:], k.Check[:])
	}
	sealAs(b, magicSuperblock, s.version())
	return b
}

// version returns the lowest version that has the fields of s.
func (s Superblock) version() uint32 {
	switch {
	case slices.ContainsFunc(s.Keys, func(k KeyPeriod) bool { return k.Epochs }):
		return Version
	case len(s.Keys) > 0 || s.Plain:
		return sealedVersion
	case s.Shared:
		return sharedVersion
	}
	return plainVersion
}

func (k KeyPeriod) cipher() uint32 {
	if k.Epochs {
		return cipherAES256GCMEpochs
	}
	return cipherAES256GCM
}

// decodeKeys reads the periods of a superblock.
func (s *Superblock) decodeKeys(b []byte) error {
	le := binary.LittleEndian
	n := le.Uint32(b[keysOffset:])
	if n > MaxKeyPeriods {
		return fmt.Errorf("ondisk: superblock with %d keys; at most %d: %w", n, MaxKeyPeriods, ErrDamaged)
	}
	for i := range int(n) {
		p := b[periodOffset+i*periodBytes:][:periodBytes]
		k := KeyPeriod{From: le.Uint32(p), ID: KeyID(p[8:40]), Epochs: le.Uint32(p[4:]) == cipherAES256GCMEpochs, Check: [16]byte(p[40:])}
		if le.Uint32(p[4:]) != k.cipher() || k.ID == (KeyID{}) || k.From > MaxBoot || i > 0 && k.From <= s.Keys[i-1].From {
			return fmt.Errorf("ondisk: superblock with a key %q of cipher %d from start %d on: %w", k.ID, le.Uint32(p[4:]), k.From, ErrDamaged)
		}
		s.Keys = append(s.Keys, k)
	}
	if !allZero(b[periodOffset+int(n)*periodBytes:]) {
		return fmt.Errorf("ondisk: superblock with bytes in reserved space: %w", ErrDamaged)
	}
	return nil
}

// DecodeSuperblock is the inverse of Encode. It fails with ErrBlank, ErrVersion
// or ErrDamaged.
func DecodeSuperblock(b []byte) (Superblock, error) {
	b, err := unseal(b, magicSuperblock, Page)
	if err != nil {
		return Superblock{}, err
	}
	le := binary.LittleEndian
	s := Superblock{
		Sequence:       le.Uint64(b[24:]),
		Node:           UUID(b[32:48]),
		Volume:         UUID(b[48:64]),
		Index:          le.Uint32(b[64:]),
		Count:          le.Uint32(b[68:]),
		Boot:           le.Uint32(b[72:]),
		SegmentBytes:   int64(le.Uint64(b[80:])),
		CatalogueBytes: int64(le.Uint64(b[88:])),

		MembershipVersion: le.Uint32(b[96:]),
		Draining:          [VolumeSetBytes]byte(b[drainingOffset:]),
		Removed:           [VolumeSetBytes]byte(b[removedOffset:]),
	}
	flags := le.Uint32(b[flagsOffset:])
	s.Shared, s.Plain = flags&flagShared != 0, flags&flagPlain != 0
	if err := s.decodeKeys(b); err != nil {
		return Superblock{}, err
	}
	switch {
	case flags&^(flagShared|flagPlain) != 0 || s.Plain && len(s.Keys) > 0 || versionOf(b) != s.version():
		return Superblock{}, fmt.Errorf("ondisk: superblock of version %d with flags %#x and %d keys: %w", versionOf(b), flags, len(s.Keys), ErrDamaged)
	case s.Count < 1 || s.Count > kv.MaxVolumes || s.Index >= s.Count:
		return Superblock{}, fmt.Errorf("ondisk: superblock of volume %d of %d: %w", s.Index, s.Count, ErrDamaged)
	case s.Boot > MaxBoot:
		return Superblock{}, fmt.Errorf("ondisk: superblock with boot counter %d; at most %d: %w", s.Boot, MaxBoot, ErrDamaged)
	case s.SegmentBytes < 2*Page || s.SegmentBytes%Page != 0 || s.SegmentBytes > MaxSegmentBytes:
		return Superblock{}, fmt.Errorf("ondisk: superblock with segments of %d bytes: %w", s.SegmentBytes, ErrDamaged)
	case s.CatalogueBytes < Page || s.CatalogueBytes%Page != 0 || s.CatalogueBytes > MaxCatalogueBytes:
		return Superblock{}, fmt.Errorf("ondisk: superblock with %d bytes of catalogue: %w", s.CatalogueBytes, ErrDamaged)
	case !allZero(b[76:80]) || !allZero(b[100:drainingOffset]):
		return Superblock{}, fmt.Errorf("ondisk: superblock with bytes in reserved space: %w", ErrDamaged)
	}
	return s, nil
}

// String prints one field per line, as `penstock store inspect` does.
func (s Superblock) String() string {
	var w strings.Builder
	fmt.Fprintf(&w, "superblock version %d sequence %d\n", s.version(), s.Sequence)
	fmt.Fprintf(&w, "  node       %v\n", s.Node)
	fmt.Fprintf(&w, "  volume     %v, %d of %d\n", s.Volume, s.Index, s.Count)
	if s.Shared {
		fmt.Fprintf(&w, "  fence      %d\n", s.Boot)
	} else {
		fmt.Fprintf(&w, "  boot       %d\n", s.Boot)
	}
	fmt.Fprintf(&w, "  segment    %d bytes\n", s.SegmentBytes)
	fmt.Fprintf(&w, "  catalogue  %d bytes\n", s.CatalogueBytes)
	if s.Plain {
		fmt.Fprintf(&w, "  key        none: slots are not encrypted\n")
	}
	for _, k := range s.Keys {
		epochs := ""
		if k.Epochs {
			epochs = ", with the secrets of epochs"
		}
		fmt.Fprintf(&w, "  key        %v from start %d on%s\n", k.ID, k.From, epochs)
	}
	return w.String()
}
