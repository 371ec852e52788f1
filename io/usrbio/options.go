package usrbio

import (
	"fmt"

	"github.com/penstock-kv/penstock/io/blockio"
)

// Options are the options of a device; the zero value is the default.
type Options struct {
	// Library is the file name of 3FS's client library. Default libhf3fs_api_shared.so, which the
	// dynamic linker finds.
	Library string
	// Slots is the number of requests that each of the two rings has in flight at most; default 32.
	// A longer batch is submitted in several steps.
	Slots int
	// SlotBytes is the size of the shared memory of one request, in bytes; default 512 KiB. A
	// longer request is divided. The device takes 2 * Slots * SlotBytes below /dev/shm, 32 MiB by
	// default. Containers often have 64 MiB there.
	SlotBytes int
	// Budget limits the bytes in flight; see blockio.BudgetOptions. MaxBytes is by default the
	// memory of both rings.
	Budget blockio.BudgetOptions
}

// EnsureDefaults fills the fields that are zero.
func (o *Options) EnsureDefaults() {
	if o.Library == "" {
		o.Library = "libhf3fs_api_shared.so"
	}
	if o.Slots == 0 {
		o.Slots = 32
	}
	if o.SlotBytes == 0 {
		o.SlotBytes = 512 << 10
	}
	if o.Budget.MaxBytes == 0 {
		o.Budget.MaxBytes = max(o.Budget.MinBytes, 2*int64(o.Slots)*int64(o.SlotBytes))
	}
	if o.Budget.MinBytes == 0 {
		o.Budget.MinBytes = min(1<<20, o.Budget.MaxBytes)
	}
	o.Budget.EnsureDefaults()
}

// slotsMax and slotBytesMax bound the shared memory of a device.
const (
	slotsMax     = 1 << 12
	slotBytesMax = 64 << 20
)

// Validate reports the first invalid option. EnsureDefaults must have run before.
func (o *Options) Validate() error {
	if o.Slots < 1 || o.Slots > slotsMax {
		return fmt.Errorf("usrbio: %d slots; choose 1 to %d", o.Slots, slotsMax)
	}
	if o.SlotBytes < blockio.Align || o.SlotBytes > slotBytesMax || o.SlotBytes%blockio.Align != 0 {
		return fmt.Errorf("usrbio: slots of %d bytes; choose a multiple of %d up to %d", o.SlotBytes, blockio.Align, slotBytesMax)
	}
	return o.Budget.Validate()
}
