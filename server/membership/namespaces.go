package membership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// CreateNamespace adds a namespace to all nodes. It is storage.Node.CreateNamespace for a cluster.
// If the name was used before, the namespace begins above its last epoch.
func (c *Cluster) CreateNamespace(ctx context.Context, def kv.Namespace) (kv.Namespace, error) {
	def.Epoch, def.Older, def.Keep = max(1, def.Epoch), nil, 0
	if err := c.node.CheckNamespace(def); err != nil {
		return kv.Namespace{}, err
	}
	_, ended, err := c.node.Ended(ctx) // bringAlong has added the deleted names to etcd
	if err != nil {
		return kv.Namespace{}, err
	}
	def.Epoch = max(def.Epoch, ended+1)
	after, err := c.change(ctx, def.Name, func(r *record) (record, error) { return r.created(def) })
	return c.here(after, err)
}

// EnsureNamespace is storage.Node.EnsureNamespace for a cluster. Of several concurrent calls, the salt of
// the first transaction is that of the namespace.
func (c *Cluster) EnsureNamespace(ctx context.Context, def kv.Namespace, salt storage.NewSalt) (kv.Namespace, error) {
	def.Epoch, def.Older, def.Keep = max(1, def.Epoch), nil, 0
	if err := c.node.CheckNamespace(def); err != nil {
		return kv.Namespace{}, err
	}
	_, ended, err := c.node.Ended(ctx) // bringAlong has added the deleted names to etcd
	if err != nil {
		return kv.Namespace{}, err
	}
	def.Epoch = max(def.Epoch, ended+1)
	after, err := c.change(ctx, def.Name, func(r *record) (_ record, err error) {
		def := def
		if r.known(def.Name) == nil {
			def.Salt = r.Namespace.Salt
		} else if def.Salt, err = salt(); err != nil {
			return record{}, err
		}
		return r.created(def)
	})
	return c.here(after, err)
}

// here returns the namespace of a record as this node has it. The namespace's ID is local to the
// node. If the node does not have the namespace yet, because it has lost its lease meanwhile, here
// returns the record's definition with ID 0.
func (c *Cluster) here(r record, err error) (kv.Namespace, error) {
	if err != nil {
		return kv.Namespace{}, err
	}
	if ns, err := c.node.Namespace(r.Namespace.Name); err == nil {
		return ns, nil
	}
	return r.Namespace, nil
}

// BumpEpoch begins an epoch on all nodes. It is storage.Node.BumpEpoch for a cluster. The result
// does not consider pins.
func (c *Cluster) BumpEpoch(ctx context.Context, name string, to kv.Epoch, keep int) (storage.Bumped, error) {
	var before kv.Namespace
	after, err := c.change(ctx, name, func(r *record) (record, error) {
		if err := r.known(name); err != nil {
			return record{}, err
		}
		before = r.Namespace
		return r.bumped(to, keep)
	})
	if err != nil {
		return storage.Bumped{}, err
	}
	b := storage.Bumped{Old: before.Epoch, Live: after.Namespace.Live()}
	for _, e := range before.Live() {
		if !slices.Contains(b.Live, e) {
			b.Retired = append(b.Retired, e)
		}
	}
	return b, nil
}

// RetireEpoch retires an older epoch on all nodes. It is storage.Node.RetireEpoch for a cluster. The
// sizes in the result are those of this node. Without force, an epoch stays live on the members that
// have pins of it.
func (c *Cluster) RetireEpoch(ctx context.Context, name string, epoch kv.Epoch, force, dryRun bool) (storage.Removed, error) {
	if err := c.Admit(""); err != nil {
		return storage.Removed{}, err // the node may have missed the epoch
	}
	held, err := c.node.RetireEpoch(ctx, name, epoch, force, true)
	if err != nil && !(force && errors.Is(err, trie.ErrEpoch)) || dryRun { // with force, pins may keep it live on another member
		return held, err
	}
	_, err = c.change(ctx, name, func(r *record) (record, error) {
		if err := r.known(name); err != nil {
			return record{}, err
		}
		return r.retired(epoch, force)
	})
	return held, err
}

// SetQuota sets the quota of a namespace on all nodes, in bytes for each node.
func (c *Cluster) SetQuota(ctx context.Context, name string, quotaBytes int64) (kv.Namespace, error) {
	after, err := c.change(ctx, name, func(r *record) (record, error) {
		if err := r.known(name); err != nil {
			return record{}, err
		}
		next := *r
		next.Namespace.QuotaBytes = quotaBytes
		return next, c.node.CheckNamespace(kv.Namespace{
			Name: name, Tenant: next.Namespace.Tenant, Salt: next.Namespace.Salt, Geometry: next.Namespace.Geometry,
			Index: next.Namespace.Index, Epoch: next.Namespace.Epoch, QuotaBytes: quotaBytes,
		})
	})
	return c.here(after, err)
}

// SetReplicas sets the number of nodes that store each sequence of a namespace.
func (c *Cluster) SetReplicas(ctx context.Context, name string, replicas int) (kv.Namespace, error) {
	after, err := c.change(ctx, name, func(r *record) (record, error) {
		if err := r.known(name); err != nil {
			return record{}, err
		}
		next := *r
		next.Namespace.Replicas = replicas
		if err := next.Namespace.Validate(); err != nil {
			return record{}, fmt.Errorf("%w: %w", storage.ErrRequest, err)
		}
		return next, nil
	})
	return c.here(after, err)
}

// DeleteNamespace deletes a namespace on all nodes. The sizes in the result are those of this node.
func (c *Cluster) DeleteNamespace(ctx context.Context, name string, dryRun bool) (storage.Removed, error) {
	if err := c.Admit(""); err != nil {
		return storage.Removed{}, err // the node may have missed the creation
	}
	held, err := c.node.DeleteNamespace(ctx, name, true)
	if err != nil && !errors.Is(err, trie.ErrNamespaceUnknown) || dryRun {
		return held, err
	}
	_, err = c.change(ctx, name, func(r *record) (record, error) {
		if err := r.known(name); err != nil {
			return record{}, err
		}
		return r.deleted(), nil
	})
	return held, err
}

// change replaces the record of a name in one transaction, and waits until no member serves the
// namespace as it was before. f gets nil if there is no record. It is called again if another
// change came first.
func (c *Cluster) change(ctx context.Context, name string, f func(*record) (record, error)) (record, error) {
	key := c.namespacesPrefix() + name
	for {
		resp, err := c.get(ctx, key)
		if err != nil {
			return record{}, err
		}
		var old *record
		rev := int64(0)
		if len(resp.Kvs) > 0 {
			r, err := decodeRecord(resp.Kvs[0].Key, resp.Kvs[0].Value)
			if err != nil {
				return record{}, err
			}
			old, rev = &r, resp.Kvs[0].ModRevision
		}
		next, err := f(old)
		if err != nil {
			return record{}, err
		}
		if old != nil && next.equal(*old) {
			return next, c.awaitApplied(ctx, rev)
		}
		value, err := json.Marshal(next)
		if err != nil {
			return record{}, fmt.Errorf("membership: %w", err)
		}
		limited, cancel := context.WithTimeout(ctx, c.opts.TTL)
		done, err := c.etcd.opened().Txn(limited).If(clientv3.Compare(clientv3.ModRevision(key), "=", rev)).Then(clientv3.OpPut(key, string(value))).Commit()
		cancel()
		if err != nil {
			return record{}, c.failed(err)
		}
		if done.Succeeded {
			return next, c.awaitApplied(ctx, done.Header.Revision)
		}
	}
}

// notApplied is the error if members have not applied a change in time.
func (c *Cluster) notApplied(behind map[string]bool) error {
	var names []string
	for key := range behind {
		names = append(names, key[len(c.membersPrefix()):])
	}
	slices.Sort(names)
	return refusal{fmt.Errorf("the change is made in etcd, but these nodes have not applied it yet, and serve the namespace as it was: %s", strings.Join(names, ", ")), codes.DeadlineExceeded}
}
