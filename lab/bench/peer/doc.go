// Package peer runs the programs with which Penstock is compared: fio for the disk,
// iperf3 and bare sockets for the network, Redis and a gRPC byte stream for serving bytes
// from memory, and the stores in which inference engines keep KV. Each peer runs with its
// fastest settings: huge pages, the same congestion control as Penstock, and a client that
// reads straight into its destination.
//
// The stores are measured through their Python clients. A StoreWorker is a Python process with the
// client of one store. Its program is a file of stores/, which is embedded in the binary.
// Penstock's own Python client has such a program too, so that all clients do the same work.
//
//	suite ── one line of JSON for each load ──► worker.py ── put, get ──► *_store.py ──► the store's client
//	      ◄── bytes, seconds, CPU seconds ─────
//
// Engines is a Python process with vLLM. It forks the engines that serve agent sessions with a
// store. Its program is the driver of the engines' tests (python/engines), which package suite
// passes in. LMCache is a cache server for such an engine.
//
//	suite ── one line of JSON for each turn ──► vllm_driver.py ── turn ──► an engine ──► its store
//	      ◄── tokens, cached tokens, seconds ──
//
// The package only measures; package suite compares the samples. If a program is not installed, the
// package returns an error that names the package to install, before it starts anything.
//
// Each process that the package starts is ended by Close of the returned value. If this process
// dies first, the kernel ends its children.
//
// Lock order: there is no lock.
package peer
