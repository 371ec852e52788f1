// Package probe asks the running kernel what sysfs does not say: the addresses
// of interfaces, how much memory this process may lock, whether it may open the
// RDMA devices, and the drivers' counters, which hold the PFC pause frames.
//
// It changes nothing, and keeps nothing open.
//
//	net.Interfaces ──────────► Addrs ──► topo.Options
//	getrlimit, uname ────────┐
//	/dev/infiniband/uverbs* ─┼─► Facts ──► topo.Check
//	SIOCETHTOOL, twice ──────┘
package probe
