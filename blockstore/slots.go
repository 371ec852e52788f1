package blockstore

import (
	"fmt"

	"github.com/penstock-kv/penstock/kv"
)

// MaxReaders is the maximum number of concurrent readers of a slot.
const MaxReaders = 1<<readerBits - 1

// slotState is the state of a slot.
type slotState uint8

const (
	slotFree slotState = iota
	// slotReserved: returned by Reserve, not yet written.
	slotReserved
	// slotWritten: the device completed the write; the slot is not committed yet.
	slotWritten
	// slotLive: the slot is committed, and the index refers to it.
	slotLive
	// slotCondemned: the slot was freed while it had readers. It becomes free when the last reader
	// leaves.
	slotCondemned
)

// String returns the state's name, which errors and test transcripts contain: free, reserved,
// written, live, condemned.
func (s slotState) String() string {
	switch s {
	case slotFree:
		return "free"
	case slotReserved:
		return "reserved"
	case slotWritten:
		return "written"
	case slotLive:
		return "live"
	case slotCondemned:
		return "condemned"
	}
	return fmt.Sprintf("slotState(%d)", uint8(s))
}

// slotWord is the state of a slot in DRAM, in 8 bytes:
//
//	63         16 15   13 12      0
//	┌────────────┬───────┬─────────┐
//	│ generation │ state │ readers │
//	└────────────┴───────┴─────────┘
//
// Invariant: a free slot has no readers, and is in the segment's set of free slots; a condemned
// slot has at least one reader.
type slotWord uint64

const (
	readerBits = 13
	stateBits  = 3
	stateShift = readerBits
	genShift   = readerBits + stateBits
)

// The three parts must fill the word.
var _ [64]struct{} = [kv.GenerationBits + stateBits + readerBits]struct{}{}

func makeSlotWord(g kv.Generation, s slotState) slotWord {
	return slotWord(g)<<genShift | slotWord(s)<<stateShift
}

func (w slotWord) generation() kv.Generation { return kv.Generation(w >> genShift) }
func (w slotWord) state() slotState          { return slotState(w >> stateShift & (1<<stateBits - 1)) }
func (w slotWord) readers() int              { return int(w & MaxReaders) }

func (w slotWord) withState(s slotState) slotWord {
	return w&^((1<<stateBits-1)<<stateShift) | slotWord(s)<<stateShift
}

// slotCounts has the number of slots in each state. Written slots count as reserved.
type slotCounts struct {
	free, reserved, live, condemned int64
}

func (c *slotCounts) of(s slotState) *int64 {
	switch s {
	case slotFree:
		return &c.free
	case slotReserved, slotWritten:
		return &c.reserved
	case slotLive:
		return &c.live
	}
	return &c.condemned
}
