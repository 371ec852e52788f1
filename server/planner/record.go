package planner

import (
	"bufio"
	"errors"
	"io"
	"log/slog"
	"sync/atomic"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/dualpath/netcost"
	"github.com/penstock-kv/penstock/dualpath/record"
)

// Record is the destination of the planner's events and actions (package dualpath/record).
type Record struct {
	// To receives the lines, from one goroutine. The caller closes it after Service.Close.
	To io.Writer
	// Network has the options of Options.Planner.Network, if that is set.
	Network *netcost.PlannerOptions
	// Bytes is the largest size of the record. When it is reached, the record ends and the planner
	// continues. Default 1 GiB.
	Bytes int64
}

// recordLines and recordBacklog are the largest numbers of lines and of bytes that wait to be
// written: some seconds of a busy planner. If more would wait, the record ends, because a record
// with a gap cannot be replayed.
const (
	recordLines   = 1 << 14
	recordBacklog = 64 << 20
)

var (
	errRecordBehind = errors.New("the destination is too slow")
	errRecordFull   = errors.New("the limit of bytes is reached")
)

// recorder writes the lines of a record.
type recorder struct {
	log   *slog.Logger
	lines chan []byte
	// done is closed when the last line is written.
	done chan struct{}

	backlog atomic.Int64

	// left is the number of bytes that may still be recorded. over is set when the record has
	// ended; then no line is recorded.
	left int64
	over bool
}

// newRecorder starts a record with its header.
func newRecorder(r *Record, opts dualpath.Options, log *slog.Logger) (*recorder, error) {
	head, err := record.AppendHeader(nil, record.Header{Options: opts, Network: r.Network})
	if err != nil {
		return nil, err
	}
	limit := r.Bytes
	if limit == 0 {
		limit = 1 << 30
	}
	rec := &recorder{log: log, lines: make(chan []byte, recordLines), done: make(chan struct{}), left: limit}
	rec.put(head)
	go rec.write(r.To)
	return rec, nil
}

// step records an event. It is called in the order of the events, under Service.mu, and does not
// block.
func (r *recorder) step(ev dualpath.Event, actions []dualpath.Action) {
	if r.over {
		return // avoids the encoding
	}
	line, err := record.AppendStep(nil, ev, actions)
	if err != nil {
		r.end(err)
		return
	}
	r.put(line)
}

// put queues a line. If the queue or the record is full, put ends the record.
func (r *recorder) put(line []byte) {
	if r.over {
		return
	}
	n := int64(len(line))
	if n > r.left {
		r.end(errRecordFull)
		return
	}
	if r.backlog.Load()+n > recordBacklog {
		r.end(errRecordBehind)
		return
	}
	r.backlog.Add(n)
	select {
	case r.lines <- line:
		r.left -= n
	default:
		r.end(errRecordBehind)
	}
}

// end ends the record. why is the reason, nil when the service closes.
func (r *recorder) end(why error) {
	if r.over {
		return
	}
	r.over = true
	close(r.lines)
	if why != nil {
		r.log.Warn("the record of events has ended; the planner continues without it", "why", why)
	}
}

// write writes the lines until the channel is closed. After an error it logs the error and drops
// the remaining lines.
func (r *recorder) write(to io.Writer) {
	defer close(r.done)
	w := bufio.NewWriterSize(to, 256<<10)
	failed := false
	check := func(err error) {
		if err != nil && !failed {
			failed = true
			r.log.Error("the record of events ends, because it cannot be written; the planner continues without it", "err", err)
		}
	}
	for line := range r.lines {
		r.backlog.Add(-int64(len(line)))
		if failed {
			continue
		}
		_, err := w.Write(line)
		check(err)
		if len(r.lines) == 0 {
			check(w.Flush()) // the record is readable while the planner runs
		}
	}
	if !failed {
		check(w.Flush())
	}
}
