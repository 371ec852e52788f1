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
//   - A block that was read on this node counts as read on its new node, so that copies of blocks that were never read, which follow,
//     do not evict it there.
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
// # Hot prefixes
//
// HotCopier copies the prefixes that many matches of this node find (storage.Node.HotPrefixes) to the nodes that would store
// them in a namespace with more replicas:
//
//	Match ─► storage.Node counts, by first block ─► HotPrefixes
//	                                                    │ once a second
//	        hint in replies ◄── PlaceHot ◄── ExistsGroups with more replicas: all nodes have the blocks
//	             │                                      │ absent
//	             ▼                                      ▼
//	   client reads the prefix from             relay (rate) ─► Write to all of these nodes
//	   the least loaded of the nodes
//
// These rules hold for the copies:
//
//   - A block is named in a hint only after all nodes of it were asked and have it, or do not answer, and while this node has it. A hint that is
//     out of date costs a reader a call: the node has the block, or the reader goes to the next node.
//   - A block that is deleted on this node is deleted on the other nodes again: after the copy that is under way, at the next turn, or when the
//     HotCopier ends.
//   - When a prefix is not hot any more, and no hint is valid, its copies are demoted: their nodes evict them first.
//   - A failed copy is tried again after a time that doubles up to HotOptions.RetryMax. One turn copies at most as many bytes of a prefix as the rate allows
//     in a second, so that deletions are not late.
//
// Mover.mu is a leaf. HotCopier has no locks: only Run uses its state.
package move
