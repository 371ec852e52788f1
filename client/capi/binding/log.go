package binding

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
)

// logLines is the largest number of lines that wait for a slow callback. Further lines are dropped
// and counted.
const logLines = 256

// logQueue passes log lines to a callback on a goroutine of its own. A call of the library must not
// wait for the callback, because the callback may wait for a lock of the interpreter that the
// caller of the library holds.
type logQueue struct {
	level   slog.Level
	lines   chan logLine
	dropped atomic.Uint64
	ended   sync.WaitGroup

	mu     sync.Mutex
	closed bool
}

type logLine struct {
	level slog.Level
	text  string
}

// newLogQueue returns a queue that passes lines to callback. If callback is nil, the
// queue discards them.
func newLogQueue(callback func(slog.Level, string), level slog.Level) *logQueue {
	q := &logQueue{level: level}
	if callback == nil {
		return q
	}
	q.lines = make(chan logLine, logLines)
	q.ended.Go(func() {
		for l := range q.lines {
			callback(l.level, l.text)
		}
	})
	return q
}

// close passes the waiting lines to the callback and returns after its last call.
func (q *logQueue) close() {
	q.mu.Lock()
	if !q.closed && q.lines != nil {
		close(q.lines)
	}
	q.closed = true
	q.mu.Unlock()
	q.ended.Wait()
}

func (q *logQueue) put(l logLine) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	select {
	case q.lines <- l:
	default:
		q.dropped.Add(1)
	}
}

// logger returns a logger that writes to the queue.
func (q *logQueue) logger() *slog.Logger {
	if q.lines == nil {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(logHandler{queue: q, text: newText})
}

// newText returns a handler that writes records without time and level. The callback
// receives the level as an argument, and has its own clock.
func newText(w io.Writer) slog.Handler {
	return slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if len(groups) == 0 && (a.Key == slog.TimeKey || a.Key == slog.LevelKey) {
			return slog.Attr{}
		}
		return a
	}})
}

// logHandler is a slog.Handler that puts lines into a queue.
type logHandler struct {
	queue *logQueue
	text  func(io.Writer) slog.Handler
}

var _ slog.Handler = logHandler{}

// Enabled implements slog.Handler.
func (h logHandler) Enabled(_ context.Context, l slog.Level) bool { return l >= h.queue.level }

// Handle implements slog.Handler.
func (h logHandler) Handle(ctx context.Context, r slog.Record) error {
	var b bytes.Buffer
	if err := h.text(&b).Handle(ctx, r); err != nil {
		return err
	}
	h.queue.put(logLine{r.Level, strings.TrimSuffix(b.String(), "\n")})
	return nil
}

// WithAttrs implements slog.Handler.
func (h logHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return logHandler{h.queue, func(w io.Writer) slog.Handler { return h.text(w).WithAttrs(attrs) }}
}

// WithGroup implements slog.Handler.
func (h logHandler) WithGroup(name string) slog.Handler {
	return logHandler{h.queue, func(w io.Writer) slog.Handler { return h.text(w).WithGroup(name) }}
}
