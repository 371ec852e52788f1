package kv

import (
	"crypto/sha256"
	"fmt"
)

// KeyMaxBytes is the length of the longest key.
const KeyMaxBytes = 256

// keyDomain makes the hashes of keys differ from all other SHA-256 hashes of Penstock. Its last
// word is the version of the formula.
const keyDomain = "penstock kv key v1\x00"

// Keys maps an engine's keys, of 1 to KeyMaxBytes bytes, to block ids of a namespace:
//
//	id = SHA-256("penstock kv key v1\x00" ‖ root ‖ key)[:16]
//
// where root is the root of the namespace's Chain. The id depends on this key only, so one key can
// be looked up without the keys before it. In a namespace with chained ids a key must therefore
// identify the whole prefix up to and including its block.
//
// The probability that two of n keys of one namespace have the same id is at most
// n²/2^129, which is 2^-49 for 2^40 keys. A search for two such keys takes about 2^64
// steps.
type Keys struct {
	prefix [len(keyDomain) + BlockIDSize]byte
}

// Keys returns the mapping of keys to ids for the namespace.
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
