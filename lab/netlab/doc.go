// Package netlab makes networks on one machine, for processes that should behave as if they were on
// separate machines. The networks consist of network namespaces and links. A link can have a rate
// limit and can be taken down. It needs root.
//
//	lab ──► Namespace "a"                                  Namespace "b"
//	          lab0 10.77.0.1/30 ══ 400 Mbit/s each way ══ lab0 10.77.0.2/30
//	          lab1 10.77.0.5/30 ══ 400 Mbit/s each way ══ lab1 10.77.0.6/30
//	          Start(cmd): a process that sees only that   Start(cmd)
//
// A Switch joins many namespaces. It is a bridge in a separate namespace, and each port has its own
// rate.
//
//	Namespace "a"  lab2 10.78.0.1/24 ══ 200 Mbit/s each way ══╗
//	Namespace "b"  lab2 10.78.0.2/24 ══ 200 Mbit/s each way ══╬ Switch
//	Namespace "c"  lab1 10.78.0.3/24 ═════════ no limit ══════╝
//
// A link has a rate, which may be divided among classes of packets by their DSCP, and a short
// queue. It adds no delay and no loss. Two namespaces are connected only by the links between them.
// The lab changes no interface, route or rule of the namespace in which it was opened.
//
// The namespaces have no names in the file system: they exist while the lab or a process uses them.
// So nothing remains when this process ends, even by kill -9: the kernel removes a namespace, its
// links and its queues after the last user, and kills the processes of Start when this process
// ends. To enter a namespace: nsenter --net=/proc/PID/fd/FD, as Namespace.String prints it.
//
// There is no lock: a lab must be used by one goroutine.
package netlab
