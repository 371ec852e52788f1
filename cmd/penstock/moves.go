package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/certs"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/membership"
	"github.com/penstock-kv/penstock/server/move"
)

// moves copies blocks of this node to other nodes of its cluster while there is an order to drain this node
// or to fill others, and copies the hot prefixes of this node.
type moves struct {
	node *node
	// addr is the address of this node's control plane.
	addr    string
	cluster *membership.Cluster
	// running is the Mover; nil: there is none. failed is why no Mover could be started; nil: it could.
	running atomic.Pointer[move.Mover]
	failed  atomic.Pointer[error]
	// order identifies the order that is performed.
	order atomic.Int64
	// totals are the counters of all copies.
	totals move.Totals

	stop  context.CancelFunc
	ended sync.WaitGroup
}

// moveRetry is the time after which moves tries again to connect to the cluster.
const moveRetry = time.Second

// start begins to follow the orders.
func (m *moves) start(cluster *membership.Cluster) {
	m.cluster = cluster
	ctx, cancel := context.WithCancel(context.Background())
	m.stop = cancel
	m.ended.Go(func() { m.run(ctx) })
	if m.node.cfg.Cluster.HotMatches > 0 {
		m.ended.Go(func() { m.runHot(ctx) })
	}
}

// close stops the copies. It may be called twice, and on a nil *moves.
func (m *moves) close() {
	if m == nil {
		return
	}
	m.stop()
	m.ended.Wait()
}

// run performs one order after the other until ctx ends. It begins when the node has joined: without this node in the list
// of members, sequences would have other homes.
func (m *moves) run(ctx context.Context) {
	select {
	case <-m.cluster.Joined():
	case <-ctx.Done():
	}
	for ctx.Err() == nil {
		drain, drainChanged := m.cluster.Draining()
		fill, fillChanged := m.cluster.Filling()
		order := drain // it copies the sequences of the nodes that are filled too
		if order == nil {
			order = fill
		}
		if order == nil {
			select {
			case <-drainChanged:
			case <-fillChanged:
			case <-ctx.Done():
			}
			continue
		}
		m.order.Store(order.ID())
		during, cancel := context.WithCancel(ctx)
		m.ended.Go(func() {
			select {
			case <-drainChanged:
			case <-fillChanged:
			case <-during.Done():
			}
			cancel()
		})
		if drain != nil {
			m.node.log.Info("draining: the blocks of this node are copied to the other nodes of the cluster", "since", order.Since)
		} else {
			m.node.log.Info("sequences of this node are copied to the nodes that have joined", "since", order.Since)
			m.ended.Go(func() { m.endFill(during, order.ID()) })
		}
		for during.Err() == nil {
			err := m.copies(during, *order, drain == nil)
			if during.Err() != nil {
				break
			}
			m.node.log.Warn("blocks cannot be copied to other nodes; it is tried again", "err", err)
			m.failed.Store(&err)
			m.cluster.Moved()
			pause(during, moveRetry)
		}
		m.failed.Store(nil)
		cancel()
		m.cluster.Moved()
	}
}

// endFill ends the order to fill nodes when all nodes have copied their sequences. It returns when ctx ends. The node that
// is done last asks soon. The others, which may wait long for a node that is down, ask less often.
func (m *moves) endFill(ctx context.Context, order int64) {
	said, wait := "", moveRetry
	for pause(ctx, wait) {
		if m.state().Phase != membership.MoveDone {
			wait = moveRetry
			continue
		}
		wait = min(2*wait, 10*moveRetry)
		if err := m.cluster.EndFill(ctx, order); err != nil && ctx.Err() == nil && err.Error() != said {
			said = err.Error()
			m.node.log.Warn("the order to fill nodes cannot be ended; it is tried again", "err", err)
		}
	}
}

// copies copies blocks until ctx ends or a copy fails: for an order to drain this node all blocks, otherwise the
// blocks whose homes are nodes that are filled.
func (m *moves) copies(ctx context.Context, order membership.Drain, fill bool) (err error) {
	n := m.node
	store, closeStore, err := m.open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeStore()) }()
	rate := order.BytesPerSecond
	if rate == 0 {
		rate = int64(n.cfg.Cluster.MoveRate)
	}
	var only, yields func(kv.Namespace, kv.BlockID) bool
	if fill {
		only = store.Incoming
		yields = func(ns kv.Namespace, root kv.BlockID) bool { return store.Yields(ns, root, n.cfg.Node) }
		for !store.AnyIncoming() { // without the list of members no sequence would be copied
			if !pause(ctx, moveRetry/10) {
				return ctx.Err()
			}
		}
	}
	mover, err := move.New(move.Options{
		Node: n.storage, To: store, Only: only, Yields: yields, BytesPerSecond: rate, ChunkBytes: m.chunkBytes(), Changed: m.cluster.Moved, Totals: &m.totals, Logger: n.log,
	})
	if err != nil {
		return err
	}
	m.failed.Store(nil)
	m.running.Store(mover)
	defer m.running.Store(nil)
	return mover.Run(ctx)
}

// open opens a client of the cluster without its draining members.
func (m *moves) open(ctx context.Context) (_ *client.Store, closeStore func() error, _ error) {
	n := m.node
	token, err := m.token()
	if err != nil {
		return nil, nil, err
	}
	secure, err := m.clientTLS()
	if err != nil {
		return nil, nil, err
	}
	p := n.plane
	p.tcpNICs = nil // they have the addresses on which the node listens
	dataTLS := secure
	if !n.cfg.Encrypted() {
		dataTLS = nil
	}
	engine, err := p.open(ctx, planeOptions{tls: dataTLS, log: n.log})
	if err != nil {
		return nil, nil, fmt.Errorf("data plane to the other nodes: %w", err)
	}
	store, err := client.Open(ctx, client.Options{
		Servers: []string{m.addr}, Discover: true, SkipDraining: true, MembersEvery: moveRetry, Engine: engine,
		TokenSource: token, TLS: secure, Insecure: secure == nil, Logger: n.log,
	})
	if err != nil {
		return nil, nil, errors.Join(err, engine.Close())
	}
	return store, func() error { return errors.Join(store.Close(), engine.Close()) }, nil
}

// runHot copies the hot prefixes of this node until ctx ends. It connects to the other nodes when there is the first one.
func (m *moves) runHot(ctx context.Context) {
	select {
	case <-m.cluster.Joined():
	case <-ctx.Done():
	}
	for pause(ctx, moveRetry) {
		if len(m.node.storage.HotPrefixes()) == 0 {
			continue
		}
		if err := m.copyHot(ctx); err != nil && ctx.Err() == nil {
			m.node.log.Warn("hot prefixes cannot be copied to other nodes; it is tried again", "err", err)
		}
	}
}

// copyHot copies hot prefixes until ctx ends.
func (m *moves) copyHot(ctx context.Context) (err error) {
	store, closeStore, err := m.open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeStore()) }()
	c := m.node.cfg.Cluster
	copier, err := move.NewHot(move.HotOptions{
		Node: m.node.storage, To: store, Copies: c.HotCopies, BytesPerSecond: int64(c.MoveRate), ChunkBytes: m.chunkBytes(), Logger: m.node.log,
	})
	if err != nil {
		return err
	}
	return copier.Run(ctx)
}

// chunkBytes is the size of one copy: at most 4 MiB, and within the node's limit of a read.
func (m *moves) chunkBytes() int64 {
	limit := int64(m.node.cfg.Limits.ReadBytes)
	if limit == 0 {
		limit = int64(m.node.cfg.Arena) / 4
	}
	return min(4<<20, limit)
}

// token returns a function that returns the bearer token for the other nodes, or nil if they require none. Copies may take
// longer than a token is valid, so each call sends the present one.
func (m *moves) token() (func() string, error) {
	if file := m.node.cfg.Cluster.PeerTokenFile; file != "" {
		token, err := openToken(file, m.node.log)
		if err != nil {
			return nil, fmt.Errorf("cluster.peer_token_file: %w", err)
		}
		return token, nil
	}
	if m.node.live.credentials.FirstToken() == "" {
		return nil, nil
	}
	return m.node.live.credentials.FirstToken, nil
}

// clientTLS returns the configuration of the connections to the other nodes, nil for plain text.
func (m *moves) clientTLS() (*tls.Config, error) {
	auth := m.node.cfg.Auth
	if auth.TLSCert == "" {
		return nil, nil
	}
	pair, err := certs.OpenPair(auth.TLSCert, auth.TLSKey, m.node.log)
	if err != nil {
		return nil, fmt.Errorf("auth.tls_cert: %w", err)
	}
	t := &tls.Config{MinVersion: tls.VersionTLS12}
	pair.SetOn(t)
	if ca := m.node.cfg.Cluster.PeerCA; ca != "" {
		if t.RootCAs, err = certs.Pool(ca); err != nil {
			return nil, fmt.Errorf("cluster.peer_ca: %w", err)
		}
	}
	return t, nil
}

// copied returns the counters for the metrics.
func (m *moves) copied() membership.Copies {
	return membership.Copies{Blocks: m.totals.Blocks.Load(), Bytes: m.totals.Bytes.Load(), Failures: m.totals.Failures.Load()}
}

// state returns the progress for the list of members.
func (m *moves) state() membership.Move {
	mover := m.running.Load()
	if mover == nil {
		if failed := m.failed.Load(); failed != nil {
			return membership.Move{Order: m.order.Load(), Phase: membership.MoveWaiting, Reason: (*failed).Error()}
		}
		return membership.Move{}
	}
	p := mover.Progress()
	return membership.Move{
		Order: m.order.Load(), Phase: membership.MovePhase(p.Phase), Blocks: p.Blocks, Bytes: p.Bytes, CopiedBlocks: p.CopiedBlocks, CopiedBytes: p.CopiedBytes,
		BytesPerSecond: p.BytesPerSecond, Seconds: int64(p.Rest / time.Second), Left: p.Left, Reason: p.Reason, Checked: p.Checked.UTC().Round(0),
	}
}
