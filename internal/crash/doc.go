// Package crash holds the tests that run the real binary into the ground: the
// kill -9 loop, the full disk, power cuts and drives that fail. There is nothing
// to import.
//
// The loop runs the node as a child process, writes and reads through the real
// client under mixed load, kills the node at a random operation, starts it again
// over the same directory, and judges every byte it ever gets back.
//
//	round:  serve ─► ready ─► read back what was acknowledged ─► writers, readers ─► kill -9
//	          ▲                                                                        │
//	          └────────────────────── the same directory ◄─────────────────────────────┘
//
// Two directories take turns: a roomy one with durability sync, in which nothing
// acknowledged may ever be missing, and a small one with durability batch, which
// evicts all the time and in which only the bytes are judged.
//
// A second loop kills the node in the middle of draining and removing one of three
// volumes after another, beside writes, deletions and epoch bumps, and replaces each
// removed volume by an empty directory. It kills once where the first kills five times.
//
//	PENSTOCK_CRASH_ROUNDS=200 go test -count=1 -v ./internal/crash
//
// Power cuts and drives that fail need block devices that may be overwritten and
// a device mapper. Both are in the guest of make test-disks (internal/rdmalab);
// elsewhere these tests skip. A power cut is a prefix of what dm-log-writes has
// recorded below two file systems; the failing drives are dm-error, dm-flakey and
// dm-delay under one of two volumes.
//
//	make test-disks POWER_CUTS=1000
package crash
