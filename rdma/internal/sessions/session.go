package sessions

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/peers"
)

// State is the part of a session that does not depend on the type of its operations.
type State struct {
	// Peer is the peer's ID. Remote is the peer's address as the connection reports it. Neither
	// changes after Ready is closed.
	Peer   rdma.EngineID
	Remote string
	Dialed bool
	// Where are the addresses that this engine dialed, and Token the token that it proved there.
	// Both are empty at the accepting engine.
	Where []rdma.NetAddr
	Token rdma.Token
	// Ready is closed when the session is in the engine's table, Dying when the session begins to
	// end, Removed when the session has ended completely.
	Ready, Dying, Removed chan struct{}

	Mu sync.Mutex
	// Why is the reason for the end of the session; nil until the session begins to end.
	Why error
	// Active is the number of ops that are reserved or submitted. Invariant: Active = len(Ops) -
	// len(free). Limited is the number of these ops that came through the queue Limited.
	Active, Limited int
	// FreeBytes is the part of the budget that no operation occupies, in bytes.
	FreeBytes int64
}

func (s *State) state() *State { return s }

// PeerID returns the ID of the session's peer; zero while the ID is unknown.
func (s *State) PeerID() rdma.EngineID {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return s.Peer
}

// key returns the session's key in the table.
func (s *State) key() peers.Key { return peers.Key{ID: s.PeerID(), Dialed: s.Dialed} }

// Dead reports whether the engine has begun to remove the session.
func (s *State) Dead() bool {
	select {
	case <-s.Dying:
		return true
	default:
		return false
	}
}

// alive reports whether the session has not begun to end.
func (s *State) alive() bool {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return s.Why == nil
}

// Queues of submitters that wait: Plain for writes, which Rules.Ops and Rules.Bytes limit, and Limited
// for messages, which only Rules.Room limits. So no message waits for the end of a write.
const (
	Plain   = 0
	Limited = 1
)

// Rules are the limits and callbacks of a session that differ between engines. The functions are
// called with State.Mu held.
type Rules[O Operation] struct {
	// Ops is the largest number of operations of the queue Plain in flight, and Bytes the largest sum
	// of their bytes.
	Ops   int
	Bytes int64
	// New makes an op.
	New func() O
	// Gone returns the error of an operation on a session that has ended for the reason why.
	Gone func(why error) error
	// Room reports whether one more operation of the queue Limited may start. Started, if not nil, is
	// called when such an operation has started. Ended, if not nil, is called when any operation
	// ends.
	Room    func() bool
	Started func(o O)
	Ended   func(o O)
}

// Session manages the local operations in flight to a peer: their slots, a budget of bytes, and the
// submitters that wait for a slot or for bytes. The session type of an engine embeds Session.
type Session[O Operation] struct {
	State
	rules    Rules[O]
	counters *Counters

	// Ops are indexed by slot.
	Ops  []O
	free []O
	// waiters are the waiting submitters by queue. Within a queue they are served in order.
	waiters [Limited + 1][]*waiter[O]
}

// waiter is a submitter that waits for a slot or for bytes.
type waiter[O Operation] struct {
	bytes int64
	// granted receives the reserved op, or the zero value if the session ends.
	granted chan O
}

// Init initialises the session. The results of its operations are counted in counters.
func (s *Session[O]) Init(peer rdma.EngineID, dialed bool, counters *Counters, r Rules[O]) {
	s.Peer, s.Dialed, s.counters, s.rules, s.FreeBytes = peer, dialed, counters, r, r.Bytes
	s.Ready, s.Dying, s.Removed = make(chan struct{}), make(chan struct{}), make(chan struct{})
}

// roomLocked reports whether an operation of the given size may start.
func (s *Session[O]) roomLocked(queue int, bytes int64) bool {
	if queue == Limited {
		return s.rules.Room()
	}
	return s.Active-s.Limited < s.rules.Ops && s.FreeBytes >= bytes
}

// takeLocked reserves an op.
func (s *Session[O]) takeLocked(queue int, bytes int64) O {
	var o O
	if n := len(s.free); n > 0 {
		o, s.free = s.free[n-1], s.free[:n-1]
	} else {
		o = s.rules.New()
		b := o.base()
		b.Slot, b.Generation = uint32(len(s.Ops)), 1
		s.Ops = append(s.Ops, o)
	}
	b := o.base()
	b.reserved, b.limited = true, queue == Limited
	s.Active++
	if !b.limited {
		b.bytes = bytes
		s.FreeBytes -= bytes
		return o
	}
	s.Limited++
	if s.rules.Started != nil {
		s.rules.Started(o)
	}
	return o
}

// releaseLocked returns an op to free and its bytes to the budget. It then grants ops to the
// waiters for which there is room.
func (s *Session[O]) releaseLocked(o O) {
	if s.rules.Ended != nil {
		s.rules.Ended(o)
	}
	s.Active--
	if b := o.base(); b.limited {
		s.Limited--
	} else {
		s.FreeBytes += b.bytes
	}
	o.Reset()
	s.free = append(s.free, o)
	s.grantLocked()
	if invariants.Enabled {
		s.checkLocked()
	}
}

// grantLocked grants ops to the first waiters of each queue, as long as there is room for them.
func (s *Session[O]) grantLocked() {
	for queue := range s.waiters {
		for len(s.waiters[queue]) > 0 && s.roomLocked(queue, s.waiters[queue][0].bytes) {
			w := s.waiters[queue][0]
			s.waiters[queue] = s.waiters[queue][1:]
			w.granted <- s.takeLocked(queue, w.bytes)
		}
	}
}

// checkLocked panics if Active, Limited or FreeBytes does not match the ops.
func (s *Session[O]) checkLocked() {
	active, limited, bytes := 0, 0, s.FreeBytes
	for _, o := range s.Ops {
		if b := o.base(); b.reserved {
			active++
			bytes += b.bytes
			if b.limited {
				limited++
			}
		}
	}
	invariants.Assert(limited == s.Limited, "%d ops of the queue Limited, Limited is %d", limited, s.Limited)
	invariants.Assert(active == s.Active && active+len(s.free) == len(s.Ops), "%d ops, %d free, %d reserved, Active is %d", len(s.Ops), len(s.free), active, s.Active)
	invariants.Assert(bytes == s.rules.Bytes, "reserved and free bytes are %d, the budget %d", bytes, s.rules.Bytes)
}

// Reserve takes an op for n bytes. If there is no room it waits, unless noWait is set. The waiters of a
// queue are served in order.
func (s *Session[O]) Reserve(ctx context.Context, queue int, n uint64, noWait bool) (none O, _ error) {
	// An operation larger than the whole budget occupies all of it.
	bytes := int64(min(n, uint64(s.rules.Bytes)))
	s.Mu.Lock()
	if s.Why != nil {
		defer s.Mu.Unlock()
		return none, s.GoneLocked()
	}
	if len(s.waiters[queue]) == 0 && s.roomLocked(queue, bytes) {
		o := s.takeLocked(queue, bytes)
		s.Mu.Unlock()
		return o, nil
	}
	if noWait {
		defer s.Mu.Unlock()
		return none, fmt.Errorf("rdma: %d operations in flight to %v: %w", s.Active, s.Peer, rdma.ErrBusy)
	}
	w := &waiter[O]{bytes: bytes, granted: make(chan O, 1)}
	s.waiters[queue] = append(s.waiters[queue], w)
	s.Mu.Unlock()
	return s.await(ctx, queue, w)
}

// await waits until the waiter w is granted an op.
func (s *Session[O]) await(ctx context.Context, queue int, w *waiter[O]) (none O, _ error) {
	select {
	case o := <-w.granted:
		if o == none {
			s.Mu.Lock()
			defer s.Mu.Unlock()
			return none, s.GoneLocked()
		}
		return o, nil
	case <-ctx.Done():
		if !s.leave(queue, w) {
			// The op was granted in the meantime. It is released, because the caller's context has
			// ended.
			if o := <-w.granted; o != none {
				s.Unreserve(o)
			}
		}
		return none, fmt.Errorf("rdma: waiting for room to %v: %w", s.Peer, ctx.Err())
	}
}

// leave removes w from the queue. It returns false if w is not in the queue any more. The waiters behind
// w may need less room than w, so leave grants the waiters for which there is room.
func (s *Session[O]) leave(queue int, w *waiter[O]) bool {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	i := slices.Index(s.waiters[queue], w)
	if i < 0 {
		return false
	}
	s.waiters[queue] = slices.Delete(s.waiters[queue], i, i+1)
	s.grantLocked()
	return true
}

// Unreserve releases an op that was not submitted.
func (s *Session[O]) Unreserve(o O) {
	s.Mu.Lock()
	x := Ended{source: o.base().source}
	s.releaseLocked(o)
	s.Mu.Unlock()
	x.call()
}

// BeginLocked marks o as submitted at tick. If the session has ended it returns an error, and
// the caller must release o.
func (s *Session[O]) BeginLocked(o O, tick uint64) error {
	if s.Why != nil {
		return s.GoneLocked()
	}
	b := o.base()
	b.Submitted, b.Tick = true, tick
	return nil
}

// GoneLocked returns the error of an operation on the ended session.
func (s *Session[O]) GoneLocked() error { return s.rules.Gone(s.Why) }

// EndLocked counts the end of o, releases o, and returns the callback to be called without the
// lock.
func (s *Session[O]) EndLocked(o O, message bool, err error) Ended {
	b := o.base()
	x := Ended{b.Done, err, b.source}
	if message {
		s.counters.SendEnded(err)
	} else {
		s.counters.WriteEnded(b.RunBytes(), err)
	}
	s.releaseLocked(o)
	return x
}

// FailLocked begins the end of the session, which also ends the wait of all submitters. If the end
// has already begun, FailLocked does nothing and returns false, so only the first reason is kept.
func (s *Session[O]) FailLocked(why error) bool {
	if s.Why != nil {
		return false
	}
	s.Why = why
	for queue, ws := range s.waiters {
		for _, w := range ws {
			var none O
			w.granted <- none
		}
		s.waiters[queue] = nil
	}
	return true
}

// Overdue reports whether any operation in flight was submitted more than the given number of
// rounds of Watch ago. now is the current value of the engine's Ticks.
func (s *Session[O]) Overdue(now, rounds uint64) bool {
	if now <= rounds {
		return false
	}
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return s.Active > 0 && slices.ContainsFunc(s.Ops, func(o O) bool {
		b := o.base()
		return b.Submitted && b.Tick < now-rounds
	})
}
