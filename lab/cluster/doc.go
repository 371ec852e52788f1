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
// Each process runs in its own network namespace (lab/netlab), and each line of the drawing is a
// switch. A node's storage NIC reaches only storage. Its compute NIC reaches only the other
// engines. So the counters of each NIC count exactly the traffic that the design sends over this
// NIC. Network namespaces need root. Without root, each process has an address of the loopback
// interface, and each engine limits and counts the bytes of its own data connections (shaper). On
// loopback, cables cannot be pulled, and the rate of gRPC messages is not limited.
//
// The package does not model a fabric: there is one switch per network, there are no delays, and
// all processes share the CPUs of this machine. A replay is valid only if the CPUs do not limit it;
// Result.CPU is the processor time used.
//
// The processes run this binary: serve, planner, and Node (a hidden command) for
// engines and gateway. Node reads its configuration and orders as JSON lines from
// standard input and reports events as JSON lines on standard output. Node exits when
// its input ends, so no process outlives the cluster.
//
// Lock order: Cluster.mu and shapes.mu are never held together, nor across a call to another package.
package cluster
