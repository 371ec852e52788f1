// Command capi is libpenstock: package client for programs that are not written in
// Go, as a shared library with the C interface of penstock.h. `make lib` builds
// bin/libpenstock.so and bin/penstock.h.
//
// It is not another client: package client performs the calls and defines their outcomes. It does
// not start nodes, is independent of engines, and stores no bytes: the node writes values directly
// to the caller's memory.
//
//	engine's thread                     libpenstock                                  node
//	───────────────                     ───────────                                  ────
//	penstock_get(ns, batch, …) ──► entry.c: refuses a forked child,
//	                                 before any Go code runs
//	                               export.go: copies keys and arrays
//	                               binding: handles ─► store, namespace, memory
//	                                 key ─► block id (kv.Keys)
//	                                 address ─► registered memory
//	                               client.Read ───────── message ────────────────►  Read
//	 the caller's memory ◄══════════════ one-sided writes, verified ═══════════════   ══
//	◄── results, one for each key
//
//	penstock_submit ──► a job ──► the same call on a goroutine ──► completion ─► eventfd
//	penstock_drain  ◄───────────────────────────────────────────── completion
//
//	penstock_leader_drain, penstock_gateway_drain, penstock_traffic_drain: queues of the planner's
//	actions, of a request's events and of a transfer's, with an eventfd each (packages leader,
//	gateway and traffic)
//
// client/capi/example/prefix.c is a program in C:
//
//	penstock_open(&options, &store, &error);
//	penstock_ensure(store, &definition, &ns, &error);
//	penstock_register(store, memory, bytes, &region, &error);
//	penstock_match(ns, &batch, &result);          // finds the longest stored prefix
//	penstock_get(ns, &batch, results, &result);   // loads and verifies the prefix
//	penstock_put(ns, &batch, results, &result);   // stores the blocks that were computed
//	penstock_close(store, &error);
//
// The library must work in processes that fork, that have signal handlers, and whose interpreter
// has a global lock (Python). Therefore:
//
//   - entry.c compares the process id before each call. In a child of the process that
//     loaded the library it returns an error: Go's threads do not exist there, so a call
//     into Go would wait for ever.
//   - No function calls back into the caller on the caller's thread. The log callback
//     runs on a goroutine of its own, and no call waits for the callback.
//   - The library does not import os/signal. Go's runtime then installs handlers for the
//     fault signals, SIGPIPE and SIGURG only, and they forward signals that Go code did
//     not raise to the handlers that were installed before.
//   - The library stores the caller's addresses as numbers. It makes slices from them only
//     for a registration, a job or a traffic manager, and drops the slices at the end of it.
//
// Lock order: none in this package; see package binding.
package main
