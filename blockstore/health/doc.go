// Package health decides the state of one volume from the outcomes and the times of the volume's
// I/O. It is a pure state machine: time is an argument of each event, and the package performs no
// I/O, starts no goroutine and takes no lock.
//
//	       error, or slow              errors in a row, failed sync, hung
//	 ┌───────────────────► suspect ───────────────────────────────┐
//	 │                       │  ▲                                 ▼
//	ok ◄─────────────────────┘  └──────────────────────────── failed
//	       GoodProbes probes             first good probe
//
//	draining, removed: an order of the operator, over any of the three
//
// A request that has not completed counts too: Tick receives the start time of the oldest one. So a
// volume also fails if its disk never completes a request. If only writes or flushes hang, the
// failed volume is still read, until a read hangs.
//
// # Requests permitted in each state
//
//	state     new blocks   sync and catalogue   reads   probes
//	ok        yes          yes                  yes     no
//	suspect   if no ok     yes                  yes     yes
//	          volume can
//	failed    no           no                   yes, unless reads fail or hang
//	                                                    yes
//	draining  no           yes                  yes     while suspect
//	removed   no           no                   no      no
//
// A draining volume that fails is shown as failed, and as draining again when it
// has recovered.
//
// # Recovery
//
// Only probes end the failed state, because a failed volume gets no other writes. The first
// successful probe makes a failed volume suspect, and GoodProbes successful probes in a row make it
// OK. The time between probes grows while they fail, and after a relapse. So a volume that fails
// only under load does not change its state every second.
package health
