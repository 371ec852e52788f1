// Package relay copies blocks between the storage of two datacenters, over a link with less
// bandwidth than the networks of the datacenters (PrfaaS, section 3.3), or from a storage node to
// other nodes of its cluster (package server/move). All copies together never exceed the link's budget
// in bytes per second.
//
//	storage there ── Read, a chunk ─► memory ─ wait for the budget ─► Write ─► storage here
//	                 verified                                          verified by the node
//
// The checksums that the source delivers with a block are sent with the block to the destination,
// which refuses a block that does not match. The blocks that wait for the budget never take more
// memory than Options.MemoryBytes.
//
// The package does not decide which blocks to copy (packages server/offload and server/move do), and it keeps no
// block after the copy.
//
// Copies get memory in order of arrival, one chunk at a time.
package relay
