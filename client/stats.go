package client

import (
	"fmt"
	"sync/atomic"
)

// Stats count what a Store did since Open.
type Stats struct {
	// Matches, Reads and Writes are calls of the Store's; Busy are those that were refused for
	// lack of room.
	Matches, Reads, Writes, Busy uint64
	// ReadBytes were delivered and verified, WriteBytes sent and stored.
	ReadBytes, WriteBytes uint64
	// LostPieces did not arrive, or not as they were written. LostChecksum is
	// the share that was found here, at the last hop.
	LostPieces, LostChecksum uint64
	// Messages are calls to nodes that were made as messages over the data plane,
	// rather than over gRPC or the unix socket.
	Messages uint64
	// LocalReads are parts of Reads whose bytes were copied from the arena of a node on
	// this host.
	LocalReads uint64
	// LocalMatches are matches that went over a unix socket.
	LocalMatches uint64
	// LocalExists are calls of Exists that went over a unix socket.
	LocalExists uint64
	// LocalWrites are parts of Writes that went over a unix socket.
	LocalWrites uint64
	// RefusedPieces were offered and not stored.
	RefusedPieces uint64
	// Retries are calls tried again; Connects and SessionsLost count sessions
	// with nodes; DeadCalls were answered with a miss because the node was dead.
	Retries, Connects, SessionsLost, DeadCalls uint64
}

// String prints the counters on one line.
func (s Stats) String() string {
	return fmt.Sprintf("matches=%d reads=%d writes=%d busy=%d read_bytes=%d write_bytes=%d lost_pieces=%d lost_checksum=%d refused_pieces=%d messages=%d local_reads=%d local_matches=%d local_exists=%d local_writes=%d retries=%d connects=%d sessions_lost=%d dead_calls=%d",
		s.Matches, s.Reads, s.Writes, s.Busy, s.ReadBytes, s.WriteBytes, s.LostPieces, s.LostChecksum, s.RefusedPieces, s.Messages, s.LocalReads, s.LocalMatches, s.LocalExists, s.LocalWrites, s.Retries, s.Connects, s.SessionsLost, s.DeadCalls)
}

// counters are the live Stats.
type counters struct {
	matches, reads, writes, busy               atomic.Uint64
	readBytes, writeBytes                      atomic.Uint64
	lostPieces, lostChecksum, refusedPieces    atomic.Uint64
	messages                                   atomic.Uint64
	localReads, localMatches                   atomic.Uint64
	localExists, localWrites                   atomic.Uint64
	retries, connects, sessionsLost, deadCalls atomic.Uint64
}

// Stats returns the counters.
func (s *Store) Stats() Stats {
	c := &s.stats
	return Stats{
		Matches: c.matches.Load(), Reads: c.reads.Load(), Writes: c.writes.Load(), Busy: c.busy.Load(),
		ReadBytes: c.readBytes.Load(), WriteBytes: c.writeBytes.Load(),
		LostPieces: c.lostPieces.Load(), LostChecksum: c.lostChecksum.Load(), RefusedPieces: c.refusedPieces.Load(),
		Messages: c.messages.Load(), LocalReads: c.localReads.Load(), LocalMatches: c.localMatches.Load(), LocalExists: c.localExists.Load(), LocalWrites: c.localWrites.Load(),
		Retries: c.retries.Load(), Connects: c.connects.Load(), SessionsLost: c.sessionsLost.Load(), DeadCalls: c.deadCalls.Load(),
	}
}
