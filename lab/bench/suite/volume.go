package suite

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/kv"
)

// shape is a slot size with a depth, the number of requests in flight. The other contenders read or
// write slotBytes per request too. The payload is smaller than the slot, because a slot also holds
// a header.
type shape struct {
	slotBytes int64
	layers    int
	depth     int
}

func (h shape) String() string { return fmt.Sprintf("%s, depth %d", sizeName(h.slotBytes), h.depth) }

func (h shape) payloadBytes() int64 { return h.slotBytes - blockio.Align }

// callers returns the number of goroutines that share the depth: two, so that one batch is verified
// while the other is being read.
func (h shape) callers() int { return min(2, h.depth) }

// volume is a block store full of blocks of one shape, in one segment. The other contenders use the
// segment's file too, so they access the same bytes at the same place of the disk.
type volume struct {
	*blockstore.Store
	dev    blockio.Device
	shape  shape
	layout ondisk.Layout
	memory *arena.Arena
	keys   []ondisk.SlotKey
	refs   []kv.Ref
	sums   []uint64
	path   string
	size   int64
	// segment is the segment's file, opened a second time for requests that bypass the store.
	segment blockio.File
}

// headBytes is the offset of the first slot in a segment.
const headBytes = blockio.Align

// fill creates a volume in dir whose size is about the given number of bytes.
func fill(ctx context.Context, w World, dir, how string, sh shape, bytes int64, memory *arena.Arena) (_ *volume, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	slots := int(bytes / sh.slotBytes)
	v := &volume{shape: sh, memory: memory, size: int64(slots) * sh.slotBytes, path: filepath.Join(dir, "segment-00000000")}
	if err := v.open(ctx, w, dir, how); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, v.close(ctx))
		}
	}()
	if v.layout, err = v.SlotLayout(sh.payloadBytes(), sh.layers); err != nil {
		return nil, err
	}
	if v.layout.SlotBytes() != sh.slotBytes {
		return nil, fmt.Errorf("bench: a slot of %d layers takes %d bytes, not %d", sh.layers, v.layout.SlotBytes(), sh.slotBytes)
	}
	if err := v.write(ctx, slots); err != nil {
		return nil, err
	}
	v.segment, err = v.dev.Open(filepath.Base(v.path))
	return v, err
}

func (v *volume) open(ctx context.Context, w World, dir, how string) (err error) {
	if v.dev, err = w.OpenDevice(dir, how, v.memory.Bytes()); err != nil {
		return err
	}
	segment := headBytes + v.size
	v.Store, err = blockstore.Open(ctx, blockstore.Options{
		Devices:       []blockio.Device{v.dev},
		Identity:      "penstock bench",
		CapacityBytes: segment + 16*mib,
		SegmentBytes:  segment,
	})
	if err != nil {
		return errors.Join(err, v.dev.Close())
	}
	return v.Ready()
}

// write fills every slot.
func (v *volume) write(ctx context.Context, slots int) error {
	batch := max(1, int(min(8*mib, int64(len(v.memory.Bytes())))/v.shape.slotBytes))
	v.prepare(batch)
	var after kv.Extent
	for len(v.refs) < slots {
		n := min(batch, slots-len(v.refs))
		refs, keys, err := v.put(ctx, after, len(v.refs) > 0, n)
		if err != nil {
			return err
		}
		v.refs = append(v.refs, refs...)
		v.keys = append(v.keys, keys...)
		after = refs[n-1].Extent
	}
	return v.Sync(ctx)
}

// prepare fills the arena with n random payloads, one slot after another. Their checksums
// are computed only once, because that is the client's work and not the store's.
func (v *volume) prepare(n int) {
	mem := v.memory.Bytes()
	first := mem[v.layout.HeaderBytes():v.shape.slotBytes]
	rng := rand.New(rand.NewPCG(7, uint64(v.shape.slotBytes)))
	for i := 0; i+8 <= len(first); i += 8 {
		binary.LittleEndian.PutUint64(first[i:], rng.Uint64())
	}
	v.sums = ondisk.AppendLayerSums(nil, first[:v.shape.payloadBytes()], v.shape.layers)
	for i := 1; i < n; i++ {
		copy(v.slot(i)[v.layout.HeaderBytes():], first)
	}
}

// slot returns slot i of the arena.
func (v *volume) slot(i int) []byte {
	return v.memory.Bytes()[int64(i)*v.shape.slotBytes:][:v.shape.slotBytes]
}

// put stores the blocks in the first n slots of the arena.
func (v *volume) put(ctx context.Context, after kv.Extent, hasAfter bool, n int) ([]kv.Ref, []ondisk.SlotKey, error) {
	return v.putAt(ctx, after, hasAfter, 0, n)
}

// putAt stores the blocks in n slots of the arena, beginning with slot at.
func (v *volume) putAt(ctx context.Context, after kv.Extent, hasAfter bool, at, n int) ([]kv.Ref, []ondisk.SlotKey, error) {
	refs, err := v.Reserve(ctx, v.shape.payloadBytes(), v.shape.layers, n, after, hasAfter)
	if err != nil {
		return nil, nil, err
	}
	keys := make([]ondisk.SlotKey, n)
	writes := make([]blockstore.Write, n)
	for i, ref := range refs {
		keys[i] = v.key(ref)
		writes[i] = blockstore.Write{Ref: ref, Buf: v.slot(at + i), Header: ondisk.SlotHeader{SlotKey: keys[i], Class: ondisk.ClassPrefix, LayerSums: v.sums}}
	}
	if err := v.Write(ctx, writes); err != nil {
		return nil, nil, err
	}
	for _, ref := range refs {
		if err := v.Commit(ref); err != nil {
			return nil, nil, err
		}
	}
	return refs, keys, nil
}

// key returns the key of the block in a slot. The slot's place and generation make it unique.
func (v *volume) key(ref kv.Ref) ondisk.SlotKey {
	k := ondisk.SlotKey{Namespace: 1, Epoch: 1, PayloadBytes: v.shape.payloadBytes(), Layers: v.shape.layers}
	binary.LittleEndian.PutUint64(k.ID[:], uint64(ref.Extent))
	binary.LittleEndian.PutUint64(k.ID[8:], uint64(ref.Generation))
	return k
}

// offset returns the offset of a slot in the segment's file.
func (v *volume) offset(slot int) int64 { return headBytes + int64(slot)*v.shape.slotBytes }

func (v *volume) close(ctx context.Context) error {
	if v.segment != nil {
		_ = v.segment.Close() // it was only read from
	}
	return v.Close(ctx)
}

// openDirect opens a file for direct I/O.
func openDirect(path string, flags int) (*os.File, error) {
	return os.OpenFile(path, flags|syscall.O_DIRECT, 0o600)
}
