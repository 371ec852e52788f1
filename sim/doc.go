// Package sim is the kernel of the simulators: virtual time, a queue of events with a defined order, and
// named streams of random numbers. The package does not depend on the simulated systems. sim/flow
// simulates a network, and three packages simulate clusters. sim/agentic runs the planner of a planner
// node (package dualpath). sim/netkv runs the chooser of a planner node that has a network
// (dualpath/netcost). sim/datacenters runs the router of a gateway (server/offload), and the controllers
// of dualpath/prfaas, which no server runs.
//
// It is not a framework of simulated processes: an event is a function that is called once, at its
// virtual time. No event sleeps, and no two events run concurrently.
//
//	            ┌───────────────────────────────┐
//	At, After ─►│ heap by (time, phase, number) │─► one event at a time ─► its function ─┐
//	Timer.Set ─►└───────────────────────────────┘                                        │
//	      ▲                                                                              │
//	      └──────────────────────────────────────────────────────────────────────────────┘
//
// # Order
//
// Events are called by time, then by phase, then in the order in which they were scheduled. An
// event may schedule others for the same virtual time; the new events are called after it. Each
// virtual time has two phases. Normal comes first. Settle begins when no Normal event of that time
// is left; a Normal event that a Settle event schedules for the same time begins the next Normal
// phase. Work that depends on all events of one time (the rates of a network, a fetch of work)
// belongs to Settle, and so runs once for all of these events.
//
//	t = 3 s │ Normal 17  18  21 │ Settle 19  20 │ Normal 22 │ Settle 23 │ t = 3.2 s …
//
// # One seed
//
// Rand(name) is a PCG stream of the seed and the name: if one subsystem draws more numbers, the
// numbers of the others do not change. Digest is a hash over the time and order of every event, and
// over the values passed to Note; equal digests mean equal runs. Nothing depends on the clock, on
// addresses or on the order of a map.
//
//	k := sim.New(1)
//	k.After(time.Second, func() { fmt.Println(k.Now()) })
//	err := k.Run(ctx)
//
// A Kernel must be used by one goroutine. There is no lock.
package sim
