// Package kvevents publishes what storage nodes hold as KV-cache events in the wire
// form of vLLM, so that routers which follow vLLM engines (llm-d, AIBrix, Dynamo)
// can follow storage nodes: a PUB socket for the events, a ROUTER socket for those
// that a subscriber missed.
//
// It is not a second event log of the node: it keeps no list of blocks, and a
// subscriber that has lost events gets everything anew. It does not receive events
// of engines. It decides nothing about routing.
//
//	node: Events ─────► source ─── Change ──► Wire ── payload ─► ring ──► PUB    ─► subscribers, each at its own place
//	      ListBlocks ─►   │ one for each node               newest N messages └─► ROUTER ─► replays
//	                      └ epoch of each namespace
//
// One message has three frames; the payload is MessagePack:
//
//	topic                  sequence               payload
//	"kv@node-1@llama"      00 00 00 00 00 00 00 07  93                        array of 3
//	                                                 cb 41 da …               time, seconds as a float
//	                                                 91                       array of events, 1 here
//	                                                  98                      array of 8: an event, Wire.Maps false
//	                                                   ab "BlockStored"
//	                                                   91 c4 10 …             hashes: 16 bytes each, or their last 8 as an integer
//	                                                   c0                     hash of the block before the first; nil: none
//	                                                   90                     token ids: none, the node does not know them
//	                                                   40                     tokens in a block
//	                                                   c0 a7 "STORAGE" c0     LoRA id, medium, LoRA name
//	                                                 00                       data-parallel rank
//
//	BlockRemoved      93 ac "BlockRemoved" 91 c4 10 … a7 "STORAGE"
//	AllBlocksCleared  91 b0 "AllBlocksCleared"
//
// With Wire.Maps an event is a map of the same fields by name, with its tag under
// "type", as vLLM has sent since 0.24; the batch around it stays an array. The
// arrays have the fields that every version and consumer of the array form knows.
//
// # From the node's events to these
//
// A block hash is the block's id in Penstock. A router finds a block by it if the
// engine reports the same id. The medium is the same for all volumes. A hybrid
// model's block is reported once, by its first layer group.
//
//	node                              subscribers
//	block_stored                      BlockStored
//	block_removed                     BlockRemoved
//	all_blocks_cleared                AllBlocksCleared
//	gap, restart of the node, start   AllBlocksCleared, then BlockStored for all that is there
//	volume_state                      nothing
//	node unreachable                  nothing until it is back: what it holds is still there
//
// A node publishes the event of a new epoch after the first blocks of that epoch
// may have been stored. A source therefore clears a namespace at the first event of
// a newer epoch, and drops events of older ones.
//
// What is there is listed while the node's events go on; the events since the
// listing began follow it. An event about a block says what became of it, whatever
// was said before, so that the last word on each block is right.
//
// # Sequence numbers and loss
//
// Messages are numbered from 0 in the order of publication, over all topics, as
// vLLM numbers them. A publisher that starts again begins at 0, and with an
// AllBlocksCleared on each topic.
//
// Publishing never waits. The ring holds the newest messages, bounded in number and
// in bytes; a subscriber is a place in it and costs no queue. A subscriber whose
// place was overwritten goes on with the oldest message; the numbers in between are
// missing to it, are counted in Stats.Lost, and can no longer be replayed either.
// For such a subscriber, for a replay that asks for what is gone, and for one that
// has just joined, all nodes are announced again, at most once in Options.Resync.
//
// # Topics
//
// AllBlocksCleared has no namespace: consumers apply it to all that they know from
// the publisher's pod, the part of the topic between the first and the second @. If
// the namespaces of a node share that part, a source announces the others again
// after the clearing of one.
//
// Locks: Publisher.mu and ring.mu are leaves; no two locks are held at once.
package kvevents
