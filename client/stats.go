package client

import (
	"fmt"
	"sync/atomic"
)

// Stats are the counters of a Store since Open.
type Stats struct {
	// Matches, Reads and Writes count calls. Busy counts the calls that were refused for lack of
	// room.
	Matches, Reads, Writes, Busy uint64
	// ReadBytes is the number of bytes delivered and verified, and WriteBytes the number of bytes
	// sent and stored.
	ReadBytes, WriteBytes uint64
	// LostPieces counts pieces that did not arrive, or arrived with other bytes than were written.
	// LostChecksum counts the pieces among these whose bytes failed the client's verification.
	LostPieces, LostChecksum uint64
	// Messages counts calls to nodes that went as messages over the data plane, not over gRPC or
	// the unix socket.
	Messages uint64
	// LocalReads counts parts of Reads whose bytes were copied from the arena of a node on this
	// host.
	LocalReads uint64
	// LocalMatches counts matches that went over a unix socket.
	LocalMatches uint64
	// LocalExists counts calls of Exists that went over a unix socket.
	LocalExists uint64
	// LocalWrites counts parts of Writes that went over a unix socket.
	LocalWrites uint64
	// RefusedPieces counts pieces that were offered and not stored.
	RefusedPieces uint64
	// Retries counts repeated calls. Connects and SessionsLost count the sessions with nodes that
	// were opened and that were lost. DeadCalls counts calls whose result was a miss because the
	// node was dead.
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
