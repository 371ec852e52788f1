package dualpath

import "fmt"

// ActionKind is what an Action asks for.
type ActionKind uint8

const (
	// Assign: the request is Engine's. It goes to Group; nothing is read yet.
	Assign ActionKind = iota + 1
	// Start: both engines are known. It goes to the groups of both: allocate,
	// and read Parts.
	Start
	// Read: Side reads Parts[0] too; what it was told before goes on. With
	// Hedge, the other side is reading the same: the first to have it counts.
	Read
	// Cut: Side stops reading the request as soon as it can and answers with
	// Stopped.
	Cut
	// Drop: Side forgets its part; no answer is awaited.
	Drop
	// Recompute: the tokens from Parts[0].From to Parts[0].To are not read by
	// anyone: the prefill engine computes them.
	Recompute
	// Abort: Group drops the request in any state.
	Abort
	// Reject: the request ends here; Why says why. It goes to the gateway.
	Reject
	// Replan, Prefilled, Done: the request is planned anew (for the reason Why), its prefill has
	// ended, it has ended. They go to the gateway and have no Seq.
	Replan
	Prefilled
	Done
	// Switch: the group's engines are to change their role to Side. The group has no request.
	Switch
	// Switched: the group has changed its role to Side, or works on in the role that it had, for
	// the reason Why. It goes to the operator and has no Seq.
	Switched
)

var actionNames = [...]string{"none", "assign", "start", "read", "cut", "drop", "recompute", "abort", "reject", "replan", "prefilled", "done", "switch", "switched"}

// String returns the kind's name.
func (k ActionKind) String() string {
	if int(k) < len(actionNames) {
		return actionNames[k]
	}
	return fmt.Sprintf("action %d", uint8(k))
}

// Part is a range of a request's cached tokens, [From, To), read by one side.
type Part struct {
	Side     Role
	From, To int
}

// Len is the part's length in tokens.
func (p Part) Len() int { return p.To - p.From }

// Action is what is to be done. Fields that the kind does not name are zero.
type Action struct {
	Kind ActionKind
	// Seq numbers the actions for groups; Fetch.Seen refers to it.
	Seq     uint64
	Request RequestID
	// Group is whom it is for: of Start, the prefill group (PE's); the decode
	// group gets it too.
	Group  GroupID
	Engine EngineID
	// PE and DE, in a Start.
	PE, DE EngineID
	Side   Role
	// Parts[:NParts] are what is read, or computed.
	Parts  [2]Part
	NParts int
	Hedge  bool
	Why    Reason
	// Epoch, in a Start, is the version of the weights that the request is computed
	// and stored with.
	Epoch uint64
	// Need and Most are set in a Reject because of the request's size: Need is the
	// amount that the request needs, Most the largest amount that any engine has. The
	// unit is tokens; for TooLarge it is bytes. For FirstTokenLate, Need is the estimated
	// time until the first token (0: not known) and Most the time that was left, in
	// microseconds.
	Need, Most int
}

// Reason is why a request was rejected or planned anew, or why a group keeps its role.
type Reason uint8

const (
	// NoReason: nothing to explain.
	NoReason Reason = iota
	// QueueFull: Options.MaxQueue requests wait.
	QueueFull
	// TooLong: no decode engine's HBM holds the request.
	TooLong
	// PastDeadline: the deadline came before the request was started.
	PastDeadline
	// Duplicate: a request of that ID is being served.
	Duplicate
	// BadRequest: lengths that contradict each other.
	BadRequest
	// GroupLost: the group that had it is gone.
	GroupLost
	// EpochOver: the weights changed; the cached prefix is of no use.
	EpochOver
	// ByGateway: the gateway gave it up.
	ByGateway
	// ReadFailed: storage does not have it any more.
	ReadFailed
	// EngineFailed: an engine could not do its part.
	EngineFailed
	// TooLongToPrefill: no prefill engine's device memory holds the prompt.
	TooLongToPrefill
	// PromptTooLong: the prompt is longer than any engine of a role takes.
	PromptTooLong
	// TooLarge: no engine of a role has a buffer that holds the request.
	TooLarge
	// FirstTokenLate: the first token cannot come by its deadline.
	FirstTokenLate
	// OldWeights: the weights changed, and that ended the requests of older weights.
	OldWeights
	// RoleChange: its group changes its role.
	RoleChange
	// LastOfRole: the group is the last one of its role.
	LastOfRole
	// OnlyTaker: a request under way fits into no other group of the role.
	OnlyTaker
	// SameRole: the group has the role already.
	SameRole
	// Ordered: the group's leader has the order to change the role.
	Ordered
	// RoleRefused: the group's leader refused the role.
	RoleRefused
	// ByOperator: the operator took it back.
	ByOperator
)

var reasonTexts = [...]string{
	"", "the queue is full", "longer than any decode engine's HBM", "past its deadline", "a request of that ID is being served",
	"prompt, hit and output contradict each other", "its group is gone", "the weights' epoch is over", "given up by the gateway", "storage does not have it any more", "an engine could not do its part",
	"longer than any prefill engine's device memory", "the prompt is longer than any engine takes", "larger than any engine's buffer", "the first token cannot come by its deadline",
	"the weights changed, and the change ended the requests of older weights", "its group changes its role",
	"no other group has its role", "a request under way fits into no other group of its role", "it has this role", "its leader has the order to change it", "its leader refused", "taken back by the operator",
}

// String returns a phrase for people.
func (r Reason) String() string {
	if int(r) < len(reasonTexts) {
		return reasonTexts[r]
	}
	return fmt.Sprintf("reason %d", uint8(r))
}
