// Package probe queries the running kernel for values that are not in sysfs: the addresses of
// interfaces, the limit of locked memory, access to the RDMA devices, and the drivers' counters,
// which include the PFC pause frames.
//
// It changes nothing and keeps no file open.
//
//	net.Interfaces ──────────► Addrs ──► topo.Options
//	getrlimit, uname ────────┐
//	/dev/infiniband/uverbs* ─┼─► Facts ──► topo.Check
//	SIOCETHTOOL, twice ──────┘
package probe
