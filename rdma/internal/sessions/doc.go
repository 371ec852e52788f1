// Package sessions holds the parts of a session that do not depend on how a
// provider moves bytes. It is not a session: rdma/tcp and rdma/group each have
// their own, with sockets or with endpoints.
//
//	tcp.Engine ───┐                     ┌─► Stats ─► rdma.Stats
//	              ├─► Counters: events ─┤
//	group.Engine ─┘                     └─◄ gauges: rdma.Peers, rdma.ImmCounters
//
// Lock order: Counters are atomic and take no lock. Stats takes the mutex of the
// rdma.ImmCounters, which is a leaf. The caller of Stats may hold no lock of a
// session, as its list of peers takes each session's.
package sessions
