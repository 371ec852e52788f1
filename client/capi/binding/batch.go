package binding

import (
	"context"
	"fmt"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
)

// Op is what a batch does, as PENSTOCK_OP_*.
type Op uint32

// The operations of penstock.h.
const (
	OpMatch Op = iota + 1
	OpGet
	OpPut
	OpExists
	OpTouch
	OpDelete
)

// moves reports whether values are moved.
func (o Op) moves() bool { return o == OpGet || o == OpPut }

// KeyState is what became of one key or piece, as PENSTOCK_KEY_*.
type KeyState = byte

// The states of penstock.h.
const (
	KeyMiss KeyState = iota
	KeyOK
	KeyExists
	KeyBusy
	KeyLost
	KeyRefused
	KeyDown
)

// BatchMax is the most keys of one batch.
const BatchMax = 1 << 16

// Batch is penstock_batch. Its slices may be the caller's memory: nothing but Results and
// the bytes at Addresses is used after Do or Submit has returned.
type Batch struct {
	Epoch     kv.Epoch
	Timeout   time.Duration
	Lease     time.Duration
	AnyMemory bool
	// Keys holds key i at [KeyOffsets[i], KeyOffsets[i+1]).
	Keys       []byte
	KeyOffsets []uint32
	First      int
	// PieceKeys and PieceGroups name the pieces; nil: group 0 of each key from First on.
	PieceKeys   []uint32
	PieceGroups []byte
	// PieceFragments are the ends of each piece's fragments; nil: one for each.
	PieceFragments     []uint32
	Addresses, Lengths []uint64
	// Results takes a KeyState for each piece, or each key; nil: nobody asks.
	Results []byte
}

// Result is penstock_result.
type Result struct {
	Job    Handle
	Op     Op
	N      int
	OK     int
	Prefix int
	Cut    client.Cut
	Bytes  int64
	Epoch  kv.Epoch
	Lease  Handle
	Err    error
}

// call is a batch that was checked and copied.
type call struct {
	ns  *Namespace
	def kv.Namespace // at the epoch of the batch
	op  Op
	ids []kv.BlockID
	// first is the first key that is moved.
	first   int
	pieces  []client.Piece
	within  time.Duration
	lease   time.Duration
	results []byte
	// memory has all pieces, at their offsets. nil: fragments say where each is.
	memory    *client.Memory
	fragments [][]client.Fragment
	// used are counted as used until the call has ended; transient is registered for it.
	used, transient []*Memory
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrInvalid, fmt.Errorf(format, args...))
}

// plan checks a batch and copies what it needs of it. Its end is call.end.
func (n *Namespace) plan(op Op, b *Batch) (*call, error) {
	if op < OpMatch || op > OpDelete {
		return nil, invalid("operation %d", op)
	}
	c := &call{ns: n, def: n.Definition(), op: op, first: b.First, within: b.Timeout, lease: b.Lease}
	if b.Epoch != 0 {
		c.def.Epoch = b.Epoch
	}
	if err := c.takeKeys(b); err != nil {
		return nil, err
	}
	if op.moves() {
		if err := c.takePieces(b); err != nil {
			return nil, err
		}
		if err := c.place(b); err != nil {
			c.end()
			return nil, err
		}
	}
	want := c.n()
	if c.results = b.Results; c.results == nil {
		c.results = make([]byte, want)
	} else if len(c.results) < want {
		c.end()
		return nil, invalid("%d results for %d keys", len(c.results), want)
	}
	c.results = c.results[:want]
	clear(c.results)
	return c, nil
}

// n is how many results there are.
func (c *call) n() int {
	switch {
	case c.op == OpMatch:
		return 0
	case c.op.moves():
		return len(c.pieces)
	}
	return len(c.ids)
}

func (c *call) takeKeys(b *Batch) error {
	n := len(b.KeyOffsets) - 1
	switch {
	case n < 1:
		return invalid("a batch of no keys")
	case n > BatchMax:
		return invalid("a batch of %d keys; at most %d", n, BatchMax)
	case b.First < 0 || b.First > n || b.First != 0 && c.def.Index == kv.IndexFlat:
		return invalid("first key %d of %d (of a flat namespace: 0)", b.First, n)
	}
	c.ids = make([]kv.BlockID, n)
	return c.ns.blockIDs(c.ids, b.Keys, b.KeyOffsets)
}

// blockIDs are the ids of keys.
func (n *Namespace) blockIDs(dst []kv.BlockID, keys []byte, offsets []uint32) error {
	for i := range dst {
		from, to := offsets[i], offsets[i+1]
		if from > to || uint64(to) > uint64(len(keys)) {
			return invalid("key %d is the bytes [%d,%d) of %d", i, from, to, len(keys))
		}
		id, err := n.blockID(keys[from:to])
		if err != nil {
			return invalid("key %d: %w", i, err)
		}
		dst[i] = id
	}
	return nil
}

func (n *Namespace) blockID(key []byte) (kv.BlockID, error) {
	if n.ids {
		return kv.BlockIDFromBytes(key)
	}
	return n.keys.ID(key)
}

// takePieces names the pieces that are moved.
func (c *call) takePieces(b *Batch) error {
	if b.PieceKeys == nil {
		c.pieces = make([]client.Piece, len(c.ids)-c.first)
		for i := range c.pieces {
			c.pieces[i].Block = c.first + i
		}
	} else {
		c.pieces = make([]client.Piece, len(b.PieceKeys))
		for i, k := range b.PieceKeys {
			if int(k) < c.first || int(k) >= len(c.ids) {
				return invalid("piece %d is of key %d; want %d to %d", i, k, c.first, len(c.ids)-1)
			}
			c.pieces[i].Block = int(k)
		}
	}
	if b.PieceGroups != nil && len(b.PieceGroups) != len(c.pieces) {
		return invalid("groups of %d pieces of %d", len(b.PieceGroups), len(c.pieces))
	}
	for i, g := range b.PieceGroups {
		if int(g) >= len(c.def.Geometry.Groups) {
			return invalid("piece %d is of group %d; the namespace has %d", i, g, len(c.def.Geometry.Groups))
		}
		c.pieces[i].Group = int(g)
	}
	if b.PieceFragments == nil && len(b.Addresses) != len(c.pieces) {
		return invalid("%d addresses for %d pieces", len(b.Addresses), len(c.pieces))
	}
	if b.PieceFragments != nil && len(b.PieceFragments) != len(c.pieces)+1 {
		return invalid("fragments of %d pieces of %d", len(b.PieceFragments)-1, len(c.pieces))
	}
	return nil
}

// fragmentsOf are the fragments of piece i.
func (b *Batch) fragmentsOf(i int) (from, to int, err error) {
	if b.PieceFragments == nil {
		return i, i + 1, nil
	}
	from, to = int(b.PieceFragments[i]), int(b.PieceFragments[i+1])
	if from >= to || to > len(b.Addresses) || to > len(b.Lengths) {
		return 0, 0, invalid("piece %d is the fragments [%d,%d) of %d", i, from, to, len(b.Addresses))
	}
	return from, to, nil
}

// place finds the memory of every fragment.
func (c *call) place(b *Batch) error {
	var last *Memory
	one := true
	// One allocation for the fragments of all pieces.
	fragments := make([]client.Fragment, 0, len(b.Addresses))
	c.fragments = make([][]client.Fragment, len(c.pieces))
	for i := range c.pieces {
		from, to, err := b.fragmentsOf(i)
		if err != nil {
			return err
		}
		p := &c.pieces[i]
		layerBytes := c.def.Geometry.LayerBytes(p.Group)
		var total int64
		first := len(fragments)
		for f := from; f < to; f++ {
			addr, n := b.Addresses[f], b.Lengths[f]
			if addr == 0 || n == 0 || n > kv.MaxPieceBytes || n%uint64(layerBytes) != 0 {
				return invalid("piece %d, fragment %d: %d bytes at address %#x; want a whole number of layers, of %d bytes", i, f-from, n, addr, layerBytes)
			}
			m, err := c.find(last, addr, n, b.AnyMemory)
			if err != nil {
				return fmt.Errorf("piece %d, fragment %d: %w", i, f-from, err)
			}
			if last != nil && m != last {
				one = false
			}
			last = m
			at := int64(addr - m.addr)
			if k := len(fragments) - 1; k >= first && fragments[k].Memory == m.client && fragments[k].Offset+int64(fragments[k].Layers)*layerBytes == at {
				fragments[k].Layers += int(n / uint64(layerBytes))
			} else {
				fragments = append(fragments, client.Fragment{Memory: m.client, Offset: at, Layers: int(n / uint64(layerBytes))})
			}
			total += int64(n)
		}
		if want := c.def.Geometry.PieceBytes(p.Group); total != want {
			return invalid("piece %d has %d bytes; a value of namespace %q has %d (group %d of %v)", i, total, c.def.Name, want, p.Group, c.def.Geometry)
		}
		c.fragments[i] = fragments[first:len(fragments):len(fragments)]
		p.Offset = fragments[first].Offset
		one = one && len(c.fragments[i]) == 1
	}
	if one && last != nil {
		c.memory, c.fragments = last.client, nil
	}
	return nil
}

// find returns the registered memory of a fragment; last is that of the one before.
func (c *call) find(last *Memory, addr, n uint64, anyMemory bool) (*Memory, error) {
	if last != nil && addr >= last.addr && addr <= last.end && n <= last.end-addr {
		return last, nil
	}
	s := c.ns.store
	if m := s.use(addr, n); m != nil {
		c.used = append(c.used, m)
		return m, nil
	}
	if !anyMemory {
		return nil, fmt.Errorf("%w: [%#x,%#x); call penstock_register, or set PENSTOCK_ANY_MEMORY", ErrUnregistered, addr, addr+n)
	}
	m, err := s.register(addr, n)
	if err != nil {
		return nil, err
	}
	c.transient = append(c.transient, m)
	return m, nil
}

// end gives back what plan took. The call's memory is the caller's again then.
func (c *call) end() {
	s := c.ns.store
	for _, m := range c.transient {
		// No operation uses it: client.Read and client.Write have returned.
		if err := m.client.Close(context.Background()); err != nil {
			s.logs.logger().Error("memory of a batch is still registered", "err", err)
		}
	}
	if len(c.used) > 0 {
		s.unuse(c.used)
	}
	c.transient, c.used = nil, nil
}

// KeyIDs puts the ids of keys into dst.
func (n *Namespace) KeyIDs(dst []kv.BlockID, keys []byte, offsets []uint32) error {
	return n.blockIDs(dst, keys, offsets)
}

// Chain appends to dst the ids of the whole blocks of tokens, after parent, or from the
// start of the prompt where that is nil, and returns how many there are; extra, if not
// empty, goes into each of them.
func (n *Namespace) Chain(dst []kv.BlockID, parent *kv.BlockID, extra []byte, tokens []kv.Token) (int, error) {
	c, err := n.Definition().Chain()
	if err != nil {
		return 0, invalid("%w", err)
	}
	if parent != nil {
		c = c.Resume(*parent)
	}
	if len(extra) > 0 {
		c = c.Salt(extra)
	}
	ids, _ := c.Append(dst, tokens)
	return len(ids) - len(dst), nil
}
