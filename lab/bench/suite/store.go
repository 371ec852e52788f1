package suite

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/sys"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/bench"
	"github.com/penstock-kv/penstock/lab/bench/peer"
)

// StoreOptions configures the store suite.
type StoreOptions struct {
	// SizeBytes is the size of each file that is read. Files that are written have a
	// quarter of this size.
	SizeBytes int64
}

// storeShapes returns the shapes of docs/benchmarks.md: small blocks with a large depth, and large
// blocks with a small depth. The numbers of layers are such that the size of a layer is a multiple
// of 1 KiB.
func storeShapes() []shape {
	return []shape{
		{64 << 10, 15, 16}, {1 * mib, 15, 8}, {4 * mib, 33, 4},
		{64 << 10, 15, 1}, {1 * mib, 15, 1}, {4 * mib, 33, 1},
	}
}

// Names of contenders.
const (
	oursUring   = "penstock (uring)"
	bareDevice  = "bare device (uring, no verification)"
	hashedReads = "bare device (uring), every byte hashed"
	oneCaller   = "bare device (uring), one caller"
	posixDevice = "bare device (posix, no verification)"
	fioName     = "fio (io_uring)"
	poolName    = "ReadAt pool"
	preadName   = "direct pread"
	directFiles = "O_DIRECT file per block"
	osFiles     = "os.WriteFile per block"
)

// storeSuite is one run of the suite.
type storeSuite struct {
	*suiteRun
	opts   StoreOptions
	dir    string
	memory *arena.Arena
	// fioMemory is the source of fio's buffers (peer.FioJob.Memory).
	fioMemory string
	fioNotRun string
}

// Store compares the block store with other ways to use the disk.
func Store(ctx context.Context, w World, o StoreOptions) (_ bench.Report, err error) {
	s := &storeSuite{suiteRun: newRun(w, "store"), opts: o}
	if err := s.needSpace(o.SizeBytes * 3 / 2); err != nil {
		return s.report, err
	}
	dir, remove, err := s.tempDir("store")
	if err != nil {
		return s.report, err
	}
	defer remove()
	s.dir = dir
	if s.memory, err = newArena(64 * mib); err != nil {
		return s.report, err
	}
	defer func() { err = errors.Join(err, s.memory.Close()) }()
	s.setup("our buffers are %s; files of %s, written before", pages(s.memory), sizeName(o.SizeBytes))
	if s.fioNotRun = peer.Installed("fio", "fio"); s.fioNotRun == "" {
		var note string
		var restore func() error
		s.fioMemory, note, restore = peer.HugePages(48) // 96 MiB
		defer func() { err = errors.Join(err, restore()) }()
		s.setup("%s", note)
	}
	err = s.all(ctx, step{"reads", s.reads}, step{"reads under load", s.busy}, step{"writes", s.writes}, step{"files", s.files}, step{"syncs", s.syncs})
	return s.report, err
}

// volume creates a full volume and returns a function that removes it.
func (s *storeSuite) volume(ctx context.Context, how string, sh shape, bytes int64) (*volume, func() error, error) {
	dir := filepath.Join(s.dir, "volume-"+how)
	s.Progress(fmt.Sprintf("filling %s with blocks of %s", sizeName(bytes), sizeName(sh.slotBytes)))
	v, err := fill(ctx, s.World, dir, how, sh, bytes, s.memory)
	if err != nil {
		return nil, nil, err
	}
	return v, func() error { return errors.Join(v.close(context.WithoutCancel(ctx)), os.RemoveAll(dir)) }, nil
}

// reads compares verified reads of whole slots in random order.
func (s *storeSuite) reads(ctx context.Context) error {
	for _, sh := range storeShapes() {
		if name := readName(sh); s.wants(name) {
			if err := s.read(ctx, name, sh); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return nil
}

func readName(sh shape) string { return "read " + sh.String() }

func (s *storeSuite) read(ctx context.Context, name string, sh shape) (err error) {
	v, remove, err := s.volume(ctx, "uring", sh, s.opts.SizeBytes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	posix, err := s.OpenDevice(filepath.Dir(v.path), "posix", s.memory.Bytes())
	if err != nil {
		return err
	}
	defer posix.Close()
	bare, err := posix.Open(filepath.Base(v.path))
	if err != nil {
		return err
	}
	defer bare.Close()
	f, err := openDirect(v.path, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer f.Close()
	c := bench.Comparison{
		Name: name, Unit: "MiB/s",
		Contenders: []bench.Contender{
			{Name: oursUring, Turn: s.storeReads(v)},
			{Name: bareDevice, Turn: s.deviceReads(v, v.dev, v.segment, sh.callers(), ignore)},
			{Name: hashedReads, Turn: s.deviceReads(v, v.dev, v.segment, sh.callers(), hash)},
			{Name: fioName, NotRun: s.fioNotRun, Turn: s.fio("randread", v.path, headBytes, v.size, sh)},
		},
		Measures: []bench.Measure{
			bench.Ratio("bandwidth / fio", bench.Rate, oursUring, fioName, bench.AtLeast(0.95)),
			bench.Ratio("CPU / fio", bench.CPU, oursUring, fioName, cpuTarget(sh)),
			bench.Ratio("verified / not verified, bandwidth", bench.Rate, oursUring, bareDevice, bench.AtLeast(0.95)),
			bench.Ratio("bandwidth / bare device, every byte hashed", bench.Rate, oursUring, hashedReads, bench.Target{}),
			bench.Ratio("not verified / fio, bandwidth", bench.Rate, bareDevice, fioName, bench.AtLeast(0.95)),
			bench.Ratio("CPU without verification / fio", bench.CPU, bareDevice, fioName, bench.Target{}),
		},
	}
	if sh.callers() > 1 {
		// fio has the whole depth in flight from one thread. The contender that is comparable with
		// fio has one caller.
		c.Contenders = append(c.Contenders, bench.Contender{Name: oneCaller, Turn: s.deviceReads(v, v.dev, v.segment, 1, ignore)})
		c.Measures = append(c.Measures,
			bench.Ratio("one caller, not verified / fio, bandwidth", bench.Rate, oneCaller, fioName, bench.Target{}),
			bench.Ratio("one caller, CPU without verification / fio", bench.CPU, oneCaller, fioName, cpuTarget(sh)))
	}
	if sh.depth > 1 {
		c.Contenders = append(c.Contenders, bench.Contender{Name: posixDevice, Turn: s.deviceReads(v, posix, bare, sh.callers(), ignore)}, bench.Contender{Name: poolName, Turn: s.pool(v, f)})
		c.Measures = append(c.Measures,
			bench.Ratio("bandwidth / ReadAt pool", bench.Rate, oursUring, poolName, bench.Target{}),
			bench.Ratio("CPU without verification / ReadAt pool", bench.CPU, bareDevice, poolName, bench.AtMost(0.65)))
	}
	return s.compare(ctx, c)
}

// cpuTarget returns the design's bound for the ratio of processor times. It applies only to large
// depths.
func cpuTarget(sh shape) bench.Target {
	if sh.depth >= 16 {
		return bench.AtMost(1.3)
	}
	return bench.Target{}
}

// storeReads returns a turn (one measured run of a contender) that reads batches of slots through
// the store.
func (s *storeSuite) storeReads(v *volume) func(context.Context) (bench.Sample, error) {
	return func(ctx context.Context) (bench.Sample, error) {
		callers := v.shape.callers()
		each := v.shape.depth / callers
		batches := make([][]blockstore.Read, callers)
		rngs := s.rngs(callers)
		for i := range batches {
			batches[i] = make([]blockstore.Read, each)
			for j := range batches[i] {
				batches[i][j].Buf = v.slot(i*each + j)
			}
		}
		return drive(ctx, s.Turn, callers, mib, nil, func(i int) (int64, error) {
			batch := batches[i]
			for j := range batch {
				n := rngs[i].IntN(len(v.refs))
				batch[j].Ref, batch[j].Want = v.refs[n], v.keys[n]
			}
			if err := v.Read(ctx, batch); err != nil {
				return 0, err
			}
			for j := range batch {
				if batch[j].Err != nil {
					return 0, batch[j].Err
				}
			}
			return int64(each) * v.shape.slotBytes, nil
		})
	}
}

// ignore and hash are two ways to use the bytes of a read. ignore leaves them unread, as fio does.
// hash reads every byte once, as every consumer must.
func ignore([]byte) {}

func hash(b []byte) { ondisk.LayerSum(b) }

// deviceReads returns a turn (one measured run of a contender) that reads slots of the volume from
// the device, without the store, and passes their bytes to use. Each caller has an equal part of
// the shape's depth in flight.
func (s *storeSuite) deviceReads(v *volume, dev blockio.Device, f blockio.File, callers int, use func([]byte)) func(context.Context) (bench.Sample, error) {
	return func(ctx context.Context) (bench.Sample, error) {
		each := v.shape.depth / callers
		batches := make([][]blockio.Request, callers)
		rngs := s.rngs(callers)
		for i := range batches {
			batches[i] = make([]blockio.Request, each)
			for j := range batches[i] {
				batches[i][j] = blockio.Request{Op: blockio.Read, File: f, Bufs: [][]byte{v.slot(i*each + j)}}
			}
		}
		return drive(ctx, s.Turn, callers, mib, nil, func(i int) (int64, error) {
			batch := batches[i]
			for j := range batch {
				batch[j].Offset = v.offset(rngs[i].IntN(len(v.refs)))
			}
			if err := dev.Do(ctx, batch); err != nil {
				return 0, err
			}
			for j := range batch {
				if batch[j].Err != nil {
					return 0, batch[j].Err
				}
				use(batch[j].Bufs[0])
			}
			return int64(each) * v.shape.slotBytes, nil
		})
	}
}

// pool returns a turn (one measured run of a contender) that reads with one goroutine per request
// in flight; each goroutine calls ReadAt.
func (s *storeSuite) pool(v *volume, f *os.File) func(context.Context) (bench.Sample, error) {
	return func(ctx context.Context) (bench.Sample, error) {
		rngs := s.rngs(v.shape.depth)
		return drive(ctx, s.Turn, v.shape.depth, mib, nil, func(i int) (int64, error) {
			n, err := f.ReadAt(v.slot(i), v.offset(rngs[i].IntN(len(v.refs))))
			return int64(n), err
		})
	}
}

// fio returns a turn (one measured run of a contender) that runs fio with the shape's block size
// and depth on a file.
func (s *storeSuite) fio(rw, path string, offset, size int64, sh shape) func(context.Context) (bench.Sample, error) {
	return peer.FioJob{
		RW: rw, File: path, BlockBytes: sh.slotBytes, Depth: sh.depth, OffsetBytes: offset, SizeBytes: size, Memory: s.fioMemory, Time: s.Turn,
	}.Run
}

// rngs returns a random generator for each caller.
func (s *storeSuite) rngs(n int) []*rand.Rand {
	out := make([]*rand.Rand, n)
	for i := range out {
		out[i] = rand.New(rand.NewPCG(s.rng.Uint64(), uint64(i)))
	}
	return out
}

// busy compares reads of 4 MiB with 4 callers while one goroutine per CPU spins. The result shows
// the cost of waiting through Go's scheduler under load.
func (s *storeSuite) busy(ctx context.Context) (err error) {
	const name = "read 4 MiB, 4 callers, all CPUs busy"
	if !s.wants(name) {
		return nil
	}
	sh := shape{4 * mib, 33, 4}
	v, remove, err := s.volume(ctx, "uring", sh, s.opts.SizeBytes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	f, err := openDirect(v.path, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer f.Close()
	return s.compare(ctx, bench.Comparison{
		Name: name, Unit: "MiB/s",
		Contenders: []bench.Contender{
			{Name: oursUring, Turn: s.busily(s.singleReads(v))},
			{Name: preadName, Turn: s.busily(s.pool(v, f))},
		},
		Measures: []bench.Measure{
			bench.Ratio("bandwidth / direct pread", bench.Rate, oursUring, preadName, bench.AtLeast(0.9)),
		},
		Notes: []string{fmt.Sprintf("%d goroutines spin meanwhile; CPU is theirs too", runtime.GOMAXPROCS(0))},
	})
}

// singleReads returns a turn (one measured run of a contender) with as many callers as the shape's
// depth. Each caller has one read in flight.
func (s *storeSuite) singleReads(v *volume) func(context.Context) (bench.Sample, error) {
	return func(ctx context.Context) (bench.Sample, error) {
		rngs := s.rngs(v.shape.depth)
		batches := make([][1]blockstore.Read, v.shape.depth)
		return drive(ctx, s.Turn, v.shape.depth, mib, nil, func(i int) (int64, error) {
			n := rngs[i].IntN(len(v.refs))
			r := &batches[i][0]
			r.Ref, r.Want, r.Buf = v.refs[n], v.keys[n], v.slot(i)
			if err := v.Read(ctx, batches[i][:]); err != nil {
				return 0, err
			}
			return v.shape.slotBytes, r.Err
		})
	}
}

// busily returns a turn (one measured run of a contender) that runs the given turn while one
// goroutine per CPU spins.
func (s *storeSuite) busily(turn func(context.Context) (bench.Sample, error)) func(context.Context) (bench.Sample, error) {
	return func(ctx context.Context) (bench.Sample, error) {
		var stop atomic.Bool
		var wg sync.WaitGroup
		for range runtime.GOMAXPROCS(0) {
			wg.Go(func() {
				for n := 0; !stop.Load(); n++ {
					_ = n
				}
			})
		}
		defer wg.Wait()
		defer stop.Store(true)
		return turn(ctx)
	}
}

// writes compares writes into recycled slots with fio on a file that has been written before. The
// store's slots are adjacent in the order of the writes, so fio writes sequentially too.
func (s *storeSuite) writes(ctx context.Context) error {
	for _, sh := range storeShapes()[:3] {
		name := "write " + sh.String()
		if !s.wants(name) {
			continue
		}
		if err := s.write(ctx, name, sh); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

func (s *storeSuite) write(ctx context.Context, name string, sh shape) (err error) {
	v, remove, err := s.volume(ctx, "uring", sh, s.opts.SizeBytes/4)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	// fio writes a separate file, because it must not damage the store's file.
	file := filepath.Join(s.dir, "fio")
	if err := prewritten(file, v.size, s.memory.Bytes()); err != nil {
		return err
	}
	defer os.Remove(file)
	return s.compare(ctx, bench.Comparison{
		Name: name, Unit: "MiB/s",
		Contenders: []bench.Contender{
			{Name: oursUring, Turn: s.storeWrites(newRecycler(v), sh.callers(), sh.depth/sh.callers(), 0)},
			{Name: fioName, NotRun: s.fioNotRun, Turn: s.fio("write", file, 0, v.size, sh)},
		},
		Measures: []bench.Measure{
			bench.Ratio("bandwidth / fio", bench.Rate, oursUring, fioName, bench.AtLeast(0.95)),
			bench.Ratio("CPU / fio", bench.CPU, oursUring, fioName, bench.Target{}),
		},
	})
}

// prewritten creates a file of size bytes and writes every byte of it.
func prewritten(path string, size int64, memory []byte) error {
	f, err := openDirect(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC)
	if err != nil {
		return err
	}
	for at := int64(0); at < size && err == nil; at += int64(len(memory)) {
		_, err = f.WriteAt(memory[:min(size-at, int64(len(memory)))], at)
	}
	return errors.Join(err, f.Close())
}

// recycler writes blocks into slots of a full volume. Before each write it frees the oldest slots,
// like a node that evicts.
type recycler struct {
	v    *volume
	mu   sync.Mutex
	live []kv.Ref
}

func newRecycler(v *volume) *recycler { return &recycler{v: v, live: slices.Clone(v.refs)} }

// take frees the n oldest slots.
func (r *recycler) take(n int) error {
	r.mu.Lock()
	refs := slices.Clone(r.live[:n])
	r.live = r.live[n:]
	r.mu.Unlock()
	for _, ref := range refs {
		if err := r.v.Free(ref); err != nil {
			return err
		}
	}
	return nil
}

// add records written slots.
func (r *recycler) add(refs []kv.Ref) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.live = append(r.live, refs...)
}

// storeWrites returns a turn (one measured run of a contender) in which each caller writes batches
// of consecutive blocks into recycled slots. With syncEvery, each caller syncs the store after
// every syncEvery of its blocks.
func (s *storeSuite) storeWrites(r *recycler, callers, each, syncEvery int) func(context.Context) (bench.Sample, error) {
	return func(ctx context.Context) (bench.Sample, error) {
		since := make([]int, callers)
		return drive(ctx, s.Turn, callers, mib, nil, func(i int) (int64, error) {
			if err := r.take(each); err != nil {
				return 0, err
			}
			refs, _, err := r.v.putAt(ctx, 0, false, i*each, each)
			if err != nil {
				return 0, err
			}
			r.add(refs)
			if since[i] += each; syncEvery > 0 && since[i] >= syncEvery {
				since[i] = 0
				if err := r.v.Sync(ctx); err != nil {
					return 0, err
				}
			}
			return int64(each) * r.v.shape.slotBytes, nil
		})
	}
}

// files compares the block store's writes with the writes of stores that keep a file for each
// block.
func (s *storeSuite) files(ctx context.Context) error {
	for _, c := range []struct {
		sh      shape
		callers int
		os      bench.Target
	}{
		{shape{1 * mib, 15, 1}, 1, bench.AtLeast(3)},
		{shape{4 * mib, 33, 4}, 4, bench.Target{}},
	} {
		name := fmt.Sprintf("store %s blocks, %s", sizeName(c.sh.slotBytes), plural(c.callers, "caller"))
		if !s.wants(name) {
			continue
		}
		if err := s.filePerBlock(ctx, name, c.sh, c.callers, c.os); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

func plural(n int, word string) string {
	if n == 1 {
		return "1 " + word
	}
	return fmt.Sprintf("%d %ss", n, word)
}

func (s *storeSuite) filePerBlock(ctx context.Context, name string, sh shape, callers int, buffered bench.Target) (err error) {
	v, remove, err := s.volume(ctx, "uring", sh, s.opts.SizeBytes/4)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	return s.compare(ctx, bench.Comparison{
		Name: name, Unit: "MiB/s",
		Contenders: []bench.Contender{
			{Name: oursUring, Turn: s.storeWrites(newRecycler(v), callers, 1, 0)},
			{Name: directFiles, Turn: s.fileWrites(v, callers, directFile)},
			{Name: osFiles, Turn: s.fileWrites(v, callers, osFile)},
		},
		Measures: []bench.Measure{
			bench.Ratio("bandwidth / O_DIRECT file per block", bench.Rate, oursUring, directFiles, bench.AtLeast(2)),
			bench.Ratio("bandwidth / os.WriteFile per block", bench.Rate, oursUring, osFiles, buffered),
		},
		Notes: []string{"deleting the files is not counted; freeing our slots is"},
	})
}

// directFile creates a file, writes b to it with direct I/O, and closes the file.
func directFile(path string, b []byte) error {
	f, err := openDirect(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Close())
}

func osFile(path string, b []byte) error { return os.WriteFile(path, b, 0o600) }

// fileWrites returns a turn (one measured run of a contender) that writes a new file for each
// block, up to the volume's total size, and then removes the files.
func (s *storeSuite) fileWrites(v *volume, callers int, write func(path string, b []byte) error) func(context.Context) (bench.Sample, error) {
	return func(ctx context.Context) (_ bench.Sample, err error) {
		dir := filepath.Join(s.dir, "files")
		if err := os.Mkdir(dir, 0o700); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, emptied(dir)) }()
		var next atomic.Int64
		limited, cancel := context.WithCancel(ctx)
		defer cancel()
		sample, err := drive(limited, s.Turn, callers, mib, nil, func(i int) (int64, error) {
			n := next.Add(1)
			if n*v.shape.slotBytes >= v.size {
				cancel()
			}
			return v.shape.slotBytes, write(filepath.Join(dir, fmt.Sprintf("%032x", n)), v.slot(i))
		})
		return sample, errors.Join(err, ctx.Err())
	}
}

// emptied removes a directory of files. It first syncs the files; otherwise the write-back of their
// dirty pages would take disk time from the next contender.
func emptied(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		f, openErr := os.Open(filepath.Join(dir, e.Name()))
		if openErr != nil {
			return openErr
		}
		err = errors.Join(err, sys.DropCache(f), f.Close())
	}
	return errors.Join(err, os.RemoveAll(dir))
}

// syncs measures the cost of making each group of 32 blocks durable.
func (s *storeSuite) syncs(ctx context.Context) (err error) {
	const name = "write 1 MiB, 1 caller, synced each 32 blocks"
	if !s.wants(name) {
		return nil
	}
	const synced, never = "fdatasync each 32 blocks", "never synced"
	v, remove, err := s.volume(ctx, "uring", shape{1 * mib, 15, 8}, s.opts.SizeBytes/4)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	// Both recycle the same slots.
	r := newRecycler(v)
	return s.compare(ctx, bench.Comparison{
		Name: name, Unit: "MiB/s",
		Contenders: []bench.Contender{
			{Name: synced, Turn: s.storeWrites(r, 1, 8, 32)},
			{Name: never, Turn: s.storeWrites(r, 1, 8, 0)},
		},
		Measures: []bench.Measure{bench.Ratio("synced / never synced, bandwidth", bench.Rate, synced, never, bench.AtLeast(0.95))},
		Notes:    []string{"a virtual disk flushes in no time; flash without power-loss protection takes milliseconds"},
	})
}
