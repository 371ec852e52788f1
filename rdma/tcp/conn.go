package tcp

import (
	"net"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/rdma/internal/sessions"
)

// Sizes of a connection's buffers and batches.
const (
	// readAhead is the size of a reader's buffer for small frames, in bytes. If directBytes or more
	// of a frame are not in the buffer yet, they are read directly into their destination. If fewer
	// are not in the buffer, they are read into the buffer and copied, because that copy costs less
	// than a system call.
	readAhead   = 32 << 10
	directBytes = 16 << 10
	// scatterRuns is the largest number of destinations of one read call.
	scatterRuns = 256
	// landingBytes is the largest read into a window whose owner is notified of landed bytes. At
	// this size the bytes and their source stay in a core's second-level cache until the owner has
	// processed the bytes.
	landingBytes = 128 << 10
	// spliceBytes is the size in bytes from which a run (a contiguous part of a write) is spliced.
	// Splicing needs three system calls for each run, while copied runs share one. From 64 KiB on,
	// splicing is faster (docs/benchmarks.md).
	spliceBytes = 64 << 10
	// A batch is one writev. It ends at batchFrames frames or with the frame that reaches
	// batchBytes. The kernel takes at most 1024 vectors per call; net.Buffers makes further calls.
	// While other connections are waiting for frames, a connection takes a smaller batch, at least
	// shareBytes.
	batchFrames = 64
	batchBytes  = 1 << 20
	shareBytes  = 64 << 10
)

// down reports that this engine has closed a generation of a rail (the connections between two
// NICs).
type down struct{ rail, generation uint32 }

// conn is one connection of a rail. It carries the traffic of one of the rail's lanes (one for
// each traffic class, or one for all).
type conn struct {
	s         *session
	nc        net.Conn
	nic       *nic // the local NIC
	laneIndex int
	// rail, generation and lane are set by rail.attach.
	rail       *rail
	generation uint32
	lane       *lane
	// control: the connection carries messages and acks, and takes no frames from its lane
	// (rail.controlConn).
	control bool
	// rx and tx are the numbers of reads and writes that moved bytes, for the watch goroutine.
	rx, tx atomic.Uint64
	// wake has an element while the writer has work. gone is closed when the rail is taken down.
	wake    chan struct{}
	gone    chan struct{}
	silence sessions.Silence

	// Guarded by the session's mu. parked: the writer waits for the lane. woken: the lane has
	// woken the writer, and the writer has not looked at the queue yet. acks, downs and beat (a
	// heartbeat) wait to be written on this connection.
	parked, woken bool
	acks          []ack
	downs         []down
	beat          bool
	// ackTimer is the timer for delayed acks. ackTimerOn: the timer is running.
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
	vec   net.Buffers // the vectors of the batch; out is the copy of this slice that WriteTo consumes
	out   net.Buffers
	// large marks the vectors that may be spliced, and runs is their number. splicer is nil if
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
	// exact: the read of the next header must not read payload into buf. It is set after a large
	// frame, because the next frame is likely to be large too.
	exact bool
	spans []span
	// into is the destination of the payload that is being read. scatter, if not nil, reads into
	// several destinations with one call.
	into    [][]byte
	few     [][]byte // the beginning of into, for one read
	scatter *scatter
	// resets reports whether the peer has reset the connection. It is checked after payload that
	// the peer may have spliced.
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

// interrupt makes a blocked read return. The caller holds the lock of a window into which c is
// reading payload.
func (c *conn) interrupt() { _ = c.nc.SetReadDeadline(time.Unix(1, 0)) }

// close closes the connection. If unacked is set (local operations have no ack yet) and the
// connection splices, close first drops the socket's unsent data. That data may refer to the
// operations' sources, which are returned to their owners when the operations end.
func (c *conn) close(unacked bool) {
	if unacked && c.w.splicer != nil {
		c.w.splicer.discard()
	}
	c.ackTimer.Stop()
	_ = c.nc.Close()
}
