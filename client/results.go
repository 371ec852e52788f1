package client

import "fmt"

// Outcome is what came of a call. The zero value is Miss.
type Outcome uint8

const (
	// Miss: nothing was found, or nothing was stored; the node may be down.
	Miss Outcome = iota
	// Hit: done, at least in part.
	Hit
	// Busy: a bound was reached and nothing was done. Compute instead, or drop.
	Busy
)

// String returns miss, hit or busy.
func (o Outcome) String() string {
	switch o {
	case Miss:
		return "miss"
	case Hit:
		return "hit"
	case Busy:
		return "busy"
	}
	return fmt.Sprintf("Outcome(%d)", uint8(o))
}

// Cut says why a prefix is not longer.
type Cut string

const (
	// CutComplete: it is as long as what was asked for.
	CutComplete Cut = "complete"
	// CutAbsent: the next block is not stored.
	CutAbsent Cut = "absent"
	// CutEpoch: no epoch that was asked for is live on the node.
	CutEpoch Cut = "epoch"
	// CutWindowMissing, CutStateMissing: blocks are there, but no length at
	// which the window or state groups are complete.
	CutWindowMissing Cut = "window_missing"
	CutStateMissing  Cut = "state_missing"
	// CutLeaseDenied: matched, but the node grants no more leases.
	CutLeaseDenied Cut = "lease_denied"
	// CutNodeDown: the node that holds the next block does not answer.
	CutNodeDown Cut = "node_down"
	// CutBusy: the node refused the next block's load.
	CutBusy Cut = "busy"
	// CutLost: the next block matched, but a piece of it was lost on the way;
	// ReadResult.Lost says which and why.
	CutLost Cut = "lost"
)

// Reason says why a piece was lost, or refused.
type Reason string

const (
	// LostCorrupt: the node found it damaged and dropped it.
	LostCorrupt Reason = "corrupt"
	// LostChecksum: what arrived is not what its writer wrote.
	LostChecksum Reason = "checksum"
	// LostFailed: a device or transfer error; Detail says which.
	LostFailed Reason = "failed"
	// LostGone: it went away between match and read.
	LostGone Reason = "gone"
	// LostBusy: the node had no room to load it.
	LostBusy Reason = "busy"
	// LostEpoch: it was read under another epoch than the blocks before it.
	LostEpoch Reason = "epoch"
	// LostNodeDown: the node stopped answering.
	LostNodeDown Reason = "node_down"
	// LostSkipped: it was not tried, because a block before it was lost.
	LostSkipped Reason = "skipped"
)

// LostPiece is a piece that was asked for, of a block that matched, and is not in
// the caller's memory.
type LostPiece struct {
	// Block is the index in the chain, Group the layer group.
	Block, Group int
	Reason       Reason
	// Detail is what the node said, for people.
	Detail string
}

// RefusedPiece is a piece that was offered and not stored.
type RefusedPiece struct {
	Block, Group int
	// Reason is the node's word: parent_absent, parent_mismatch, stale_epoch,
	// over_quota, full, read_only, device, corrupt, too_deep; or node_down, busy, skipped.
	Reason Reason
	// Detail is what the node said, for people.
	Detail string
}
