package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/placement"
	"github.com/penstock-kv/penstock/internal/spread"
	"github.com/penstock-kv/penstock/kv"
)

// Store makes calls to the storage nodes. All methods may be called concurrently.
type Store struct {
	opts Options
	// table has the nodes. It is replaced when members come and go (Options.Discover).
	table atomic.Pointer[table]
	// placements counts the changes of table.
	placements atomic.Uint64
	imms       atomic.Uint32 // the next Read's immediate
	stats      counters
	local      localSocket
	calls      calls
	// hints are the copies of hot prefixes.
	hints hotHints
	// apart makes the Store log apartText once.
	apart sync.Once
	// workers help to copy and to hash large pieces.
	workers *spread.Pool

	// ctx ends when Close begins; running counts the Store's own goroutines.
	ctx     context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup
	// releasing is the number of pins that are awaited, or released in the background.
	releasing atomic.Int64

	mu sync.Mutex
	// closed is set once; no goroutine is added to running after that.
	closed bool
}

// Open connects to all nodes at once, for at most DialTimeout. A node that does not answer is
// tolerated: its blocks are misses until it answers. With Options.Discover, Open does not wait for
// DialTimeout if a member has answered: each other member has four times the time of that member, at
// least a quarter of DialTimeout or one second, whichever is less. If no node answers, Open logs a warning, to
// slog.Default if there is no Logger. Open fails if ctx ends, or if every node refuses the client
// for a reason that a retry does not remove (ErrAuth, ErrProvider, ErrVersion).
func Open(ctx context.Context, opts Options) (*Store, error) {
	warn := opts.Logger
	if warn == nil {
		warn = slog.Default()
	}
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	opts.Servers = slices.Clone(opts.Servers)
	s := &Store{opts: opts, workers: spread.New()}
	s.imms.Store(rand.Uint32())
	s.local.turn = make(chan struct{}, 1)
	s.calls.init(s)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	if err := s.connectAll(ctx, warn); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	s.calls.listen()
	return s, nil
}

// table is a list of nodes. It does not change.
type table struct {
	nodes []*node
	// places[i] is the place of nodes[i]. Without Options.Discover there are none. overfull is
	// placement.Overfull of places.
	places   []placement.Place
	overfull []bool
	// hidden are members that drain, with Options.SkipDraining.
	hidden []*node
}

// all returns the nodes. The slice does not change.
func (s *Store) all() []*node { return s.table.Load().nodes }

func (s *Store) connectAll(ctx context.Context, warn *slog.Logger) error {
	var nodes []*node
	for _, target := range s.opts.Servers {
		nodes = append(nodes, newNode(s, target))
	}
	s.table.Store(&table{nodes: nodes})
	if s.opts.Discover {
		if err := s.discover(ctx, warn); err != nil {
			return err
		}
		nodes = s.all()
	}
	errs := s.connectNodes(ctx, nodes)
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("client: open: %w", err)
	}
	refused, down := 0, 0
	for _, err := range errs {
		if err != nil {
			down++
		}
		if errors.Is(err, ErrAuth) || errors.Is(err, ErrProvider) || errors.Is(err, ErrVersion) {
			refused++
		}
	}
	if refused == len(nodes) {
		return errors.Join(errs...)
	}
	if down == len(nodes) {
		warn.Warn("no storage node answers: all blocks are misses until a node answers", "servers", s.opts.Servers, "err", hideInternal(errors.Join(errs...)))
	}
	return nil
}

// connectNodes opens a session with each node, and returns the errors in the order of the nodes. With
// Options.Discover it passes over the nodes that answer much later than the first.
func (s *Store) connectNodes(ctx context.Context, nodes []*node) []error {
	ctx, cancel := context.WithCancel(ctx)
	var connecting sync.WaitGroup
	defer connecting.Wait()
	defer cancel()
	type result struct {
		node int
		err  error
	}
	began := time.Now()
	results := make(chan result, len(nodes))
	for i, n := range nodes {
		connecting.Go(func() {
			_, err := n.use(ctx)
			results <- result{i, err}
		})
	}
	errs, ended := make([]error, len(nodes)), make([]bool, len(nodes))
	var late <-chan time.Time
	for range nodes {
		select {
		case r := <-results:
			errs[r.node], ended[r.node] = r.err, true
			if r.err == nil && late == nil && s.opts.Discover {
				patience := max(4*time.Since(began), min(s.opts.DialTimeout/4, time.Second))
				late = time.After(patience - time.Since(began))
			}
		case <-late:
			for i, n := range nodes {
				if !ended[i] {
					errs[i] = n.passOver()
				}
			}
			return errs
		}
	}
	return errs
}

// Close ends the connections, fails the running calls, and returns when the Store's goroutines have
// ended. A LocalResult that was not returned stays valid until its Return, and the connection to
// LocalSocket lasts until then. The engine and the registered memory still belong to the caller.
// Close may be called twice.
func (s *Store) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.running.Wait()
	s.local.close()
	t := s.table.Load()
	for _, n := range slices.Concat(t.nodes, t.hidden) {
		n.close()
	}
	return nil
}

// spawn runs f on a goroutine that Close waits for. It reports false if the Store
// is closed.
func (s *Store) spawn(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.running.Go(f)
	return true
}

// Namespace returns the definition of a namespace as the nodes have it. Its Epoch is the newest of
// any node. Calls without an epoch of their own use this Epoch, so an engine calls Namespace when
// it has loaded weights, and keeps the value as long as it keeps the weights. All other fields must
// be equal on all nodes that answer. Errors: ErrNotFound, ErrMismatch (the nodes differ),
// ErrUnavailable, ErrAuth, ErrProvider, ErrVersion (no node is of this client's version), the error
// of ctx.
func (s *Store) Namespace(ctx context.Context, name string) (kv.Namespace, error) {
	nodes := s.all()
	found := make([]kv.Namespace, len(nodes))
	errs := make([]error, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() { found[i], errs[i] = n.namespace(ctx, name) })
	}
	wg.Wait()
	first := -1
	for i, err := range errs {
		switch {
		case errors.Is(err, errDown), errors.Is(err, errBusy):
		case err != nil:
			return kv.Namespace{}, err
		case first < 0:
			first = i
		case !sameNamespace(found[first], found[i]):
			return kv.Namespace{}, fmt.Errorf("client: namespace %q is %v on %s and %v on %s, or differs in tenant, salt or index kind: %w",
				name, found[first].Geometry, nodes[first].target, found[i].Geometry, nodes[i].target, ErrMismatch)
		default:
			found[first].Epoch = max(found[first].Epoch, found[i].Epoch)
		}
	}
	if first < 0 && !slices.ContainsFunc(errs, func(err error) bool { return !errors.Is(err, ErrVersion) }) {
		return kv.Namespace{}, errors.Join(errs...)
	}
	if first < 0 {
		return kv.Namespace{}, fmt.Errorf("client: namespace %q: %w: %w", name, ErrUnavailable, hideInternal(errors.Join(errs...)))
	}
	return found[first], nil
}

// sameNamespace reports whether blocks of a and b have the same ids and bytes.
func sameNamespace(a, b kv.Namespace) bool {
	return a.Tenant == b.Tenant && string(a.Salt) == string(b.Salt) && a.Index == b.Index && a.Geometry.Equal(b.Geometry)
}

// namespace returns the definition that one node has.
func (n *node) namespace(ctx context.Context, name string) (kv.Namespace, error) {
	sess, err := n.use(ctx)
	if err != nil {
		return kv.Namespace{}, err
	}
	m, err := sess.admin.GetNamespace(ctx, &pb.GetNamespaceRequest{Name: name})
	if err != nil {
		return kv.Namespace{}, n.failed(sess, callError(ctx, "get namespace", n.target, err))
	}
	ns, err := api.Namespace(m)
	if err != nil {
		return kv.Namespace{}, fmt.Errorf("client: namespace %q: %s: %w: %w", name, n.target, ErrMismatch, err)
	}
	return ns, nil
}

// chainOf returns the block ids of a request.
func chainOf(ns kv.Namespace, ids []kv.BlockID, tokens []kv.Token) ([]kv.BlockID, error) {
	if len(tokens) == 0 {
		return ids, nil
	}
	if len(ids) > 0 {
		return nil, fmt.Errorf("client: %w: both ids and tokens are given", ErrRequest)
	}
	if ns.Index == kv.IndexFlat {
		return nil, fmt.Errorf("client: %w: tokens in the flat namespace %q; give its keys as ids", ErrRequest, ns.Name)
	}
	chain, err := ns.Chain()
	if err != nil {
		return nil, fmt.Errorf("client: %w: %w", ErrRequest, err)
	}
	ids, _ = chain.Append(make([]kv.BlockID, 0, len(tokens)/ns.Geometry.BlockTokens), tokens)
	return ids, nil
}

// checkNamespace returns an error for an invalid namespace, such as one that did not come from
// Store.Namespace. Every size is computed from the namespace.
func checkNamespace(ns kv.Namespace) error {
	if err := ns.Validate(); err != nil {
		return fmt.Errorf("client: %w: use the namespace that Store.Namespace returned: %w", ErrRequest, err)
	}
	return nil
}
