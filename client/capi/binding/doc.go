// Package binding is what libpenstock does behind its C interface: handles, batches of
// an engine's keys and addresses, jobs and their completions, over package client.
//
// It is not the interface itself: C types, strings and structures are package capi's.
// It decides nothing about caching; a batch is calls of client.Store, and a result what
// these report of each piece.
//
//	Batch{keys, addresses} ──► plan: key ─► kv.BlockID, address ─► client.Memory + offset
//	                             │
//	Do ──────────────────────────┤ run: client.Match | Read | Write | Exists | Delete
//	                             │        a get of a flat namespace: Read, and where a key
//	Submit ─► job ─► goroutine ──┘        is absent, Exists of the rest and Read of those
//	                   │
//	                   └─► done ─► eventfd readable ─► Drain, Wait
//
// Two copies of nothing: plan copies keys and addresses, so that the caller's arrays are
// free when Submit returns; values are moved by package client, from and to the addresses
// themselves.
//
// Handles are numbers from one counter, never used twice. A Store's Close makes its
// handles unknown, cancels its jobs, waits for every call under way, and then gives back
// memory, sessions and the eventfd.
//
// Lock order: none is held while another is taken; Library.mu guards the table of
// handles, Store.mu the rest of a store, logQueue.mu its end.
package binding
