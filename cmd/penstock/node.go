package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/blockstore/crypt"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/membership"
	"github.com/penstock-kv/penstock/server/metrics"
	"github.com/penstock-kv/penstock/server/reload"
	"github.com/penstock-kv/penstock/server/storage"
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
	// keys are those of the process, and openKeys the ones with which this node opened its volumes; nil: no
	// encryption.
	keys     *volumeKeys
	openKeys *crypt.Keyring
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
	if host != nil {
		n.keys = host.keys
	} else if n.keys, err = openVolumeKeys(ctx, cfg.Encryption, log); err != nil {
		return nil, err
	}
	n.openKeys = n.keys.current.Load().ring
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

// candidate reads the configuration anew and checks the settings that a reload applies. A command that
// prints keys is ended when ctx ends.
func (n *node) candidate(ctx context.Context) (reload.Candidate, error) {
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

		RewriteBytesPerSecond: int64(cfg.Encryption.RewriteRate),
	}
	if err := n.storage.CheckLimits(limits); err != nil {
		return reload.Candidate{}, fmt.Errorf("config: limits: %w: %w", err, config.ErrConfig)
	}
	candidate := reload.Candidate{Keys: cfg.Keys(), Auth: cfg.Auth, Apply: func() {
		n.live.apply(cfg.Log, cfg.DrainWithin)
		n.storage.SetLimits(limits)
		n.server.SetLandWithin(cfg.Limits.QueueWait.Std())
	}}
	if n.adoptedBy != "" {
		return candidate, nil // the adopter's reload gives keys to the nodes that it adopted
	}
	ring, err := readVolumeKeys(ctx, cfg.Encryption, n.log)
	if err != nil {
		return reload.Candidate{}, err
	}
	candidate.Files = keyChanges(*n.keys.current.Load(), keysInUse{ring, cfg.Encryption})
	candidate.Prepare = func() error {
		ctx, cancel := setKeysWithin(context.Background(), cfg)
		defer cancel()
		return n.setKeys(ctx, keysInUse{ring, cfg.Encryption})
	}
	return candidate, nil
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
