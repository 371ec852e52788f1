// Package cluster runs a whole inference cluster on this machine: storage node,
// planner, prefill and decode engines, and a gateway that replays agents, each in a
// process of its own, on networks whose rates are set. The KV bytes, the sockets
// and the processes are real; what is emulated is the model (lab/emulate).
//
//	control  ────┬───────────┬──────────┬─────────────┬──────────────┬──── no limit
//	         gateway      planner    storage        P0 … Pn       D0 … Dn
//	storage  ───────────────────────────┴─────────────┤ SNIC         ┤ SNIC
//	compute  ─────────────────────────────────────────┴ CNIC         ┴ CNIC
//
// Each place is a network namespace (lab/netlab), each line a switch. A node's
// storage NIC reaches storage and nothing else, its compute NIC the other engines
// and nothing else, so that what a NIC counts is what the design says goes over
// it. That needs root; without it every place is an address of loopback, and each
// engine limits and counts its own data connections (shaper): cables cannot be
// pulled there, and messages over gRPC are not limited. It is not a model of a
// fabric: one switch a network, no delays, and all processes share the CPUs of this
// machine, which must not be what limits the replay (Result.CPU says how much of
// them it took).
//
// The processes are this binary's: serve, planner, and Node (a hidden command) for
// engines and gateway. Node takes its configuration and orders as JSON lines on
// standard input and tells what happens as JSON lines on standard output; it ends
// when its input does, so that nothing outlives the cluster.
//
// Lock order: Cluster.mu and shapes.mu are never held together, nor across a call.
package cluster
