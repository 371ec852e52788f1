// Package rdma is the contract of the transfer engine, and the code that all providers share. An
// engine has registered memory into which peers write directly, small messages, and counters of
// immediates. The API is that of fabric-lib (Figure 2 of the paper) in Go.
//
// The package provides no streams, no RPC and no reliable messaging: a write names its destination
// bytes, completes or fails as a whole, and is not ordered against any other write. Engines do not
// check payloads; the owner of the bytes adds an end-to-end checksum.
//
//	   engine A                                              engine B
//	Register(mem) ─► Region                              Register(mem) ─► Region
//	     │                                                  Window(off, n) ─► Window
//	     │                    Desc (any channel, e.g. gRPC)     │
//	     │ ◄────────────────────────────────────────────────────┘
//	Write{Src: Region, Dst: Desc, Imm: 7} ══ bytes ══► straight into B's memory
//	     │                                                  │ then, and only then,
//	     │ ◄─────────── landed, or refused and why ─────────┤ immediate 7 is counted
//	  Done(err)                                          ExpectImm{7, count} ─► Done(nil)
//
// An exchange, as the storage node and its client do it:
//
//	id, err := client.Connect(ctx, serverAddr, token)   // client side
//	win, err := region.Window(off, n, id)
//	client.ExpectImm(rdma.Expect{Imm: 7, Count: 1, From: []rdma.EngineID{id}, Done: flag.Set})
//	// … win.Desc() travels to the server in a request …
//	server.Write(ctx, rdma.Write{Src: arena, Dst: desc, Len: n, Imm: rdma.ImmOf(7), Done: done})
//	err = flag.Wait(ctx)                                // client: the bytes have arrived
//	err = win.Revoke(ctx)                               // on a deadline, or at the end: no write touches the bytes any more
//
// # What is promised
//
//   - A write lands only in memory whose key its peer was given, inside the bounds
//     of that region or window, after the peer has proved that it has the token.
//   - An immediate is counted once per operation, after every byte of that
//     operation has been placed. A refused operation counts no immediate.
//   - Writes are not ordered, neither within an operation nor between operations.
//     A byte that two writes overlap has the value of either write.
//   - The source belongs to the engine until Done. Done is called exactly once for
//     each accepted operation, at the latest when the peer is declared dead or
//     the engine is closed.
//   - After Window.Revoke or Region.Close has returned nil no later remote
//     write changes those bytes.
//   - Done callbacks run on the engine's own goroutines. They must not block, must
//     not call Close, Revoke or Connect, and may submit only with NoWait. The
//     handler of Recv may block; Engine.Close waits for it.
//
// The paper counts an immediate once per page of a paged write. This package counts it once per
// operation. So a receiver does not depend on how the sender divides its pages, and a provider may
// merge adjacent pages.
//
// A provider that places payload with the CPU can report each placed range to the owner of a
// window while the bytes are in the CPU cache: LandingRegion.
//
// Two types work over any engine. Scope cancels the operations of one request, and reports when
// the sender may confirm the cancellation to the receiver. Watcher calls back when a device or
// another writer changes a word in memory.
//
// Providers: rdma/tcp, which is a separate engine, and the providers over rdma/group, which makes
// one engine of several NICs. rdmatest.Run is the conformance suite: it has a case for each
// promise above.
//
// Lock order: ImmCounters, Scope and Watcher have one lock each. No lock is held while a callback
// runs.
package rdma
