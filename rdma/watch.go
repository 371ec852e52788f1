package rdma

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// WatcherOptions say how eagerly a Watcher looks. The zero value works.
type WatcherOptions struct {
	// SpinRounds is how many rounds over all words in a row find nothing before
	// the watcher pauses between rounds. Default 20000, some milliseconds. -1
	// never pauses: one CPU is the watcher's.
	SpinRounds int
	// PauseMax is the longest pause, and so the worst latency of the first change
	// after silence, apart from what the timer adds (some 60 µs on Linux). The
	// pause begins at a sixteenth of it and doubles. Default 200 µs.
	PauseMax time.Duration
	// LockThread gives the polling goroutine a thread of its own.
	LockThread bool
}

// Watcher calls back when words in memory change: the Watcher of fabric-lib
// (section 3.3), which a GPU kernel uses to tell that a layer's pages are ready.
// A word may be written by a device or by anyone; it must be memory that this
// process can read, such as host memory that is pinned and mapped for the device.
//
// It is no substitute for a channel between goroutines, and does not order what
// else the writer wrote: a device must fence before it increments.
//
//	GPU: kernel of layer 3 ──► fence ──► word = 3     word = 4     word = 5
//	                                       │             └──────┬──────┘
//	polling goroutine   ··round··round··round··round··round··round··
//	                                       │                    │
//	                                  f(2, 3)               f(3, 5): two steps in one
//
// One goroutine serves all words. It spins while there is something to see, then
// pauses longer and longer up to PauseMax, and sleeps while there are no words.
//
// Lock order: one lock, never held while a callback runs.
type Watcher struct {
	opts WatcherOptions

	mu     sync.Mutex
	closed bool
	// words is replaced, never changed, so that a round needs no lock.
	words atomic.Pointer[[]*Watched]
	// wake ends a pause; its one place means that something has changed.
	wake  chan struct{}
	ended chan struct{}
}

// Watched is one word of a Watcher.
type Watched struct {
	w    *Watcher
	word *uint64
	f    func(before, now uint64)
	last uint64 // the polling goroutine's
	// leaving asks the polling goroutine for a last look; gone is closed after it.
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

// Watch calls f(before, now) on the polling goroutine whenever word is found to
// differ from what it was at the last call, at first from what it is now. Calls
// follow each other without a gap: before is the now of the call before, so that
// steps that were missed are a range. f must not block, and must not call Stop or
// Close. word is 8-byte aligned and stays where it is until Stop has returned.
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

// Stop ends the watch of the word. A change made before Stop is called is told
// before it returns, and none after. It may be called twice.
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

// rouse ends the current pause, or the next.
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
		default: // lets others run, and looks at what they ask
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

// round looks at each word once and reports whether one had changed.
func (w *Watcher) round(words []*Watched) bool {
	changed := false
	for _, x := range words {
		if x.look() {
			changed = true
		}
	}
	return changed
}

// look tells of a change, if there is one.
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

// leave takes out the words that are to be left, after a last look, and reports
// whether the watcher is closed and has none.
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
