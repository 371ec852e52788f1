package roundtrip

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/rdma"
)

// replyWithin is how long an answerer waits for room to reply.
const replyWithin = 5 * time.Second

// Answerer is the holder's end on one engine.
type Answerer struct {
	engine rdma.Engine
	region rdma.Region
	window rdma.Window
	half   int
	desc   []byte

	mu      sync.Mutex
	session *session
}

// session is one requester's measurement.
type session struct {
	a      *Answerer
	peer   rdma.EngineID
	dst    rdma.Desc
	shapes []Shape
	// The rest is guarded by Answerer.mu. ended: nothing is expected again.
	// pending are the expectations that have not ended, by shape.
	ended   bool
	pending map[uint32]*arm
}

// NewAnswerer answers requesters that open sessions with e, until Close. memory is
// its scratch: the first half is written into, the second written from. It takes
// the engine's receive buffers.
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
	if err = e.Recv(4, messageBytes, a.receive); err != nil {
		return undo(err)
	}
	return a, nil
}

// Close ends the measurement that is under way, and returns when nothing touches
// the memory. Messages that still come are answered with an error.
func (a *Answerer) Close(ctx context.Context) error {
	a.mu.Lock()
	s := a.session
	a.mu.Unlock()
	s.end()
	return a.region.Close(ctx)
}

// receive is the handler of messages.
func (a *Answerer) receive(from rdma.EngineID, msg []byte) {
	var h hello
	if err := json.Unmarshal(msg, &h); err != nil || h.Version != version {
		a.reply(from, reply{Error: fmt.Sprintf("the message is not of version %d of a round trip's (both ends must run the same penstock)", version)})
		return
	}
	if len(h.Shapes) == 0 {
		a.mu.Lock()
		s := a.session
		a.mu.Unlock()
		if s != nil && s.peer == from {
			s.end()
		}
		return
	}
	if err := a.begin(from, h); err != nil {
		a.reply(from, reply{Error: err.Error()})
		return
	}
	a.reply(from, reply{Desc: a.desc})
}

// reply sends r; a requester that cannot be told finds out by its deadline.
func (a *Answerer) reply(to rdma.EngineID, r reply) {
	ctx, cancel := context.WithTimeout(context.Background(), replyWithin)
	defer cancel()
	if err := a.engine.Send(ctx, to, encode(r), nil); err != nil {
		a.engine.Disconnect(to)
	}
}

// begin makes the session of from, unless another's is under way.
func (a *Answerer) begin(from rdma.EngineID, h hello) error {
	if err := check(h.Shapes, 2*a.half); err != nil {
		return err
	}
	s := &session{a: a, peer: from, shapes: h.Shapes, pending: make(map[uint32]*arm)}
	if err := s.dst.UnmarshalBinary(h.Desc); err != nil {
		return err
	}
	a.mu.Lock()
	old := a.session
	if old != nil && !old.ended && len(old.pending) > 0 && old.peer != from {
		a.mu.Unlock()
		return fmt.Errorf("it answers %v; try again when that has ended", old.peer)
	}
	a.mu.Unlock()
	old.end()
	a.mu.Lock()
	a.session = s
	a.mu.Unlock()
	for i := range s.shapes {
		if err := s.expect(uint32(i)); err != nil {
			s.end()
			return err
		}
	}
	return nil
}

// arm is one expectation of a session. Its done is guarded by Answerer.mu: it may
// be set before ExpectImm has returned.
type arm struct {
	e    *rdma.Expectation
	done bool
}

// expect waits for the next trip of shape i.
func (s *session) expect(i uint32) error {
	m := new(arm)
	e, err := s.a.engine.ExpectImm(rdma.Expect{Imm: i + 1, Count: 1, From: []rdma.EngineID{s.peer}, Done: func(err error) { s.landed(i, m, err) }})
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

// landed answers one trip. It runs on the engine's goroutine.
func (s *session) landed(i uint32, m *arm, err error) {
	s.a.mu.Lock()
	if m.done = true; s.pending[i] == m {
		delete(s.pending, i)
	}
	ended := s.ended
	s.a.mu.Unlock()
	if err != nil || ended {
		return
	}
	// Expect the next before this one is answered: it may come at once.
	if err := s.expect(i); err != nil {
		return
	}
	err = s.a.engine.Write(context.Background(), rdma.Write{
		Src: s.a.region, SrcOffset: uint64(s.a.half), Dst: s.dst, Len: uint64(s.shapes[i].Back), Imm: rdma.ImmOf(i + 1), NoWait: true,
	})
	if err != nil {
		s.a.engine.Disconnect(s.peer) // so that it does not wait
	}
}

// end stops expecting; nil has ended.
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
	s.a.mu.Unlock()
	for _, e := range all {
		e.Cancel()
	}
}
