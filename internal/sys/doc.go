// Package sys is a thin binding to the Linux calls that more than one package of Penstock needs:
// large mappings, page residency, memory figures, socket options, the time since boot. It wraps golang.org/x/sys/unix
// and adds the name of the call and its argument to every error. It has no policy and no state: its
// callers decide which memory and which device to use.
//
//	arena, io/*, rdma/tcp, bench ──► sys ──► golang.org/x/sys/unix ──► Linux
//
// There is no lock.
package sys
