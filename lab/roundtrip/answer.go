package roundtrip

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/rdma"
)

// replyWithin is the maximum wait for room in the send queue when a reply is sent.
const replyWithin = 5 * time.Second

// Answerer is the holder in the measurement (the node that has the KV), on one engine. It answers
// each write of a requester with a write back to the requester.
type Answerer struct {
	engine rdma.Engine
	region rdma.Region
	window rdma.Window
	half   int
	desc   []byte

	mu     sync.Mutex
	closed bool
	// slots holds the sessions that have not ended completely: an ended session keeps its slot
	// while operations of the session are pending.
	slots [MaxRequesters]*session
}

// session is one requester's measurement.
type session struct {
	a      *Answerer
	slot   int
	peer   rdma.EngineID
	dst    rdma.Desc
	shapes []Shape
	// Answerer.mu guards the fields below. ended is set when no further trip will be answered.
	// pending holds the expectations of immediates that have not ended, by shape. answering is the
	// number of trips that are being answered. Invariant: the session keeps its slot until ended is
	// set, pending is empty and answering is 0.
	ended     bool
	pending   map[uint32]*arm
	answering int
}

// imm returns the immediate value with which the requester writes shape i.
func (s *session) imm(i uint32) uint32 { return uint32(s.slot)*MaxShapes + 1 + i }

// leaveLocked frees the slot when the session has ended completely.
func (s *session) leaveLocked() {
	if s.ended && len(s.pending) == 0 && s.answering == 0 && s.a.slots[s.slot] == s {
		s.a.slots[s.slot] = nil
	}
}

// NewAnswerer answers requesters that open sessions with e, until Close. memory is its scratch
// memory: requesters write into the first half, and the answers are sent from the second half.
// NewAnswerer takes over the engine's receive buffers.
func NewAnswerer(e rdma.Engine, memory []byte) (*Answerer, error) {
	a := &Answerer{engine: e, half: len(memory) / 2}
	var err error
	if a.region, err = e.Register(memory, rdma.RegisterOptions{Local: true}); err != nil {
		return nil, err
	}
	undo := func(err error) (*Answerer, error) {
		ctx, cancel := context.WithTimeout(context.Background(), replyWithin)
		defer cancel()
		return nil, errors.Join(err, a.region.Close(ctx))
	}
	if a.window, err = a.region.Window(0, uint64(a.half)); err != nil {
		return undo(err)
	}
	if a.desc, err = describe(a.window.Desc()); err != nil {
		return undo(err)
	}
	if err = e.Recv(2*MaxRequesters, messageBytes, a.receive); err != nil {
		return undo(err)
	}
	return a, nil
}

// Close ends the running measurements, and returns when no operation accesses the memory. Later
// messages are answered with an error.
func (a *Answerer) Close(ctx context.Context) error {
	a.mu.Lock()
	a.closed = true
	all := a.slots
	a.mu.Unlock()
	for _, s := range all {
		s.end()
	}
	return a.region.Close(ctx)
}

// receive handles messages.
func (a *Answerer) receive(from rdma.EngineID, msg []byte) {
	var h hello
	if err := json.Unmarshal(msg, &h); err != nil || h.Version != version {
		a.reply(from, reply{Error: fmt.Sprintf("the message is not of version %d of a round trip's (both ends must run the same penstock)", version)})
		return
	}
	a.of(from).end()
	if len(h.Shapes) == 0 {
		return
	}
	s, err := a.begin(from, h)
	if err != nil {
		a.reply(from, reply{Error: err.Error()})
		return
	}
	a.reply(from, reply{Desc: a.desc, Base: s.imm(0)})
}

// of returns the session of a peer, or nil if there is none or the session has ended.
func (a *Answerer) of(peer rdma.EngineID) *session {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.slots {
		if s != nil && s.peer == peer && !s.ended {
			return s
		}
	}
	return nil
}

// reply sends r. If sending fails, the requester fails at its deadline.
func (a *Answerer) reply(to rdma.EngineID, r reply) {
	ctx, cancel := context.WithTimeout(context.Background(), replyWithin)
	defer cancel()
	if err := a.engine.Send(ctx, to, encode(r), nil); err != nil {
		a.engine.Disconnect(to)
	}
}

// begin creates the session of from.
func (a *Answerer) begin(from rdma.EngineID, h hello) (*session, error) {
	if err := check(h.Shapes, 2*a.half); err != nil {
		return nil, err
	}
	s := &session{a: a, peer: from, shapes: h.Shapes, pending: make(map[uint32]*arm)}
	if err := s.dst.UnmarshalBinary(h.Desc); err != nil {
		return nil, err
	}
	a.mu.Lock()
	s.slot = slices.Index(a.slots[:], nil)
	if s.slot >= 0 && !a.closed {
		a.slots[s.slot] = s
	}
	closed := a.closed
	a.mu.Unlock()
	switch {
	case closed:
		return nil, errors.New("the answerer is closed")
	case s.slot < 0:
		return nil, fmt.Errorf("the answerer serves %d requesters already; try again when one of them is done", MaxRequesters)
	}
	for i := range s.shapes {
		if err := s.expect(uint32(i)); err != nil {
			s.end()
			return nil, err
		}
	}
	return s, nil
}

// arm is one expectation of a session. done is set when the expectation has ended, which may be
// before ExpectImm has returned. Answerer.mu guards done.
type arm struct {
	e    *rdma.Expectation
	done bool
}

// expect expects the immediate of the next trip of shape i.
func (s *session) expect(i uint32) error {
	m := new(arm)
	e, err := s.a.engine.ExpectImm(rdma.Expect{Imm: s.imm(i), Count: 1, From: []rdma.EngineID{s.peer}, Done: func(err error) { s.landed(i, m, err) }})
	if err != nil {
		return err
	}
	s.a.mu.Lock()
	ended := s.ended
	if m.e = e; !m.done {
		s.pending[i] = m
	}
	s.a.mu.Unlock()
	if ended {
		e.Cancel()
	}
	return nil
}

// landed handles the end of the expectation m. Without an error, the write of a trip has arrived, and
// landed answers the trip. With an error, landed ends the session. The engine's goroutine calls
// landed.
func (s *session) landed(i uint32, m *arm, err error) {
	s.a.mu.Lock()
	if m.done = true; s.pending[i] == m {
		delete(s.pending, i)
	}
	if err != nil {
		s.ended = true // the peer has died, or the session has ended
	}
	if s.ended {
		s.leaveLocked()
		s.a.mu.Unlock()
		return
	}
	s.answering++
	s.a.mu.Unlock()
	s.answer(i)
	s.a.mu.Lock()
	s.answering--
	s.leaveLocked()
	s.a.mu.Unlock()
}

// answer writes the payload of shape i back.
func (s *session) answer(i uint32) {
	// Expect the next trip before answering this one, because the next trip may start at once.
	err := s.expect(i)
	if err == nil {
		err = s.a.engine.Write(context.Background(), rdma.Write{
			Src: s.a.region, SrcOffset: uint64(s.a.half), Dst: s.dst, Len: uint64(s.shapes[i].Back), Imm: rdma.ImmOf(i + 1), NoWait: true,
		})
	}
	if err != nil {
		s.a.engine.Disconnect(s.peer) // so that the peer does not wait for an answer
	}
}

// end ends the session and cancels its expectations. It does nothing if s is nil.
func (s *session) end() {
	if s == nil {
		return
	}
	s.a.mu.Lock()
	s.ended = true
	var all []*rdma.Expectation
	for _, m := range s.pending {
		all = append(all, m.e)
	}
	s.leaveLocked()
	s.a.mu.Unlock()
	for _, e := range all {
		e.Cancel()
	}
}
