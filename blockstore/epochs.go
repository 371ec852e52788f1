package blockstore

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/blockstore/crypt"
	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/kv"
)

// EpochID identifies an epoch of a namespace.
type EpochID struct {
	Namespace kv.NamespaceID
	Epoch     kv.Epoch
}

// epochTable has the secrets of the epochs, and the erasures that are not complete. A table is never
// changed: a change makes another one, writes it to the catalogues, and then stores it in Store.epochs.
type epochTable struct {
	// secrets has the secrets of each epoch. The last one is that of new slots.
	secrets map[EpochID][]crypt.Secret
	// erasures has, for each namespace with ended epochs whose secrets some volume may still have, the
	// last of these epochs and the volumes.
	erasures map[kv.NamespaceID]erasure
	// made has the epochs whose secrets were all made since the store was opened. A volume that is missing never had them.
	// It is in no catalogue.
	made map[EpochID]bool
	// wipe is the number of the last change that removed secrets. A catalogue area that was written
	// with this number or a higher one has no secret that was removed before.
	wipe uint64
}

type erasure struct {
	upTo    kv.Epoch
	volumes volumeSet
	// since is the time at which the first of the epochs ended.
	since time.Time
}

// of returns the erasure of another ended epoch too, which ended at the time now.
func (e erasure) of(ended kv.Epoch, now time.Time) erasure {
	e.upTo = max(e.upTo, ended)
	if e.since.IsZero() || now.Before(e.since) {
		e.since = now
	}
	return e
}

func newEpochTable() *epochTable {
	return &epochTable{secrets: make(map[EpochID][]crypt.Secret), erasures: make(map[kv.NamespaceID]erasure), made: make(map[EpochID]bool)}
}

// empty reports whether a catalogue with the table is one of a store without secrets.
func (t *epochTable) empty() bool { return len(t.secrets) == 0 && len(t.erasures) == 0 }

// records returns the table as a catalogue stores it.
func (t *epochTable) records() (secrets []ondisk.EpochSecret, erasures []ondisk.Erasure) {
	byID := func(a, b EpochID) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Epoch, b.Epoch))
	}
	for _, id := range slices.SortedFunc(maps.Keys(t.secrets), byID) {
		for _, s := range t.secrets[id] {
			secrets = append(secrets, ondisk.EpochSecret{Namespace: id.Namespace, Epoch: id.Epoch, Secret: s})
		}
	}
	for _, ns := range slices.Sorted(maps.Keys(t.erasures)) {
		e := t.erasures[ns]
		erasures = append(erasures, ondisk.Erasure{Namespace: ns, Epoch: e.upTo, Volumes: e.volumes, Since: e.since})
	}
	return secrets, erasures
}

// sizeBytes returns the room that the table takes in a catalogue at most. A secret counts as the erasure, which
// is larger, that replaces it when its epoch ends: an erasure must not fail because a catalogue is full.
func (t *epochTable) sizeBytes() int64 {
	if t.empty() {
		return 0
	}
	n := 0
	for _, s := range t.secrets {
		n += len(s)
	}
	return ondisk.EpochsBytes(0, n+len(t.erasures))
}

// clone returns a table that may be changed until others use it.
func (t *epochTable) clone() *epochTable {
	next := newEpochTable()
	next.wipe = t.wipe
	maps.Copy(next.secrets, t.secrets)
	maps.Copy(next.erasures, t.erasures)
	maps.Copy(next.made, t.made)
	return next
}

// merge adds the secrets and erasures of a catalogue. Its secrets become those of new slots.
func (t *epochTable) merge(secrets []ondisk.EpochSecret, erasures []ondisk.Erasure) {
	for i := range secrets {
		id, s := EpochID{secrets[i].Namespace, secrets[i].Epoch}, crypt.Secret(secrets[i].Secret)
		others := slices.DeleteFunc(slices.Clone(t.secrets[id]), func(o crypt.Secret) bool { return o == s })
		t.secrets[id] = append(others, s)
	}
	for _, o := range erasures {
		e := t.erasures[o.Namespace].of(o.Epoch, o.Since)
		for i := range e.volumes {
			e.volumes[i] |= o.Volumes[i]
		}
		t.erasures[o.Namespace] = e
	}
}

// without returns a table that has the secrets of the live epochs only, and an erasure of the others, which end
// at the time now, on the volumes that may have their secrets. It returns t if there is nothing to remove.
func (t *epochTable) without(live map[EpochID]bool, volumes []*volume, now time.Time) *epochTable {
	next := t
	for id := range t.secrets {
		if live[id] {
			continue
		}
		if next == t {
			next = t.clone()
			next.wipe++
		}
		delete(next.secrets, id)
		delete(next.made, id)
		e := next.erasures[id.Namespace].of(id.Epoch, now)
		for _, v := range volumes {
			if !v.missing || !t.made[id] {
				e.volumes.add(int(v.index))
			}
		}
		next.erasures[id.Namespace] = e
	}
	return next
}

// settled returns a table without the volumes whose catalogues have none of the removed secrets, or that
// were removed from the node. It returns t if there is none.
func (t *epochTable) settled(volumes []*volume) *epochTable {
	next := t
	for ns, e := range t.erasures {
		var left volumeSet
		for _, v := range volumes {
			if e.volumes.has(int(v.index)) && v.dev.health().State != health.Removed && !v.wiped(t.wipe) {
				left.add(int(v.index))
			}
		}
		if left == e.volumes {
			continue
		}
		if next == t {
			next = t.clone()
		}
		if e.volumes = left; left.len() == 0 {
			delete(next.erasures, ns)
			continue
		}
		next.erasures[ns] = e
	}
	return next
}

// wiped reports whether both areas of the volume's catalogue were written with a table whose number was
// wipe or higher, and no file of an earlier owner is left.
func (v *volume) wiped(wipe uint64) bool {
	return v.areaWipes[0].Load() >= wipe && v.areaWipes[1].Load() >= wipe && !v.outlived.Load()
}

// epochs reports whether the newest period is one with the secrets of epochs.
func (p periods) epochs() bool { return len(p) > 0 && p[len(p)-1].Epochs }

// usesEpochs reports whether new slots of some volume need the secrets of their epochs.
func (s *Store) usesEpochs() bool {
	return slices.ContainsFunc(s.present(), func(v *volume) bool { return v.keyPeriods().epochs() })
}

// withSecrets returns the table with a new secret for each of the epochs that has none, if new slots need
// secrets, and with the erasures that are not complete. Store.meta is held.
func (s *Store) withSecrets(live []EpochID) (*epochTable, error) {
	t := s.epochs.Load().settled(s.volumes)
	if !s.usesEpochs() {
		return t, nil
	}
	next := t
	for _, id := range live {
		if len(next.secrets[id]) > 0 {
			continue
		}
		secret, err := crypt.NewSecret(s.opts.secrets)
		if err != nil {
			return nil, fmt.Errorf("blockstore: %w", err)
		}
		if next == t {
			next = t.clone()
		}
		next.secrets[id], next.made[id] = []crypt.Secret{secret}, true
	}
	return next, nil
}

// useTable makes a table that a quorum stores the current one.
func (s *Store) useTable(t *epochTable) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.epochs.Store(t)
}

// EraseEpochs erases the secrets of all epochs except the live ones, from memory and from both catalogue
// areas of every volume that has not failed. After it, slots of the other epochs that were encrypted with
// these secrets cannot be decrypted, with any key. A volume that is missing or has failed may still have
// the secrets: Erasures returns such volumes. When a failed volume recovers, its areas are written before
// it is used again; those of a missing volume are written by the first EraseEpochs after it was opened. After an error the erasure is
// not complete, and EraseEpochs should be called again. A store without secrets writes nothing.
//
// The caller has removed all blocks of the other epochs from its index, durably or so that a start removes
// them again.
func (s *Store) EraseEpochs(ctx context.Context, live ...EpochID) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.gate.Leave()
	if t := s.epochs.Load(); t.empty() && t.wipe == 0 {
		return nil
	}
	if err := s.takeMeta(ctx); err != nil {
		return err
	}
	defer s.giveMeta()
	keep := make(map[EpochID]bool, len(live))
	for _, id := range live {
		keep[id] = true
	}
	t := s.epochs.Load()
	next := t.without(keep, s.volumes, time.Now())
	if next == t && !slices.ContainsFunc(s.syncing(), func(v *volume) bool { return !v.wiped(t.wipe) }) {
		s.erasing.Store(nil)
		return nil
	}
	s.mu.Lock()
	blob := s.catalogue
	s.mu.Unlock()
	s.erasing.Store(next)
	// Each write replaces one area, and records that the erasure is not complete. The third one records which
	// volumes are left.
	for range 2 {
		if err := s.writeCatalogues(ctx, blob, next); err != nil {
			return err
		}
		s.useTable(next)
		s.erasing.Store(nil)
	}
	done := next.settled(s.volumes)
	if done == next {
		return nil
	}
	if err := s.writeCatalogues(ctx, blob, done); err != nil {
		return err
	}
	s.useTable(done)
	return nil
}

// Erasure states that the secrets of ended epochs may still be on volumes.
type Erasure struct {
	// Namespace and UpTo are the namespace, which may be deleted, and the last of its ended epochs.
	Namespace kv.NamespaceID
	UpTo      kv.Epoch
	// Volumes are the paths of the volumes.
	Volumes []string
	// Since is the time at which the first of the epochs ended. An erasure of a namespace that was still
	// pending when another epoch ended keeps its time.
	Since time.Time
}

// EpochKeys states which slots depend on the secrets of epochs.
type EpochKeys struct {
	// On: new slots do.
	On bool
	// Without and WithoutBytes count the slots in use that do not, and their bytes. They can be decrypted
	// with their key after their epoch has ended.
	Without, WithoutBytes int64
	// Erasures has the result of Store.Erasures.
	Erasures []Erasure
}

// EpochKeys returns the state of the secrets of epochs, the zero value for a store without them.
func (s *Store) EpochKeys() EpochKeys {
	k := EpochKeys{On: s.usesEpochs(), Erasures: s.Erasures()}
	if k.On {
		for _, v := range s.present() {
			p := v.keyPeriods()
			slots, bytes := v.slotsByPeriod(p)
			for i := range slots {
				if i == len(p) || !p[i].Epochs {
					k.Without += slots[i]
					k.WithoutBytes += bytes[i]
				}
			}
		}
	}
	return k
}

// Erasures returns the erasures that are not complete, sorted by namespace.
func (s *Store) Erasures() (all []Erasure) {
	t := s.epochs.Load()
	if next := s.erasing.Load(); next != nil {
		t = next
	}
	t = t.settled(s.volumes)
	for _, ns := range slices.Sorted(maps.Keys(t.erasures)) {
		e := Erasure{Namespace: ns, UpTo: t.erasures[ns].upTo, Since: t.erasures[ns].since}
		set := t.erasures[ns].volumes
		for _, v := range s.volumes {
			if set.has(int(v.index)) {
				e.Volumes = append(e.Volumes, v.dev.Info().Path)
			}
		}
		all = append(all, e)
	}
	return all
}
