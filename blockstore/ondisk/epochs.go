package ondisk

import (
	"encoding/binary"
	"fmt"
	"io"
	"time"

	"github.com/penstock-kv/penstock/kv"
)

// EpochSecret is the secret of one epoch of a namespace. An epoch usually has one; it has several if
// volumes that were never present together each have one. Its text form does not contain the secret.
type EpochSecret struct {
	Namespace kv.NamespaceID
	Epoch     kv.Epoch
	Secret    [32]byte
}

// Format prints namespace and epoch, with any verb.
func (s EpochSecret) Format(f fmt.State, _ rune) {
	_, _ = fmt.Fprintf(io.Writer(f), "secret of namespace %d epoch %d", s.Namespace, s.Epoch)
}

// Erasure states that the secrets of a namespace's ended epochs, up to Epoch, may still be in the
// catalogues of some volumes. Volumes has one bit for each volume of the node. Since is the time at which the
// first of these epochs ended, stored in milliseconds.
type Erasure struct {
	Namespace kv.NamespaceID
	Epoch     kv.Epoch
	Volumes   [VolumeSetBytes]byte
	Since     time.Time
}

const (
	epochsHeadBytes  = 8
	epochSecretBytes = 4 + 8 + 32
	erasureBytes     = 4 + 8 + VolumeSetBytes + 8
)

// EpochsBytes returns the number of bytes that AppendEpochs adds.
func EpochsBytes(secrets, erasures int) int64 {
	return epochsHeadBytes + epochSecretBytes*int64(secrets) + erasureBytes*int64(erasures)
}

// AppendEpochs appends secrets and erasures to b, as a catalogue stores them in front of its blob.
func AppendEpochs(b []byte, secrets []EpochSecret, erasures []Erasure) []byte {
	le := binary.LittleEndian
	b = le.AppendUint32(b, uint32(len(secrets)))
	b = le.AppendUint32(b, uint32(len(erasures)))
	for i := range secrets {
		b = le.AppendUint32(b, uint32(secrets[i].Namespace))
		b = le.AppendUint64(b, uint64(secrets[i].Epoch))
		b = append(b, secrets[i].Secret[:]...)
	}
	for _, e := range erasures {
		b = le.AppendUint32(b, uint32(e.Namespace))
		b = le.AppendUint64(b, uint64(e.Epoch))
		b = append(b, e.Volumes[:]...)
		b = le.AppendUint64(b, uint64(e.Since.UnixMilli()))
	}
	return b
}

// DecodeEpochs is the inverse of AppendEpochs. rest is the part of b after the secrets and erasures: the
// blob of the catalogue. It fails with ErrDamaged.
func DecodeEpochs(b []byte) (secrets []EpochSecret, erasures []Erasure, rest []byte, err error) {
	le := binary.LittleEndian
	if len(b) < epochsHeadBytes {
		return nil, nil, nil, fmt.Errorf("ondisk: secrets of epochs in %d bytes; want at least %d: %w", len(b), epochsHeadBytes, ErrDamaged)
	}
	n, m := int64(le.Uint32(b)), int64(le.Uint32(b[4:]))
	if need := epochsHeadBytes + epochSecretBytes*n + erasureBytes*m; need > int64(len(b)) {
		return nil, nil, nil, fmt.Errorf("ondisk: %d secrets of epochs and %d erasures in %d bytes; want at least %d: %w", n, m, len(b), need, ErrDamaged)
	}
	b = b[epochsHeadBytes:]
	for range n {
		secrets = append(secrets, EpochSecret{Namespace: kv.NamespaceID(le.Uint32(b)), Epoch: kv.Epoch(le.Uint64(b[4:])), Secret: [32]byte(b[12:])})
		b = b[epochSecretBytes:]
	}
	for range m {
		e := Erasure{Namespace: kv.NamespaceID(le.Uint32(b)), Epoch: kv.Epoch(le.Uint64(b[4:])), Volumes: [VolumeSetBytes]byte(b[12:])}
		e.Since = time.UnixMilli(int64(le.Uint64(b[12+VolumeSetBytes:])))
		erasures = append(erasures, e)
		b = b[erasureBytes:]
	}
	return secrets, erasures, b, nil
}
