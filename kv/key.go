package kv

import (
	"crypto/sha256"
	"fmt"
)

// KeyMaxBytes is the longest key of an engine.
const KeyMaxBytes = 256

// keyDomain separates ids of keys from every other use of SHA-256, and names the
// version of the formula.
const keyDomain = "penstock kv key v1\x00"

// Keys turns keys that an engine chose, of 1 to KeyMaxBytes bytes, into the ids of a
// namespace's blocks:
//
//	id = SHA-256("penstock kv key v1\x00" ‖ root ‖ key)[:16]
//
// where root is that of the namespace's Chain. An id does not depend on the keys before
// it, so that a key can be looked up alone. In a namespace whose ids are chained a key
// must therefore name everything that comes before its block.
//
// n keys of one namespace share an id with a probability of at most n²/2^129, 2^-49 for
// 2^40 keys; and to search for two that do takes about 2^64 steps.
type Keys struct {
	prefix [len(keyDomain) + BlockIDSize]byte
}

// Keys returns the mapping of the namespace's keys.
func (n Namespace) Keys() (Keys, error) {
	c, err := n.Chain()
	if err != nil {
		return Keys{}, err
	}
	var k Keys
	tip := c.Tip()
	copy(k.prefix[copy(k.prefix[:], keyDomain):], tip[:])
	return k, nil
}

// ID returns the id of a key.
func (k *Keys) ID(key []byte) (BlockID, error) {
	if len(key) == 0 || len(key) > KeyMaxBytes {
		return BlockID{}, fmt.Errorf("kv: key of %d bytes; want 1 to %d", len(key), KeyMaxBytes)
	}
	var buf [len(k.prefix) + KeyMaxBytes]byte
	n := copy(buf[:], k.prefix[:])
	n += copy(buf[n:], key)
	sum := sha256.Sum256(buf[:n])
	return BlockID(sum[:BlockIDSize]), nil
}
