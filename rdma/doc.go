// Package rdma is the contract of the transfer engine, and the parts of it that
// every provider shares: registered memory that peers write into directly,
// small messages, and counting of immediates. It is the API of fabric-lib
// (Figure 2 of the paper) in Go.
//
// It is not a stream, not an RPC system and not reliable messaging: a write
// names its destination bytes, completes or fails as a whole, and is not
// ordered against any other write. It does not check payloads; whoever owns the
// bytes carries a checksum end to end.
//
//	   engine A                                              engine B
//	Register(mem) ─► Region                              Register(mem) ─► Region
//	     │                                                  Window(off, n) ─► Window
//	     │                    Desc (by any road, e.g. gRPC)     │
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
//	err = flag.Wait(ctx)                                // client: the bytes are there
//	err = win.Revoke(ctx)                               // on a deadline, or at the end: nothing touches them now
//
// # What is promised
//
//   - A write lands only in memory whose key its peer was given, inside the
//     bounds of that region or window, after the peer proved the token.
//   - An immediate is counted once per operation, after every byte of that
//     operation is in place. An operation that was refused counts nothing.
//   - Writes are not ordered, within an operation or between operations.
//     Overlapping destinations end up with the bytes of either.
//   - The source is the engine's until Done; Done is called exactly once for
//     each operation that was accepted, at the latest when the peer is declared
//     dead or the engine is closed.
//   - After Window.Revoke or Region.Close has returned nil no later remote
//     write changes those bytes.
//   - Done callbacks run on the engine's own goroutines. They must not block,
//     must not call Close, Revoke or Connect, and submit only with NoWait.
//     The handler of Recv may block; Engine.Close waits for it.
//
// The paper counts an immediate once for each page of a paged write; here it is
// once for each operation, so that a receiver need not know how a sender cuts
// its pages, and a provider is free to merge neighbours.
//
// A provider whose own goroutines place the payload tells the owner of a window, if
// he asks, what lands while it is in the cache: LandingRegion.
//
// Beside the engine, and over any: Scope cancels what was submitted for one
// request such that the receiver may be told, and Watcher calls back when a
// device, or anyone, changes a word in memory.
//
// Providers: rdma/tcp, an engine of its own, and those over rdma/group, which
// makes an engine of NICs. rdmatest.Run is the conformance suite: each promise
// above is a case there.
//
// Lock order: ImmCounters, Scope and Watcher have one lock each, never held while
// a callback runs.
package rdma
