package trie

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/penstock-kv/penstock/kv"
)

var (
	formatKey = []byte{metaKey, 'f', 'o', 'r', 'm', 'a', 't'}
	marksKey  = []byte{metaKey, 'm', 'a', 'r', 'k', 's'}
	ownerKey  = []byte{metaKey, 'o', 'w', 'n', 'e', 'r'}
)

// Create adds a namespace under def.Name, gives it an id that was never used
// before in this index, and makes it durable. def.ID is ignored. When the name is
// taken it returns the namespace that has it and ErrNamespaceExists.
func (t *Trie) Create(def kv.Namespace) (kv.Namespace, error) {
	if err := def.Validate(); err != nil {
		return kv.Namespace{}, fmt.Errorf("trie: create: %w", err)
	}
	t.defMu.Lock()
	defer t.defMu.Unlock()
	if old, err := t.Namespace(def.Name); err == nil {
		return old, fmt.Errorf("trie: create %q: %w", def.Name, ErrNamespaceExists)
	}
	if n := len(t.Namespaces()); n >= t.opts.MaxNamespaces {
		return kv.Namespace{}, fmt.Errorf("trie: create %q: %d namespaces, at most %d: %w", def.Name, n, t.opts.MaxNamespaces, ErrTooManyNamespaces)
	}
	if t.marks.NamespaceID == math.MaxUint32 {
		return kv.Namespace{}, fmt.Errorf("trie: create %q: every namespace id was used once: %w", def.Name, ErrTooManyNamespaces)
	}
	def = clone(def)
	def.ID = t.marks.NamespaceID + 1
	ns := newNamespace(def, t.opts.SlotBytes)
	if err := t.writeDefinition(ns, def, true); err != nil {
		return kv.Namespace{}, err
	}
	return clone(def), nil
}

// clone copies what def refers to, so that no caller can change the index's own.
func clone(def kv.Namespace) kv.Namespace {
	def.Salt = slices.Clone(def.Salt)
	def.Geometry.Groups = slices.Clone(def.Geometry.Groups)
	return def
}

// writeDefinition makes def durable, and with fresh gives the namespace an empty
// space, leaving the old one, if any, to ReclaimStep. defMu is held.
func (t *Trie) writeDefinition(ns *namespace, def kv.Namespace, fresh bool) error {
	next := t.marks
	next.NamespaceID = max(next.NamespaceID, def.ID)
	sp := ns.space
	if fresh {
		next.Serial++
		sp = &space{ns: ns, serial: next.Serial, epoch: def.Epoch}
		if err := t.reserveSpace(sp); err != nil {
			return err
		}
	}
	err := t.commitDefinition(ns, def, sp.serial, next)
	t.mu.Lock()
	defer t.mu.Unlock()
	if err != nil {
		if fresh {
			sp.dead = true
			t.dropSpaceLocked(sp)
		}
		return err
	}
	t.marks = next
	old := ns.space
	ns.def, ns.space = def, sp
	t.namespaces[def.ID], t.byName[def.Name] = ns, ns
	if old != nil && fresh {
		t.killSpaceLocked(old)
	}
	return nil
}

func (t *Trie) reserveSpace(sp *space) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return ErrClosed
	}
	return t.addSpaceLocked(sp)
}

// commitDefinition writes def durably. If that fails, ns.def stays the definition on
// disk.
func (t *Trie) commitDefinition(ns *namespace, def kv.Namespace, serial uint64, m marks) error {
	value, err := encodeNamespace(def, serial)
	if err != nil {
		return fmt.Errorf("trie: namespace %q: %w", def.Name, err)
	}
	meta, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("trie: marks: %w", err)
	}
	b := t.disk.db.NewBatch()
	if err := errors.Join(b.Set(appendNamespaceKey(nil, def.ID), value, nil), b.Set(marksKey, meta, nil)); err != nil {
		b.Close()
		return fmt.Errorf("trie: namespace %q: %w", def.Name, err)
	}
	key, old, err := ns.stored(def.ID)
	if err != nil {
		b.Close()
		return err
	}
	return t.disk.commit(b, true, func(r reverts) { r[string(key)] = old })
}

// stored returns the key and the value of the record of ns.def. value is nil if ns is
// being created. defMu is held.
func (ns *namespace) stored(id kv.NamespaceID) (key, value []byte, err error) {
	key = appendNamespaceKey(nil, id)
	if ns.space == nil {
		return key, nil, nil
	}
	value, err = encodeNamespace(ns.def, ns.space.serial)
	if err != nil {
		return nil, nil, fmt.Errorf("trie: namespace %q: %w", ns.def.Name, err)
	}
	return key, value, nil
}

// byNameOrErr finds a namespace. Fields of the result change only while defMu is held.
func (t *Trie) byNameOrErr(name string) (*namespace, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.closed {
		return nil, ErrClosed
	}
	ns, ok := t.byName[name]
	if !ok {
		return nil, fmt.Errorf("trie: namespace %q: %w", name, ErrNamespaceUnknown)
	}
	return ns, nil
}

// Namespace returns the definition of a namespace with its current epoch, or
// ErrNamespaceUnknown.
func (t *Trie) Namespace(name string) (kv.Namespace, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if ns, ok := t.byName[name]; ok && !t.closed {
		return clone(ns.def), nil
	}
	return kv.Namespace{}, fmt.Errorf("trie: namespace %q: %w", name, ErrNamespaceUnknown)
}

// NamespaceByID is Namespace by id.
func (t *Trie) NamespaceByID(id kv.NamespaceID) (kv.Namespace, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	ns, err := t.lookupLocked(id)
	if err != nil {
		return kv.Namespace{}, err
	}
	return clone(ns.def), nil
}

// Namespaces returns every definition, sorted by name.
func (t *Trie) Namespaces() []kv.Namespace {
	t.mu.RLock()
	defer t.mu.RUnlock()
	defs := make([]kv.Namespace, 0, len(t.byName))
	for _, ns := range t.sortedLocked() {
		defs = append(defs, clone(ns.def))
	}
	return defs
}

func (t *Trie) sortedLocked() []*namespace {
	return slices.SortedFunc(maps.Values(t.byName), func(a, b *namespace) int {
		return strings.Compare(a.def.Name, b.def.Name)
	})
}

// DeleteNamespace removes the definition durably. Afterwards no piece of the namespace
// is matchable, and ReclaimStep returns its pieces. Leases without a TTL on its pieces
// end, unless Hold made them.
func (t *Trie) DeleteNamespace(name string) error {
	t.defMu.Lock()
	defer t.defMu.Unlock()
	ns, err := t.byNameOrErr(name)
	if err != nil {
		return err
	}
	key, old, err := ns.stored(ns.def.ID)
	if err != nil {
		return err
	}
	b := t.disk.db.NewBatch()
	if err := b.Delete(key, nil); err != nil {
		b.Close()
		return fmt.Errorf("trie: delete namespace %q: %w", name, err)
	}
	if err := t.disk.commit(b, true, func(r reverts) { r[string(key)] = old }); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.byName, name)
	delete(t.namespaces, ns.def.ID)
	t.leases.endPins(t, ns)
	t.killSpaceLocked(ns.space)
	return nil
}

// BumpEpoch moves a namespace to a later epoch with one synced write, whatever the
// number of its blocks. All its blocks become unmatchable, and ReclaimStep returns
// them. If to is 0, the new epoch is the current one + 1; else to must be greater than
// the current epoch (ErrEpoch).
func (t *Trie) BumpEpoch(name string, to kv.Epoch) (old, current kv.Epoch, err error) {
	t.defMu.Lock()
	defer t.defMu.Unlock()
	ns, err := t.byNameOrErr(name)
	if err != nil {
		return 0, 0, err
	}
	def := ns.def
	old = def.Epoch
	if to == 0 {
		to = old + 1
	}
	if to <= old {
		return old, old, fmt.Errorf("trie: namespace %q: epoch %d after %d: %w", name, to, old, ErrEpoch)
	}
	def.Epoch = to
	if err := t.writeDefinition(ns, def, true); err != nil {
		return old, old, err
	}
	return old, to, nil
}

// DeleteAll makes every block of the namespace unmatchable, durably. The epoch does
// not change.
func (t *Trie) DeleteAll(id kv.NamespaceID) error {
	t.defMu.Lock()
	defer t.defMu.Unlock()
	t.mu.RLock()
	ns, err := t.lookupLocked(id)
	t.mu.RUnlock()
	if err != nil {
		return err
	}
	return t.writeDefinition(ns, ns.def, true)
}

// SetQuota changes a namespace's quota durably; 0 means none. SetQuota evicts nothing.
// If the namespace holds more than the new quota, Evict takes from that namespace
// first, and Put refuses until the namespace is below the quota.
func (t *Trie) SetQuota(name string, bytes int64) error {
	t.defMu.Lock()
	defer t.defMu.Unlock()
	ns, err := t.byNameOrErr(name)
	if err != nil {
		return err
	}
	def := ns.def
	def.QuotaBytes = bytes
	if err := def.Validate(); err != nil {
		return fmt.Errorf("trie: set quota: %w", err)
	}
	return t.writeDefinition(ns, def, false)
}

// Room returns how many bytes of slots may still be put into the namespace before
// its quota is reached: math.MaxInt64 without a quota, 0 above the quota.
func (t *Trie) Room(id kv.NamespaceID) (int64, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	ns, err := t.lookupLocked(id)
	switch {
	case err != nil:
		return 0, err
	case ns.def.QuotaBytes == 0:
		return math.MaxInt64, nil
	}
	return max(0, ns.def.QuotaBytes-ns.bytes), nil
}

// start writes the format version into an empty database, or checks it, and
// reads the marks.
func (t *Trie) start() error {
	version, err := t.disk.get(formatKey)
	if err != nil {
		return err
	}
	switch {
	case version == nil:
		return t.format()
	case string(version) != formatVersion:
		return fmt.Errorf("version %q; this build reads %s: %w", version, formatVersion, ErrFormat)
	}
	if err := t.checkOwner(); err != nil {
		return err
	}
	meta, err := t.disk.get(marksKey)
	if err != nil || meta == nil {
		return err
	}
	if err := json.Unmarshal(meta, &t.marks); err != nil {
		return fmt.Errorf("%w: marks %q: %w", ErrFormat, meta, err)
	}
	return nil
}

// checkOwner returns ErrForeign for the index of another store. It writes Options.Owner
// into an index without an owner.
func (t *Trie) checkOwner() error {
	owner, err := t.disk.get(ownerKey)
	switch {
	case err != nil:
		return err
	case t.opts.Owner == "" || string(owner) == t.opts.Owner:
		return nil
	case owner != nil:
		return fmt.Errorf("it was made for store %s, not for %s: %w", owner, t.opts.Owner, ErrForeign)
	}
	b := t.disk.db.NewBatch()
	if err := b.Set(ownerKey, []byte(t.opts.Owner), nil); err != nil {
		b.Close()
		return err
	}
	return t.disk.commit(b, true, nil)
}

func (t *Trie) format() error {
	it, err := t.disk.db.NewIter(nil)
	if err != nil {
		return err
	}
	empty := !it.First()
	if err := it.Close(); err != nil {
		return err
	}
	if !empty {
		return fmt.Errorf("the directory holds a Pebble database that is not an index of penstock: %w", ErrFormat)
	}
	b := t.disk.db.NewBatch()
	err = b.Set(formatKey, []byte(formatVersion), nil)
	if t.opts.Owner != "" {
		err = errors.Join(err, b.Set(ownerKey, []byte(t.opts.Owner), nil))
	}
	if err != nil {
		b.Close()
		return err
	}
	return t.disk.commit(b, true, nil)
}
