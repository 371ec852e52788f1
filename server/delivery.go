package server

import (
	"context"
	"fmt"
	"sync/atomic"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/server/storage"
)

// delivery writes the parts of one Read into the memory of the client.
type delivery struct {
	server *Server
	// dsts are the client's memory windows to which the parts are written.
	dsts []rdma.Desc
	imm  rdma.Imm
	// places[i] are the destinations of the bytes of piece i, in the order of these bytes.
	places [][]place
	// posted is the number of writes that the transfer engine has accepted, and counted the number
	// of writes that have completed. Each completed write has sent one immediate to the client.
	posted, counted atomic.Uint32
}

// place is the destination of consecutive bytes of a piece.
type place struct {
	dst    int    // index in delivery.dsts
	offset uint64 // in the window
	bytes  int64  // not set if the piece has only one place
}

// fragmentsMax is the maximum number of fragments of one Read. It is limited because the transfer
// engine writes each fragment in a separate operation.
const fragmentsMax = 1 << 16

// newDelivery validates the destinations of a request and returns its delivery.
func (s *cacheService) newDelivery(ctx context.Context, by caller, req *pb.ReadRequest) (*delivery, error) {
	d := &delivery{server: s.Server, imm: rdma.ImmOf(req.GetImm()), dsts: make([]rdma.Desc, 1+len(req.GetMoreDestinations())), places: make([][]place, len(req.GetPieces()))}
	for i := range d.dsts {
		desc := req.GetDestination()
		if i > 0 {
			desc = req.GetMoreDestinations()[i-1]
		}
		if err := d.dsts[i].UnmarshalBinary(desc); err != nil {
			return nil, invalid(fmt.Errorf("destination %d: %w", i, err))
		}
		if err := s.sessions.own(ctx, d.dsts[i].Engine); err != nil {
			return nil, err
		}
		if by.transport == transportMessage && d.dsts[i].Engine != by.peer {
			return nil, invalid(fmt.Errorf("destination %d is memory of %v, but a read by message is written to its sender, %v", i, d.dsts[i].Engine, by.peer))
		}
	}
	whole := make([]place, len(d.places)) // one allocation for all pieces without fragments
	var geometry kv.Geometry
	total := 0
	for i, p := range req.GetPieces() {
		if len(p.GetFragments()) == 0 {
			whole[i].offset = p.GetOffset()
			d.places[i] = whole[i : i+1]
			continue
		}
		if total += len(p.GetFragments()); total > fragmentsMax {
			return nil, invalid(fmt.Errorf("more than %d fragments in one read", fragmentsMax))
		}
		if geometry.Groups == nil {
			ns, err := s.node.Namespace(req.GetNamespace())
			if err != nil {
				return nil, statusOf(err)
			}
			geometry = ns.Geometry
		}
		var err error
		if d.places[i], err = fragmentPlaces(geometry, req, p, len(d.dsts)); err != nil {
			return nil, invalid(fmt.Errorf("piece %d: %w", i, err))
		}
	}
	return d, nil
}

// fragmentPlaces returns the destinations of a piece's fragments. It fails unless the fragments
// together have exactly the layers that the request reads.
func fragmentPlaces(g kv.Geometry, req *pb.ReadRequest, p *pb.PieceRef, dsts int) ([]place, error) {
	if int(p.GetGroup()) >= len(g.Groups) {
		return nil, fmt.Errorf("group %d; the namespace has %d", p.GetGroup(), len(g.Groups))
	}
	left := int64(req.GetLayers())
	if left == 0 {
		left = int64(g.Groups[p.GetGroup()].Layers) - int64(req.GetFirstLayer())
	}
	places := make([]place, len(p.GetFragments()))
	for k, f := range p.GetFragments() {
		if f.GetLayers() == 0 || int64(f.GetLayers()) > left || int64(f.GetDestination()) >= int64(dsts) {
			return nil, fmt.Errorf("fragment %d has %d layers for destination %d, but %d layers are left and there are %d destinations", k, f.GetLayers(), f.GetDestination(), left, dsts)
		}
		left -= int64(f.GetLayers())
		places[k] = place{dst: int(f.GetDestination()), offset: f.GetOffset(), bytes: int64(f.GetLayers()) * g.LayerBytes(int(p.GetGroup()))}
	}
	if left != 0 {
		return nil, fmt.Errorf("the fragments lack %d of the layers", left)
	}
	return places, nil
}

// deliver posts one write for each part or, if the part has several destinations, one for each
// destination. Parts of consecutive small pieces cannot share a write, because slot headers lie
// between the pieces in the arena.
func (d *delivery) deliver(ctx context.Context, parts []storage.Part) {
	for i := range parts {
		p := &parts[i]
		if places := d.places[p.Piece]; len(places) == 1 {
			d.post(ctx, p, 0, len(p.Bytes), places[0].dst, places[0].offset+uint64(p.At), p.Done)
		} else {
			d.scatter(ctx, p, places)
		}
	}
}

// scatter posts one write for each destination that the part overlaps.
func (d *delivery) scatter(ctx context.Context, p *storage.Part, places []place) {
	ends := &partEnds{part: p}
	ends.open.Store(1) // 1 for scatter itself, subtracted after the last write was posted
	from, end := p.At, p.At+int64(len(p.Bytes))
	at := int64(0) // offset of the place's first byte in the piece
	for _, to := range places {
		lo, hi := max(at, from), min(at+to.bytes, end)
		if lo < hi {
			ends.open.Add(1)
			d.post(ctx, p, int(lo-from), int(hi-lo), to.dst, to.offset+uint64(lo-at), ends.one)
		}
		at += to.bytes
	}
	ends.one(nil)
}

// post writes n bytes of the part, beginning at the offset off in the part.
func (d *delivery) post(ctx context.Context, p *storage.Part, off, n, dst int, dstOffset uint64, done func(error)) {
	err := d.server.data.Write(ctx, rdma.Write{
		Src:       d.server.region,
		SrcOffset: uint64(p.ArenaOffset) + uint64(off),
		Dst:       d.dsts[dst],
		DstOffset: dstOffset,
		Len:       uint64(n),
		Imm:       d.imm,
		Done: func(err error) {
			if err == nil {
				d.counted.Add(1)
			}
			done(err)
		},
	})
	if err != nil {
		done(err)
		return
	}
	d.posted.Add(1)
}

// partEnds calls part.Done once, when all writes of the part have ended, with the first error of
// these writes or nil.
type partEnds struct {
	part *storage.Part
	open atomic.Int32 // writes that have not ended
	err  atomic.Pointer[error]
}

func (e *partEnds) one(err error) {
	if err != nil {
		e.err.CompareAndSwap(nil, &err)
	}
	if e.open.Add(-1) > 0 {
		return
	}
	if first := e.err.Load(); first != nil {
		e.part.Done(*first)
		return
	}
	e.part.Done(nil)
}
