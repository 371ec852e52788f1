package blockstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/penstock-kv/penstock/blockstore/health"
	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/internal/runs"
	"github.com/penstock-kv/penstock/kv"
)

// reserveMax is the maximum number of slots of one Reserve.
const reserveMax = 1 << 20

// placement is the state of one call of Reserve. taken has the runs of slots reserved so far; n is
// the number of these slots.
type placement struct {
	store     *Store
	slotBytes int64
	want      int
	taken     []taken
	n         int
}

// taken is one run of slots.
type taken struct {
	segment *segment
	run     runs.Run
}

// Reserve takes n free slots for the consecutive pieces of one sequence and returns them in order.
// The slots are in the state reserved, each with a new generation. If hasAfter is set, Reserve
// first tries the slots that follow the slot after directly. It takes all n slots or none. It may
// create a segment or divide one into slots, which needs I/O. It fails with ErrFull (a *FullError),
// ErrFloor or ErrTooLarge.
func (s *Store) Reserve(ctx context.Context, pieceBytes int64, layers, n int, after kv.Extent, hasAfter bool) ([]kv.Ref, error) {
	if err := s.enter(); err != nil {
		return nil, err
	}
	defer s.gate.Leave()
	if !s.ready.Load() {
		return nil, fmt.Errorf("blockstore: reserve before Ready: %w", ErrState)
	}
	if n < 1 || n > reserveMax {
		return nil, fmt.Errorf("blockstore: reserve %d slots; want 1 to %d: %w", n, reserveMax, ErrState)
	}
	l, err := s.SlotLayout(pieceBytes, layers)
	if err != nil {
		return nil, err
	}
	p := &placement{store: s, slotBytes: l.SlotBytes(), want: n}
	if err := p.find(ctx, after, hasAfter); err != nil {
		p.undo()
		return nil, err
	}
	// The generations are taken after the slots. So if a segment was divided into slots for this
	// request, its header has an older generation than the slots.
	gen, err := s.generations.take(ctx, s, n)
	if err != nil {
		p.undo()
		return nil, err
	}
	return p.refs(gen), nil
}

// find takes slots until it has the requested number.
func (p *placement) find(ctx context.Context, after kv.Extent, hasAfter bool) error {
	at := -1 // the volume to continue with
	if hasAfter {
		if v := p.store.volume(after); v != nil && v.takesWrites() && v.dev.health().State == p.store.bestState() {
			at = int(v.index)
			if g, r := v.space.takeAfter(p.slotBytes, after, p.upTo(after.Slot()+1)); r.N > 0 {
				p.add(g, r)
			}
			if p.atStripeEnd(after.Slot() + 1 + uint32(p.n)) {
				at = p.next(at)
			}
		}
	}
	if at < 0 {
		at = p.leastUsed()
	}
	for p.n < p.want {
		g, r, err := p.takeSomewhere(ctx, at)
		if err != nil {
			return err
		}
		p.add(g, r)
		at = int(g.volume.index)
		if p.atStripeEnd(r.Start + r.N) {
			at = p.next(at)
		}
	}
	return nil
}

func (p *placement) add(g *segment, r runs.Run) {
	p.taken = append(p.taken, taken{g, r})
	p.n += int(r.N)
}

// stripe returns the number of consecutive slots of a sequence that are placed on one volume before
// placement continues on the next volume. The boundaries are at fixed slot numbers of a segment, so
// a sequence changes the volume at the same slots no matter where Reserve continues it.
func (p *placement) stripe() uint32 {
	return uint32(max(1, p.store.opts.StripeBytes/p.slotBytes))
}

// upTo returns the maximum number of slots in a run that starts at slot: up to the end of the
// stripe, and no more than are still wanted.
func (p *placement) upTo(slot uint32) uint32 {
	n := uint32(p.want - p.n)
	if len(p.store.volumes) > 1 {
		n = min(n, p.stripe()-slot%p.stripe())
	}
	return n
}

func (p *placement) atStripeEnd(slot uint32) bool {
	return len(p.store.volumes) > 1 && slot%p.stripe() == 0
}

func (p *placement) next(volume int) int { return (volume + 1) % len(p.store.volumes) }

// bestState returns OK if a volume in that state takes new blocks, and otherwise Suspect. New
// blocks go to suspect volumes only while no OK volume takes them.
func (s *Store) bestState() health.State {
	for _, v := range s.volumes {
		if v.takesWrites() && v.dev.health().State == health.OK {
			return health.OK
		}
	}
	return health.Suspect
}

// leastUsed returns the index of the volume with the fewest used bytes, for a new sequence.
func (p *placement) leastUsed() int {
	n := len(p.store.volumes)
	if n == 1 {
		return 0
	}
	turn := int(p.store.turn.Add(1))
	state := p.store.bestState()
	best := -1
	for i := range n {
		v := p.store.volumes[(turn+i)%n]
		if v.takesWrites() && v.dev.health().State == state && (best < 0 || v.usedBytes.Load() < p.store.volumes[best].usedBytes.Load()) {
			best = int(v.index)
		}
	}
	return max(best, 0)
}

// takeSomewhere takes one run of slots on the volume at, or else on the first volume after it that
// has room. It uses a suspect volume only if no OK volume has room.
func (p *placement) takeSomewhere(ctx context.Context, at int) (*segment, runs.Run, error) {
	var trouble []error
	full := false
	for i := range 2 * len(p.store.volumes) {
		v := p.store.volumes[at]
		at = p.next(at)
		state := health.OK
		if i >= len(p.store.volumes) {
			state = health.Suspect
		}
		if !v.takesWrites() || v.dev.health().State != state {
			continue
		}
		g, r, err := v.take(ctx, p.slotBytes, p)
		if err == nil {
			return g, r, nil
		}
		if ctx.Err() != nil {
			return nil, runs.Run{}, err
		}
		if errors.Is(err, errNoRoom) {
			full = full || v.takesWrites() // the volume may have stopped taking writes since it was chosen
			continue
		}
		if !errors.Is(err, errCutHangs) { // the change of the volume's state was logged
			v.log.Warn("could not make room", "err", err)
		}
		trouble = append(trouble, err)
	}
	switch {
	case full: // eviction would help
		return nil, runs.Run{}, p.full()
	case len(trouble) > 0:
		return nil, runs.Run{}, errors.Join(trouble...)
	}
	return nil, runs.Run{}, p.store.noWritableVolume()
}

// SetFreeFloor replaces Options.FreeFloorBytes for the writes that begin afterwards. 0 turns the floor
// off; bytes is not negative.
func (s *Store) SetFreeFloor(bytes int64) { s.freeFloorBytes.Store(bytes) }

// Writable returns nil if a volume takes new blocks, else ErrFloor with the reason
// of each volume.
func (s *Store) Writable() error {
	if s.Elsewhere(nil) {
		return nil
	}
	return s.noWritableVolume()
}

// Elsewhere reports whether any volume takes new blocks. If except is not nil, it leaves out the
// volume of except.
func (s *Store) Elsewhere(except *kv.Ref) bool {
	for _, v := range s.volumes {
		if v.takesWrites() && (except == nil || v.index != except.Extent.Volume()) {
			return true
		}
	}
	return false
}

// Readable reports whether blocks of at least one volume can be read.
func (s *Store) Readable() bool {
	for _, v := range s.volumes {
		if v.dev.health().Reads() {
			return true
		}
	}
	return false
}

// VolumeHealth returns the state of the volume of a ref.
func (s *Store) VolumeHealth(ref kv.Ref) health.Status {
	if v := s.volume(ref.Extent); v != nil {
		return v.dev.health()
	}
	return health.Status{State: health.Removed}
}

// noWritableVolume returns an error that names the reason why each volume takes no writes.
func (s *Store) noWritableVolume() error {
	var why []string
	for _, v := range s.volumes {
		if h := v.dev.health(); !h.Places() {
			why = append(why, fmt.Sprintf("volume %d is %v: %s", v.index, h.State, causeOf(h)))
			continue
		}
		if v.full.Load() {
			why = append(why, fmt.Sprintf("volume %d: the file system is full", v.index))
			continue
		}
		free, floor := v.freeSpaceBytes.Load(), s.freeFloorBytes.Load()
		why = append(why, fmt.Sprintf("volume %d: %d bytes free, %d fewer than the floor of %d: free as many, or lower free_floor", v.index, free, max(0, floor-free), floor))
	}
	return fmt.Errorf("blockstore: %w: %s", ErrFloor, strings.Join(why, "; "))
}

// full frees the slots taken so far and returns the error for a full store.
func (p *placement) full() error {
	p.undo()
	e := &FullError{SlotBytes: p.slotBytes, Slots: p.want}
	for _, v := range p.store.volumes {
		if v.takesWrites() {
			e.FreeSlots += int(v.space.free(p.slotBytes))
		}
	}
	return e
}

// undo frees the slots.
func (p *placement) undo() {
	for _, t := range p.taken {
		for i := range t.run.N {
			t.segment.untake(t.run.Start + i)
		}
	}
	p.taken, p.n = nil, 0
}

// refs assigns consecutive generations to the slots.
func (p *placement) refs(gen kv.Generation) []kv.Ref {
	refs := make([]kv.Ref, 0, p.n)
	for _, t := range p.taken {
		t.segment.stamp(t.run, gen)
		for i := range t.run.N {
			refs = append(refs, kv.Ref{Extent: t.segment.extent(t.run.Start + i), Generation: gen})
			gen++
		}
	}
	return refs
}

// Surplus returns the live slots of the segments that exceed the capacity, because the capacity is
// smaller than at the last start. When the engine has freed these slots, the files of the segments
// are removed. Surplus may be called after Ready.
func (s *Store) Surplus() []kv.Ref {
	var refs []kv.Ref
	for _, v := range s.volumes {
		for _, g := range v.space.surplusSegments() {
			refs = g.appendSurplus(refs)
		}
	}
	return refs
}

func (g *segment) appendSurplus(refs []kv.Ref) []kv.Ref {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.retiring {
		return refs
	}
	return g.appendLiveLocked(refs)
}

// appendLiveLocked appends the segment's live slots.
func (g *segment) appendLiveLocked(refs []kv.Ref) []kv.Ref {
	for i, w := range g.words {
		if w.state() == slotLive {
			refs = append(refs, kv.Ref{Extent: g.extent(uint32(i)), Generation: w.generation()})
		}
	}
	return refs
}

// EmptiableSegment is a segment that could be emptied and then divided into slots of another size.
type EmptiableSegment struct {
	// First is the first slot, End the slot after the last one.
	First, End kv.Extent
	// UsedBytes is the size of the slots in use.
	UsedBytes int64
}

// Emptiable returns segments of another slot size that could be emptied and then divided into slots
// for such pieces. The segments with the fewest used bytes come first. Segments with a reader or a
// write in progress are left out. An engine calls Emptiable after ErrFull, if it has evicted enough
// bytes, but in slots of another size.
func (s *Store) Emptiable(pieceBytes int64, layers int) []EmptiableSegment {
	l, err := s.SlotLayout(pieceBytes, layers)
	if err != nil {
		return nil
	}
	var all []EmptiableSegment
	for _, v := range s.volumes {
		if !v.takesWrites() {
			continue
		}
		for _, g := range *v.space.table.Load() {
			if g == nil {
				continue
			}
			if e, ok := g.emptiable(l.SlotBytes()); ok {
				all = append(all, e)
			}
		}
	}
	slices.SortStableFunc(all, func(a, b EmptiableSegment) int { return cmp.Compare(a.UsedBytes, b.UsedBytes) })
	return all
}

func (g *segment) emptiable(slotBytes int64) (EmptiableSegment, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	fits := ondisk.SegmentSlots(g.sizeBytes, slotBytes) > 0
	if g.use != useCut || g.header.SlotBytes == slotBytes || g.retiring || g.counts.reserved > 0 || g.reading > 0 || !fits {
		return EmptiableSegment{}, false
	}
	return EmptiableSegment{
		First: g.extent(0), End: g.extent(g.header.Slots),
		UsedBytes: g.counts.live * g.header.SlotBytes,
	}, true
}

// DrainSegment makes Reserve take slots of the segment only if no other segment has free slots, so
// that the engine can empty the segment. The mark lasts until the segment is divided into slots
// anew.
func (s *Store) DrainSegment(e kv.Extent) {
	if v := s.volume(e); v != nil {
		if g := v.space.segment(e.Segment()); g != nil {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.draining = true
			g.settleLocked()
		}
	}
}

// Reading reports whether the slot still has the generation of ref and has a reader.
func (s *Store) Reading(ref kv.Ref) bool {
	g, err := s.segmentOf(ref)
	return err == nil && g.beingRead(ref)
}
