package blockstore

import (
	"context"
	"sync"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
)

// headerPool provides aligned memory for the slot headers of layer-range reads: one page, or more
// for slots of many layers.
type headerPool struct {
	pages sync.Pool // of *[]byte of one page
}

// get returns a buffer of sizeBytes.
func (p *headerPool) get(sizeBytes int64) []byte {
	if sizeBytes == ondisk.Page {
		if b, ok := p.pages.Get().(*[ondisk.Page]byte); ok {
			return b[:]
		}
	}
	b, _, _ := heapAlloc(context.Background(), int(sizeBytes)) // cannot fail
	return b
}

// put returns a buffer to the pool.
func (p *headerPool) put(b []byte) {
	if len(b) == ondisk.Page {
		p.pages.Put((*[ondisk.Page]byte)(b))
	}
}
