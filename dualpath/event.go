package dualpath

import "time"

// EngineID, NodeID and GroupID identify an engine (one GPU), a machine, and a group of engines that
// fetch work together. The caller assigns these IDs, preferably small numbers.
type (
	EngineID uint32
	NodeID   uint32
	GroupID  uint32
	// RequestID names a request for its lifetime.
	RequestID uint64
	// NamespaceID names a namespace (kv.Namespace) within the planner.
	NamespaceID uint32
)

// Role is the role of an engine. All engines of a group have the same role.
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

// Other returns the opposite role: that of a request's other engine.
func (r Role) Other() Role { return Prefill + Decode - r }

// Request is a request as the gateway submits it.
type Request struct {
	ID        RequestID
	Namespace NamespaceID
	// Epoch is the version of the model weights with which the cached prefix was computed.
	Epoch uint64
	// Exact: the request is computed with the weights of Epoch even if newer weights exist. The
	// request's engines must hold these weights. If storage does not keep the epoch, storage
	// reports the prefix as gone.
	Exact bool `json:",omitempty"`
	// Tenant is the name of the tenant, whose weight is in Options.Weights. Requests of a higher
	// Priority are granted first, for all tenants.
	Tenant   string `json:",omitempty"`
	Priority int    `json:",omitempty"`
	// Prompt is the length of the prompt in tokens. The first Hit tokens of the prompt are cached,
	// in whole blocks. Output is the expected number of generated tokens; memory for them is
	// reserved on the decode engine.
	Prompt, Hit, Output int
	// Deadline, if not zero, is the time after which the answer is not needed.
	Deadline time.Duration
	// FirstToken, if not zero, is the deadline of the first token. The request is refused when the
	// deadline cannot be met.
	FirstToken time.Duration `json:",omitempty"`
	// Resident lists decode engines that hold leading tokens of the prompt in device memory.
	// These tokens need not be sent to the engine. Only Options.Network considers them.
	Resident []Resident `json:",omitempty"`
}

// Resident is a decode engine and the number of leading tokens of the prompt that it holds.
type Resident struct {
	Engine EngineID
	Tokens int
}

// decodeLen is the number of tokens for which the request takes memory on a decode engine (len_r in
// DualPath section 6.1).
func (r *Request) decodeLen() int { return r.Prompt + r.Output }

// Event is an input of the planner. Each type below with a field At is an event; At is its time.
type Event interface{ at() time.Duration }

// TimeOf returns the time of an event.
func TimeOf(ev Event) time.Duration { return ev.at() }

// Submit is a new request.
type Submit struct {
	At      time.Duration
	Request Request
}

// GroupUp is the registration of a group, first or repeated. If the group was registered before,
// the requests in Holding continue, and its other unfinished requests are planned again.
type GroupUp struct {
	At      time.Duration
	Group   GroupID
	Role    Role
	Engines []EngineSpec
	// Holding are the requests that the group's engines are working on when the planner has
	// restarted or the group's session has broken. These requests count as assigned and are not
	// planned again.
	Holding []Held
	// Again: the group was registered with this planner before. The planner already has each
	// request in Holding, unless the request has ended.
	Again bool `json:",omitempty"`
	// Returns: the group was registered before, with this planner or another. Seen is the
	// highest Seq of an action that has reached the group since its start.
	Returns bool   `json:",omitempty"`
	Seen    uint64 `json:",omitempty"`
	// Switching is the role to which the group's engines are changing; 0: none. The group is given
	// no request until it has registered again, in its old or its new role.
	Switching Role `json:",omitempty"`
	// Announced is the role of the last Announce that has reached the group; 0 if that is the group's
	// role or there was none.
	Announced Role `json:",omitempty"`
}

// EngineSpec describes one engine of a group. A size of 0 means that the size is unlimited.
type EngineSpec struct {
	Engine EngineID
	Node   NodeID
	// HBMTokens is the KV capacity of the engine's device memory, in tokens.
	HBMTokens int
	// PromptTokens is the longest prompt that the engine accepts, in tokens.
	PromptTokens int
	// Buffer is the engine's buffer in DRAM.
	Buffer Buffer
}

// Buffer is an engine's DRAM buffer, through which KV passes between storage, device memory and the
// request's other engine. All sizes are bytes.
type Buffer struct {
	Bytes int
	// Block is the size of one block of KV in the buffer. A request in progress takes additional
	// space: Sums (checksums) for each block of the prompt, and Request once.
	Block, Sums, Request int
}

// Held is a request that an engine is already working on.
type Held struct {
	Request Request
	Engine  EngineID
	// Attempt is the Seq of the Start that the engine is working on; 0: no Start has reached the
	// engine.
	Attempt uint64
	// Order is the Seq of the last Start, Read, Cut, Drop or Recompute of the request that reached
	// the engine; 0: unknown.
	Order uint64 `json:",omitempty"`
	// Parts are the cached tokens that the engine has read, is reading or computes. They are valid
	// only if Order is not 0.
	Parts []Part `json:",omitempty"`
	// Reading is the read in progress if its length is not 0. Read is the Seq of the Start or Read
	// that ordered it, and Landed is the number of tokens of Reading that have arrived. These
	// fields are valid only if Order is not 0.
	Reading Part   `json:",omitzero"`
	Read    uint64 `json:",omitempty"`
	Landed  int    `json:",omitempty"`
	// Peer is the other engine of the attempt; 0: unknown.
	Peer EngineID `json:",omitempty"`
	// Ended: the engine has done its part or failed. Finished or Failed follows.
	Ended bool `json:",omitempty"`
}

// GroupDown reports that a group is gone. A group that sends no Fetch for Options.GroupTimeout is
// treated the same way.
type GroupDown struct {
	At    time.Duration
	Group GroupID
}

// Fetch is a group's request for work, with the state of all engines of the group.
type Fetch struct {
	At    time.Duration
	Group GroupID
	// Seen is the highest Seq among the actions that the group had received at the time of this
	// report.
	Seen    uint64
	Engines []EngineReport
	Nodes   []NodeReport
}

// EngineReport is one engine's state: tok_e (Tokens) and seq_e (Requests) of DualPath section 6.1.
type EngineReport struct {
	Engine EngineID
	// Tokens is the number of tokens of the unfinished requests, and Requests the number of these
	// requests.
	Tokens, Requests int
	// HBMFree is the free part of EngineSpec.HBMTokens. BufferFree is the free part of
	// EngineSpec.Buffer in bytes. In both, the memory of all assigned requests counts as taken.
	HBMFree, BufferFree int
}

// NodeReport is the state of one machine's storage reads.
type NodeReport struct {
	Node NodeID
	// ReadQueue is the number of tokens requested from storage and not read yet (read_q in DualPath
	// section 6.1).
	ReadQueue int
	// Rate is the storage NIC's throughput under load in tokens per second, as measured by the
	// node; 0: unknown, and Options.ReadRate is used.
	Rate float64
}

// Progress reports how much a side (the prefill or the decode engine) has read of its part of a
// request's prefix. Attempt, here and below, is the Seq of the Start to which the report belongs. A
// report about an earlier attempt is ignored. 0 refers to the current attempt, for a request that
// was restored from a group.
type Progress struct {
	At      time.Duration
	Request RequestID
	Attempt uint64
	Side    Role
	// Upto is a token index: all tokens of the side's part before Upto are in the side's buffer.
	Upto int
	// Landed is the number of tokens of the part that have arrived, in any order and including
	// tokens whose checksum has not been verified. The planner computes the side's read rate from
	// it.
	Landed int
	// Read, here and in Stopped, is the Seq of the Start or Read that ordered the read. A report
	// about an earlier read is ignored. 0: unknown.
	Read uint64 `json:",omitempty"`
}

// Stopped replies to a Cut, or reports a failed read: the side has stopped reading.
type Stopped struct {
	At      time.Duration
	Request RequestID
	Attempt uint64
	Side    Role
	// Upto is a token index: the side has read all tokens before Upto, and the rest of its part
	// must be read elsewhere.
	Upto int
	// Failed: this side's storage returned an error at Upto, so this side is given no further read
	// of the request. Gone: storage does not have the block at Upto, so neither side can read it.
	Failed, Gone bool
	Read         uint64 `json:",omitempty"`
}

// Finished reports that an engine has completed its part of a request.
type Finished struct {
	At      time.Duration
	Request RequestID
	Attempt uint64
	Role    Role
}

// Failed reports that an engine failed in its part of a request, for example because of its
// memory, its peer's memory, or a corrupt block. The request is planned again. From the second
// failure on, only the cached tokens before Upto are used.
type Failed struct {
	At      time.Duration
	Request RequestID
	Attempt uint64
	Role    Role
	// Upto is a token index: all cached tokens before Upto have been verified.
	Upto int
}

// Cancelled reports that the gateway has cancelled a request.
type Cancelled struct {
	At      time.Duration
	Request RequestID
}

// Epoch reports a new version of a namespace's weights. Among the requests that have not been
// started, only Exact ones use prefixes of older versions.
type Epoch struct {
	At        time.Duration
	Namespace NamespaceID
	Epoch     uint64
	// Drain is the policy for started requests of older weights.
	Drain Drain `json:",omitempty"`
}

// SwitchRole changes the role of a group to Role. If Role is the group's present role, the event
// withdraws a change for which the planner has not sent the Switch yet. Drain is DrainFinish or
// DrainRecompute.
type SwitchRole struct {
	At    time.Duration
	Group GroupID
	Role  Role
	Drain Drain
}

// SwitchRefused is a leader's report that the engines of its group keep their role, because they
// cannot change the role or the change failed.
type SwitchRefused struct {
	At    time.Duration
	Group GroupID
}

// Tick only advances the time. The planner then checks deadlines, timeouts and slow reads.
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
