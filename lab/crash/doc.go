// Package crash tests the real binary under kill -9, a full disk, power cuts and
// failing drives. It exports nothing.
//
// The loop runs the node as a child process, writes and reads through the real client under mixed
// load, kills the node at a random operation, starts it again over the same directory, and compares
// every byte that it reads with the expected one.
//
//	round:  serve ─► ready ─► read every acknowledged block ───► writers, readers ─► kill -9
//	          ▲                                                                        │
//	          └────────────────────── the same directory ◄─────────────────────────────┘
//
// The rounds alternate between two directories. The large one has durability sync: no
// acknowledged block may be missing. The small one has durability batch and evicts all
// the time: blocks may be missing, but no byte may be wrong.
//
// A second loop kills the node while it drains or removes one of three volumes, each in turn,
// during writes, deletions and epoch bumps. It replaces each removed volume by an empty
// directory. The first loop has five times as many kills as the second.
//
//	PENSTOCK_CRASH_ROUNDS=200 go test -count=1 -v ./lab/crash
//
// The tests of power cuts and failing drives need block devices that they may overwrite
// and a device mapper. The guest of make test-disks (lab/rdmalab) has both; outside
// it these tests skip. A power cut is simulated by replaying a prefix of the writes that
// dm-log-writes has recorded below two file systems. A failing drive is dm-error,
// dm-flakey or dm-delay under one of two volumes.
//
//	make test-disks POWER_CUTS=1000
package crash
