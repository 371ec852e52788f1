package client

import (
	"context"
	"fmt"

	"github.com/penstock-kv/penstock/rdma"
)

// Memory is registered memory of the caller, the destination of Reads and the source of Writes. The
// zero Memory has no bytes; it is for tests that replace the Store.
type Memory struct {
	region rdma.Region
	engine rdma.Engine // Options.Engine of the Store
}

// Register makes mem usable for Read and Write. mem must stay allocated until Memory.Close has
// returned. Peers can write only to the ranges over which a Read has a window open.
func (s *Store) Register(mem []byte) (*Memory, error) {
	region, err := s.opts.Engine.Register(mem, rdma.RegisterOptions{Local: true})
	if err != nil {
		return nil, fmt.Errorf("client: register %d bytes: %w", len(mem), err)
	}
	return &Memory{region: region, engine: s.opts.Engine}, nil
}

// checkMemory returns an error unless memory of a request is nil or is registered with the Store's engine.
func (s *Store) checkMemory(m *Memory) error {
	if m != nil && m.engine != s.opts.Engine {
		return fmt.Errorf("%w: the memory was registered with a Store that has another transfer engine", ErrRequest)
	}
	return nil
}

// Bytes returns the memory.
func (m *Memory) Bytes() []byte {
	if m.region == nil {
		return nil
	}
	return m.region.Bytes()
}

// Close ends the registration. Running Reads into the memory fail. Close returns when nothing
// touches the memory any more, or with the error of ctx; then it may be called again.
func (m *Memory) Close(ctx context.Context) error {
	if m.region == nil {
		return nil
	}
	if err := m.region.Close(ctx); err != nil {
		return fmt.Errorf("client: close memory: %w", err)
	}
	return nil
}
