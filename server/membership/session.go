package membership

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"

	"github.com/penstock-kv/penstock/trie"
)

// session is the node's membership during one lease in etcd.
type session struct {
	*Cluster
	etcd  *clientv3.Client
	lease clientv3.LeaseID
	key   string
	since time.Time

	mu sync.Mutex
	// renewed is the time of Cluster.serves.now just before the node sent the last renewal that etcd confirmed.
	renewed time.Duration
	state   State
	applied int64 // revision
	// written is the last record in etcd, and writtenAt the time before it was written.
	written   NodeRecord
	writtenAt time.Time
	// leftAfter is the revision up to which followLeaves has seen the ends of leases. Only followLeaves uses it.
	leftAfter int64
	// serving is set when etcd has the member's record with the state serving or draining.
	serving bool

	followed *Followed
}

// Followed has the revisions of the cluster's namespaces that a storage.Node has applied. A membership begins each session without it, because etcd may have
// been restored from a copy, with lower revisions. Several memberships of one Node in one process, as a simulation of many members
// has (Options.Followed), share it: each reads only the records that no other has read. The zero Followed is ready for use.
type Followed struct {
	mu sync.Mutex
	// tried has, by the name of the namespace, the revision of the last record that a session applied or tried to apply.
	tried map[string]int64
	// through is the revision up to which all records have been applied or tried; 0: none.
	through int64
}

// upTo returns the revision up to which all records have been applied or tried.
func (f *Followed) upTo() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.through
}

// reached is called when all records up to a revision have been applied or tried.
func (f *Followed) reached(rev int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.through = max(f.through, rev)
}

// has reports whether a record of a name has been applied or tried.
func (f *Followed) has(name string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, have := f.tried[name]
	return have
}

// runSession gets a lease, joins, and follows the namespaces until the lease is lost or ctx ends.
func (c *Cluster) runSession(ctx context.Context) error {
	etcd, err := c.etcd.open()
	if err != nil {
		return err
	}
	began, sent := time.Now(), c.serves.now()
	limited, cancel := context.WithTimeout(ctx, c.opts.TTL)
	defer cancel()
	grant, err := etcd.Grant(limited, int64(c.opts.TTL/time.Second))
	if err != nil {
		return fmt.Errorf("grant a lease: %w", err)
	}
	s := &session{Cluster: c, etcd: etcd, lease: grant.ID, key: c.membersPrefix() + c.opts.Member.Name, since: began.UTC(), renewed: sent, state: Joining, leftAfter: grant.Revision, followed: c.opts.Followed}
	if s.followed == nil {
		s.followed = new(Followed)
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.renew(ctx) })
	g.Go(func() error { return s.follow(ctx) })
	g.Go(func() error { return s.followDrain(ctx) })
	g.Go(func() error { return s.followFills(ctx) })
	g.Go(func() error { return s.followRemoval(ctx) })
	g.Go(func() error { return s.followLeaves(ctx) })
	err = g.Wait()
	c.serves.end()
	if errors.Is(err, errRemoved) {
		// The node serves nothing from here on, so no change of a namespace must wait for its lease.
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.opts.TTL/4)
		defer cancel()
		if _, e := etcd.Revoke(limited, s.lease); e != nil {
			err = fmt.Errorf("%w; its lease in etcd ends by itself: %w", err, e)
		}
	}
	return err
}

// serveUntilLocked makes Admit admit calls for as long as the lease certainly exists in etcd.
func (s *session) serveUntilLocked() {
	if s.serving {
		s.serves.renewed(s.renewed)
	}
}

// renew keeps the lease alive. It returns when the lease is lost. The first renewal is sent at once,
// because the grant may have taken most of the time for which it lets the node serve.
func (s *session) renew(ctx context.Context) error {
	every := s.opts.TTL / 4
	tick := time.NewTicker(every)
	defer tick.Stop()
	for first := true; ; first = false {
		if !first {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		sent := s.serves.now()
		limited, cancel := context.WithTimeout(ctx, every)
		_, err := s.etcd.KeepAliveOnce(limited, s.lease)
		cancel()
		s.mu.Lock()
		if err == nil {
			s.renewed = sent
			s.serveUntilLocked()
		}
		over := s.serves.now()-s.renewed >= s.opts.TTL
		s.mu.Unlock()
		if errors.Is(err, rpctypes.ErrLeaseNotFound) || over {
			return fmt.Errorf("the lease has ended: %w", cmp.Or(err, errLateAnswer))
		}
	}
}

// errLateAnswer: the answer to a renewal came when the lease could have ended since, for example after a suspension.
var errLateAnswer = errors.New("the answer to its renewal came too late")

// follow joins the cluster, and then applies each change of a namespace.
func (s *session) follow(ctx context.Context) error {
	if err := s.claim(ctx); err != nil {
		return err
	}
	rev, err := s.load(ctx)
	if err != nil {
		return err
	}
	s.once.Do(func() { close(s.joined) })
	s.log.Info("joined the cluster", "etcd", s.opts.Endpoints, "prefix", s.opts.Prefix, "node", s.opts.Member.Name, "namespaces_revision", rev)
	tick := time.NewTicker(s.opts.TTL / 4)
	defer tick.Stop()
	for {
		err := s.watch(ctx, rev, tick.C)
		// Without a leader etcd ends the watch, and changes may be compacted before the next watch
		// begins. Until the namespaces are read again, admin calls wait for this member.
		if !errors.Is(err, rpctypes.ErrNoLeader) && !errors.Is(err, rpctypes.ErrCompacted) {
			return err
		}
		for {
			if rev, err = s.refresh(ctx, rev); err == nil {
				break
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		s.mu.Lock()
		s.applied = rev
		s.mu.Unlock()
	}
}

// claim writes the member's record, in the state joining. The name must be free, or belong to an
// earlier process or session of the same volumes. That process or session has ended, although its
// lease has not, or it has lost the volumes to this process.
func (s *session) claim(ctx context.Context) error {
	resp, err := s.etcd.Get(ctx, s.key)
	if err != nil {
		return fmt.Errorf("read the members: %w", err)
	}
	// A process that has lost its shared volumes must not replace the record of the process that serves
	// them. The check follows the read: if another process becomes the owner after the check, it writes
	// the record, and the transaction of put fails.
	if s.opts.Held != nil {
		if err := s.opts.Held(); err != nil {
			return fmt.Errorf("this process may not own the shared volumes of node %q at the moment: %w", s.opts.Member.Name, err)
		}
	}
	free := clientv3.Compare(clientv3.CreateRevision(s.key), "=", 0)
	if len(resp.Kvs) > 0 {
		other, err := decodeMember(resp.Kvs[0].Key, resp.Kvs[0].Value)
		if err != nil {
			return err
		}
		if other.Store != s.opts.Member.Store {
			return fmt.Errorf("the cluster has a node %q at %s already, with other volumes: give each node its own name (node); the name of a node that has ended is free within %v", other.Name, other.Addr, s.opts.TTL)
		}
		free = clientv3.Compare(clientv3.ModRevision(s.key), "=", resp.Kvs[0].ModRevision)
	}
	removed, err := s.etcd.Get(ctx, s.removedKey())
	if err != nil {
		return fmt.Errorf("read the removed nodes: %w", err)
	}
	if len(removed.Kvs) > 0 {
		return s.wasRemoved()
	}
	s.Cluster.mu.Lock()
	s.Cluster.session = s
	s.Cluster.mu.Unlock()
	ok, err := s.put(ctx, free, clientv3.Compare(clientv3.CreateRevision(s.removedKey()), "=", 0))
	if err == nil && !ok {
		err = fmt.Errorf("another node has taken the name %q", s.opts.Member.Name)
	}
	return err
}

// record returns the node's record as it is now.
func (s *session) record() NodeRecord {
	details := s.opts.Details()
	use := s.opts.Usage()
	move := s.opts.Move()
	s.Cluster.mu.Lock()
	stopping := s.Cluster.stopping
	s.Cluster.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.opts.Member
	m.State, m.Since, m.Applied, m.Move = s.state, s.since, s.applied, move
	m.CapacityBytes, m.UsedBytes, m.Blocks, m.Leases = use.CapacityBytes, use.UsedBytes, use.Blocks, use.Leases
	if stopping && m.State == Serving {
		m.State = Stopping
	}
	return NodeRecord{Member: m, Details: details}
}

// put writes the member's record if all conditions hold.
func (s *session) put(ctx context.Context, conditions ...clientv3.Cmp) (bool, error) {
	at, now := time.Now(), s.record()
	value, err := json.Marshal(now.Member)
	if err != nil {
		return false, fmt.Errorf("membership: %w", err)
	}
	last, err := json.Marshal(s.lastRecord(now))
	if err != nil {
		return false, fmt.Errorf("membership: %w", err)
	}
	limited, cancel := context.WithTimeout(ctx, s.opts.TTL)
	defer cancel()
	resp, err := s.etcd.Txn(limited).If(conditions...).Then(
		clientv3.OpPut(s.key, string(value), clientv3.WithLease(s.lease)), clientv3.OpPut(s.nodesPrefix()+s.opts.Member.Store, string(last)),
	).Commit()
	if err != nil {
		return false, fmt.Errorf("write the member's record: %w", err)
	}
	if resp.Succeeded {
		s.mu.Lock()
		s.written, s.writtenAt = now, at
		s.mu.Unlock()
	}
	return resp.Succeeded, nil
}

// mine is the condition that the record belongs to this session.
func (s *session) mine() clientv3.Cmp {
	return clientv3.Compare(clientv3.LeaseValue(s.key), "=", s.lease)
}

// write writes the member's record if it has changed.
func (s *session) write(ctx context.Context) error {
	now := s.record()
	s.mu.Lock()
	same := now.same(s.written, time.Since(s.writtenAt), s.opts.TTL)
	s.mu.Unlock()
	if same {
		return nil
	}
	ok, err := s.put(ctx, s.mine())
	if err == nil && !ok {
		err = fmt.Errorf("%w %q", errRecordLost, s.opts.Member.Name)
	}
	return err
}

// errRecordLost: the member's record belongs to another lease, or is gone.
var errRecordLost = errors.New("this process has lost its place in the list of members to another with the name")

// hold returns errRecordLost if etcd does not have this session's record. Without the record,
// BumpEpoch on another node would not wait for this node.
func (s *session) hold(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, s.opts.TTL)
	defer cancel()
	resp, err := s.etcd.Txn(limited).If(s.mine()).Commit()
	if err == nil && !resp.Succeeded {
		return fmt.Errorf("%w %q", errRecordLost, s.opts.Member.Name)
	}
	return nil // without an answer of etcd the lease ends
}

// sameButUse reports whether two records differ only by less than a hundredth of the capacity in
// use, less than a tenth of the blocks, and in leases. A record is not written for such a difference.
func sameButUse(a, b Member) bool {
	small := max(a.UsedBytes-b.UsedBytes, b.UsedBytes-a.UsedBytes) <= a.CapacityBytes/100 && max(a.Blocks-b.Blocks, b.Blocks-a.Blocks) <= a.Blocks/10
	a.UsedBytes, a.Blocks, a.Leases = b.UsedBytes, b.Blocks, b.Leases
	return small && a == b
}

// load reads and applies all namespaces, and makes the member serve. It repeats this if a namespace
// changes meanwhile. It returns the revision of the namespaces.
func (s *session) load(ctx context.Context) (int64, error) {
	rev := s.followed.upTo()
	for known := rev > 0; ; known = false { // known: another membership of the Node has read the namespaces
		if !known {
			var err error
			if rev, err = s.refresh(ctx, rev); err != nil {
				return 0, err
			}
			s.followed.reached(rev)
			missing, err := s.bringAlong(ctx)
			if err != nil {
				return 0, err
			}
			if missing {
				continue
			}
		}
		s.mu.Lock()
		s.state, s.applied = Serving, rev
		s.mu.Unlock()
		unchanged := clientv3.Compare(clientv3.ModRevision(s.namespacesPrefix()), "<", rev+1).WithPrefix()
		ok, err := s.put(ctx, s.mine(), unchanged)
		s.mu.Lock()
		if err == nil && ok {
			s.serving = true
			s.serveUntilLocked()
			s.removed.Store(nil)
			s.mu.Unlock()
			return rev, nil
		}
		s.state = Joining
		s.mu.Unlock()
		if err != nil {
			return 0, err
		}
		if err := s.write(ctx); err != nil { // either the record is lost, or a namespace has changed
			return 0, err
		}
	}
}

// pageRecords is the number of records that one request for namespaces returns at most, about 3 MiB. For each page etcd walks the keys
// from the page's first to the last namespace, so the number of pages must not grow with that of namespaces too much.
const pageRecords = 8000

// refresh reads and applies the namespaces that changed after a revision; 0: all of them. It returns the
// revision at which it read them. It reads all of them in pages of one revision, so that neither etcd nor the node has
// all records in one message, and each page has the time of a TTL. Those that changed come in one response,
// because etcd examines all records for each page of them.
func (s *session) refresh(ctx context.Context, after int64) (int64, error) {
	key, rev := s.namespacesPrefix(), int64(0)
	opts := []clientv3.OpOption{clientv3.WithRange(clientv3.GetPrefixRangeEnd(key))}
	if after > 0 {
		opts = append(opts, clientv3.WithMinModRev(after+1))
	} else {
		opts = append(opts, clientv3.WithLimit(pageRecords))
	}
	for {
		limited, cancel := context.WithTimeout(ctx, s.opts.TTL)
		resp, err := s.etcd.Get(limited, key, append(opts, clientv3.WithRev(rev))...)
		cancel()
		if err != nil {
			return 0, fmt.Errorf("read the namespaces: %w", err)
		}
		if rev == 0 {
			rev = resp.Header.Revision
		}
		for _, kv := range resp.Kvs {
			s.apply(ctx, kv)
		}
		if !resp.More || ctx.Err() != nil {
			return rev, ctx.Err()
		}
		key = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
	}
}

// bringAlong adds to etcd the namespaces of the node, and the last epochs of namespaces that the node has deleted, of which
// the session has read no record. It reports whether there was one.
func (s *session) bringAlong(ctx context.Context) (bool, error) {
	records := make(map[string]record)
	ended, _, err := s.node.Ended(ctx)
	if err != nil {
		return false, err
	}
	for name, last := range ended {
		if !s.followed.has(name) {
			records[name] = record{Version: recordVersion, Namespace: endedNamespace(name, last), Deleted: true}
		}
	}
	for _, ns := range s.node.Namespaces() {
		if !s.followed.has(ns.Name) {
			records[ns.Name] = imported(ns)
		}
	}
	for name, r := range records {
		key := s.namespacesPrefix() + name
		value, err := json.Marshal(r)
		if err != nil {
			return false, fmt.Errorf("membership: %w", err)
		}
		_, err = s.etcd.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).Then(clientv3.OpPut(key, string(value))).Commit()
		if err != nil {
			return false, fmt.Errorf("add namespace %q: %w", name, err)
		}
		if !r.Deleted {
			s.log.Info("this node's namespace is a namespace of the cluster", "namespace", name, "epoch", r.Namespace.Epoch)
		}
	}
	return len(records) > 0, nil
}

// watch applies the changes of namespaces after the revision rev, until the watch ends.
func (s *session) watch(ctx context.Context, rev int64, tick <-chan time.Time) error {
	watching, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	changes := s.etcd.Watch(watching, s.namespacesPrefix(), clientv3.WithPrefix(), clientv3.WithRev(rev+1), clientv3.WithProgressNotify())
	// The record is written beside the loop, at most one write at a time. So the changes that arrive during a write
	// have one record together: with many members and many changes, etcd would otherwise get a write for each
	// change and each member.
	written, writing, due := make(chan error, 1), false, true
	defer func() {
		if writing {
			<-written // a later write must not overtake it
		}
	}()
	for {
		if due && !writing {
			writing, due = true, false
			go func() { written <- s.write(ctx) }()
		}
		select {
		case resp, open := <-changes:
			if err := s.take(ctx, resp, open); err != nil {
				return err
			}
			due = true
		case <-tick:
			if err := s.hold(ctx); err != nil {
				return err
			}
			s.retryBlocked(ctx)
			due = true // after an error of the last write, too
		case <-s.wake:
			due = true
		case err := <-written:
			writing = false
			// If etcd does not respond, the next tick writes the record. The lease ends if that lasts.
			switch {
			case ctx.Err() != nil:
				return ctx.Err()
			case errors.Is(err, errRecordLost):
				return err
			case err != nil:
				s.log.Warn("the list of members has an old record of this node", "err", err)
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// take applies a response of the watch of the namespaces.
func (s *session) take(ctx context.Context, resp clientv3.WatchResponse, open bool) error {
	if err := resp.Err(); err != nil {
		return fmt.Errorf("watch the namespaces: %w", err)
	}
	if !open {
		return errors.New("the watch of the namespaces has ended")
	}
	for _, e := range resp.Events {
		s.apply(ctx, e.Kv)
		// The revision in the response's header may be above that of events which come in
		// the next response.
		s.mu.Lock()
		s.applied = max(s.applied, e.Kv.ModRevision)
		s.mu.Unlock()
		s.followed.reached(e.Kv.ModRevision)
	}
	return nil
}

// apply makes the node's namespace equal to a record. If that fails, the node refuses the namespace.
//
// A record that is older than one that was applied is left out: a watch may repeat events, and other
// reads may be ahead of it.
func (s *session) apply(ctx context.Context, kv *mvccpb.KeyValue) {
	name := string(kv.Key[len(s.namespacesPrefix()):])
	f := s.followed
	f.mu.Lock()
	defer f.mu.Unlock()
	if last := f.tried[name]; kv.ModRevision < last || kv.ModRevision == last && !s.isBlocked(name) {
		return
	}
	if f.tried == nil {
		f.tried = make(map[string]int64)
	}
	f.tried[name] = kv.ModRevision
	err := s.follows(ctx, name, kv)
	if err != nil && ctx.Err() == nil {
		s.log.Error("a change of a namespace cannot be applied: this node does not serve the namespace", "namespace", name, "err", err)
	}
	s.block(name, err)
}

func (s *session) follows(ctx context.Context, name string, kv *mvccpb.KeyValue) error {
	if len(kv.Value) == 0 {
		return fmt.Errorf("the key %s was deleted from etcd by hand", path.Clean(string(kv.Key)))
	}
	r, err := decodeRecord(kv.Key, kv.Value)
	if err != nil {
		return err
	}
	if !r.Deleted {
		return s.node.Follow(ctx, r.Namespace, r.Revoked)
	}
	if _, err := s.node.DeleteNamespace(ctx, name, false); err != nil && !errors.Is(err, trie.ErrNamespaceUnknown) {
		return err
	}
	return nil
}

// retryBlocked applies again the records of the namespaces that the node refuses.
func (s *session) retryBlocked(ctx context.Context) {
	b := s.blocked.Load()
	if b == nil {
		return
	}
	for name := range *b {
		resp, err := s.etcd.Get(ctx, s.namespacesPrefix()+name)
		if err != nil {
			return
		}
		if len(resp.Kvs) == 0 {
			continue
		}
		if s.apply(ctx, resp.Kvs[0]); !s.isBlocked(name) {
			s.log.Info("a namespace is served again", "namespace", name)
		}
	}
}
