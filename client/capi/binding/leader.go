package binding

import (
	"context"
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/client/gateway"
	"github.com/penstock-kv/penstock/client/leader"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
)

// LeaderOptions are the options of a Leader. Zero in FetchEvery and ReadRate selects the
// default of leader.Options.
type LeaderOptions struct {
	Planner     PlannerOptions
	Group, Node string
	Role        leader.Role
	Members     []Member
	FetchEvery  time.Duration
	// ReadRate is the rate of the machine's storage NIC in tokens per second.
	ReadRate float64
}

// Member is an engine of a group. Its fields have the meaning of leader.Member. Address and Token
// are passed unchanged to the engines of the other role.
type Member struct {
	Name                       string
	Address, Token             []byte
	DeviceBlocks, PromptBlocks int
	PrefixCacheBlocks          int
	Footprint                  traffic.Footprint
}

// member converts the member for package leader.
func (l *Leader) member(m Member) leader.Member {
	e := &engine{leader: l, name: m.Name}
	peer := traffic.Peer{Token: rdma.Token(m.Token)}
	if len(m.Address) > 0 {
		peer.Addr.NICs = []rdma.NetAddr{rdma.NetAddr(m.Address)}
	}
	return leader.Member{
		Name: m.Name, Engine: e, Peer: peer, NICs: e.reported,
		DeviceBlocks: m.DeviceBlocks, PromptBlocks: m.PromptBlocks, PrefixCacheBlocks: m.PrefixCacheBlocks, Footprint: m.Footprint,
	}
}

// ActionKind is the kind of an Action.
type ActionKind uint32

// The kinds of actions; see penstock.h.
const (
	ActionStart ActionKind = iota + 1
	ActionRead
	ActionCut
	ActionRecompute
	ActionEnd
)

// Action is an order of the planner about one attempt. Part is set for ActionRead and
// ActionRecompute.
type Action struct {
	Kind    ActionKind
	Attempt *Attempt
	Part    traffic.Part
}

// Leader is a leader.Leader whose engines take their actions from a queue. All methods may
// be called concurrently.
type Leader struct {
	*session[Action]
	leader   *leader.Leader
	geometry kv.Geometry

	// attempts has the attempts that have not ended, by leader.Request.Name. mu guards it.
	attempts map[string]*Attempt
	// nics has the NICs that the caller has reported, by the name of the engine. mu guards it.
	nics map[string][]rdma.NIC
}

// OpenLeader opens the session of a group of engines with the planner. The engines serve
// the namespace's KV. It does not wait for the planner.
func (n *Namespace) OpenLeader(o LeaderOptions) (Handle, error) {
	s := n.store
	if err := s.begin(); err != nil {
		return 0, err
	}
	defer s.calls.Done()
	base, err := connect[Action](s, o.Planner)
	if err != nil {
		return 0, err
	}
	l := &Leader{session: base, geometry: n.Definition().Geometry, attempts: make(map[string]*Attempt), nics: make(map[string][]rdma.NIC)}
	l.ended = l.endAttempts
	options := leader.Options{
		Group: o.Group, Node: o.Node, Role: o.Role, Geometry: l.geometry, Planner: base.conn,
		FetchEvery: o.FetchEvery, ReadRate: o.ReadRate, Logger: s.logs.logger(),
	}
	for _, m := range o.Members {
		options.Members = append(options.Members, l.member(m))
	}
	if l.leader, err = leader.New(options); err != nil {
		return 0, base.discard(err)
	}
	l.handle = s.library.add(l)
	s.own(l.handle, l)
	l.running.Go(func() { l.leader.Run(l.ctx) })
	return l.handle, nil
}

// endAttempts ends the attempts of a closed leader, and its connection.
func (l *Leader) endAttempts() error {
	l.mu.Lock()
	attempts := l.attempts
	l.attempts = nil
	l.mu.Unlock()
	for _, a := range attempts {
		a.stop()
		l.store.library.remove(a.handle)
	}
	return l.conn.Close()
}

// Add makes an engine a member of the group.
func (l *Leader) Add(m Member) error {
	if err := l.begin(); err != nil {
		return err
	}
	defer l.calls.Done()
	if err := l.leader.Add(l.member(m)); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return nil
}

// Remove removes an engine from the group. Its attempts get ActionEnd.
func (l *Leader) Remove(name string) error {
	if err := l.begin(); err != nil {
		return err
	}
	defer l.calls.Done()
	if !l.leader.Remove(name) {
		return fmt.Errorf("%w: %q is not in the group", ErrNoEngine, name)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.nics, name)
	return nil
}

// ReportNICs gives the counters of the NICs of an engine; see leader.Member.NICs. It keeps nics.
func (l *Leader) ReportNICs(name string, nics []rdma.NIC) error {
	if err := l.begin(); err != nil {
		return err
	}
	defer l.calls.Done()
	if !l.leader.Has(name) {
		return fmt.Errorf("%w: %q is not in the group", ErrNoEngine, name)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.nics[name] = nics
	return nil
}

// Attempt is an attempt at a request on an engine of this group, from ActionStart until
// Done.
type Attempt struct {
	leader  *Leader
	handle  Handle
	engine  string
	request *leader.Request
	// ctx ends when the engine must abandon the attempt. stop cancels the delivery of ActionEnd.
	// ending is set when ActionEnd is in the queue; Leader.mu guards it.
	ctx    context.Context
	stop   func() bool
	ending bool
}

func (a *Attempt) of() *Store { return a.leader.store }

// Handle returns the attempt's handle.
func (a *Attempt) Handle() Handle { return a.handle }

// Start has the data with which an engine begins an attempt.
type Start struct {
	Engine string
	*leader.Request
	// PeerAddress and PeerToken are Member.Address and Member.Token of the request's other engine.
	// If that engine has a traffic.Manager, PeerAddress is the address of its first NIC.
	PeerAddress, PeerToken []byte
	// IDs and Extra are the fields of the request's gateway.Payload; nil if the payload has another
	// form.
	IDs   []kv.BlockID
	Extra []byte
}

// Start returns the attempt's description. Its slices are read-only.
func (a *Attempt) Start() Start {
	s := Start{Engine: a.engine, Request: a.request, PeerToken: a.request.Peer.Token}
	if nics := a.request.Peer.Addr.NICs; len(nics) > 0 {
		s.PeerAddress = []byte(nics[0])
	}
	if p, err := gateway.ParsePayload(a.request.Payload); err == nil {
		s.IDs, s.Extra = p.IDs, p.Extra
	}
	return s
}

// within calls f if the leader is open and has the attempt.
func (a *Attempt) within(f func(*leader.Request) error) error {
	if err := a.leader.begin(); err != nil {
		return err
	}
	defer a.leader.calls.Done()
	return f(a.request)
}

// check returns an error for a part outside of the request's cached blocks, and for an upto outside
// of the part.
func (a *Attempt) check(p traffic.Part, upto int) error {
	if p.From < 0 || p.From >= p.To || p.To > a.request.Hit || upto < p.From || upto > p.To {
		return fmt.Errorf("%w: part [%d, %d) up to block %d, of a request with %d cached blocks", ErrInvalid, p.From, p.To, upto, a.request.Hit)
	}
	return nil
}

// Progress reports the progress of the storage read of a part of the cached prefix; see
// leader.Request.Progress.
func (a *Attempt) Progress(p traffic.Progress) error {
	return a.within(func(r *leader.Request) error {
		if p.Bytes < 0 {
			return fmt.Errorf("%w: %d bytes", ErrInvalid, p.Bytes)
		}
		if err := a.check(p.Part, p.Upto); err != nil {
			return err
		}
		p.Bytes = min(p.Bytes, a.leader.geometry.PartBytes(p.Part.From, p.Part.To, a.request.Hit))
		r.Progress(p)
		return nil
	})
}

// Stopped reports that the storage read of a part of the cached prefix has ended before its last
// block; see leader.Request.Stopped.
func (a *Attempt) Stopped(s traffic.Stop) error {
	return a.within(func(r *leader.Request) error {
		if err := a.check(s.Part, s.Upto); err != nil {
			return err
		}
		r.Stopped(s)
		return nil
	})
}

// Passed reports that the KV has left the engine's buffer; see leader.Request.Passed.
func (a *Attempt) Passed() error {
	return a.within(func(r *leader.Request) error {
		r.Passed()
		return nil
	})
}

// Done ends the attempt and its handle. failure is empty if the engine's part is complete.
// Otherwise the planner plans the request again, and intact is the number of cached blocks, from
// the first one on, that are certainly intact.
func (a *Attempt) Done(failure string, intact int) error {
	return a.within(func(r *leader.Request) error {
		if intact < 0 || intact > r.Hit {
			return fmt.Errorf("%w: %d intact blocks, of a request with %d cached blocks", ErrInvalid, intact, r.Hit)
		}
		if !a.leader.store.library.remove(a.handle) {
			return fmt.Errorf("%w: %d is not an open attempt", ErrHandle, a.handle)
		}
		a.stop()
		a.leader.mu.Lock()
		if !a.leader.closed {
			delete(a.leader.attempts, r.Name)
			a.leader.removeLocked(func(x Action) bool { return x.Attempt == a })
		}
		a.leader.mu.Unlock()
		var err error
		if failure != "" {
			err = &failed{text: failure, block: traffic.BlockError{Block: intact, Where: "engine"}}
		}
		r.Done(err)
		return nil
	})
}

// failed is the error that an engine has reported. It wraps a traffic.BlockError, from which
// package leader takes the number of intact blocks.
type failed struct {
	text  string
	block traffic.BlockError
}

func (e *failed) Error() string { return e.text }
func (e *failed) Unwrap() error { return &e.block }

// engine implements leader.Engine for one member.
type engine struct {
	leader *Leader
	name   string
}

var _ leader.Engine = (*engine)(nil)

// reported returns the NICs that the caller has reported.
func (e *engine) reported() []rdma.NIC {
	e.leader.mu.Lock()
	defer e.leader.mu.Unlock()
	return e.leader.nics[e.name]
}

// Start implements leader.Engine.
func (e *engine) Start(ctx context.Context, r *leader.Request) {
	l := e.leader
	a := &Attempt{leader: l, engine: e.name, request: r, ctx: ctx}
	a.handle = l.store.library.add(a)
	started := make(chan struct{})
	defer close(started)
	a.stop = context.AfterFunc(ctx, func() {
		<-started
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.attempts[r.Name] == a {
			l.endLocked(a)
		}
	})
	l.mu.Lock()
	closed := l.closed
	if !closed {
		// The planner abandoned these attempts before it began the new attempt, which may need
		// their memory. So ActionEnd of the old attempts must be queued before ActionStart.
		for _, old := range l.attempts {
			if old.ctx.Err() != nil {
				l.endLocked(old)
			}
		}
		l.attempts[r.Name] = a
		l.pushLocked(Action{Kind: ActionStart, Attempt: a})
	}
	l.mu.Unlock()
	if closed {
		a.stop()
		l.store.library.remove(a.handle)
	}
}

// endLocked queues ActionEnd of an attempt, once.
func (l *Leader) endLocked(a *Attempt) {
	if !a.ending {
		a.ending = true
		l.pushLocked(Action{Kind: ActionEnd, Attempt: a})
	}
}

// order queues an action of an attempt that has not ended.
func (e *engine) order(kind ActionKind, request string, p traffic.Part) {
	l := e.leader
	l.mu.Lock()
	defer l.mu.Unlock()
	if a := l.attempts[request]; a != nil {
		l.pushLocked(Action{Kind: kind, Attempt: a, Part: p})
	}
}

// Read implements leader.Engine.
func (e *engine) Read(request string, p traffic.Part) { e.order(ActionRead, request, p) }

// Cut implements leader.Engine.
func (e *engine) Cut(request string) { e.order(ActionCut, request, traffic.Part{}) }

// Recompute implements leader.Engine.
func (e *engine) Recompute(request string, p traffic.Part) { e.order(ActionRecompute, request, p) }
