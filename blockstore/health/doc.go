// Package health decides the state of one volume from the outcomes and the times of the volume's
// I/O. It is a pure state machine: time is an argument of each event, and the package performs no
// I/O, starts no goroutine and takes no lock.
//
//	       error, or slow              errors in a row, failed sync or probe, hung;
//	                                   SlowProbes slow probes, if others suffice
//	 ┌───────────────────► suspect ───────────────────────────────┐
//	 │                       │  ▲                                 ▼
//	ok ◄─────────────────────┘  └──────────────────────────── failed
//	     GoodProbes good probes        first good probe, or slow probe
//	                                   if the store needs the volume
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
// # Probes
//
// Only probes end the states suspect and failed. A failed volume gets no other writes. GoodProbes
// good probes in a row make a volume OK; the first one makes a failed volume suspect. A probe that
// took SlowAfter or longer is slow: the volume answers, but requests that wait for it would wait as
// long. Its effect depends on the other volumes (Others.Suffice), because a suspect volume that
// answers is better than none, but worse than an OK one: each sync and each change of the catalogue
// waits for it.
//
//	the store can do          slow probes of a              slow probe of a   time to the next probe
//	without the volume        suspect volume                failed volume     while probes fail
//	with its OK volumes       SlowProbes make it fail       no effect         doubles, up to ProbeMax
//	with OK and suspect ones  no effect                     no effect         doubles, up to ProbeMax
//	no                        no effect                     makes it suspect  ProbeEvery
//
// Volumes suffice for a store if one of them takes new blocks and they are a quorum for changes of
// the catalogue. So if all volumes are slow, all stay suspect and share the writes. If all volumes
// fail at the same moment, because they share a disk that stalls, each is probed every ProbeEvery
// until enough of them answer, however often the disk stalls; then the others are probed less often.
// An error or a hung request makes a volume fail even if the store needs it.
//
// The time between probes also doubles after a relapse, so a volume that fails only under load does
// not change its state every second while other volumes do its work.
package health
