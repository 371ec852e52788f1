// Package binding implements the functions of libpenstock with package client: handles,
// batches of an engine's keys and addresses, jobs and their completions. It also has two queues
// from which a program that is not written in Go takes the actions of a leader.Leader and the
// events of a gateway.Gateway.
//
// It is not the C interface: package capi converts C types, strings and structures. It makes no
// decisions about caching: it performs a batch with calls of client.Store, and returns the results
// of these calls for each piece.
//
//	Batch{keys, addresses} ──► plan: key ─► kv.BlockID, address ─► client.Memory + offset
//	                             │
//	Do ──────────────────────────┤ run: client.Match | Read | Write | Exists | Delete
//	                             │        a get of a flat namespace: Read; after an absent
//	Submit ─► job ─► goroutine ──┘        key, Exists and Read of the remaining keys
//	                   │
//	                   ├─► done ─► eventfd readable ─► Drain, Wait
//	                   └─► SubmitWait, if it still waits for the job that it started
//
// plan copies keys and addresses, so the caller may free its arrays when Submit has
// returned. Values are not copied: package client transfers them from and to the caller's
// addresses.
//
// Values in memory of a CUDA device pass through slots of pinned host memory (device.go), a chunk of
// the batch at a time. package client moves a chunk between a slot and the nodes, and a copier
// moves the chunk before it, or the one after it, between another slot and the device.
//
//	leader.Leader ─► engine.Start ─► Attempt, a handle ─┐
//	              ─► Read, Cut, Recompute ──────────────┼─► queue.events ─► eventfd readable ─► Drain
//	              ─► the end of the request's context ──┘
//	leader.Request ◄── Attempt.Progress, Stopped, Passed, Done
//	gateway.Gateway ─► one goroutine a request, its events ─► queue.events ─► … ─► Drain
//
//	Traffic.Prefill, Decode ─► Transfer: one goroutine, which begins and ends the job ─┐
//	Transfer.Read, Cut, … ───► the job, or in order when the manager has begun it      ├─► queue.events ─► … ─► Drain
//	traffic.Manager ─────────► Progress, Stopped of the job ───────────────────────────┘
//
// Leader and Gateway embed a session: a connection to the planner, and the queue with its eventfd.
// The queue of a leader is bounded by the number of open attempts. The goroutine of a gateway's
// request waits while eventsMax events of the request are not drained. In the queue, a transfer has
// at most one progress report for each part, one end for each read, and two other events.
//
// Handles are numbers from one counter and are never used again. Store.Close removes the store's
// handles, cancels its jobs, waits for all running calls, closes leaders, gateways and traffic
// managers, and then memories, connections and the eventfd.
//
// Lock order: Transfer.mu, then the locks of package traffic; devices.mu, while a device is opened, then
// the locks of packages client and copier. Otherwise no lock is taken while another is held.
// Library.mu guards the table of handles, Store.mu the fields of a store, and queue.mu the fields of
// a leader, a gateway or a traffic manager. logQueue.mu guards the closing of the log queue.
package binding
