package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/handoff"
	"github.com/penstock-kv/penstock/server/membership"
	"github.com/penstock-kv/penstock/server/metrics"
	"github.com/penstock-kv/penstock/server/reload"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
	"github.com/penstock-kv/penstock/trie/evict"
)

// node is a storage node with its parts. The parts are opened bottom up and closed top down.
// closers holds the close functions of the open parts, in the order in which they were opened.
type node struct {
	cfg config.Config
	// from is the source of cfg, in which the node's name may be empty.
	from    source[config.Config]
	live    *live
	log     *slog.Logger
	server  *server.Server
	storage *storage.Node
	control net.Listener
	web     net.Listener // nil: no HTTP
	plane   plane
	data    rdma.Engine
	volumes []server.Volume
	// owner is the ownership of shared volumes; nil: the volumes are locked. adoptedBy is the node
	// that serves this node's volumes in its process, "" if this is a process of its own.
	owner     *membership.Owner
	adoptedBy string
	// cluster is nil if the node stands alone. adopter adopts volumes of other nodes; an adopted node
	// has none.
	cluster *membership.Cluster
	adopter *adopter
	// storeID identifies the store on its volumes.
	storeID string
	// present are the directories of data that hold volumes.
	present []string
	// fence is the fencing number of shared volumes, otherwise 0.
	fence uint32
	// boot is the number of this start of the store. indexMoves counts the moves of the
	// index since then.
	boot       uint64
	indexMoves atomic.Uint64
	share      split
	// moves copies blocks to other nodes of the cluster; nil: the node stands alone.
	moves   *moves
	budget  *memoryBudget
	closers []func(context.Context) error
	// stuck: opening the store or its index has not returned, or closing the store or the storage
	// engine has failed. A device may then still access the arena.
	stuck bool
}

// startNode opens the volumes, the index and the listeners. The node serves no request before
// server.Serve.
func startNode(ctx context.Context, from source[config.Config], level *slog.LevelVar, log *slog.Logger) (*node, error) {
	return startNodeIn(ctx, nil, from, level, log)
}

// startNodeIn is startNode for a node whose volumes host has adopted. host is nil for a node in a process of
// its own.
func startNodeIn(ctx context.Context, host *node, from source[config.Config], level *slog.LevelVar, log *slog.Logger) (_ *node, err error) {
	cfg := from.cfg
	n := &node{cfg: cfg, from: from, log: log}
	var memoryOfHost *memoryBudget
	if host != nil {
		n.adoptedBy, memoryOfHost = host.cfg.Node, host.budget
	}
	if n.cfg.Node == "" {
		if n.cfg.Node, err = os.Hostname(); err != nil {
			n.cfg.Node = "unnamed"
		}
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.closeParts(context.Background()))
		}
	}()
	if n.plane, err = choosePlane(&cfg, thisHost()); err != nil {
		return nil, err
	}
	n.budget = newMemoryBudget(cfg, memoryOfHost)
	n.onClose(func(context.Context) error {
		n.budget.close()
		return nil
	})
	stopTracing, err := startTracing(ctx, cfg.Trace, n.cfg.Node, log)
	if err != nil {
		return nil, err
	}
	n.onClose(func(ctx context.Context) error {
		stopTracing(ctx)
		return nil
	})
	// If shmem_enabled is "never", the default, a shared arena has no transparent huge pages.
	// Reserved huge pages are then tried even if they are not configured.
	shared := sharesArena(cfg)
	memory, err := arena.New(arena.Options{SizeBytes: int64(cfg.Arena), HugeTLB: cfg.HugeTLB || shared, Shared: shared})
	if err != nil {
		return nil, fmt.Errorf("arena of %v: %w", cfg.Arena, err)
	}
	n.onClose(func(context.Context) error {
		if n.stuck {
			return nil // a device may still write into the arena, so only the end of the process frees it
		}
		return memory.Close()
	})
	if memory.Kind() == arena.Small {
		log.Warn("the arena has 4 KiB pages, which halve the disk bandwidth; "+smallPagesRemedy(cfg), "arena", cfg.Arena)
	}
	if err := n.openOwner(); err != nil {
		return nil, err
	}
	store, index, err := n.openStore(ctx, memory)
	if err != nil {
		return nil, err
	}
	n.storeID, n.fence = store.Node().String(), store.Fence()
	if err := n.listen(); err != nil {
		return nil, errors.Join(err, store.Close(context.WithoutCancel(ctx)), index.Close())
	}
	registry := newRegistry()
	counters := metrics.NewNode(registry)
	if n.storage, err = n.openEngine(ctx, store, index, memory, counters); err != nil {
		return nil, errors.Join(err, store.Close(context.WithoutCancel(ctx)), index.Close())
	}
	n.onClose(func(ctx context.Context) error {
		err := n.storage.Close(ctx)
		n.stuck = err != nil
		return err
	})
	return n, n.openServer(ctx, memory, counters, registry, level)
}

// sharesArena reports whether other processes map the arena.
func sharesArena(cfg config.Config) bool {
	return cfg.LocalSocket != "" || cfg.DataPlane.Provider == config.ProviderSHM
}

// smallPagesRemedy returns the advice how to get huge pages for the arena.
func smallPagesRemedy(cfg config.Config) string {
	if sharesArena(cfg) {
		return fmt.Sprintf("for local_socket and provider shm reserve huge pages (vm.nr_hugepages=%d), or set transparent_hugepage/shmem_enabled to advise", (cfg.Arena+2<<20-1)/(2<<20))
	}
	return "set transparent_hugepage/enabled to madvise, or reserve huge pages and set hugetlb"
}

// onClose registers a function that closes a part.
func (n *node) onClose(f func(context.Context) error) { n.closers = append(n.closers, f) }

// closeParts closes the open parts, the last opened first.
func (n *node) closeParts(ctx context.Context) error {
	var errs []error
	for _, f := range slices.Backward(n.closers) {
		errs = append(errs, f(ctx))
	}
	n.closers = nil
	return errors.Join(errs...)
}

// close drains the node and closes all parts.
func (n *node) close(ctx context.Context) error {
	n.moves.close()
	err := n.server.Shutdown(ctx)
	// The store must be synced even if draining took its whole time limit.
	rest, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Minute)
	defer cancel()
	return errors.Join(err, n.closeParts(rest))
}

// openStore opens the volumes and their index.
func (n *node) openStore(ctx context.Context, memory *arena.Arena) (_ *blockstore.Store, _ *trie.Trie, err error) {
	defer func() { n.stuck = n.stuck || errors.Is(err, errStillOpening) }()
	hungAfter := n.cfg.Limits.HungAfter.Std()
	devices, err := opening(ctx, n.log, hungAfter, "a volume", n.cfg.Data, func() ([]device, error) {
		return openPresent(n.cfg, memory.Bytes(), n.log)
	})
	if err != nil {
		return nil, nil, err
	}
	for i, d := range devices {
		if d.missing {
			continue
		}
		n.present = append(n.present, n.cfg.Data[i])
		n.volumes = append(n.volumes, server.Volume{Device: d.Device, Reason: d.reason})
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
		Alloc:             scratchFrom(memory),
		Logger:            n.log,
	}
	if n.owner != nil {
		options.Owner = n.owner
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
				"volume", n.cfg.Data[i], "file_system", d.Info().Detail)
		}
	}
}

// warnOfCapacity logs a configured capacity that exceeds the file systems, because then their free
// space limits the store.
func (n *node) warnOfCapacity(devices []device) {
	most, err := reachable(n.cfg.Data, devices)
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
				"volume", n.cfg.Data[i], "free", config.Size(space.FreeBytes), "free_floor", n.cfg.FreeFloor)
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
		if dir, stale, err = n.ownIndex(dir, stale, store.Fence()); err != nil {
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
		return nil, withRebuild(err, n.cfg.Data)
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
		ScrubBytesPerSecond: int64(n.cfg.ScrubRate),
		IndexMoved:          n.noteIndexMoved,
		CutThroughBytes:     cutThroughBytes(n.cfg.DataPlane),
		Logger:              n.log,
	})
}

// cutThroughBytes converts the setting, in which 0 means never, to the engine's option.
func cutThroughBytes(p config.DataPlane) int64 {
	if p.CutThrough == 0 {
		return -1
	}
	return int64(p.CutThrough)
}

// listen binds the listeners before the slow part of the start, so that a port in use is reported
// first.
func (n *node) listen() (err error) {
	// Multipath TCP is off, because its sockets refuse options that the data plane uses, and both
	// ends are in one cluster.
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	if n.control, err = lc.Listen(context.Background(), "tcp", n.cfg.Listen); err != nil {
		return fmt.Errorf("control plane (listen): %w", err)
	}
	n.onClose(closeListener(n.control))
	if n.cfg.HTTP == "" {
		return nil
	}
	if n.web, err = lc.Listen(context.Background(), "tcp", n.cfg.HTTP); err != nil {
		return fmt.Errorf("metrics and health (http): %w", err)
	}
	warnOfMetrics(n.log, n.cfg.HTTP, n.cfg.Auth.RolesFile != "")
	n.onClose(closeListener(n.web))
	return nil
}

// warnOfMetrics logs what other machines can read without a token or, if there is a roles file, that
// tokens go over the network in plain text.
func warnOfMetrics(log *slog.Logger, http string, roles bool) {
	switch {
	case config.Loopback(http):
	case roles:
		log.Warn("/metrics is served to other machines without TLS, so the tokens of scrapers go over the network in plain text; let only the monitoring network reach this port, or listen on 127.0.0.1", "http", http)
	default:
		log.Warn("/metrics and health are served to other machines without a token or TLS: they show the names of namespaces, volumes and NICs, and traffic; let only the monitoring network reach this port, or listen on 127.0.0.1", "http", http)
	}
}

// closeListener closes a listener that a server may have closed already.
func closeListener(l net.Listener) func(context.Context) error {
	return func(context.Context) error {
		if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			return err
		}
		return nil
	}
}

// openServer starts the data plane and joins all parts.
func (n *node) openServer(ctx context.Context, memory *arena.Arena, counters *metrics.Node, registry *prometheus.Registry, level *slog.LevelVar) (err error) {
	if n.live, err = newLive(n.cfg.Auth, level, n.cfg.DrainWithin, &manager{socket: n.from.notifySocket, log: n.log}); err != nil {
		return err
	}
	n.live.follow(n.from.cfg.Keys(), n.from.path, n.candidate, func() { n.server.EndRemovedSessions() }, counters.Reloads, n.log)
	tlsConfig := n.live.credentials.ServerTLS()
	secret := make(rdma.Token, 32)
	if _, err := rand.Read(secret); err != nil {
		return err
	}
	sessions, err := server.NewSessions(secret, n.live.credentials.Roles)
	if err != nil {
		return err
	}
	advertise, err := advertised(n.cfg)
	if err != nil {
		return err
	}
	dataTLS := tlsConfig
	if !n.cfg.Encrypted() {
		dataTLS = nil
	}
	n.data, err = n.plane.open(ctx, planeOptions{
		listen:     n.cfg.DataListen,
		advertise:  advertise,
		admission:  sessions.Admission(),
		tls:        dataTLS,
		congestion: congestion(n.cfg.DataPlane.Congestion),
		memory:     memory,
		log:        n.log,
	})
	if err != nil {
		return fmt.Errorf("data plane (provider %s, data_listen): %w", n.plane.provider, withNICs(err))
	}
	n.onClose(func(context.Context) error { return n.data.Close() })
	local, err := n.openLocal(memory)
	if err != nil {
		return err
	}
	if n.cluster, err = n.join(); err != nil {
		return err
	}
	n.openAdopter(level)
	var adoption server.Adopter
	if n.adopter != nil {
		adoption = n.adopter
	}
	n.server, err = server.New(server.Options{
		Cluster:  n.cluster,
		Adopter:  adoption,
		Fence:    n.fence,
		Node:     n.cfg.Node,
		Version:  readBuildInfo().String(),
		Storage:  n.storage,
		Arena:    memory,
		Data:     n.data,
		Sessions: sessions,
		DataPort: portOf(n.dataAddr()),
		Local:    local,
		Limits: server.Limits{
			ReadBytes:   int64(n.cfg.Limits.ReadBytes),
			WriteBytes:  int64(n.cfg.Limits.WriteBytes),
			ChainBlocks: n.cfg.Limits.ChainBlocks,
			LandWithin:  n.cfg.Limits.QueueWait.Std(),
		},
		Volumes:       n.volumes,
		LinkRate:      newLinkRates().of,
		Durability:    n.cfg.Durability,
		CapacityBytes: n.share.capacityBytes,
		MemoryBudget:  n.budget.parts,
		Tokens:        n.live.credentials.Tokens,
		Roles:         n.live.credentials.Roles,
		TLS:           tlsConfig,
		Config:        n.live.reloader,
		Metrics:       counters,
		Registry:      registry,
		Logger:        n.log,
	})
	return err
}

// openLocal returns a listener on the unix socket, for engines on this host, or nil if no socket is
// configured.
func (n *node) openLocal(memory *arena.Arena) (*handoff.Listener, error) {
	if n.cfg.LocalSocket == "" {
		return nil, nil
	}
	local, err := handoff.Listen(handoff.Options{
		Path: n.cfg.LocalSocket, Arena: memory, StagingBytesMax: int64(n.cfg.Limits.StagingBytes), Logger: n.log,
	})
	if err != nil {
		return nil, fmt.Errorf("engines on this host (local_socket): %w", err)
	}
	n.budget.local.Store(local)
	n.onClose(func(context.Context) error { return local.Close() })
	return local, nil
}

// dataAddr returns the address of the data plane's listener, with the actual port.
func (n *node) dataAddr() string {
	return cmp.Or(listensOn(n.data), n.cfg.DataListen)
}

// congestion returns the transfer engine's name for the configured congestion control.
// An empty setting means the system's default.
func congestion(name string) string {
	if name == "" {
		return "system"
	}
	return name
}

// advertised returns the data plane's address that peers dial.
func advertised(cfg config.Config) (string, error) {
	if cfg.Advertise == "" {
		return "", nil
	}
	_, port, err := net.SplitHostPort(cfg.DataListen)
	if err != nil || port == "0" {
		return "", fmt.Errorf("config: advertise: %q needs a data_listen with a fixed port, not %s: %w", cfg.Advertise, cfg.DataListen, config.ErrConfig)
	}
	return net.JoinHostPort(cfg.Advertise, port), nil
}

func portOf(addr string) int {
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return 0
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		return 0
	}
	return n
}

// candidate reads the configuration anew and checks the settings that a reload applies.
func (n *node) candidate() (reload.Candidate, error) {
	cfg, err := n.from.read()
	if err != nil {
		return reload.Candidate{}, err
	}
	limits := storage.Limits{
		ReadsMax:        cfg.Limits.Reads,
		ReservationsMax: cfg.Limits.Writes,
		LeasesMax:       cfg.Limits.Leases,
		LeaseTTLMax:     cfg.Limits.LeaseTTL.Std(),
		ReservationTTL:  cfg.Limits.Reservation.Std(),
		QueueWait:       cfg.Limits.QueueWait.Std(),
		ReadWait:        cfg.Limits.ReadWait.Std(),
		LoanBytesMax:    int64(cfg.Limits.LoanBytes),

		FreeFloorBytes:      int64(cfg.FreeFloor),
		ScrubBytesPerSecond: int64(cfg.ScrubRate),
	}
	if err := n.storage.CheckLimits(limits); err != nil {
		return reload.Candidate{}, fmt.Errorf("config: limits: %w: %w", err, config.ErrConfig)
	}
	return reload.Candidate{Keys: cfg.Keys(), Auth: cfg.Auth, Apply: func() {
		n.live.apply(cfg.Log, cfg.DrainWithin)
		n.storage.SetLimits(limits)
		n.server.SetLandWithin(cfg.Limits.QueueWait.Std())
	}}, nil
}

// readyAttrs are the log attributes when the node is ready. `penstock demo` and tests read the
// addresses from them.
func (n *node) readyAttrs() []any {
	web := ""
	if n.web != nil {
		web = n.web.Addr().String()
	}
	first := n.volumes[0]
	return []any{
		"node", n.cfg.Node,
		"listen", n.control.Addr().String(),
		"data_listen", n.dataAddr(),
		"data_provider", n.plane.provider,
		"data_reason", n.plane.reason,
		"data_detail", n.data.Info().Detail,
		"data_tls", n.cfg.Encrypted() && n.plane.provider == providerTCP,
		"http", web,
		"io", first.Device.Info().Backend,
		"io_reason", first.Reason,
		"capacity", config.Size(n.share.capacityBytes).String(),
		"blocks", n.storage.Recovered().Blocks,
		"recovery", n.storage.Recovered().Took.Round(time.Millisecond).String(),
		"version", readBuildInfo().String(),
	}
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
