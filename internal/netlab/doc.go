// Package netlab makes networks on one machine: network namespaces, joined by
// links whose rate is limited and which can be taken down, for processes that
// must not know that they share a kernel. It needs root.
//
//	lab ──► Namespace "a"                                  Namespace "b"
//	          lab0 10.77.0.1/30 ══ 400 Mbit/s each way ══ lab0 10.77.0.2/30
//	          lab1 10.77.0.5/30 ══ 400 Mbit/s each way ══ lab1 10.77.0.6/30
//	          Start(cmd): a process that sees only that   Start(cmd)
//
// A Switch joins many: a bridge in a namespace of its own, each port with a rate.
//
//	Namespace "a"  lab2 10.78.0.1/24 ══ 200 Mbit/s each way ══╗
//	Namespace "b"  lab2 10.78.0.2/24 ══ 200 Mbit/s each way ══╬ Switch
//	Namespace "c"  lab1 10.78.0.3/24 ═════════ no limit ══════╝
//
// A link has a rate, which may be divided among classes of packets by their DSCP,
// and a short queue; it has no delay and no loss of its own. There is nothing
// between two namespaces but the links that were made. The lab touches no
// interface, route or rule of the namespace that it was opened in.
//
// The namespaces have no names in the file system: they live as long as the lab
// or a process in them holds them. So nothing is left behind, however this
// process ends, by kill -9 too: the kernel takes namespace, links and queues
// away with their last holder, and the processes that Start began die with this
// one. To look inside: nsenter --net=/proc/PID/fd/FD, as Namespace.String says.
//
// Lock order: there is no lock; a lab belongs to one goroutine.
package netlab
