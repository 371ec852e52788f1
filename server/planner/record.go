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

// Record says where the planner's events and actions are written to (package
// dualpath/record).
type Record struct {
	// To takes the lines, from one goroutine of the service's. The caller closes it
	// after Service.Close.
	To io.Writer
	// Network is what Options.Planner.Network was made of, if there is one.
	Network *netcost.PlannerOptions
	// Bytes ends the record when it has grown to so much; the planner goes on.
	// Default 1 GiB.
	Bytes int64
}

// recordLines and recordBacklog are how many lines, and bytes of them, wait to be
// written: some seconds of a busy planner. A record that falls behind by more ends:
// with a hole in it, it could not be replayed.
const (
	recordLines   = 1 << 14
	recordBacklog = 64 << 20
)

var (
	errRecordBehind = errors.New("it was written too slowly")
	errRecordFull   = errors.New("it has reached its limit of bytes")
)

// recorder writes lines while it can.
type recorder struct {
	log   *slog.Logger
	lines chan []byte
	// done is closed when the last line is written.
	done chan struct{}

	backlog atomic.Int64

	// left are the bytes that may still be recorded; nothing is after over.
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

// step records an event. It is called in the order of events, under Service.mu, and
// waits for nothing.
func (r *recorder) step(ev dualpath.Event, actions []dualpath.Action) {
	if r.over {
		return // spare the encoding
	}
	line, err := record.AppendStep(nil, ev, actions)
	if err != nil {
		r.end(err)
		return
	}
	r.put(line)
}

// put queues a line, or ends the record.
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

// end ends the record; why is nil if the service closes.
func (r *recorder) end(why error) {
	if r.over {
		return
	}
	r.over = true
	close(r.lines)
	if why != nil {
		r.log.Warn("the record of events ends here; the planner goes on", "why", why)
	}
}

// write writes the lines until there are no more. After an error they are dropped:
// step learns nothing of it, the log does.
func (r *recorder) write(to io.Writer) {
	defer close(r.done)
	w := bufio.NewWriterSize(to, 256<<10)
	failed := false
	check := func(err error) {
		if err != nil && !failed {
			failed = true
			r.log.Error("the record of events cannot be written and is cut; the planner goes on", "err", err)
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
			check(w.Flush()) // what has happened can be read while the planner runs
		}
	}
	if !failed {
		check(w.Flush())
	}
}
