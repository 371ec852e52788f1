// Package move copies the blocks of a storage node to the other members of its cluster, so that the
// node can leave it, or the sequences of members that have joined, so that these have them (Options.Only).
// The node is then a client of the other nodes.
//
//	storage.Node ── Tips, hottest first ─► one sequence ── which blocks has its new node? ─► Exists
//	                                            │ the rest, first block first
//	                                            ▼
//	             storage.Node ── Load ─► relay ── Write ─► client.Store of the cluster, without its
//	                           verified   (rate)  verified  draining members
//
// The package does not choose the node of a sequence: the client does (placement.Home), by the function by
// which all clients place new sequences. It deletes nothing: the node serves all of its blocks until
// it is removed.
//
// # Guarantees
//
//   - A block is copied under the epoch under which this node has it. If the epoch ends meanwhile, the
//     other node refuses the block.
//   - A sequence is copied from its first block on, so each copied block can be read at once.
//   - A block that the other node has already is not sent. So a Run continues where an earlier Run, or
//     an earlier process, has ended.
//   - In a namespace with replicas a block is copied until as many other nodes have it, if there are as
//     many.
//   - A sequence whose node refuses it, is down or is full does not stop the others. It is tried
//     again, and Progress has the reason.
//   - A block that is deleted on this node during its copy is deleted on the other nodes again, at the latest at the
//     end of the pass.
//   - With Options.Yields, the blocks of a sequence that has other homes are the first that this node evicts, when these
//     homes have all of the sequence. They are not deleted, and a read of them makes them as the other blocks again.
//   - Blocks that are stored on this node meanwhile are copied too. When nodes join or leave the cluster, all
//     blocks are compared again, because sequences may have other nodes then.
//
// Blocks of class Transfer are copied with class Prefix. In a namespace with several layer groups (a hybrid model)
// the stored pieces of all groups are copied, and each piece counts as a block in Progress. A tree without a
// group of full attention is not copied, because its index has no parents of blocks, and so the node of a
// sequence is unknown; Progress counts its blocks as left.
//
// Mover.mu is a leaf.
package move
