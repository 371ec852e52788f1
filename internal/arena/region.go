package arena

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"

	"github.com/penstock-kv/penstock/internal/sys"
)

// Kind is the kind of pages that back a region.
type Kind string

const (
	// HugeTLB is 2 MiB pages from the pool that the kernel has reserved.
	HugeTLB Kind = "hugetlb"
	// THP is transparent huge pages for at least nine tenths of the region.
	THP Kind = "thp"
	// Small is 4 KiB pages, with which the disk bandwidth is about half of that with huge pages.
	Small Kind = "4k"
)

// region is the mapping under an arena.
type region struct {
	mem       []byte
	file      *os.File // the memfd of a Shared arena, else nil
	kind      Kind
	hugeBytes int64
}

// mapRegion maps and populates the memory that the options request. If the reserved pool is too
// small, it uses transparent huge pages, and if these are off, the pages that the kernel provides.
func mapRegion(o Options) (region, error) {
	if o.HugeTLB {
		if r, err := mapKind(o, true); err == nil {
			r.kind, r.hugeBytes = HugeTLB, o.SizeBytes
			return r, nil
		}
	}
	r, err := mapKind(o, false)
	if err != nil {
		return region{}, err
	}
	if r.hugeBytes, err = sys.HugeBytes(r.mem); err != nil {
		return region{}, errors.Join(err, r.unmap())
	}
	r.kind = Small
	if r.hugeBytes >= o.SizeBytes/10*9 {
		r.kind = THP
	}
	return r, nil
}

// mapKind maps and populates one kind of memory. After an error nothing stays mapped.
func mapKind(o Options, hugetlb bool) (region, error) {
	var r region
	var err error
	if o.Shared {
		if r.file, err = sys.Memfd("penstock-arena", o.SizeBytes, hugetlb); err != nil {
			return region{}, fmt.Errorf("arena: %w", err)
		}
		if r.mem, err = sys.MapShared(int(r.file.Fd()), int(o.SizeBytes)); err == nil {
			err = sys.Freeze(r.file)
		}
	} else {
		r.mem, err = sys.MapAnon(int(o.SizeBytes), hugetlb)
	}
	if err != nil {
		return region{}, errors.Join(fmt.Errorf("arena: %w", err), r.unmap())
	}
	if err := r.settle(hugetlb); err != nil {
		return region{}, errors.Join(fmt.Errorf("arena: %w", err), r.unmap())
	}
	return r, nil
}

// settle requests huge pages, makes every page resident, and excludes the region from core dumps,
// because it contains users' data.
func (r *region) settle(hugetlb bool) error {
	if !hugetlb {
		// A kernel without transparent huge pages refuses the advice; Kind then reports Small.
		_ = sys.AdviseHuge(r.mem)
	}
	if err := populate(r.mem, sys.Populate); err != nil {
		return err
	}
	return sys.DontDump(r.mem)
}

// populate divides mem into parts and calls one for each part, on one thread per CPU, at most
// eight. More threads would not be faster, because the bandwidth of the memory then limits the
// speed.
func populate(mem []byte, one func([]byte) error) error {
	pages := len(mem) / sys.HugePageSize
	workers := min(runtime.GOMAXPROCS(0), 8, pages)
	errs := make([]error, workers)
	var wg sync.WaitGroup
	for i := range workers {
		from, to := pages*i/workers, pages*(i+1)/workers
		wg.Go(func() { errs[i] = one(mem[from*sys.HugePageSize : to*sys.HugePageSize]) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// unmap unmaps the region and closes its file.
func (r *region) unmap() error {
	var errs []error
	if r.mem != nil {
		errs = append(errs, sys.Unmap(r.mem))
	}
	if r.file != nil {
		errs = append(errs, r.file.Close())
	}
	r.mem, r.file = nil, nil
	return errors.Join(errs...)
}
