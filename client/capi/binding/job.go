package binding

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"
)

// job is a submitted batch.
type job struct {
	handle Handle
	cancel context.CancelFunc
	// run performs the batch and completes the job.
	run func()
	// ended is closed after result is set.
	ended  chan struct{}
	result Result
	// awaited is set if SubmitWait returns the job's completion, so that finish does not publish
	// the completion. Store.mu guards awaited.
	awaited bool
}

// NoLimit is the timeout of a SubmitWait that returns when the job is complete.
const NoLimit time.Duration = math.MaxInt64

// Submit starts a batch and returns its job.
func (n *Namespace) Submit(op Op, b *Batch) (Handle, error) {
	j, err := n.start(op, b, false)
	if err != nil {
		return 0, err
	}
	go j.run()
	return j.handle, nil
}

// SubmitWait starts a batch, sets *h to its job, and waits until the job is complete, for at most
// timeout. If the job is complete by then, SubmitWait returns its completion, which neither signals
// the eventfd nor appears in Drain. Otherwise the error is a timeout, and the job continues as
// after Submit. Another caller's Drain may return the job's completion before SubmitWait has
// returned that error. *h is set before Drain can return the completion.
//
// With timeout NoLimit the calling goroutine performs the batch itself, which wakes fewer threads.
//
// If *h is 0, the error is that of Submit, and no job exists.
func (n *Namespace) SubmitWait(op Op, b *Batch, timeout time.Duration, h *Handle) (Result, error) {
	*h = 0
	j, err := n.start(op, b, true)
	if err != nil {
		return Result{}, err
	}
	*h = j.handle
	s := n.store
	if timeout == NoLimit {
		j.run()
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.takeLocked(j)
	}
	go j.run()
	late := time.NewTimer(timeout)
	defer late.Stop()
	err = nil
	select {
	case <-j.ended:
	case <-late.C:
		err = fmt.Errorf("job %d is still running: %w", j.handle, context.DeadlineExceeded)
	case <-s.ctx.Done():
		err = fmt.Errorf("%w: the store was closed while job %d was running", ErrHandle, j.handle)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-j.ended:
		return s.takeLocked(j)
	default:
		j.awaited = false
		return Result{}, err
	}
}

// start makes a job of a batch. The caller calls the job's run, once.
func (n *Namespace) start(op Op, b *Batch, awaited bool) (*job, error) {
	s := n.store
	if err := s.begin(); err != nil {
		return nil, err
	}
	j := &job{handle: s.library.next(), ended: make(chan struct{}), awaited: awaited}
	s.mu.Lock()
	if open := len(s.jobs); open >= s.opts.JobsMax {
		s.mu.Unlock()
		s.calls.Done()
		return nil, fmt.Errorf("%w: %d jobs are running or not drained; drain them, or raise jobs_max", ErrBusy, open)
	}
	s.jobs[j.handle] = j
	s.mu.Unlock()
	c, err := n.plan(op, b)
	if err != nil {
		s.mu.Lock()
		delete(s.jobs, j.handle)
		s.mu.Unlock()
		s.calls.Done()
		return nil, err
	}
	ctx, cancel := s.within(c.within)
	s.mu.Lock()
	j.cancel = cancel
	s.mu.Unlock()
	t := s.turns.join()
	j.run = func() {
		defer s.calls.Done()
		defer cancel()
		s.finish(j, s.perform(ctx, c, t))
	}
	return j, nil
}

// perform runs a call when its turn t has come, because at most JobsParallel calls run at a time.
func (s *Store) perform(ctx context.Context, c *call, t turn) Result {
	defer c.end()
	defer s.turns.leave(t)
	select {
	case <-t:
	case <-ctx.Done():
		return Result{Op: c.op, N: c.n(), Epoch: c.def.Epoch, Err: fmt.Errorf("the job waited for other jobs: %w", ctx.Err())}
	}
	return c.run(ctx)
}

// finish sets the job's result, and publishes the completion unless SubmitWait returns it.
func (s *Store) finish(j *job, r Result) {
	r.Job = j.handle
	s.mu.Lock()
	j.result = r
	close(j.ended)
	if !j.awaited {
		s.done = append(s.done, j)
		s.signalLocked()
	}
	s.mu.Unlock()
}

// signalLocked makes the eventfd readable if completions wait for Drain or Wait, and not
// readable otherwise.
func (s *Store) signalLocked() {
	signal := s.event.Signal
	if len(s.done) == 0 {
		signal = s.event.Clear
	}
	if err := signal(); err != nil {
		s.logs.logger().Error("eventfd", "err", err)
	}
}

// Drain moves up to len(dst) completions to dst and returns their number.
func (s *Store) Drain(dst []Result) (int, error) {
	if err := s.begin(); err != nil {
		return 0, err
	}
	defer s.calls.Done()
	s.mu.Lock()
	defer s.mu.Unlock()
	n := min(len(dst), len(s.done))
	for i, j := range s.done[:n] {
		dst[i] = j.result
		delete(s.jobs, j.handle)
	}
	s.done = slices.Delete(s.done, 0, n)
	s.signalLocked()
	return n, nil
}

// Wait waits until a job is complete and returns its completion. Drain does not return
// that completion again.
func (s *Store) Wait(h Handle, timeout time.Duration) (Result, error) {
	if err := s.begin(); err != nil {
		return Result{}, err
	}
	defer s.calls.Done()
	s.mu.Lock()
	j := s.jobs[h]
	s.mu.Unlock()
	if j == nil {
		return Result{}, fmt.Errorf("%w: %d", ErrNoJob, h)
	}
	ctx, cancel := context.WithTimeout(s.ctx, timeout)
	defer cancel()
	select {
	case <-j.ended:
	case <-ctx.Done():
		if s.ctx.Err() != nil {
			return Result{}, fmt.Errorf("%w: the store was closed while job %d was running", ErrHandle, h)
		}
		return Result{}, fmt.Errorf("job %d is still running: %w", h, ctx.Err())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.takeLocked(j)
}

// takeLocked removes a complete job and returns its completion.
func (s *Store) takeLocked(j *job) (Result, error) {
	if s.jobs[j.handle] != j {
		return Result{}, fmt.Errorf("%w: %d: another call has returned its completion", ErrNoJob, j.handle)
	}
	delete(s.jobs, j.handle)
	if !j.awaited {
		s.done = slices.DeleteFunc(s.done, func(d *job) bool { return d == j })
		s.signalLocked()
	}
	return j.result, nil
}

// Cancel cancels a job. It does not wait for the job's completion.
func (s *Store) Cancel(h Handle) error {
	if err := s.begin(); err != nil {
		return err
	}
	defer s.calls.Done()
	s.mu.Lock()
	defer s.mu.Unlock()
	j := s.jobs[h]
	if j == nil {
		return fmt.Errorf("%w: %d", ErrNoJob, h)
	}
	if j.cancel != nil {
		j.cancel()
	}
	return nil
}

// EventFD returns the descriptor that is readable while a completion waits for Drain or
// Wait.
func (s *Store) EventFD() (int, error) {
	if err := s.begin(); err != nil {
		return 0, err
	}
	defer s.calls.Done()
	return s.event.FD(), nil
}
