package verbs

import (
	"fmt"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// pkey is a partition key of an InfiniBand subnet. 15 bits are the number of the partition. The
// top bit is set if the port is a full member of the partition; a full member may communicate with
// limited members too. On Ethernet every port has only the default partition.
type pkey uint16

// pkeyFull is the bit that marks full membership.
const pkeyFull pkey = 1 << 15

// partition returns the key without the membership bit.
func (k pkey) partition() pkey { return k &^ pkeyFull }

// choosePKey returns a row of a port's table that has a partition, and the row's key. It prefers a
// full membership, and then the first row.
func choosePKey(table []pkey) (uint16, pkey, error) {
	best := -1
	for i, k := range table {
		if k.partition() == 0 {
			continue
		}
		if best < 0 || k&pkeyFull > table[best]&pkeyFull {
			best = i
		}
	}
	if best < 0 {
		return 0, 0, fmt.Errorf("the port is in no partition (table %#x): is a subnet manager running?", table)
	}
	return uint16(best), table[best], nil
}

// stillThere returns an error if the port's LID, or the key in row of its table, differs from the
// values with which queue pairs were created.
func stillThere(lidWas, lid uint16, keyWas pkey, table []pkey, row uint16) error {
	switch {
	case lid != lidWas:
		return fmt.Errorf("the port's LID changed from %d to %d", lidWas, lid)
	case int(row) >= len(table) || table[row] != keyWas:
		return fmt.Errorf("partition key %#x left row %d of the port's table %#x", uint16(keyWas), row, table)
	}
	return nil
}

// windowMax is the length of the longest memory window in bytes, because mlx5 binds no longer
// window.
const windowMax = 2 << 30

// Errors for memory that cannot have a memory window.
var (
	errWindowLong   = fmt.Errorf("a memory window has 2 GiB at most: %w", rdma.ErrUnsupported)
	errWindowDevice = fmt.Errorf("a dma-buf has no memory windows: %w", rdma.ErrUnsupported)
)

// noWindow returns why a part of n bytes cannot be a memory window, or nil if it can. device: the
// memory belongs to a device.
func noWindow(device bool, n uint64) error {
	switch {
	case device:
		return errWindowDevice
	case n > windowMax:
		return errWindowLong
	}
	return nil
}

// Vendors of software devices. The drivers of these devices copy payload, and may still be copying
// a packet when a key is invalidated.
const (
	vendorRXE = 0xffffff
	vendorSIW = 0x626d74
)

// limitsOf returns the Limits of a port. After a card has invalidated a key, it places no payload
// with this key, as InfiniBand requires for a deregistration. A software device may finish the
// packet that it is copying.
func limitsOf(maxWrite uint64, depth int, windows bool, vendor uint32) group.Limits {
	return group.Limits{
		MaxWrite: maxWrite, MaxMessage: int(maxWrite), QueueDepth: depth,
		Ordered: true, RefusalBreaks: true, EmptyUnchecked: true, KeyBits: 32,
		CloseIsFinal: vendor != vendorRXE && vendor != vendorSIW, Windows: windows,
	}
}
