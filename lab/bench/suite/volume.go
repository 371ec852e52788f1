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

// shape is a slot size with a depth. The payload is what a slot holds besides its
// header, so that a slot is exactly as long as the peers' requests.
type shape struct {
	slotBytes int64
	layers    int
	depth     int
}

func (h shape) String() string { return fmt.Sprintf("%s, depth %d", sizeName(h.slotBytes), h.depth) }

func (h shape) payloadBytes() int64 { return h.slotBytes - blockio.Align }

// callers is how many goroutines share the depth: two, so that one batch is
// verified while the other is read.
func (h shape) callers() int { return min(2, h.depth) }

// volume is a block store full of blocks of one shape, in one segment, whose file
// the peers use too: the same bytes in the same place of the disk.
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
	// segment is the store's file, opened beside it for bare requests.
	segment blockio.File
}

// headBytes is where the first slot of a segment begins.
const headBytes = blockio.Align

// fill makes a volume of about bytes in dir.
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

// prepare puts n random payloads into the arena, one slot behind the other. They
// are the same, so that their checksums need computing once: the writer's work is
// the client's.
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

// slot is place i of the arena.
func (v *volume) slot(i int) []byte {
	return v.memory.Bytes()[int64(i)*v.shape.slotBytes:][:v.shape.slotBytes]
}

// put stores n blocks from the first n places of the arena.
func (v *volume) put(ctx context.Context, after kv.Extent, hasAfter bool, n int) ([]kv.Ref, []ondisk.SlotKey, error) {
	return v.putAt(ctx, after, hasAfter, 0, n)
}

// putAt stores n blocks from place at on.
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

// key names the block in a slot; the slot's place and generation make it unique.
func (v *volume) key(ref kv.Ref) ondisk.SlotKey {
	k := ondisk.SlotKey{Namespace: 1, Epoch: 1, PayloadBytes: v.shape.payloadBytes(), Layers: v.shape.layers}
	binary.LittleEndian.PutUint64(k.ID[:], uint64(ref.Extent))
	binary.LittleEndian.PutUint64(k.ID[8:], uint64(ref.Generation))
	return k
}

// offset is where a slot begins in the segment's file.
func (v *volume) offset(slot int) int64 { return headBytes + int64(slot)*v.shape.slotBytes }

func (v *volume) close(ctx context.Context) error {
	if v.segment != nil {
		_ = v.segment.Close() // it was only read
	}
	return v.Close(ctx)
}

// openDirect opens a file for direct I/O beside the store.
func openDirect(path string, flags int) (*os.File, error) {
	return os.OpenFile(path, flags|syscall.O_DIRECT, 0o600)
}
