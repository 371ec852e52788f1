package dualpath

import "time"

// EngineID, NodeID, GroupID name an engine (one GPU), a machine and a group of
// engines that fetch together. The caller gives them out; small numbers serve
// best.
type (
	EngineID uint32
	NodeID   uint32
	GroupID  uint32
	// RequestID names a request for its lifetime.
	RequestID uint64
	// NamespaceID names a namespace (kv.Namespace) within the planner.
	NamespaceID uint32
)

// Role is what an engine does; all engines of a group have one role.
type Role uint8

// Roles.
const (
	Prefill Role = 1
	Decode  Role = 2
)

// String returns "prefill" or "decode".
func (r Role) String() string {
	switch r {
	case Prefill:
		return "prefill"
	case Decode:
		return "decode"
	}
	return "no role"
}

// Other returns the opposite role: the other side of a request.
func (r Role) Other() Role { return Prefill + Decode - r }

// Request is what a gateway submits.
type Request struct {
	ID        RequestID
	Namespace NamespaceID
	// Epoch of the weights that the cached prefix was computed with.
	Epoch uint64
	// Exact: the request is computed with the weights of Epoch, also when newer weights
	// exist. Its engines must hold these weights. If storage does not keep the epoch, it
	// reports the prefix as gone.
	Exact bool `json:",omitempty"`
	// Tenant is the name of the tenant; Options.Weights has its weight. Requests of a higher
	// Priority go first, whatever their tenant.
	Tenant   string `json:",omitempty"`
	Priority int    `json:",omitempty"`
	// Prompt is the length in tokens, with the Hit first of which are cached
	// (whole blocks). Output is how many are expected to be generated; it is
	// counted against a decode engine's HBM.
	Prompt, Hit, Output int
	// Deadline, if not zero, is when nobody wants the answer any more.
	Deadline time.Duration
	// FirstToken, if not zero, is the deadline of the first token. The request is refused
	// when it cannot be met any more.
	FirstToken time.Duration `json:",omitempty"`
	// Resident are leading tokens of the prompt that decode engines hold in their
	// device memory and need not be sent. Options.Network counts them.
	Resident []Resident `json:",omitempty"`
}

// Resident is how many leading tokens of a prompt a decode engine holds.
type Resident struct {
	Engine EngineID
	Tokens int
}

// decodeLen is what the request takes of a decode engine: len_r there.
func (r *Request) decodeLen() int { return r.Prompt + r.Output }

// Event is what happened. Each type below is one; At is when.
type Event interface{ at() time.Duration }

// TimeOf returns when an event happened.
func TimeOf(ev Event) time.Duration { return ev.at() }

// Submit is a new request.
type Submit struct {
	At      time.Duration
	Request Request
}

// GroupUp is a group that begins or returns. Of a group that is known already,
// what it still holds goes on; whatever else was assigned to it and not finished
// is planned anew.
type GroupUp struct {
	At      time.Duration
	Group   GroupID
	Role    Role
	Engines []EngineSpec
	// Holding are the requests that the group's engines are working on, when the
	// planner was restarted or the group lost touch with it: they count, and are
	// not planned again.
	Holding []Held
	// Again: the group was registered with this planner before. The planner has each request
	// in Holding, unless the request has ended.
	Again bool `json:",omitempty"`
	// Returns: the group was registered with this planner or another one before, and Seen is
	// the highest Seq that has reached it since it began.
	Returns bool   `json:",omitempty"`
	Seen    uint64 `json:",omitempty"`
	// Switching is the role that the group's engines are changing to; 0: none. The group takes
	// no request until it has registered again, in either role.
	Switching Role `json:",omitempty"`
}

// EngineSpec is one engine of a group. A size that is 0 is not limited.
type EngineSpec struct {
	Engine EngineID
	Node   NodeID
	// HBMTokens is the KV capacity of the engine's device memory, in tokens.
	HBMTokens int
	// PromptTokens is the longest prompt that the engine takes.
	PromptTokens int
	// Buffer is the PE or DE buffer.
	Buffer Buffer
}

// Buffer is an engine's buffer in DRAM, through which KV passes between storage,
// device memory and the other side. All sizes are bytes.
type Buffer struct {
	Bytes int
	// Block is what one block of KV takes while it passes. Sums is what each block of
	// a prompt takes beside it for as long as the request is under way, Request what
	// each request does.
	Block, Sums, Request int
}

// Held is a request that an engine already works on.
type Held struct {
	Request Request
	Engine  EngineID
	// Attempt is the number of the Start that it works on; 0: the Start did not reach
	// it.
	Attempt uint64
	// Order is the number of the last Start, Read, Cut, Drop or Recompute that reached it. 0:
	// not known.
	Order uint64 `json:",omitempty"`
	// Parts are the cached tokens that the engine has read, is reading or computes. They are
	// known if Order is.
	Parts []Part `json:",omitempty"`
	// Reading is the read under way, if its length is not 0. Read is the Seq of the Start or
	// Read that ordered it, and Landed is how many of its tokens have arrived. They are known
	// if Order is.
	Reading Part   `json:",omitzero"`
	Read    uint64 `json:",omitempty"`
	Landed  int    `json:",omitempty"`
	// Peer is the engine on the other side of the attempt. 0: not known.
	Peer EngineID `json:",omitempty"`
	// Ended: the engine has done its part or failed. Finished or Failed follows.
	Ended bool `json:",omitempty"`
}

// GroupDown is a group that is gone. Fetches that stop have the same effect
// after Options.GroupTimeout.
type GroupDown struct {
	At    time.Duration
	Group GroupID
}

// Fetch is a group asking for work, with the state of all its engines.
type Fetch struct {
	At    time.Duration
	Group GroupID
	// Seen is the highest Seq among the actions that the group had received when
	// it took this report.
	Seen    uint64
	Engines []EngineReport
	Nodes   []NodeReport
}

// EngineReport is one engine's state: tok_e and seq_e of DualPath section 6.1.
type EngineReport struct {
	Engine EngineID
	// Tokens over the unfinished requests, and how many there are.
	Tokens, Requests int
	// HBMFree is what is left of EngineSpec.HBMTokens, and BufferFree of its Buffer in
	// bytes, when all that was assigned has taken its share.
	HBMFree, BufferFree int
}

// NodeReport is one machine's storage side.
type NodeReport struct {
	Node NodeID
	// ReadQueue is read_q: tokens asked of storage and not read yet.
	ReadQueue int
	// Rate is what the storage NIC delivers under load, tokens a second, as the
	// node measures it; 0: not known, Options.ReadRate is taken.
	Rate float64
}

// Progress is how far one side's read of a request has come. Attempt, here and
// below, is the Seq of the Start that it is about: what an engine says of an earlier
// one is ignored. 0 is about whichever there is, of a request found with a group.
type Progress struct {
	At      time.Duration
	Request RequestID
	Attempt uint64
	Side    Role
	// Upto: the tokens of the side's part before this one are in its buffer.
	Upto int
	// Landed is how many tokens of the part have arrived, in its buffer or not yet
	// checked: how fast the side reads.
	Landed int
	// Read, here and in Stopped, is the Seq of the Start or Read that ordered the read. A
	// report about an earlier read is ignored. 0: not known.
	Read uint64 `json:",omitempty"`
}

// Stopped answers a Cut, or reports a failed read: the side reads no further.
type Stopped struct {
	At      time.Duration
	Request RequestID
	Attempt uint64
	Side    Role
	// Upto is how far it came; what is behind it is to be read elsewhere.
	Upto int
	// Failed: this side's storage answered an error at Upto: the request is not
	// read there any more. Gone: the block at Upto is not stored, whoever reads.
	Failed, Gone bool
	Read         uint64 `json:",omitempty"`
}

// Finished is an engine that is done with a request.
type Finished struct {
	At      time.Duration
	Request RequestID
	Attempt uint64
	Role    Role
}

// Failed is an engine that could not do its part of a request: its own memory, its
// peer's, a block that was not what was written. The request is planned anew; from
// the second time on, with no more of its hit than Upto.
type Failed struct {
	At      time.Duration
	Request RequestID
	Attempt uint64
	Role    Role
	// Upto: the cached tokens before this one are beyond suspicion.
	Upto int
}

// Cancelled is a request that its gateway gave up.
type Cancelled struct {
	At      time.Duration
	Request RequestID
}

// Epoch is a new version of a namespace's weights. Only Exact requests use prefixes of
// older versions.
type Epoch struct {
	At        time.Duration
	Namespace NamespaceID
	Epoch     uint64
	// Drain is what happens to requests of older weights that have been started.
	Drain Drain `json:",omitempty"`
}

// SwitchRole has a group change its role. Role is the one to change to; that of the group takes
// a switch back that is not ordered yet. Drain is DrainFinish or DrainRecompute.
type SwitchRole struct {
	At    time.Duration
	Group GroupID
	Role  Role
	Drain Drain
}

// SwitchRefused is a leader that has its engines keep their role: they cannot change it, or
// failed to.
type SwitchRefused struct {
	At    time.Duration
	Group GroupID
}

// Tick is nothing but time: deadlines, timeouts, slow sides.
type Tick struct{ At time.Duration }

func (e Submit) at() time.Duration        { return e.At }
func (e GroupUp) at() time.Duration       { return e.At }
func (e GroupDown) at() time.Duration     { return e.At }
func (e Fetch) at() time.Duration         { return e.At }
func (e Progress) at() time.Duration      { return e.At }
func (e Stopped) at() time.Duration       { return e.At }
func (e Finished) at() time.Duration      { return e.At }
func (e Failed) at() time.Duration        { return e.At }
func (e Cancelled) at() time.Duration     { return e.At }
func (e Epoch) at() time.Duration         { return e.At }
func (e SwitchRole) at() time.Duration    { return e.At }
func (e SwitchRefused) at() time.Duration { return e.At }
func (e Tick) at() time.Duration          { return e.At }
