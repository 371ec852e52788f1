package arena

import (
	"fmt"

	"github.com/penstock-kv/penstock/internal/fair"
	"github.com/penstock-kv/penstock/internal/invariants"
)

// Buffer is a piece of an Arena's memory on loan. It is small and is passed by value. The caller of
// Alloc, or the function to which that caller passed the Buffer, calls Release once. The zero
// Buffer holds no memory, and releasing it does nothing.
type Buffer struct {
	arena       *Arena
	page, pages uint32
	// seq is the value of Arena.seq for the first page during this loan. If Arena.seq has another
	// value, the loan has ended.
	seq uint32
	// flow counts the pages for the principal that took them.
	flow *fair.Flow
}

// Bytes returns the memory of the Buffer. Its length is a multiple of Granule and at least the
// requested size. Only the holder of the Buffer may use the memory, until Release.
func (b Buffer) Bytes() []byte {
	if b.arena == nil {
		return nil
	}
	if invariants.Enabled {
		b.checkOut()
	}
	from, to := b.Offset(), b.Offset()+int64(b.Len())
	return b.arena.region.mem[from:to:to]
}

// Offset returns the start of the piece in the region, in bytes. The offset is the same in every
// process that maps the region.
func (b Buffer) Offset() int64 { return int64(b.page) * Granule }

// Len returns the length in bytes. It takes no lock.
func (b Buffer) Len() int { return int(b.pages) * Granule }

// Valid reports whether the Buffer came from Alloc. It does not report whether the Buffer is still
// on loan.
func (b Buffer) Valid() bool { return b.arena != nil }

// Release returns the piece to the arena. Afterwards neither this process nor a device may touch
// its bytes. A second Release, also of a copy, changes nothing and is counted in
// Stats.DoubleReleases. With the build tag invariants it panics.
func (b Buffer) Release() {
	a := b.arena
	if a == nil {
		return
	}
	if invariants.Enabled {
		b.checkOut()
		invariants.Mangle(b.Bytes())
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.seq[b.page] != b.seq {
		a.stats.DoubleReleases++
		return
	}
	a.freeLocked(b)
	a.serveLocked()
}

// checkOut panics if the loan of the Buffer has ended.
func (b Buffer) checkOut() {
	b.arena.mu.Lock()
	out := b.arena.seq[b.page] == b.seq
	b.arena.mu.Unlock()
	invariants.Assert(out, "%v used after its release", b)
}

// String names the piece: "arena[0x1000,+8192)".
func (b Buffer) String() string {
	if b.arena == nil {
		return "arena[none]"
	}
	return fmt.Sprintf("arena[%#x,+%d)", b.Offset(), b.Len())
}
