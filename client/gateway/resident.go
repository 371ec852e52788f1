package gateway

import (
	"encoding/binary"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/internal/prefixset"
	"github.com/penstock-kv/penstock/kv"
)

const (
	// maxCaches is the largest number of decode engines whose prefix caches a gateway approximates. A
	// request can list as many engines (SubmitRequest.resident).
	maxCaches = 64
	// maxCacheBlocks is the largest number of blocks of such a cache. All caches together take about
	// 70 MiB at most.
	maxCacheBlocks = 1 << 14
)

// caches approximates the prefix caches of decode engines by the prompts that this gateway has sent
// to them. An approximation that is wrong only makes the planner choose a slower engine: the engine
// looks up in its own cache which blocks it needs.
type caches struct {
	engines map[string]*cache
	// uses is the number of calls of sent.
	uses uint64
}

// cache is the approximation of one engine's cache.
type cache struct {
	// number, tokens are those of the planner's PrefixCache; epoch is the version of the weights of
	// all blocks.
	number, tokens uint64
	epoch          kv.Epoch
	blocks         *prefixset.Set
	used           uint64 // caches.uses at the last call of sent for the engine
}

// sent records that a decode engine has received a prompt. c is nil if the engine has no cache.
func (x *caches) sent(engine string, c *pb.PrefixCache, epoch kv.Epoch, ids []kv.BlockID, blockTokens int) {
	capacity := int(min(c.GetTokens()/uint64(blockTokens), maxCacheBlocks))
	if capacity == 0 {
		delete(x.engines, engine)
		return
	}
	if x.engines == nil {
		x.engines = make(map[string]*cache)
	}
	e := x.engines[engine]
	switch {
	case e != nil && e.number == c.Number && epoch < e.epoch:
		return // the prompt is of weights that the engine has replaced
	case e == nil || e.number != c.Number || e.tokens != c.Tokens || e.epoch != epoch:
		e = &cache{number: c.Number, tokens: c.Tokens, epoch: epoch, blocks: prefixset.New(capacity)}
		x.engines[engine] = e
	}
	x.uses++
	e.used = x.uses
	e.blocks.Touch(hashesOf(ids))
	if len(x.engines) > maxCaches {
		x.dropOldest()
	}
}

// dropOldest removes the cache of the engine that has been sent no prompt for the longest time.
func (x *caches) dropOldest() {
	oldest := ""
	for name, e := range x.engines {
		if oldest == "" || e.used < x.engines[oldest].used {
			oldest = name
		}
	}
	delete(x.engines, oldest)
}

// find returns the engines whose caches have the beginning of a prompt.
func (x *caches) find(epoch kv.Epoch, ids []kv.BlockID, blockTokens int) []Resident {
	if len(x.engines) == 0 {
		return nil
	}
	var found []Resident
	hashes := hashesOf(ids)
	for name, e := range x.engines {
		if e.epoch != epoch {
			continue
		}
		if n := e.blocks.Match(hashes); n > 0 {
			found = append(found, Resident{name, n * blockTokens})
		}
	}
	return found
}

// hashesOf returns the first 8 bytes of each id. An id is a hash itself.
func hashesOf(ids []kv.BlockID) []uint64 {
	out := make([]uint64, len(ids))
	for i, id := range ids {
		out[i] = binary.LittleEndian.Uint64(id[:])
	}
	return out
}
