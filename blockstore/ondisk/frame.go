package ondisk

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/zeebo/xxh3"
)

const (
	// Version is the newest format version. A catalogue with the secrets of epochs has it, and the
	// superblock of a volume with slots that need these secrets. Other records with encrypted content
	// have sealedVersion, and the superblocks of other volumes of a store with keys. The superblock of
	// another shared volume has sharedVersion. All other records have plainVersion. This package reads
	// all of them.
	Version       = 4
	sealedVersion = 3
	sharedVersion = 2
	plainVersion  = 1
	// Page is the unit of every record and slot, in bytes.
	Page = 4096

	frameBytes  = 24
	checksumOff = 8
	versionOff  = 16
	lengthOff   = 20
)

// The sentinel errors differ in the reaction that they require of the caller.
var (
	// ErrBlank: there is no record of the expected kind. The position is unused, or holds something
	// else.
	ErrBlank = errors.New("no record")
	// ErrVersion: the record is intact but has another format version. Use a binary of that
	// version, or an empty directory.
	ErrVersion = errors.New("other format version")
	// ErrDamaged: there is a record with invalid content.
	ErrDamaged = errors.New("damaged record")
)

type magic string

const (
	magicSuperblock magic = "PNSTKSUP"
	magicCatalogue  magic = "PNSTKCAT"
	magicSegment    magic = "PNSTKSEG"
	magicSlot       magic = "PNSTKSLT"
)

// seal writes the frame over the finished record b, whose length is a multiple
// of Page.
func seal(b []byte, m magic) { sealAs(b, m, plainVersion) }

// sealAs is seal for a record of the given format version.
func sealAs(b []byte, m magic, version uint32) {
	copy(b, m)
	binary.LittleEndian.PutUint32(b[versionOff:], version)
	binary.LittleEndian.PutUint32(b[lengthOff:], uint32(len(b)))
	binary.LittleEndian.PutUint64(b[checksumOff:], checksum(b))
}

// unseal checks the frame at the start of b and returns the record, which may be shorter than b. A
// record whose frame has a length above maxBytes is damaged. The version is that of the record's
// kind.
func unseal(b []byte, m magic, maxBytes int) ([]byte, error) {
	if len(b) < Page {
		return nil, fmt.Errorf("ondisk: %s in %d bytes; a record has at least %d: %w", m, len(b), Page, ErrDamaged)
	}
	if string(b[:8]) != string(m) {
		return nil, fmt.Errorf("ondisk: magic %q, want %q: %w", b[:8], string(m), ErrBlank)
	}
	n := int64(binary.LittleEndian.Uint32(b[lengthOff:]))
	if n < Page || n%Page != 0 || n > int64(maxBytes) || n > int64(len(b)) {
		return nil, fmt.Errorf("ondisk: %s claims a length of %d bytes, of %d read: %w", m, n, len(b), ErrDamaged)
	}
	b = b[:n]
	if got, want := checksum(b), binary.LittleEndian.Uint64(b[checksumOff:]); got != want {
		return nil, fmt.Errorf("ondisk: %s has checksum %016x, its bytes give %016x: %w", m, want, got, ErrDamaged)
	}
	// The version is compared after the checksum: a flipped bit in the version field is damage, and
	// not another version.
	v := binary.LittleEndian.Uint32(b[versionOff:])
	if v < plainVersion || v > newestOf(m) || v == sharedVersion && m != magicSuperblock {
		return nil, fmt.Errorf("ondisk: %s of format version %d, this binary reads up to version %d; take the binary that wrote it, or begin with an empty directory: %w", m, v, newestOf(m), ErrVersion)
	}
	return b, nil
}

// newestOf returns the newest version of a kind of record.
func newestOf(m magic) uint32 {
	switch m {
	case magicSegment:
		return plainVersion
	case magicSlot:
		return sealedVersion
	}
	return Version
}

// versionOf returns the version of a record that unseal has returned.
func versionOf(b []byte) uint32 { return binary.LittleEndian.Uint32(b[versionOff:]) }

// checksum is the XXH3-64 of all bytes after the checksum field. The magic before the field is
// compared byte by byte.
func checksum(b []byte) uint64 { return xxh3.Hash(b[versionOff:]) }

// recordBytes returns the length in the frame at the start of b, for records longer than one page.
// It returns 0 if the length is invalid.
func recordBytes(b []byte, m magic, maxBytes int) int {
	if len(b) < frameBytes || string(b[:8]) != string(m) {
		return 0
	}
	n := int64(binary.LittleEndian.Uint32(b[lengthOff:]))
	if n < Page || n%Page != 0 || n > int64(maxBytes) {
		return 0
	}
	return int(n)
}

// allZero reports whether every byte of b is zero. Decoders refuse a record whose reserved space is
// not zero, so that a later version can use that space.
func allZero(b []byte) bool {
	for ; len(b) >= 8; b = b[8:] {
		if binary.LittleEndian.Uint64(b) != 0 {
			return false
		}
	}
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// roundUp rounds n up to a multiple of Page.
func roundUp(n int64) int64 { return (n + Page - 1) / Page * Page }
