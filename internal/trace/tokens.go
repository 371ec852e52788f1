package trace

import "github.com/penstock-kv/penstock/kv"

// Vocabulary is the number of different token ids in generated prompts. The ids are 0 to
// Vocabulary-1; the vocabulary of every real model contains these ids.
const Vocabulary = 1 << 16

// tailBit marks the block ids that are generated for the ends of prompts. No id of a trace has this
// bit: the ids of Mooncake are small numbers, and the ids of sessions are session<<32 | local.
const tailBit = 1 << 63

// AppendBlock appends the first n tokens of the block with the given id to dst. Equal ids have
// equal tokens; different ids differ within the first four tokens.
func AppendBlock(dst []kv.Token, id uint64, n int) []kv.Token {
	for i := 0; i < n; i += 4 {
		// Word 0 is a permutation of id, so the first four tokens of 16 bits determine the id.
		word := mix(id + uint64(i/4)*0x9e3779b97f4a7c15)
		for j := range min(4, n-i) {
			dst = append(dst, kv.Token(uint16(word>>(16*j))))
		}
	}
	return dst
}

// mix is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable
// Pseudorandom Number Generators, OOPSLA 2014): a permutation of the 64-bit words.
func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// AppendTokens appends the whole prompt of the request to dst: InputTokens tokens, in which blocks
// with the same id have the same tokens. Tokens after the last listed block are unique to the
// request.
func (r *Request) AppendTokens(dst []kv.Token) []kv.Token {
	left := r.InputTokens
	for _, id := range r.Blocks {
		n := min(left, r.BlockTokens)
		dst = AppendBlock(dst, id, n)
		left -= n
	}
	if left > 0 {
		dst = AppendBlock(dst, tailBit|uint64(r.Index), left)
	}
	return dst
}
