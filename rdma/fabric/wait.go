//go:build fabric && cgo && linux

package fabric

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// waiter is how a poller sleeps.
type waiter interface {
	// wait sleeps until something happened, wake was called, or max has passed,
	// if it is not 0.
	wait(max time.Duration)
	wake()
	close() error
}

// newWaiter makes the waiter of a queue with a descriptor, or of one without.
func newWaiter(n *native, fd int) (waiter, error) {
	if fd < 0 {
		return &napper{n: n, woken: make(chan struct{}, 1)}, nil
	}
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate the queue's descriptor: %w", err)
	}
	if err := unix.SetNonblock(own, true); err != nil {
		return nil, errors.Join(fmt.Errorf("queue's descriptor: %w", err), unix.Close(own))
	}
	w := &fdWaiter{file: os.NewFile(uintptr(own), "libfabric queue")}
	if w.raw, err = w.file.SyscallConn(); err != nil {
		return nil, errors.Join(fmt.Errorf("queue's descriptor: %w", err), w.file.Close())
	}
	// A descriptor that the runtime can't wait on would make wait spin.
	if err := w.file.SetReadDeadline(time.Time{}); err != nil {
		return nil, errors.Join(fmt.Errorf("queue's descriptor can't be waited on: %w", err), w.file.Close())
	}
	w.ready = func(fd uintptr) bool {
		switch {
		case w.looked(), !n.tryWait():
			return true
		case !readable(int(fd)):
			return false
		}
		// There is something, or the descriptor has not forgotten the last time.
		n.clear()
		return true
	}
	return w, nil
}

// fdWaiter waits in the runtime's poller, so that no thread is held.
type fdWaiter struct {
	file *os.File
	raw  syscall.RawConn
	// ready is called when the wait begins, and again when the descriptor has
	// become readable. The first time it looks for itself: the runtime is told
	// of changes only, and the descriptor may be readable already.
	ready func(fd uintptr) bool
	again bool
	// asked: wake was called since the last wait returned. waiting: a deadline
	// in the past would be seen.
	asked, waiting atomic.Bool
}

func (w *fdWaiter) looked() bool {
	was := w.again
	w.again = true
	return was
}

func readable(fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return n != 0 || err != nil
}

func (w *fdWaiter) wait(max time.Duration) {
	var deadline time.Time
	if max > 0 {
		deadline = time.Now().Add(max)
	}
	// An error is a closed descriptor: then nothing is waited for any more.
	_ = w.file.SetReadDeadline(deadline)
	w.waiting.Store(true)
	if !w.asked.Load() {
		w.again = false
		_ = w.raw.Read(w.ready)
	}
	w.waiting.Store(false)
	w.asked.Store(false)
}

func (w *fdWaiter) wake() {
	w.asked.Store(true)
	if w.waiting.Load() {
		_ = w.file.SetReadDeadline(time.Unix(1, 0))
	}
}

func (w *fdWaiter) close() error { return w.file.Close() }

// napper waits for a queue that has no descriptor. Behind the last work it looks on without
// a pause, for napAfter; from then on every napPause, which is what an idle poller adds to
// the latency at most, but for the runtime's own timers.
type napper struct {
	n     *native
	woken chan struct{}
	// seen is native.taken as the last wait found it, and worked when it last grew.
	seen   uint64
	worked time.Time
}

const (
	napAfter = time.Millisecond
	napPause = 50 * time.Microsecond
)

func (w *napper) wait(time.Duration) {
	now := time.Now()
	if taken := w.n.taken.Load(); taken != w.seen {
		w.seen, w.worked = taken, now
	}
	if now.Sub(w.worked) < napAfter {
		runtime.Gosched()
		return
	}
	t := time.NewTimer(napPause)
	select {
	case <-w.woken:
	case <-t.C:
	}
	t.Stop()
}

func (w *napper) wake() {
	select {
	case w.woken <- struct{}{}:
	default:
	}
}

func (w *napper) close() error { return nil }
