package client

import (
	"time"

	"github.com/penstock-kv/penstock/kv"
)

// A Piece places one layer group of one block of a chain in the caller's memory.
type Piece struct {
	// Block is the index in the chain, Group the layer group.
	Block, Group int
	// Offset is where the piece starts in the Memory, in bytes. A piece is as
	// long as its geometry says (kv.Geometry.PieceBytes), or, where a range of
	// layers is read, as long as these layers.
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

// MatchRequest asks for the longest cached prefix.
type MatchRequest struct {
	Namespace kv.Namespace
	// IDs is the chain from the first block of the prompt; in a flat namespace,
	// the keys. Tokens may be given instead where ids are chained.
	IDs    []kv.BlockID
	Tokens []kv.Token
	// Epoch of the caller's weights; 0 means Namespace.Epoch. Without Oldest and Newest,
	// blocks of this epoch alone match, and only if the node keeps it live.
	Epoch kv.Epoch
	// Oldest, if not 0, is the oldest epoch that may match: a caller that tolerates KV
	// of weights up to n versions old sets it to Epoch - n. The result is the longest
	// match of one epoch from Oldest to Epoch. If several epochs have a match of that
	// length, it is the newest one's. Read needs the result's Epoch. One prefix never mixes
	// epochs, unless Mix is set.
	Oldest kv.Epoch
	// Mix lets blocks of one prefix be of different epochs: each block is of the newest
	// epoch, from Oldest to Epoch, that has all pieces of the block that the prefix needs.
	// Read needs the result's Epochs.
	Mix bool
	// Newest takes the node's newest epoch in place of Epoch, which must be 0: for
	// callers without weights of their own.
	Newest bool
	// Lease, if positive, keeps what matched from being evicted for so long.
	// Pin keeps it until Release.
	Lease time.Duration
	Pin   bool
}

// MatchResult is the longest cached prefix.
type MatchResult struct {
	Outcome Outcome
	// Blocks and Tokens are its length; IDs the ids of its blocks.
	Blocks, Tokens int
	IDs            []kv.BlockID
	// Cut says why it is not longer.
	Cut Cut
	// Epoch is the epoch of every block that matched. If no block matched, it is the
	// newest requested epoch that the client has learned of. If no requested epoch is
	// live, the match is a Miss with CutEpoch. With Mix it is the newest epoch of a block.
	Epoch kv.Epoch
	// Epochs are the epochs of the blocks, from the first block on; only with Mix.
	Epochs []kv.EpochRun
	// Bytes is the payload that a read of the whole match moves.
	Bytes int64
	// Lease is nil unless one was asked for and granted.
	Lease *Lease
}

// ReadRequest asks for blocks to be put into the caller's memory.
type ReadRequest struct {
	Namespace kv.Namespace
	// IDs is the chain from the first block of the prompt to the end of what is
	// wanted; in a flat namespace, the keys. Tokens may be given instead. With
	// window or state groups it must be exactly a prefix that Match returned.
	IDs    []kv.BlockID
	Tokens []kv.Token
	// First is the index of the first block to load: the caller holds those before
	// it, and nothing is put where they lie.
	First int
	// Epoch of the caller's weights; 0 means Namespace.Epoch.
	Epoch kv.Epoch
	// Epochs, if not nil, are the epochs of the blocks, from the first block on, in place
	// of Epoch: those of a mixed match, at least for all of IDs. Each block is loaded from
	// its own epoch.
	Epochs []kv.EpochRun
	// Into is where the bytes go.
	Into *Memory
	// Base is where the prompt's block 0 lies in Into, and Pieces are what to load
	// and where each goes, in any order, none before First and no two of them over
	// each other. Nil: what a prefix of this length needs from First on, each
	// piece at Base + Geometry.PieceOffset(block, group). So a block has one place,
	// by its index in the prompt, and Write takes it from the same place.
	Base   int64
	Pieces []Piece
	// Fragments, if not nil, has an entry for each of Pieces. The entry lists the places
	// of the layers to be read, in order of the layers. Into and the piece's Offset are
	// then unused.
	Fragments [][]Fragment
	// FirstLayer and Layers choose a range of layers of every piece; Layers 0
	// means all from FirstLayer on. With Pieces nil each layer goes to its place in
	// its block; the offset of one of Pieces is that of the first layer read.
	FirstLayer, Layers int
	// Sums, if not nil, has an entry for each of Pieces, as long as the layers
	// read: the writer's XXH3-64 of each layer is put there once the bytes in
	// memory have been compared with it, for whoever carries them further. What
	// did not arrive leaves its entry as it was.
	Sums [][]uint64
	// Arrived, if not nil, has an entry for each of Pieces. Read sets the entry to true
	// when the piece is in memory and verified.
	Arrived []bool
	// Progress, if set, is called while the Read goes on: when more blocks are
	// verified, and, over a transfer engine that says what lands
	// (rdma.LandingRegion), when another block's bytes have come. There is one call at
	// a time. It is called by the engine's goroutines and must not block.
	Progress func(ReadProgress)
}

// ReadResult is what was put into the caller's memory.
type ReadResult struct {
	Outcome Outcome
	// Blocks is the length of the prefix that can be used: of every block
	// before it, each piece that was asked for is in memory and verified.
	// Blocks without a piece in the request count as held by the caller. Tokens
	// is the same in tokens.
	Blocks, Tokens int
	// Cut says why it is not longer.
	Cut Cut
	// Lost are the pieces of blocks that matched and did not arrive, in order of
	// blocks.
	Lost []LostPiece
	// Bytes were delivered and verified, also behind a lost block.
	Bytes int64
	// Epoch is that of the blocks read; with ReadRequest.Epochs the newest of those.
	Epoch kv.Epoch
	// Detail is what the node said when Outcome is Busy, for people.
	Detail string
}

// Class says how long a block is wanted.
type Class uint8

const (
	// Prefix blocks are kept until they are evicted.
	Prefix Class = iota
	// Transfer blocks are dropped once Delivered says so.
	Transfer
)

// WriteRequest offers blocks to the store.
type WriteRequest struct {
	Namespace kv.Namespace
	// IDs is the whole chain from the first block of the prompt; in a flat
	// namespace, the keys. Tokens may be given instead where ids are chained.
	IDs    []kv.BlockID
	Tokens []kv.Token
	// First is the index of the first block to store: those before it are
	// stored already (ReadResult.Blocks) and are not sent.
	First int
	// Epoch of the weights that made the blocks; 0 means Namespace.Epoch.
	Epoch kv.Epoch
	// From is where the bytes are. They must not change until Write returns.
	From *Memory
	// Base is where the prompt's block 0 lies in From, also if First is not 0. Pieces
	// are what to store and where each is, in any order, none before First and no
	// two of them over each other. Nil, in a namespace of one layer group: the
	// blocks from First on, each at Base + Geometry.PieceOffset(block, 0), where
	// Read puts it.
	Base   int64
	Pieces []Piece
	// Fragments, if not nil, has an entry for each of Pieces. The entry lists the places
	// of the piece's layers, in order. From and the piece's Offset are then unused.
	Fragments [][]Fragment
	// Sums, if not nil, has an entry for each of Pieces: the XXH3-64 of each of its
	// layers, made when the bytes were. The node refuses a piece that is not what
	// its sums say, so memory that changed since then is never stored as if it were
	// right. Nil: they are made of what is in memory now.
	Sums [][]uint64
	// Existed, if not nil, has an entry for each of Pieces. Write sets the entry to true
	// if the piece was stored before the call.
	Existed []bool
	Class   Class
}

// WriteResult is what was stored.
type WriteResult struct {
	// Outcome is Hit if any piece is stored now, by this call or before it.
	Outcome Outcome
	// Blocks is the length of the prefix that is stored now, as far as this call
	// knows: First, and the blocks behind it whose offered pieces all are.
	Blocks int
	// Stored and Existed count pieces: those put there by this call, and those
	// that were there.
	Stored, Existed int
	// Refused are the others, in order of blocks.
	Refused []RefusedPiece
	// Bytes were sent and stored.
	Bytes int64
	// Detail is what the node said when Outcome is Busy or Miss, for people.
	Detail string
}
