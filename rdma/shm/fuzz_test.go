package shm

import (
	"bytes"
	"encoding/binary"
	"runtime"
	"testing"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// misbehavingPeer is one end of a connection that violates the protocol: it writes arbitrary
// values into both rings. The other end is the one under test.
type misbehavingPeer struct {
	t        testing.TB
	a, b     *Domain
	ea, eb   *endpoint
	space    *arena.Arena
	private  []byte // readable memory of the process
	memory   []byte // the target's whole memory; the window is a part
	window   *memory
	polled   []group.Completion
	closable []interface{ Close() error }

	// The model: the required behaviour of the target.
	want       []byte
	statuses   []uint32
	immediates int
	posted     uint64
	// broken: the endpoint must end. stuck: an entry waits for a segment that is never sent.
	broken, stuck bool
}

const (
	liarMemory = 3 * 4096
	windowFrom = 4096
	windowLen  = 4096
)

func newMisbehavingPeer(t testing.TB, space *arena.Arena) *misbehavingPeer {
	l := &misbehavingPeer{t: t, a: openDomain(t), b: openDomain(t), space: space, private: make([]byte, 8192), polled: make([]group.Completion, 16)}
	for i := range l.private {
		l.private[i] = byte(i * 31)
	}
	l.must(l.a.Share(space))
	l.memory, l.want = make([]byte, liarMemory), make([]byte, liarMemory)
	m, err := l.b.Register(l.memory, rdma.RegisterOptions{})
	l.must(err)
	w, err := m.Window(windowFrom, windowLen)
	l.must(err)
	l.window = w.(*memory)
	l.closable = append(l.closable, w, m)
	l.ea, l.eb = l.connect()
	// A valid write, after which the target has the segment.
	src, err := l.a.Register(space.Bytes()[:8], rdma.RegisterOptions{})
	l.must(err)
	l.closable = append([]interface{ Close() error }{src}, l.closable...)
	l.writeValid(l.ea, src)
	return l
}

func (l *misbehavingPeer) must(err error) {
	l.t.Helper()
	if err != nil {
		l.t.Fatal(err)
	}
}

// connect connects a new pair of endpoints.
func (l *misbehavingPeer) connect() (*endpoint, *endpoint) {
	l.t.Helper()
	ea, err := l.a.NewEndpoint(1, rdma.ClassKV)
	l.must(err)
	eb, err := l.b.NewEndpoint(2, rdma.ClassKV)
	l.must(err)
	connected := make(chan error, 1)
	go func() { connected <- ea.Connect(eb.Local()) }()
	l.must(eb.Connect(ea.Local()))
	l.must(<-connected)
	l.closable = append([]interface{ Close() error }{ea, eb}, l.closable...)
	return ea.(*endpoint), eb.(*endpoint)
}

// writeValid writes the first bytes of the arena to the window, as Post does.
func (l *misbehavingPeer) writeValid(e *endpoint, src group.Memory) {
	l.t.Helper()
	works := []group.Work{{Op: group.OpWrite, Src: src, Len: 8, RemoteKey: l.window.Key()}}
	n, err := e.Post(works)
	if l.must(err); n != 1 {
		l.t.Fatal("a valid Work was not accepted")
	}
	copy(l.want[windowFrom:], l.space.Bytes()[:8])
	for {
		k, err := l.a.Poll(l.polled)
		l.must(err)
		for _, c := range l.polled[:k] {
			if c.Kind == group.KindDone && c.Status == group.StatusOK {
				if e == l.ea {
					l.posted, l.statuses = 1, append(l.statuses, statusOK)
				}
				return
			}
			if c.Kind == group.KindDone {
				l.t.Fatalf("a valid Work ended with %+v", c)
			}
		}
		_, err = l.b.Poll(l.polled)
		l.must(err)
		runtime.Gosched() // the segment may still be in transit
	}
}

func (l *misbehavingPeer) close() {
	for _, c := range l.closable {
		if e, ok := c.(*endpoint); ok {
			e.Shut()
		}
	}
	for _, d := range []*Domain{l.a, l.b} {
		for n := 1; n > 0; {
			n, _ = d.Poll(l.polled)
		}
	}
	for _, c := range append(l.closable, l.a, l.b) {
		l.must(c.Close())
	}
}

// put posts an entry unchanged, and records the required result in the model.
func (l *misbehavingPeer) put(w work) {
	if l.broken || l.posted-uint64(len(l.statuses)) == depth {
		return
	}
	l.ea.own.put(l.posted, &w)
	l.posted++
	l.ea.own.tail.Store(l.posted)
	if l.stuck {
		return
	}
	switch status, known := l.expect(w); {
	case known:
		l.statuses = append(l.statuses, status)
	case w.op == 1 || w.op == 2:
		l.stuck = true
	default:
		l.broken = true
	}
}

// expect is the naive target: it returns the entry's status; !known if it does not end.
func (l *misbehavingPeer) expect(w work) (status uint32, known bool) {
	switch w.op {
	case 1, 2:
	case 3:
		return statusNoBuffer, true // no buffer was posted
	default:
		return 0, false
	}
	if w.key != l.window.key || w.addr > windowLen || w.len > windowLen || w.addr+w.len > windowLen {
		return statusRefused, true
	}
	var from []byte
	switch {
	case w.len == 0:
	case w.segment == 0:
		if w.offset < addressOf(l.private) || w.offset+w.len > addressOf(l.private)+uint64(len(l.private)) {
			return statusUnreadable, true
		}
		from = l.private[w.offset-addressOf(l.private):]
	case w.segment == 1:
		size := uint64(len(l.space.Bytes()))
		if w.offset > size || w.len > size-w.offset {
			return statusUnreadable, true
		}
		from = l.space.Bytes()[w.offset:]
	default:
		return 0, false
	}
	copy(l.want[windowFrom+w.addr:][:w.len], from)
	if w.op == 2 {
		l.immediates++
	}
	return statusOK, true
}

// settle polls the target until it is idle, and compares.
func (l *misbehavingPeer) settle() {
	l.t.Helper()
	for {
		n, err := l.b.Poll(l.polled)
		l.must(err)
		for _, c := range l.polled[:n] {
			switch c.Kind {
			case group.KindImmediate:
				l.immediates--
			case group.KindBroken:
				if !l.broken {
					l.t.Fatalf("the endpoint broke: %v", c.Err)
				}
			default:
				l.t.Fatalf("the target polls %+v", c)
			}
		}
		if n == 0 && !l.b.ready() {
			break
		}
	}
	if !bytes.Equal(l.memory, l.want) {
		l.t.Fatal("the target's memory does not match the entries")
	}
	if l.immediates != 0 {
		l.t.Fatalf("%d immediates are missing", l.immediates)
	}
	if done := l.ea.own.done.Load(); !l.broken && done != uint64(len(l.statuses)) {
		l.t.Fatalf("%d entries are done, want %d", done, len(l.statuses))
	}
	for i := max(0, len(l.statuses)-depth); !l.broken && i < len(l.statuses); i++ {
		if got := l.ea.own.statuses[i%depth].Load(); got != l.statuses[i] {
			l.t.Fatalf("entry %d ended with %d, want %d", i, got, l.statuses[i])
		}
	}
	if l.broken && !l.eb.ending.Load() {
		l.t.Fatal("the target continues with an invalid endpoint")
	}
}

// FuzzRing: for any contents of the rings, the target does the same as a naive target, changes
// nothing outside the window, ends invalid endpoints, and serves other endpoints.
func FuzzRing(f *testing.F) {
	f.Add([]byte{0, 2, 1, 1, 0, 8, 0, 0, 3})
	f.Add([]byte{0, 2, 1, 1, 0, 255, 255, 0, 0, 1, 0, 1, 0, 16, 0, 0, 3, 0, 3, 0, 0, 0, 9, 0, 0})
	f.Add([]byte{1, 255, 255, 255, 255, 255, 255, 255, 255})
	f.Add([]byte{2, 1, 0, 0, 0, 0, 0, 0, 0})
	f.Add([]byte{0, 9, 1, 1, 0, 0, 0, 0, 0})
	f.Add([]byte{0, 2, 1, 7, 0, 8, 0, 0, 0, 0, 2, 1, 1, 0, 8, 0, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		space, err := arena.New(arena.Options{SizeBytes: 2 << 20, Shared: true})
		if err != nil {
			t.Fatal(err)
		}
		defer space.Close()
		for i := range space.Bytes()[:8192] {
			space.Bytes()[i] = byte(i*13 + 5)
		}
		l := newMisbehavingPeer(t, space)
		defer l.close()
		in := fuzzInput{data}
		for len(in.rest) > 0 && !l.broken {
			switch in.byte() % 5 {
			case 0:
				l.put(l.entry(&in))
			case 1:
				l.setPosted(in.word())
			case 2:
				l.answer(in.word())
			default:
				l.settle()
			}
		}
		l.settle()
		ea, _ := l.connect()
		src, err := l.a.Register(space.Bytes()[:8], rdma.RegisterOptions{})
		l.must(err)
		l.closable = append([]interface{ Close() error }{src}, l.closable...)
		l.writeValid(ea, src)
	})
}

// entry makes an entry from the input, near the limits of valid values.
func (l *misbehavingPeer) entry(in *fuzzInput) work {
	w := work{op: uint32(in.byte()), imm: uint32(len(in.rest)), key: l.window.key}
	if in.byte()%4 == 0 {
		w.key = in.word()
	}
	w.segment = uint64(in.byte() % 4)
	w.offset = uint64(in.byte()) << 4
	if w.segment == 0 {
		w.offset = addressOf(l.private) + w.offset
	}
	near := []uint64{0, windowLen, uint64(len(l.space.Bytes())), 1 << 63, ^uint64(0)}
	w.len = near[in.byte()%5] + uint64(in.byte())
	w.addr = near[in.byte()%5] - uint64(in.byte())
	if w.segment == 1 && in.byte()%4 == 0 {
		w.offset = near[in.byte()%5] - uint64(in.byte())
	}
	return w
}

// setPosted sets the counter of posted entries.
func (l *misbehavingPeer) setPosted(tail uint64) {
	l.settle()
	if l.broken || l.stuck || tail-uint64(len(l.statuses)) <= depth {
		return // entries that were never written have arbitrary contents
	}
	l.ea.own.tail.Store(tail)
	l.broken = true
}

// answer sets the counter of performed entries beyond the posted ones.
func (l *misbehavingPeer) answer(done uint64) {
	l.settle()
	if l.broken || done == 0 {
		return
	}
	l.ea.peer.done.Store(done)
	l.broken = true
}

// fuzzInput returns input bytes, and zeroes after the end.
type fuzzInput struct{ rest []byte }

func (in *fuzzInput) byte() byte {
	if len(in.rest) == 0 {
		return 0
	}
	b := in.rest[0]
	in.rest = in.rest[1:]
	return b
}

func (in *fuzzInput) word() uint64 {
	var b [8]byte
	in.rest = in.rest[copy(b[:], in.rest):]
	return binary.LittleEndian.Uint64(b[:])
}

// FuzzWire: a message that decodes encodes to the same bytes.
func FuzzWire(f *testing.F) {
	f.Add(address{newID(), newID()}.encode())
	h := hello{to: newID(), from: newID(), probe: newID(), where: 7}
	f.Add(h.encode())
	s := segmentMessage{id: 3}
	f.Add(s.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		var a address
		if a.decode(b) == nil && !bytes.Equal(a.encode(), b) {
			t.Error("address")
		}
		var h hello
		if h.decode(b) == nil && !bytes.Equal(h.encode(), b) {
			t.Error("hello")
		}
		var s segmentMessage
		if s.decode(b) == nil && !bytes.Equal(s.encode(), b) {
			t.Error("segment")
		}
	})
}
