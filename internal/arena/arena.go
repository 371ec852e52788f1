package arena

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/penstock-kv/penstock/internal/fair"
	"github.com/penstock-kv/penstock/internal/runs"
	"github.com/penstock-kv/penstock/internal/sys"
)

// Granule is the unit of allocation and the alignment of every Buffer, in bytes.
const Granule = sys.PageSize

// MaxSizeBytes is the maximum size of an arena. Page numbers have 31 bits.
const MaxSizeBytes = int64(1<<31-1) / hugePages * hugePages * Granule

// hugePages is the number of granules in a huge page.
const hugePages = sys.HugePageSize / Granule

// The sentinel errors differ in the reaction that they require of the caller.
var (
	// ErrBusy: the arena is full, and so is the queue of waiting requests. The caller answers Busy
	// to the client.
	ErrBusy = errors.New("arena is full and so is its queue")
	// ErrTooLarge: the request exceeds the arena. The caller refuses the request, or the operator
	// starts with a larger arena.
	ErrTooLarge = errors.New("larger than the arena")
	// ErrClosed: the arena is closed. The caller stops.
	ErrClosed = errors.New("arena is closed")
	// ErrInUse: Close found buffers that were not released.
	ErrInUse = errors.New("buffers were not released")
)

// Options are the arguments of New. SizeBytes is required; the zero value of every other field is
// its default.
type Options struct {
	// SizeBytes is the size of the region, rounded up to a multiple of 2 MiB.
	SizeBytes int64
	// HugeTLB makes the arena use the huge pages that vm.nr_hugepages reserves. If there are too
	// few, the arena uses transparent huge pages. HugeTLB helps if transparent huge pages are off,
	// and for a Shared arena.
	HugeTLB bool
	// Shared backs the region with a memfd that another process can map read-only (Send). It needs
	// Linux 5.1. Without HugeTLB, a Shared region has 4 KiB pages on systems where shmem_enabled is
	// "never".
	Shared bool
	// QueueMax is the maximum number of requests that wait for any memory. SetShare has the maximum for
	// the share. Default 1024. If QueueMax is negative, no request waits.
	QueueMax int
}

// EnsureDefaults fills the fields that are zero.
func (o *Options) EnsureDefaults() {
	if o.QueueMax == 0 {
		o.QueueMax = 1024
	}
	o.SizeBytes = (o.SizeBytes + sys.HugePageSize - 1) / sys.HugePageSize * sys.HugePageSize
}

// Validate reports the first invalid option. EnsureDefaults must have run before.
func (o *Options) Validate() error {
	if o.SizeBytes <= 0 || o.SizeBytes > MaxSizeBytes {
		return fmt.Errorf("arena: size of %d bytes; choose one from 1 to %d", o.SizeBytes, MaxSizeBytes)
	}
	if page := os.Getpagesize(); page != Granule {
		return fmt.Errorf("arena: this kernel has pages of %d bytes, penstock supports %d", page, Granule)
	}
	return nil
}

// Arena is one region of memory, with the record of which pages are free and which are lent as
// Buffers. Its methods may be called concurrently.
type Arena struct {
	region region
	pages  uint32

	mu sync.Mutex
	// share is the number of the first page of the share (SetShare), and shareFree the number of its free
	// pages.
	share, shareFree uint32
	// free holds the free pages.
	free *runs.Set
	// seq is indexed by page. For the first page of a Buffer it has the number of loans that began
	// there plus the number that ended there, so it is odd while the Buffer is on loan.
	seq []uint32
	// waiting is the queue of the requests of Alloc, and sharing the queue of the requests of
	// AllocShare. Their units are pages.
	waiting, sharing *fair.Queue
	// waitingMax and sharingMax are the maximum numbers of requests in them.
	waitingMax, sharingMax int
	closed                 bool
	stats                  Stats
	// takers records the call stack that took each Buffer, in builds with the tag invariants.
	takers takers
}

// New maps the region and makes it resident: every page exists when New returns. For a large arena
// that takes seconds. The caller must call Close.
func New(o Options) (*Arena, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	r, err := mapRegion(o)
	if err != nil {
		return nil, err
	}
	pages := uint32(o.SizeBytes / Granule)
	a := &Arena{
		region: r, pages: pages, share: pages,
		free: runs.New(pages), seq: make([]uint32, pages),
		waiting: fair.New(), sharing: fair.New(), waitingMax: max(0, o.QueueMax),
	}
	a.free.Add(runs.Run{N: pages})
	a.stats.SizeBytes = o.SizeBytes
	a.stats.Kind, a.stats.HugeBytes = r.kind, r.hugeBytes
	return a, nil
}

// Kind returns the kind of pages that back most of the region, as measured after mapping.
func (a *Arena) Kind() Kind { return a.region.kind }

// Bytes returns the whole region, to be registered with a ring or a NIC. Only the holder of a
// Buffer may touch the bytes of that Buffer.
func (a *Arena) Bytes() []byte { return a.region.mem }

// FD returns the descriptor of the memfd of a Shared arena, valid until Close. For any other arena
// it returns -1.
func (a *Arena) FD() int {
	if a.region.file == nil {
		return -1
	}
	return int(a.region.file.Fd())
}

// SetShare turns the last sizeBytes of the region, in whole granules, into a share. AllocShare
// takes memory only from the share. Alloc takes memory from the share only while no request waits
// for the share. At most queueMax requests wait for the share. A new arena has no share.
func (a *Arena) SetShare(sizeBytes int64, queueMax int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.sharingMax = queueMax
	a.share = a.pages - min(a.pages, uint32(sizeBytes/Granule))
	a.shareFree = 0
	for page := a.share; page < a.pages; page++ {
		n := a.free.From(page, a.pages-page)
		a.shareFree += n
		page += n // the page after the run is not free
	}
	a.serveLocked()
}

// TryAlloc is TryAllocFor for a caller without a principal.
func (a *Arena) TryAlloc(sizeBytes int) (Buffer, error) {
	return a.TryAllocFor(fair.Caller{}, sizeBytes)
}

// TryAllocFor lends sizeBytes, rounded up to a multiple of Granule, if they are free and no request
// waits. Otherwise it returns ErrBusy.
func (a *Arena) TryAllocFor(by fair.Caller, sizeBytes int) (Buffer, error) {
	return a.try(by, sizeBytes, a.waiting)
}

// TryAllocShare is TryAllocFor for memory of the share.
func (a *Arena) TryAllocShare(by fair.Caller, sizeBytes int) (Buffer, error) {
	return a.try(by, sizeBytes, a.sharing)
}

func (a *Arena) try(by fair.Caller, sizeBytes int, q *fair.Queue) (Buffer, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	pages, err := a.pagesForLocked(sizeBytes, q)
	if err != nil {
		return Buffer{}, err
	}
	buf, ok := a.tryLocked(by, pages, q)
	if !ok {
		a.stats.Busy++
		return Buffer{}, fmt.Errorf("arena: %d bytes now, %d free in the longest run: %w", sizeBytes, a.longestFreeLocked(), ErrBusy)
	}
	return buf, nil
}

// Alloc is AllocFor for a caller without a principal.
func (a *Arena) Alloc(ctx context.Context, sizeBytes int) (Buffer, error) {
	return a.AllocFor(ctx, fair.Caller{}, sizeBytes)
}

// AllocFor lends sizeBytes, rounded up to a multiple of Granule. It waits, in the order of package
// fair, until that many contiguous bytes are free. If ctx ends first, it returns ctx's error. It
// returns ErrBusy if the queue is full: at once, or later when its request is refused in favour of a
// principal with fewer waiting requests. The memory contains the bytes of its previous holder.
func (a *Arena) AllocFor(ctx context.Context, by fair.Caller, sizeBytes int) (Buffer, error) {
	return a.alloc(ctx, by, sizeBytes, a.waiting)
}

// AllocShare is AllocFor for memory of the share. Its requests have a separate queue, so that neither
// queue delays the other, and memory of the share is counted separately for each principal.
func (a *Arena) AllocShare(ctx context.Context, by fair.Caller, sizeBytes int) (Buffer, error) {
	return a.alloc(ctx, by, sizeBytes, a.sharing)
}

func (a *Arena) alloc(ctx context.Context, by fair.Caller, sizeBytes int, q *fair.Queue) (Buffer, error) {
	if err := ctx.Err(); err != nil {
		return Buffer{}, fmt.Errorf("arena: %d bytes: %w", sizeBytes, err)
	}
	a.mu.Lock()
	pages, err := a.pagesForLocked(sizeBytes, q)
	if err != nil {
		a.mu.Unlock()
		return Buffer{}, err
	}
	if buf, ok := a.tryLocked(by, pages, q); ok {
		a.mu.Unlock()
		return buf, nil
	}
	most := a.waitingMax
	if q == a.sharing {
		most = a.sharingMax
	}
	busy := fmt.Errorf("arena: %d bytes with %d requests waiting: %w", sizeBytes, most, ErrBusy)
	if q.Waiting() >= most && !q.Refuse(by) {
		a.stats.Busy++
		a.mu.Unlock()
		return Buffer{}, busy
	}
	w := q.Push(by, int64(pages), int64(pages)*Granule)
	a.stats.Waits++
	a.serveLocked() // the request may be the next one, before a larger one that waits
	a.mu.Unlock()

	select {
	case <-w.Done():
		if w.Refused() {
			a.mu.Lock()
			a.stats.Busy++
			a.mu.Unlock()
			return Buffer{}, busy
		}
		return w.Value.(Buffer), nil
	case <-ctx.Done():
		a.forget(w, q)
		return Buffer{}, fmt.Errorf("arena: %d bytes: %w", sizeBytes, context.Cause(ctx))
	}
}

// InShare reports whether at least a part of the Buffer lies in the share.
func (a *Arena) InShare(b Buffer) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return b.page+b.pages > a.share
}

// forget removes from the queue a request whose context has ended. If the request was served
// meanwhile, forget frees its Buffer.
func (a *Arena) forget(w *fair.Turn, q *fair.Queue) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stats.Cancelled++
	if !q.Remove(w) && !w.Refused() {
		a.freeLocked(w.Value.(Buffer))
	}
	a.serveLocked() // the next waiter may need less memory
}

// Close unmaps the region. It refuses with ErrInUse, and lists the buffers, while buffers are on
// loan: a holder, which may be a device, would write into unmapped or reused memory. Close may be
// called twice.
func (a *Arena) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil
	}
	if a.stats.Buffers > 0 {
		return a.leakLocked()
	}
	a.closed = true
	return a.region.unmap()
}

// Stats are the state of an arena and its counters since the start.
type Stats struct {
	// Kind, SizeBytes and HugeBytes do not change. HugeBytes is the part of the region on huge
	// pages, in bytes.
	Kind                 Kind
	SizeBytes, HugeBytes int64
	// UsedBytes is the size of all lent buffers, and Buffers their number. PeakBytes is the maximum
	// of UsedBytes so far. LongestFreeBytes is the size of the largest request that could be served
	// at once.
	UsedBytes, PeakBytes, LongestFreeBytes int64
	Buffers                                int
	// Waiting is the number of requests in the queues.
	Waiting int
	// Allocs counts the requests served, Waits the requests that had to wait (whether then served
	// or Cancelled), and Busy the requests refused because the queue was full.
	Allocs, Waits, Cancelled, Busy uint64
	// DoubleReleases counts calls of Release on a Buffer that was not on loan. Each is a bug of the
	// caller, but harmless: the second call does nothing.
	DoubleReleases uint64
}

// Stats returns the current figures.
func (a *Arena) Stats() Stats {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.stats
	s.LongestFreeBytes = a.longestFreeLocked()
	return s
}

// pagesForLocked converts the size of a request to granules. It refuses a request that can never be
// served.
func (a *Arena) pagesForLocked(sizeBytes int, q *fair.Queue) (uint32, error) {
	limit := a.stats.SizeBytes
	if q == a.sharing {
		limit = int64(a.pages-a.share) * Granule
	}
	switch {
	case a.closed:
		return 0, fmt.Errorf("arena: %w", ErrClosed)
	case sizeBytes <= 0 || int64(sizeBytes) > limit:
		return 0, fmt.Errorf("arena: request of %d bytes, arena or share of %d: %w", sizeBytes, limit, ErrTooLarge)
	}
	return uint32((int64(sizeBytes) + Granule - 1) / Granule), nil
}

func (a *Arena) longestFreeLocked() int64 { return int64(a.free.Longest()) * Granule }

// tryLocked serves a new request if no other request waits in its queue and the memory is free.
func (a *Arena) tryLocked(by fair.Caller, pages uint32, q *fair.Queue) (Buffer, bool) {
	if q.Waiting() > 0 {
		return Buffer{}, false
	}
	buf, ok := a.takeLocked(pages, q)
	if ok {
		buf.flow = q.Take(by, int64(pages), int64(pages)*Granule)
	}
	return buf, ok
}

// takeLocked takes a Buffer, without its flow, from the first run of free pages that is long enough,
// among the pages that requests of queue q may take.
func (a *Arena) takeLocked(pages uint32, q *fair.Queue) (Buffer, bool) {
	from, to := uint32(0), a.pages
	switch {
	case q == a.sharing:
		from = a.share
	case a.sharing.Waiting() > 0:
		to = a.share
	}
	run, ok := a.free.First(pages, from, to)
	if !ok {
		return Buffer{}, false
	}
	a.free.Remove(run)
	a.shareFree -= a.inShareLocked(run)
	page := run.Start
	a.seq[page]++
	s := &a.stats
	s.Allocs++
	s.Buffers++
	s.UsedBytes += int64(pages) * Granule
	s.PeakBytes = max(s.PeakBytes, s.UsedBytes)
	a.takers.note(page, pages)
	return Buffer{arena: a, page: page, pages: pages, seq: a.seq[page]}, true
}

// inShareLocked returns the number of pages of a run that lie in the share.
func (a *Arena) inShareLocked(r runs.Run) uint32 {
	end := r.Start + r.N
	return end - min(end, max(a.share, r.Start))
}

// freeLocked ends the loan of the Buffer b and frees its pages.
func (a *Arena) freeLocked(b Buffer) {
	a.seq[b.page]++
	a.stats.Buffers--
	a.stats.UsedBytes -= int64(b.pages) * Granule
	a.takers.forget(b.page)
	run := runs.Run{Start: b.page, N: b.pages}
	a.free.Add(run)
	a.shareFree += a.inShareLocked(run)
	b.flow.Release(int64(b.pages))
}

// serveLocked serves the waiting requests, the requests for the share first. The requests of the
// other queue get memory of the share only if no request for the share waits.
func (a *Arena) serveLocked() {
	a.serveQueueLocked(a.sharing)
	a.serveQueueLocked(a.waiting)
	a.countWaitingLocked()
}

// serveQueueLocked serves one queue strictly in its order. A request that does not fit delays all
// requests behind it, because large requests would starve otherwise.
func (a *Arena) serveQueueLocked(q *fair.Queue) {
	for w := q.Next(a.freePagesLocked(q)); w != nil; w = q.Next(a.freePagesLocked(q)) {
		buf, ok := a.takeLocked(uint32(w.Units), q)
		if !ok {
			return
		}
		buf.flow = w.Flow()
		w.Value = buf
		q.Grant(w)
	}
}

// freePagesLocked returns the number of free pages that requests of queue q may take.
func (a *Arena) freePagesLocked(q *fair.Queue) int64 {
	switch {
	case q == a.sharing:
		return int64(a.shareFree)
	case a.sharing.Waiting() > 0:
		return int64(a.free.Size() - a.shareFree)
	}
	return int64(a.free.Size())
}

func (a *Arena) countWaitingLocked() { a.stats.Waiting = a.waiting.Waiting() + a.sharing.Waiting() }

// Held returns the number of bytes that a principal holds of AllocFor's memory, and of the share.
func (a *Arena) Held(principal string) (bytes, shareBytes int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	_, pages := a.waiting.Of(principal)
	_, sharePages := a.sharing.Of(principal)
	return pages * Granule, sharePages * Granule
}

// leakLocked returns an error that lists the lent buffers.
func (a *Arena) leakLocked() error {
	return fmt.Errorf("arena: close with %d buffers of %d bytes out%s: %w",
		a.stats.Buffers, a.stats.UsedBytes, a.takers.report(), ErrInUse)
}
