package shm

import (
	"fmt"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/sys"
	"github.com/penstock-kv/penstock/rdma/group"
)

// depth is the number of entries of a ring: a power of two.
const depth = 256

// A ring is memory that two endpoints share: one posts entries (the poster), the other performs
// them (the performer). doc.go has the picture. Both processes can write all of the ring. So a
// process never reads its own writes back, and it checks every value that it reads.
type ring struct {
	// tail is the number of posted entries, written by the poster.
	tail atomic.Uint64
	_    [56]byte
	// done is the number of performed entries, written by the performer.
	done atomic.Uint64
	_    [56]byte
	// performerSleeps and posterSleeps request that the other process rings the bell. A process
	// sets its flag before it sleeps. The process that rings clears the flag, as does the sleeper
	// when it has woken up.
	performerSleeps atomic.Uint32
	_               [60]byte
	posterSleeps    atomic.Uint32
	_               [60]byte
	// withdrawn is set by a poster before its sources are reused. After that the performer must
	// not count immediates.
	withdrawn atomic.Uint32
	_         [60]byte

	entries  [depth]entry
	statuses [depth]atomic.Uint32
}

// entry is one Work in a ring. It fills one cache line. Its words are:
//
//	0  op (32 bits), immediate (32 bits)
//	1  length, bytes
//	2  segment of the source; 0: the poster's own memory
//	3  offset in the segment; or the address in the poster's process
//	4  offset in the destination
//	5  key of the destination
type entry [8]uint64

// ringBytes is the size of a ring, in whole pages.
const ringBytes = 5 * sys.PageSize

// Statuses of an entry in a ring. All but statusUnreadable have the values of package group.
const (
	statusOK       = uint32(group.StatusOK)
	statusRefused  = uint32(group.StatusRefused)
	statusNoBuffer = uint32(group.StatusNoBuffer)
	// statusUnreadable: the performer cannot read the poster's memory.
	statusUnreadable = 64
)

// work is a copy of an entry. The performer reads each word of an entry only once.
type work struct {
	op, imm   uint32
	len       uint64
	segment   uint64
	offset    uint64
	addr, key uint64
	placed    uint64 // bytes placed so far
	loaded    bool
}

// put writes entry number i.
func (r *ring) put(i uint64, w *work) {
	e := &r.entries[i%depth]
	e[0] = uint64(w.op) | uint64(w.imm)<<32
	e[1], e[2], e[3], e[4], e[5] = w.len, w.segment, w.offset, w.addr, w.key
}

// get reads entry number i. It reads each word once, because the poster may change a word in the
// meantime.
func (r *ring) get(i uint64) work {
	e := &r.entries[i%depth]
	first := atomic.LoadUint64(&e[0])
	return work{
		op: uint32(first), imm: uint32(first >> 32),
		len: atomic.LoadUint64(&e[1]), segment: atomic.LoadUint64(&e[2]), offset: atomic.LoadUint64(&e[3]),
		addr: atomic.LoadUint64(&e[4]), key: atomic.LoadUint64(&e[5]),
		loaded: true,
	}
}

// newRing creates a ring, and the file by which the ring is sent to the other process.
func newRing() (*ring, []byte, *os.File, error) {
	f, err := sys.Memfd("penstock-ring", ringBytes, false)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("shm: ring: %w", err)
	}
	r, mem, err := mapRing(int(f.Fd()))
	if err != nil {
		_ = f.Close()
		return nil, nil, nil, err
	}
	return r, mem, f, nil
}

// openRing maps the ring of a peer. The file must have the right size, and the size must be sealed,
// so that it cannot shrink under the mapping.
func openRing(fd int) (*ring, []byte, error) {
	size, err := sys.FileSize(fd)
	if err != nil {
		return nil, nil, fmt.Errorf("shm: open the peer's ring: %w", err)
	}
	sealed, err := sys.SizeSealed(fd)
	if err != nil {
		return nil, nil, fmt.Errorf("shm: open the peer's ring: %w", err)
	}
	if size != ringBytes || !sealed {
		return nil, nil, fmt.Errorf("shm: the peer's ring has %d bytes, size sealed: %v; want %d, sealed", size, sealed, ringBytes)
	}
	return mapRing(fd)
}

// mapRing maps the file of a ring.
func mapRing(fd int) (*ring, []byte, error) {
	mem, err := unix.Mmap(fd, 0, ringBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return nil, nil, fmt.Errorf("shm: map a ring: %w", err)
	}
	return ringOf(mem), mem, nil
}
