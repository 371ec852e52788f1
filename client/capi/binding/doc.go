// Package binding implements the functions of libpenstock with package client: handles,
// batches of an engine's keys and addresses, jobs and their completions.
//
// It is not the C interface: package capi converts C types, strings and structures. It
// makes no decisions about caching: it performs a batch with calls of client.Store, and
// the result has what these calls report for each piece.
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
// Handles are numbers from one counter; no number is used twice. Store.Close removes the
// store's handles, cancels its jobs, waits for all running calls, and then closes memories,
// sessions and the eventfd.
//
// Lock order: no lock is taken while another is held. Library.mu guards the table of
// handles, Store.mu the fields of a store, and logQueue.mu the closing of the queue.
package binding
