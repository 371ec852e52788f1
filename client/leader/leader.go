package leader

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
)

// Role is the part of inference that the engines of a group do.
type Role uint8

const (
	// Prefill engines compute prompts, Decode engines generate from them.
	Prefill = Role(pb.Side_SIDE_PREFILL)
	Decode  = Role(pb.Side_SIDE_DECODE)
)

// String returns "prefill" or "decode".
func (r Role) String() string {
	switch r {
	case Prefill:
		return "prefill"
	case Decode:
		return "decode"
	}
	return fmt.Sprintf("role %d", uint8(r))
}

// Engine is one engine of a group. Its methods must not block: the leader calls them in the order
// of the planner's actions, and handles the next action only after a call has returned.
type Engine interface {
	// Start begins the engine's part of a request, which ends when the engine calls r.Done, once.
	// When ctx ends, the engine must abandon the request and call r.Done.
	Start(ctx context.Context, r *Request)
	// Read makes the engine read a further range of hit blocks of a request. Cut stops
	// the request's reads. Recompute makes the engine compute a range of hit blocks
	// (prefill only). request is Request.Name; an engine ignores the name of a request
	// that has ended.
	Read(request string, part traffic.Part)
	Cut(request string)
	Recompute(request string, part traffic.Part)
}

// Member is an engine and its properties that the planner needs.
type Member struct {
	// Name identifies the engine. It must be unique in the cluster.
	Name   string
	Engine Engine
	// Peer is the address of this engine's traffic manager, for engines of the other role.
	Peer traffic.Peer
	// DeviceBlocks is the size of the engine's device memory for KV, in blocks. 0 means that the
	// planner does not account for device memory; it is allowed only for a prefill engine.
	DeviceBlocks int
	// PromptBlocks is the longest prompt that the engine accepts, in blocks. Default:
	// traffic.MaxBlocks.
	PromptBlocks int
	// PrefixCacheBlocks is set for a decode engine that keeps the KV of prompts in device memory after
	// their requests, for later requests with the same prefix: at most this number of blocks. With
	// this number the planner prefers the engine for a prompt whose beginning the engine has, if it
	// has a description of the network. The engine chooses the blocks that it keeps, and serves
	// a prompt also if it has dropped the blocks of the prefix.
	PrefixCacheBlocks int
	// Footprint is the result of the method Footprint of the engine's traffic.Manager. With the
	// zero value the planner does not account for the buffer.
	Footprint traffic.Footprint
	// NICs, if set, returns the state of the NICs over which the engine exchanges KV with engines of
	// the other role: the method NICs of the rdma.Engine of its traffic.Manager. The leader reports
	// their counters to the planner, of at most MaxNICs. NICs must not block.
	NICs func() []rdma.NIC
}

// MaxNICs is the largest number of NICs that the leader reports of one engine.
const MaxNICs = 64

// Options make a Leader.
type Options struct {
	// Group identifies the group in the cluster. Node identifies the machine of its
	// engines, all of which are in this group.
	Group, Node string
	Role        Role
	// Geometry is the geometry of the engines' KV cache. It converts between the planner's
	// tokens and the engines' blocks.
	Geometry kv.Geometry
	Members  []Member
	// Planner is a connection to the planner. The leader does not close it.
	Planner grpc.ClientConnInterface
	// FetchEvery is the interval at which the leader reports the group's state and fetches work.
	// Default: 5 ms.
	FetchEvery time.Duration
	// ReadRate, if not 0, is the rate of the machine's storage NIC in tokens per second. With 0 the
	// leader measures this rate while the engines read from storage.
	ReadRate float64
	// SwitchRole, if set, changes the role of the group's engines to the role to. The leader calls
	// it when the planner has sent an operator's order to change. The engines hold no request
	// during the call. SwitchRole returns the members in the new role, or nil if they are the same.
	// An engine that Remove removes during the call is not a member in the new role, and an engine
	// that Add adds is one. After an error the group keeps its role, and the operator gets the
	// error. ctx ends with Run's context, and SwitchRole must then return. If SwitchRole is nil,
	// the engines have a fixed role.
	SwitchRole func(ctx context.Context, to Role) ([]Member, error)
	// Logger logs lost sessions and failed requests. With nil nothing is logged.
	Logger *slog.Logger
}

// EnsureDefaults fills the fields that are zero.
func (o *Options) EnsureDefaults() {
	if o.FetchEvery == 0 {
		o.FetchEvery = 5 * time.Millisecond
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

// maxName is the longest name that the planner accepts, in bytes.
const maxName = 256

// Validate returns an error that names the first option that cannot be used. Call it
// after EnsureDefaults.
func (o *Options) Validate() error {
	if err := checkName("group", o.Group); err != nil {
		return err
	}
	if err := checkName("node", o.Node); err != nil {
		return err
	}
	if o.Role != Prefill && o.Role != Decode {
		return fmt.Errorf("leader: group %q: %v; it must be leader.Prefill or leader.Decode", o.Group, o.Role)
	}
	if err := o.Geometry.Validate(); err != nil {
		return fmt.Errorf("leader: group %q: %w", o.Group, err)
	}
	if o.Planner == nil {
		return fmt.Errorf("leader: group %q: no connection to a planner", o.Group)
	}
	if o.FetchEvery < 0 || o.ReadRate < 0 {
		return fmt.Errorf("leader: group %q: a fetch every %v and a read rate of %v tokens a second; neither may be negative", o.Group, o.FetchEvery, o.ReadRate)
	}
	return o.checkAll(o.Role, o.Members)
}

// checkAll returns an error if the planner would refuse one of the members in the given role.
func (o *Options) checkAll(role Role, members []Member) error {
	for i := range members {
		m := &members[i]
		if err := o.check(role, m); err != nil {
			return err
		}
		if slices.ContainsFunc(members[:i], func(other Member) bool { return other.Name == m.Name }) {
			return fmt.Errorf("leader: group %q: engine %q is listed twice", o.Group, m.Name)
		}
	}
	return nil
}

// checkName returns an error if the planner would refuse the name.
func checkName(what, name string) error {
	if name == "" || len(name) > maxName {
		return fmt.Errorf("leader: the name of the %s has %d bytes; it must have 1 to %d", what, len(name), maxName)
	}
	if !utf8.ValidString(name) {
		return fmt.Errorf("leader: the name %q of the %s is not UTF-8", name, what)
	}
	return nil
}

// check returns an error if the planner would refuse the member in the given role.
func (o *Options) check(role Role, m *Member) error {
	if err := checkName("engine", m.Name); err != nil {
		return err
	}
	switch {
	case m.Engine == nil:
		return fmt.Errorf("leader: engine %q: no Engine", m.Name)
	case m.DeviceBlocks < 0 || m.PromptBlocks < 0 || m.PrefixCacheBlocks < 0:
		return fmt.Errorf("leader: engine %q: %d device blocks, prompts of %d blocks and a prefix cache of %d blocks; none may be negative", m.Name, m.DeviceBlocks, m.PromptBlocks, m.PrefixCacheBlocks)
	case role == Decode && m.DeviceBlocks == 0:
		return fmt.Errorf("leader: decode engine %q: DeviceBlocks is 0, so no request fits; set it to the number of KV blocks in device memory", m.Name)
	}
	if _, err := marshalPeer(m.Peer); err != nil {
		return fmt.Errorf("leader: engine %q: %w", m.Name, err)
	}
	return nil
}

// address is the JSON encoding of an engine's address.
type address struct {
	Addr  []byte `json:"addr"` // rdma.Addr
	Token []byte `json:"token"`
}

// marshalPeer encodes an engine's address.
func marshalPeer(p traffic.Peer) ([]byte, error) {
	addr, err := p.Addr.MarshalBinary()
	if err != nil {
		return nil, err
	}
	return json.Marshal(address{addr, p.Token})
}

// parsePeer decodes an engine's address.
func parsePeer(raw []byte) (p traffic.Peer, err error) {
	var a address
	if err := json.Unmarshal(raw, &a); err != nil {
		return p, err
	}
	p.Token = rdma.Token(a.Token)
	return p, p.Addr.UnmarshalBinary(a.Addr)
}

// Leader connects one group to the planner. Its methods may be called concurrently.
type Leader struct {
	opts Options
	log  *slog.Logger
	// began is the beginning of the clock of the reports about NICs.
	began time.Time
	// wake is signalled when a report waits to be sent or the members have changed. drained is
	// signalled when reports have been sent.
	wake, drained chan struct{}

	// freed is signalled when a request has ended on its engine. changes counts the goroutine that
	// changes the engines' role, at most one at a time.
	freed   chan struct{}
	changes sync.WaitGroup

	mu      sync.Mutex
	members []Member
	role    Role
	// switching is the role that the engines are changing to; 0: none.
	switching Role
	// announced is the role of the switch that the planner has announced; 0: none.
	announced Role
	// version counts the changes of members. A session ends when version changes.
	version int
	// seen and taken are the highest sequence numbers of the planner's actions that the leader
	// has handled: seen in this session, taken in all sessions.
	seen, taken uint64
	// planner identifies the planner process that accepted the last registration. It is 0 before
	// the first registration, and for a planner that sends no confirmations.
	planner uint64
	held    map[string]*held
	// running is the number of attempts that have not ended on their engines. Such an attempt may
	// be absent from held, because the planner has assigned its request to an engine of the group
	// again.
	running int
	// ended are the requests whose end the planner has not confirmed, by their ids.
	ended map[string]*ended
	// reports wait to be sent, oldest first.
	reports []report
	// queue is the machine's read queue: the tokens that its engines have requested from storage
	// and not read yet.
	queue int
	meter meter
}

// maxReports is the number of waiting reports at which the leader stops handling the planner's
// actions.
const maxReports = 1024

// report is a message for the planner. Most reports are about an attempt.
type report struct {
	of      *Request // nil: the report is about no request, or about a request that was never started here
	message *pb.LeaderMessage
}

// ended is a request that has ended on its engine.
type ended struct {
	*held
	report report
}

// held is a request that was assigned to this group.
type held struct {
	submit *pb.SubmitRequest
	member Member
	// attempt is the running attempt; nil before its start. aborted is set when the
	// planner has aborted the attempt.
	attempt *Request
	aborted bool
}

// New returns a leader. Run connects it to the planner.
func New(opts Options) (*Leader, error) {
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	l := &Leader{opts: opts, log: opts.Logger, began: time.Now(), role: opts.Role, freed: make(chan struct{}, 1), wake: make(chan struct{}, 1), drained: make(chan struct{}, 1), held: make(map[string]*held), ended: make(map[string]*ended)}
	for _, m := range opts.Members {
		l.members = append(l.members, m.withDefaults())
	}
	return l, nil
}

// withDefaults fills the fields that are zero.
func (m Member) withDefaults() Member {
	if m.PromptBlocks == 0 {
		m.PromptBlocks = traffic.MaxBlocks
	}
	return m
}

// Add makes an engine a member of the group.
func (l *Leader) Add(m Member) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.opts.check(l.role, &m); err != nil {
		return err
	}
	if _, ok := l.memberLocked(m.Name); ok {
		return fmt.Errorf("leader: engine %q is a member of group %q already; remove it first", m.Name, l.opts.Group)
	}
	l.members = append(l.members, m.withDefaults())
	l.changedLocked()
	return nil
}

// Remove removes an engine from the group, for example because the engine's process has died. The
// contexts of the engine's requests end, and the planner plans the requests again. Remove reports
// whether the engine was a member.
func (l *Leader) Remove(name string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.memberLocked(name); !ok {
		return false
	}
	l.members = slices.DeleteFunc(l.members, func(m Member) bool { return m.Name == name })
	for id, h := range l.held {
		if h.member.Name == name {
			h.cancel()
			delete(l.held, id)
		}
	}
	signal(l.freed)
	l.changedLocked()
	return true
}

// Has reports whether the engine of a name is a member of the group.
func (l *Leader) Has(name string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ok := l.memberLocked(name)
	return ok
}

// memberLocked returns a member by its name.
func (l *Leader) memberLocked(name string) (Member, bool) {
	i := slices.IndexFunc(l.members, func(m Member) bool { return m.Name == name })
	if i < 0 {
		return Member{}, false
	}
	return l.members[i], true
}

// changedLocked ends the session after a change of the members, because the session's registration
// is outdated.
func (l *Leader) changedLocked() {
	l.version++
	signal(l.wake)
}

// cancel ends the context of the running attempt.
func (h *held) cancel() {
	if h.attempt != nil {
		h.attempt.cancel()
	}
}

// signal wakes the goroutine that waits for c, or lets its next wait return at once.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// blocksOf returns the number of blocks for tokens, rounded up.
func (l *Leader) blocksOf(tokens int) int {
	bt := l.opts.Geometry.BlockTokens
	return (tokens + bt - 1) / bt
}

func (l *Leader) tokensOf(blocks int) int { return blocks * l.opts.Geometry.BlockTokens }

// part converts a part of a cached prefix (a range that one engine reads) from tokens to blocks.
func (l *Leader) part(p *pb.Part) traffic.Part {
	return traffic.Part{From: int(p.From) / l.opts.Geometry.BlockTokens, To: l.blocksOf(int(p.To))}
}

// errChanged is the reason for ending a session when the members have changed.
var errChanged = errors.New("the members of the group have changed")
