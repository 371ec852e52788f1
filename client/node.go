package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/rdma"
)

// session is one successful connection to a node: gRPC and data plane. It is immutable. A node that
// restarts gets a new session.
type session struct {
	conn  *grpc.ClientConn
	cache pb.CacheClient
	admin pb.AdminClient

	name, version string
	engine        rdma.EngineID
	transport     *transport // messages over the data plane
	readBytes     int64      // largest payload of one Read
	writeBytes    int64      // largest payload of one Reserve
	chainBlocks   int
	fragments     bool // a Read call may name fragments as destinations
	suffixes      bool // a Read call may begin in the middle of a chain
	// localID is the ID that the node sends on its unix socket; zero if it has no socket.
	localID api.LocalID
	// localSocket is the path of that socket, on the node's host.
	localSocket string
	localMatch  bool // the socket takes Match calls
	existsCalls bool // Exists may be a call on the socket, or a message
	cluster     bool // the node has a cluster
	// stagingBytes is the size of the staging memory that the node lends for the bytes of a write
	// over the socket; 0 if the node takes no writes over the socket.
	stagingBytes int64
}

// node is one storage node.
//
//	(none) ──attempt──► session ──call fails──► (none, lost)
//	                                               │ the next call tries at once, and waits
//	                  ◄────────success─────────────┤
//	                                               ▼ failure
//	                  ◄───success─── dead until t: calls fail at once;
//	                                 after t one attempt in the background
type node struct {
	store  *Store
	target string
	// seed is the hash of target, the node's input to rendezvous hashing without Options.Discover.
	seed uint64
	// local are the connections to the node's unix socket, if the node is on this host.
	local localConns
	// calling is the number of the Store's Match and Read calls that the node is serving.
	calling atomic.Int64
	// unanswered is about the Match and Read calls since the node's last answer that the node had not
	// answered by their deadlines. It is nil if there are none.
	unanswered atomic.Pointer[unanswered]

	mu      sync.Mutex
	session *session
	// err is the reason why there is no session, and deadUntil the time of the next attempt to
	// connect. Both are zero if no attempt has been made since the session ended.
	err       error
	deadUntil time.Time
	// attempt is closed when the running attempt to connect has ended; nil if there is none.
	attempt chan struct{}
}

// unanswered is how long a node has let calls wait until their deadlines. It is immutable.
type unanswered struct {
	// waited is the time in which at least one of the calls waited, and last the end of the last one.
	waited time.Duration
	last   time.Time
}

func newNode(s *Store, target string) *node {
	return &node{store: s, target: target, seed: xxh3.HashString(target), local: localConns{store: s, all: make(map[*localConn]struct{})}}
}

// use returns the node's session. It opens one if the last was lost. While the node is dead, it
// returns errDown at once. Errors: errDown, also as versionError, ErrAuth, ErrProvider, ErrClosed,
// the error of ctx.
func (n *node) use(ctx context.Context) (*session, error) {
	for {
		n.mu.Lock()
		if n.session != nil {
			sess := n.session
			n.mu.Unlock()
			return sess, nil
		}
		dead := !n.deadUntil.IsZero()
		if n.attempt == nil && (!dead || time.Now().After(n.deadUntil)) {
			attempt := make(chan struct{})
			if !n.store.spawn(func() { n.connect(attempt) }) {
				n.mu.Unlock()
				return nil, fmt.Errorf("client: %s: %w", n.target, ErrClosed)
			}
			n.attempt = attempt
		}
		attempt, err := n.attempt, n.err
		n.mu.Unlock()
		if dead {
			n.store.stats.deadCalls.Add(1)
			return nil, err
		}
		select {
		case <-attempt:
		case <-ctx.Done():
			return nil, fmt.Errorf("client: connect to %s: %w", n.target, ctx.Err())
		}
	}
}

// passOver makes the node dead while an attempt to connect is in progress, so that no call waits for
// that attempt. The node has a session when the attempt succeeds. passOver returns the reason why there is
// no session, or nil.
func (n *node) passOver() error {
	n.mu.Lock()
	passed := n.attempt != nil
	if passed {
		n.err = fmt.Errorf("client: %s has not answered yet: %w", n.target, errDown)
		n.deadUntil = time.Now().Add(n.store.opts.DeadFor)
	}
	err := n.err
	n.mu.Unlock()
	if passed {
		n.store.opts.Logger.Warn("storage node is a miss until it answers", "server", n.target, "err", err)
	}
	return err
}

// connect makes one attempt to open a session and records the result.
func (n *node) connect(attempt chan struct{}) {
	ctx, cancel := context.WithTimeout(n.store.ctx, n.store.opts.DialTimeout)
	defer cancel()
	sess, err := n.open(ctx)
	n.mu.Lock()
	wasDead := !n.deadUntil.IsZero()
	n.session, n.err, n.attempt, n.deadUntil = sess, err, nil, time.Time{}
	if err != nil {
		n.deadUntil = time.Now().Add(n.store.opts.DeadFor)
	}
	n.mu.Unlock()
	log := n.store.opts.Logger
	if err == nil {
		n.store.stats.connects.Add(1) // before close wakes the waiting calls, because they may read the counter
	}
	if err == nil && sess.cluster && !n.store.opts.Discover {
		n.store.apart.Do(func() { log.Warn(apartText, "server", n.target) })
	}
	close(attempt)
	switch {
	case err == nil:
		log.Info("storage node connected", "server", n.target, "node", sess.name, "version", sess.version)
	case !wasDead && n.store.ctx.Err() == nil:
		log.Warn("storage node is a miss until it answers", "server", n.target, "err", err)
	}
}

// apartText is the warning of a Store without Options.Discover that has a node of a cluster.
const apartText = "the storage node has a cluster, and this client has a fixed list of nodes: clients that discover the members of the cluster store sequences on other nodes, and neither finds the blocks of the other; set discover in all clients of the cluster"

// open connects over gRPC, calls Describe, and opens the data plane.
func (n *node) open(ctx context.Context) (*session, error) {
	o := &n.store.opts
	conn, err := Dial(n.target, o.dial())
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrAuth, err)
	}
	sess := &session{conn: conn, cache: pb.NewCacheClient(conn), admin: pb.NewAdminClient(conn)}
	if err := n.describe(ctx, sess); err != nil {
		_ = conn.Close() // err is the error to report
		return nil, err
	}
	return sess, nil
}

func (n *node) describe(ctx context.Context, sess *session) error {
	d, err := sess.cache.Describe(ctx, &pb.DescribeRequest{})
	if status.Code(err) == codes.Unimplemented {
		return versionError{n.target + " does not have the call Describe: it is not a storage node, or a node of another version: check the address, and run the same release of Penstock on both sides"}
	}
	if err != nil {
		// Any failure of the attempt means that the node is down. A timeout is a failure too.
		if err := callError(context.WithoutCancel(ctx), "describe", n.target, err); errors.Is(err, ErrAuth) || errors.Is(err, errDown) {
			return err
		}
		return fmt.Errorf("client: describe: %s: %w: %w", n.target, errDown, err)
	}
	if node, own := providerOf(d), n.store.opts.Engine.Info().Provider; node != own {
		return fmt.Errorf("client: the data plane of %s is of provider %s, Options.Engine of %s: open an engine of provider %s: %w", n.target, node, own, node, ErrProvider)
	}
	sess.name, sess.version = d.GetNode(), d.GetVersion()
	sess.readBytes, sess.writeBytes, sess.chainBlocks = d.GetMaxReadBytes(), d.GetMaxWriteBytes(), int(d.GetMaxChainBlocks())
	sess.fragments, sess.suffixes = d.GetFragments(), d.GetSuffixes()
	copy(sess.localID[:], d.GetLocalId())
	sess.localSocket, sess.localMatch, sess.stagingBytes = d.GetLocalSocket(), d.GetLocalMatch(), d.GetStagingBytes()
	sess.existsCalls, sess.cluster = d.GetExistsCalls(), d.GetCluster()
	var addr rdma.Addr
	err = addr.UnmarshalBinary(d.GetDataAddress())
	if err == nil {
		sess.engine, err = n.connectData(ctx, addr, d.GetDataToken(), d.GetDataPort())
	}
	if err == nil {
		sess.transport, err = n.store.calls.openTransport(sess.engine, d.GetCallVersion(), d.GetCallBytes())
	}
	switch {
	case errors.Is(err, rdma.ErrVersion):
		return versionError{fmt.Sprintf("data plane of %s, whose release is %s: %v: run the same release of Penstock on both sides", n.target, sess.version, err)}
	case err != nil:
		return fmt.Errorf("client: data plane of %s: %w: %w", n.target, errDown, err)
	}
	return nil
}

// providerOf returns the provider of a node's transfer engine.
func providerOf(d *pb.DescribeResponse) string { return cmp.Or(d.GetDataProvider(), "tcp") }

// connectData opens the data plane at the address that the node advertises or, if that fails or
// cannot work, at the host by which the client reached the node's gRPC.
func (n *node) connectData(ctx context.Context, addr rdma.Addr, token rdma.Token, port uint32) (rdma.EngineID, error) {
	var errs []error
	candidates := dataAddresses(addr, hostOf(n.target), port)
	for i, a := range candidates {
		try, cancel := ctx, context.CancelFunc(func() {})
		if deadline, ok := ctx.Deadline(); ok && i < len(candidates)-1 {
			// Leave time for the next address.
			try, cancel = context.WithTimeout(ctx, time.Until(deadline)/2)
		}
		id, err := n.store.opts.Engine.Connect(try, a, token)
		cancel()
		if err == nil {
			return id, nil
		}
		errs = append(errs, err)
	}
	return rdma.EngineID{}, errors.Join(errs...)
}

// dataAddresses returns the addresses to try, best first. A node that listens on every interface,
// or on loopback behind a tunnel, advertises an address that only the node itself can reach. A
// prefix before the host, and a suffix after the port that begins with #, are kept, because they
// belong to the provider's protocol.
func dataAddresses(addr rdma.Addr, host string, port uint32) []rdma.Addr {
	if host == "" || port == 0 {
		return []rdma.Addr{addr}
	}
	var told, scheme, suffix string
	if len(addr.NICs) > 0 {
		told = string(addr.NICs[0])
		if i := strings.Index(told, "://"); i >= 0 {
			scheme, told = told[:i+3], told[i+3:]
		}
		if i := strings.LastIndexByte(told, '#'); i >= 0 {
			told, suffix = told[:i], told[i:]
		}
	}
	own := rdma.NetAddr(scheme + net.JoinHostPort(host, strconv.Itoa(int(port))) + suffix)
	fallback := rdma.Addr{Engine: addr.Engine, NICs: []rdma.NetAddr{own}}
	if len(addr.NICs) == 0 {
		return []rdma.Addr{fallback}
	}
	if len(addr.NICs) == 1 && addr.NICs[0] == own {
		return []rdma.Addr{addr}
	}
	told, _, err := net.SplitHostPort(told)
	if err != nil {
		return []rdma.Addr{addr, fallback}
	}
	ip := net.ParseIP(told)
	if told == "" || ip != nil && ip.IsUnspecified() || isLoopback(told) && !isLoopback(host) {
		return []rdma.Addr{fallback, addr}
	}
	return []rdma.Addr{addr, fallback}
}

// failed handles the error of a call on sess, and returns it. If the error is errDown, it drops the
// session.
func (n *node) failed(sess *session, err error) error {
	if errors.Is(err, errDown) {
		n.drop(sess)
	}
	return err
}

// drop closes the session, unless it has been replaced already. The next call opens a new one.
func (n *node) drop(sess *session) {
	n.mu.Lock()
	if n.session != sess {
		n.mu.Unlock()
		return
	}
	n.session = nil
	n.mu.Unlock()
	n.store.stats.sessionsLost.Add(1)
	_ = sess.conn.Close() // the session is unusable in any case
	sess.transport.close()
}

// dataAlive reports whether the data-plane session is up.
func (n *node) dataAlive(sess *session) bool { return !sess.transport.gone.Load() }

// dataConnected reports whether the data-plane session is up, as the engine reports it. It is more
// current than dataAlive, whose flag is set some time after a session has ended.
func (n *node) dataConnected(sess *session) bool {
	return n.dataAlive(sess) && slices.ContainsFunc(n.store.opts.Engine.Peers(), func(p rdma.Peer) bool { return p.ID == sess.engine })
}

// live is like use, but for calls that move bytes. If the data plane of the session has ended, it
// first replaces the session.
func (n *node) live(ctx context.Context) (*session, error) {
	sess, err := n.use(ctx)
	if err != nil || n.dataAlive(sess) {
		return sess, err
	}
	n.drop(sess)
	return n.use(ctx)
}

// heard records whether the node has answered a Match or Read call from began to now that ended with
// err. The deadline of the call may be noticed by the transport or the node just before ctx ends.
func (n *node) heard(ctx context.Context, began, now time.Time, err error) {
	switch {
	case err == nil:
		if n.unanswered.Load() != nil {
			n.unanswered.Store(nil)
		}
	case errors.Is(err, context.DeadlineExceeded), errors.Is(ctx.Err(), context.DeadlineExceeded):
		if end, ok := ctx.Deadline(); ok && end.Before(now) {
			now = end // the rest of the time is a delay of this process
		}
		for {
			before := n.unanswered.Load()
			next := unanswered{waited: max(0, now.Sub(began)), last: now} // the deadline may be before began
			if before != nil {
				// The part of the call before the end of the last one is counted already.
				next.waited = before.waited + max(0, min(next.waited, now.Sub(before.last)))
				if before.last.After(now) {
					next.last = before.last
				}
			}
			if n.unanswered.CompareAndSwap(before, &next) {
				return
			}
		}
	}
}

// silent reports whether the node has let calls wait until their deadlines, for SilentAfter in all and
// within DeadFor, and has not answered since.
func (n *node) silent() bool { return n.unanswered.Load() != nil && n.silentAt(time.Now()) }

func (n *node) silentAt(now time.Time) bool {
	u := n.unanswered.Load()
	return u != nil && u.waited >= n.store.opts.SilentAfter && now.Before(u.last.Add(n.store.opts.DeadFor))
}

// retry calls f with a session from get. If the connection broke during f, it calls f again, up to
// RetryMax times. f must be safe to repeat.
func (n *node) retry(ctx context.Context, get func(context.Context) (*session, error), f func(*session) error) error {
	for attempt := 0; ; attempt++ {
		sess, err := get(ctx)
		if err != nil {
			return err
		}
		err = n.failed(sess, f(sess))
		if !errors.Is(err, errDown) || attempt >= n.store.opts.RetryMax {
			return err
		}
		n.store.stats.retries.Add(1)
		if err := backOff(ctx, attempt); err != nil {
			return fmt.Errorf("client: %s: %w", n.target, err)
		}
	}
}

// backOff waits before the next attempt. It does not wait before the first retry, because a new
// connection repairs a broken one. Then it waits 10 to 20 ms, and doubles the wait each time.
func backOff(ctx context.Context, attempt int) error {
	if attempt == 0 {
		return ctx.Err()
	}
	base := 10 * time.Millisecond << min(attempt-1, 6)
	timer := time.NewTimer(base + rand.N(base))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// close ends the session. No attempt to connect may be running.
func (n *node) close() {
	n.mu.Lock()
	n.endLocked(fmt.Errorf("client: %s: %w", n.target, ErrClosed), time.Now())
}

// leave ends the session of a node that is no longer a member. Calls that have the node are misses.
func (n *node) leave() {
	n.mu.Lock()
	for n.attempt != nil {
		attempt := n.attempt
		n.mu.Unlock()
		<-attempt
		n.mu.Lock()
	}
	n.endLocked(fmt.Errorf("client: %s has left the cluster: %w", n.target, errDown), time.Now().Add(never))
}

// never is a time after which nothing happens.
const never = 100 * 365 * 24 * time.Hour

// endLocked ends the session with the error err, and unlocks mu.
func (n *node) endLocked(err error, deadUntil time.Time) {
	sess := n.session
	n.session, n.err, n.deadUntil = nil, err, deadUntil
	n.mu.Unlock()
	n.local.close()
	if sess != nil {
		_ = sess.conn.Close() // the connection ends in any case
		sess.transport.close()
		n.store.opts.Engine.Disconnect(sess.engine)
	}
}

// NodeStatus is the Store's view of one node.
type NodeStatus struct {
	// Server is the node's address, as in Options.Servers or in the list of members.
	Server string
	// Up reports whether there is a session. Node and Version are the name and version that the
	// node returned; empty if the node is down.
	Up            bool
	Node, Version string
	// Cluster reports whether the node has a cluster. Without Options.Discover, such a Store does not
	// find the blocks of clients that discover the members, and logs one warning.
	Cluster bool
	// Err is the reason why the node is down, if there is one.
	Err error
}

// Nodes returns the state of each node, in the order of Options.Servers or, with Options.Discover, of
// the members' names. It makes no calls to the nodes.
func (s *Store) Nodes() []NodeStatus {
	nodes := s.all()
	out := make([]NodeStatus, len(nodes))
	for i, n := range nodes {
		n.mu.Lock()
		out[i] = NodeStatus{Server: n.target, Up: n.session != nil, Err: hideInternal(n.err)}
		if n.session != nil {
			out[i].Node, out[i].Version, out[i].Cluster = n.session.name, n.session.version, n.session.cluster
		}
		n.mu.Unlock()
	}
	return out
}
