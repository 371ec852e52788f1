package emulate

import (
	"context"
	"errors"

	"github.com/penstock-kv/penstock/client/traffic"
)

// decode serves a request until its output is complete.
func (e *Engine) decode(r *running) {
	w := r.work
	prompt, whole := e.blocksOf(w.Prompt), e.blocksOf(w.Prompt+w.Output)
	if err := e.take(r, whole); err != nil {
		e.leave(r, err)
		return
	}
	full := min(w.Prompt/e.opts.Namespace.Geometry.BlockTokens, len(w.IDs))
	d, err := e.manager.Decode(r.ctx, traffic.DecodeJob{
		Request: w.Name, IDs: w.IDs[:full], Epoch: w.Epoch, Blocks: prompt, Hit: w.Hit, Parts: w.Parts, Pages: r.pages[:prompt], Peer: w.Peer,
		Stopped: w.Stopped, Progress: w.Progress,
	})
	if err != nil {
		e.leave(r, err)
		return
	}
	e.begin(r, nil, d)
	e.leave(r, e.decodeOne(r, prompt, full))
}

// decodeOne waits for the prompt's KV, compares the KV with the expected bytes, decodes, and stores
// the decoded blocks.
func (e *Engine) decodeOne(r *running, prompt, full int) error {
	if err := r.decode.Ready(r.ctx); err != nil {
		r.decode.Cancel()
		return err
	}
	for b := range prompt {
		for l := range e.opts.Model.Layers {
			if err := e.compare(r.work, b, l, e.page(l, r.pages[b]), e.content(r.work, r.work.Prompt, b, l)); err != nil {
				r.decode.Cancel()
				return err
			}
		}
	}
	// The prompt's new blocks are stored while the output is decoded.
	finished := make(chan error, 1)
	go func() {
		err := r.decode.Finish(r.ctx)
		r.work.Passed()
		finished <- err
	}()
	if err := errors.Join(e.await(r), <-finished); err != nil {
		return err
	}
	return e.append(r, full)
}

// await passes a request to the decode loop and waits until its output is complete.
func (e *Engine) await(r *running) error {
	e.mu.Lock()
	if r.work.Output > 0 {
		e.decoding[r] = r.work.Output
	} else {
		close(r.wake)
	}
	e.mu.Unlock()
	select {
	case e.ready <- struct{}{}:
	default:
	}
	select {
	case <-r.wake:
		return nil
	case <-r.ctx.Done():
		return context.Cause(r.ctx)
	}
}

// append stores the blocks that the output completed. It first writes the KV of these blocks to
// device memory, as decoding would have done, and stores the blocks from device memory.
func (e *Engine) append(r *running, full int) error {
	w := r.work
	for b := full; b < len(w.IDs); b++ {
		for l := range e.opts.Model.Layers {
			e.content(w, w.Prompt+w.Output, b, l).Fill(e.page(l, r.pages[b]))
		}
		if err := e.manager.Append(r.ctx, w.Name, w.IDs[:b+1], w.Epoch, r.pages[b]); err != nil {
			return err
		}
	}
	if n := len(w.IDs); n > full {
		return e.manager.Settle(r.ctx, w.IDs[n-1])
	}
	return nil
}

// decodeLoop decodes one token of every request per step.
func (e *Engine) decodeLoop() {
	defer e.wg.Done()
	for {
		e.mu.Lock()
		n := len(e.decoding)
		for r, left := range e.decoding {
			if left--; left > 0 {
				e.decoding[r] = left
				continue
			}
			delete(e.decoding, r)
			close(r.wake)
		}
		e.mu.Unlock()
		if n == 0 {
			select {
			case <-e.ready:
				continue
			case <-e.ctx.Done():
				return
			}
		}
		if e.ctx.Err() != nil {
			return
		}
		e.spend(e.opts.Model.DecodeStep(n))
	}
}
