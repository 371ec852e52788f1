// Package sys is the thin binding to the Linux calls that more than one package
// of Penstock needs: large mappings, page residency, memory figures, socket
// options. It wraps golang.org/x/sys/unix, gives every error the call and its
// argument, and holds no policy and no state: which memory to ask for is arena's
// decision, which device to open is the volume's.
//
//	arena, io/*, rdma/tcp, bench ──► sys ──► golang.org/x/sys/unix ──► Linux
//
// Lock order: there is no lock.
package sys
