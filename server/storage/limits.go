package storage

import (
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/trie"
)

// Limits has those limits of Options, of the index and of the store that can change while the Node
// runs. Each limit has the same meaning as there.
type Limits struct {
	ReadsMax        int
	ReservationsMax int
	// LeasesMax is the index's Options.MaxLeases.
	LeasesMax      int
	LeaseTTLMax    time.Duration
	ReservationTTL time.Duration
	QueueWait      time.Duration
	ReadWait       time.Duration
	LoanBytesMax   int64
	// FreeFloorBytes is the store's Options.FreeFloorBytes.
	FreeFloorBytes      int64
	ScrubBytesPerSecond int64
	// RewriteBytesPerSecond limits the rewriting of blocks on each encrypted volume.
	RewriteBytesPerSecond int64
}

// CheckLimits returns an error for the first limit of l that is invalid, or nil. SetLimits may be
// called only with limits for which CheckLimits returns nil.
func (n *Node) CheckLimits(l Limits) error {
	arenaBytes := int64(len(n.opts.Arena.Bytes()))
	switch {
	case l.ReadsMax < 1 || l.ReservationsMax < 1:
		return fmt.Errorf("storage: ReadsMax is %d, ReservationsMax %d; both must be positive", l.ReadsMax, l.ReservationsMax)
	case l.LeasesMax < 1 || l.LeasesMax > trie.MaxLeasesLimit:
		return fmt.Errorf("storage: LeasesMax is %d; want 1 to %d", l.LeasesMax, trie.MaxLeasesLimit)
	case l.LeaseTTLMax <= 0 || l.ReservationTTL <= 0 || l.QueueWait <= 0 || l.ReadWait <= 0:
		return fmt.Errorf("storage: LeaseTTLMax is %v, ReservationTTL %v, QueueWait %v, ReadWait %v; all must be positive", l.LeaseTTLMax, l.ReservationTTL, l.QueueWait, l.ReadWait)
	case l.LoanBytesMax < 0 || l.LoanBytesMax > arenaBytes:
		return fmt.Errorf("storage: LoanBytesMax is %d bytes; give 0 to the arena's size, %d", l.LoanBytesMax, arenaBytes)
	case l.FreeFloorBytes < 0 || l.ScrubBytesPerSecond < 0 || l.RewriteBytesPerSecond < 0:
		return fmt.Errorf("storage: FreeFloorBytes is %d, ScrubBytesPerSecond %d, RewriteBytesPerSecond %d; give 0 or more", l.FreeFloorBytes, l.ScrubBytesPerSecond, l.RewriteBytesPerSecond)
	}
	return nil
}

// SetLimits replaces the limits, which CheckLimits accepts. Calls, leases, reservations and loans that
// exist are not ended by a lower limit. The node refuses new ones until fewer exist than the limit.
func (n *Node) SetLimits(l Limits) {
	l.LoanBytesMax = loanBytesMax(l.LoanBytesMax, n.opts.Arena)
	was := n.limits.Swap(&l)
	places := l.ReadsMax * len(n.lanes)
	n.reads.setMax(int64(places), places)
	for _, lane := range n.lanes {
		lane.max.Store(int64(l.ReadsMax))
	}
	n.index.SetMaxLeases(l.LeasesMax)
	n.loans.setMax(l.LoanBytesMax)
	n.store.SetFreeFloor(l.FreeFloorBytes)
	if was.RewriteBytesPerSecond != l.RewriteBytesPerSecond {
		n.wakeMovers()
	}
	if was.ScrubBytesPerSecond != l.ScrubBytesPerSecond {
		select {
		case n.scrubRate <- struct{}{}:
		default: // the scrubber has not taken the last change yet
		}
	}
}

// startLimits returns the limits with which a node with these options starts.
func startLimits(o *Options) *Limits {
	return &Limits{
		ReadsMax: o.ReadsMax, ReservationsMax: o.ReservationsMax, LeaseTTLMax: o.LeaseTTLMax, ReservationTTL: o.ReservationTTL,
		QueueWait: o.QueueWait, ReadWait: o.ReadWait, LoanBytesMax: o.LoanBytesMax, ScrubBytesPerSecond: o.ScrubBytesPerSecond,
		RewriteBytesPerSecond: o.RewriteBytesPerSecond,
	}
}
