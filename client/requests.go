package client

import (
	"time"

	"github.com/penstock-kv/penstock/kv"
)

// A Piece is one layer group of one block of a chain, and its position in the caller's memory.
type Piece struct {
	// Block is the index in the chain, Group the layer group.
	Block, Group int
	// Offset is the offset of the piece in the Memory, in bytes. The length of a piece is
	// kv.Geometry.PieceBytes or, if a range of layers is read, that of these layers.
	Offset int64
}

// A Fragment is the place of consecutive layers of a piece in a registered memory.
type Fragment struct {
	Memory *Memory
	// Offset is the offset of the first layer in the Memory, in bytes.
	Offset int64
	// Layers is the number of layers.
	Layers int
}

// MatchRequest is the request for the longest cached prefix.
type MatchRequest struct {
	Namespace kv.Namespace
	// IDs is the chain from the first block of the prompt; in a flat namespace, the keys. If ids
	// are chained, Tokens may be given instead.
	IDs    []kv.BlockID
	Tokens []kv.Token
	// Epoch is the epoch of the caller's weights; 0 means Namespace.Epoch. Without Oldest and
	// Newest, only blocks of this epoch match, and only if the node keeps it live.
	Epoch kv.Epoch
	// Oldest, if not 0, is the oldest epoch that may match: a caller that accepts KV of weights up
	// to n versions old sets it to Epoch - n. The result is the longest match of one epoch from
	// Oldest to Epoch. If several epochs have a match of that length, the result is of the newest
	// of these epochs. Pass the result's Epoch to Read. One prefix never mixes epochs, unless Mix
	// is set.
	Oldest kv.Epoch
	// Mix lets the blocks of one prefix be of different epochs: each block is of the newest epoch,
	// from Oldest to Epoch, that has all pieces of the block that the prefix needs. Pass the
	// result's Epochs to Read.
	Mix bool
	// Newest selects the node's newest epoch instead of Epoch, which must then be 0. It is for
	// callers without weights of their own.
	Newest bool
	// Lease, if positive, keeps the matched blocks from being evicted for that time. Pin keeps them
	// until Release.
	Lease time.Duration
	Pin   bool
}

// MatchResult is the longest cached prefix.
type MatchResult struct {
	Outcome Outcome
	// Blocks and Tokens are the length of the prefix. IDs are the ids of its blocks.
	Blocks, Tokens int
	IDs            []kv.BlockID
	// Cut is the reason why the prefix is not longer.
	Cut Cut
	// Epoch is the epoch of every block that matched. If no block matched, it is the newest
	// requested epoch that the client has learned of. If no requested epoch is live, the match is a
	// Miss with CutEpoch. With Mix it is the newest epoch of any block.
	Epoch kv.Epoch
	// Epochs are the epochs of the blocks, from the first block on; only with Mix.
	Epochs []kv.EpochRun
	// Bytes is the number of payload bytes that a read of the whole match moves.
	Bytes int64
	// Lease is nil unless a lease was requested and granted.
	Lease *Lease
}

// ReadRequest is the request to load blocks into the caller's memory.
type ReadRequest struct {
	Namespace kv.Namespace
	// IDs is the chain from the first block of the prompt to the last block wanted; in a flat
	// namespace, the keys. Tokens may be given instead. With window or state groups, IDs must be
	// exactly a prefix that Match returned.
	IDs    []kv.BlockID
	Tokens []kv.Token
	// First is the index of the first block to load. The caller has the blocks before First, and
	// Read does not write to the memory of these blocks.
	First int
	// Epoch is the epoch of the caller's weights; 0 means Namespace.Epoch.
	Epoch kv.Epoch
	// Epochs, if not nil, are the epochs of the blocks, from the first block on. They replace
	// Epoch: each block is loaded from its own epoch. The caller takes Epochs from the result of a
	// match with Mix. Epochs must cover all of IDs.
	Epochs []kv.EpochRun
	// Into is the destination of the bytes.
	Into *Memory
	// Base is the offset of the prompt's block 0 in Into. Pieces are the pieces to load and their
	// places, in any order, none before First and no two overlapping. Nil Pieces: the pieces that a
	// prefix of this length needs from First on, each at Base + Geometry.PieceOffset(block, group).
	// So the position of a block depends only on its index in the prompt, and Write takes the block
	// from the same position.
	Base   int64
	Pieces []Piece
	// Fragments, if not nil, has an entry for each of Pieces. The entry lists the places
	// of the layers to be read, in order of the layers. Into and the piece's Offset are
	// then unused.
	Fragments [][]Fragment
	// FirstLayer and Layers choose a range of layers of every piece; Layers 0 means all layers from
	// FirstLayer on. With Pieces nil each layer goes to its place in its block. Otherwise a piece's
	// Offset is the offset of the first layer read.
	FirstLayer, Layers int
	// Sums, if not nil, has an entry for each of Pieces, with one element for each layer read. Read
	// sets an element to the XXH3-64 checksum of the writer for the layer, after it has verified
	// the bytes in memory against this checksum. A caller that moves the bytes further can pass the
	// checksums on. The entry of a piece that did not arrive does not change.
	Sums [][]uint64
	// Arrived, if not nil, has an entry for each of Pieces. Read sets the entry to true
	// when the piece is in memory and verified.
	Arrived []bool
	// Progress, if set, is called during the Read when more blocks are verified. Over a transfer
	// engine that reports landed bytes (rdma.LandingRegion) it is also called when the bytes of
	// another block have arrived. Calls do not overlap. The engine's goroutines make them, so
	// Progress must not block.
	Progress func(ReadProgress)
}

// ReadResult is the result of a Read.
type ReadResult struct {
	Outcome Outcome
	// Blocks is the length of the prefix that can be used: each requested piece of these blocks is
	// in memory and verified. A block without a piece in the request counts as present in the
	// caller's memory. Tokens is the same length in tokens.
	Blocks, Tokens int
	// Cut is the reason why the prefix is not longer.
	Cut Cut
	// Lost are the pieces that did not arrive although their blocks matched, in order of blocks.
	Lost []LostPiece
	// Bytes is the number of bytes delivered and verified, including pieces behind a lost block.
	Bytes int64
	// Epoch is the epoch of the blocks read; with ReadRequest.Epochs, the newest of them.
	Epoch kv.Epoch
	// Detail is the node's explanation if Outcome is Busy, for people.
	Detail string
}

// Class is how long a block is kept.
type Class uint8

const (
	// Prefix blocks are kept until they are evicted.
	Prefix Class = iota
	// Transfer blocks are dropped when Delivered is called for them.
	Transfer
)

// WriteRequest offers blocks to the store.
type WriteRequest struct {
	Namespace kv.Namespace
	// IDs is the whole chain from the first block of the prompt; in a flat namespace, the keys. If
	// ids are chained, Tokens may be given instead.
	IDs    []kv.BlockID
	Tokens []kv.Token
	// First is the index of the first block to store. The blocks before it are stored already
	// (ReadResult.Blocks) and are not sent.
	First int
	// Epoch is the epoch of the weights that made the blocks; 0 means Namespace.Epoch.
	Epoch kv.Epoch
	// From is the source of the bytes. They must not change until Write returns.
	From *Memory
	// Base is the offset of the prompt's block 0 in From, also if First is not 0. Pieces are the
	// pieces to store and their places, in any order, none before First and no two overlapping.
	// Pieces may be nil in a namespace of one layer group. Then the blocks from First on are
	// stored, each from Base + Geometry.PieceOffset(block, 0), where Read puts it.
	Base   int64
	Pieces []Piece
	// Fragments, if not nil, has an entry for each of Pieces. The entry lists the places
	// of the piece's layers, in order. From and the piece's Offset are then unused.
	Fragments [][]Fragment
	// Sums, if not nil, has an entry for each of Pieces: the XXH3-64 of each of its layers,
	// computed when the bytes were produced. The node refuses a piece that does not match its sums,
	// so memory that changed since then is never stored. Nil: Write computes the sums from the
	// present bytes.
	Sums [][]uint64
	// Existed, if not nil, has an entry for each of Pieces. Write sets the entry to true
	// if the piece was stored before the call.
	Existed []bool
	Class   Class
	// AllCopies makes a piece count as stored only if all nodes that store it have it: as many as the
	// namespace has replicas. Otherwise one of them is enough.
	AllCopies bool
}

// WriteResult is the result of a Write.
type WriteResult struct {
	// Outcome is Hit if any piece is stored now, by this call or before.
	Outcome Outcome
	// Blocks is the length of the prefix that is stored now, as far as this call can determine: the
	// number of blocks before the first block with a refused piece, or of all IDs if no piece was
	// refused.
	Blocks int
	// Stored is the number of pieces that this call has stored, and Existed the number of pieces
	// that were stored before.
	Stored, Existed int
	// Refused are the other pieces, in order of blocks.
	Refused []RefusedPiece
	// Bytes is the number of bytes sent and stored.
	Bytes int64
	// Detail is the node's explanation if Outcome is Busy or Miss, for people.
	Detail string
}
