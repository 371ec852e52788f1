// Package simrdma is a fabric of NICs in memory: every NIC is a group.Domain,
// and what lies between them delays, reorders, repeats and loses as its seed
// says. Tests of everything above group.Domain run on it, thousands of networks
// a minute.
//
// It is not a model of performance (bytes take no time unless Delay says so) and
// not a transport between processes.
//
//	f := simrdma.NewFabric(seed, simrdma.FabricOptions{Delay: simrdma.Span{Min: time.Microsecond, Max: time.Millisecond}})
//	a, err := f.Open(simrdma.NICOptions{Host: "a", Name: "a0", Ordered: true})
//	b, err := f.Open(simrdma.NICOptions{Host: "b", Name: "b0", Ordered: true})
//	…
//	f.KillNIC("b0")
//	if v := f.Violations(); len(v) > 0 { … }       what the user of the domains did against the rules
//
// # What a Work goes through
//
//	 sender's NIC                                      target's NIC
//	Post ──delay──► admit: key, bounds ──delay──► piece 2 placed ─┐
//	  │                 │                 ──delay──► piece 1 placed ─┤  again, if repeated
//	  │                 │                 ──delay──► piece 3 placed ─┤
//	  │                 └─ refused ──┐                                ▼
//	  │                              │      all in place (Ordered: and all posted before)
//	  │                              │               KindImmediate, KindMessage: once
//	KindDone ◄──────────delay────────┴────────────────────────────────┘
//
// # Fault model
//
// The fabric does its worst inside what group.Domain leaves open, and nothing
// beyond:
//
//   - Pieces of one payload, payloads, completions, messages and (where a NIC is
//     not Ordered) immediates overtake each other. A completion of the sender says
//     nothing about those of other Works.
//   - A piece may be placed twice, as long as its Work has not been delivered; a
//     repetition that comes later is recognised and dropped, its immediate with it.
//   - A Work whose sender's endpoint has ended may still be on the wire with its
//     payload, and land, and count, until the target's endpoint is shut: a ghost.
//     The Works of an Ordered endpoint that do so are the first of those in flight.
//   - A Work may be in place, and its immediate counted, although its sender is told
//     StatusBroken.
//   - A link that is cut loses all packets; who posts learns of it after
//     RetryTimeout, who does not post, never.
//   - A NIC that dies hands out what had arrived before, then errors; whether what
//     it had in flight completes with StatusBroken, or is never heard of, depends on
//     the seed. The other end learns of it as of a cut link.
//   - A host that dies takes its NICs with it, and its control connections fall
//     silent; nobody is told.
//   - Where CloseIsFinal is false, Works that were admitted go on landing in closed
//     memory: it must outlive its endpoints.
//
// # Seeds and time
//
// What happens to a Work is drawn from the fabric's seed, the NIC's name, the
// number of the endpoint on its NIC and the number of the Work on its endpoint, so
// that what one goroutine does shifts nobody else's luck: the same posts meet the
// same fate. Which goroutine of the program runs first is the scheduler's.
//
//	go test ./rdma/rdmatest/simrdma -run 'TestSeeds|TestLedger' -sim.seeds=10000
//
// runs the conformance suite of the engine, and random stories that a ledger
// judges, on as many networks; one that fails prints the command for it alone.
//
// Time is the time package's: in a testing/synctest bubble it is virtual. A fabric
// belongs to the bubble that made it. It has no goroutine of its own: a timer runs
// what is due.
//
// Lock order: Fabric.mu is the only lock. Payload is copied under it, so that Shut
// and Memory.Close, which take it, are final.
package simrdma
