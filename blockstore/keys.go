package blockstore

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/penstock-kv/penstock/blockstore/crypt"
	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/kv"
)

// period is a KeyPeriod of a volume with its key. key is nil if the store has no key with that id.
type period struct {
	ondisk.KeyPeriod
	key *crypt.Key
}

// periods are the periods of a volume, oldest first. A value is never changed.
type periods []period

// of returns the period of a generation, nil if slots of that generation are plain.
func (p periods) of(g kv.Generation) *period {
	boot := uint32(g >> sequenceBits)
	for i := len(p) - 1; i >= 0; i-- {
		if p[i].From <= boot {
			return &p[i]
		}
	}
	return nil
}

// outdated reports whether slots of a generation are plain or have another key than new slots.
func (p periods) outdated(g kv.Generation) bool {
	return len(p) > 0 && p.of(g) != &p[len(p)-1]
}

// onDisk returns the periods as a superblock stores them.
func (p periods) onDisk() []ondisk.KeyPeriod {
	var keys []ondisk.KeyPeriod
	for _, k := range p {
		keys = append(keys, k.KeyPeriod)
	}
	return keys
}

// newPeriod returns the period of a key that begins with a boot counter. epochs: see KeyPeriod.Epochs.
func newPeriod(k *crypt.Key, boot uint32, epochs bool) period {
	return period{KeyPeriod: ondisk.KeyPeriod{From: boot, ID: ondisk.MakeKeyID(k.ID()), Epochs: epochs, Check: k.Check()}, key: k}
}

// withKeys returns the periods with the keys of ring, which may be nil. It fails with ErrKey if a
// key of ring is another key than that of a period.
func (p periods) withKeys(ring *crypt.Keyring) (periods, error) {
	p = slices.Clone(p)
	for i := range p {
		p[i].key = nil
		if ring == nil {
			continue
		}
		if k := ring.Find(p[i].ID.String()); k != nil {
			if k.Check() != p[i].Check {
				return nil, fmt.Errorf("key %s is another key than the one with this id that encrypted the volume: give the original key, and give each new key a new id: %w", k, ErrKey)
			}
			p[i].key = k
		}
	}
	return p, nil
}

// begin returns the periods with one for the key k, with the secrets of epochs or without, from boot on,
// unless the newest is such a period.
func (p periods) begin(k *crypt.Key, boot uint32, epochs bool) (periods, error) {
	if k == nil || len(p) > 0 && p[len(p)-1].key == k && p.epochs() == epochs {
		return p, nil
	}
	if len(p) == ondisk.MaxKeyPeriods {
		return nil, fmt.Errorf("blocks are encrypted with %d keys, the most that a volume can have: remove blocks of the oldest key %v first: %w", len(p), p[0].ID, ErrKey)
	}
	return append(slices.Clone(p), newPeriod(k, boot, epochs)), nil
}

// without returns the periods whose keys are given. It fails with ErrKey if a period of a missing key
// has slots in use. slots has the number of slots of each period.
func (p periods) without(slots []int64) (periods, error) {
	var left periods
	for i, k := range p {
		switch {
		case k.key != nil:
			left = append(left, k)
		case slots[i] > 0:
			return nil, fmt.Errorf("%d blocks are encrypted with key %v, which is not given: add the key to the keys of the node: %w", slots[i], k.ID, ErrKey)
		}
	}
	return left, nil
}

// newestKey returns the key for new content, nil without encryption.
func newestKey(ring *crypt.Keyring) *crypt.Key {
	if ring == nil {
		return nil
	}
	return ring.Newest()
}

// loadKeys sets the periods of the volume from its superblock.
func (v *volume) loadKeys(ring *crypt.Keyring) error {
	var p periods
	for _, k := range v.superblock.Keys {
		p = append(p, period{KeyPeriod: k})
	}
	p, err := p.withKeys(ring)
	if err != nil {
		return fmt.Errorf("blockstore: volume %s: %w", v.dev.Info().Path, err)
	}
	switch {
	case len(p) > 0 && v.plain:
		return fmt.Errorf("blockstore: volume %s is encrypted, its newest key is %v, and encryption.plain_volumes names it: remove it from that setting, or begin with an empty directory: %w", v.dev.Info().Path, p[len(p)-1].ID, ErrKey)
	case len(p) > 0 && ring == nil:
		return fmt.Errorf("blockstore: volume %s is encrypted, its newest key is %v: give the keys of the node: %w", v.dev.Info().Path, p[len(p)-1].ID, ErrKey)
	}
	v.periods.Store(&p)
	return nil
}

// keyPeriods returns the current periods of the volume.
func (v *volume) keyPeriods() periods { return *v.periods.Load() }

// dropUnused removes the periods of missing keys from all volumes, if no slot needs them. It writes the
// superblocks, so that a later scan for a new index does not ask for the keys.
func (s *Store) dropUnused() error {
	dropped := false
	for _, v := range s.present() {
		p := v.keyPeriods()
		if !slices.ContainsFunc(p, func(k period) bool { return k.key == nil }) {
			continue
		}
		slots, _ := v.slotsByPeriod(p)
		left, err := p.without(slots)
		if err != nil {
			return fmt.Errorf("blockstore: volume %s: %w", v.dev.Info().Path, err)
		}
		v.periods.Store(&left)
		dropped = true
	}
	if !dropped {
		return nil
	}
	if err := s.takeMeta(s.life); err != nil {
		return err
	}
	defer s.giveMeta()
	return s.writeSuperblocks(s.life)
}

// slotsByPeriod counts the slots that are not free, and their bytes, by period. The last element
// counts plain slots.
func (v *volume) slotsByPeriod(p periods) (slots, bytes []int64) {
	slots, bytes = make([]int64, len(p)+1), make([]int64, len(p)+1)
	for _, g := range v.space.sorted() {
		g.mu.Lock()
		for _, w := range g.words {
			if w.state() == slotFree {
				continue
			}
			i := len(p)
			if k := p.of(w.generation()); k != nil {
				i = slices.IndexFunc(p, func(o period) bool { return o.From == k.From })
			}
			slots[i]++
			bytes[i] += g.header.SlotBytes
		}
		g.mu.Unlock()
	}
	return slots, bytes
}

// KeyUse states how many slots a key encrypts.
type KeyUse struct {
	// ID is the id of the key, empty for slots that are not encrypted.
	ID string
	// Slots and Bytes count the slots that hold blocks or are being written.
	Slots, Bytes int64
	// Newest: the key encrypts new blocks.
	Newest bool
}

// KeyUse returns the keys that the store has, and the plain slots, if there are any. A key that has no
// slots and is not the newest may be removed. KeyUse returns nothing if the store is not encrypted.
func (s *Store) KeyUse() []KeyUse {
	s.mu.Lock()
	ring := s.keys
	s.mu.Unlock()
	if ring == nil {
		return nil
	}
	var plain KeyUse
	byID := make(map[string]*KeyUse)
	var all []*KeyUse
	for _, id := range ring.IDs() {
		u := &KeyUse{ID: id, Newest: id == ring.Newest().ID()}
		all, byID[id] = append(all, u), u
	}
	for _, v := range s.present() {
		p := v.keyPeriods()
		slots, bytes := v.slotsByPeriod(p)
		for i := range slots {
			u := &plain
			if i < len(p) {
				u = byID[p[i].ID.String()]
			}
			if u == nil {
				continue // the key was removed after the keyring was read
			}
			u.Slots += slots[i]
			u.Bytes += bytes[i]
		}
	}
	var use []KeyUse
	if plain.Slots > 0 {
		use = append(use, plain)
	}
	for _, u := range all {
		use = append(use, *u)
	}
	return use
}

// Outdated reports whether a slot has another key than new slots of its volume, or is plain although these are encrypted.
func (s *Store) Outdated(ref kv.Ref) bool {
	v := s.volume(ref.Extent)
	return v != nil && v.keyPeriods().outdated(ref.Generation)
}

// OutdatedSlots returns the number of slots of a volume that hold blocks or are being written, and are Outdated.
func (s *Store) OutdatedSlots(volume uint32) (n int64) {
	p := s.volumes[volume].keyPeriods()
	slots, _ := s.volumes[volume].slotsByPeriod(p)
	for i := range slots {
		if i != len(p)-1 && len(p) > 0 {
			n += slots[i]
		}
	}
	return n
}

// missingVolumes returns the volumes that may come back with blocks.
func (s *Store) missingVolumes() []*volume {
	return slices.DeleteFunc(slices.Clone(s.volumes), func(v *volume) bool { return !v.missing || v.dev.health().State == health.Removed })
}

// CheckKeys returns the error with which SetKeys would refuse the keys. It changes nothing.
func (s *Store) CheckKeys(ring *crypt.Keyring) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.gate.Leave()
	old, err := s.checkKeys(ring)
	if err != nil {
		return err
	}
	for _, v := range s.present() {
		if _, err := v.nextPeriods(ring, ring.Newest().ID() != old.Newest().ID(), 0); err != nil {
			return err
		}
	}
	return nil
}

// checkKeys returns the keys of the store, or the error with which SetKeys refuses ring without regard to
// the blocks of each volume.
func (s *Store) checkKeys(ring *crypt.Keyring) (old *crypt.Keyring, err error) {
	if !s.ready.Load() {
		return nil, fmt.Errorf("blockstore: keys before Ready: %w", ErrState)
	}
	s.mu.Lock()
	old = s.keys
	s.mu.Unlock()
	if old == nil {
		return nil, fmt.Errorf("blockstore: the store was opened without keys: %w", ErrState)
	}
	if ring.Find(old.Newest().ID()) == nil {
		return nil, fmt.Errorf("blockstore: key %v encrypts new blocks, and is not among the new keys: keep it until no block needs it: %w", old.Newest(), ErrKey)
	}
	if id := removedKey(old, ring); id != "" {
		if missing := s.missingVolumes(); len(missing) > 0 {
			return nil, fmt.Errorf("blockstore: key %s cannot be removed while the volume %s is missing, because it may have blocks of that key: bring the volume back, or remove it from the node: %w",
				id, missing[0].dev.Info().Path, ErrKey)
		}
	}
	return old, nil
}

// removedKey returns the id of a key that next does not have, "" if next has all keys of old.
func removedKey(old, next *crypt.Keyring) string {
	for _, id := range old.IDs() {
		if next.Find(id) == nil {
			return id
		}
	}
	return ""
}

// nextPeriods returns the periods of the volume with the keys of ring. If rotated is set, the newest key's
// period begins with the boot counter boot.
func (v *volume) nextPeriods(ring *crypt.Keyring, rotated bool, boot uint32) (periods, error) {
	before := v.keyPeriods()
	slots, _ := v.slotsByPeriod(before)
	p, err := before.withKeys(ring)
	if err == nil {
		p, err = p.without(slots)
	}
	if err == nil && rotated && !v.plain {
		p, err = p.begin(ring.Newest(), boot, before.epochs())
	}
	if err != nil {
		return nil, fmt.Errorf("blockstore: volume %s: %w", v.dev.Info().Path, err)
	}
	return p, nil
}

// SetKeys replaces the keys of an encrypted store. The newest key encrypts the slots that are reserved
// after the call. SetKeys fails with ErrKey, and changes nothing, if blocks are encrypted with a key that
// ring does not have, if a missing volume may have such blocks, or if a key has another secret than before.
func (s *Store) SetKeys(ctx context.Context, ring *crypt.Keyring) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.gate.Leave()
	old, err := s.checkKeys(ring)
	if err != nil {
		return err
	}
	rotated := ring.Newest().ID() != old.Newest().ID()
	if removedKey(old, ring) != "" {
		// If an earlier call could not write the catalogue, it still needs a key that is being removed.
		if err := s.resealCatalogue(ctx); err != nil {
			return err
		}
	}
	if err := s.takeMeta(ctx); err != nil {
		return err
	}
	next, err := s.changeKeys(ctx, ring, rotated)
	s.giveMeta()
	if err != nil {
		return err
	}
	s.generations.start(next)
	if !rotated {
		return nil
	}
	if err := s.resealCatalogue(ctx); err != nil {
		s.log.Warn("the catalogue could not be written with the new key, and needs the earlier one until its next change", "err", err)
	}
	return nil
}

// changeKeys writes the periods for new keys to the superblocks, and makes the keys current. It
// returns the boot counter of generations that are assigned afterwards. Store.meta is held.
func (s *Store) changeKeys(ctx context.Context, ring *crypt.Keyring, rotated bool) (uint32, error) {
	was := make(map[*volume]*periods)
	wasBoot := s.boot
	undo := func(err error) (uint32, error) {
		for v, p := range was {
			v.periods.Store(p)
		}
		s.boot = wasBoot
		return 0, err
	}
	next := s.boot
	if rotated {
		var err error
		if next, err = s.nextBoot(ctx, s.boot); err != nil {
			return 0, err
		}
	}
	for _, v := range s.present() {
		p, err := v.nextPeriods(ring, rotated, next)
		if err != nil {
			return undo(err)
		}
		was[v] = v.periods.Load()
		v.periods.Store(&p)
	}
	s.boot = next
	if err := s.writeSuperblocks(ctx); err != nil {
		return undo(err)
	}
	s.mu.Lock()
	s.keys = ring
	s.mu.Unlock()
	return next, nil
}

// resealCatalogue writes the catalogue to both areas of every volume, with the newest key, unless the
// store has no catalogue yet.
func (s *Store) resealCatalogue(ctx context.Context) error {
	if err := s.takeMeta(ctx); err != nil {
		return err
	}
	defer s.giveMeta()
	s.mu.Lock()
	blob := s.catalogue
	s.mu.Unlock()
	if len(blob) == 0 {
		return nil
	}
	for range 2 {
		if err := s.writeCatalogues(ctx, blob, s.epochs.Load()); err != nil {
			return err
		}
	}
	return nil
}

// sealedCatalogueExtra is the number of bytes that encryption adds to a catalogue: the id of the key,
// the salt and the tag.
const sealedCatalogueExtra = int64(len(ondisk.KeyID{})) + crypt.SaltBytes + crypt.TagBytes

// sealCatalogue returns a catalogue as the volumes store it: encrypted, with the secrets of t, if the store
// has keys.
func (s *Store) sealCatalogue(sequence uint64, blob []byte, t *epochTable) (ondisk.CatalogueHeader, []byte, error) {
	s.mu.Lock()
	key := newestKey(s.keys)
	s.mu.Unlock()
	if key == nil {
		return ondisk.NewCatalogueHeader(sequence, blob), blob, nil
	}
	id := ondisk.MakeKeyID(key.ID())
	sealed := make([]byte, len(id)+crypt.SaltBytes, int64(len(blob))+t.sizeBytes()+sealedCatalogueExtra)
	copy(sealed, id[:])
	salt := sealed[len(id):]
	if err := crypt.Salt(s.opts.salts, salt); err != nil {
		return ondisk.CatalogueHeader{}, nil, err
	}
	if !t.empty() {
		secrets, erasures := t.records()
		sealed = ondisk.AppendEpochs(sealed, secrets, erasures)
	}
	size := len(sealed) + len(blob) + crypt.TagBytes
	sealed = append(sealed, blob...)[:size]
	key.Cipher(salt, catalogueContext(s.node, sequence, !t.empty())).SealRest(sealed[len(id)+crypt.SaltBytes:])
	h := ondisk.NewCatalogueHeader(sequence, sealed)
	h.Sealed, h.Epochs = true, !t.empty()
	return h, sealed, nil
}

// catalogueContext binds a catalogue to the store, to its sequence number, and to whether it has secrets of
// epochs.
func catalogueContext(node ondisk.UUID, sequence uint64, epochs bool) []byte {
	what := "catalogue"
	if epochs {
		what = "catalogue with secrets of epochs"
	}
	return binary.LittleEndian.AppendUint64(append([]byte(what), node[:]...), sequence)
}

// hasNewestKey reports whether a catalogue is encrypted with the newest key, or the store has no keys.
func (s *Store) hasNewestKey(h ondisk.CatalogueHeader, blob []byte) bool {
	key := newestKey(s.keys)
	return key == nil || h.Sealed && len(blob) >= len(ondisk.KeyID{}) && ondisk.KeyID(blob) == ondisk.MakeKeyID(key.ID())
}

// openedCatalogue is a decrypted catalogue.
type openedCatalogue struct {
	header   ondisk.CatalogueHeader
	blob     []byte
	secrets  []ondisk.EpochSecret
	erasures []ondisk.Erasure
}

// openCatalogue decrypts a catalogue of the store node with the keys of ring, which may be nil. It fails
// with ErrKey if the key is missing, and with ErrDamaged if the content was changed.
func openCatalogue(ring *crypt.Keyring, node ondisk.UUID, h ondisk.CatalogueHeader, blob []byte) (openedCatalogue, error) {
	c := openedCatalogue{header: h, blob: blob}
	if !h.Sealed {
		return c, nil
	}
	if int64(len(blob)) < sealedCatalogueExtra {
		return c, fmt.Errorf("blockstore: encrypted catalogue of %d bytes: %w", len(blob), ErrDamaged)
	}
	id := ondisk.KeyID(blob)
	var key *crypt.Key
	if ring != nil {
		key = ring.Find(id.String())
	}
	if key == nil {
		return c, fmt.Errorf("blockstore: the catalogue is encrypted with key %v, which is not given: add the key to the keys of the node: %w", id, ErrKey)
	}
	salt := blob[len(id):][:crypt.SaltBytes]
	plain, err := key.Cipher(salt, catalogueContext(node, h.Sequence, h.Epochs)).OpenRest(blob[len(id)+crypt.SaltBytes:])
	if err != nil {
		return c, fmt.Errorf("blockstore: the catalogue is not the one that key %v encrypted: %w: %w", id, err, ErrDamaged)
	}
	if c.blob = plain; h.Epochs {
		c.secrets, c.erasures, c.blob, err = ondisk.DecodeEpochs(plain)
	}
	return c, err
}

// sealSlot encrypts a slot from plain, which has the layout of a slot, to dst, which has the same
// length. The header is that of h.
func (v *volume) sealSlot(key *crypt.Key, h *ondisk.SlotHeader, plain, dst []byte) error {
	l, err := h.Layout()
	if err != nil {
		return err
	}
	h.Key = ondisk.MakeKeyID(key.ID())
	err = h.EncodeSealed(dst, func(p ondisk.Sealed) error {
		if err := crypt.Salt(v.store.opts.salts, p.Salt); err != nil {
			return err
		}
		c := key.Cipher(p.Salt, v.id[:], p.Context)
		c.SealRest(p.Sums)
		for i := range l.Layers {
			at := l.HeaderBytes() + int64(i)*l.LayerBytes()
			c.SealLayer(uint32(i), dst[at:at+l.LayerBytes()], plain[at:at+l.LayerBytes()], p.Tag(i))
		}
		return nil
	})
	clear(dst[l.HeaderBytes()+l.PayloadBytes:])
	return err
}

// writeKey returns the key that encrypts a new slot, nil if the volume is not encrypted. It fails with
// ErrStale if the slot was reserved so long ago that its key was removed since, and with ErrErased if the
// secret of its epoch was erased.
func (s *Store) writeKey(v *volume, h *ondisk.SlotHeader) (*crypt.Key, error) {
	if s.opts.Keys == nil || v.plain {
		return nil, nil
	}
	p := v.keyPeriods().of(h.Generation)
	switch {
	case p == nil || p.key == nil:
		return nil, fmt.Errorf("no key of the store is for generation %v: %w", h.Generation, ErrStale)
	case !p.Epochs:
		return p.key, nil
	}
	secrets := s.epochs.Load().secrets[EpochID{h.Namespace, h.Epoch}]
	if len(secrets) == 0 {
		return nil, fmt.Errorf("epoch %d of namespace %d: %w", h.Epoch, h.Namespace, ErrErased)
	}
	return p.key.With(&secrets[len(secrets)-1]), nil
}

// slotOpener decrypts the layers of one slot. The zero slotOpener is that of a plain slot.
type slotOpener struct {
	cipher *crypt.Cipher
	parts  ondisk.Sealed
}

// openLayer decrypts a layer in place and compares its checksum with sum.
func (o *slotOpener) openLayer(layer int, b []byte, sum uint64) error {
	if o.cipher != nil {
		if err := o.cipher.OpenLayer(uint32(layer), b, o.parts.Tag(layer)); err != nil {
			return err
		}
	}
	if got := ondisk.LayerSum(b); got != sum {
		return fmt.Errorf("layer %d has checksum %016x, the writer's is %016x", layer, got, sum)
	}
	return nil
}

// openSealed decrypts the checksums of an encrypted slot in place, and sets h.LayerSums. header begins
// with the slot's header, and h is its decoded form.
func openSealed(key *crypt.Key, volume ondisk.UUID, h *ondisk.SlotHeader, header []byte) (slotOpener, error) {
	o := slotOpener{parts: ondisk.SealedParts(header, h.Layers)}
	o.cipher = key.Cipher(o.parts.Salt, volume[:], o.parts.Context)
	if _, err := o.cipher.OpenRest(o.parts.Sums); err != nil {
		return slotOpener{}, fmt.Errorf("header encrypted with key %v: %w", h.Key, err)
	}
	h.LayerSums = o.parts.DecodeSums(h.LayerSums[:0])
	return o, nil
}

// errNoKey: the slot is encrypted with a key that is not given. Unless the error is ErrKey too, the volume
// has no period of that key any more, so no block needs it.
var errNoKey = errors.New("the key is not given")

// hasPeriod reports whether the volume has a period of a key.
func (v *volume) hasPeriod(id ondisk.KeyID) bool {
	return slices.ContainsFunc(v.keyPeriods(), func(p period) bool { return p.ID == id })
}

// openHeader is openSealed for a slot that may be plain. It fails unless the slot is encrypted with the
// key of its generation.
func (v *volume) openHeader(h *ondisk.SlotHeader, header []byte) (slotOpener, error) {
	p := v.keyPeriods().of(h.Generation)
	switch {
	case p == nil && h.Key == (ondisk.KeyID{}):
		return slotOpener{}, nil
	case p == nil:
		return slotOpener{}, fmt.Errorf("encrypted with key %v: %w", h.Key, errNoKey)
	case p.ID != h.Key && h.Key != (ondisk.KeyID{}) && !v.hasPeriod(h.Key):
		return slotOpener{}, fmt.Errorf("encrypted with key %v: %w", h.Key, errNoKey)
	case p.ID != h.Key:
		return slotOpener{}, fmt.Errorf("encrypted with key %q, and slots of generation %v with %v", h.Key, h.Generation, p.ID)
	case p.key == nil:
		return slotOpener{}, fmt.Errorf("encrypted with key %v: %w: %w", h.Key, errNoKey, ErrKey)
	}
	if !p.Epochs {
		return openSealed(p.key, v.id, h, header)
	}
	return openEpoch(p.key, v.store.epochs.Load().secrets[EpochID{h.Namespace, h.Epoch}], v.id, h, header)
}

// openEpoch is openSealed for a slot whose key depends on the secret of its epoch too. It fails with
// ErrErased if there is no secret.
func openEpoch(key *crypt.Key, secrets []crypt.Secret, volume ondisk.UUID, h *ondisk.SlotHeader, header []byte) (o slotOpener, err error) {
	if len(secrets) == 0 {
		return o, fmt.Errorf("encrypted in epoch %d of namespace %d: %w", h.Epoch, h.Namespace, ErrErased)
	}
	parts := ondisk.SealedParts(header, h.Layers)
	sums := parts.Sums
	if len(secrets) > 1 {
		sums = slices.Clone(parts.Sums) // a failed attempt changes the bytes
	}
	for i := range slices.Backward(secrets) {
		copy(parts.Sums, sums)
		if o, err = openSealed(key.With(&secrets[i]), volume, h, header); err == nil {
			return o, nil
		}
	}
	return o, err
}

const (
	// sealBuffers is the number of batches of a volume that are encrypted and written at a time, and
	// sealBytes the size of the buffer of each.
	sealBuffers = 4
	sealBytes   = 4 << 20
)

// sealPool has the buffers for the encrypted slots of one volume: the buffers of the caller keep the
// plain bytes, which may have readers during the write. A buffer is allocated when it is first used,
// from the Go heap: if it came from the memory of the caller's buffers, the callers could use up this
// memory and wait for each other.
type sealPool struct{ buffers chan []byte }

func newSealPool() sealPool {
	p := sealPool{buffers: make(chan []byte, sealBuffers)}
	for range sealBuffers {
		p.buffers <- nil
	}
	return p
}

// get returns a buffer of at least sizeBytes. It waits for one until ctx ends or the volume fails.
func (p *sealPool) get(ctx context.Context, v *volume, sizeBytes int64) ([]byte, error) {
	select {
	case b := <-p.buffers:
		if int64(len(b)) < sizeBytes {
			b, _, _ = heapAlloc(ctx, int(max(sizeBytes, sealBytes))) // cannot fail
		}
		return b, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("blockstore: volume %d: waiting for a buffer to encrypt into: %w", v.index, context.Cause(ctx))
	case <-v.dev.whenDown():
		return nil, v.dev.failure(health.Write)
	}
}

func (p *sealPool) put(b []byte) { p.buffers <- b }

// runSealed is run for a batch of writes of which some are encrypted. writes[i] has the plain bytes of
// job i.
func (m *submission) runSealed(ctx context.Context, volumes []*volume, writes []Write) error {
	used := make(map[*volume]bool)
	for i := range m.jobs {
		if !m.jobs[i].skip {
			used[m.jobs[i].volume] = true
		}
	}
	volumes = slices.DeleteFunc(slices.Clone(volumes), func(v *volume) bool { return !used[v] })
	if len(volumes) == 0 {
		return nil
	}
	return onVolumes(volumes, func(v *volume) error {
		part := submission{op: m.op, jobs: m.jobs}
		return part.sealOn(ctx, v, writes)
	})
}

// sealOn encrypts and writes the jobs of one volume, a buffer at a time.
func (m *submission) sealOn(ctx context.Context, v *volume, writes []Write) error {
	var all []int
	for i := range m.jobs {
		if j := &m.jobs[i]; !j.skip && j.volume == v {
			all = append(all, i)
		}
	}
	for len(all) > 0 {
		n, need := 0, int64(0)
		for n < len(all) && (n == 0 || need+m.jobs[all[n]].bytes <= sealBytes) {
			need += m.jobs[all[n]].bytes
			n++
		}
		buf, err := v.sealing.get(ctx, v, need)
		if err != nil {
			return err
		}
		err = m.sealChunk(ctx, v, writes, all[:n], buf)
		v.sealing.put(buf)
		if err != nil {
			return err
		}
		all = all[n:]
	}
	return nil
}

// sealChunk encrypts the jobs with the given indices into buf and writes them.
func (m *submission) sealChunk(ctx context.Context, v *volume, writes []Write, chunk []int, buf []byte) error {
	m.order = m.order[:0]
	for _, i := range chunk {
		j := &m.jobs[i]
		if j.key != nil {
			dst := buf[:j.bytes]
			buf = buf[j.bytes:]
			if j.outcome = v.sealSlot(j.key, &writes[i].Header, writes[i].Buf, dst); j.outcome != nil {
				continue
			}
			j.bufs[0] = dst
		}
		m.order = append(m.order, i)
	}
	err := m.runOrder(ctx, v)
	for _, i := range chunk {
		m.jobs[i].bufs[0] = nil // the buffer is reused
	}
	return err
}

// periodNames returns the ids of the keys of some volumes, for the log.
func periodNames(volumes []*volume) []string {
	ids := make(map[string]bool)
	for _, v := range volumes {
		for _, p := range v.keyPeriods() {
			ids[p.ID.String()] = true
		}
	}
	return slices.Sorted(maps.Keys(ids))
}
