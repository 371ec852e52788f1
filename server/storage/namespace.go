package storage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

// catalogue is the record of the namespaces and deletions on the volumes, from which the index can
// be rebuilt. It is written before the live epochs change in the index, and before a namespace is
// deleted from the index. So after a crash between the two writes, blocks of a retired epoch do not
// return.
type catalogue struct {
	Version    int            `json:"version"`
	Namespaces []kv.Namespace `json:"namespaces"`
	// Highest is the highest namespace id that was ever assigned. It is stored because slots of a
	// deleted namespace may be on a volume that a rebuild cannot read.
	Highest kv.NamespaceID `json:"highest,omitempty"`
	// Deleted are the deletions in the namespaces' live epochs.
	Deleted []deletedPieces `json:"deleted,omitempty"`
	// Ended and EndedFloor are the names and the floor of endedNames. An earlier release reads the catalogue
	// without them, and writes it without them.
	Ended      map[string]kv.Epoch `json:"ended,omitempty"`
	EndedFloor kv.Epoch            `json:"ended_floor,omitempty"`
}

// catalogueVersion is the version of the catalogue that this program writes. It reads older versions
// too. A catalogue of version 1 has no list of deleted pieces. In version 2 each namespace has one
// live epoch, to which all its deleted pieces belong. In version 3 a namespace may have several.
const catalogueVersion = 3

// decodeCatalogue decodes a blob of writeCatalogue. An empty blob has no namespaces.
func decodeCatalogue(blob []byte) (catalogue, error) {
	if len(blob) == 0 {
		return catalogue{Version: catalogueVersion}, nil
	}
	var c catalogue
	if err := json.Unmarshal(blob, &c); err != nil {
		return catalogue{}, fmt.Errorf("storage: catalogue: %w", err)
	}
	if c.Version < 1 || c.Version > catalogueVersion {
		return catalogue{}, fmt.Errorf("storage: the catalogue has version %d; this binary supports versions up to %d", c.Version, catalogueVersion)
	}
	if c.Version < 3 {
		for i := range c.Deleted {
			for _, ns := range c.Namespaces {
				if ns.ID == c.Deleted[i].Namespace {
					c.Deleted[i].Epoch = ns.Epoch
				}
			}
		}
	}
	return c, nil
}

// writeCatalogue makes the namespaces that the index has recorded, and their deletions, durable. The caller
// holds the token nsTurn.
func (n *Node) writeCatalogue(ctx context.Context) error {
	return n.writeCatalogueOf(ctx, n.index.Recorded())
}

// writeCatalogueOf makes namespaces and their deletions durable. The caller holds the token nsTurn.
func (n *Node) writeCatalogueOf(ctx context.Context, namespaces []kv.Namespace) error {
	for {
		deleted, count := n.deleted.encode(namespaces)
		ended := n.ended.without(namespaces)
		blob, err := json.Marshal(catalogue{Version: catalogueVersion, Namespaces: namespaces, Highest: n.index.HighestNamespace(), Deleted: deleted, Ended: ended, EndedFloor: n.ended.floor})
		if err != nil {
			return fmt.Errorf("storage: catalogue: %w", err)
		}
		err = n.store.SetCatalogue(ctx, blob, liveEpochs(namespaces)...)
		if errors.Is(err, blockstore.ErrTooLarge) && (n.ended.halve() || n.deleted.collapse()) {
			continue
		}
		if err == nil {
			n.deleted.wrote(namespaces, count)
			n.ended.names = ended
		}
		return err
	}
}

// liveEpochs returns the live epochs of namespaces.
func liveEpochs(namespaces []kv.Namespace) []blockstore.EpochID {
	all := make([]blockstore.EpochID, 0, len(namespaces))
	for _, ns := range namespaces {
		for _, e := range ns.Live() {
			all = append(all, blockstore.EpochID{Namespace: ns.ID, Epoch: e})
		}
	}
	return all
}

// takeNamespaces takes the token nsTurn. It waits for the token until ctx ends.
func (n *Node) takeNamespaces(ctx context.Context) error {
	if err := context.Cause(ctx); err != nil {
		return fmt.Errorf("storage: change of a namespace or of the catalogue: %w", err)
	}
	select {
	case n.nsTurn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("storage: waiting for another change of a namespace or of the catalogue: %w", context.Cause(ctx))
	}
}

func (n *Node) giveNamespaces() { <-n.nsTurn }

// eraseEnded erases the secrets of the epochs that are not live, so that their blocks cannot be decrypted any
// more. It is called after epochs have ended in catalogue and index. If it fails, reclaimLoop calls it again.
// The caller holds the token nsTurn.
func (n *Node) eraseEnded(ctx context.Context) {
	err := n.store.EraseEpochs(ctx, liveEpochs(n.index.Recorded())...)
	switch before := n.unerased.Swap(err != nil); {
	case err != nil && !before && ctx.Err() == nil:
		n.opts.Logger.Error("the secrets of ended epochs are not erased from all volumes; the node tries again", "err", err)
	case err == nil && before:
		n.opts.Logger.Info("the secrets of ended epochs are erased")
	}
}

// retryErase calls eraseEnded again if the last call has failed.
func (n *Node) retryErase(ctx context.Context) {
	if !n.unerased.Load() || n.store.Quorate() != nil {
		return
	}
	if err := n.takeNamespaces(ctx); err != nil {
		return
	}
	defer n.giveNamespaces()
	n.eraseEnded(ctx)
}

// reconcileNamespaces applies the epochs and deletions of the catalogue to the index. It then
// writes the namespaces of the index to the catalogue.
func (n *Node) reconcileNamespaces(ctx context.Context) error {
	c, err := decodeCatalogue(n.store.Catalogue())
	if err != nil {
		return err
	}
	if err := n.deleted.load(c); err != nil {
		return err
	}
	n.ended = endedNames{names: c.Ended, floor: c.EndedFloor}
	if err := n.index.RaiseHighest(c.Highest); err != nil {
		return err
	}
	for _, old := range c.Namespaces {
		ns, err := n.index.NamespaceByID(old.ID)
		if errors.Is(err, trie.ErrNamespaceUnknown) {
			continue
		}
		if err != nil {
			return err
		}
		if want := agreed(old, ns); want.Epoch != ns.Epoch || len(want.Older) != len(ns.Older) {
			if _, err := n.index.SetEpochs(want); err != nil {
				return err
			}
		}
	}
	certain, catalogued := n.store.CatalogueCertain(), make(map[kv.NamespaceID]bool, len(c.Namespaces))
	for _, old := range c.Namespaces {
		catalogued[old.ID] = true
	}
	for _, ns := range n.index.Namespaces() {
		switch {
		case !certain:
			// A missing volume may have a newer catalogue with deletions and epochs that this
			// catalogue lacks. So a later rebuild must not use slots that were written before this
			// start.
			n.deleted.raiseFloor(ns.ID, n.store.NewestGeneration())
		case ns.ID <= c.Highest && !catalogued[ns.ID]:
			// The namespace is not in the catalogue. Its deletion from the index was interrupted,
			// or the index was missing at that time.
			if err := n.index.DeleteNamespace(ns.Name); err != nil {
				return err
			}
		}
	}
	if err := n.redoDeletions(c); err != nil {
		return err
	}
	namespaces := n.index.Namespaces()
	if len(namespaces) == 0 && len(c.Namespaces) > 0 {
		n.opts.Logger.Warn("the volumes have namespaces that the index lacks, because the index was lost or is new; to keep the cache, run `penstock store rebuild-index` before serving", "namespaces", len(c.Namespaces))
	}
	if err := n.writeCatalogueOf(ctx, namespaces); err != nil {
		return err
	}
	n.eraseEnded(ctx)
	return nil
}

// agreed returns the namespace of the index with the epochs that are live in both the catalogue and
// the index. A change is written to the catalogue first. So there are three cases. If the newest
// epochs are equal, an epoch that the catalogue lacks was retired. If the newest epoch of the
// catalogue is later, a bump did not reach the index. If it is earlier, the volume with the newest
// catalogue is missing.
func agreed(catalogued, indexed kv.Namespace) kv.Namespace {
	if catalogued.Epoch < indexed.Epoch {
		return indexed
	}
	want := indexed
	want.Epoch, want.Older, want.Keep = catalogued.Epoch, catalogued.Older, catalogued.Keep
	for _, e := range catalogued.Older {
		if !indexed.IsLive(e) {
			want = want.Retire(e)
		}
	}
	return want.Settle(func(kv.Epoch) bool { return false })
}

// CreateNamespace adds a namespace. If a namespace with that name and the same definition exists,
// it is returned. If the definitions differ, the error is trie.ErrNamespaceExists. The namespace begins
// at def.Epoch, or above the last epoch of a deleted namespace of this name if that is higher. Epochs begin at
// 1, because epoch 0 in a request means the newest epoch. With an epoch 0, a reader could not
// request that epoch, and after a bump a reader that had matched in it would get blocks of a later
// epoch. An epoch above kv.MaxEpoch is refused.
func (n *Node) CreateNamespace(ctx context.Context, def kv.Namespace) (kv.Namespace, error) {
	def.Epoch, def.Older, def.Keep = max(1, def.Epoch), nil, 0
	if err := n.CheckNamespace(def); err != nil {
		return kv.Namespace{}, err
	}
	if err := n.takeNamespaces(ctx); err != nil {
		return kv.Namespace{}, err
	}
	defer n.giveNamespaces()
	return n.create(ctx, def)
}

// NewSalt returns the salt of a new namespace, which may be empty.
type NewSalt func() ([]byte, error)

// EnsureNamespace is CreateNamespace for a definition without a salt. An existing namespace may have
// any salt. A new one gets that of salt, which is called for a new namespace only.
func (n *Node) EnsureNamespace(ctx context.Context, def kv.Namespace, salt NewSalt) (kv.Namespace, error) {
	def.Epoch, def.Older, def.Keep = max(1, def.Epoch), nil, 0
	if err := n.CheckNamespace(def); err != nil {
		return kv.Namespace{}, err
	}
	if err := n.takeNamespaces(ctx); err != nil {
		return kv.Namespace{}, err
	}
	defer n.giveNamespaces()
	ns, err := n.Namespace(def.Name)
	switch {
	case err == nil:
		def.Salt = ns.Salt
	case !errors.Is(err, trie.ErrNamespaceUnknown):
		return kv.Namespace{}, err
	default:
		if def.Salt, err = salt(); err != nil {
			return kv.Namespace{}, err
		}
	}
	return n.create(ctx, def)
}

// Ended returns the names of deleted namespaces with their last epochs, and an epoch that is not below the
// last epoch of any other deleted name. It waits for a change in progress until ctx ends.
func (n *Node) Ended(ctx context.Context) (names map[string]kv.Epoch, others kv.Epoch, err error) {
	if err := n.takeNamespaces(ctx); err != nil {
		return nil, 0, err
	}
	defer n.giveNamespaces()
	return maps.Clone(n.ended.names), n.ended.floor, nil
}

// CheckNamespace returns an error, of type ErrRequest, if the node cannot serve a namespace of this
// definition, or if no block of it fits the quota of its tenant.
func (n *Node) CheckNamespace(def kv.Namespace) error {
	if err := n.checkDefinition(def); err != nil {
		return err
	}
	if q, ok := n.index.TenantQuota(def.Name); ok {
		return n.fitsTenant(def, q)
	}
	return nil
}

// checkDefinition returns an error, of type ErrRequest, if the node cannot serve a namespace of this
// definition.
func (n *Node) checkDefinition(def kv.Namespace) error {
	if def.Epoch > kv.MaxEpoch {
		return fmt.Errorf("%w: namespace %q: epoch %d; the maximum is %d, so that bumps can follow", ErrRequest, def.Name, def.Epoch, kv.MaxEpoch)
	}
	if err := def.Validate(); err != nil {
		return fmt.Errorf("%w: %w", ErrRequest, err)
	}
	for i, g := range def.Geometry.Groups {
		if _, err := n.store.SlotLayout(def.Geometry.PieceBytes(i), g.Layers); err != nil {
			return fmt.Errorf("%w: namespace %q, group %d: %w", ErrRequest, def.Name, i, err)
		}
		if piece := def.Geometry.PieceBytes(i); piece > min(n.opts.LoadBytesMax, n.opts.WriteBytesMax) {
			return fmt.Errorf("%w: namespace %q: a block has %d bytes, and one call may move %d; raise limits.read_bytes and limits.write_bytes", ErrRequest, def.Name, piece, min(n.opts.LoadBytesMax, n.opts.WriteBytesMax))
		}
	}
	return n.checkQuota(def, def.QuotaBytes)
}

// SameDefinition reports whether blocks of one namespace have the same ids and bytes in the other.
// Epochs, quotas and replicas may differ.
func SameDefinition(a, b kv.Namespace) bool {
	return a.Geometry.Equal(b.Geometry) && a.Tenant == b.Tenant && string(a.Salt) == string(b.Salt) && a.Index == b.Index
}

// Difference names for an error what differs between two definitions. It does not contain a salt.
func Difference(a, b kv.Namespace) string {
	b.Salt = a.Salt
	if SameDefinition(a, b) {
		return "salt"
	}
	return "definition"
}

// create adds a checked namespace. The caller holds the token nsTurn.
func (n *Node) create(ctx context.Context, def kv.Namespace) (kv.Namespace, error) {
	def.Epoch = max(def.Epoch, n.ended.last(def.Name)+1)
	ns, err := n.index.Create(def)
	if errors.Is(err, trie.ErrNamespaceExists) {
		same := SameDefinition(ns, def)
		switch {
		case same && def.QuotaBytes != 0 && def.QuotaBytes != ns.QuotaBytes:
			return ns, fmt.Errorf("namespace %q has a quota of %d bytes, not %d; change it with: penstock ns quota %s %d: %w", ns.Name, ns.QuotaBytes, def.QuotaBytes, ns.Name, def.QuotaBytes, trie.ErrNamespaceExists)
		case same:
			return ns, nil
		}
		return ns, fmt.Errorf("namespace %q has another %s (%v, tenant %q, index %v): %w", ns.Name, Difference(ns, def), ns.Geometry, ns.Tenant, ns.Index, trie.ErrNamespaceExists)
	}
	if err != nil {
		return kv.Namespace{}, err
	}
	if err := n.writeCatalogue(ctx); err != nil {
		// The catalogue could not be written, so the namespace would not survive a loss of the
		// index.
		return kv.Namespace{}, errors.Join(err, n.index.DeleteNamespace(ns.Name))
	}
	n.opts.Metrics.AddNamespace(ns.Name)
	n.epochStarts.Store(ns.ID, EpochStart{At: n.opts.Now()})
	return ns, nil
}

// announce adds a checked namespace whose definition a cluster has. The caller holds the token nsTurn.
func (n *Node) announce(def kv.Namespace) error {
	ns, err := n.index.Announce(def)
	if err != nil {
		return err
	}
	n.opts.Metrics.AddNamespace(ns.Name)
	n.epochStarts.Store(ns.ID, EpochStart{At: n.opts.Now()})
	return nil
}

// record writes an announced namespace to the catalogue and then to the index, before its first block is stored. So
// each namespace that can have blocks is in the catalogue. If it fails, the namespace stays announced, and the error is
// ErrBusy: the blocks may be stored on other nodes.
func (n *Node) record(ctx context.Context, ns kv.Namespace) error {
	if !n.index.IsAnnounced(ns.ID) {
		return nil
	}
	if err := n.takeNamespaces(ctx); err != nil {
		return err
	}
	defer n.giveNamespaces()
	if !n.index.IsAnnounced(ns.ID) {
		return nil // another call has written it
	}
	err := n.writeRecord(ctx, ns.ID)
	switch {
	case err == nil:
		delete(n.unrecorded, ns.ID)
	case ctx.Err() == nil:
		if !n.unrecorded[ns.ID] {
			n.unrecorded[ns.ID] = true
			n.opts.Logger.Error("a namespace of the cluster cannot be written to the volumes: this node refuses its blocks", "namespace", ns.Name, "err", err)
		}
		err = fmt.Errorf("%w: namespace %q cannot be written to the volumes of this node: %w", ErrBusy, ns.Name, err)
	}
	return err
}

// writeRecord is record for a namespace that is announced. The caller holds the token nsTurn.
func (n *Node) writeRecord(ctx context.Context, id kv.NamespaceID) error {
	if err := n.index.Writable(); err != nil {
		return err
	}
	ns, err := n.index.NamespaceByID(id)
	if err != nil {
		return err
	}
	if err := n.writeCatalogueOf(ctx, append(n.index.Recorded(), ns)); err != nil {
		return err
	}
	if err := n.index.Record(id); err != nil {
		return n.undoCatalogue(ctx, err)
	}
	return nil
}

// checkQuota refuses a quota that is too small for one block of the namespace.
func (n *Node) checkQuota(ns kv.Namespace, quotaBytes int64) error {
	if quotaBytes < 0 {
		return fmt.Errorf("%w: namespace %q: a quota of %d bytes; give 0 for no quota, or a positive number", ErrRequest, ns.Name, quotaBytes)
	}
	block, err := n.slotBytes(ns)
	if err != nil {
		return err
	}
	if quotaBytes != 0 && quotaBytes < block {
		return fmt.Errorf("%w: namespace %q: a quota of %d bytes is too small for one block, which takes %d on storage", ErrRequest, ns.Name, quotaBytes, block)
	}
	return nil
}

// slotBytes returns the number of bytes that a block of the namespace takes on storage. It fails with ErrRequest
// if no slot can hold one of its pieces.
func (n *Node) slotBytes(ns kv.Namespace) (block int64, err error) {
	for i, g := range ns.Geometry.Groups {
		layout, err := n.store.SlotLayout(ns.Geometry.PieceBytes(i), g.Layers)
		if err != nil {
			return 0, fmt.Errorf("%w: namespace %q, group %d: %w", ErrRequest, ns.Name, i, err)
		}
		block += layout.SlotBytes()
	}
	return block, nil
}

// Namespace returns a namespace with its live epochs, or
// trie.ErrNamespaceUnknown.
func (n *Node) Namespace(name string) (kv.Namespace, error) {
	ns, err := n.index.Namespace(name)
	if errors.Is(err, trie.ErrNamespaceUnknown) {
		err = fmt.Errorf("namespace %q: %w", name, trie.ErrNamespaceUnknown)
	}
	return ns, err
}

// Namespaces returns every namespace, sorted by name.
func (n *Node) Namespaces() []kv.Namespace { return n.index.Namespaces() }

// DeleteNamespace deletes a namespace and makes all its blocks unmatchable. Their slots are freed
// in the background. The name keeps its last epoch: see CreateNamespace. It returns the number and size of the namespace's pieces. If dryRun is set, it
// changes nothing.
func (n *Node) DeleteNamespace(ctx context.Context, name string, dryRun bool) (Removed, error) {
	if err := n.takeNamespaces(ctx); err != nil {
		return Removed{}, err
	}
	defer n.giveNamespaces()
	ns, err := n.Namespace(name)
	if err != nil {
		return Removed{}, err
	}
	held := n.held(ns.ID)
	if dryRun {
		return held, nil
	}
	return held, n.drop(ctx, ns)
}

// drop deletes a namespace. The caller holds the token nsTurn.
func (n *Node) drop(ctx context.Context, ns kv.Namespace) error {
	if err := n.index.Writable(); err != nil {
		return err
	}
	recorded := !n.index.IsAnnounced(ns.ID)
	if recorded {
		n.ended.add(ns)
		rest := slices.DeleteFunc(n.index.Recorded(), func(other kv.Namespace) bool { return other.ID == ns.ID })
		if err := n.writeCatalogueOf(ctx, rest); err != nil {
			return err
		}
	}
	if err := n.index.DeleteNamespace(ns.Name); err != nil {
		return n.undoCatalogue(ctx, err)
	}
	if recorded {
		n.eraseEnded(ctx)
	}
	n.opts.Metrics.RemoveNamespace(ns.Name)
	n.epochStarts.Delete(ns.ID)
	delete(n.unrecorded, ns.ID)
	n.cleared()
	return nil
}

// Bumped is the result of a bump.
type Bumped struct {
	// Old is the newest epoch before the bump.
	Old kv.Epoch
	// Live are the live epochs, the newest first. Retired are the epochs that the bump retired.
	Live, Retired []kv.Epoch
}

// BumpEpoch begins the epoch with the number to, which becomes the newest epoch of the namespace.
// to is at most kv.MaxEpoch; 0 means the number after the present newest epoch. The cost does not
// depend on the number of blocks. The keep newest epochs, including the new one, and the pinned
// epochs stay live; keep 0 means 1. Every block of the other epochs becomes unmatchable. An open
// reservation keeps the epoch for which it was made.
func (n *Node) BumpEpoch(ctx context.Context, name string, to kv.Epoch, keep int) (Bumped, error) {
	if err := n.takeNamespaces(ctx); err != nil {
		return Bumped{}, err
	}
	defer n.giveNamespaces()
	ns, err := n.Namespace(name)
	if err != nil {
		return Bumped{}, err
	}
	want, err := n.index.PlanBump(name, to, keep)
	switch {
	case err == nil:
	case keep < 0 || keep > kv.MaxLive:
		return Bumped{}, fmt.Errorf("%w: cannot keep %d epochs of namespace %q live; give 1 to %d", ErrRequest, keep, name, kv.MaxLive)
	case to > kv.MaxEpoch:
		return Bumped{}, fmt.Errorf("%w: epoch %d of namespace %q is above the maximum %d, which leaves room for bumps: %w", ErrRequest, to, name, kv.MaxEpoch, trie.ErrEpoch)
	case errors.Is(err, trie.ErrEpoch):
		return Bumped{}, fmt.Errorf("%w: namespace %q is at epoch %d and cannot be bumped to %d: %w", ErrRequest, name, ns.Epoch, to, trie.ErrEpoch)
	default:
		return Bumped{}, err
	}
	retired, err := n.setEpochs(ctx, want)
	if err != nil {
		return Bumped{}, err
	}
	return Bumped{Old: ns.Epoch, Live: want.Live(), Retired: retired}, nil
}

// RetireEpoch makes every block of an older live epoch unmatchable, and returns the number and size
// of the epoch's pieces. The cost does not depend on the number of blocks. The slots are freed in
// the background. A pinned epoch is refused with trie.ErrPinned; if force is set, its pins end
// instead. The newest epoch cannot be retired. If dryRun is set, nothing changes.
func (n *Node) RetireEpoch(ctx context.Context, name string, epoch kv.Epoch, force, dryRun bool) (Removed, error) {
	if err := n.takeNamespaces(ctx); err != nil {
		return Removed{}, err
	}
	defer n.giveNamespaces()
	ns, err := n.Namespace(name)
	if err != nil {
		return Removed{}, err
	}
	want, err := n.index.PlanRetire(name, epoch, force)
	switch {
	case err == nil:
	case epoch == ns.Epoch:
		return Removed{}, fmt.Errorf("%w: epoch %d is the newest of namespace %q; to retire it, bump the namespace: penstock ns bump-epoch %s", ErrRequest, epoch, name, name)
	case errors.Is(err, trie.ErrEpoch):
		return Removed{}, fmt.Errorf("%w: epoch %d of namespace %q is not live; live are %d: %w", ErrRequest, epoch, name, ns.Live(), trie.ErrEpoch)
	case errors.Is(err, trie.ErrPinned):
		return Removed{}, fmt.Errorf("epoch %d of namespace %q: %w; see penstock pin list --namespace %s, or force it", epoch, name, trie.ErrPinned, name)
	default:
		return Removed{}, err
	}
	held := n.heldBy(ns.ID, epoch)
	if dryRun {
		return held, nil
	}
	_, err = n.setEpochs(ctx, want)
	return held, err
}

// setEpochs changes the live epochs of a namespace, first in the catalogue on the volumes and then
// in the index, and erases the secrets of the epochs that ended. The caller holds the token nsTurn.
func (n *Node) setEpochs(ctx context.Context, want kv.Namespace) (retired []kv.Epoch, err error) {
	if err := n.index.Writable(); err != nil {
		return nil, err
	}
	before, err := n.index.NamespaceByID(want.ID)
	if err != nil {
		return nil, err
	}
	begins := want.Epoch != before.Epoch
	recorded := !n.index.IsAnnounced(want.ID)
	if recorded {
		namespaces := n.index.Recorded()
		for i := range namespaces {
			if namespaces[i].ID == want.ID {
				namespaces[i] = want
			}
		}
		if err := n.writeCatalogueOf(ctx, namespaces); err != nil {
			return nil, err
		}
	}
	retired, err = n.index.SetEpochs(want)
	if err != nil {
		return nil, n.undoCatalogue(ctx, err)
	}
	if recorded {
		n.eraseEnded(ctx)
	}
	if begins {
		m := n.opts.Metrics
		n.epochStarts.Store(want.ID, EpochStart{At: n.opts.Now(), QueriedTokens: m.QueriedTokens.Value(want.Name), HitTokens: m.HitTokens.Value(want.Name)})
	}
	n.cleared()
	return retired, nil
}

// EpochStart is the moment at which the newest epoch of a namespace began.
type EpochStart struct {
	At time.Time
	// QueriedTokens and HitTokens are the values of the metrics of these names at that moment.
	QueriedTokens, HitTokens uint64
}

// EpochStart returns the moment at which the newest epoch of a namespace began. It returns the zero
// value if that was before the node started; the metrics then count since the node started.
func (n *Node) EpochStart(id kv.NamespaceID) EpochStart {
	start, _ := n.epochStarts.Load(id)
	s, _ := start.(EpochStart)
	return s
}

// settleEpochs retires the live epochs whose pins have ended.
func (n *Node) settleEpochs(ctx context.Context) error {
	if len(n.index.Unsettled()) == 0 || n.writable() != nil {
		return nil
	}
	if err := n.takeNamespaces(ctx); err != nil {
		return err
	}
	defer n.giveNamespaces()
	for _, want := range n.index.Unsettled() {
		retired, err := n.setEpochs(ctx, want)
		if err != nil {
			return fmt.Errorf("storage: retire epochs of namespace %q: %w", want.Name, err)
		}
		n.opts.Logger.Info("epochs were retired because their pins ended", "namespace", want.Name, "epochs", retired)
	}
	return nil
}

// PinEpoch leases a live epoch of a namespace for ttl, at most LeaseTTLMax, and returns the epoch;
// epoch 0 means the newest. Bumps do not retire a pinned epoch, but at most kv.MaxLive epochs stay
// live. Renew and Release work for this lease too. PinEpoch waits for a bump in progress, until ctx ends, so that
// the returned epoch is live. Errors: that of ctx, ErrRequest, ErrBusy, trie.ErrNamespaceUnknown.
func (n *Node) PinEpoch(ctx context.Context, owner, name string, epoch kv.Epoch, ttl time.Duration) (trie.LeaseID, kv.Epoch, error) {
	if ttl <= 0 {
		return 0, 0, fmt.Errorf("%w: a pin of epoch %d for %v; give a positive time", ErrRequest, epoch, ttl)
	}
	if err := n.takeNamespaces(ctx); err != nil {
		return 0, 0, err
	}
	defer n.giveNamespaces()
	ns, err := n.Namespace(name)
	if err != nil {
		return 0, 0, err
	}
	lease, epoch, err := n.index.PinEpoch(ns.ID, epoch, owner, n.LeaseTTL(ttl), n.opts.Now())
	switch {
	case errors.Is(err, trie.ErrEpoch):
		return 0, 0, fmt.Errorf("%w: %w", ErrMismatch, err)
	case errors.Is(err, trie.ErrTooManyLeases):
		n.opts.Metrics.LeasesDenied.Inc()
		return 0, 0, fmt.Errorf("%w: %w", ErrBusy, err)
	case err != nil:
		return 0, 0, err
	}
	n.opts.Metrics.LeasesGranted.Inc()
	return lease, epoch, nil
}

// undoCatalogue is called after the index refused a change, with the error refused, that is in the
// catalogue already. It writes the namespaces of the index to the catalogue again. Otherwise the
// next start would apply the change and drop blocks stored after it. It returns refused, joined
// with the error of the write.
func (n *Node) undoCatalogue(ctx context.Context, refused error) error {
	return errors.Join(refused, n.writeCatalogue(ctx))
}

// cleared is called after epochs ended. It publishes the changes of the index, and wakes
// reclaimLoop to free the slots of these epochs.
func (n *Node) cleared() {
	n.publishChanges()
	n.wakeReclaim()
}

// SetQuota sets the bytes of slots that the namespace may occupy. 0 means no quota.
func (n *Node) SetQuota(ctx context.Context, name string, quotaBytes int64) (kv.Namespace, error) {
	if err := n.takeNamespaces(ctx); err != nil {
		return kv.Namespace{}, err
	}
	defer n.giveNamespaces()
	ns, err := n.Namespace(name)
	if err != nil {
		return kv.Namespace{}, err
	}
	if err := n.checkQuota(ns, quotaBytes); err != nil {
		return kv.Namespace{}, err
	}
	if err := n.setQuota(ctx, name, quotaBytes); err != nil {
		return kv.Namespace{}, err
	}
	return n.Namespace(name)
}

// setQuota sets a checked quota. The caller holds the token nsTurn.
func (n *Node) setQuota(ctx context.Context, name string, quotaBytes int64) error {
	if err := n.index.SetQuota(name, quotaBytes); err != nil {
		return err
	}
	return n.writeChanged(ctx, name)
}

// SetReplicas sets the number of nodes that store each sequence of the namespace.
func (n *Node) SetReplicas(ctx context.Context, name string, replicas int) (kv.Namespace, error) {
	if err := n.takeNamespaces(ctx); err != nil {
		return kv.Namespace{}, err
	}
	defer n.giveNamespaces()
	ns, err := n.Namespace(name)
	if err != nil {
		return kv.Namespace{}, err
	}
	ns.Replicas = replicas
	if err := ns.Validate(); err != nil {
		return kv.Namespace{}, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	if err := n.setReplicas(ctx, name, replicas); err != nil {
		return kv.Namespace{}, err
	}
	return n.Namespace(name)
}

// setReplicas sets a checked number of replicas. The caller holds the token nsTurn.
func (n *Node) setReplicas(ctx context.Context, name string, replicas int) error {
	if err := n.index.SetReplicas(name, replicas); err != nil {
		return err
	}
	return n.writeChanged(ctx, name)
}

// writeChanged writes the catalogue after a change of a namespace in the index, unless the namespace is
// announced. The caller holds the token nsTurn.
func (n *Node) writeChanged(ctx context.Context, name string) error {
	ns, err := n.index.Namespace(name)
	if err != nil || n.index.IsAnnounced(ns.ID) {
		return err
	}
	return n.writeCatalogue(ctx)
}

// Follow makes a namespace equal to the definition that a cluster has of it: it adds the
// namespace, or sets its epochs, quota and replicas. A namespace that it adds takes no room on the volumes
// until the first block is to be stored, because the cluster has the definition. An older epoch that is pinned here stays live, except the
// epochs in revoked; an older epoch of def that is not live here does not become live. If the
// namespace has another definition here, or a newer epoch than def, its blocks are not KV of the
// cluster's weights: Follow deletes the namespace and creates it again. After an error the namespace
// may still serve retired epochs.
func (n *Node) Follow(ctx context.Context, def kv.Namespace, revoked []kv.Epoch) error {
	first := def
	first.Older, first.Keep = nil, 0
	// The quota of its tenant is not checked, because the namespace exists in the cluster.
	if err := n.checkDefinition(first); err != nil {
		return err
	}
	if err := n.takeNamespaces(ctx); err != nil {
		return err
	}
	defer n.giveNamespaces()
	ns, err := n.index.Namespace(def.Name)
	if err == nil && (!SameDefinition(ns, def) || ns.Epoch > def.Epoch) {
		n.opts.Logger.Warn("a namespace differs from the cluster's: its blocks are dropped", "namespace", def.Name, "epoch", ns.Epoch, "cluster_epoch", def.Epoch)
		if err := n.drop(ctx, ns); err != nil {
			return err
		}
		err = trie.ErrNamespaceUnknown
	}
	if errors.Is(err, trie.ErrNamespaceUnknown) {
		return n.announce(first)
	}
	if err != nil {
		return err
	}
	want, err := n.index.PlanFollow(def, revoked)
	if err != nil {
		return err
	}
	if want.Epoch != ns.Epoch || !slices.Equal(want.Older, ns.Older) {
		if _, err := n.setEpochs(ctx, want); err != nil {
			return err
		}
	}
	if ns.QuotaBytes != def.QuotaBytes {
		if err := n.setQuota(ctx, def.Name, def.QuotaBytes); err != nil {
			return err
		}
	}
	if ns.Replicas != def.Replicas {
		return n.setReplicas(ctx, def.Name, def.Replicas)
	}
	return nil
}
