// Command capi is libpenstock: package client for programs that are not written in
// Go, as a shared library with the C interface of penstock.h. `make lib` builds
// bin/libpenstock.so and bin/penstock.h.
//
// It is not another client: what a call does, and what its outcome means, is
// package client's. It does not start nodes, it knows no engine, and it keeps no
// bytes: values go between the caller's memory and the node.
//
//	engine's thread                     libpenstock                                  node
//	───────────────                     ───────────                                  ────
//	penstock_get(ns, batch, …) ──► entry.c: a forked child is refused here,
//	                                 before any of Go runs
//	                               export.go: copies keys and arrays
//	                               binding: handles ─► store, namespace, memory
//	                                 key ─► block id (kv.Namespace.KeyID)
//	                                 address ─► registered memory
//	                               client.Read ───────── message ────────────────►  Read
//	 the caller's memory ◄══════════════ one-sided writes, verified ═══════════════   ══
//	◄── results, one for each key
//
//	penstock_submit ──► a job ──► the same call on a goroutine ──► completion ─► eventfd
//	penstock_drain  ◄───────────────────────────────────────────── completion
//
// A program in C is client/capi/example/prefix.c:
//
//	penstock_open(&options, &store, &error);
//	penstock_ensure(store, &definition, &ns, &error);
//	penstock_register(store, memory, bytes, &region, &error);
//	penstock_match(ns, &batch, &result);          // how long is the prefix that is stored
//	penstock_get(ns, &batch, results, &result);   // its bytes, verified
//	penstock_put(ns, &batch, results, &result);   // what was computed instead
//	penstock_close(store, &error);
//
// The library is loaded in processes whose language has a lock (Python), forks, and
// has signal handlers of its own. Hence:
//
//   - entry.c asks for the process's id before each call and refuses in a child of
//     the process that loaded the library. Go's threads do not exist there, so a call
//     would wait for ever.
//   - No function calls back into the caller on its own thread. The log callback runs on
//     a goroutine of its own, for which no call waits.
//   - The library does not import os/signal. Go's runtime then installs handlers for the
//     fault signals, SIGPIPE and SIGURG only, and they forward signals that Go code did
//     not raise to the handlers that were installed before.
//   - The library stores the caller's addresses as numbers. It makes slices of them only
//     for a registration, or for a job, and drops the slices when that ends.
//
// Lock order: none in this package; see package binding.
package main
