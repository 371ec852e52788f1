package dualpath

import "fmt"

// ActionKind is the kind of an Action.
type ActionKind uint8

const (
	// Assign: the planner has assigned the request to Engine. The action is sent to Group. The
	// engine reads nothing yet.
	Assign ActionKind = iota + 1
	// Start: both engines of the request are chosen. The action is sent to the groups of both
	// engines, which allocate memory and read Parts.
	Start
	// Read: the engine on Side (prefill or decode) also reads Parts[0], in addition to its earlier
	// orders. With Hedge, the other engine reads the same part, and the first of the two reads to
	// complete counts.
	Read
	// Cut: Side stops reading the request's prefix as soon as possible and replies with Stopped.
	Cut
	// Drop: Side stops its read and discards its part of the prefix. It sends no reply.
	Drop
	// Recompute: the prefill engine computes the tokens from Parts[0].From to Parts[0].To, because
	// neither side can read them.
	Recompute
	// Abort: Group drops the request, in whatever state the request is.
	Abort
	// Reject: the request ends unserved, for the reason Why. The action is sent to the gateway.
	Reject
	// Replan: the request is planned again, for the reason Why. Prefilled: the request's prefill
	// has ended. Done: the request has ended. All three are sent to the gateway and have no Seq.
	Replan
	Prefilled
	Done
	// Switch: the group's engines change their role to Side. The action is sent to Group when the
	// group holds no request.
	Switch
	// Switched: the group has changed its role to Side, or keeps its previous role for the reason
	// Why. The action is sent to the operator and has no Seq.
	Switched
	// Announce: the group gets a Switch to Side once it holds no request; with the group's present
	// role as Side, it gets none. The action is sent to Group, whose leader registers with Side
	// (GroupUp.Announced), so that a restarted planner continues the switch.
	Announce
)

var actionNames = [...]string{"none", "assign", "start", "read", "cut", "drop", "recompute", "abort", "reject", "replan", "prefilled", "done", "switch", "switched", "announce"}

// String returns the kind's name.
func (k ActionKind) String() string {
	if int(k) < len(actionNames) {
		return actionNames[k]
	}
	return fmt.Sprintf("action %d", uint8(k))
}

// Part is a range of a request's cached tokens, [From, To), that the engine on one side reads.
type Part struct {
	Side     Role
	From, To int
}

// Len is the part's length in tokens.
func (p Part) Len() int { return p.To - p.From }

// Action is an order or a notification. Fields that the kind does not use are zero.
type Action struct {
	Kind ActionKind
	// Seq is the number of an action that is sent to a group. Later actions have higher numbers.
	// Fetch.Seen is one of these numbers.
	Seq     uint64
	Request RequestID
	// Group is the recipient. In a Start it is the prefill engine's group; the Start is sent to the
	// decode engine's group too.
	Group  GroupID
	Engine EngineID
	// PE and DE are the prefill and the decode engine of a Start.
	PE, DE EngineID
	Side   Role
	// Parts[:NParts] are the ranges that are read or computed.
	Parts  [2]Part
	NParts int
	Hedge  bool
	Why    Reason
	// Epoch, in a Start, is the version of the weights that the request is computed
	// and stored with.
	Epoch uint64
	// Need and Most are set in a Reject because of the request's size: Need is the amount that
	// the request needs, Most the largest amount that any engine has. The unit is tokens; for
	// TooLarge it is bytes. For FirstTokenLate, Need is the estimated time until the first token
	// (0: unknown) and Most the time left until the deadline, in microseconds.
	Need, Most int
}

// Reason is the reason for a rejection, for planning a request again, or for keeping a group's
// role.
type Reason uint8

const (
	// NoReason: no reason applies.
	NoReason Reason = iota
	// QueueFull: Options.MaxQueue requests are waiting or being served.
	QueueFull
	// TooLong: no decode engine's HBM holds the request.
	TooLong
	// PastDeadline: the deadline passed before the request was started.
	PastDeadline
	// Duplicate: a request of that ID is being served.
	Duplicate
	// BadRequest: the lengths are inconsistent.
	BadRequest
	// GroupLost: the group of one of the request's engines is gone.
	GroupLost
	// EpochOver: the weights have changed, so the cached prefix cannot be used.
	EpochOver
	// ByGateway: the gateway cancelled the request.
	ByGateway
	// ReadFailed: storage no longer has the prefix.
	ReadFailed
	// EngineFailed: an engine failed in its part of the request.
	EngineFailed
	// TooLongToPrefill: no prefill engine's device memory holds the prompt.
	TooLongToPrefill
	// PromptTooLong: the prompt is longer than any engine of a role accepts.
	PromptTooLong
	// TooLarge: no engine of a role has a buffer that holds the request.
	TooLarge
	// FirstTokenLate: the first token cannot be produced by its deadline.
	FirstTokenLate
	// OldWeights: the request used older weights, and a change of weights ended it.
	OldWeights
	// RoleChange: the request's group is changing its role.
	RoleChange
	// LastOfRole: the group is the last one of its role.
	LastOfRole
	// OnlyTaker: a request in progress fits into no other group of the role.
	OnlyTaker
	// SameRole: the group has the role already.
	SameRole
	// Ordered: the group's leader already has the order to change the role.
	Ordered
	// RoleRefused: the group's leader refused the role.
	RoleRefused
	// ByOperator: the operator withdrew the switch.
	ByOperator
)

var reasonTexts = [...]string{
	"", "the queue is full", "longer than any decode engine's HBM", "past its deadline", "a request of that ID is being served",
	"prompt, hit and output are inconsistent", "its group is gone", "the weights have changed", "cancelled by the gateway", "no longer in storage", "an engine could not do its part",
	"longer than any prefill engine's device memory", "the prompt is longer than any engine accepts", "larger than any engine's buffer", "the first token cannot come by its deadline",
	"the weights changed, and the change ended the requests of older weights", "its group changes its role",
	"no other group has its role", "a request under way fits into no other group of its role", "it has this role", "its leader has the order to change it", "its leader refused", "withdrawn by the operator",
}

// String returns a phrase for people.
func (r Reason) String() string {
	if int(r) < len(reasonTexts) {
		return reasonTexts[r]
	}
	return fmt.Sprintf("reason %d", uint8(r))
}
