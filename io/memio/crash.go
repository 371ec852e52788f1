package memio

import (
	"maps"
	"math/rand/v2"
	"slices"

	"github.com/penstock-kv/penstock/io/blockio"
)

// Crash makes the power of the volume fail at once. It returns a Device with one of the possible
// states of the volume after the failure (see the package's fault model), chosen by seed.
// Afterwards this Device and every other Device of the volume return ErrPowerLost; they may still
// be closed. Calls in progress complete either before the failure or with ErrPowerLost.
//
// A volume can crash only once. To try several seeds on one state, crash a Clone for each seed.
// Crash panics on a volume that has crashed before.
func (d *Device) Crash(seed uint64) *Device {
	m := d.medium
	m.mu.Lock()
	if m.lost {
		m.mu.Unlock()
		panic("memio: Crash of a volume that has crashed; use the Device that the first Crash returned")
	}
	m.lost = true
	survivor := newMedium(m.opts)
	s := &survival{rng: rand.New(rand.NewPCG(seed, 0x6d656d696f))}
	s.operate(m.names, m.removed, survivor)
	m.names, m.removed = nil, nil
	m.mu.Unlock()
	return attach(survivor)
}

// survival decides which content survives a crash. It visits files and pages in a fixed order, so
// that a seed always has the same result.
type survival struct {
	rng *rand.Rand
}

func (s *survival) operate(names map[string]*inode, removed []*inode, survivor *medium) {
	for _, name := range slices.Sorted(maps.Keys(names)) {
		s.admit(names[name], survivor)
	}
	// The newest removal is undone first: if it is undone, older removed files of the same name
	// stay removed.
	for _, ino := range slices.Backward(removed) {
		if _, taken := survivor.names[ino.name]; !taken && s.coin() {
			s.admit(ino, survivor)
		}
	}
}

// admit adds the file ino to the survivor, with the size and content that survive. It adds nothing
// if the creation of the file does not survive.
func (s *survival) admit(ino *inode, survivor *medium) {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	size := ino.size
	if !ino.settled {
		if s.rng.IntN(3) == 0 {
			return // the creation did not reach the disk
		}
		if s.rng.IntN(3) == 0 {
			size = s.rng.Int64N(ino.size/blockio.Align+1) * blockio.Align
		}
	}
	s.content(ino)
	left := &inode{name: ino.name, size: size, settled: true, pages: ino.pages, earlier: make(map[int64][]*page)}
	if size < ino.size {
		left.pages = maps.Clone(ino.pages)
		maps.DeleteFunc(left.pages, func(n int64, _ *page) bool { return n*blockio.Align >= size })
	}
	survivor.names[left.name] = left
	survivor.usedBytes += left.size
}

// fate is the outcome of all unsynced writes of one file. Losing all of them and keeping all of
// them are drawn often: they are the most frequent outcomes in practice, and separate draws for
// each page would almost never produce them.
type fate int

const (
	keepAll fate = iota
	loseAll
	mixPages   // each page is drawn separately
	mixSectors // each sector is drawn separately
	fates
)

// content replaces the present content of ino by the content that survives.
func (s *survival) content(ino *inode) {
	f := fate(s.rng.IntN(int(fates)))
	for _, n := range slices.Sorted(maps.Keys(ino.earlier)) {
		versions := append(ino.earlier[n], ino.pages[n])
		ino.setLocked(n, s.survive(f, versions))
	}
}

// survive chooses among the versions of one page. The first version is the durable one.
func (s *survival) survive(f fate, versions []*page) *page {
	switch f {
	case keepAll:
		return versions[len(versions)-1]
	case loseAll:
		return versions[0]
	case mixPages:
		return versions[s.rng.IntN(len(versions))]
	}
	var torn page
	for at := 0; at < len(torn); at += sectorBytes {
		if p := versions[s.rng.IntN(len(versions))]; p != nil {
			copy(torn[at:at+sectorBytes], p[at:])
		}
	}
	return newPage(torn[:])
}

func (s *survival) coin() bool { return s.rng.IntN(2) == 0 }

// PowerOffAfter allows n more mutations, and makes the power fail at the next one. A mutation is a
// write, create, remove or sync; each request of a batch counts. The failing mutation and all later
// calls return ErrPowerLost; the failing mutation may have been done in part. Crash returns the
// state after the failure. A negative n cancels the power failure.
func (d *Device) PowerOffAfter(n int64) {
	if n < 0 {
		n = noFuse
	}
	d.medium.left.Store(n)
}

// Mutations returns the number of mutations of the volume since New, Clone or Crash. A simulated
// power failure can come at each mutation.
func (d *Device) Mutations() int64 { return d.medium.mutations.Load() }

// Clone returns a Device over a copy of the volume in its present state, including unsynced writes.
// The copy is not locked and has no pending PowerOffAfter. Volume and copy share memory until they
// differ.
func (d *Device) Clone() *Device { return attach(d.medium.clone()) }
