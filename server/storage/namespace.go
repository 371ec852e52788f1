package storage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

// The catalogue is what the volumes know of the namespaces and of what was
// deleted, so that data alone is enough to rebuild the index. It is written
// before an epoch is bumped in the index, and before a namespace is deleted
// there: after a crash in between, no block of an old epoch can come back.
type catalogue struct {
	Version    int            `json:"version"`
	Namespaces []kv.Namespace `json:"namespaces"`
	// Highest is the highest namespace id that was given out. The slots of a
	// deleted namespace may lie on a volume that a rebuild does not see.
	Highest kv.NamespaceID `json:"highest,omitempty"`
	// Deleted are the deletions in the namespaces' current epochs.
	Deleted []deletedPieces `json:"deleted,omitempty"`
}

// catalogueVersion is written; version 1 has no deletions.
const catalogueVersion = 2

// decodeCatalogue reads a blob that encodeCatalogue made; an empty one has no
// namespaces.
func decodeCatalogue(blob []byte) (catalogue, error) {
	if len(blob) == 0 {
		return catalogue{Version: catalogueVersion}, nil
	}
	var c catalogue
	if err := json.Unmarshal(blob, &c); err != nil {
		return catalogue{}, fmt.Errorf("storage: catalogue: %w", err)
	}
	if c.Version < 1 || c.Version > catalogueVersion {
		return catalogue{}, fmt.Errorf("storage: catalogue of version %d; this binary knows versions up to %d", c.Version, catalogueVersion)
	}
	return c, nil
}

// writeCatalogue makes the namespaces, and the deletions in them, durable. nsMu
// is held.
func (n *Node) writeCatalogue(ctx context.Context, namespaces []kv.Namespace) error {
	for {
		deleted, count := n.deleted.encode(namespaces)
		blob, err := json.Marshal(catalogue{Version: catalogueVersion, Namespaces: namespaces, Highest: n.index.HighestNamespace(), Deleted: deleted})
		if err != nil {
			return fmt.Errorf("storage: catalogue: %w", err)
		}
		err = n.store.SetCatalogue(ctx, blob)
		if errors.Is(err, blockstore.ErrTooLarge) && n.deleted.collapse() {
			continue
		}
		if err == nil {
			n.deleted.wrote(namespaces, count)
		}
		return err
	}
}

// reconcileNamespaces brings epochs and deletions in the index up to those of the
// catalogue, and then the catalogue up to the index.
func (n *Node) reconcileNamespaces(ctx context.Context) error {
	c, err := decodeCatalogue(n.store.Catalogue())
	if err != nil {
		return err
	}
	if err := n.deleted.load(c); err != nil {
		return err
	}
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
		if old.Epoch > ns.Epoch {
			if _, _, err := n.index.BumpEpoch(ns.Name, old.Epoch); err != nil {
				return err
			}
		}
	}
	certain := n.store.CatalogueCertain()
	for _, ns := range n.index.Namespaces() {
		switch {
		case !certain:
			// A volume that is missing may know deletions and epochs that this catalogue
			// does not: a later rebuild must not rely on what is older than this start.
			n.deleted.raiseFloor(ns.ID, n.store.NewestGeneration())
		case ns.ID <= c.Highest && !slices.ContainsFunc(c.Namespaces, func(old kv.Namespace) bool { return old.ID == ns.ID }):
			// It left the catalogue, and its deletion from the index was cut short, or
			// the index was missing at the time.
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
		n.opts.Logger.Warn("the volumes know namespaces and the index does not: it was lost or is new; run `penstock store rebuild-index` before serving if the cache should survive", "namespaces", len(c.Namespaces))
	}
	return n.writeCatalogue(ctx, namespaces)
}

// CreateNamespace adds a namespace. If one of that name and the same definition
// is there, it is returned; if the definition differs, the error is
// trie.ErrNamespaceExists. Epochs begin at 1: in a request, 0 means the current
// one, so a namespace at 0 could not be asked for by name, and a reader that had
// matched there would be given what was stored after a bump.
func (n *Node) CreateNamespace(ctx context.Context, def kv.Namespace) (kv.Namespace, error) {
	def.Epoch = max(1, def.Epoch)
	if err := def.Validate(); err != nil {
		return kv.Namespace{}, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	for i, g := range def.Geometry.Groups {
		if _, err := n.store.SlotLayout(def.Geometry.PieceBytes(i), g.Layers); err != nil {
			return kv.Namespace{}, fmt.Errorf("%w: namespace %q, group %d: %w", ErrRequest, def.Name, i, err)
		}
		if piece := def.Geometry.PieceBytes(i); piece > min(n.opts.LoadBytesMax, n.opts.WriteBytesMax) {
			return kv.Namespace{}, fmt.Errorf("%w: namespace %q: a block of %d bytes is more than one call may move (%d); raise limits.read_bytes and limits.write_bytes", ErrRequest, def.Name, piece, min(n.opts.LoadBytesMax, n.opts.WriteBytesMax))
		}
	}
	if err := n.checkQuota(def, def.QuotaBytes); err != nil {
		return kv.Namespace{}, err
	}
	n.nsMu.Lock()
	defer n.nsMu.Unlock()
	ns, err := n.index.Create(def)
	if errors.Is(err, trie.ErrNamespaceExists) {
		same := ns.Geometry.Equal(def.Geometry) && ns.Tenant == def.Tenant && string(ns.Salt) == string(def.Salt) && ns.Index == def.Index
		switch {
		case same && def.QuotaBytes != 0 && def.QuotaBytes != ns.QuotaBytes:
			return ns, fmt.Errorf("namespace %q has a quota of %d bytes, not %d; change it with: penstock ns quota %s %d: %w", ns.Name, ns.QuotaBytes, def.QuotaBytes, ns.Name, def.QuotaBytes, trie.ErrNamespaceExists)
		case same:
			return ns, nil
		}
		return ns, fmt.Errorf("namespace %q has another definition (%v, tenant %q, index %v): %w", ns.Name, ns.Geometry, ns.Tenant, ns.Index, trie.ErrNamespaceExists)
	}
	if err != nil {
		return kv.Namespace{}, err
	}
	if err := n.writeCatalogue(ctx, n.index.Namespaces()); err != nil {
		// A namespace that the volumes do not know would not survive the index.
		return kv.Namespace{}, errors.Join(err, n.index.DeleteNamespace(ns.Name))
	}
	n.opts.Metrics.AddNamespace(ns.Name)
	return ns, nil
}

// checkQuota refuses a quota in which not one block of the namespace has room.
func (n *Node) checkQuota(ns kv.Namespace, quotaBytes int64) error {
	if quotaBytes < 0 {
		return fmt.Errorf("%w: namespace %q: a quota of %d bytes; want 0 for none, or more", ErrRequest, ns.Name, quotaBytes)
	}
	var block int64
	for i, g := range ns.Geometry.Groups {
		layout, err := n.store.SlotLayout(ns.Geometry.PieceBytes(i), g.Layers)
		if err != nil {
			return fmt.Errorf("%w: namespace %q, group %d: %w", ErrRequest, ns.Name, i, err)
		}
		block += layout.SlotBytes()
	}
	if quotaBytes != 0 && quotaBytes < block {
		return fmt.Errorf("%w: namespace %q: a quota of %d bytes has room for no block, which takes %d on storage", ErrRequest, ns.Name, quotaBytes, block)
	}
	return nil
}

// Namespace returns a namespace with its current epoch, or
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

// DeleteNamespace makes a namespace and all its blocks unknown; their slots come
// back in the background. It returns what it held. With dryRun nothing changes.
func (n *Node) DeleteNamespace(ctx context.Context, name string, dryRun bool) (Removed, error) {
	n.nsMu.Lock()
	defer n.nsMu.Unlock()
	ns, err := n.Namespace(name)
	if err != nil {
		return Removed{}, err
	}
	held := n.held(ns.ID)
	if dryRun {
		return held, nil
	}
	if err := n.index.Writable(); err != nil {
		return Removed{}, err
	}
	rest := slices.DeleteFunc(n.index.Namespaces(), func(other kv.Namespace) bool { return other.ID == ns.ID })
	if err := n.writeCatalogue(ctx, rest); err != nil {
		return Removed{}, err
	}
	if err := n.index.DeleteNamespace(name); err != nil {
		return Removed{}, n.undoCatalogue(ctx, err)
	}
	n.opts.Metrics.RemoveNamespace(name)
	n.cleared()
	return held, nil
}

// BumpEpoch makes every block of the namespace unmatchable. Its cost does not depend on
// the number of blocks. If to is 0, the new epoch is the current one + 1.
func (n *Node) BumpEpoch(ctx context.Context, name string, to kv.Epoch) (old, current kv.Epoch, err error) {
	n.nsMu.Lock()
	defer n.nsMu.Unlock()
	ns, err := n.Namespace(name)
	if err != nil {
		return 0, 0, err
	}
	if to == 0 {
		to = ns.Epoch + 1
	}
	if to <= ns.Epoch {
		return 0, 0, fmt.Errorf("%w: namespace %q is at epoch %d; it cannot go to %d: %w", ErrRequest, name, ns.Epoch, to, trie.ErrEpoch)
	}
	if err := n.index.Writable(); err != nil {
		return 0, 0, err
	}
	namespaces := n.index.Namespaces()
	for i := range namespaces {
		if namespaces[i].ID == ns.ID {
			namespaces[i].Epoch = to
		}
	}
	if err := n.writeCatalogue(ctx, namespaces); err != nil {
		return 0, 0, err
	}
	old, current, err = n.index.BumpEpoch(name, to)
	if err != nil {
		return 0, 0, n.undoCatalogue(ctx, err)
	}
	n.cleared()
	return old, current, nil
}

// undoCatalogue writes the namespaces of the index to the catalogue again, after the
// index refused a change that the catalogue already had. Otherwise the next start would
// apply the change and drop the blocks stored since. It returns refused, joined with the
// error of the write.
func (n *Node) undoCatalogue(ctx context.Context, refused error) error {
	return errors.Join(refused, n.writeCatalogue(ctx, n.index.Namespaces()))
}

// cleared publishes that no block of a namespace is matchable, and wakes reclaimLoop to
// free their slots.
func (n *Node) cleared() {
	n.publishChanges()
	n.wakeReclaim()
}

// SetQuota changes how many bytes of slots the namespace may occupy; 0 means no
// cap of its own.
func (n *Node) SetQuota(ctx context.Context, name string, quotaBytes int64) (kv.Namespace, error) {
	n.nsMu.Lock()
	defer n.nsMu.Unlock()
	ns, err := n.Namespace(name)
	if err != nil {
		return kv.Namespace{}, err
	}
	if err := n.checkQuota(ns, quotaBytes); err != nil {
		return kv.Namespace{}, err
	}
	if err := n.index.SetQuota(name, quotaBytes); err != nil {
		return kv.Namespace{}, err
	}
	if err := n.writeCatalogue(ctx, n.index.Namespaces()); err != nil {
		return kv.Namespace{}, err
	}
	return n.Namespace(name)
}
