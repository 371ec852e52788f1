// Package ratelog is a rate-limited log, so that a peer cannot fill the log: it logs at most one
// event of each kind per second, with the number of events of that kind that it left out since the
// last logged event. It is not a source of metrics.
//
//	Warn(kind) ─► one of this kind within the last second? ── yes ─► counted
//	                                                       └─ no ──► logged, with left_out
//
// Lock order: the mutex is a leaf, and is not held while something is logged.
package ratelog

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// interval is the shortest time between two logged events of one kind.
const interval = time.Second

// Log is a rate-limited log of events. K is the type of an event's kind; there must be only a few
// kinds.
type Log[K comparable] struct {
	logger *slog.Logger

	mu    sync.Mutex
	kinds map[K]*kind
}

// kind is the state of one kind of event.
type kind struct {
	last    time.Time
	leftOut int
}

// New returns a log that writes to logger.
func New[K comparable](logger *slog.Logger) *Log[K] {
	return &Log[K]{logger: logger, kinds: make(map[K]*kind)}
}

// Warn logs an event of kind k, or counts it as left out.
func (l *Log[K]) Warn(k K, msg string, args ...any) { l.log(slog.LevelWarn, k, msg, args...) }

// Info is Warn for events that need no action.
func (l *Log[K]) Info(k K, msg string, args ...any) { l.log(slog.LevelInfo, k, msg, args...) }

// Debug logs without a limit.
func (l *Log[K]) Debug(msg string, args ...any) { l.logger.Debug(msg, args...) }

func (l *Log[K]) log(level slog.Level, of K, msg string, args ...any) {
	now := time.Now()
	l.mu.Lock()
	k := l.kinds[of]
	if k == nil {
		k = &kind{}
		l.kinds[of] = k
	}
	if now.Sub(k.last) < interval {
		k.leftOut++
		l.mu.Unlock()
		return
	}
	n := k.leftOut
	*k = kind{last: now}
	l.mu.Unlock()
	if n > 0 {
		args = append(args, "left_out", n)
	}
	l.logger.Log(context.Background(), level, msg, args...)
}
