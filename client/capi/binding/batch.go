package binding

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma/copier"
)

// Op is the operation of a batch, one of PENSTOCK_OP_*.
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

// moves reports whether the operation transfers values.
func (o Op) moves() bool { return o == OpGet || o == OpPut }

// KeyState is the result of one key or piece, one of PENSTOCK_KEY_*.
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

// BatchMax is the greatest number of keys in a batch.
const BatchMax = 1 << 16

// Batch is the Go form of penstock_batch. Its slices may be the caller's memory. After Submit has
// returned, the job uses only Results and the bytes at Addresses.
type Batch struct {
	Epoch kv.Epoch
	// Oldest and Newest have the meaning of client.MatchRequest.
	Oldest kv.Epoch
	Newest bool
	// Mix has the meaning of client.MatchRequest.
	Mix       bool
	Timeout   time.Duration
	Lease     time.Duration
	AnyMemory bool
	// Key i is Keys[KeyOffsets[i]:KeyOffsets[i+1]].
	Keys       []byte
	KeyOffsets []uint32
	First      int
	// PieceKeys and PieceGroups have the key index and the group of each piece. If
	// PieceKeys is nil, there is one piece for each key from First on. If PieceGroups is
	// nil, all pieces are of group 0.
	PieceKeys   []uint32
	PieceGroups []byte
	// Piece i has the fragments [PieceFragments[i], PieceFragments[i+1]). If
	// PieceFragments is nil, each piece has one fragment.
	PieceFragments     []uint32
	Addresses, Lengths []uint64
	// FirstLayer and Layers choose the layers of each piece of a get. Layers 0 means all.
	FirstLayer, Layers int
	// OnStream makes the copies from and to device memory wait until the work is done that the
	// stream Stream of the device's primary context has when the batch begins. Stream 0 is the
	// default stream.
	OnStream bool
	Stream   uint64
	// Results, if not nil, receives a KeyState for each piece or key.
	Results []byte
	// KeyEpochs, if not nil, has an entry for each key. A match with Mix sets the entry to the
	// epoch of the key. A get reads the key from the epoch in its entry.
	KeyEpochs []kv.Epoch
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

// call is a validated copy of a batch.
type call struct {
	ns  *Namespace
	def kv.Namespace // the namespace's definition, with the epoch of the batch
	op  Op
	ids []kv.BlockID
	// first is the index of the first key whose value is transferred.
	first  int
	pieces []client.Piece
	// firstLayer and layers are the layers of each piece that are loaded; layers 0 means all.
	firstLayer, layers int
	within             time.Duration
	lease              time.Duration
	// oldest and newest are copies of Batch.Oldest and Batch.Newest.
	oldest  kv.Epoch
	newest  bool
	mix     bool
	results []byte
	// epochs are the epochs of the keys: the caller's array in a match, a copy in a get.
	epochs []kv.Epoch
	// memory is set if each piece is one fragment and all lie in one memory, at the
	// pieces' offsets. Otherwise fragments is set.
	memory    *client.Memory
	fragments [][]client.Fragment
	// If the values are in device memory, device, spans and chunks are set instead: spans has the
	// places of each piece. after, if set, is the mark for which the copies wait.
	device *device
	spans  [][]span
	chunks []chunk
	after  copier.Mark
	// used are the registered memories of the call. Each counts the call as a user until the method
	// end is called. transient are the memories that are registered only for this call.
	used, transient []*Memory
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrInvalid, fmt.Errorf(format, args...))
}

// plan validates a batch and returns a copy. The caller calls end when the call is done.
func (n *Namespace) plan(op Op, b *Batch) (*call, error) {
	if op < OpMatch || op > OpDelete {
		return nil, invalid("operation %d", op)
	}
	c := &call{ns: n, def: n.Definition(), op: op, first: b.First, within: b.Timeout, lease: b.Lease, oldest: b.Oldest, newest: b.Newest, mix: b.Mix}
	if (b.Oldest != 0 || b.Newest || b.Mix) && op != OpMatch {
		return nil, invalid("a range of epochs is for match only")
	}
	if b.Newest && b.Epoch != 0 {
		return nil, invalid("the newest epoch and epoch %d are both requested", b.Epoch)
	}
	if b.Layers == 0 && b.FirstLayer != 0 || b.Layers != 0 && op != OpGet {
		return nil, invalid("%d layers from layer %d; a range of layers is for get only, and has at least 1 layer", b.Layers, b.FirstLayer)
	}
	c.firstLayer, c.layers = b.FirstLayer, b.Layers
	if b.Epoch != 0 {
		c.def.Epoch = b.Epoch
	}
	if err := c.takeKeys(b); err != nil {
		return nil, err
	}
	if err := c.takeEpochs(b); err != nil {
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
	if b.OnStream {
		if err := c.mark(b.Stream); err != nil {
			c.end()
			return nil, err
		}
	}
	want := c.n()
	if c.results = b.Results; c.results == nil {
		c.results = make([]byte, want)
	} else if len(c.results) < want {
		c.end()
		return nil, invalid("results has %d bytes; want %d", len(c.results), want)
	}
	c.results = c.results[:want]
	clear(c.results)
	return c, nil
}

// n returns the number of results.
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
		return invalid("a batch without keys")
	case n > BatchMax:
		return invalid("a batch of %d keys; at most %d", n, BatchMax)
	case b.First < 0 || b.First > n || b.First != 0 && c.def.Index == kv.IndexFlat:
		return invalid("first is %d; want 0 to %d in a chained namespace, and 0 in a flat one", b.First, n)
	}
	c.ids = make([]kv.BlockID, n)
	return c.ns.blockIDs(c.ids, b.Keys, b.KeyOffsets)
}

// takeEpochs sets epochs.
func (c *call) takeEpochs(b *Batch) error {
	switch {
	case b.KeyEpochs == nil:
		return nil
	case len(b.KeyEpochs) != len(c.ids):
		return invalid("epochs of %d keys; want %d", len(b.KeyEpochs), len(c.ids))
	case c.op == OpMatch && c.mix:
		c.epochs = b.KeyEpochs
		clear(c.epochs)
		return nil
	case c.op != OpGet:
		return invalid("epochs of keys are for get, and for match with the flag to mix epochs")
	case b.Epoch != 0:
		return invalid("both epoch %d and the epochs of the keys are given", b.Epoch)
	}
	if i := slices.Index(b.KeyEpochs, 0); i >= 0 {
		return invalid("the epoch of key %d is 0", i)
	}
	c.epochs = slices.Clone(b.KeyEpochs)
	c.def.Epoch = slices.Max(c.epochs)
	return nil
}

// blockIDs writes the ids of keys to dst.
func (n *Namespace) blockIDs(dst []kv.BlockID, keys []byte, offsets []uint32) error {
	for i := range dst {
		from, to := offsets[i], offsets[i+1]
		if from > to || uint64(to) > uint64(len(keys)) {
			return invalid("key %d has the bytes [%d,%d); there are %d bytes of keys", i, from, to, len(keys))
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

// takePieces sets c.pieces from the batch, except for the pieces' offsets.
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
				return invalid("piece %d belongs to key %d; want %d to %d", i, k, c.first, len(c.ids)-1)
			}
			c.pieces[i].Block = int(k)
		}
	}
	if b.PieceGroups != nil && len(b.PieceGroups) != len(c.pieces) {
		return invalid("groups for %d pieces; want %d", len(b.PieceGroups), len(c.pieces))
	}
	for i, g := range b.PieceGroups {
		if int(g) >= len(c.def.Geometry.Groups) {
			return invalid("piece %d belongs to group %d; the namespace has %d groups", i, g, len(c.def.Geometry.Groups))
		}
		c.pieces[i].Group = int(g)
	}
	if b.PieceFragments == nil && len(b.Addresses) != len(c.pieces) {
		return invalid("%d addresses for %d pieces", len(b.Addresses), len(c.pieces))
	}
	if b.PieceFragments != nil && len(b.PieceFragments) != len(c.pieces)+1 {
		return invalid("fragments for %d pieces; want %d", len(b.PieceFragments)-1, len(c.pieces))
	}
	return nil
}

// fragmentsOf returns the range of fragments of piece i.
func (b *Batch) fragmentsOf(i int) (from, to int, err error) {
	if b.PieceFragments == nil {
		return i, i + 1, nil
	}
	from, to = int(b.PieceFragments[i]), int(b.PieceFragments[i+1])
	if from >= to || to > len(b.Addresses) || to > len(b.Lengths) {
		return 0, 0, invalid("piece %d has the fragments [%d,%d); there are %d fragments", i, from, to, len(b.Addresses))
	}
	return from, to, nil
}

// place finds the memory of each fragment, and sets memory or fragments.
func (c *call) place(b *Batch) error {
	var last *Memory
	one := true
	// The fragments of all pieces share one allocation.
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
			if err := c.checkFragment(i, f-from, addr, n); err != nil {
				return err
			}
			m, err := c.find(last, addr, n, b.AnyMemory)
			if err != nil {
				return fmt.Errorf("piece %d, fragment %d: %w", i, f-from, err)
			}
			if m.device != nil {
				if i == 0 && f == from {
					return c.placeOnDevice(b, m.device)
				}
				return errMixed(i, f-from)
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
		if err := c.checkPiece(i, total); err != nil {
			return err
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

// checkFragment checks one fragment of a piece.
func (c *call) checkFragment(piece, fragment int, addr, n uint64) error {
	layerBytes := c.def.Geometry.LayerBytes(c.pieces[piece].Group)
	if addr == 0 || n == 0 || n > kv.MaxPieceBytes || n%uint64(layerBytes) != 0 {
		return invalid("piece %d, fragment %d: %d bytes at address %#x; want a multiple of the layer size, %d bytes", piece, fragment, n, addr, layerBytes)
	}
	return nil
}

// checkPiece checks the layers and the size of a piece.
func (c *call) checkPiece(i int, total int64) error {
	g := c.pieces[i].Group
	if have := c.def.Geometry.Groups[g].Layers; c.layers > have || c.firstLayer > have-c.layers {
		return invalid("piece %d: %d layers from layer %d; group %d has %d", i, c.layers, c.firstLayer, g, have)
	}
	if want := int64(c.layers) * c.def.Geometry.LayerBytes(g); c.layers > 0 && total != want {
		return invalid("piece %d has %d bytes; %d layers have %d", i, total, c.layers, want)
	}
	if want := c.def.Geometry.PieceBytes(g); c.layers == 0 && total != want {
		return invalid("piece %d has %d bytes; a value of namespace %q has %d (group %d of %v)", i, total, c.def.Name, want, g, c.def.Geometry)
	}
	return nil
}

// find returns the registered memory that contains a fragment. Before the search it tries last,
// the memory of the previous fragment.
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

// end releases the memories of the call. The library does not access them afterwards.
func (c *call) end() {
	s := c.ns.store
	for _, m := range c.transient {
		// client.Read and client.Write have returned, so no transfer uses the memory.
		if err := m.client.Close(context.Background()); err != nil {
			s.logs.logger().Error("the memory of a batch could not be unregistered", "err", err)
		}
	}
	if c.after != nil {
		if err := c.after.Close(); err != nil {
			s.logs.logger().Error("the event of a batch could not be freed", "err", err)
		}
	}
	if len(c.used) > 0 {
		s.unuse(c.used)
	}
	c.transient, c.used, c.after = nil, nil, nil
}

// KeyIDs writes the ids of keys to dst.
func (n *Namespace) KeyIDs(dst []kv.BlockID, keys []byte, offsets []uint32) error {
	return n.blockIDs(dst, keys, offsets)
}

// Chain appends the ids of the whole blocks of tokens to dst and returns their number.
// parent is the block before the tokens, or nil at the start of the prompt. All ids
// depend on extra, if it is not empty.
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
