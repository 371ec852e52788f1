package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/metrics"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
	"github.com/penstock-kv/penstock/trie/evict"
)

// openStore opens the volumes and their index.
func (n *node) openStore(ctx context.Context, memory *arena.Arena) (_ *blockstore.Store, _ *trie.Trie, err error) {
	defer func() { n.stuck = n.stuck || errors.Is(err, errStillOpening) }()
	hungAfter := n.cfg.Limits.HungAfter.Std()
	dirs := n.cfg.Dirs()
	devices, err := opening(ctx, n.log, hungAfter, "a volume", dirs, func() ([]device, error) {
		return openPresent(n.cfg, memory.Bytes(), n.log)
	})
	if err != nil {
		return nil, nil, err
	}
	for i, d := range devices {
		if d.missing {
			continue
		}
		n.present = append(n.present, dirs[i])
		n.volumes = append(n.volumes, server.Volume{Device: d.Device, Reason: d.reason})
	}
	if err := n.checkShared(); err != nil {
		return nil, nil, errors.Join(err, closeDevices(devices))
	}
	if n.share, err = splitCapacity(n.cfg, devices); err != nil {
		return nil, nil, errors.Join(err, closeDevices(devices))
	}
	options := blockstore.Options{
		Devices:       plainDevices(devices),
		Identity:      blockio.Identity(time.Now()),
		CapacityBytes: n.share.storeBytes,
		SegmentBytes:  int64(n.cfg.Segment),
		AddVolumes:    n.cfg.AddVolumes,
		Degraded:      n.cfg.Degraded,
		// Without a configured capacity, the capacity was computed from the free space of the
		// present volumes.
		CapacityOfPresent: n.cfg.Capacity == 0,
		FreeFloorBytes:    int64(n.cfg.FreeFloor),
		Prewrite:          n.cfg.Prewrite,
		Health:            health.Options{HungAfter: n.cfg.Limits.HungAfter.Std()},
		Keys:              n.openKeys,
		Alloc:             scratchFrom(memory),
		Logger:            n.log,
	}
	if n.openKeys != nil && n.adoptedBy == "" {
		for _, dir := range n.cfg.Dirs() {
			options.Plain = append(options.Plain, slices.Contains(n.cfg.Encryption.PlainVolumes, dir))
		}
		options.EpochKeys = &n.cfg.Encryption.EpochKeys
	}
	if n.owner != nil {
		options.Owner, options.SharedOnly = n.owner, n.adoptedBy != ""
		options.Local = make([]bool, len(devices))
		for i := range n.cfg.Data {
			options.Local[i] = true
		}
	}
	store, err := opening(ctx, n.log, hungAfter, "the store", n.present, func() (*blockstore.Store, error) {
		return blockstore.Open(ctx, options)
	})
	if errors.Is(err, errStillOpening) {
		return nil, nil, err
	}
	if err != nil {
		return nil, nil, errors.Join(err, closeDevices(devices))
	}
	if n.cfg.Capacity == 0 {
		n.share.capacityBytes += store.Stats().LostBytes
	}
	n.warnOfMemory(devices)
	n.warnOfCapacity(devices)
	n.warnOfSpace(devices)
	index, err := n.openIndex(ctx, store)
	if err != nil {
		// The drive of the index may hang and may hold a volume too, so the wait for the close is
		// limited.
		rest, cancel := context.WithTimeout(context.WithoutCancel(ctx), hungAfter)
		defer cancel()
		closed := store.Close(rest)
		n.stuck = closed != nil
		return nil, nil, errors.Join(err, closed)
	}
	return store, index, nil
}

// warnOfMemory logs which volumes are lost when the machine restarts, independently of the
// durability.
func (n *node) warnOfMemory(devices []device) {
	for i, d := range devices {
		if !d.missing && d.Info().Volatile {
			n.log.Warn("this volume is in memory: stored blocks take memory and are lost when the machine restarts; use a directory on a disk",
				"volume", n.cfg.Dirs()[i], "file_system", d.Info().Detail)
		}
	}
}

// warnOfCapacity logs a configured capacity that exceeds the file systems, because then their free
// space limits the store.
func (n *node) warnOfCapacity(devices []device) {
	most, err := reachable(n.cfg.Dirs(), devices)
	if err == nil && int64(n.cfg.Capacity) > most {
		n.log.Warn("the capacity exceeds the free space of the file systems: the store grows until free_floor is reached",
			"capacity", n.cfg.Capacity, "room", config.Size(most), "free_floor", n.cfg.FreeFloor)
	}
}

// warnOfSpace logs which file systems are below the floor, before the first writer is refused.
func (n *node) warnOfSpace(devices []device) {
	for i, d := range devices {
		space, err := d.Stat()
		if err == nil && !d.missing && space.FreeBytes < int64(n.cfg.FreeFloor) {
			n.log.Warn("this volume takes no writes: its file system has less free space than free_floor; free some space, or lower free_floor",
				"volume", n.cfg.Dirs()[i], "free", config.Size(space.FreeBytes), "free_floor", n.cfg.FreeFloor)
		}
	}
}

// openIndex opens the index. If the index is missing and the volumes have namespaces, it rebuilds
// the index, because a node with an empty index would free all slots.
func (n *node) openIndex(ctx context.Context, store *blockstore.Store) (index *trie.Trie, err error) {
	dir, stale, err := indexDirs(n.present)
	if err != nil {
		return nil, err
	}
	if store.Fence() != 0 {
		if dir, stale, err = n.ownIndex(dir, n.indexHome(dir), stale, store.Fence()); err != nil {
			return nil, err
		}
	}
	open := func() (*trie.Trie, error) {
		opts := indexOptions(n.cfg, dir, store, n.share.indexBytes, n.log)
		opts.Grew = n.budget.setIndex
		n.budget.watch(store, opts.MemTableBytes)
		return opening(ctx, n.log, opts.HungAfter, "the index", []string{dir}, func() (*trie.Trie, error) { return trie.Open(opts) })
	}
	index, err = open()
	if errors.Is(err, errStillOpening) {
		return nil, err
	}
	if err != nil && store.Fence() != 0 {
		n.log.Error("the copy of the index that the volumes' previous owner had cannot be opened: rebuilding the index from the slot headers", "err", err)
		if err := os.RemoveAll(dir); err != nil {
			return nil, err
		}
		index, err = open()
	}
	if err != nil {
		return nil, withRebuild(err, n.cfg.Dirs())
	}
	defer func() {
		if index != nil && err == nil {
			err = n.retireIndexes(dir, stale, store)
		}
		if index != nil && err != nil {
			index, err = nil, errors.Join(err, index.Close())
		}
	}()
	lost, err := storage.IndexLost(store, index)
	if err != nil || !lost {
		return index, err
	}
	if err := index.Close(); err != nil {
		return nil, err
	}
	n.log.Warn("the index is empty and the volumes are not: rebuilding the index from the slot headers")
	report, err := rebuildIndex(ctx, n.cfg, dir, store, n.budget.setIndex, storage.RebuildOptions{Logger: n.log})
	if err != nil {
		return nil, err
	}
	n.log.Info("index rebuilt", "namespaces", report.Namespaces, "blocks", report.Indexed, "took", report.Took.Round(time.Millisecond))
	return open()
}

// retireIndexes writes this start's indexUse into the index, and renames the other indexes. Such an
// old index exists if its volume was missing when the current index was made, or if the index was
// moved from that volume to another.
func (n *node) retireIndexes(dir string, stale []string, store *blockstore.Store) error {
	n.boot = store.Boot()
	if err := (indexUse{boot: n.boot}).write(dir); err != nil {
		return err
	}
	if store.Fence() != 0 {
		n.removeIndexes(stale)
		return nil
	}
	for _, old := range stale {
		n.log.Warn("renamed an outdated index: its volume was missing when the current index was made, or the index was moved to another volume", "old", old, "index", dir)
		if err := os.RemoveAll(old + retiredSuffix); err != nil {
			return err
		}
		if err := os.Rename(old, old+retiredSuffix); err != nil {
			return err
		}
	}
	return nil
}

// withRebuild returns err, the error of opening the index, with the advice to rebuild the index.
func withRebuild(err error, data []string) error {
	return fmt.Errorf("%w\n(to rebuild the index from the volumes: penstock store rebuild-index --data %s)", err, commaList(data))
}

// indexOptions returns the options of the node's index, and of the index that rebuild-index makes.
func indexOptions(cfg config.Config, dir string, store *blockstore.Store, diskBytes int64, log *slog.Logger) trie.Options {
	policy, err := evict.ParseKind(cfg.Eviction)
	if err != nil {
		policy = evict.Default // Validate has refused other values
	}
	return trie.Options{
		Dir:    dir,
		Owner:  store.Node().String(),
		Policy: policy,
		SlotBytes: func(g kv.Geometry, group int) int64 {
			layout, err := store.SlotLayout(g.PieceBytes(group), g.Groups[group].Layers)
			if err != nil {
				// No slot can hold such a piece. A namespace with this geometry is refused, so the
				// size need not be exact.
				return g.PieceBytes(group)
			}
			return layout.SlotBytes()
		},
		Absent:     store.Missing,
		CacheBytes: int64(cfg.IndexCache),
		// Several memtables and their logs exist at a time. They fit the index's share of a small
		// capacity.
		MemTableBytes:  min(16<<20, max(1<<20, diskBytes/8)),
		MaxLeases:      cfg.Limits.Leases,
		MaxChainBlocks: cfg.Limits.ChainBlocks,
		HungAfter:      cfg.Limits.HungAfter.Std(),
		Logger:         log,
	}
}

func (n *node) openEngine(ctx context.Context, store *blockstore.Store, index *trie.Trie, memory *arena.Arena, counters *metrics.Node) (*storage.Node, error) {
	durability, err := blockstore.ParseDurability(n.cfg.Durability)
	if err != nil {
		return nil, err
	}
	limits := n.cfg.Limits
	return storage.Open(ctx, storage.Options{
		Index: index, Store: store, Arena: memory, Metrics: counters,
		Durability:          durability,
		SyncEvery:           n.cfg.SyncEvery.Std(),
		ReadsMax:            limits.Reads,
		ReservationsMax:     limits.Writes,
		LoadBytesMax:        int64(limits.ReadBytes),
		WriteBytesMax:       int64(limits.WriteBytes),
		ChainBlocksMax:      limits.ChainBlocks,
		LeaseTTLMax:         limits.LeaseTTL.Std(),
		ReservationTTL:      limits.Reservation.Std(),
		QueueWait:           limits.QueueWait.Std(),
		ReadWait:            limits.ReadWait.Std(),
		WriteWait:           limits.HungAfter.Std(),
		EventHistory:        limits.EventHistory,
		LoanBytesMax:        int64(limits.LoanBytes),
		HotPrefix:           n.hotOptions(),
		ScrubBytesPerSecond: int64(n.cfg.ScrubRate),

		RewriteBytesPerSecond: int64(n.cfg.Encryption.RewriteRate),
		IndexMoved:            n.noteIndexMoved,
		CutThroughBytes:       cutThroughBytes(n.cfg.DataPlane),
		Logger:                n.log,
	})
}

// hotOptions returns the conditions on which prefixes are hot. Only nodes of a cluster copy them.
func (n *node) hotOptions() storage.HotOptions {
	c := n.cfg.Cluster
	if len(c.Etcd) == 0 {
		return storage.HotOptions{}
	}
	return storage.HotOptions{MatchesPerSecond: float64(c.HotMatches), KeptFor: c.HotFor.Std()}
}

// cutThroughBytes converts the setting, in which 0 means never, to the engine's option.
func cutThroughBytes(p config.DataPlane) int64 {
	if p.CutThrough == 0 {
		return -1
	}
	return int64(p.CutThrough)
}

// indexName is the name of the index's directory in its volume.
const indexName = "index"

// indexDir returns the directory of the index: the newest existing one, or one on the first volume.
func indexDir(data []string) (string, error) {
	dir, _, err := indexDirs(data)
	return dir, err
}

// indexDirs returns the result of indexDir and the directories of older indexes.
func indexDirs(data []string) (dir string, stale []string, err error) {
	type found struct {
		dir   string
		use   indexUse
		fence uint32
	}
	var all []found
	for _, d := range data {
		names, err := filepath.Glob(filepath.Join(escapeGlob(d), indexName+"*"))
		if err != nil {
			return "", nil, err
		}
		for _, dir := range names {
			if fence, ok := parseIndexName(filepath.Base(dir)); ok {
				all = append(all, found{dir, readIndexUse(dir), fence})
			}
		}
	}
	if len(all) == 0 {
		return filepath.Join(data[0], indexName), nil, nil
	}
	// An owner of shared volumes that ended before it had opened its index left a copy with the use of the
	// original.
	slices.SortStableFunc(all, func(a, b found) int { return cmp.Or(b.use.compare(a.use), cmp.Compare(b.fence, a.fence)) })
	if len(all) > 1 && all[0].use == all[1].use && all[0].fence == all[1].fence {
		return "", nil, fmt.Errorf("%d volumes have an index (%s and %s among them) of the same age; one index is from another node: move it away", len(all), all[0].dir, all[1].dir)
	}
	for _, f := range all[1:] {
		stale = append(stale, f.dir)
	}
	return all[0].dir, stale, nil
}

// indexUse is the time of the last use of an index: the start of the store, and the number of moves
// of the index since that start. Of several indexes the node uses the one with the latest use.
type indexUse struct{ boot, moves uint64 }

func (u indexUse) compare(v indexUse) int {
	return cmp.Or(cmp.Compare(u.boot, v.boot), cmp.Compare(u.moves, v.moves))
}

// indexUseName is the file in the directory of an index that holds its indexUse.
const indexUseName = "penstock-start"

// readIndexUse returns the indexUse of the index in dir, or the zero value if its file cannot be
// read.
func readIndexUse(dir string) (u indexUse) {
	b, err := os.ReadFile(filepath.Join(dir, indexUseName))
	if err != nil {
		return indexUse{}
	}
	// Earlier versions wrote only boot.
	if n, _ := fmt.Sscan(string(b), &u.boot, &u.moves); n == 0 {
		return indexUse{}
	}
	return u
}

// write makes the indexUse and the name of the directory durable.
func (u indexUse) write(dir string) error {
	f, err := os.OpenFile(filepath.Join(dir, indexUseName), os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(f, u.boot, u.moves)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return errors.Join(syncDir(dir), syncDir(filepath.Dir(dir)))
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// noteIndexMoved makes the next start use the index in dir.
func (n *node) noteIndexMoved(dir string) error {
	return indexUse{n.boot, n.indexMoves.Add(1)}.write(dir)
}
