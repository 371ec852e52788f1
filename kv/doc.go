// Package kv defines the basic types of Penstock: namespaces and their geometry, block ids and the
// hash chain that makes them, and the names of slots on storage. It is pure: no I/O, no clock, no
// goroutine, no lock, and it imports the standard library only. Other packages store, find and move
// blocks.
//
// A namespace is one model's KV cache under one geometry. Its prompt is cut into
// blocks of BlockTokens tokens; block i of a prompt is named by a BlockID that
// covers every token from the start of the prompt to the end of the block:
//
//	tokens   | t0 … t63 | t64 … t127 | t128 … t191 | (tail shorter than a block is not cached)
//	            │             │              │
//	root ──► id0 ─────────► id1 ─────────► id2        id(i) = SHA-256(id(i-1) ‖ n ‖ tokens)[:16]
//
// Block i has the same id in two prompts exactly if all tokens up to the end of the block are the
// same in both.
//
// The bytes of a block are laid out [layers, tokens, bytes], one layer after the other without
// padding. These bytes are a Full Block, the only unit on storage. One layer of a Full Block is a
// Layer Block, the unit of transfers to and from HBM:
//
//	Full Block   ┌────────────┬────────────┬─ ─ ─┬──────────────┐
//	             │ layer 0    │ layer 1    │     │ layer L-1    │
//	             └────────────┴────────────┴─ ─ ─┴──────────────┘
//	             each layer:  BlockTokens × TokenBytes
//
// Hybrid models have several layer groups (full attention, sliding window, recurrent state). Each
// group of a block is stored by itself, as a piece, which has the same layout but only the layers
// of the group. A namespace with one full group, the usual case, has one piece per block: the Full
// Block.
//
// # Live epochs
//
// An epoch is a version of the weights. A namespace has one newest epoch and may have older live
// epochs; blocks of any other epoch can be neither matched nor stored. A bump starts a new epoch.
// Without keep, it leaves only the new epoch live. With keep = k, the k-1 newest epochs that were
// live without a pin stay live too. A pin keeps an older epoch live until the pin ends.
//
//	Bump(8, keep 3)      newest ┌────── Keep = 3 ──────┐
//	Live()                      8        7        6        4        2
//	                            └ new    └──┬─────┘        └──┬─────┘
//	                                   kept by the bump     pinned, end with their pins
//
// MaxLive bounds the number of live epochs. A bump is never refused because of pins: the oldest
// pinned epochs are retired instead.
package kv
