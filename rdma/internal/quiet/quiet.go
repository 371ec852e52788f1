// Package quiet is a log that a peer cannot fill: at most one event of each kind
// in a second, which says how many were left out. It counts nothing for metrics.
//
//	Warn(kind) ─► one of this kind within the last second? ── yes ─► counted
//	                                                       └─ no ──► logged, with left_out
//
// Lock order: the mutex is a leaf, and is not held while something is logged.
package quiet

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// interval is how often an event of one kind is logged.
const interval = time.Second

// Log is a limited log of events of kinds K, which are few.
type Log[K comparable] struct {
	logger *slog.Logger

	mu    sync.Mutex
	kinds map[K]*kind
}

// kind is what is known of one.
type kind struct {
	last    time.Time
	leftOut int
}

// New returns a log to logger.
func New[K comparable](logger *slog.Logger) *Log[K] {
	return &Log[K]{logger: logger, kinds: make(map[K]*kind)}
}

// Warn logs or counts one event.
func (l *Log[K]) Warn(k K, msg string, args ...any) { l.log(slog.LevelWarn, k, msg, args...) }

// Info is Warn for what mends itself.
func (l *Log[K]) Info(k K, msg string, args ...any) { l.log(slog.LevelInfo, k, msg, args...) }

// Debug logs without a limit: who asks for such details wants all.
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
