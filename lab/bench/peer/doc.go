// Package peer starts and asks the programs that Penstock is compared with: fio
// for the disk, iperf3 and bare sockets for the network, Redis and a gRPC byte
// stream for serving bytes from memory, and the stores in which inference engines keep
// KV. Each peer runs with the settings under which it is fastest: huge pages, the same
// congestion control as Penstock, and a client that reads straight into its destination.
//
// The stores run under their Python clients. A StoreWorker is a Python process with the client
// of one store; its program is a file of stores/, which the binary contains. The program
// of Penstock's own Python client lies beside the others, so that all clients do the same work.
//
//	suite ── one line of JSON for each load ──► worker.py ── put, get ──► *_store.py ──► the store's client
//	      ◄── bytes, seconds, CPU seconds ─────
//
// Engines is a Python process with vLLM, which forks the engines that serve agent sessions
// on a store. Its driver is that of the engines' tests (python/engines), which package
// suite hands over. LMCache is a server for such an engine.
//
//	suite ── one line of JSON for each turn ──► vllm_driver.py ── turn ──► an engine ──► its store
//	      ◄── tokens, cached tokens, seconds ──
//
// The package decides nothing: package suite puts the samples
// side by side. What is not installed is an error that names the package to
// install, before anything is started.
//
// Every process started here is ended by the Close of what it was returned as,
// and by the kernel if this process dies first.
//
// Lock order: there is no lock.
package peer
