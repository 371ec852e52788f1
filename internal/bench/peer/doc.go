// Package peer starts and asks the programs that Penstock is compared with: fio
// for the disk, iperf3 and bare sockets for the network, Redis and a gRPC byte
// stream for serving bytes from memory. Each gets what is best for it: huge pages, the same
// congestion control, a client that reads straight into its destination.
//
// It measures nothing of ours and decides nothing: package suite puts the samples
// side by side. What is not installed is an error that names the package to
// install, before anything is started.
//
// Every process started here is ended by the Close of what it was returned as,
// and by the kernel if this process dies first.
//
// Lock order: there is no lock.
package peer
