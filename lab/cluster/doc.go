// Package cluster runs a whole inference cluster on this machine: storage node,
// planner, prefill and decode engines, and a gateway that replays agents. Each is a
// process of its own, on networks with set rates. The KV bytes, the sockets and the
// processes are real. Only the model is emulated (lab/emulate).
//
//	control  ────┬───────────┬──────────┬─────────────┬──────────────┬──── no limit
//	         gateway      planner    storage        P0 … Pn       D0 … Dn
//	storage  ───────────────────────────┴─────────────┤ SNIC         ┤ SNIC
//	compute  ─────────────────────────────────────────┴ CNIC         ┴ CNIC
//
// Each place is a network namespace (lab/netlab), and each line is a switch. A node's
// storage NIC reaches only storage. Its compute NIC reaches only the other engines. So
// each NIC counts exactly the traffic that the design sends over it. Network namespaces
// need root. Without root every place is an address of loopback, and each engine limits
// and counts its own data connections (shaper). Cables cannot be pulled on loopback, and
// gRPC messages are not limited there.
//
// The package does not model a fabric: there is one switch per network, there are no
// delays, and all processes share the CPUs of this machine. A replay is valid only if the
// CPUs do not limit it (Result.CPU is the processor time that it took).
//
// The processes run this binary: serve, planner, and Node (a hidden command) for
// engines and gateway. Node reads its configuration and orders as JSON lines from
// standard input and reports events as JSON lines on standard output. Node exits when
// its input ends, so no process outlives the cluster.
//
// Lock order: Cluster.mu and shapes.mu are never held together, nor across a call to another package.
package cluster
