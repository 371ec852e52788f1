package kv

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
)

// Token is one token id of a model's vocabulary.
type Token = uint32

// rootDomain makes the hashes of roots differ from all other SHA-256 hashes. It contains the
// version of the chain: if a formula changes, this string changes.
const rootDomain = "penstock kv chain v1\x00"

// A Chain turns a prompt's tokens into the ids of its blocks. The zero Chain is
// not usable; make one with Namespace.Chain or NewChain. A copy of a Chain is
// independent: the two can continue with different tokens.
//
// The formulas are the following, for implementations in other languages. Test vectors are in
// testdata/chain_vectors.json. All integers are little endian:
//
//	root  = SHA-256("penstock kv chain v1\x00" ‖ u32 len(tenant) ‖ tenant ‖ u32 len(name) ‖ name
//	                ‖ u32 len(salt) ‖ salt ‖ u32 BlockTokens)[:16]
//	id(0) = SHA-256(root   ‖ u32 n ‖ u32 t(0) ‖ … ‖ u32 t(n-1))[:16]        n = BlockTokens
//	id(i) = SHA-256(id(i-1) ‖ u32 n ‖ …the tokens of block i…)[:16]
//
// The hash is SHA-256 and not a faster function because tenants share a store: an attacker who
// could construct a collision would read another tenant's KV. The epoch of the weights is not in
// the id. It is part of the key under which the index stores the block.
type Chain struct {
	tip         BlockID
	blockTokens int
}

// NewChain returns the chain that starts at the root of the given tenant, name
// and salt. It fails if blockTokens is outside [1, MaxBlockTokens].
func NewChain(tenant, name string, salt []byte, blockTokens int) (Chain, error) {
	if blockTokens < 1 || blockTokens > MaxBlockTokens {
		return Chain{}, fmt.Errorf("kv: block of %d tokens; want 1 to %d", blockTokens, MaxBlockTokens)
	}
	h := sha256.New()
	h.Write([]byte(rootDomain))
	for _, part := range [][]byte{[]byte(tenant), []byte(name), salt} {
		h.Write(binary.LittleEndian.AppendUint32(nil, uint32(len(part))))
		h.Write(part)
	}
	h.Write(binary.LittleEndian.AppendUint32(nil, uint32(blockTokens)))
	var sum [sha256.Size]byte
	h.Sum(sum[:0])
	return Chain{tip: BlockID(sum[:BlockIDSize]), blockTokens: blockTokens}, nil
}

// Tip returns the id of the chain's last block, or the root if the chain has no block yet.
func (c Chain) Tip() BlockID { return c.tip }

// saltDomain makes the hashes of salts differ from block ids, which hash other fields.
const saltDomain = "penstock kv salt v1\x00"

// Resume returns a chain whose last block is parent.
func (c Chain) Resume(parent BlockID) Chain {
	c.tip = parent
	return c
}

// Salt returns a chain whose next ids also depend on extra. extra identifies what the KV depends on
// besides the tokens: an adapter, a cache salt, the hash of an image.
//
//	tip = SHA-256("penstock kv salt v1\x00" ‖ tip ‖ u32 len(extra) ‖ extra)[:16]
func (c Chain) Salt(extra []byte) Chain {
	h := sha256.New()
	h.Write([]byte(saltDomain))
	h.Write(c.tip[:])
	h.Write(binary.LittleEndian.AppendUint32(nil, uint32(len(extra))))
	h.Write(extra)
	var sum [sha256.Size]byte
	h.Sum(sum[:0])
	c.tip = BlockID(sum[:BlockIDSize])
	return c
}

// Append hashes every whole block of tokens onto the chain and appends the ids to dst. It returns
// dst and the number of tokens consumed, which is a multiple of the block length. The caller keeps
// the tokens after the last whole block.
func (c *Chain) Append(dst []BlockID, tokens []Token) (ids []BlockID, consumed int) {
	buf := make([]byte, 0, BlockIDSize+4+4*c.blockTokens)
	for len(tokens)-consumed >= c.blockTokens {
		block := tokens[consumed : consumed+c.blockTokens]
		buf = append(buf[:0], c.tip[:]...)
		buf = binary.LittleEndian.AppendUint32(buf, uint32(len(block)))
		for _, t := range block {
			buf = binary.LittleEndian.AppendUint32(buf, t)
		}
		sum := sha256.Sum256(buf)
		c.tip = BlockID(sum[:BlockIDSize])
		dst = append(dst, c.tip)
		consumed += c.blockTokens
	}
	return dst, consumed
}
