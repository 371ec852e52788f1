package sessions

import (
	"sync/atomic"

	"github.com/penstock-kv/penstock/rdma"
)

// Counters count the events of an engine since its start. The zero value is ready. Fields may
// be incremented concurrently.
type Counters struct {
	WritesOut, WriteBytesOut, WriteFailuresOut    atomic.Uint64
	WritesIn, WriteBytesIn                        atomic.Uint64
	SendsOut, SendFailuresOut, SendsIn            atomic.Uint64
	RefusedIn                                     [rdma.ReasonNoBuffer + 1]atomic.Uint64
	DrainedBytesIn, AuthFailures, MalformedFrames atomic.Uint64
	SessionsOpened, SessionsClosed, PeersTimedOut atomic.Uint64
}

// SendEnded counts a local message that ended with err.
func (c *Counters) SendEnded(err error) {
	if err != nil {
		c.SendFailuresOut.Add(1)
		return
	}
	c.SendsOut.Add(1)
}

// WriteEnded counts a local write of n bytes that ended with err. The bytes of a failed write
// are not counted.
func (c *Counters) WriteEnded(n uint64, err error) {
	if err != nil {
		c.WriteFailuresOut.Add(1)
		return
	}
	c.WritesOut.Add(1)
	c.WriteBytesOut.Add(n)
}

// Stats returns the counters, the counts of immediates in imms, and the sum of the operations in
// flight to peers.
func (c *Counters) Stats(imms *rdma.ImmCounters, peers []rdma.Peer) rdma.Stats {
	st := rdma.Stats{
		WritesOut: c.WritesOut.Load(), WriteBytesOut: c.WriteBytesOut.Load(), WriteFailuresOut: c.WriteFailuresOut.Load(),
		WritesIn: c.WritesIn.Load(), WriteBytesIn: c.WriteBytesIn.Load(),
		SendsOut: c.SendsOut.Load(), SendFailuresOut: c.SendFailuresOut.Load(), SendsIn: c.SendsIn.Load(),
		DrainedBytesIn: c.DrainedBytesIn.Load(), AuthFailures: c.AuthFailures.Load(), MalformedFrames: c.MalformedFrames.Load(),
		SessionsOpened: c.SessionsOpened.Load(), SessionsClosed: c.SessionsClosed.Load(), PeersTimedOut: c.PeersTimedOut.Load(),
	}
	for i := range c.RefusedIn {
		st.RefusedIn[i] = c.RefusedIn[i].Load()
	}
	st.ImmediatesIn, st.ImmediatesDropped = imms.Stats()
	for _, p := range peers {
		st.InFlightOps += int64(p.InFlightOps)
		st.InFlightBytes += p.InFlightBytes
	}
	return st
}
