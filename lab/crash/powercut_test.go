package crash

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/testnode"
	"github.com/penstock-kv/penstock/server/storage"
)

// Power cuts on real file systems. A node uses an ext4 and an xfs, and dm-log-writes records every write of both:
//
//	node ─► ext4 (index, volume 0) ─► linear ┐
//	     └► xfs (volume 1)         ─► linear ┴► log-writes ─► drive 0
//	                                                └──────► drive 1: the log, with a mark "k<n>" after the n-th acknowledgement
//
// Both file systems lie on one recorded device, so one log orders the writes of both, and a cut hits both at the same
// moment. Then the log is replayed up to each cut. The file systems are mounted, which replays their journals. The node
// is started over them, and every block that was ever written is read:
//
//	base ◄─ entries up to a flush ─┐
//	  └─ snapshot ◄─ some of the entries after it, the last of them torn ─► mount ─► node ─► read all ─► compare
//
// There are two namespaces. One worker changes "kept" step by step and records the changes (ledger), so the blocks that
// must exist after each cut are known. "noise" always exceeds its quota, so slots are reused all the time; its blocks
// may be missing, but no byte may be wrong.

const (
	// halfBytes is the size of each file system. mkfs.xfs refuses less than 300 MiB.
	halfBytes = 320 << 20
	// keptSteps is the number of acknowledged changes in one recording.
	keptSteps = 90
	// keptBlocks is the length in blocks of the longest chain of "kept".
	keptBlocks = 12
	// keptChains is the number of chains of "kept".
	keptChains = 24
	// noiseQuota is the quota of "noise" in bytes.
	noiseQuota = 2 << 20
	// cutCapacity is the node's capacity per volume, cutSegment its segment size in bytes, as tryStart sets it.
	cutCapacity = 192 << 20
	cutSegment  = 2 << 20
	// cutWorkers is the number of cuts that are checked at a time.
	cutWorkers = 2
)

// cutGeometry has smaller blocks than the kill loop, because all blocks are read hundreds of times.
var cutGeometry = kv.SingleGroup(2, 16, 256) // 8 KiB a block

func TestPowerCuts(t *testing.T) {
	drives := labDrives(t, 2)
	cuts := 200
	if s := os.Getenv("PENSTOCK_POWER_CUTS"); s != "" {
		var err error
		if cuts, err = strconv.Atoi(s); err != nil || cuts < 1 {
			t.Fatalf("PENSTOCK_POWER_CUTS=%q is not a positive number", s)
		}
	}
	for _, c := range []struct {
		name       string
		durability string
		index      fileSystem // of the first volume and the index
		other      fileSystem // of the second volume
		share      int        // percent of the cuts
	}{
		{"sync index on ext4", "sync", ext4, xfs, 60},
		{"sync index on xfs", "sync", xfs, ext4, 25},
		{"batch index on ext4", "batch", ext4, xfs, 15},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := &recording{drive: drives[0], logDrive: drives[1], durability: c.durability, systems: [2]fileSystem{c.index, c.other}}
			r.record(t)
			r.replay(t, max(1, cuts*c.share/100))
		})
	}
}

// recording is one run of the node: the log of its writes, and the changes that it acknowledged.
type recording struct {
	drive, logDrive string
	durability      string
	systems         [2]fileSystem
	binary          string

	base    string // the device with a copy of the drive from before the node started
	entries []logged
	ledger  ledger
	noise   int // number of chains written to "noise"
}

// record formats the drive, copies it to the base, and records the node under load.
func (r *recording) record(t *testing.T) {
	r.binary = buildBinary(t)
	const total = 2 * halfBytes
	for _, d := range []string{r.drive, r.logDrive} {
		command(t, "blkdiscard", "-f", d)
	}
	halves := func(on string) []mapped {
		return []mapped{
			mapDevice(t, "half0", fmt.Sprintf("0 %d linear %s 0", halfBytes/sectorBytes, on)),
			mapDevice(t, "half1", fmt.Sprintf("0 %d linear %s %d", halfBytes/sectorBytes, on, halfBytes/sectorBytes)),
		}
	}
	r.base = "/dev/ram0"
	for i, m := range halves(r.base) {
		r.systems[i].format(t, m.path)
		m.remove(t)
	}
	command(t, "dd", "if="+r.base, "of="+r.drive, "bs=1M", "count="+strconv.Itoa(total>>20), "conv=sparse,notrunc,fsync")

	lw := mapDevice(t, "recorded", fmt.Sprintf("0 %d log-writes %s %s", total/sectorBytes, r.drive, r.logDrive))
	on := halves(lw.path)
	dirs := make([]string, len(on))
	root := t.TempDir()
	for i, m := range on {
		dirs[i] = filepath.Join(root, "mount"+strconv.Itoa(i))
		r.systems[i].mount(t, m.path, dirs[i])
	}
	v := cutVolume(dirs, r.durability)
	n := v.start(t, r.binary)
	r.load(t, n, lw)
	n.kill(t)
	for _, d := range dirs {
		unmount(t, d)
	}
	for _, m := range append(on, lw) {
		m.remove(t)
	}
	log, err := os.Open(r.logDrive)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	if r.entries, err = readLog(log); err != nil {
		t.Fatal(err)
	}
	var flushes, bytes int64
	for _, e := range r.entries {
		bytes += e.bytes
		if e.has(logFlush | logFUA) {
			flushes++
		}
	}
	t.Logf("recorded %d writes of %d MiB, %d of them flushes or FUA, while %d changes were acknowledged", len(r.entries), bytes>>20, flushes, len(r.ledger))
}

func cutVolume(mounts []string, durability string) *volume {
	dirs := strings.Join(dataDirs(mounts), ",")
	return &volume{name: dirs, dir: dirs, durability: durability, capacity: strconv.Itoa(cutCapacity), acked: map[int]int{}}
}

// dataDirs returns the directories of the node's volumes on the file systems.
func dataDirs(mounts []string) []string {
	var dirs []string
	for _, m := range mounts {
		dirs = append(dirs, filepath.Join(m, "penstock"))
	}
	return dirs
}

// load writes to both namespaces until the ledger has keptSteps changes.
func (r *recording) load(t *testing.T, n *node, lw mapped) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	kept, err := openSpace(n.listen, "kept", 0)
	if err != nil {
		t.Fatal(err)
	}
	noise, err := openSpace(n.listen, "noise", noiseQuota)
	if err != nil {
		t.Fatal(err)
	}
	lw.message(t, "mark", "ready")
	full := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for ; ; r.noise++ {
			select {
			case <-full:
				return
			default:
			}
			if _, err := noise.put(ctx, r.noise, keptBlocks); err != nil {
				t.Errorf("noise: %v", err)
				return
			}
		}
	})
	rng := rand.New(rand.NewPCG(7, 7))
	state := ledgerState{epoch: kept.ns.Epoch, blocks: map[int]int{}}
	for len(r.ledger) < keptSteps && !t.Failed() {
		c := nextChange(rng, &state)
		if err := kept.change(ctx, c); err != nil {
			t.Errorf("change %d: %v\n%s", len(r.ledger), err, n.log)
			break
		}
		state.apply(c)
		r.ledger = append(r.ledger, c)
		lw.message(t, "mark", "k"+strconv.Itoa(len(r.ledger)))
	}
	close(full)
	wg.Wait()
	if err := errors.Join(kept.close(), noise.close()); err != nil {
		t.Errorf("close the clients: %v", err)
	}
	if written := int64(r.noise) * keptBlocks * cutGeometry.BlockBytes(); written < 2*noiseQuota && !t.Failed() {
		t.Errorf("%d bytes of noise in a quota of %d: no slot was reused", written, noiseQuota)
	}
	if t.Failed() {
		t.FailNow()
	}
}

// change is one acknowledged change of "kept".
type change struct {
	kind changeKind
	seed int // identifies the chain
	to   int // stored: the chain's number of blocks afterwards; deleted: the first deleted block
}

type changeKind uint8

const (
	stored changeKind = iota
	deleted
	bumped
)

// ledger lists the changes in order.
type ledger []change

// ledgerState is the contents of "kept": the epoch, and the number of blocks of each chain.
type ledgerState struct {
	epoch  kv.Epoch
	blocks map[int]int
}

func (s *ledgerState) apply(c change) {
	switch c.kind {
	case stored:
		s.blocks[c.seed] = max(s.blocks[c.seed], c.to)
	case deleted:
		s.blocks[c.seed] = min(s.blocks[c.seed], c.to)
	case bumped:
		s.epoch++
		s.blocks = map[int]int{}
	}
}

// at returns the two contents that "kept" may have after a cut that follows n acknowledgements: with the first n changes,
// or also with the next one, which may have been written without being acknowledged.
func (l ledger) at(n int, epoch kv.Epoch) (now, next ledgerState) {
	states := [2]ledgerState{}
	for i := range states {
		s := ledgerState{epoch: epoch, blocks: map[int]int{}}
		for _, c := range l[:min(n+i, len(l))] {
			s.apply(c)
		}
		states[i] = s
	}
	return states[0], states[1]
}

func nextChange(rng *rand.Rand, s *ledgerState) change {
	var held []int
	for seed, n := range s.blocks {
		if n > 0 {
			held = append(held, seed)
		}
	}
	slices.Sort(held)
	switch r := rng.IntN(20); {
	case r == 0 && len(held) > 3:
		return change{kind: bumped}
	case r < 5 && len(held) > 0:
		seed := held[rng.IntN(len(held))]
		return change{kind: deleted, seed: seed, to: rng.IntN(s.blocks[seed])}
	}
	seed := rng.IntN(keptChains)
	return change{kind: stored, seed: seed, to: min(keptBlocks, s.blocks[seed]+1+rng.IntN(6))}
}

// space is one namespace over one client.
type space struct {
	ns    kv.Namespace
	store *client.Store
	admin pb.AdminClient
	mem   *client.Memory
	close func() error
}

// openSpace connects to a namespace, and creates it if it does not exist.
func openSpace(listen, name string, quota int64) (*space, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	conn, err := client.Dial(listen, client.DialOptions{Timeout: time.Minute})
	if err != nil {
		return nil, err
	}
	admin := pb.NewAdminClient(conn)
	m, err := admin.CreateNamespace(ctx, &pb.CreateNamespaceRequest{Namespace: &pb.Namespace{Name: name, Geometry: api.GeometryProto(cutGeometry), QuotaBytes: quota}})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("namespace %s: %w", name, err), conn.Close())
	}
	ns, err := api.Namespace(m)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	store, closeStore, err := openStore(ctx, listen)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	mem, err := store.Register(make([]byte, keptBlocks*cutGeometry.BlockBytes()))
	if err != nil {
		return nil, errors.Join(err, closeStore(), conn.Close())
	}
	return &space{ns: ns, store: store, admin: admin, mem: mem, close: func() error {
		return errors.Join(mem.Close(context.Background()), closeStore(), conn.Close())
	}}, nil
}

// cutChain returns the ids of a chain. Chains of different seeds share no block.
func cutChain(ns kv.Namespace, seed int) []kv.BlockID {
	return chainOf(ns, keptBlocks*cutGeometry.BlockTokens, func(i int) int { return seed*1_000_003 + i })
}

// epochContent fills buf with the contents of block id under an epoch.
func epochContent(id kv.BlockID, epoch kv.Epoch, buf []byte) {
	binary.LittleEndian.PutUint64(id[8:], binary.LittleEndian.Uint64(id[8:])^uint64(epoch)*0x9E3779B97F4A7C15)
	content(id, buf)
}

// put writes the first blocks of a chain and returns how many of them are then stored.
func (s *space) put(ctx context.Context, seed, blocks int) (int, error) {
	ids := cutChain(s.ns, seed)[:blocks]
	size := cutGeometry.BlockBytes()
	for i, id := range ids {
		epochContent(id, s.ns.Epoch, s.mem.Bytes()[int64(i)*size:][:size])
	}
	res, err := s.store.Write(ctx, client.WriteRequest{Namespace: s.ns, IDs: ids, Epoch: s.ns.Epoch, From: s.mem})
	if err != nil {
		return 0, fmt.Errorf("write chain %d: %w", seed, err)
	}
	return res.Blocks, nil
}

// change makes the change and returns after it was acknowledged.
func (s *space) change(ctx context.Context, c change) error {
	switch c.kind {
	case stored:
		if got, err := s.put(ctx, c.seed, c.to); err != nil || got != c.to {
			return fmt.Errorf("chain %d: %d of %d blocks were stored where there is room for all: %v", c.seed, got, c.to, err)
		}
	case deleted:
		id := cutChain(s.ns, c.seed)[c.to]
		if _, err := s.admin.DeleteBlocks(ctx, &pb.DeleteBlocksRequest{Namespace: s.ns.Name, BlockId: id[:]}); err != nil {
			return fmt.Errorf("delete block %d of chain %d: %w", c.to, c.seed, err)
		}
	case bumped:
		if _, err := s.admin.BumpEpoch(ctx, &pb.BumpEpochRequest{Name: s.ns.Name}); err != nil {
			return fmt.Errorf("bump: %w", err)
		}
		s.ns.Epoch++
	}
	return nil
}

// cut is the set of log entries that reached the drive before a power failure.
type cut struct {
	flush int // all entries before this one reached the drive
	// extra lists later entries that also reached the drive, in order. Of the last one only the first keep
	// bytes did.
	extra []int
	keep  int64
}

func (c cut) String() string {
	if len(c.extra) == 0 {
		return fmt.Sprintf("after entry %d", c.flush)
	}
	return fmt.Sprintf("after entry %d, with entries %v, %d bytes of the last", c.flush, c.extra, c.keep)
}

// chooseCuts returns at most n cuts, evenly spread, each right after a flush or FUA write. After every fourth of them it
// adds a torn cut among the entries that follow.
func (r *recording) chooseCuts(n int) []cut {
	var points []int
	ready := slices.IndexFunc(r.entries, func(e logged) bool { return e.mark == "ready" })
	for i, e := range r.entries {
		if i >= ready && e.has(logFlush|logFUA) {
			points = append(points, i+1)
		}
	}
	rng := rand.New(rand.NewPCG(uint64(len(points)), 3))
	var cuts []cut
	for i := range min(n, len(points)) {
		p := points[i*len(points)/min(n, len(points))]
		cuts = append(cuts, cut{flush: p})
		if i%4 == 3 {
			if c, ok := r.torn(rng, p); ok {
				cuts = append(cuts, c)
			}
		}
	}
	return cuts
}

// torn returns a cut with some of the writes between entry p and the next flush, because a drive's cache may write any of
// them. The last write is torn.
func (r *recording) torn(rng *rand.Rand, p int) (cut, bool) {
	c := cut{flush: p}
	for i := p; i < len(r.entries); i++ {
		e := r.entries[i]
		if e.has(logFlush) {
			break
		}
		if e.bytes > 0 && !e.has(logMark) && rng.IntN(2) == 0 {
			c.extra = append(c.extra, i)
		}
	}
	if len(c.extra) == 0 {
		return cut{}, false
	}
	last := r.entries[c.extra[len(c.extra)-1]]
	c.keep = rng.Int64N(last.bytes/sectorBytes+1) * sectorBytes
	return c, true
}

// replay checks the node after each of about n cuts.
func (r *recording) replay(t *testing.T, n int) {
	log, err := os.Open(r.logDrive)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	base, err := os.OpenFile(r.base, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer base.Close()
	cuts := r.chooseCuts(n)
	done := 0 // number of entries written to the base
	var total tally
	for group := range slices.Chunk(cuts, cutWorkers) {
		// The base must not change while snapshots of it are in use.
		for ; done < group[0].flush; done++ {
			if err := r.entries[done].apply(base, log, r.entries[done].bytes); err != nil {
				t.Fatal(err)
			}
		}
		if err := base.Sync(); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for i, c := range group {
			wg.Go(func() {
				if err := r.check(i, c, done, log, &total); err != nil {
					t.Errorf("power cut %v: %v", c, err)
				}
			})
		}
		wg.Wait()
		if t.Failed() {
			break
		}
		if total.cuts%20 == 0 {
			t.Logf("%d of %d power cuts", total.cuts, len(cuts))
		}
	}
	t.Logf("%d power cuts, %d of them torn: %v", total.cuts, total.torn, &total)
	if total.blocks == 0 {
		t.Error("no block was read after any cut")
	}
}

// tally counts the cuts, and the blocks that were read after them.
type tally struct {
	mu                  sync.Mutex
	cuts, torn          int
	blocks, owed, noise int
}

func (c *tally) add(at cut, found *tally) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cuts++
	if len(at.extra) > 0 {
		c.torn++
	}
	c.blocks, c.owed, c.noise = c.blocks+found.blocks, c.owed+found.owed, c.noise+found.noise
}

func (c *tally) String() string {
	return fmt.Sprintf("%d acknowledged blocks had to be there; %d blocks of that namespace and %d of the noise were read and compared", c.owed, c.blocks, c.noise)
}

// check mounts the file systems in their state after one cut, and reads every block.
func (r *recording) check(worker int, c cut, done int, log io.ReaderAt, total *tally) (err error) {
	var undo []func() error
	defer func() {
		for _, f := range slices.Backward(undo) {
			err = errors.Join(err, f())
		}
	}()
	device := func(name, table string) (mapped, error) {
		m, err := tryMapDevice(fmt.Sprintf("%s-%d", name, worker), table)
		if err == nil {
			undo = append(undo, func() error {
				_, err := tryCommand("dmsetup", "remove", "--retry", m.name)
				return err
			})
		}
		return m, err
	}
	snap, err := device("cut", fmt.Sprintf("0 %d snapshot %s /dev/ram%d N 8", 2*halfBytes/sectorBytes, r.base, worker+1))
	if err != nil {
		return err
	}
	if err := r.write(snap.path, c, done, log); err != nil {
		return err
	}
	var dirs []string
	root, err := os.MkdirTemp("", "cut-")
	if err != nil {
		return err
	}
	undo = append(undo, func() error { return os.RemoveAll(root) })
	for i, fs := range r.systems {
		half, err := device(fmt.Sprintf("cuthalf%d", i), fmt.Sprintf("0 %d linear %s %d", halfBytes/sectorBytes, snap.path, i*halfBytes/sectorBytes))
		if err != nil {
			return err
		}
		dir := filepath.Join(root, strconv.Itoa(i))
		if err := fs.tryMount(half.path, dir); err != nil {
			return err
		}
		undo = append(undo, func() error { return tryUnmount(dir) })
		dirs = append(dirs, dir)
	}
	return r.read(c, dirs, total)
}

// write writes the entries of a cut to a snapshot of the base, which already has the first done entries.
func (r *recording) write(snapshot string, c cut, done int, log io.ReaderAt) error {
	f, err := os.OpenFile(snapshot, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	for i := done; err == nil && i < c.flush; i++ {
		err = r.entries[i].apply(f, log, r.entries[i].bytes)
	}
	for k, i := range c.extra {
		keep := r.entries[i].bytes
		if k == len(c.extra)-1 {
			keep = c.keep
		}
		if err == nil {
			err = r.entries[i].apply(f, log, keep)
		}
	}
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// read starts the node over the mounted file systems, reads every block, and compares the blocks with the ledger.
func (r *recording) read(c cut, mounts []string, total *tally) (err error) {
	acked := 0
	for _, e := range r.entries[:c.flush] {
		if strings.HasPrefix(e.mark, "k") {
			acked++
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	durability, err := blockstore.ParseDurability(r.durability)
	if err != nil {
		return err
	}
	node, err := testnode.OpenEngine(ctx, testnode.Options{Dirs: dataDirs(mounts), Durability: durability, CapacityBytes: cutCapacity, SegmentBytes: cutSegment})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, node.Close(ctx)) }()
	kept, err := node.Namespace("kept")
	if err != nil {
		return err
	}
	noise, err := node.Namespace("noise")
	if err != nil {
		return err
	}
	now, next := r.ledger.at(acked, 1)
	if r.durability == "sync" && kept.Epoch != now.epoch && kept.Epoch != next.epoch {
		return fmt.Errorf("epoch %d after %d acknowledged changes; want %d or %d", kept.Epoch, acked, now.epoch, next.epoch)
	}
	var found tally
	for seed := range keptChains {
		got, err := loadCut(ctx, node.Node, kept, seed)
		if err != nil {
			return err
		}
		found.blocks += got
		if r.durability != "sync" {
			continue
		}
		least, most := now.blocks[seed], now.blocks[seed]
		switch {
		case next.epoch == now.epoch:
			least, most = min(least, next.blocks[seed]), max(most, next.blocks[seed])
		case kept.Epoch == next.epoch:
			least, most = 0, 0
		}
		found.owed += least
		if got < least || got > most {
			return fmt.Errorf("chain %d has %d blocks after %d acknowledged changes under epoch %d; want %d to %d", seed, got, acked, kept.Epoch, least, most)
		}
	}
	for seed := range r.noise {
		got, err := loadCut(ctx, node.Node, noise, seed)
		if err != nil {
			return err
		}
		found.noise += got
	}
	total.add(c, &found)
	return nil
}

// loadCut loads a chain, compares each block that the node delivers, and returns the number of these blocks.
func loadCut(ctx context.Context, node *storage.Node, ns kv.Namespace, seed int) (blocks int, err error) {
	ids := cutChain(ns, seed)
	var mu sync.Mutex
	got := make([][]byte, len(ids))
	res, err := node.Load(ctx, storage.LoadRequest{Namespace: ns.Name, IDs: ids}, func(_ context.Context, parts []storage.Part) {
		for i := range parts {
			p := &parts[i]
			mu.Lock()
			if got[p.Block] == nil {
				got[p.Block] = make([]byte, cutGeometry.BlockBytes())
			}
			copy(got[p.Block][p.At:], p.Bytes)
			mu.Unlock()
			p.Done(nil)
		}
	})
	if err != nil {
		return 0, fmt.Errorf("load chain %d of %s: %w", seed, ns.Name, err)
	}
	want := make([]byte, cutGeometry.BlockBytes())
	for _, p := range res.Pieces {
		if p.State != storage.Delivered {
			continue
		}
		epochContent(ids[p.Block], res.Match.Epoch, want)
		if !bytes.Equal(got[p.Block], want) {
			return 0, fmt.Errorf("WRONG BYTES in block %d of chain %d of %s", p.Block, seed, ns.Name)
		}
		blocks++
	}
	return blocks, nil
}
