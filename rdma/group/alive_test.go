package group

import (
	"testing"

	"github.com/penstock-kv/penstock/rdma"
)

// TestAlive: Connect returns no session that has begun to end, although the session is in the table of peers for a moment longer.
func TestAlive(t *testing.T) {
	var e Engine
	s := &session{peer: rdma.EngineID{1}}
	e.peers.Put(s.key(), s)
	if !e.alive(s.peer) {
		t.Error("a live session is not found")
	}
	s.why = rdma.ErrPeerDied
	if e.alive(s.peer) {
		t.Error("a session that has begun to end is alive")
	}
}
