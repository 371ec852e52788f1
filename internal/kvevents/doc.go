// Package kvevents publishes the blocks of storage nodes as KV-cache events in the wire format of
// vLLM, so that routers which follow vLLM engines (llm-d, AIBrix, Dynamo) can follow storage nodes.
// A PUB socket sends the events. On request, a ROUTER socket resends events that a subscriber
// missed.
//
// The package is not a second event log of the node: it keeps no list of blocks. When a subscriber
// has lost events, the package publishes all blocks again. It does not receive events of engines
// and makes no routing decisions.
//
//	node: Events ─────► source ─── Change ──► Wire ── payload ─► ring ──► PUB    ─► subscribers, each at its own position
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
//	                                                   c0                     hash of the first block's parent; nil: none
//	                                                   90                     token ids: none, the node does not have them
//	                                                   40                     tokens per block
//	                                                   c0 a7 "STORAGE" c0     LoRA id, medium, LoRA name
//	                                                 00                       data-parallel rank
//
//	BlockRemoved      93 ac "BlockRemoved" 91 c4 10 … a7 "STORAGE"
//	AllBlocksCleared  91 b0 "AllBlocksCleared"
//
// With Wire.Maps an event is a map of the same fields by name, and its tag has the name "type", as
// in vLLM since 0.24. The batch stays an array. In the array form, an event has exactly the fields
// that all versions of vLLM and all consumers support.
//
// # From the node's events to vLLM's events
//
// A block hash is the block's id in Penstock. A router can match it with an engine's
// block only if the engine reports the same id. All volumes have the same medium. A block
// of a hybrid model is reported once, for its first layer group.
//
//	node                              subscribers
//	block_stored                      BlockStored
//	block_removed                     BlockRemoved, unless another live epoch has the block
//	all_blocks_cleared                AllBlocksCleared, then BlockStored for the blocks of live epochs
//	gap, restart of the node, start   AllBlocksCleared, then BlockStored for all stored blocks
//	volume_state                      nothing
//	node unreachable                  nothing; the node still has its blocks when it is reachable again
//
// An epoch is one version of the weights of a namespace. vLLM's events contain no epoch. For
// subscribers a block is stored as long as one live epoch of its namespace has it. The start of a
// new epoch clears nothing while the older epochs stay live. When an epoch ends, the source (the
// follower of one node) publishes AllBlocksCleared for the namespace, and then announces the blocks
// of the other epochs again.
//
// When a source receives an event of an epoch that is later than all epochs in its list of live
// epochs, it requests the list from the node again. It drops events of epochs that are not live.
//
// An announcement publishes all blocks that the node lists. While the source reads that list, the
// node continues to send events. The source publishes these events after the list. The last event
// of a block determines the block's state at the subscribers, so the final state is right.
//
// # Sequence numbers and loss
//
// Messages of all topics are numbered together, from 0 in the order of publication, as in vLLM. A
// publisher that was restarted begins at 0, with an AllBlocksCleared on each topic.
//
// Publishing never waits. The ring holds the newest messages, limited in number and in bytes. Each
// subscriber has only a position in the ring, and no queue. If the message at the position of a
// subscriber was overwritten, the subscriber continues with the oldest message in the ring. The
// messages in between are lost: Stats.Lost counts them, and they cannot be replayed. All nodes are
// announced again when a subscriber joins or loses messages, and when a replay requests messages
// that are not in the ring any more, but at most once per Options.Resync.
//
// # Topics
//
// AllBlocksCleared names no namespace. Consumers drop all blocks of the publisher's pod, which is
// the part of the topic between the first and the second @. If several namespaces of a node share a
// pod, clearing one of them clears all of them at the consumers. So the source announces the other
// namespaces again.
//
// Locks: no lock is taken while Publisher.mu or ring.mu is held.
package kvevents
