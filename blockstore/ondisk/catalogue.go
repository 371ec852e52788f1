package ondisk

import (
	"encoding/binary"
	"fmt"

	"github.com/zeebo/xxh3"
)

const (
	// CatalogueName is the file with both catalogue areas.
	CatalogueName = "catalogue"
	// MaxCatalogueBytes is the largest blob that the format allows.
	MaxCatalogueBytes = 1 << 30
)

// CatalogueFileBytes is the size of a catalogue file whose two areas each have room for a blob of
// roomBytes bytes. roomBytes is a multiple of Page.
func CatalogueFileBytes(roomBytes int64) int64 { return 2 * (Page + roomBytes) }

// CatalogueOffset returns the start of area 0 or 1.
func CatalogueOffset(area int, roomBytes int64) int64 { return int64(area) * (Page + roomBytes) }

// CatalogueHeader precedes the blob of a catalogue area.
type CatalogueHeader struct {
	// Sequence orders the catalogue areas of all volumes: the highest valid one is the newest
	// catalogue.
	Sequence uint64
	// BlobBytes is the length of the blob in bytes, and BlobSum its XXH3-64.
	BlobBytes int64
	BlobSum   uint64
	// Sealed: the blob is encrypted.
	Sealed bool
	// Epochs: the blob, when decrypted, begins with the secrets of epochs (DecodeEpochs). Sealed is
	// then set too.
	Epochs bool
}

// NewCatalogueHeader describes blob.
func NewCatalogueHeader(sequence uint64, blob []byte) CatalogueHeader {
	return CatalogueHeader{Sequence: sequence, BlobBytes: int64(len(blob)), BlobSum: xxh3.Hash(blob)}
}

// Encode returns the page that holds h.
func (h CatalogueHeader) Encode() []byte {
	b := make([]byte, Page)
	le := binary.LittleEndian
	le.PutUint64(b[24:], h.Sequence)
	le.PutUint64(b[32:], uint64(h.BlobBytes))
	le.PutUint64(b[40:], h.BlobSum)
	switch {
	case h.Epochs:
		sealAs(b, magicCatalogue, Version)
	case h.Sealed:
		sealAs(b, magicCatalogue, sealedVersion)
	default:
		seal(b, magicCatalogue)
	}
	return b
}

// DecodeCatalogueHeader is the inverse of Encode. It fails with ErrBlank,
// ErrVersion or ErrDamaged.
func DecodeCatalogueHeader(b []byte) (CatalogueHeader, error) {
	b, err := unseal(b, magicCatalogue, Page)
	if err != nil {
		return CatalogueHeader{}, err
	}
	le := binary.LittleEndian
	version := versionOf(b)
	h := CatalogueHeader{
		Sequence: le.Uint64(b[24:]), BlobBytes: int64(le.Uint64(b[32:])), BlobSum: le.Uint64(b[40:]),
		Sealed: version >= sealedVersion, Epochs: version == Version,
	}
	if h.BlobBytes < 0 || h.BlobBytes > MaxCatalogueBytes || !allZero(b[48:]) {
		return CatalogueHeader{}, fmt.Errorf("ondisk: catalogue blob of %d bytes, at most %d, or bytes in reserved space: %w", h.BlobBytes, MaxCatalogueBytes, ErrDamaged)
	}
	return h, nil
}

// VerifyBlob returns ErrDamaged unless blob has the length and the checksum of h.
func (h CatalogueHeader) VerifyBlob(blob []byte) error {
	if int64(len(blob)) != h.BlobBytes {
		return fmt.Errorf("ondisk: catalogue blob of %d bytes, the header has %d: %w", len(blob), h.BlobBytes, ErrDamaged)
	}
	if sum := xxh3.Hash(blob); sum != h.BlobSum {
		return fmt.Errorf("ondisk: catalogue blob has checksum %016x, the header has %016x: %w", sum, h.BlobSum, ErrDamaged)
	}
	return nil
}

// String prints the header on one line.
func (h CatalogueHeader) String() string {
	sealed := ""
	switch {
	case h.Epochs:
		sealed = ", encrypted, with the secrets of epochs"
	case h.Sealed:
		sealed = ", encrypted"
	}
	return fmt.Sprintf("catalogue sequence %d, %d bytes, checksum %016x%s\n", h.Sequence, h.BlobBytes, h.BlobSum, sealed)
}
