package group

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/penstock-kv/penstock/rdma"
)

// peerGroup is a set of sessions, resolved once.
type peerGroup struct {
	e        *Engine
	peers    []rdma.EngineID
	sessions map[rdma.EngineID]*session
}

// AddPeerGroup implements rdma.Engine.
func (e *Engine) AddPeerGroup(peers []rdma.EngineID) (rdma.PeerGroup, error) {
	g := &peerGroup{e: e, peers: slices.Clone(peers), sessions: make(map[rdma.EngineID]*session, len(peers))}
	for _, p := range peers {
		s, err := e.session(p)
		if err != nil {
			return nil, err
		}
		g.sessions[p] = s
	}
	return g, nil
}

// Peers implements rdma.PeerGroup.
func (g *peerGroup) Peers() []rdma.EngineID { return slices.Clone(g.peers) }

// Close implements rdma.PeerGroup. A group holds nothing but pointers.
func (g *peerGroup) Close() {}

// whole returns an error if a session of the group has ended.
func (g *peerGroup) whole() error {
	for p, s := range g.sessions {
		if s.dead() {
			return fmt.Errorf("group: peer group: session with %v has ended: %w", p, rdma.ErrPeerDied)
		}
	}
	return nil
}

// resolve returns how the sessions of an operation on group are found.
func (e *Engine) resolve(group rdma.PeerGroup) (func(rdma.EngineID) (*session, error), error) {
	if group == nil {
		return e.session, nil
	}
	g, ok := group.(*peerGroup)
	if !ok || g.e != e {
		return nil, fmt.Errorf("group: peer group: %w", rdma.ErrForeign)
	}
	if e.ctx.Err() != nil {
		return nil, fmt.Errorf("rdma: %w", rdma.ErrClosed)
	}
	if err := g.whole(); err != nil {
		return nil, err
	}
	return func(p rdma.EngineID) (*session, error) {
		if s := g.sessions[p]; s != nil {
			return s, nil
		}
		return nil, fmt.Errorf("group: a destination is at %v, which is not in the peer group: %w", p, rdma.ErrRange)
	}, nil
}

// gather joins the ends of several operations into one.
type gather struct {
	mu      sync.Mutex
	pending int
	errs    []error
	done    func(error)
}

// one takes the end of one operation.
func (g *gather) one(err error) {
	g.mu.Lock()
	if err != nil {
		g.errs = append(g.errs, err)
	}
	g.pending--
	last := g.pending == 0
	g.mu.Unlock()
	if last && g.done != nil {
		g.done(errors.Join(g.errs...))
	}
}

// Scatter implements rdma.Engine.
func (e *Engine) Scatter(ctx context.Context, x rdma.Scatter) error {
	if len(x.Dsts) == 0 {
		return fmt.Errorf("group: scatter to no destination: %w", rdma.ErrRange)
	}
	find, err := e.resolve(x.Group)
	if err != nil {
		return err
	}
	sessions := make([]*session, len(x.Dsts))
	at := func(i int) rdma.Write {
		d := &x.Dsts[i]
		return rdma.Write{Src: x.Src, SrcOffset: d.SrcOffset, Dst: d.Dst, DstOffset: d.DstOffset, Len: d.Len, Imm: x.Imm, Class: x.Class}
	}
	for i := range x.Dsts {
		w := at(i)
		if err := w.Check(); err != nil {
			return fmt.Errorf("group: scatter destination %d: %w", i, err)
		}
		if _, err := e.source(w.Src, w.Len); err != nil {
			return fmt.Errorf("group: scatter destination %d: %w", i, err)
		}
		if sessions[i], err = find(w.Dst.Engine); err != nil {
			return fmt.Errorf("group: scatter destination %d: %w", i, err)
		}
	}
	g := &gather{pending: len(x.Dsts), done: x.Done}
	one := g.one
	for i := range x.Dsts {
		w := at(i)
		w.Done = one
		err := ctx.Err()
		if err == nil && w.Class >= rdma.Classes {
			err = fmt.Errorf("group: scatter of %v: %w", w.Class, rdma.ErrRange)
		}
		if err == nil {
			err = e.write(ctx, sessions[i], &w)
		}
		if err != nil && i == 0 {
			return err
		}
		if err != nil {
			// Those before are on their way: what is left ends with this error.
			for range len(x.Dsts) - i {
				g.one(err)
			}
			return nil
		}
	}
	return nil
}

// Barrier implements rdma.Engine.
func (e *Engine) Barrier(ctx context.Context, b rdma.Barrier) error {
	x := rdma.Scatter{Group: b.Group, Imm: rdma.ImmOf(b.Imm), Class: b.Class, Done: b.Done, Dsts: make([]rdma.ScatterDst, len(b.Dsts))}
	for i, d := range b.Dsts {
		x.Dsts[i].Dst = d
	}
	return e.Scatter(ctx, x)
}
