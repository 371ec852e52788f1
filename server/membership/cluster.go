package membership

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/internal/options"
	"github.com/penstock-kv/penstock/server/storage"
)

// Options configures a Cluster. Endpoints, Member.Name, Member.Addr and Node are required.
type Options struct {
	// Endpoints are the addresses of etcd's members, host:port.
	Endpoints []string
	// Prefix is the beginning of the cluster's keys. Default /penstock.
	Prefix string
	// TLS, if not nil, protects the connections to etcd. Username and Password are those of the
	// node's user in etcd; "": none.
	TLS                *tls.Config
	Username, Password string
	// TTL is the time after which a member that has vanished is no longer in the list, at least 2 s,
	// in whole seconds. Default 10 s.
	TTL time.Duration
	// Member has the name, address, zone and version of this node. The other fields are not used.
	Member Member
	// Usage returns the use of the store. Nil: it is zero.
	Usage func() Usage
	// Details returns the NICs, volumes and hot prefixes of the node. Nil: it has none.
	Details func() Details
	// Held, if not nil, returns an error while the process may not own the node's shared volumes
	// (Owner.Held). Admit then refuses: another process may serve the volumes under the node's name.
	Held func() error
	// Move returns the state of the copies while the node drains. Nil: it is always zero.
	Move func() Move
	// Copies returns the counters of the copies of the process. Nil: they are zero.
	Copies func() Copies
	// Node is the node that follows the cluster's namespaces.
	Node *storage.Node
	// Followed has the revisions of the namespaces that Node has applied. The memberships of one Node in one process share it. Nil: the
	// Node has this membership only.
	Followed *Followed
	// Clock measures the time of the lease. Nil: CLOCK_BOOTTIME.
	Clock  Clock
	Logger *slog.Logger
}

// Usage is the use of a node's store; see the fields of Member.
type Usage struct {
	CapacityBytes, UsedBytes, Blocks, Leases int64
}

// EnsureDefaults fills the fields that are zero.
func (o *Options) EnsureDefaults() {
	options.SetDefault(&o.Prefix, "/penstock")
	options.SetDefault(&o.TTL, 10*time.Second)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Move == nil {
		o.Move = func() Move { return Move{} }
	}
	if o.Copies == nil {
		o.Copies = func() Copies { return Copies{} }
	}
	if o.Details == nil {
		o.Details = func() Details { return Details{} }
	}
	if o.Usage == nil {
		o.Usage = func() Usage { return Usage{} }
	}
}

// Validate returns an error for the first invalid field.
func (o *Options) Validate() error {
	switch {
	case len(o.Endpoints) == 0:
		return errors.New("membership: Endpoints is empty")
	case !strings.HasPrefix(o.Prefix, "/") || strings.HasSuffix(o.Prefix, "/"):
		return fmt.Errorf("membership: Prefix %q; it must begin with a slash and not end with one", o.Prefix)
	case o.Member.Name == "" || strings.Contains(o.Member.Name, "/"):
		return fmt.Errorf("membership: member name %q; it must not be empty or contain a slash", o.Member.Name)
	case o.Member.Addr == "":
		return errors.New("membership: Member.Addr is empty")
	case o.TTL < 2*time.Second || o.TTL%time.Second != 0:
		return fmt.Errorf("membership: TTL %v; it must be whole seconds, at least 2", o.TTL)
	case o.Node == nil:
		return errors.New("membership: Node is nil")
	}
	return nil
}

// refusal is an error with the status that a client receives for it.
type refusal struct {
	error
	code codes.Code
}

func (r refusal) Unwrap() error              { return r.error }
func (r refusal) GRPCStatus() *status.Status { return status.New(r.code, r.Error()) }

// errNoLease is the error of Admit while the node has no lease in etcd. Clients treat every error
// of Admit as Busy: they keep their session with the node, and do not try again at once.
var errNoLease = refusal{errors.New("this node has no lease in etcd at the moment, so it may have missed new weights, and serves nothing"), codes.ResourceExhausted}

// Cluster is one node's membership of a cluster. All methods may be called concurrently.
type Cluster struct {
	opts Options
	node *storage.Node
	log  *slog.Logger

	// serves is the time for which the node may serve.
	serves *validity
	// blocked has the namespaces whose calls the node refuses, because it could not apply a change
	// of the namespace, with the error; nil if there is none. A stored map does not change.
	blocked atomic.Pointer[map[string]error]
	// removed is the error of Admit while the node is removed from the cluster; nil if it is not.
	removed atomic.Pointer[refusal]

	etcd   *etcdClient
	cancel context.CancelFunc
	wg     sync.WaitGroup
	// wake makes the session write the member's record.
	wake chan struct{}

	mu       sync.Mutex
	session  *session      // nil: the node is not a member
	applied  *appliedWatch // of the changes that wait; nil or ended: none waits
	stopping bool
	// drain is the order to drain this node, nil if there is none. drainChanged is closed when it
	// changes.
	drain        *Drain
	drainChanged chan struct{}
	// fill is the order to fill members, nil if there is none. fillChanged is closed when it changes.
	fill        *Drain
	fillChanged chan struct{}
	// lastMove is the last state that the copies of this node had.
	lastMove Move
	// joined is closed when the node serves for the first time.
	joined chan struct{}
	once   sync.Once
}

// Join starts a goroutine that makes the node a member of the cluster. It does not wait for etcd.
// Until the node is a member, Admit returns an error.
func Join(o Options) (*Cluster, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	c := &Cluster{opts: o, etcd: newEtcdClient(o.Endpoints, o.TLS, o.Username, o.Password, o.TTL), node: o.Node, log: o.Logger, serves: newValidity(o.TTL, o.Clock), cancel: cancel, wake: make(chan struct{}, 1), joined: make(chan struct{}), drainChanged: make(chan struct{}), fillChanged: make(chan struct{})}
	c.wg.Go(func() { c.run(ctx) })
	return c, nil
}

// Joined is closed when the node has become a member for the first time.
func (c *Cluster) Joined() <-chan struct{} { return c.joined }

// Admit returns nil if the node may serve a call on the namespace. An empty name means the node
// in general. Otherwise the error has a gRPC status.
func (c *Cluster) Admit(namespace string) error {
	if !c.serves.holds() {
		if removed := c.removed.Load(); removed != nil {
			return *removed
		}
		return errNoLease
	}
	if c.opts.Held != nil {
		if err := c.opts.Held(); err != nil {
			return refusal{fmt.Errorf("this node may not own its shared volumes at the moment, and serves nothing: %w", err), codes.ResourceExhausted}
		}
	}
	if b := c.blocked.Load(); b != nil {
		if err := (*b)[namespace]; err != nil {
			return err
		}
	}
	return nil
}

// Refused returns the number of namespaces that Admit refuses because a change could not be applied.
func (c *Cluster) Refused() int {
	if b := c.blocked.Load(); b != nil {
		return len(*b)
	}
	return 0
}

func (c *Cluster) isBlocked(name string) bool {
	b := c.blocked.Load()
	return b != nil && (*b)[name] != nil
}

// block makes Admit return err for a namespace. With a nil err, Admit admits the namespace again.
func (c *Cluster) block(name string, err error) {
	if err == nil && c.blocked.Load() == nil {
		return
	}
	next := make(map[string]error)
	if b := c.blocked.Load(); b != nil {
		maps.Copy(next, *b)
	}
	delete(next, name)
	if err != nil {
		next[name] = refusal{fmt.Errorf("this node could not apply the cluster's last change of namespace %q, and does not serve it until it can: %w", name, err), codes.ResourceExhausted}
	}
	if len(next) == 0 {
		c.blocked.Store(nil)
		return
	}
	c.blocked.Store(&next)
}

func (c *Cluster) membersPrefix() string    { return c.opts.Prefix + "/members/" }
func (c *Cluster) namespacesPrefix() string { return namespacesPrefix(c.opts.Prefix) }

// namespacesPrefix begins the keys of the namespaces of a cluster.
func namespacesPrefix(prefix string) string { return prefix + "/namespaces/" }

// run runs one session (the time of one lease in etcd) after the other until ctx ends.
func (c *Cluster) run(ctx context.Context) {
	const first, longest = 100 * time.Millisecond, 2 * time.Second
	wait, said := first, ""
	for {
		began := time.Now()
		err := c.runSession(ctx)
		if ctx.Err() != nil {
			return
		}
		c.noteRemoved(err)
		if time.Since(began) > c.opts.TTL {
			wait, said = first, ""
		}
		if text := err.Error(); text != said {
			c.log.Warn("not a member of the cluster: this node serves nothing until it has joined", "etcd", c.opts.Endpoints, "err", err)
			said = text
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return
		}
		wait = min(2*wait, longest)
	}
}

// Stop makes the node's state stopping in the list of members. It does not wait for etcd.
func (c *Cluster) Stop() {
	c.mu.Lock()
	c.stopping = true
	c.mu.Unlock()
	c.touch()
}

// touch makes the session write the member's record, if it has changed.
func (c *Cluster) touch() {
	select {
	case c.wake <- struct{}{}:
	default: // the record will be written anyway
	}
}

// Close leaves the cluster: it revokes the node's lease, and Admit then returns an error. Close
// returns ctx's error if etcd does not confirm the end of the lease in time; the lease then ends by
// itself.
func (c *Cluster) Close(ctx context.Context) error {
	c.serves.end()
	c.cancel()
	c.wg.Wait()
	c.serves.end()
	c.mu.Lock()
	s := c.session
	c.mu.Unlock()
	var err error
	if s != nil {
		_, err = s.etcd.Revoke(ctx, s.lease)
	}
	return errors.Join(err, c.etcd.close())
}

// Members returns the records of all members, sorted by name. A member with an order to drain is
// Draining from the moment of the order, whether or not the member has seen the order. A member that is
// being removed is not in the list.
func (c *Cluster) Members(ctx context.Context) ([]Member, error) {
	list, err := c.List(ctx)
	return list.Members, err
}

// Listing is the state of the members of a cluster.
type Listing struct {
	// Members is the result of Cluster.Members.
	Members []Member
	// Removed are the names of the nodes that were removed and that no other node has.
	Removed []string
	// LastFill is the end of the last order to fill members that has ended; nil: none has.
	LastFill *FillEnd
	// Details are those of the members, by name, as of their last records. Down are the records of the nodes that
	// have joined and are neither members nor removed, sorted by name. Both are nil in the result of List.
	Details map[string]Details
	Down    []NodeRecord
}

// List returns the state of the members, as of one revision of etcd.
func (c *Cluster) List(ctx context.Context) (Listing, error) {
	return c.list(ctx, false)
}

// ListNodes is List with the details of the members, and with the nodes that are down.
func (c *Cluster) ListNodes(ctx context.Context) (Listing, error) {
	return c.list(ctx, true)
}

func (c *Cluster) list(ctx context.Context, nodes bool) (list Listing, err error) {
	reads := []clientv3.Op{
		clientv3.OpGet(c.drainsPrefix(), clientv3.WithPrefix()),
		clientv3.OpGet(c.membersPrefix(), clientv3.WithPrefix()),
		clientv3.OpGet(c.removedPrefix(), clientv3.WithPrefix()),
		clientv3.OpGet(c.fillsPrefix(), clientv3.WithPrefix()),
		clientv3.OpGet(c.fillEndKey()),
	}
	if nodes {
		reads = append(reads, clientv3.OpGet(c.nodesPrefix(), clientv3.WithPrefix()))
	}
	resp, err := c.do(ctx, clientv3.OpTxn(nil, reads, nil))
	if err != nil {
		return Listing{}, err
	}
	read := func(i int) []*mvccpb.KeyValue { return resp.Txn().Responses[i].GetResponseRange().Kvs }
	draining := make(map[string]*Drain)
	for _, kv := range read(0) {
		d, err := decodeDrain(kv.Key, kv.Value)
		if err != nil {
			return Listing{}, err
		}
		draining[string(kv.Key[len(c.drainsPrefix()):])] = d
	}
	removals := make(map[string]bool)
	for _, kv := range read(2) {
		removals[string(kv.Key[len(c.removedPrefix()):])] = true
	}
	filling := make(map[string]bool)
	var fill *Drain
	for _, kv := range read(3) {
		if fill, err = decodeDrain(kv.Key, kv.Value); err != nil {
			return Listing{}, err
		}
		filling[string(kv.Key[len(c.fillsPrefix()):])] = true
	}
	for _, kv := range read(1) {
		m, err := decodeMember(kv.Key, kv.Value)
		if err != nil {
			return Listing{}, err
		}
		if removals[m.Store] {
			continue
		}
		d := draining[m.Name]
		if d != nil && m.serves() {
			m.State = Draining
		}
		m.Filling = filling[m.Name]
		m.Move = m.Move.of(d, fill)
		list.Members = append(list.Members, m)
	}
	if nodes {
		records, err := newest(read(5))
		if err != nil {
			return Listing{}, err
		}
		list.Details = make(map[string]Details, len(list.Members))
		for _, m := range list.Members {
			if r := records[m.Name]; r.Store == m.Store {
				list.Details[m.Name] = r.Details
			}
			delete(records, m.Name)
		}
		for name, r := range records {
			if !removals[r.Store] {
				r.Move = r.Move.of(draining[name], nil)
				list.Down = append(list.Down, r.NodeRecord)
			}
		}
		slices.SortFunc(list.Down, func(a, b NodeRecord) int { return strings.Compare(a.Name, b.Name) })
	}
	for _, kv := range read(4) {
		if list.LastFill, err = decodeFillEnd(kv); err != nil {
			return Listing{}, err
		}
	}
	if len(removals) > 0 {
		list.Removed, err = c.removedNames(ctx)
	}
	return list, err
}

// members returns the members and the revision at which they were read.
func (c *Cluster) members(ctx context.Context) ([]Member, int64, error) {
	resp, err := c.get(ctx, c.membersPrefix(), clientv3.WithPrefix())
	if err != nil {
		return nil, 0, err
	}
	all := make([]Member, 0, len(resp.Kvs))
	for _, kv := range resp.Kvs {
		m, err := decodeMember(kv.Key, kv.Value)
		if err != nil {
			return nil, 0, err
		}
		all = append(all, m)
	}
	return all, resp.Header.Revision, nil
}

// get reads from etcd for an admin call, for at most the TTL.
func (c *Cluster) get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	etcd := c.etcd.opened()
	if etcd == nil {
		return nil, c.failed(errors.New("not connected yet"))
	}
	ctx, cancel := context.WithTimeout(ctx, c.opts.TTL)
	defer cancel()
	resp, err := etcd.Get(ctx, key, opts...)
	if err != nil {
		return nil, c.failed(err)
	}
	return resp, nil
}

// failed describes an error of etcd for the caller of an admin call.
func (c *Cluster) failed(err error) error {
	code := codes.Unavailable
	if errors.Is(err, context.Canceled) {
		code = codes.Canceled
	}
	return refusal{fmt.Errorf("etcd at %s: %w", strings.Join(c.opts.Endpoints, ","), err), code}
}
