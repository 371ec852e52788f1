package traffic

import (
	"context"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/copier"
)

// stageSlots is the number of layers for which the staging memory of a job has room: while one
// layer is transferred, the next layer is copied.
const stageSlots = 2

// staging is host memory of a prefill job, in the PE buffer, through which the layers pass on
// their way to and from device memory that the compute NIC cannot reach. Layer l has slot
// l mod slots:
//
//	slot 0 │block 0│block 1│…│ slot 1 │block 0│block 1│…│
//
// A block has a fixed position in each slot. The decode side writes the blocks that it has read,
// and the copier writes all other blocks, so an arriving and a leaving layer in one slot do not
// overlap.
type staging struct {
	base        uint64 // offset of slot 0 in the buffer's region
	blocks      uint64
	pageBytes   uint64 // of the largest Layer Block
	slots       int
	leavingLock []chan struct{} // by slot; held while the slot's layer is sent
}

// stageBytes returns the size, in bytes, of the staging memory of a job with a prompt of the given
// number of blocks.
func (m *Manager) stageBytes(blocks int) uint64 {
	if !m.staged() {
		return 0
	}
	return uint64(m.stageDepth()) * uint64(blocks) * m.geo.maxBytes
}

func (m *Manager) stageDepth() int { return min(stageSlots, m.geo.layers) }

// staged reports whether transfers pass through host memory, because the compute NIC cannot reach
// device memory.
func (m *Manager) staged() bool { return m.opts.Device.Region == nil }

func (m *Manager) newStaging(base uint64, blocks int) *staging {
	s := &staging{base: base, blocks: uint64(blocks), pageBytes: m.geo.maxBytes, slots: m.stageDepth()}
	for range s.slots {
		s.leavingLock = append(s.leavingLock, make(chan struct{}, 1))
	}
	return s
}

// offset returns the place of a block of a layer in the buffer's region.
func (s *staging) offset(layer int, block uint32) uint64 {
	return s.device(nil).offset(layer, block)
}

// device describes the staging memory as a Device in which page b is block b.
func (s *staging) device(region rdma.Region) *Device {
	d := &Device{Region: region, Stride: s.pageBytes, Pages: int(s.blocks)}
	for i := range uint64(s.slots) {
		d.Bases = append(d.Bases, s.base+i*s.blocks*s.pageBytes)
	}
	return d
}

// leave reserves the slot of a layer that is going to be sent to the decode side. The reservation
// ends when done is called.
func (s *staging) leave(ctx context.Context, layer int) (done func(), err error) {
	lock := s.leavingLock[layer%s.slots]
	select {
	case lock <- struct{}{}:
		return func() { <-lock }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// fromDevice copies blocks of a layer from their device pages to the staging memory, after the mark
// if it is not nil.
func (p *Prefill) fromDevice(layer int, blocks, pages []uint32, after copier.Mark) error {
	spans := make([]copier.Span, len(blocks))
	for i, b := range blocks {
		spans[i] = copier.Span{Src: p.m.opts.Device.offset(layer, pages[i]), Dst: p.stage.offset(layer, b), Len: p.m.geo.bytes[layer]}
	}
	return p.m.fromDevice(p.ctx, &p.m.buffer, spans, after)
}
