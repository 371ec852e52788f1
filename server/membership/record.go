package membership

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/server/storage"
	"github.com/penstock-kv/penstock/trie"
)

// recordVersion is the version of the records that this program writes and reads.
const recordVersion = 1

// revokedMax is the largest number of revoked epochs in a record. The oldest are dropped: by then
// no member has pins of these epochs.
const revokedMax = 4 * kv.MaxLive

// record is the state of a namespace's name in the cluster.
type record struct {
	Version int `json:"version"`
	// Namespace is the definition with the live epochs; its ID is 0. Epochs that only a pin keeps
	// live are not included.
	Namespace kv.Namespace `json:"namespace"`
	// Revoked are epochs that were retired by force: their pins have no effect. Newest last.
	Revoked []kv.Epoch `json:"revoked,omitempty"`
	// Deleted: the namespace was deleted. Namespace has only its name and its last epoch.
	Deleted bool `json:"deleted,omitempty"`
}

func decodeRecord(key, value []byte) (record, error) {
	var r record
	if err := json.Unmarshal(value, &r); err != nil {
		return r, fmt.Errorf("membership: etcd key %s: %w", key, err)
	}
	if r.Version != recordVersion {
		return r, fmt.Errorf("membership: etcd key %s has version %d; this program supports version %d: run the same release on all nodes", key, r.Version, recordVersion)
	}
	return r, nil
}

// created returns the record after the creation of def. r is nil if the name was never used. An
// existing namespace with the same definition stays as it is.
func (r *record) created(def kv.Namespace) (record, error) {
	def.ID = 0
	switch {
	case r == nil:
		return record{Version: recordVersion, Namespace: def}, nil
	case r.Deleted:
		def.Epoch = max(def.Epoch, r.Namespace.Epoch+1)
		return record{Version: recordVersion, Namespace: def, Revoked: r.Revoked}, nil
	case !storage.SameDefinition(r.Namespace, def):
		return record{}, fmt.Errorf("namespace %q has another %s in the cluster (%v, tenant %q, index %v): %w", def.Name, storage.Difference(r.Namespace, def), r.Namespace.Geometry, r.Namespace.Tenant, r.Namespace.Index, trie.ErrNamespaceExists)
	case def.QuotaBytes != 0 && def.QuotaBytes != r.Namespace.QuotaBytes:
		return record{}, fmt.Errorf("namespace %q has a quota of %d bytes, not %d; change it with: penstock ns quota %s %d: %w", def.Name, r.Namespace.QuotaBytes, def.QuotaBytes, def.Name, def.QuotaBytes, trie.ErrNamespaceExists)
	}
	return *r, nil
}

// known returns trie.ErrNamespaceUnknown unless the namespace exists.
func (r *record) known(name string) error {
	if r == nil || r.Deleted {
		return fmt.Errorf("namespace %q: %w", name, trie.ErrNamespaceUnknown)
	}
	return nil
}

// bumped returns the record with the epoch to as the newest, and the keep newest epochs live. If to
// is 0, the new epoch is the next one; if keep is 0, one epoch stays live. If to is the newest
// epoch already, the record does not change.
func (r *record) bumped(to kv.Epoch, keep int) (record, error) {
	ns := r.Namespace
	switch to {
	case 0:
		to = ns.Epoch + 1
	case ns.Epoch:
		return *r, nil // several engines bump to the same epoch
	}
	switch {
	case keep < 0 || keep > kv.MaxLive:
		return record{}, fmt.Errorf("%w: cannot keep %d epochs of namespace %q live; give 1 to %d", storage.ErrRequest, keep, ns.Name, kv.MaxLive)
	case to > kv.MaxEpoch:
		return record{}, fmt.Errorf("%w: epoch %d of namespace %q is above the maximum %d, which leaves room for bumps: %w", storage.ErrRequest, to, ns.Name, kv.MaxEpoch, trie.ErrEpoch)
	case to <= ns.Epoch:
		return record{}, fmt.Errorf("%w: namespace %q is at epoch %d and cannot be bumped to %d: %w", storage.ErrRequest, ns.Name, ns.Epoch, to, trie.ErrEpoch)
	}
	next := *r
	next.Namespace = ns.Bump(to, max(1, keep), func(kv.Epoch) bool { return false })
	return next, nil
}

// retired returns the record without an older epoch. If force is set, the epoch is revoked: it need
// not be live in the record, because pins may keep it live on members.
func (r *record) retired(epoch kv.Epoch, force bool) (record, error) {
	ns := r.Namespace
	switch {
	case epoch == ns.Epoch:
		return record{}, fmt.Errorf("%w: epoch %d is the newest of namespace %q; to retire it, bump the namespace: penstock ns bump-epoch %s", storage.ErrRequest, epoch, ns.Name, ns.Name)
	case epoch > ns.Epoch || !force && !ns.IsLive(epoch):
		return record{}, fmt.Errorf("%w: epoch %d of namespace %q is not live in the cluster; live are %d: %w", storage.ErrRequest, epoch, ns.Name, ns.Live(), trie.ErrEpoch)
	}
	next := *r
	next.Namespace = ns.Retire(epoch)
	if force && !slices.Contains(r.Revoked, epoch) {
		next.Revoked = append(slices.Clone(r.Revoked), epoch)
		next.Revoked = next.Revoked[max(0, len(next.Revoked)-revokedMax):]
	}
	return next, nil
}

// deleted returns the record of the deleted namespace. It is small, because it stays, and has no salt.
func (r *record) deleted() record {
	next := *r
	next.Namespace, next.Deleted = endedNamespace(r.Namespace.Name, r.Namespace.Epoch), true
	return next
}

// endedNamespace returns the part of a deleted namespace that its record keeps.
func endedNamespace(name string, last kv.Epoch) kv.Namespace {
	return kv.Namespace{Name: name, Epoch: last}
}

// imported returns the record of a namespace that a joining node has and the cluster does not have.
func imported(local kv.Namespace) record {
	local.ID = 0
	local = local.Settle(func(kv.Epoch) bool { return false })
	return record{Version: recordVersion, Namespace: local}
}

// equal reports whether two records have the same content.
func (r record) equal(o record) bool {
	a, errA := json.Marshal(r)
	b, errB := json.Marshal(o)
	return errA == nil && errB == nil && string(a) == string(b)
}
