// Package sim is the kernel of the simulators: virtual time, a queue of events with a
// defined order, and named streams of random numbers. It is independent of what is
// simulated: sim/flow is a network, and three packages are clusters. sim/agentic runs the
// planner of a planner node (package dualpath). sim/netkv runs the chooser of a planner
// node that has a network (dualpath/netcost). sim/datacenters runs the router and the
// controllers of dualpath/prfaas, which no server runs.
//
// It is not a framework of processes: an event is a function that is called once,
// at its time, and returns. No event sleeps, and none runs concurrently with another.
//
//	            ┌───────────────────────────────┐
//	At, After ─►│ heap by (time, phase, number) │─► one event at a time ─► its function ─┐
//	Timer.Set ─►└───────────────────────────────┘                                        │
//	      ▲                                                                              │
//	      └──────────────────────────────────────────────────────────────────────────────┘
//
// # Order
//
// Events are called by time, then by phase, then by the order in which they were
// scheduled. An event may schedule others for the same time; they come after it.
// There are two phases of one instant: Normal, and Settle, which begins when no
// normal event of the instant is left and ends when none is added. What follows
// from all that happened at one time (the rates of a network, a fetch of work)
// belongs there, once.
//
//	t = 3 s │ Normal 17  18  21 │ Settle 19  20 │ Normal 22 │ Settle 23 │ t = 3.2 s …
//
// # One seed
//
// Rand(name) is a PCG stream of the seed and the name: a subsystem that draws more
// numbers than before leaves the others' as they were. Digest is a hash over the
// time and order of every event called and over what Note was told; two runs with
// equal digests did the same. Nothing depends on the clock, on the address of
// anything or on the order of a map.
//
//	k := sim.New(1)
//	k.After(time.Second, func() { fmt.Println(k.Now()) })
//	err := k.Run(ctx)
//
// A Kernel serves one goroutine. There is no lock.
package sim
