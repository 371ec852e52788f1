package tcp

import (
	"net"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// Sizes of a connection's buffers and batches.
const (
	// readAhead is the size of a reader's buffer for small frames. If directBytes or more of a
	// frame are missing, they are read into their destination. Fewer bytes are read into the
	// buffer and copied, because a system call costs more than that copy.
	readAhead   = 32 << 10
	directBytes = 16 << 10
	// scatterRuns is the largest number of destinations of one read.
	scatterRuns = 256
	// landingBytes is the largest read into a window whose owner is notified of landed bytes.
	// These bytes and their source then stay in a core's second-level cache until the owner has
	// processed them.
	landingBytes = 128 << 10
	// spliceBytes is the smallest run that is spliced. Splicing needs three system calls, and a
	// copy shares one with other runs. Pages of this size are faster with splice
	// (docs/benchmarks.md).
	spliceBytes = 64 << 10
	// A batch is one writev. It ends at batchFrames frames or with the frame that reaches
	// batchBytes. The kernel takes at most 1024 vectors per call; net.Buffers makes further
	// calls. While other connections could use the frames, a connection takes fewer, down to
	// shareBytes.
	batchFrames = 64
	batchBytes  = 1 << 20
	shareBytes  = 64 << 10
)

// down reports that this side has closed a generation of a rail.
type down struct{ rail, generation uint32 }

// conn is one connection of a rail, in one of its lanes.
type conn struct {
	s         *session
	nc        net.Conn
	nic       *nic // the local NIC
	laneIndex int
	// rail, generation and lane are set by rail.attach.
	rail       *rail
	generation uint32
	lane       *lane
	// control: the connection takes no frames from its lane (rail.controlConn).
	control bool
	// rx and tx count reads and writes that moved bytes, for the watch.
	rx, tx atomic.Uint64
	// wake has an element while the writer has work. gone is closed when the rail is taken down.
	wake    chan struct{}
	gone    chan struct{}
	silence sessions.Silence

	// Guarded by the session's mu. parked is set while the writer waits for the lane. woken is
	// set from the lane's wake-up until the writer has looked at the queue. acks, downs and beat
	// wait to be written on this connection.
	parked, woken bool
	acks          []ack
	downs         []down
	beat          bool
	// ackTimer is the timer for delayed acks. ackTimerOn is set while it runs.
	ackTimer   *time.Timer
	ackTimerOn bool

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
	// large marks the vectors that may be spliced, and runs counts them. splicer is nil if
	// splicing is not possible.
	large   []bool
	runs    int
	splicer *splicer
	ended   []sessions.Ended
}

// readerState belongs to the reader goroutine.
type readerState struct {
	buf        []byte
	start, end int // buf[start:end] is read ahead
	// exact keeps the read of the next header from reading payload. It is set after a large
	// frame, because another is likely.
	exact bool
	spans []span
	// into is the destination of the payload that is being read. scatter, if not nil, reads into
	// several destinations with one call.
	into    [][]byte
	few     [][]byte // the beginning of into, for one read
	scatter *scatter
	// resets checks for a reset after payload that the peer may have spliced.
	resets *resetProbe
	ended  []sessions.Ended
}

// newConn returns a connection of s from a local NIC, for the given lane.
func newConn(s *session, nc net.Conn, n *nic, lane int) *conn {
	c := &conn{
		s: s, nc: nc, nic: n, laneIndex: lane, wake: make(chan struct{}, 1), gone: make(chan struct{}),
		w: writerState{splicer: newSplicer(nc, s.e.pipes)},
		r: readerState{buf: make([]byte, readAhead), scatter: newScatter(nc), resets: newResetProbe(nc)},
	}
	c.ackTimer = time.AfterFunc(ackWait, c.flushLate)
	c.ackTimer.Stop()
	return c
}

// signal wakes the writer.
func (c *conn) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// interrupt makes a blocked read return. The caller holds the lock of a window that c is
// inside.
func (c *conn) interrupt() { _ = c.nc.SetReadDeadline(time.Unix(1, 0)) }

// close closes the connection. If local operations are unacked, it drops the unsent data of a
// socket that may refer to a source, because the source is returned to its owner when they end.
func (c *conn) close(unacked bool) {
	if unacked && c.w.splicer != nil {
		c.w.splicer.discard()
	}
	c.ackTimer.Stop()
	_ = c.nc.Close()
}
