package client

import (
	"context"
	"fmt"

	"github.com/penstock-kv/penstock/rdma"
)

// Memory is memory of the caller that blocks are read into and written from. The
// zero Memory has no bytes; it serves what stands for a Store in a test.
type Memory struct {
	region rdma.Region
}

// Register makes mem usable for Read and Write. It must stay allocated until
// Close has returned; peers can write to it only where and while a Read has a
// window open.
func (s *Store) Register(mem []byte) (*Memory, error) {
	region, err := s.opts.Engine.Register(mem, rdma.RegisterOptions{Local: true})
	if err != nil {
		return nil, fmt.Errorf("client: register %d bytes: %w", len(mem), err)
	}
	return &Memory{region: region}, nil
}

// Bytes returns the memory.
func (m *Memory) Bytes() []byte {
	if m.region == nil {
		return nil
	}
	return m.region.Bytes()
}

// Close ends the registration. Reads into the memory that are under way fail; it
// returns when nothing touches the memory any more, or with ctx's error: then it
// may be called again.
func (m *Memory) Close(ctx context.Context) error {
	if m.region == nil {
		return nil
	}
	if err := m.region.Close(ctx); err != nil {
		return fmt.Errorf("client: close memory: %w", err)
	}
	return nil
}
