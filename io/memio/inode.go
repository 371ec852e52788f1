package memio

import (
	"bytes"
	"maps"
	"sync"

	"github.com/penstock-kv/penstock/internal/invariants"
	"github.com/penstock-kv/penstock/io/blockio"
)

// sectorBytes is the unit that a disk writes atomically.
const sectorBytes = 512

// page is the content of blockio.Align bytes of a file. A page is immutable once it is in an inode;
// nil means zeroes.
type page [blockio.Align]byte

// inode is one file, open or not, named or removed.
type inode struct {
	name string
	size int64

	mu sync.RWMutex
	// settled is set when a Sync has made the creation of the file durable.
	settled bool
	// pages is the content that a read returns, by page number; an absent page has zeroes.
	pages map[int64]*page
	// earlier has the former contents of each page written since the last Sync: first the durable
	// content, then every later content except the present one.
	earlier map[int64][]*page
}

func newInode(name string, sizeBytes int64) *inode {
	return &inode{name: name, size: sizeBytes, pages: make(map[int64]*page), earlier: make(map[int64][]*page)}
}

func (ino *inode) read(offset int64, bufs [][]byte) {
	ino.mu.RLock()
	defer ino.mu.RUnlock()
	n := offset / blockio.Align
	for _, buf := range bufs {
		for ; len(buf) > 0; buf, n = buf[blockio.Align:], n+1 {
			if p := ino.pages[n]; p != nil {
				copy(buf, p[:])
			} else {
				clear(buf[:blockio.Align])
			}
		}
	}
}

func (ino *inode) write(offset int64, bufs [][]byte, versionsMax int) {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	n := offset / blockio.Align
	for _, buf := range bufs {
		for ; len(buf) > 0; buf, n = buf[blockio.Align:], n+1 {
			ino.putLocked(n, newPage(buf[:blockio.Align]), versionsMax)
		}
	}
	if invariants.Enabled {
		ino.checkUnchangedLocked(offset, bufs)
	}
}

// putLocked makes p the present content of page n.
func (ino *inode) putLocked(n int64, p *page, versionsMax int) {
	versions := append(ino.earlier[n], ino.pages[n])
	if len(versions) > versionsMax {
		// The first version, which is the durable one, is always kept.
		versions = append(versions[:1], versions[2:]...)
	}
	ino.earlier[n] = versions
	ino.setLocked(n, p)
}

func (ino *inode) setLocked(n int64, p *page) {
	if p == nil {
		delete(ino.pages, n)
		return
	}
	ino.pages[n] = p
}

// checkUnchangedLocked panics if the caller of a write changed the buffers while the device owned
// them.
func (ino *inode) checkUnchangedLocked(offset int64, bufs [][]byte) {
	n := offset / blockio.Align
	for _, buf := range bufs {
		for ; len(buf) > 0; buf, n = buf[blockio.Align:], n+1 {
			p := ino.pages[n]
			if p == nil {
				p = new(page)
			}
			invariants.Assert(bytes.Equal(p[:], buf[:blockio.Align]),
				"the buffer written to page %d of %s changed before the write completed", n, ino.name)
		}
	}
}

// newPage returns a copy of b, or nil if b has only zeroes.
func newPage(b []byte) *page {
	p := page(b)
	if p == (page{}) {
		return nil
	}
	return &p
}

// settle makes the creation and the present content of the file durable.
func (ino *inode) settle() {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	ino.settled = true
	clear(ino.earlier)
}

func (ino *inode) clone() *inode {
	ino.mu.RLock()
	defer ino.mu.RUnlock()
	c := &inode{name: ino.name, size: ino.size, settled: ino.settled, pages: maps.Clone(ino.pages)}
	c.earlier = make(map[int64][]*page, len(ino.earlier))
	for n, versions := range ino.earlier {
		c.earlier[n] = append([]*page(nil), versions...)
	}
	return c
}
