package uring

import (
	"fmt"

	"github.com/penstock-kv/penstock/io/blockio"
)

// Wait determines how a goroutine in Do waits for its completions.
type Wait uint8

const (
	// WaitCaller: each goroutine in Do has a ring, and sleeps in the kernel.
	WaitCaller Wait = iota
	// WaitShared: all goroutines share one ring, whose descriptor is in the runtime's poller.
	WaitShared
	// WaitAuto uses WaitCaller for up to AutoThreshold batches in flight, and WaitShared for
	// further batches.
	WaitAuto
)

// String returns "caller", "shared" or "auto".
func (w Wait) String() string {
	switch w {
	case WaitCaller:
		return "caller"
	case WaitShared:
		return "shared"
	case WaitAuto:
		return "auto"
	}
	return fmt.Sprintf("Wait(%d)", uint8(w))
}

// Options are the options of a device; the zero value is the default.
type Options struct {
	// Wait is the way in which goroutines wait; default WaitCaller.
	Wait Wait
	// AutoThreshold is the number of batches in flight above which WaitAuto uses
	// the shared ring; default 8.
	AutoThreshold int
	// Rings is the maximum number of rings in the pool of WaitCaller. Each batch in flight uses one
	// ring, and further batches wait for a ring. Default 64.
	Rings int
	// Entries is the number of submission entries of each ring of the pool, a power of two. A
	// longer batch is submitted in several steps. Default 128.
	Entries int
	// SharedEntries is the maximum number of requests in flight on the shared ring, a power of two;
	// default 1024.
	SharedEntries int
	// Regions are the memory that most requests use (the arena's Bytes). They must be outside the
	// Go heap, and mapped until Close. The rings register the regions, so that the kernel need not
	// pin pages at each request, which takes a tenth of the CPU at 64 KiB and a quarter at 1 MiB.
	// All rings share one registration. Linux before 6.12 cannot share a registration; there, four
	// rings register the regions themselves. If the registration fails (RLIMIT_MEMLOCK), the kernel
	// pins pages at each request. Info.Detail names which of these three cases applies.
	Regions [][]byte
	// Budget limits the bytes in flight; see blockio.BudgetOptions.
	Budget blockio.BudgetOptions
	// Hook is for tests: it changes the kernel's results.
	Hook blockio.ResultHook
}

// EnsureDefaults fills the fields that are zero.
func (o *Options) EnsureDefaults() {
	for _, f := range []struct {
		field *int
		value int
	}{{&o.AutoThreshold, 8}, {&o.Rings, 64}, {&o.Entries, 128}, {&o.SharedEntries, 1024}} {
		if *f.field == 0 {
			*f.field = f.value
		}
	}
}

// entriesMax is the kernel's maximum number of entries in a submission queue.
const entriesMax = 32768

// Validate reports the first invalid option. EnsureDefaults must have run before.
func (o *Options) Validate() error {
	if o.Wait > WaitAuto {
		return fmt.Errorf("uring: unknown way to wait %v; choose caller, shared or auto", o.Wait)
	}
	if o.Rings < 1 || o.AutoThreshold < 1 {
		return fmt.Errorf("uring: %d rings, threshold %d; both must be positive", o.Rings, o.AutoThreshold)
	}
	for _, n := range []int{o.Entries, o.SharedEntries} {
		if n < 1 || n > entriesMax || n&(n-1) != 0 {
			return fmt.Errorf("uring: ring of %d entries; choose a power of two up to %d", n, entriesMax)
		}
	}
	for i, r := range o.Regions {
		if len(r) == 0 || len(r)%blockio.Align != 0 || !blockio.Aligned(r) {
			return fmt.Errorf("uring: region %d of %d bytes is not a multiple of %d: %w", i, len(r), blockio.Align, blockio.ErrAlign)
		}
	}
	return nil
}
