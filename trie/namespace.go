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

// Create adds a namespace under def.Name, gives it an id that this index never used before, and
// writes it durably. Its only live epoch is def.Epoch; def.ID, Older and Keep are ignored. If the
// name is taken, Create returns the namespace with that name and ErrNamespaceExists.
func (t *Trie) Create(def kv.Namespace) (kv.Namespace, error) {
	if err := def.Validate(); err != nil {
		return kv.Namespace{}, fmt.Errorf("trie: create: %w", err)
	}
	return t.create(def, false)
}

// Announce adds a namespace, as Create does, but writes nothing: the namespace takes no number of a
// space and no room on the drive until Record, and ends with the process. Before Record no piece can
// be put. A process that ends before Record may give the id to another namespace later.
func (t *Trie) Announce(def kv.Namespace) (kv.Namespace, error) {
	if err := def.Validate(); err != nil {
		return kv.Namespace{}, fmt.Errorf("trie: announce: %w", err)
	}
	return t.create(def, true)
}

// create adds a checked namespace.
func (t *Trie) create(def kv.Namespace, announced bool) (kv.Namespace, error) {
	t.defMu.Lock()
	defer t.defMu.Unlock()
	if old, err := t.Namespace(def.Name); err == nil {
		return old, fmt.Errorf("trie: create %q: %w", def.Name, ErrNamespaceExists)
	}
	if err := t.hasRoom(def.Name, announced); err != nil {
		return kv.Namespace{}, err
	}
	if t.marks.NamespaceID == math.MaxUint32 {
		return kv.Namespace{}, fmt.Errorf("trie: create %q: every namespace id was used once: %w", def.Name, ErrTooManyNamespaces)
	}
	def = clone(def)
	def.ID, def.Older, def.Keep = t.marks.NamespaceID+1, nil, 0
	ns := newNamespace(def, t.opts.SlotBytes)
	ns.announced = announced
	if err := t.writeDefinition(ns, def, false); err != nil {
		return kv.Namespace{}, err
	}
	return clone(def), nil
}

// hasRoom returns an error if the namespace would be one too many.
func (t *Trie) hasRoom(name string, announced bool) error {
	t.mu.RLock()
	recorded := len(t.recorded)
	waiting := len(t.byName) - recorded
	t.mu.RUnlock()
	switch {
	case announced && waiting >= t.opts.MaxAnnounced:
		return fmt.Errorf("trie: announce %q: %d namespaces without blocks, at most %d: %w", name, waiting, t.opts.MaxAnnounced, ErrTooManyNamespaces)
	case !announced && recorded >= t.opts.MaxNamespaces:
		return fmt.Errorf("trie: create %q: %d namespaces, at most %d: %w", name, recorded, t.opts.MaxNamespaces, ErrTooManyNamespaces)
	}
	return nil
}

// IsAnnounced reports whether the namespace was announced and has no record yet.
func (t *Trie) IsAnnounced(id kv.NamespaceID) bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	ns, ok := t.namespaces[id]
	return ok && ns.announced
}

// Record writes an announced namespace durably, so that pieces can be put. It keeps the id, the live
// epochs and the pins. A namespace that has a record stays as it is.
func (t *Trie) Record(id kv.NamespaceID) error {
	t.defMu.Lock()
	defer t.defMu.Unlock()
	t.mu.RLock()
	ns, err := t.lookupLocked(id)
	t.mu.RUnlock()
	if err != nil || !ns.announced {
		return err
	}
	if err := t.hasRoom(ns.def.Name, false); err != nil {
		return err
	}
	next := t.marks
	t.mu.Lock()
	for _, sp := range slices.Backward(ns.live) { // the oldest first, as in writeDefinition
		next.Serial++
		sp.serial = next.Serial
	}
	t.mu.Unlock()
	if err = t.reserveSpaces(ns.live); err == nil {
		err = t.commitDefinition(ns, ns.def, ns.live, next)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err != nil {
		for _, sp := range ns.live {
			t.freeSpaceLocked(sp)
			sp.number, sp.serial, sp.dead = 0, 0, false
		}
		return err
	}
	t.marks, ns.announced, t.recorded[id] = next, false, ns
	return nil
}

// clone copies the slices of def, so that no caller can change the definition in the index.
func clone(def kv.Namespace) kv.Namespace {
	def.Salt = slices.Clone(def.Salt)
	def.Older = slices.Clone(def.Older)
	def.Geometry.Groups = slices.Clone(def.Geometry.Groups)
	return def
}

// writeDefinition makes def durable. It creates an empty space (the set of nodes of one epoch) for
// each live epoch that has none, or, if wipe is set, for every live epoch. It leaves the spaces of
// other epochs to ReclaimStep. If ns is announced, the change is in DRAM only. defMu is held.
func (t *Trie) writeDefinition(ns *namespace, def kv.Namespace, wipe bool) error {
	next := t.marks
	next.NamespaceID = max(next.NamespaceID, def.ID)
	epochs := def.Live()
	live := make([]*space, len(epochs))
	var fresh []*space
	// The loop begins with the oldest epoch, so that a later epoch gets a higher serial (the number
	// of its space on disk).
	for i, e := range slices.Backward(epochs) {
		if live[i] = ns.version(e); live[i] != nil && !wipe {
			continue
		}
		live[i] = &space{ns: ns, epoch: e}
		if !ns.announced {
			next.Serial++
			live[i].serial = next.Serial
			fresh = append(fresh, live[i])
		}
	}
	if err := t.reserveSpaces(fresh); err != nil {
		return err
	}
	var err error
	if !ns.announced {
		err = t.commitDefinition(ns, def, live, next)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err != nil {
		t.dropSpacesLocked(fresh)
		return err
	}
	t.marks = next
	old := ns.live
	ns.def, ns.live, ns.tenant = def, live, t.tenantOfLocked(def.Name)
	t.namespaces[def.ID], t.byName[def.Name] = ns, ns
	if !ns.announced {
		t.recorded[def.ID] = ns
	}
	for _, sp := range old {
		if !slices.Contains(live, sp) {
			t.killSpaceLocked(sp)
		}
	}
	return nil
}

// reserveSpaces assigns numbers to all of the spaces, or to none.
func (t *Trie) reserveSpaces(spaces []*space) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return ErrClosed
	}
	for i, sp := range spaces {
		if err := t.addSpaceLocked(sp); err != nil {
			t.dropSpacesLocked(spaces[:i])
			return err
		}
	}
	return nil
}

// dropSpacesLocked frees the numbers of spaces that reserveSpaces has reserved, but that were never
// used.
func (t *Trie) dropSpacesLocked(spaces []*space) {
	for _, sp := range spaces {
		sp.dead = true
		t.dropSpaceLocked(sp)
	}
}

// commitDefinition writes def durably. After an error ns.def is still the definition on disk.
func (t *Trie) commitDefinition(ns *namespace, def kv.Namespace, live []*space, m marks) error {
	value, err := encodeNamespace(def, live)
	if err != nil {
		return fmt.Errorf("trie: namespace %q: %w", def.Name, err)
	}
	meta, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("trie: marks: %w", err)
	}
	b := t.disk.Load().db.NewBatch()
	if err := errors.Join(b.Set(appendNamespaceKey(nil, def.ID), value, nil), b.Set(marksKey, meta, nil)); err != nil {
		b.Close()
		return fmt.Errorf("trie: namespace %q: %w", def.Name, err)
	}
	key, old, err := ns.stored(def.ID)
	if err != nil {
		b.Close()
		return err
	}
	return t.commit(b, true, func(r reverts) { r[string(key)] = old })
}

// stored returns the key and the value of the stored record of ns.def. value is nil if ns has no record
// yet: it is being created, or it is announced. defMu is held.
func (ns *namespace) stored(id kv.NamespaceID) (key, value []byte, err error) {
	key = appendNamespaceKey(nil, id)
	if ns.live == nil || ns.announced {
		return key, nil, nil
	}
	value, err = encodeNamespace(ns.def, ns.live)
	if err != nil {
		return nil, nil, fmt.Errorf("trie: namespace %q: %w", ns.def.Name, err)
	}
	return key, value, nil
}

// byNameOrErr returns the namespace with that name, or an error. The fields of the result change
// only while defMu is held.
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

// Namespace returns the definition of a namespace with its live epochs, or
// ErrNamespaceUnknown.
func (t *Trie) Namespace(name string) (kv.Namespace, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if ns, ok := t.byName[name]; ok && !t.closed {
		return clone(ns.def), nil
	}
	return kv.Namespace{}, fmt.Errorf("trie: namespace %q: %w", name, ErrNamespaceUnknown)
}

// NamespaceByID is Namespace with the id in place of the name.
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
	return definitions(t.byName)
}

// Recorded returns the definitions of the namespaces that are not announced, sorted by name.
func (t *Trie) Recorded() []kv.Namespace {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return definitions(t.recorded)
}

// definitions returns copies of the definitions of namespaces, sorted by name.
func definitions[K comparable](all map[K]*namespace) []kv.Namespace {
	defs := make([]kv.Namespace, 0, len(all))
	for _, ns := range sorted(all) {
		defs = append(defs, clone(ns.def))
	}
	return defs
}

// sorted returns namespaces in the order of their names.
func sorted[K comparable](all map[K]*namespace) []*namespace {
	return slices.SortedFunc(maps.Values(all), func(a, b *namespace) int {
		return strings.Compare(a.def.Name, b.def.Name)
	})
}

// DeleteNamespace removes the definition durably. Afterwards no piece of the namespace is
// matchable, and ReclaimStep returns the pieces. Leases on the pieces that have no TTL end, except
// leases of Hold.
func (t *Trie) DeleteNamespace(name string) error {
	t.defMu.Lock()
	defer t.defMu.Unlock()
	ns, err := t.byNameOrErr(name)
	if err != nil {
		return err
	}
	if !ns.announced {
		if err := t.deleteDefinition(ns); err != nil {
			return err
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.byName, name)
	delete(t.namespaces, ns.def.ID)
	delete(t.recorded, ns.def.ID)
	t.leases.endPins(t, ns)
	for _, sp := range ns.live {
		t.killSpaceLocked(sp)
	}
	return nil
}

// deleteDefinition deletes the record of a namespace durably. defMu is held.
func (t *Trie) deleteDefinition(ns *namespace) error {
	key, old, err := ns.stored(ns.def.ID)
	if err != nil {
		return err
	}
	b := t.disk.Load().db.NewBatch()
	if err := b.Delete(key, nil); err != nil {
		b.Close()
		return fmt.Errorf("trie: delete namespace %q: %w", ns.def.Name, err)
	}
	return t.commit(b, true, func(r reverts) { r[string(key)] = old })
}

// PlanBump returns the definition that the namespace has after a bump to a later epoch (see
// kv.Namespace.Bump). It changes nothing; SetEpochs applies the definition. If to is 0, the new
// epoch is the next one. keep is the number of epochs that stay live without a pin; 0 means 1.
// Errors: ErrNamespaceUnknown; ErrEpoch if to is not greater than the newest epoch or is above
// kv.MaxEpoch, or if keep is more than kv.MaxLive.
func (t *Trie) PlanBump(name string, to kv.Epoch, keep int) (kv.Namespace, error) {
	t.defMu.Lock()
	defer t.defMu.Unlock()
	ns, err := t.byNameOrErr(name)
	if err != nil {
		return kv.Namespace{}, err
	}
	switch {
	case to == 0:
		to = ns.def.Epoch + 1
	case to > kv.MaxEpoch:
		return kv.Namespace{}, fmt.Errorf("trie: namespace %q: epoch %d; at most %d: %w", name, to, kv.MaxEpoch, ErrEpoch)
	}
	if to <= ns.def.Epoch {
		return kv.Namespace{}, fmt.Errorf("trie: namespace %q: epoch %d after %d: %w", name, to, ns.def.Epoch, ErrEpoch)
	}
	if keep < 0 || keep > kv.MaxLive {
		return kv.Namespace{}, fmt.Errorf("trie: namespace %q: keep %d epochs; want 1 to %d: %w", name, keep, kv.MaxLive, ErrEpoch)
	}
	return ns.def.Bump(to, max(1, keep), t.pinned(ns)), nil
}

// PlanRetire returns the definition of the namespace without the given older epoch. It changes
// nothing; SetEpochs applies the definition. Errors: ErrNamespaceUnknown, ErrEpoch if the epoch is
// the newest or not live, and ErrPinned if the epoch is pinned and force is not set.
func (t *Trie) PlanRetire(name string, epoch kv.Epoch, force bool) (kv.Namespace, error) {
	t.defMu.Lock()
	defer t.defMu.Unlock()
	ns, err := t.byNameOrErr(name)
	switch {
	case err != nil:
		return kv.Namespace{}, err
	case epoch == ns.def.Epoch:
		return kv.Namespace{}, fmt.Errorf("trie: namespace %q: epoch %d is the newest, which a bump retires: %w", name, epoch, ErrEpoch)
	case !ns.def.IsLive(epoch):
		return kv.Namespace{}, fmt.Errorf("trie: namespace %q: epoch %d is not live; live are %d: %w", name, epoch, ns.def.Live(), ErrEpoch)
	case !force && t.pinned(ns)(epoch):
		return kv.Namespace{}, fmt.Errorf("trie: namespace %q: epoch %d: %w", name, epoch, ErrPinned)
	}
	return ns.def.Retire(epoch), nil
}

// PlanFollow returns the definition of the namespace with the newest epoch, the quota and the kept
// older epochs of def, for an index that follows the namespaces of a cluster. Pinned epochs stay
// live, except the epochs in revoked. It changes nothing; SetEpochs applies the definition. Errors:
// ErrNamespaceUnknown, and ErrEpoch if the newest epoch of the index is above def.Epoch.
func (t *Trie) PlanFollow(def kv.Namespace, revoked []kv.Epoch) (kv.Namespace, error) {
	t.defMu.Lock()
	defer t.defMu.Unlock()
	ns, err := t.byNameOrErr(def.Name)
	if err != nil {
		return kv.Namespace{}, err
	}
	if def.Epoch < ns.def.Epoch {
		return kv.Namespace{}, fmt.Errorf("trie: namespace %q: epoch %d after %d: %w", def.Name, def.Epoch, ns.def.Epoch, ErrEpoch)
	}
	pinned := t.pinned(ns)
	want := clone(ns.def)
	want.Epoch, want.Older, want.Keep = def.Epoch, nil, 1
	for _, e := range ns.def.Live() {
		kept := slices.Contains(def.Older, e)
		switch {
		case e == def.Epoch || slices.Contains(revoked, e) || !kept && !pinned(e) || len(want.Older) == kv.MaxLive-1:
			continue
		case kept:
			want.Keep = len(want.Older) + 2 // also the pinned epochs between kept ones, until the next bump
		}
		want.Older = append(want.Older, e)
	}
	return want, nil
}

// Unsettled finds the namespaces with an epoch that was live only because of a pin, if the pin has
// ended. It returns the definitions of these namespaces without such epochs. SetEpochs with a
// returned definition retires the epochs.
func (t *Trie) Unsettled() (defs []kv.Namespace) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for _, ns := range t.namespaces {
		if len(ns.def.Older) < max(1, ns.def.Keep) {
			continue
		}
		if def := ns.def.Settle(t.pinned(ns)); len(def.Older) < len(ns.def.Older) {
			defs = append(defs, clone(def))
		}
	}
	return defs
}

// SetEpochs sets the newest epoch, the older live epochs and Keep of the namespace want.ID to those
// of want. It makes one synced write, whatever the number of blocks. It ignores an older epoch of
// want that is not live. The blocks of epochs that are no longer live become unmatchable, and
// ReclaimStep returns them; a lease of PinEpoch on such an epoch has no effect. SetEpochs returns
// the retired epochs. Errors: ErrNamespaceUnknown, ErrEpoch if want.Epoch is below the newest
// epoch.
func (t *Trie) SetEpochs(want kv.Namespace) (retired []kv.Epoch, err error) {
	t.defMu.Lock()
	defer t.defMu.Unlock()
	t.mu.RLock()
	ns, err := t.lookupLocked(want.ID)
	t.mu.RUnlock()
	if err != nil {
		return nil, err
	}
	def, before := ns.def, ns.def.Live()
	if want.Epoch < def.Epoch {
		return nil, fmt.Errorf("trie: namespace %q: epoch %d after %d: %w", def.Name, want.Epoch, def.Epoch, ErrEpoch)
	}
	def.Epoch, def.Keep, def.Older = want.Epoch, want.Keep, nil
	for i, e := range want.Older {
		if ns.def.IsLive(e) {
			def.Older = append(def.Older, e)
		} else if i < want.Keep-1 {
			def.Keep--
		}
	}
	if err := def.Validate(); err != nil {
		return nil, fmt.Errorf("trie: %w", err)
	}
	if err := t.writeDefinition(ns, def, false); err != nil {
		return nil, err
	}
	for _, e := range before {
		if !def.IsLive(e) {
			retired = append(retired, e)
		}
	}
	return retired, nil
}

// DeleteAll makes every block of the namespace unmatchable, durably. The live epochs stay live, but
// lose their pins.
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

// SetQuota changes a namespace's quota durably; 0 means no quota. SetQuota evicts nothing. If the
// namespace holds more than the new quota, Evict takes from that namespace first, and Put refuses
// until the namespace is below the quota. Room.Bytes is the negative excess.
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

// SetReplicas changes Namespace.Replicas durably.
func (t *Trie) SetReplicas(name string, replicas int) error {
	t.defMu.Lock()
	defer t.defMu.Unlock()
	ns, err := t.byNameOrErr(name)
	if err != nil {
		return err
	}
	def := ns.def
	def.Replicas = replicas
	if err := def.Validate(); err != nil {
		return fmt.Errorf("trie: set replicas: %w", err)
	}
	return t.writeDefinition(ns, def, false)
}

// Room is what a namespace may still store.
type Room struct {
	// QuotaBytes is the quota of the namespace, and Bytes the size of the slots that it may still take,
	// negative above the quota. Both are math.MaxInt64 without a quota.
	QuotaBytes, Bytes int64
	// TenantQuotaBytes and TenantBytes are those of the namespace's tenant, and Tenant is the prefix of
	// its quota, "" if there is none.
	TenantQuotaBytes, TenantBytes int64
	Tenant                        string
}

// Room returns what the namespace may still store.
func (t *Trie) Room(id kv.NamespaceID) (Room, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	ns, err := t.lookupLocked(id)
	if err != nil {
		return Room{}, err
	}
	r := Room{math.MaxInt64, math.MaxInt64, math.MaxInt64, math.MaxInt64, ""}
	if q := ns.def.QuotaBytes; q != 0 {
		r.QuotaBytes, r.Bytes = q, q-ns.bytes
	}
	if tn := ns.tenant; tn != nil {
		r.TenantQuotaBytes, r.TenantBytes, r.Tenant = tn.quotaBytes, tn.quotaBytes-tn.bytes, tn.prefix
	}
	return r, nil
}

// start checks the format version of the database and reads the marks. It writes the version into
// an empty database and into one of singleEpochFormat, and refuses any other version.
func (t *Trie) start() error {
	version, err := t.disk.Load().get(formatKey)
	if err != nil {
		return err
	}
	switch {
	case version == nil:
		return t.format()
	case string(version) != formatVersion && string(version) != singleEpochFormat:
		return fmt.Errorf("version %q; this build reads %s and %s: %w", version, singleEpochFormat, formatVersion, ErrFormat)
	}
	if err := t.checkOwner(); err != nil {
		return err
	}
	if string(version) != formatVersion {
		if err := t.setMeta(formatKey, formatVersion); err != nil {
			return err
		}
	}
	meta, err := t.disk.Load().get(marksKey)
	if err != nil || meta == nil {
		return err
	}
	if err := json.Unmarshal(meta, &t.marks); err != nil {
		return fmt.Errorf("%w: marks %q: %w", ErrFormat, meta, err)
	}
	return nil
}

// checkOwner returns ErrForeign for the index of another store. If the index has no owner, it
// writes Options.Owner.
func (t *Trie) checkOwner() error {
	owner, err := t.disk.Load().get(ownerKey)
	switch {
	case err != nil:
		return err
	case t.opts.Owner == "" || string(owner) == t.opts.Owner:
		return nil
	case owner != nil:
		return fmt.Errorf("the index was made for store %s, not for %s: %w", owner, t.opts.Owner, ErrForeign)
	}
	return t.setMeta(ownerKey, t.opts.Owner)
}

// setMeta writes one key with its value and syncs.
func (t *Trie) setMeta(key []byte, value string) error {
	b := t.disk.Load().db.NewBatch()
	if err := b.Set(key, []byte(value), nil); err != nil {
		b.Close()
		return err
	}
	return t.commit(b, true, nil)
}

func (t *Trie) format() error {
	it, err := t.disk.Load().db.NewIter(nil)
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
	b := t.disk.Load().db.NewBatch()
	err = b.Set(formatKey, []byte(formatVersion), nil)
	if t.opts.Owner != "" {
		err = errors.Join(err, b.Set(ownerKey, []byte(t.opts.Owner), nil))
	}
	if err != nil {
		b.Close()
		return err
	}
	return t.commit(b, true, nil)
}
