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

// waiter is a method by which a poller sleeps.
type waiter interface {
	// wait sleeps until an event arrives, wake is called, or max has passed; max 0 means no
	// limit.
	wait(max time.Duration)
	wake()
	close() error
}

// newWaiter returns the waiter for a completion queue with descriptor fd. fd is negative for a
// queue without a descriptor.
func newWaiter(n *native, fd int) (waiter, error) {
	if fd < 0 {
		return &backoffWaiter{n: n, woken: make(chan struct{}, 1)}, nil
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
	// If the runtime cannot wait on the descriptor, wait would return at once, again and again.
	if err := w.file.SetReadDeadline(time.Time{}); err != nil {
		return nil, errors.Join(fmt.Errorf("the runtime cannot wait on the queue's descriptor: %w", err), w.file.Close())
	}
	w.ready = func(fd uintptr) bool {
		switch {
		case w.looked(), !n.tryWait():
			return true
		case !readable(int(fd)):
			return false
		}
		// There is an event, or the descriptor has not been reset since the last event.
		n.clear()
		return true
	}
	return w, nil
}

// fdWaiter waits in the runtime's poller, so it blocks no thread.
type fdWaiter struct {
	file *os.File
	raw  syscall.RawConn
	// ready is called when the wait begins, and again when the descriptor has become readable. At
	// the first call it checks the queue itself: the runtime reports only changes, and the
	// descriptor may already be readable.
	ready func(fd uintptr) bool
	again bool
	// asked: wake was called since the last wait returned. waiting: a wait is in progress; wake
	// ends it by a read deadline in the past.
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
	// An error means that the descriptor is closed. Read below then returns at once.
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

// backoffWaiter waits for a queue without a descriptor. For backoffAfter after the last work it
// polls without a pause. After that it polls every backoffPause. So it adds a latency of at most
// backoffPause, and the latency of the runtime's timers.
type backoffWaiter struct {
	n     *native
	woken chan struct{}
	// seen is native.taken at the last wait. worked is the time at which native.taken last
	// increased.
	seen   uint64
	worked time.Time
}

const (
	backoffAfter = time.Millisecond
	backoffPause = 50 * time.Microsecond
)

func (w *backoffWaiter) wait(time.Duration) {
	now := time.Now()
	if taken := w.n.taken.Load(); taken != w.seen {
		w.seen, w.worked = taken, now
	}
	if now.Sub(w.worked) < backoffAfter {
		runtime.Gosched()
		return
	}
	t := time.NewTimer(backoffPause)
	select {
	case <-w.woken:
	case <-t.C:
	}
	t.Stop()
}

func (w *backoffWaiter) wake() {
	select {
	case w.woken <- struct{}{}:
	default:
	}
}

func (w *backoffWaiter) close() error { return nil }
