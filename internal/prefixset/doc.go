// Package prefixset approximates the prefix cache of an inference engine by a bounded set of the
// hashes of the blocks that were sent to the engine. Each hash is that of a block and all blocks
// before it.
//
//	Touch(a b c), Touch(a b d)     most recently used: a b d c
//	Match(a b d e) = 3             full: the next new hash replaces c
//
// The set drops the last block of the least recently used chain first, as the caches of vLLM and
// SGLang do. The package does not compute hashes, and has no entry of the engine's own: a prefix
// that the engine has dropped counts as present until the set drops it too.
package prefixset
