package tcp

import (
	"fmt"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/inbox"
)

// Recv implements rdma.Engine.
func (e *Engine) Recv(count, sizeBytes int, handler func(from rdma.EngineID, msg []byte)) error {
	if handler == nil {
		return fmt.Errorf("tcp: receive buffers without a handler: %w", rdma.ErrRange)
	}
	p, err := inbox.New(count, sizeBytes)
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closing {
		return fmt.Errorf("tcp: recv: %w", rdma.ErrClosed)
	}
	if !e.inbox.CompareAndSwap(nil, p) {
		return fmt.Errorf("tcp: receive buffers: %w", rdma.ErrExists)
	}
	e.running.Go(func() { p.Run(e.ctx, handler) })
	return nil
}
