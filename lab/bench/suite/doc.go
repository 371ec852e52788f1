// Package suite holds the work that `penstock bench` measures, one file for each of its
// subcommands: the work of all contenders, the measured figure, and its target
// (docs/benchmarks.md).
//
//	store    verified reads and writes of the block store   fio, ReadAt, a file per block
//	index    matches, commits, size, recovery               Pebble gets
//	server   reads through gRPC and the data plane          iperf3, gRPC stream, Redis, fio
//	local    the hand-off through a shared arena            TCP
//	policy   hit ratios of the eviction policies on traces  each other
//	engines  puts and gets through the Python client        Mooncake, LMCache, HiCacheFile, Redis, files
//	         first tokens of agent sessions under vLLM      vLLM alone, its fs tier, LMCache
//	rdma     writes of a transfer engine, cost of a call    iperf3, copying, ib_write_bw, fi_rma_bw
//
// A suite creates its data in a new directory and removes the directory. It depends only on
// contracts: devices, transfer engines and nodes come from World, which cmd/penstock fills in.
//
// Lock order: there is no lock.
package suite
