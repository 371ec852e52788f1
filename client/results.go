package client

import "fmt"

// Outcome is the result of a call. The zero value is Miss.
type Outcome uint8

const (
	// Miss: nothing was found, or nothing was stored. The node may be down.
	Miss Outcome = iota
	// Hit: the call succeeded, at least in part.
	Hit
	// Busy: a bound was reached and the call did nothing. Compute the KV instead, or drop it.
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

// Cut is the reason why a prefix ends where it does.
type Cut string

const (
	// CutComplete: the prefix has the requested length.
	CutComplete Cut = "complete"
	// CutAbsent: the next block is not stored.
	CutAbsent Cut = "absent"
	// CutEpoch: no requested epoch is live on the node.
	CutEpoch Cut = "epoch"
	// CutWindowMissing, CutStateMissing: blocks are stored, but there is no length at which the
	// window or state groups are complete.
	CutWindowMissing Cut = "window_missing"
	CutStateMissing  Cut = "state_missing"
	// CutLeaseDenied: blocks matched, but the node grants no more leases.
	CutLeaseDenied Cut = "lease_denied"
	// CutNodeDown: the node that holds the next block does not answer.
	CutNodeDown Cut = "node_down"
	// CutBusy: the node had no room to load the next block.
	CutBusy Cut = "busy"
	// CutLost: the next block matched, but one of its pieces was lost on the way. ReadResult.Lost
	// has the piece and the reason.
	CutLost Cut = "lost"
)

// Reason is the reason why a piece was lost or refused.
type Reason string

const (
	// LostCorrupt: the node found the piece damaged and dropped it.
	LostCorrupt Reason = "corrupt"
	// LostChecksum: the bytes that arrived differ from those that the writer wrote.
	LostChecksum Reason = "checksum"
	// LostFailed: a device or a transfer failed; Detail has the error.
	LostFailed Reason = "failed"
	// LostGone: the piece was dropped between match and read.
	LostGone Reason = "gone"
	// LostBusy: the node had no room to load the piece.
	LostBusy Reason = "busy"
	// LostEpoch: the node read the piece under another epoch than the requested one.
	LostEpoch Reason = "epoch"
	// LostNodeDown: the node stopped answering.
	LostNodeDown Reason = "node_down"
	// LostSkipped: the piece was not requested from the node, because a block before it was lost.
	LostSkipped Reason = "skipped"
)

// LostPiece is a requested piece that is not in the caller's memory although its block matched.
type LostPiece struct {
	// Block is the index in the chain, Group the layer group.
	Block, Group int
	Reason       Reason
	// Detail is the node's explanation, for people.
	Detail string
}

// RefusedPiece is a piece that was offered and not stored.
type RefusedPiece struct {
	Block, Group int
	// Reason is the node's reason: parent_absent, parent_mismatch, stale_epoch, over_quota, full,
	// read_only, device, corrupt or too_deep. The client's own reasons are node_down, busy and
	// skipped.
	Reason Reason
	// Detail is the node's explanation, for people.
	Detail string
}
