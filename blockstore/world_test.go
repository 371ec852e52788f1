package blockstore

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/kv"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// block is a piece of a test: the written bytes, and the ref in the test's index.
type block struct {
	name    string
	key     ondisk.SlotKey
	payload []byte
	ref     kv.Ref
}

// newBlock makes a block whose bytes are derived from its name and generation, so that two writes
// of one name differ.
func newBlock(name string, pieceBytes int64, layers int) *block {
	sum := sha256.Sum256([]byte(name))
	return &block{name: name, key: ondisk.SlotKey{
		Namespace: 1, Epoch: 1, ID: kv.BlockID(sum[:16]), PayloadBytes: pieceBytes, Layers: layers,
	}}
}

// fill computes the bytes of the block at its present ref.
func (b *block) fill() {
	seed := sha256.Sum256(fmt.Appendf(nil, "%s %d", b.name, b.ref.Generation))
	b.payload = make([]byte, b.key.PayloadBytes)
	rand.NewChaCha8(seed).Read(b.payload)
}

func (b *block) layout(t testing.TB) ondisk.Layout {
	l, err := b.key.Layout()
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// aligned returns memory for one slot. It is heap memory, because ten thousand crashes would map
// and unmap too often.
func aligned(sizeBytes int64) []byte {
	b, _, _ := heapAlloc(context.Background(), int(sizeBytes))
	return b
}

// write returns the Write of the block.
func (b *block) write(t testing.TB) Write {
	l := b.layout(t)
	buf := aligned(l.SlotBytes())
	copy(buf[l.HeaderBytes():], b.payload)
	return Write{Ref: b.ref, Buf: buf, Header: ondisk.SlotHeader{
		SlotKey: b.key, Class: ondisk.ClassPrefix, LayerSums: ondisk.AppendLayerSums(nil, b.payload, b.key.Layers),
	}}
}

// read returns a Read of all layers, or of count layers from first on.
func (b *block) read(t testing.TB, first, count int) Read {
	l := b.layout(t)
	n := l.SlotBytes()
	if count > 0 {
		_, n, _ = l.Range(first, count)
	}
	return Read{Ref: b.ref, Want: b.key, FirstLayer: first, Layers: count, Buf: aligned(n)}
}

// got returns the bytes of a finished Read and the expected bytes.
func (b *block) got(t testing.TB, r *Read) (got, wanted []byte) {
	l := b.layout(t)
	if r.Layers == 0 {
		return r.Buf[l.HeaderBytes():][:l.PayloadBytes], b.payload
	}
	_, _, skip := l.Range(r.FirstLayer, r.Layers)
	n := int64(r.Layers) * l.LayerBytes()
	return r.Buf[skip:][:n], b.payload[int64(r.FirstLayer)*l.LayerBytes():][:n]
}

// put reserves, writes and commits the blocks as one sequence.
func put(t testing.TB, s *Store, after *block, blocks ...*block) error {
	ctx := t.Context()
	refs, err := reserve(ctx, s, after, blocks...)
	if err != nil {
		return err
	}
	var ws []Write
	for i, b := range blocks {
		b.ref = refs[i]
		b.fill()
		ws = append(ws, b.write(t))
	}
	err = s.Write(ctx, ws)
	for i, b := range blocks {
		if ws[i].Err != nil {
			err = errors.Join(err, s.Abandon(b.ref))
			b.ref = kv.Ref{}
			continue
		}
		if e := s.Commit(b.ref); e != nil {
			err = errors.Join(err, e)
		}
	}
	return err
}

func reserve(ctx context.Context, s *Store, after *block, blocks ...*block) ([]kv.Ref, error) {
	var at kv.Extent
	if after != nil {
		at = after.ref.Extent
	}
	return s.Reserve(ctx, blocks[0].key.PayloadBytes, blocks[0].key.Layers, len(blocks), at, after != nil)
}

// get reads a block and compares it. A miss is an error; wrong bytes end the test.
func get(t testing.TB, s *Store, b *block, first, count int) error {
	rs := []Read{b.read(t, first, count)}
	if err := s.Read(t.Context(), rs); err != nil {
		return err
	}
	if rs[0].Err != nil {
		return rs[0].Err
	}
	got, want := b.got(t, &rs[0])
	if !bytes.Equal(got, want) {
		t.Fatalf("exact-or-miss violated: block %s at %v came back with other bytes and no error", b.name, b.ref)
	}
	sums := ondisk.AppendLayerSums(nil, want, len(rs[0].LayerSums))
	if !slices.Equal(sums, rs[0].LayerSums) {
		t.Fatalf("block %s: LayerSums %x; want %x", b.name, rs[0].LayerSums, sums)
	}
	return nil
}

// refs returns the refs that an index with the blocks has.
func refs(blocks map[string]*block) []kv.Ref {
	var all []kv.Ref
	for _, name := range slices.Sorted(maps.Keys(blocks)) {
		if r := blocks[name].ref; r.Generation != 0 {
			all = append(all, r)
		}
	}
	return all
}

// open opens a store over memory volumes, with uuids derived from a seed.
func open(t testing.TB, opts Options, devs ...*memio.Device) (*Store, error) {
	return openTuned(t, opts, nil, devs...)
}

// openTuned is open with a function, which may be nil, that changes the options.
func openTuned(t testing.TB, opts Options, tune func(*Options), devs ...*memio.Device) (*Store, error) {
	opts.Devices = nil
	for _, d := range devs {
		opts.Devices = append(opts.Devices, d)
	}
	if opts.CapacityBytes == 0 {
		opts.CapacityBytes = 1 << 20
	}
	if opts.Rand == nil {
		opts.Rand = rand.NewChaCha8([32]byte{1})
	}
	if tune != nil {
		tune(&opts)
	}
	return Open(t.Context(), opts)
}

// mustOpen opens a store over new volumes and calls Ready. The test's cleanup closes it.
func mustOpen(t testing.TB, opts Options, devs ...blockio.Device) *Store {
	t.Helper()
	if opts.CapacityBytes == 0 {
		opts.CapacityBytes = 1 << 20
	}
	opts.Devices = devs
	s, err := Open(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Ready(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(context.Background()); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return s
}
