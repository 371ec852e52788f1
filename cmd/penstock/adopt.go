package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/posixio"
	"github.com/penstock-kv/penstock/server/config"
	"github.com/penstock-kv/penstock/server/membership"
)

// adopter serves the shared volumes of other nodes in this process. An adopted node has the name of
// the node whose volumes they are, so that clients find its sequences where they were, and ports of
// its own. It has no HTTP and no local socket.
type adopter struct {
	n     *node
	level *slog.LevelVar
	life  context.Context
	stop  context.CancelFunc
	wg    sync.WaitGroup

	// adopting is held during an adoption.
	adopting sync.Mutex
	// retries has the stores whose last adoption has failed, and elsewhere the logged reason for each
	// free store that is not on this host. Only adoptFree uses them.
	retries   map[string]retry
	elsewhere map[string]string

	mu     sync.Mutex
	guests map[string]*guest // by the id of the store
}

// retry is the next attempt to adopt a store. Each attempt may use up one of the 65,535 fencing numbers
// of the store, so the waits grow.
type retry struct {
	after time.Time
	wait  time.Duration
}

// retryMax is the longest wait between two attempts.
const retryMax = 10 * time.Minute

// failed returns the retry after a failure at the time now. The first wait is first.
func (r retry) failed(now time.Time, first time.Duration) retry {
	wait := min(max(first, 2*r.wait), retryMax)
	return retry{now.Add(wait), wait}
}

// guest is an adopted node.
type guest struct {
	node  *node
	since time.Time
	took  time.Duration
	// life ends when giveUp is called or the adopter ends.
	life   context.Context
	giveUp context.CancelFunc
}

// openAdopter makes the adopter of a member of a cluster, and starts to adopt if cluster.adopt is set.
func (n *node) openAdopter(level *slog.LevelVar) {
	if n.cluster == nil || n.adoptedBy != "" {
		return
	}
	a := &adopter{n: n, level: level, retries: make(map[string]retry), elsewhere: make(map[string]string), guests: make(map[string]*guest)}
	a.life, a.stop = context.WithCancel(context.Background())
	n.adopter = a
	if n.cfg.Cluster.Adopt {
		a.wg.Go(func() { n.cluster.FollowStores(a.life, a.adoptFree) })
	}
	n.onClose(a.close)
}

// close gives the adopted volumes up. It returns an error if that takes until ctx ends, for example
// because the file system of an adopted node hangs.
func (a *adopter) close(ctx context.Context) error {
	a.mu.Lock()
	a.stop()
	a.mu.Unlock()
	ended := make(chan struct{})
	go func() {
		a.wg.Wait()
		close(ended)
	}()
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("the adopted volumes could not be given up in time; their leases end with the process: %w", context.Cause(ctx))
	}
}

// begin runs f in a goroutine, for which close waits. It returns false if the node is about to end.
func (a *adopter) begin(f func()) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.life.Err() != nil {
		return false
	}
	a.wg.Go(f)
	return true
}

// adoptFree adopts the stores without an owner whose volumes are here.
func (a *adopter) adoptFree(all []membership.StoreState) {
	for _, s := range all {
		last := a.retries[s.ID]
		if s.Owner != nil {
			delete(a.elsewhere, s.ID)
		}
		if s.Owner != nil || s.Claimed || s.Fence == 0 || s.ID == a.n.storeID || time.Now().Before(last.after) || a.replaced(all, s) != nil {
			continue
		}
		dirs, err := a.locate(a.life, s)
		if err != nil {
			if why := err.Error(); a.elsewhere[s.ID] != why && a.life.Err() == nil {
				a.elsewhere[s.ID] = why
				a.n.log.Warn("this node cannot adopt the shared volumes of a node", "of", s.Node, "volumes", commaList(s.Dirs), "err", err)
			}
			continue
		}
		_, err = a.adopt(s, dirs)
		var owned *membership.OwnedError
		switch {
		case err == nil:
			delete(a.retries, s.ID)
		case a.life.Err() != nil, errors.As(err, &owned): // another member was first
		default:
			next := last.failed(time.Now(), a.n.cfg.Cluster.LeaseTTL.Std())
			a.retries[s.ID] = next
			a.n.log.Warn("could not adopt the shared volumes of a node", "of", s.Node, "volumes", commaList(s.Dirs), "next_try_in", next.wait, "err", err)
		}
	}
}

// replaced returns an error if the node of the store s has other volumes: an adopted node would take the
// name of that node in the list of members.
func (a *adopter) replaced(all []membership.StoreState, s membership.StoreState) error {
	for _, other := range all {
		if other.ID != s.ID && other.Node == s.Node && other.Revision > s.Revision {
			return fmt.Errorf("node %s has other volumes: %s", s.Node, commaList(other.Dirs))
		}
	}
	if s.Node == a.n.cfg.Node {
		return fmt.Errorf("node %s is this node, which has other volumes", s.Node)
	}
	return nil
}

// locate returns the directories of a store's shared volumes on this host.
func (a *adopter) locate(ctx context.Context, s membership.StoreState) (dirs []string, err error) {
	for _, place := range s.Dirs {
		dir, err := a.n.cfg.Cluster.DirOf(place)
		if err != nil {
			return nil, fmt.Errorf("volume %s of node %s: %w", place, s.Node, err)
		}
		id, _, err := sharedStoreIn(ctx, dir)
		switch {
		case errors.Is(err, os.ErrNotExist), errors.Is(err, blockio.ErrNotExist):
			remedy := "mount its file system there, or correct cluster.mounts"
			if dir == place {
				remedy = "mount its file system there, or name its mount point in cluster.mounts of both nodes and restart them"
			}
			return nil, fmt.Errorf("volume %s of node %s is not at %s on this host: %s: %w", place, s.Node, dir, remedy, err)
		case err != nil:
			return nil, fmt.Errorf("volume %s of node %s: %w", place, s.Node, err)
		case id != s.ID:
			return nil, fmt.Errorf("volume %s of node %s: %s on this host has a volume of another node", place, s.Node, dir)
		}
		dirs = append(dirs, dir)
	}
	if len(dirs) == 0 {
		return nil, fmt.Errorf("etcd has no shared volumes of node %s", s.Node)
	}
	return dirs, nil
}

// sharedStoreIn returns the id and the newest fencing number of the store whose shared volume is dir.
func sharedStoreIn(ctx context.Context, dir string) (id string, fence uint32, err error) {
	if _, err := os.Stat(dir); err != nil {
		return "", 0, err // posixio makes missing directories
	}
	d, err := posixio.Open(dir, posixio.Options{})
	if err != nil {
		return "", 0, err
	}
	id, fence, err = blockstore.SharedStore(ctx, d)
	return id, fence, errors.Join(err, d.Close())
}

// adopt starts a node on the volumes of a store, which are in dirs, and serves it until this node ends, the store's own
// node wants it, or another process has it.
func (a *adopter) adopt(s membership.StoreState, dirs []string) (*guest, error) {
	a.adopting.Lock()
	defer a.adopting.Unlock()
	if a.life.Err() != nil {
		return nil, errEnding
	}
	began := time.Now()
	cfg, err := guestConfig(a.n.cfg, s, dirs)
	if err != nil {
		return nil, err
	}
	log := a.n.log.With("adopted", s.Node)
	from := source[config.Config]{cfg: cfg, read: func() (config.Config, error) { return cfg, nil }}
	n, err := startNodeIn(a.life, a.n, from, a.level, log)
	if err != nil {
		return nil, err
	}
	g := &guest{node: n, since: time.Now(), took: time.Since(began)}
	g.life, g.giveUp = context.WithCancel(a.life)
	err = a.n.keys.addGuest(a.life, n, func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.guests[s.ID] = g
	})
	if err != nil {
		g.giveUp()
		return nil, errors.Join(err, n.close(context.WithoutCancel(a.life)))
	}
	log.Info("adopted the shared volumes of a node", "volumes", commaList(dirs), "fence", n.fence, "listen", n.control.Addr().String(),
		"blocks", n.storage.Recovered().Blocks, "took", g.took.Round(time.Millisecond))
	a.wg.Go(func() { a.serve(s.ID, g) })
	return g, nil
}

// adoptWithin is adopt for a caller that waits until ctx ends. The adoption continues after that, because
// an opening of volumes cannot be interrupted.
func (a *adopter) adoptWithin(ctx context.Context, s membership.StoreState, dirs []string) (*guest, error) {
	type adopted struct {
		guest *guest
		err   error
	}
	ended := make(chan adopted, 1)
	ok := a.begin(func() {
		g, err := a.adopt(s, dirs)
		if err != nil {
			a.n.log.Warn("could not adopt the shared volumes of a node", "of", s.Node, "volumes", commaList(s.Dirs), "err", err)
		}
		ended <- adopted{g, err}
	})
	if !ok {
		return nil, errEnding
	}
	select {
	case r := <-ended:
		return r.guest, r.err
	case <-ctx.Done():
		return nil, fmt.Errorf("the adoption continues; penstock volume list shows its end: %w", context.Cause(ctx))
	}
}

var errEnding = errors.New("this node is about to end")

func (a *adopter) serve(id string, g *guest) {
	n, ctx, cancel := g.node, g.life, g.giveUp
	defer cancel()
	defer n.live.run(ctx, nil)() // follows changed files of tokens and certificates
	go func() {
		defer cancel()
		select {
		case <-n.owner.Wanted():
		case <-n.owner.Lost():
		case <-ctx.Done():
		}
	}()
	err := serveUntil(ctx, n.log, n.live, func() error { return n.server.Serve(n.control, n.web) }, n.close)
	a.mu.Lock()
	delete(a.guests, id)
	a.mu.Unlock()
	n.log.Info("gave the adopted volumes up", "wanted", isClosed(n.owner.Wanted()), "taken", isClosed(n.owner.Lost()), "err", err)
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// guestConfig returns the configuration of an adopted node: that of this node with the store's name and
// capacity, and with its shared volumes, which are in dirs.
func guestConfig(cfg config.Config, s membership.StoreState, dirs []string) (config.Config, error) {
	cfg.Node, cfg.Data, cfg.SharedData, cfg.Capacity = s.Node, nil, dirs, config.Size(s.CapacityBytes)
	cfg.Encryption.PlainVolumes, cfg.Encryption.EpochKeys = nil, false // the superblocks of the store have the choices of its own node
	cfg.AddVolumes, cfg.Segment, cfg.Prewrite = false, 0, false
	cfg.HTTP, cfg.LocalSocket = "", ""
	cfg.Trace = config.Trace{}
	cfg.Cluster.Adopt = false
	// The store's own node waits for the volumes for three lease_ttl.
	cfg.DrainWithin = min(cfg.DrainWithin, cfg.Cluster.LeaseTTL)
	cfg.Arena = cfg.Cluster.AdoptArena
	cfg.Limits.ReadBytes, cfg.Limits.WriteBytes, cfg.Limits.LoanBytes, cfg.Limits.StagingBytes = 0, 0, 0, 0
	for _, addr := range []*string{&cfg.Listen, &cfg.DataListen} {
		host, _, err := net.SplitHostPort(*addr)
		if err != nil {
			return cfg, fmt.Errorf("an adopted node needs ports of its own, which %s does not have", *addr)
		}
		// An advertised address has a fixed port, so a free one is found before the node listens.
		l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
		if err != nil {
			return cfg, err
		}
		*addr = l.Addr().String()
		if err := l.Close(); err != nil {
			return cfg, err
		}
		if _, port, err := net.SplitHostPort(*addr); err == nil {
			*addr = net.JoinHostPort(host, port)
		}
	}
	cfg.EnsureDefaults()
	return cfg, cfg.Validate()
}

// serving returns the adopted nodes. It returns none if a is nil.
func (a *adopter) serving() []*guest {
	if a == nil {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Collect(maps.Values(a.guests))
}

// Adopt implements server.Adopter.
func (a *adopter) Adopt(ctx context.Context, path string, dryRun bool) (*pb.AdoptVolumeResponse, error) {
	path = filepath.Clean(path)
	id, fence, err := sharedStoreIn(ctx, path)
	if err != nil {
		return nil, err
	}
	s, err := a.n.cluster.StoreOf(ctx, id)
	if err != nil {
		return nil, err
	}
	if s.Fence == 0 {
		return nil, fmt.Errorf("etcd has no record of the store %s: it is of another cluster, or etcd was lost; start its node again", id)
	}
	dirs, err := a.locate(ctx, s)
	if err != nil {
		return nil, err
	}
	resp := &pb.AdoptVolumeResponse{Store: id, Node: s.Node, Paths: dirs, Fence: max(fence, s.Fence)}
	if s.Owner != nil {
		resp.Owner, resp.OwnerProcess, resp.OwnerLeaseMs = s.Owner.By, s.Owner.Identity, s.LeaseTTL.Milliseconds()
	}
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if _, ok := ondisk.ParseSegmentName(e.Name()); !ok {
				continue
			}
			info, err := e.Info()
			if err != nil {
				return nil, err
			}
			resp.Segments++
			resp.SegmentBytes += info.Size()
		}
	}
	switch {
	case dryRun:
		return resp, nil
	case s.Owner != nil:
		return nil, &membership.OwnedError{Owner: *s.Owner}
	case !slices.Contains(dirs, path):
		return nil, fmt.Errorf("the volumes of node %s are looked for in %s: give one of these directories, or name the mount point in cluster.mounts of both nodes and restart them", s.Node, strings.Join(dirs, ", "))
	}
	all, err := a.n.cluster.Stores(ctx)
	if err != nil {
		return nil, err
	}
	if err := a.replaced(all, s); err != nil {
		return nil, err
	}
	g, err := a.adoptWithin(ctx, s, dirs)
	if err != nil {
		return nil, err
	}
	resp.Fence, resp.Adopted = g.node.fence, g.describe(id)
	return resp, nil
}

// Adopted implements server.Adopter.
func (a *adopter) Adopted() []*pb.AdoptedNode {
	a.mu.Lock()
	defer a.mu.Unlock()
	var all []*pb.AdoptedNode
	for id, g := range a.guests {
		all = append(all, g.describe(id))
	}
	slices.SortFunc(all, func(x, y *pb.AdoptedNode) int { return strings.Compare(x.Node, y.Node) })
	return all
}

func (g *guest) describe(id string) *pb.AdoptedNode {
	st := g.node.storage.Stats()
	return &pb.AdoptedNode{
		Node: g.node.cfg.Node, Store: id, Addr: g.node.control.Addr().String(), Paths: g.node.cfg.SharedData, Fence: g.node.fence,
		Blocks: st.Store.Slots.Live, UsedBytes: st.Store.Slots.UsedBytes(), SinceUnixMs: g.since.UnixMilli(), TookMs: g.took.Milliseconds(),
		Pending: g.node.server.PendingErasures(),
	}
}
