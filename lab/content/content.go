// Package content generates the bytes of blocks in demos, replays and emulated engines. The bytes
// are derived from the block's id and epoch, so the receiver of a block, or of one layer of a
// block, can check every byte.
package content

import (
	"encoding/binary"

	"github.com/penstock-kv/penstock/kv"
)

// Content is the sequence of words of a block. Word i is computed from the seed and i with one
// multiplication, so generating or comparing a word costs less than the memory access. The words
// are not random enough for other uses.
type Content struct{ seed uint64 }

// Of returns the content of the block with the given id and epoch. The same id has other bytes in
// another epoch, so that a stale block is detected.
func Of(id kv.BlockID, epoch kv.Epoch) Content {
	lo, hi := binary.LittleEndian.Uint64(id[:8]), binary.LittleEndian.Uint64(id[8:])
	return Content{seed: ((lo^lo>>32)*factor ^ hi) + uint64(epoch)*era}
}

const (
	// stride is an odd number near 2^64 divided by the golden ratio, so that consecutive words
	// differ in their high bits too.
	stride = 0x9e3779b97f4a7c15
	factor = 0xd6e8feb86659fd93
	era    = 0xa0761d6478bd642f
)

// mask truncates products of constants to 64 bits.
const mask = 1<<64 - 1

// word returns word i of the content.
func (c Content) word(i uint64) uint64 { return scramble(c.seed + i*stride) }

func scramble(x uint64) uint64 { return (x ^ x>>32) * factor }

// stepBytes is the number of bytes per step of the loops below: four words, so that the processor
// executes several multiplications in parallel.
const stepBytes = 32

// From returns the content that begins at an offset, in bytes and a multiple of 8. With From a
// single layer of a block can be generated or compared.
func (c Content) From(offset int64) Content { return Content{c.seed + uint64(offset/8)*stride} }

// Fill writes the content to b.
func (c Content) Fill(b []byte) {
	x := c.seed
	for len(b) >= stepBytes {
		s := b[:stepBytes:stepBytes]
		binary.LittleEndian.PutUint64(s[0:], scramble(x))
		binary.LittleEndian.PutUint64(s[8:], scramble(x+stride))
		binary.LittleEndian.PutUint64(s[16:], scramble(x+2*stride&mask))
		binary.LittleEndian.PutUint64(s[24:], scramble(x+3*stride&mask))
		x += 4 * stride & mask
		b = b[stepBytes:]
	}
	for len(b) > 0 {
		var word [8]byte
		binary.LittleEndian.PutUint64(word[:], scramble(x))
		b = b[copy(b, word[:]):]
		x += stride
	}
}

// Differs returns the offset of the first byte of b that differs from the content, or -1.
func (c Content) Differs(b []byte) int {
	at, x := 0, c.seed
	for ; len(b)-at >= stepBytes; at += stepBytes {
		s := b[at : at+stepBytes : at+stepBytes]
		if (binary.LittleEndian.Uint64(s[0:])^scramble(x))|
			(binary.LittleEndian.Uint64(s[8:])^scramble(x+stride))|
			(binary.LittleEndian.Uint64(s[16:])^scramble(x+2*stride&mask))|
			(binary.LittleEndian.Uint64(s[24:])^scramble(x+3*stride&mask)) != 0 {
			break
		}
		x += 4 * stride & mask
	}
	for ; at < len(b); at, x = at+8, x+stride {
		var word [8]byte
		binary.LittleEndian.PutUint64(word[:], scramble(x))
		for j := range min(8, len(b)-at) {
			if b[at+j] != word[j] {
				return at + j
			}
		}
	}
	return -1
}
