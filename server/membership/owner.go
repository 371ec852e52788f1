package membership

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/penstock-kv/penstock/internal/options"
)

// OwnerOptions configures an Owner. Endpoints, Node and By are required.
type OwnerOptions struct {
	// Endpoints, Prefix, TLS, Username, Password and TTL are as in Options.
	Endpoints          []string
	Prefix             string
	TLS                *tls.Config
	Username, Password string
	TTL                time.Duration
	// Node is the member whose volumes they are, and By the member in whose process they are served.
	// They differ if By adopts the volumes of Node.
	Node, By string
	// Identity is a line by which an operator recognises the process.
	Identity string
	// Dirs are the places of the shared volumes (StoreRecord.Dirs), and CapacityBytes the capacity of
	// the store. A member that adopts the volumes uses both.
	Dirs          []string
	CapacityBytes int64
	// Clock measures the time of the lease. Nil: CLOCK_BOOTTIME.
	Clock  Clock
	Logger *slog.Logger
}

// OwnerRecord is the process that owns a store.
type OwnerRecord struct {
	Node     string    `json:"node"`
	By       string    `json:"by"`
	Identity string    `json:"identity"`
	Since    time.Time `json:"since"`
	// Instance is random for each Owner.
	Instance string `json:"instance"`
}

// Adopted reports whether the owner serves the volumes of another member.
func (r OwnerRecord) Adopted() bool { return r.Node != r.By }

// StoreRecord is a store on shared volumes.
type StoreRecord struct {
	Version int `json:"version"`
	// Fence is the highest fencing number that was assigned.
	Fence uint32 `json:"fence"`
	// Node is the member whose volumes they are.
	Node string `json:"node"`
	// Dirs are the places of the shared volumes, each an absolute directory, or MOUNT:PATH with a
	// mount that each node names (config.Cluster.Mounts).
	Dirs          []string `json:"dirs"`
	CapacityBytes int64    `json:"capacity_bytes"`
}

// StoreState is a store on shared volumes with its owner.
type StoreState struct {
	ID string
	StoreRecord
	// Owner is nil if no process owns the store.
	Owner *OwnerRecord
	// LeaseTTL is the time until the owner's lease ends unless it is renewed. Only StoreOf sets it.
	LeaseTTL time.Duration
	// Claimed: the store's own node waits for it.
	Claimed bool
	// Revision is the revision of etcd in which the last owner got its fencing number.
	Revision int64
}

// ErrTaken: another process has become the owner of the store. The process must end its use of the
// volumes.
var ErrTaken = errors.New("another process has taken the shared volumes over")

// OwnedError is returned by Acquire if another process owns the store.
type OwnedError struct{ Owner OwnerRecord }

// Error names the owner.
func (e *OwnedError) Error() string {
	if e.Owner.Adopted() {
		return fmt.Sprintf("node %s has adopted these volumes (%s, since %s), and has not given them back", e.Owner.By, e.Owner.Identity, e.Owner.Since.Format(time.RFC3339))
	}
	return fmt.Sprintf("these volumes are in use by node %s (%s, since %s); stop that process, or wait until its lease has ended", e.Owner.By, e.Owner.Identity, e.Owner.Since.Format(time.RFC3339))
}

// Owner is the ownership of one store on shared volumes by a lease in etcd. It implements
// blockstore.Owner. All methods may be called concurrently.
type Owner struct {
	opts OwnerOptions
	etcd *clientv3.Client
	log  *slog.Logger
	// owns is the time for which the process certainly owns the store.
	owns *validity
	// lost is closed when another process has the store, and wanted when its own node waits for it.
	lost, wanted         chan struct{}
	loseOnce, wantedOnce sync.Once
	cancel               context.CancelFunc
	wg                   sync.WaitGroup
	life                 context.Context

	mu     sync.Mutex
	store  string
	lease  clientv3.LeaseID
	record OwnerRecord
	fence  uint32
}

// NewOwner opens the connection to etcd. The caller closes the Owner after the store.
func NewOwner(o OwnerOptions) (*Owner, error) {
	options.SetDefault(&o.Prefix, "/penstock")
	options.SetDefault(&o.TTL, 10*time.Second)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if len(o.Endpoints) == 0 || o.Node == "" || o.By == "" || o.TTL < 2*time.Second || o.TTL%time.Second != 0 {
		return nil, errors.New("membership: an owner needs Endpoints, Node, By, and a TTL of whole seconds, at least 2")
	}
	etcd, err := newEtcdClient(o.Endpoints, o.TLS, o.Username, o.Password, o.TTL).open()
	if err != nil {
		return nil, fmt.Errorf("membership: %w", err)
	}
	w := &Owner{opts: o, etcd: etcd, log: o.Logger, owns: newValidity(o.TTL, o.Clock), lost: make(chan struct{}), wanted: make(chan struct{})}
	w.life, w.cancel = context.WithCancel(context.Background())
	w.record = OwnerRecord{Node: o.Node, By: o.By, Identity: o.Identity, Instance: rand.Text()}
	return w, nil
}

func storesPrefix(prefix string) string { return prefix + "/stores/" }

// The keys of a store: its record, its owner under the owner's lease, and the claim of its own node,
// under the lease with which the node waits.
func (w *Owner) storeKey() string { return storesPrefix(w.opts.Prefix) + w.store + "/store" }
func (w *Owner) ownerKey() string { return storesPrefix(w.opts.Prefix) + w.store + "/owner" }
func (w *Owner) claimKey() string { return storesPrefix(w.opts.Prefix) + w.store + "/claim" }

// Lost is closed when another process has become the owner.
func (w *Owner) Lost() <-chan struct{} { return w.lost }

// Wanted is closed when the store's own node waits for the store, which this process has adopted.
func (w *Owner) Wanted() <-chan struct{} { return w.wanted }

// Held implements blockstore.Owner.
func (w *Owner) Held() error {
	if !w.owns.holds() {
		return errors.New("the lease in etcd has ended or was not renewed in time")
	}
	return nil
}

// Acquire implements blockstore.Owner. The store's own node waits for up to three TTLs, because after a
// crash its earlier lease has not ended yet, and because an adopter needs time to give the volumes
// back. Another member does not wait.
func (w *Owner) Acquire(ctx context.Context, store string) error {
	w.mu.Lock()
	w.store = store
	w.mu.Unlock()
	limited, cancel := context.WithTimeout(ctx, 3*w.opts.TTL)
	defer cancel()
	tick := time.NewTicker(w.opts.TTL / 16)
	defer tick.Stop()
	said := false
	for {
		other, err := w.attempt(limited)
		switch {
		case err != nil:
			return fmt.Errorf("ownership of the shared volumes: etcd at %s: %w", strings.Join(w.opts.Endpoints, ","), err)
		case other == nil:
			w.wg.Go(func() { w.keep(w.life) })
			return nil
		case w.record.Adopted():
			return &OwnedError{*other}
		case !said:
			said = true
			w.log.Warn("waiting for the shared volumes", "owner", other.By, "process", other.Identity, "adopted", other.Adopted())
		}
		select {
		case <-tick.C:
		case <-limited.Done():
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return &OwnedError{*other}
		}
	}
}

// attempt tries once to become the owner, and returns the present owner if there is one. It keeps
// the lease alive, and the claim of the store's own node.
func (w *Owner) attempt(ctx context.Context) (*OwnerRecord, error) {
	sent := w.owns.now()
	w.mu.Lock()
	lease := w.lease
	w.mu.Unlock()
	if lease != 0 {
		if _, err := w.etcd.KeepAliveOnce(ctx, lease); errors.Is(err, rpctypes.ErrLeaseNotFound) {
			lease = 0
		} else if err != nil {
			return nil, err
		}
	}
	if lease == 0 {
		grant, err := w.etcd.Grant(ctx, int64(w.opts.TTL/time.Second))
		if err != nil {
			return nil, err
		}
		lease = grant.ID
	}
	w.mu.Lock()
	w.lease, w.record.Since = lease, time.Now().UTC()
	record := w.record
	w.mu.Unlock()
	value, err := json.Marshal(record)
	if err != nil {
		return nil, err
	}
	resp, err := w.etcd.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(w.ownerKey()), "=", 0)).
		Then(clientv3.OpPut(w.ownerKey(), string(value), clientv3.WithLease(lease)), clientv3.OpDelete(w.claimKey())).
		Else(clientv3.OpGet(w.ownerKey())).Commit()
	if err != nil {
		return nil, err
	}
	if resp.Succeeded {
		w.owns.renewed(sent)
		return nil, nil
	}
	var other OwnerRecord
	kvs := resp.Responses[0].GetResponseRange().Kvs
	if err := json.Unmarshal(kvs[0].Value, &other); err != nil {
		return nil, err
	}
	if other.Adopted() && !w.record.Adopted() {
		if _, err := w.etcd.Put(ctx, w.claimKey(), w.opts.By, clientv3.WithLease(lease)); err != nil {
			return nil, err
		}
	}
	return &other, nil
}

// Fence implements blockstore.Owner.
func (w *Owner) Fence(ctx context.Context, last uint32) (uint32, error) {
	limited, cancel := context.WithTimeout(ctx, w.opts.TTL)
	defer cancel()
	for {
		resp, err := w.etcd.Get(limited, w.storeKey())
		if err != nil {
			return 0, fmt.Errorf("fencing number: %w", err)
		}
		next := StoreRecord{Version: recordVersion, Node: w.opts.Node, Dirs: w.opts.Dirs, CapacityBytes: w.opts.CapacityBytes}
		same := clientv3.Compare(clientv3.CreateRevision(w.storeKey()), "=", 0)
		if len(resp.Kvs) > 0 {
			was, err := decodeStore(resp.Kvs[0].Key, resp.Kvs[0].Value)
			if err != nil {
				return 0, err
			}
			if w.record.Adopted() {
				next = was // the directories are those of the store's own node
			}
			next.Fence = was.Fence
			same = clientv3.Compare(clientv3.ModRevision(w.storeKey()), "=", resp.Kvs[0].ModRevision)
		}
		next.Fence = max(next.Fence, last) + 1
		value, err := json.Marshal(next)
		if err != nil {
			return 0, fmt.Errorf("membership: %w", err)
		}
		w.mu.Lock()
		lease := w.lease
		w.mu.Unlock()
		mine := clientv3.Compare(clientv3.LeaseValue(w.ownerKey()), "=", lease)
		txn, err := w.etcd.Txn(limited).If(mine, same).Then(clientv3.OpPut(w.storeKey(), string(value))).
			Else(clientv3.OpGet(w.ownerKey())).Commit()
		if err != nil {
			return 0, fmt.Errorf("fencing number: %w", err)
		}
		if txn.Succeeded {
			w.mu.Lock()
			w.fence = next.Fence
			w.mu.Unlock()
			return next.Fence, nil
		}
		if kvs := txn.Responses[0].GetResponseRange().Kvs; len(kvs) == 0 || clientv3.LeaseID(kvs[0].Lease) != lease {
			return 0, fmt.Errorf("fencing number: %w", ErrTaken)
		}
	}
}

func decodeStore(key, value []byte) (StoreRecord, error) {
	var r StoreRecord
	if err := json.Unmarshal(value, &r); err != nil {
		return r, fmt.Errorf("membership: etcd key %s: %w", key, err)
	}
	if r.Version != recordVersion {
		return r, fmt.Errorf("membership: etcd key %s has version %d; this program supports version %d: run the same release on all nodes", key, r.Version, recordVersion)
	}
	return r, nil
}

// keep renews the lease until ctx ends or another process has the store. If the lease has ended, it
// gets the ownership back, provided that no other process got a fencing number meanwhile.
func (w *Owner) keep(ctx context.Context) {
	every := w.opts.TTL / 4
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		sent := w.owns.now()
		limited, cancel := context.WithTimeout(ctx, every)
		err := w.renew(limited, sent)
		cancel()
		switch {
		case errors.Is(err, ErrTaken):
			w.owns.end()
			w.loseOnce.Do(func() { close(w.lost) })
			return
		case err != nil && w.Held() != nil && ctx.Err() == nil:
			w.log.Warn("the ownership of the shared volumes is uncertain: nothing is written to them until it is renewed", "err", err)
		}
	}
}

func (w *Owner) renew(ctx context.Context, sent time.Duration) error {
	w.mu.Lock()
	lease := w.lease
	w.mu.Unlock()
	_, err := w.etcd.KeepAliveOnce(ctx, lease)
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return w.regain(ctx, sent)
	}
	if err != nil {
		return err
	}
	// The key is compared as well, so that a key that was deleted by hand is noticed.
	resp, err := w.etcd.Txn(ctx).If(clientv3.Compare(clientv3.LeaseValue(w.ownerKey()), "=", lease)).Then(clientv3.OpGet(w.claimKey())).Commit()
	if err != nil {
		return err
	}
	if !resp.Succeeded {
		return w.regain(ctx, sent)
	}
	w.owns.renewed(sent)
	if len(resp.Responses[0].GetResponseRange().Kvs) > 0 && w.record.Adopted() {
		w.wantedOnce.Do(func() { close(w.wanted) })
	}
	return nil
}

// regain makes this process the owner again after its lease has ended. It returns ErrTaken if another
// process got a fencing number.
func (w *Owner) regain(ctx context.Context, sent time.Duration) error {
	w.owns.end()
	resp, err := w.etcd.Txn(ctx).Then(clientv3.OpGet(w.storeKey()), clientv3.OpGet(w.ownerKey())).Commit()
	if err != nil {
		return err
	}
	w.mu.Lock()
	fence, record := w.fence, w.record
	w.mu.Unlock()
	stores, owners := resp.Responses[0].GetResponseRange().Kvs, resp.Responses[1].GetResponseRange().Kvs
	if len(stores) == 0 {
		return fmt.Errorf("etcd has no record of the store: %w", ErrTaken)
	}
	store, err := decodeStore(stores[0].Key, stores[0].Value)
	if err != nil {
		return err
	}
	if store.Fence != fence {
		return ErrTaken
	}
	if len(owners) > 0 {
		return errors.New("another process is about to take the shared volumes over")
	}
	grant, err := w.etcd.Grant(ctx, int64(w.opts.TTL/time.Second))
	if err != nil {
		return err
	}
	value, err := json.Marshal(record)
	if err != nil {
		return err
	}
	txn, err := w.etcd.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(w.ownerKey()), "=", 0), clientv3.Compare(clientv3.ModRevision(w.storeKey()), "=", stores[0].ModRevision)).
		Then(clientv3.OpPut(w.ownerKey(), string(value), clientv3.WithLease(grant.ID))).Commit()
	if err != nil {
		return err
	}
	if !txn.Succeeded {
		return errors.New("another process is about to take the shared volumes over")
	}
	w.mu.Lock()
	w.lease = grant.ID
	w.mu.Unlock()
	w.owns.renewed(sent)
	w.log.Info("owns the shared volumes again", "fence", fence)
	return nil
}

// Close gives the ownership up. If etcd does not confirm that in time, the lease ends by itself, and
// Close returns the error of ctx.
func (w *Owner) Close(ctx context.Context) error {
	w.owns.end()
	w.cancel()
	w.wg.Wait()
	w.owns.end()
	w.mu.Lock()
	lease := w.lease
	w.mu.Unlock()
	var err error
	if lease != 0 {
		if _, err = w.etcd.Revoke(ctx, lease); errors.Is(err, rpctypes.ErrLeaseNotFound) {
			err = nil
		}
	}
	return errors.Join(err, w.etcd.Close())
}

// Stores returns the stores on shared volumes.
func (c *Cluster) Stores(ctx context.Context) ([]StoreState, error) {
	all, _, err := c.stores(ctx)
	return all, err
}

// StoreOf returns a store on shared volumes by its id, with the time to live of its owner's lease.
func (c *Cluster) StoreOf(ctx context.Context, id string) (StoreState, error) {
	all, err := c.Stores(ctx)
	if err != nil {
		return StoreState{}, err
	}
	for _, s := range all {
		if s.ID != id {
			continue
		}
		if s.Owner != nil {
			resp, err := c.get(ctx, storesPrefix(c.opts.Prefix)+id+"/owner")
			if err != nil {
				return s, err
			}
			if len(resp.Kvs) > 0 {
				ttl, err := c.etcd.opened().TimeToLive(ctx, clientv3.LeaseID(resp.Kvs[0].Lease))
				if err != nil {
					return s, c.failed(err)
				}
				s.LeaseTTL = time.Duration(max(0, ttl.TTL)) * time.Second
			}
		}
		return s, nil
	}
	return StoreState{ID: id}, nil
}

func (c *Cluster) stores(ctx context.Context) ([]StoreState, int64, error) {
	prefix := storesPrefix(c.opts.Prefix)
	resp, err := c.get(ctx, prefix, clientv3.WithPrefix())
	if err != nil {
		return nil, 0, err
	}
	var all []StoreState
	for _, kv := range resp.Kvs { // sorted by key, so the keys of one store follow each other
		id, part, ok := strings.Cut(string(kv.Key[len(prefix):]), "/")
		if !ok {
			continue
		}
		if len(all) == 0 || all[len(all)-1].ID != id {
			all = append(all, StoreState{ID: id})
		}
		s := &all[len(all)-1]
		switch part {
		case "store":
			if s.StoreRecord, err = decodeStore(kv.Key, kv.Value); err != nil {
				return nil, 0, err
			}
			s.Revision = kv.ModRevision
		case "owner":
			s.Owner = new(OwnerRecord)
			if err := json.Unmarshal(kv.Value, s.Owner); err != nil {
				return nil, 0, fmt.Errorf("membership: etcd key %s: %w", kv.Key, err)
			}
		case "claim":
			s.Claimed = true
		}
	}
	return all, resp.Header.Revision, nil
}

// FollowStores calls f with the stores on shared volumes, and again after each change, until ctx ends.
// It reads them anew after an error of etcd.
func (c *Cluster) FollowStores(ctx context.Context, f func([]StoreState)) {
	for ctx.Err() == nil {
		all, rev, err := c.stores(ctx)
		if err == nil {
			f(all)
			c.awaitStores(ctx, rev)
			continue
		}
		select {
		case <-time.After(c.opts.TTL / 4):
		case <-ctx.Done():
		}
	}
}

// awaitStores returns when a store has changed after the revision rev, after a TTL, or with ctx.
func (c *Cluster) awaitStores(ctx context.Context, rev int64) {
	ctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(ctx), c.opts.TTL)
	defer cancel()
	for resp := range c.etcd.opened().Watch(ctx, storesPrefix(c.opts.Prefix), clientv3.WithPrefix(), clientv3.WithRev(rev+1)) {
		if resp.Err() != nil || len(resp.Events) > 0 {
			return
		}
	}
}
