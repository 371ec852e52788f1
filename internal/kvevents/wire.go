package kvevents

import (
	"encoding/binary"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/penstock-kv/penstock/kv"
)

// Kind is the kind of a Change.
type Kind uint8

const (
	// Stored: the blocks can be read. Each is the child of the block before it.
	Stored Kind = iota + 1
	// Removed: the blocks can no longer be read.
	Removed
	// Cleared: no block of the namespace can be read.
	Cleared
)

// Change is one event for subscribers.
type Change struct {
	Kind Kind
	IDs  []kv.BlockID
	// Parent is the parent of the first stored block; zero if it has none.
	Parent kv.BlockID
	// BlockTokens is the number of tokens of each stored block.
	BlockTokens int
}

// Wire is the encoding of changes. The zero value encodes each event as an array, as vLLM up to
// 0.23 does, with hashes as bytes.
type Wire struct {
	// Maps encodes an event as a map of its fields, as vLLM since 0.24 does.
	Maps bool
	// IntHashes encodes a hash as an integer: its last 8 bytes, big-endian. vLLM does so with
	// VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES.
	IntHashes bool
	// Medium is vLLM's name for the storage medium of the blocks.
	Medium string
}

// MediumStorage is the Medium of blocks that are outside of the memory of an engine's host.
const MediumStorage = "STORAGE"

// AppendBatch appends a batch of changes. at is the time of all of them.
func (w Wire) AppendBatch(b []byte, at time.Time, changes ...Change) []byte {
	b = msgp.AppendArrayHeader(b, 3)
	b = msgp.AppendFloat64(b, float64(at.UnixMicro())/1e6)
	b = msgp.AppendArrayHeader(b, uint32(len(changes)))
	for _, c := range changes {
		b = w.appendChange(b, c)
	}
	return msgp.AppendInt(b, 0) // the data-parallel rank; AIBrix refuses nil
}

func (w Wire) appendChange(b []byte, c Change) []byte {
	switch c.Kind {
	case Stored:
		e := w.event(b, "BlockStored", 7)
		e.hashes("block_hashes", c.IDs)
		if e.field("parent_block_hash"); c.Parent.IsZero() {
			e.b = msgp.AppendNil(e.b)
		} else {
			e.b = w.appendHash(e.b, c.Parent)
		}
		e.field("token_ids")
		e.b = msgp.AppendArrayHeader(e.b, 0)
		e.field("block_size")
		e.b = msgp.AppendInt(e.b, c.BlockTokens)
		e.field("lora_id")
		e.b = msgp.AppendNil(e.b)
		e.medium()
		e.field("lora_name")
		return msgp.AppendNil(e.b)
	case Removed:
		e := w.event(b, "BlockRemoved", 2)
		e.hashes("block_hashes", c.IDs)
		e.medium()
		return e.b
	case Cleared:
		return w.event(b, "AllBlocksCleared", 0).b
	}
	panic("kvevents: a Change without a kind")
}

// encoding is an event that is being encoded.
type encoding struct {
	Wire
	b []byte
}

// event begins an event. fields is the number of its fields without the tag.
func (w Wire) event(b []byte, tag string, fields uint32) *encoding {
	e := &encoding{w, b}
	if w.Maps {
		e.b = msgp.AppendMapHeader(e.b, fields+1)
	} else {
		e.b = msgp.AppendArrayHeader(e.b, fields+1)
	}
	e.field("type")
	e.b = msgp.AppendString(e.b, tag)
	return e
}

// field begins a field. The caller appends the value.
func (e *encoding) field(name string) {
	if e.Maps {
		e.b = msgp.AppendString(e.b, name)
	}
}

func (e *encoding) hashes(name string, ids []kv.BlockID) {
	e.field(name)
	e.b = msgp.AppendArrayHeader(e.b, uint32(len(ids)))
	for _, id := range ids {
		e.b = e.appendHash(e.b, id)
	}
}

func (e *encoding) medium() {
	e.field("medium")
	e.b = msgp.AppendString(e.b, e.Medium)
}

func (w Wire) appendHash(b []byte, id kv.BlockID) []byte {
	if w.IntHashes {
		return msgp.AppendUint64(b, binary.BigEndian.Uint64(id[len(id)-8:]))
	}
	return msgp.AppendBytes(b, id[:])
}
