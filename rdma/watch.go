package rdma

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// WatcherOptions set how often a Watcher polls. The zero value is usable.
type WatcherOptions struct {
	// SpinRounds is the number of consecutive rounds without a change after which the watcher
	// pauses between rounds. A round checks each word once. Default 20000, which takes some
	// milliseconds. -1: the watcher never pauses and occupies one CPU.
	SpinRounds int
	// PauseMax is the longest pause between two rounds. After an idle time, a change is reported
	// with a latency of at most PauseMax plus the latency of the timer (some 60 µs on Linux). The
	// first pause is a sixteenth of PauseMax, and each further pause is twice as long. Default 200
	// µs.
	PauseMax time.Duration
	// LockThread locks the polling goroutine to an OS thread.
	LockThread bool
}

// Watcher calls back when words in memory change. It corresponds to the Watcher of fabric-lib
// (section 3.3), by which a GPU kernel signals that a layer's pages are ready. Any device or
// goroutine may write a word. The word must be memory that this process can read, such as host
// memory that is pinned and mapped for the device.
//
// A Watcher does not replace a channel between goroutines: it does not order the writer's other
// writes. A device must therefore execute a fence before it increments the word.
//
//	GPU: kernel of layer 3 ──► fence ──► word = 3     word = 4     word = 5
//	                                       │             └──────┬──────┘
//	polling goroutine   ··round··round··round··round··round··round··
//	                                       │                    │
//	                                  f(2, 3)               f(3, 5): two steps in one
//
// One goroutine serves all words. It spins while words change, then pauses for longer and longer
// times up to PauseMax, and sleeps while there are no words.
//
// Lock order: one lock, never held while a callback runs.
type Watcher struct {
	opts WatcherOptions

	mu     sync.Mutex
	closed bool
	// words points to the watched words. The slice is copy-on-write: to add or remove a word, a new
	// slice is stored. So the polling goroutine reads it without a lock.
	words atomic.Pointer[[]*Watched]
	// wake ends a pause of the polling goroutine. A capacity of 1 is enough: an element only means
	// that a word or the watcher was added, stopped or closed since the last element was received.
	wake  chan struct{}
	ended chan struct{}
}

// Watched is one word of a Watcher.
type Watched struct {
	w    *Watcher
	word *uint64
	f    func(before, now uint64)
	last uint64 // used only by the polling goroutine
	// leaving requests a final check of the word by the polling goroutine. gone is closed after
	// that check.
	leaving atomic.Bool
	gone    chan struct{}
}

// NewWatcher starts a watcher. Close ends it.
func NewWatcher(o WatcherOptions) *Watcher {
	if o.SpinRounds == 0 {
		o.SpinRounds = 20000
	}
	if o.PauseMax <= 0 {
		o.PauseMax = 200 * time.Microsecond
	}
	w := &Watcher{opts: o, wake: make(chan struct{}, 1), ended: make(chan struct{})}
	w.words.Store(new([]*Watched))
	go w.run()
	return w
}

// Watch arranges that f(before, now) is called on the polling goroutine whenever the value of word
// has changed since the last call of f, or, before the first call, since the call of Watch. before
// is the now of the previous call. So one call may cover several steps, and no step is skipped. f
// must not block, and must not call Stop or Close. word must be 8-byte aligned and must stay
// allocated at its address until Stop has returned.
func (w *Watcher) Watch(word *uint64, f func(before, now uint64)) (*Watched, error) {
	x := &Watched{w: w, word: word, f: f, last: atomic.LoadUint64(word), gone: make(chan struct{})}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil, fmt.Errorf("rdma: watch a word: %w", ErrClosed)
	}
	words := append(slices.Clone(*w.words.Load()), x)
	w.words.Store(&words)
	w.rouse()
	return x, nil
}

// Stop ends the watch of the word. A change made before the call of Stop is reported before Stop
// returns. No change is reported after Stop has returned. Stop may be called twice.
func (x *Watched) Stop() {
	x.leaving.Store(true)
	x.w.rouse()
	<-x.gone
}

// Close stops all watches, as Stop does, and the polling goroutine. It may be
// called twice.
func (w *Watcher) Close() error {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.rouse()
	<-w.ended
	return nil
}

// rouse ends the current or the next pause.
func (w *Watcher) rouse() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// run is the polling goroutine.
func (w *Watcher) run() {
	defer close(w.ended)
	if w.opts.LockThread {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
	}
	timer := time.NewTimer(w.opts.PauseMax)
	defer timer.Stop()
	quiet, pause := 0, w.opts.PauseMax/16
	for rounds := 1; ; rounds++ {
		words := *w.words.Load()
		if w.round(words) {
			quiet, pause = 0, w.opts.PauseMax/16
		} else {
			quiet++
		}
		wait := timer.C
		switch {
		case len(words) == 0:
			wait = nil // for ever
		case w.opts.SpinRounds >= 0 && quiet >= w.opts.SpinRounds:
			timer.Reset(pause)
			pause = min(2*pause, w.opts.PauseMax)
		case rounds&63 != 0:
			continue
		default: // let other goroutines run, then check for calls of Watch, Stop and Close
			runtime.Gosched()
			select {
			case <-w.wake:
				if w.leave() {
					return
				}
			default:
			}
			continue
		}
		select {
		case <-w.wake:
			if w.leave() {
				return
			}
		case <-wait:
		}
	}
}

// round checks each word once and reports whether a word had changed.
func (w *Watcher) round(words []*Watched) bool {
	changed := false
	for _, x := range words {
		if x.look() {
			changed = true
		}
	}
	return changed
}

// look calls f if the word has changed, and reports whether it has.
func (x *Watched) look() bool {
	now := atomic.LoadUint64(x.word)
	if now == x.last {
		return false
	}
	before := x.last
	x.last = now
	x.f(before, now)
	return true
}

// leave removes the words whose watch is stopped, after a final check. It reports whether the
// watcher is closed and has no words.
func (w *Watcher) leave() bool {
	w.mu.Lock()
	closed := w.closed
	var gone, kept []*Watched
	for _, x := range *w.words.Load() {
		if closed || x.leaving.Load() {
			gone = append(gone, x)
		} else {
			kept = append(kept, x)
		}
	}
	w.words.Store(&kept)
	w.mu.Unlock()
	for _, x := range gone {
		x.look()
		close(x.gone)
	}
	return closed
}
