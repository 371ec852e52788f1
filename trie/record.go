package trie

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/kv"
)

// The records in Pebble. Integers in keys are big endian, so that they sort; integers in values are
// little endian or varints.
//
//	key                       value
//	'b' u64 extent            block record, below
//	'n' u32 namespace id      JSON namespaceRecord
//	'm' "format"              decimal format version
//	'm' "owner"               Options.Owner, if it was given
//	'm' "marks"               JSON marks
//
// The drawing shows a block record. The parent of most blocks is in the previous slot. The record
// then holds a digest of 4 bytes in place of the parent's id. The digest is sufficient to detect,
// after a crash, that another block is in the previous slot.
//
//	┌───────┬───────┬────────┬────────────┬────────┬───────┬──────────────────┐
//	│ flags │ group │ id     │ generation │ space  │ depth │ parent           │
//	│ 1 B   │ 1 B   │ 16 B   │ 6 B        │ varint │ varint│ 0, 4 or 16 B     │
//	└───────┴───────┴────────┴────────────┴────────┴───────┴──────────────────┘
const (
	blockKey     = 'b'
	namespaceKey = 'n'
	metaKey      = 'm'

	// formatVersion is the version that this program writes. A namespace record of this version may
	// have older live epochs. This program also reads singleEpochFormat, whose namespace records
	// have only the newest epoch and are otherwise the same. A program that reads only
	// singleEpochFormat would drop the blocks of older epochs, so it must refuse formatVersion.
	formatVersion     = "2"
	singleEpochFormat = "1"

	blockKeyLen   = 1 + 8
	genBytes      = 6
	parentHint    = 4
	recordMin     = 2 + kv.BlockIDSize + genBytes + 2
	recordMax     = 2 + kv.BlockIDSize + genBytes + 10 + 5 + kv.BlockIDSize
	recTransfer   = 1 << 0
	recParentPrev = 1 << 1 // the parent is in the previous extent
	recParentID   = 1 << 2 // the parent's id is in the record
	recKnown      = recTransfer | recParentPrev | recParentID
)

var errRecord = errors.New("trie: malformed record")

// record is the decoded form of a block record. The record of a piece of a window or state group
// has no parent field: the parent is the full piece of the same id.
type record struct {
	id     kv.BlockID
	gen    kv.Generation
	serial uint64
	depth  uint32
	group  uint8
	flags  uint8
	// parent is the parent's id if recParentID is set. If recParentPrev is set, only the first
	// parentHint bytes of parent are set: hintOf of the parent's id.
	parent kv.BlockID
}

// hintOf returns a digest of an id of parentHint bytes. All bytes of the id count, because the id
// may be an opaque key of any pattern.
func hintOf(id *kv.BlockID) (hint [parentHint]byte) {
	for i, c := range id {
		hint[i%parentHint] = hint[i%parentHint]*31 + c
	}
	return hint
}

func appendBlockKey(dst []byte, e kv.Extent) []byte {
	return binary.BigEndian.AppendUint64(append(dst, blockKey), uint64(e))
}

func extentOfKey(key []byte) (kv.Extent, error) {
	if len(key) != blockKeyLen || key[0] != blockKey {
		return 0, fmt.Errorf("%w: key % x is not that of a block", errRecord, key)
	}
	return kv.Extent(binary.BigEndian.Uint64(key[1:])), nil
}

func (r *record) append(dst []byte) []byte {
	dst = append(dst, r.flags, r.group)
	dst = append(dst, r.id[:]...)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(r.gen))
	dst = binary.LittleEndian.AppendUint16(dst, uint16(r.gen>>32))
	dst = binary.AppendUvarint(dst, r.serial)
	dst = binary.AppendUvarint(dst, uint64(r.depth))
	switch {
	case r.flags&recParentPrev != 0:
		dst = append(dst, r.parent[:parentHint]...)
	case r.flags&recParentID != 0:
		dst = append(dst, r.parent[:]...)
	}
	return dst
}

// decodeRecord is the inverse of append. It refuses an encoding that append does not produce.
func decodeRecord(b []byte) (r record, err error) {
	if len(b) < recordMin {
		return r, fmt.Errorf("%w: %d bytes; want at least %d", errRecord, len(b), recordMin)
	}
	r.flags, r.group = b[0], b[1]
	r.id = kv.BlockID(b[2:18])
	r.gen = kv.Generation(binary.LittleEndian.Uint32(b[18:])) | kv.Generation(binary.LittleEndian.Uint16(b[22:]))<<32
	b = b[24:]
	if r.serial, b, err = uvarint(b); err != nil {
		return r, err
	}
	depth, b, err := uvarint(b)
	if err != nil {
		return r, err
	}
	r.depth = uint32(depth)
	var want int
	switch r.flags & (recParentPrev | recParentID) {
	case recParentPrev:
		want = parentHint
	case recParentID:
		want = kv.BlockIDSize
	case recParentPrev | recParentID:
		return r, fmt.Errorf("%w: two parents", errRecord)
	}
	switch {
	case r.flags&^recKnown != 0 || r.group >= kv.MaxGroups || depth > 1<<32-1:
		return r, fmt.Errorf("%w: flags %#x, group %d, depth %d", errRecord, r.flags, r.group, depth)
	case len(b) != want:
		return r, fmt.Errorf("%w: %d bytes of parent; want %d", errRecord, len(b), want)
	}
	copy(r.parent[:], b)
	return r, nil
}

func uvarint(b []byte) (uint64, []byte, error) {
	v, n := binary.Uvarint(b)
	if n <= 0 || n > 1 && b[n-1] == 0 {
		return 0, nil, fmt.Errorf("%w: varint", errRecord)
	}
	return v, b[n:], nil
}

// namespaceRecord is the durable form of a namespace. Serial is the number of the space (namespace
// and epoch) of its newest epoch; a block record stores that number in place of namespace and
// epoch.
type namespaceRecord struct {
	ID          kv.NamespaceID `json:"id"`
	Name        string         `json:"name"`
	Tenant      string         `json:"tenant,omitempty"`
	Salt        []byte         `json:"salt,omitempty"`
	BlockTokens int            `json:"block_tokens"`
	DType       string         `json:"dtype,omitempty"`
	Layout      string         `json:"layout,omitempty"`
	Groups      []groupRecord  `json:"groups"`
	Index       string         `json:"index"`
	Epoch       kv.Epoch       `json:"epoch"`
	QuotaBytes  int64          `json:"quota_bytes,omitempty"`
	Serial      uint64         `json:"space"`
	Older       []epochRecord  `json:"older,omitempty"`
	Keep        int            `json:"keep,omitempty"`
	Replicas    int            `json:"replicas,omitempty"`
}

// epochRecord is an older live epoch. Serial is the number that the block records of this epoch
// store.
type epochRecord struct {
	Epoch  kv.Epoch `json:"epoch"`
	Serial uint64   `json:"space"`
}

type groupRecord struct {
	Kind         string `json:"kind"`
	Layers       int    `json:"layers"`
	TokenBytes   int    `json:"token_bytes"`
	WindowTokens int    `json:"window_tokens,omitempty"`
}

// marks are the highest namespace id and space number ever assigned. Numbers are never reused, so a
// record of a deleted namespace cannot be mistaken for a record of a later namespace.
type marks struct {
	NamespaceID kv.NamespaceID `json:"namespace_id"`
	Serial      uint64         `json:"space"`
}

func appendNamespaceKey(dst []byte, id kv.NamespaceID) []byte {
	return binary.BigEndian.AppendUint32(append(dst, namespaceKey), uint32(id))
}

// encodeNamespace encodes a definition with the spaces of its live epochs.
func encodeNamespace(def kv.Namespace, live []*space) ([]byte, error) {
	r := namespaceRecord{
		ID: def.ID, Name: def.Name, Tenant: def.Tenant, Salt: def.Salt,
		BlockTokens: def.Geometry.BlockTokens, DType: def.Geometry.DType, Layout: def.Geometry.Layout,
		Index: def.Index.String(), Epoch: def.Epoch, QuotaBytes: def.QuotaBytes, Serial: live[0].serial, Keep: def.Keep,
		Replicas: def.Replicas,
	}
	for _, sp := range live[1:] {
		r.Older = append(r.Older, epochRecord{sp.epoch, sp.serial})
	}
	for _, g := range def.Geometry.Groups {
		r.Groups = append(r.Groups, groupRecord{g.Kind.String(), g.Layers, g.TokenBytes, g.WindowTokens})
	}
	return json.Marshal(r)
}

// decodeNamespace is the inverse of encodeNamespace. The caller sets space.ns of the returned
// spaces.
func decodeNamespace(b []byte) (def kv.Namespace, live []*space, err error) {
	var r namespaceRecord
	if err := json.Unmarshal(b, &r); err != nil {
		return def, nil, fmt.Errorf("%w: namespace: %w", errRecord, err)
	}
	def = kv.Namespace{
		ID: r.ID, Name: r.Name, Tenant: r.Tenant, Salt: r.Salt, Epoch: r.Epoch, Keep: r.Keep, QuotaBytes: r.QuotaBytes, Replicas: r.Replicas,
		Geometry: kv.Geometry{BlockTokens: r.BlockTokens, DType: r.DType, Layout: r.Layout},
	}
	if def.Index, err = kv.ParseIndexKind(r.Index); err != nil {
		return def, nil, err
	}
	spaces := append([]epochRecord{{r.Epoch, r.Serial}}, r.Older...)
	for i, e := range spaces {
		if def.ID == 0 || e.Serial == 0 {
			return def, nil, fmt.Errorf("%w: namespace %q has id %d and space %d", errRecord, def.Name, def.ID, e.Serial)
		}
		live = append(live, &space{serial: e.Serial, epoch: e.Epoch})
		if i > 0 {
			def.Older = append(def.Older, e.Epoch)
		}
	}
	for _, g := range r.Groups {
		kind, err := kv.ParseGroupKind(g.Kind)
		if err != nil {
			return def, nil, err
		}
		def.Geometry.Groups = append(def.Geometry.Groups, kv.Group{Kind: kind, Layers: g.Layers, TokenBytes: g.TokenBytes, WindowTokens: g.WindowTokens})
	}
	if err := def.Validate(); err != nil {
		return def, nil, fmt.Errorf("%w: %w", errRecord, err)
	}
	return def, live, nil
}
