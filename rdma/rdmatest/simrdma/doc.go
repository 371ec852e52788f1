// Package simrdma is an in-memory fabric of NICs. Every NIC is a group.Domain. The fabric delays,
// reorders, repeats and loses packets; its seed determines which. Tests of all code above
// group.Domain run on it, on thousands of networks per minute.
//
// It does not model performance (bytes take no time unless Delay is set) and does not connect
// processes.
//
//	f := simrdma.NewFabric(seed, simrdma.FabricOptions{Delay: simrdma.Span{Min: time.Microsecond, Max: time.Millisecond}})
//	a, err := f.Open(simrdma.NICOptions{Host: "a", Name: "a0", Ordered: true})
//	b, err := f.Open(simrdma.NICOptions{Host: "b", Name: "b0", Ordered: true})
//	…
//	f.KillNIC("b0")
//	if v := f.Violations(); len(v) > 0 { … }       violations of the rules by the user of the domains
//
// # Steps of a Work
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
// The fabric does everything that group.Domain permits a NIC to do, and nothing else:
//
//   - Pieces of one payload, payloads, completions, messages and (where a NIC is
//     not Ordered) immediates overtake each other. A completion of the sender gives no
//     information about other Works.
//   - A piece may be placed twice, as long as its Work has not been delivered; a later
//     repetition is dropped together with its immediate.
//   - A ghost is a Work that is still on the wire, with its payload, although its
//     sender's endpoint has ended. It may land, and its immediate be counted, until the
//     target's endpoint is shut. The ghosts of an Ordered endpoint are the first of its
//     Works in flight.
//   - A Work may be in place, and its immediate counted, although its sender gets
//     StatusBroken.
//   - A link that is cut loses all packets. An endpoint that posts breaks after
//     RetryTimeout. An endpoint that does not post never detects the cut.
//   - A NIC that dies returns the completions that had arrived before, then errors. The
//     seed determines whether its Works in flight complete with StatusBroken or not at
//     all. The other end detects the death as it detects a cut link.
//   - If a host dies, its NICs die too. Nothing arrives on its control connections any
//     more, and their other ends get no notice.
//   - If CloseIsFinal is false, admitted Works still land in closed memory, which must
//     outlive its endpoints.
//
// # Seeds and time
//
// The events of a Work are drawn from the fabric's seed, the NIC's name, the number of the
// endpoint on its NIC and the number of the Work on its endpoint. So the actions of one goroutine
// do not change the draws of another: the same posts have the same outcome. The seed does not
// determine the order in which the program's goroutines run.
//
//	go test ./rdma/rdmatest/simrdma -run 'TestSeeds|TestLedger' -sim.seeds=10000
//
// runs the conformance suite of the engine, and random runs checked by a ledger, on that many
// networks. A run that fails prints the command that repeats it.
//
// The fabric uses the clock of package time, which is virtual in a testing/synctest bubble. A
// fabric belongs to the bubble in which it was made. It has no goroutine; a timer runs the due
// events.
//
// Lock order: Fabric.mu is the only lock. Payload is copied while Fabric.mu is held. Shut and
// Memory.Close take Fabric.mu too, so no payload lands after they have returned.
package simrdma
