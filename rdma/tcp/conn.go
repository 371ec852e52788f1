package tcp

import (
	"net"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// Sizes of a connection's buffers and batches.
const (
	// readAhead is how much a reader takes at once when frames are small. What is
	// left of a frame is read into place while that is directBytes or more, and
	// copied from the read-ahead below: there a system call costs more than the
	// copy.
	readAhead   = 32 << 10
	directBytes = 16 << 10
	// scatterRuns is into how many places of a frame one system call reads.
	scatterRuns = 256
	// landingBytes is how much one system call reads into a window whose owner is
	// told what lands: with what it was copied from it stays in a core's second
	// cache until it has been looked at.
	landingBytes = 128 << 10
	// spliceBytes is the smallest run that is spliced, with three system calls where a
	// copy has a share of one: pages of this size gain by it (docs/benchmarks.md).
	spliceBytes = 64 << 10
	// A batch, one writev, ends at batchFrames frames or with the frame that
	// brings it to batchBytes. The kernel takes at most 1024 vectors at once;
	// net.Buffers goes on after that.
	// A connection takes less, down to shareBytes, while others could use it.
	batchFrames = 64
	batchBytes  = 1 << 20
	shareBytes  = 64 << 10
)

// down says that nothing is left of a generation of a rail on our side.
type down struct{ rail, generation uint32 }

// conn is one connection of a rail, in one of its lanes.
type conn struct {
	s         *session
	nc        net.Conn
	nic       *nic // ours
	laneIndex int
	// rail, generation and lane are set by rail.attach.
	rail       *rail
	generation uint32
	lane       *lane
	// control: it takes nothing from its lane (rail.controlConn).
	control bool
	// rx and tx count progress, for the watch: reads and writes that moved
	// something.
	rx, tx atomic.Uint64
	// wake has an element while the writer has something to look at; gone is
	// closed when the rail is taken down.
	wake    chan struct{}
	gone    chan struct{}
	silence sessions.Silence

	// Guarded by the session's mu: parked is set while the writer waits and the
	// lane may wake it, woken while it has been woken by the lane and has not
	// looked. The rest waits to be written on this connection.
	parked, woken bool
	acks          []ack
	downs         []down
	beat          bool
	// latest is the timer that ends the waiting of acks; late says that it runs.
	latest *time.Timer
	late   bool

	w writerState
	r readerState
}

// writerState belongs to the writer goroutine.
type writerState struct {
	batch []frame
	acks  []ack
	downs []down
	beat  bool
	meta  []byte      // headers, tables and acks of the batch
	vec   net.Buffers // the batch; out is vec while WriteTo consumes it
	out   net.Buffers
	// large marks the runs among vec that may be spliced; runs counts them. splicer
	// is nil if none may.
	large   []bool
	runs    int
	splicer *splicer
	ended   []sessions.Ended
}

// readerState belongs to the reader goroutine.
type readerState struct {
	buf        []byte
	start, end int // buf[start:end] is read ahead
	// exact keeps the next header's read from running into its payload: set
	// after a large frame, as another is likely.
	exact bool
	spans []span
	// into is where the payload of the frame goes that is landing; scatter, unless
	// nil, reads into several places at once.
	into    [][]byte
	few     [][]byte // the beginning of into, for one read
	scatter *scatter
	// resets is asked behind payload that the peer may have spliced.
	resets *resetProbe
	ended  []sessions.Ended
}

// newConn returns a connection of s from one of our NICs, for the given lane.
func newConn(s *session, nc net.Conn, n *nic, lane int) *conn {
	c := &conn{
		s: s, nc: nc, nic: n, laneIndex: lane, wake: make(chan struct{}, 1), gone: make(chan struct{}),
		w: writerState{splicer: newSplicer(nc, s.e.pipes)},
		r: readerState{buf: make([]byte, readAhead), scatter: newScatter(nc), resets: newResetProbe(nc)},
	}
	c.latest = time.AfterFunc(ackWait, c.flushLate)
	c.latest.Stop()
	return c
}

// signal wakes the writer.
func (c *conn) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// interrupt makes a read that waits for bytes return; the caller holds the lock
// of a window that c is inside of.
func (c *conn) interrupt() { _ = c.nc.SetReadDeadline(time.Unix(1, 0)) }

// hangUp closes the connection. With unacked operations of ours, what its socket has not
// sent is dropped where it may refer to a source: the owner gets that back when they end.
func (c *conn) hangUp(unacked bool) {
	if unacked && c.w.splicer != nil {
		c.w.splicer.discard()
	}
	c.latest.Stop()
	_ = c.nc.Close()
}
