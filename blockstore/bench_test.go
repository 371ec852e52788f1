package blockstore

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/blockstore/crypt"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/memio"
	"github.com/penstock-kv/penstock/io/posixio"
	"github.com/penstock-kv/penstock/kv"
)

// benchStore is a store on a real file system, filled with blocks of one size.
type benchStore struct {
	*Store
	dev    *posixio.Device
	mem    *arena.Arena
	blocks []*block
	layout ondisk.Layout
}

// newBenchStore writes totalBytes of blocks into a directory on the disk to be measured:
// $PENSTOCK_BENCH_DIR, or a temporary directory.
func newBenchStore(b *testing.B, pieceBytes int64, layers int, totalBytes int64) *benchStore {
	dir, err := os.MkdirTemp(os.Getenv("PENSTOCK_BENCH_DIR"), "blockstore")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	dev, err := posixio.Open(dir, posixio.Options{})
	if err != nil {
		b.Fatal(err)
	}
	mem, err := arena.New(arena.Options{SizeBytes: 128 << 20})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { mem.Close() })
	s := &benchStore{Store: mustOpen(b, Options{CapacityBytes: 2*totalBytes + 64<<20, SegmentBytes: 256 << 20, Alloc: alloc(mem)}, dev), dev: dev, mem: mem}
	w := s.buffer(b, newBlock("", pieceBytes, layers).layout(b).SlotBytes())
	for i := range int(totalBytes / pieceBytes) {
		blk := newBlock(fmt.Sprint(i), pieceBytes, layers)
		var after *block
		if i > 0 {
			after = s.blocks[i-1]
		}
		got, err := reserve(b.Context(), s.Store, after, blk)
		if err != nil {
			b.Fatal(err)
		}
		blk.ref = got[0]
		s.layout = blk.layout(b)
		copy(w[s.layout.HeaderBytes():], blk.name)
		payload := w[s.layout.HeaderBytes():][:pieceBytes]
		if err := s.Write(b.Context(), []Write{{Ref: blk.ref, Buf: w, Header: ondisk.SlotHeader{
			SlotKey: blk.key, Class: ondisk.ClassPrefix, LayerSums: ondisk.AppendLayerSums(nil, payload, layers),
		}}}); err != nil {
			b.Fatal(err)
		}
		if err := s.Commit(blk.ref); err != nil {
			b.Fatal(err)
		}
		s.blocks = append(s.blocks, blk)
	}
	if err := s.Sync(b.Context()); err != nil {
		b.Fatal(err)
	}
	return s
}

// alloc returns an Options.Alloc that allocates scratch memory from an arena, as the engine's does.
func alloc(mem *arena.Arena) func(context.Context, int) ([]byte, func(), error) {
	return func(ctx context.Context, sizeBytes int) ([]byte, func(), error) {
		buf, err := mem.Alloc(ctx, sizeBytes)
		if err != nil {
			return nil, nil, err
		}
		return buf.Bytes(), buf.Release, nil
	}
}

func (s *benchStore) buffer(b *testing.B, sizeBytes int64) []byte {
	buf, err := s.mem.Alloc(context.Background(), int(sizeBytes))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(buf.Release)
	return buf.Bytes()
}

// BenchmarkRead compares verified reads of the store with the same requests to the bare device.
// Rounds of the two alternate, so that other load on the machine affects both. ofdevice is the
// median, over the rounds, of the ratio of the two rates; the design has a goal for it. The
// absolute figures depend on the machine.
func BenchmarkRead(b *testing.B) {
	for _, c := range []struct {
		piece          int64
		layers         int
		batch, callers int
	}{
		{64 << 10, 16, 16, 1}, {64 << 10, 16, 16, 4},
		{1 << 20, 16, 8, 1}, {1 << 20, 16, 2, 4},
		{4 << 20, 64, 4, 1}, {4 << 20, 64, 1, 4},
	} {
		b.Run(fmt.Sprintf("%dKiB/batch=%d/callers=%d", c.piece>>10, c.batch, c.callers), func(b *testing.B) {
			s := newBenchStore(b, c.piece, c.layers, 512<<20)
			callers := make([]*benchCaller, c.callers)
			for i := range callers {
				callers[i] = s.caller(b, c.batch, i)
			}
			const turns = 4 // batches of each caller in a round
			round := func(f func(*benchCaller) error) time.Duration {
				start := time.Now()
				var wg sync.WaitGroup
				for _, k := range callers {
					wg.Go(func() {
						for range turns {
							if err := f(k); err != nil {
								b.Error(err)
							}
						}
					})
				}
				wg.Wait()
				return time.Since(start)
			}
			var ratios []float64
			var ownCPU, deviceCPU time.Duration
			for b.Loop() {
				cpu0 := cpuTime()
				own := round((*benchCaller).store)
				cpu1 := cpuTime()
				ratios = append(ratios, float64(round((*benchCaller).device))/float64(own))
				ownCPU, deviceCPU = ownCPU+cpu1-cpu0, deviceCPU+cpuTime()-cpu1
			}
			slices.Sort(ratios)
			b.ReportMetric(ratios[len(ratios)/2], "ofdevice")
			bytes := turns * int64(c.callers*c.batch) * c.piece
			b.SetBytes(2 * bytes)
			perGiB := float64(time.Millisecond) * float64(b.N) * float64(bytes) / (1 << 30)
			b.ReportMetric(float64(ownCPU)/perGiB, "cpu-ms/GiB")
			b.ReportMetric(float64(deviceCPU)/perGiB, "device-cpu-ms/GiB")
		})
	}
}

// cpuTime returns the CPU time that the process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// benchCaller reads batches of blocks, other blocks in each batch.
type benchCaller struct {
	s     *benchStore
	ctx   context.Context
	reads []Read
	batch []blockio.Request
	next  int
}

func (s *benchStore) caller(b *testing.B, batch, seed int) *benchCaller {
	k := &benchCaller{s: s, ctx: b.Context(), reads: make([]Read, batch), batch: make([]blockio.Request, batch), next: seed * 1009}
	for i := range k.reads {
		k.reads[i].Buf = s.buffer(b, s.layout.SlotBytes())
	}
	return k
}

func (k *benchCaller) pick() *block {
	k.next = (k.next + 7919) % len(k.s.blocks)
	return k.s.blocks[k.next]
}

func (k *benchCaller) store() error {
	for i := range k.reads {
		blk := k.pick()
		k.reads[i].Ref, k.reads[i].Want = blk.ref, blk.key
	}
	if err := k.s.Read(k.ctx, k.reads); err != nil {
		return err
	}
	for i := range k.reads {
		if err := k.reads[i].Err; err != nil {
			return err
		}
	}
	return nil
}

func (k *benchCaller) device() error {
	for i := range k.batch {
		ref := k.pick().ref
		g, err := k.s.segmentOf(ref)
		if err != nil {
			return err
		}
		k.batch[i] = blockio.Request{Op: blockio.Read, File: g.file, Offset: g.header.SlotOffset(ref.Extent.Slot()), Bufs: [][]byte{k.reads[i].Buf}}
	}
	return k.s.dev.Do(k.ctx, k.batch)
}

// BenchmarkScan measures the scan that a rebuild of the index needs, in slots per second: by
// headers only, and with every payload verified.
func BenchmarkScan(b *testing.B) {
	for _, piece := range []int64{32 << 10, 1 << 20} {
		s := newBenchStore(b, piece, 16, 512<<20)
		for _, verify := range []bool{false, true} {
			b.Run(fmt.Sprintf("%dKiB/verify=%v", piece>>10, verify), func(b *testing.B) {
				for b.Loop() {
					st, err := s.Scan(b.Context(), ScanOptions{Verify: verify}, func(kv.Ref, *ondisk.SlotHeader) error { return nil })
					if err != nil || st.Found != int64(len(s.blocks)) {
						b.Fatalf("%+v, %v", st, err)
					}
				}
				b.ReportMetric(float64(b.N*len(s.blocks))/b.Elapsed().Seconds(), "slots/s")
			})
		}
	}
}

// BenchmarkPinUnpin measures a lease on a slot.
func BenchmarkPinUnpin(b *testing.B) {
	s := mustOpen(b, Options{}, memio.New(memio.Options{}))
	blk := newBlock("b", 12000, 3)
	if err := put(b, s, nil, blk); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if err := s.Pin(blk.ref); err != nil {
			b.Fatal(err)
		}
		if err := s.Unpin(blk.ref); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkReserve measures the placement of a sequence of 16 slots in a full store in which single
// sequences are freed and reserved.
func BenchmarkReserve(b *testing.B) {
	s := mustOpen(b, Options{CapacityBytes: 8 << 30, SegmentBytes: 256 << 20}, memio.New(memio.Options{}))
	const piece, layers, n = 60 << 10, 16, 16
	var held [][]kv.Ref
	for {
		refs, err := s.Reserve(b.Context(), piece, layers, n, 0, false)
		if err != nil {
			break
		}
		held = append(held, refs)
	}
	i := 0
	for b.Loop() {
		i = (i + 7919) % len(held)
		for _, r := range held[i] {
			if err := s.Abandon(r); err != nil {
				b.Fatal(err)
			}
		}
		var err error
		if held[i], err = s.Reserve(b.Context(), piece, layers, n, 0, false); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkEpochKeys measures the end of an epoch on volumes in files, with a catalogue of some namespaces of 400 bytes
// each: the change of the catalogue alone, as without the secrets of epochs, and with the erasure of the secret.
func BenchmarkEpochKeys(b *testing.B) {
	for _, namespaces := range []int{1, 1000} {
		for _, volumes := range []int{1, 4} {
			for _, on := range []bool{false, true} {
				b.Run(fmt.Sprintf("%d namespaces/%d volumes/%v", namespaces, volumes, on), func(b *testing.B) {
					var devs []blockio.Device
					for range volumes {
						d, err := posixio.Open(b.TempDir(), posixio.Options{})
						if err != nil {
							b.Fatal(err)
						}
						devs = append(devs, d)
					}
					s := mustOpen(b, Options{Keys: keyring(b, "k"), EpochKeys: &on, CapacityBytes: 256 << 20}, devs...)
					blob := make([]byte, 400*namespaces)
					live := make([]EpochID, namespaces)
					for i := range live {
						live[i] = EpochID{kv.NamespaceID(i + 1), 1}
					}
					if err := s.SetCatalogue(b.Context(), blob, live...); err != nil {
						b.Fatal(err)
					}
					for b.Loop() {
						live[0].Epoch++
						if err := errors.Join(s.SetCatalogue(b.Context(), blob, live...), s.EraseEpochs(b.Context(), live...)); err != nil {
							b.Fatal(err)
						}
					}
				})
			}
		}
	}
}

// BenchmarkEncryption compares an encrypted store with a plain store, in writes and reads on
// volumes in memory. Rounds of the two alternate. ofplain is the median, over the rounds, of the ratio of
// the two rates; the other figures are the CPU time of each, in milliseconds per GiB of payload.
func BenchmarkEncryption(b *testing.B) {
	for _, c := range []struct {
		piece  int64
		layers int
		epochs bool // the encrypted store has secrets of epochs
	}{{64 << 10, 16, false}, {1 << 20, 16, false}, {4 << 20, 64, false}, {64 << 10, 16, true}, {1 << 20, 16, true}} {
		const count = 16
		name := ""
		if c.epochs {
			name = "/epochs"
		}
		var stores [2]*Store
		var blocks [2][]*block
		for i, ring := range []*crypt.Keyring{nil, keyring(b, "k")} {
			epochs := c.epochs && ring != nil
			stores[i] = mustOpen(b, Options{Keys: ring, EpochKeys: &epochs, CapacityBytes: 1 << 30, SegmentBytes: 128 << 20}, memio.New(memio.Options{}))
			if err := stores[i].SetCatalogue(b.Context(), []byte("names"), EpochID{1, 1}); err != nil {
				b.Fatal(err)
			}
			for j := range count {
				blocks[i] = append(blocks[i], newBlock(fmt.Sprint(j), c.piece, c.layers))
			}
			if err := put(b, stores[i], nil, blocks[i]...); err != nil {
				b.Fatal(err)
			}
		}
		writes := make([]Write, count)
		for j, blk := range blocks[0] {
			writes[j] = blk.write(b)
		}
		reads := make([]Read, count)
		for j, blk := range blocks[0] {
			reads[j] = blk.read(b, 0, 0)
		}
		write := func(i int) error {
			refs, err := reserve(b.Context(), stores[i], nil, blocks[i]...)
			if err != nil {
				return err
			}
			for j := range writes {
				writes[j].Ref = refs[j]
			}
			err = stores[i].Write(b.Context(), writes)
			for _, ref := range refs {
				err = errors.Join(err, stores[i].Abandon(ref))
			}
			return err
		}
		read := func(i int) error {
			for j, blk := range blocks[i] {
				reads[j].Ref, reads[j].Want = blk.ref, blk.key
			}
			err := stores[i].Read(b.Context(), reads)
			for j := range reads {
				err = errors.Join(err, reads[j].Err)
			}
			return err
		}
		for op, do := range map[string]func(int) error{"write": write, "read": read} {
			b.Run(fmt.Sprintf("%s/%dKiB%s", op, c.piece>>10, name), func(b *testing.B) {
				var ratios []float64
				var cpu [2]time.Duration
				for b.Loop() {
					var took [2]time.Duration
					for i := range took {
						cpu0, start := cpuTime(), time.Now()
						for range 4 {
							if err := do(i); err != nil {
								b.Fatal(err)
							}
						}
						took[i] = time.Since(start)
						cpu[i] += cpuTime() - cpu0
					}
					ratios = append(ratios, float64(took[0])/float64(took[1]))
				}
				slices.Sort(ratios)
				b.ReportMetric(ratios[len(ratios)/2], "ofplain")
				perGiB := float64(time.Millisecond) * float64(b.N) * 4 * count * float64(c.piece) / (1 << 30)
				b.ReportMetric(float64(cpu[0])/perGiB, "plain-cpu-ms/GiB")
				b.ReportMetric(float64(cpu[1])/perGiB, "cpu-ms/GiB")
			})
		}
	}
}
