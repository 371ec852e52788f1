//go:build !race

package tcp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
)

// Builds with the race detector copy (canSplice), so these tests are not in them.

// mustSplice fails the test if splicing is not available, because the test would then cover
// nothing.
func mustSplice(t *testing.T, e *Engine) {
	t.Helper()
	if detail := e.Info().Detail; e.pipes == nil || !strings.Contains(detail, "zero copy") {
		t.Fatalf("no zero copy (%s): vmsplice(2) and splice(2) are needed: %v", detail, probeSplice())
	}
}

// TestSpliced: writes with runs of any length and page offset land as copies would. Landed
// bytes do not change although the source is changed as soon as its write is done.
func TestSpliced(t *testing.T) {
	testkit.VerifyNone(t)
	ctx := testContext(t)
	const size = 16 << 20
	e := newServer(t, Options{})
	mem := make([]byte, size)
	dst, err := e.Register(mem, rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for seed := range uint64(8) {
		rng := rand.New(rand.NewPCG(seed, 11))
		c := newEngine(t, Options{ZeroCopy: true, Conns: 1 + rng.IntN(4), PieceBytes: 64<<10 + rng.IntN(2<<20)})
		mustSplice(t, c)
		if _, err := c.Connect(ctx, e.Addr(), rdma.Token(testToken)); err != nil {
			t.Fatal(err)
		}
		source := make([]byte, size)
		src, err := c.Register(source, rdma.RegisterOptions{Local: true})
		if err != nil {
			t.Fatal(err)
		}
		want := bytes.Clone(mem)
		// Each write has its own range on both sides, so that the ranges do not overlap.
		const writes = 8
		const stretch = size / writes
		done := make(chan error, writes)
		for i := range uint64(writes) {
			for j := i * stretch; j < (i+1)*stretch; j += 8 {
				binary.LittleEndian.PutUint64(source[j:], rng.Uint64())
			}
			n := 1 + rng.Uint64N(stretch)
			from, to := i*stretch+rng.Uint64N(stretch-n+1), (writes-1-i)*stretch+rng.Uint64N(stretch-n+1)
			copy(want[to:], source[from:from+n])
			w := rdma.Write{Src: src, SrcOffset: from, Dst: dst.Desc(), DstOffset: to, Len: n, Done: func(err error) {
				clear(source[from : from+n])
				done <- err
			}}
			if err := c.Write(ctx, w); err != nil {
				t.Fatal(err)
			}
		}
		for range writes {
			if err := <-done; err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
		}
		if !bytes.Equal(mem, want) {
			t.Fatalf("seed %d: the memory differs from the written bytes", seed)
		}
		if c.pipes.made == 0 {
			t.Errorf("seed %d: nothing was spliced", seed)
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		if c.pipes.made != 0 {
			t.Errorf("seed %d: %d pipes are open behind Close", seed, c.pipes.made)
		}
	}
}

// TestNoPipe: a connection that gets no pipe copies.
func TestNoPipe(t *testing.T) {
	testkit.VerifyNone(t)
	ctx := testContext(t)
	e := newServer(t, Options{})
	mem, source := make([]byte, 4<<20), bytes.Repeat([]byte("penstock"), 512<<10)
	dst, err := e.Register(mem, rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c := closing(t, newEngine(t, Options{ZeroCopy: true}))
	if _, err := c.Connect(ctx, e.Addr(), rdma.Token(testToken)); err != nil {
		t.Fatal(err)
	}
	src, err := c.Register(source, rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	mustSplice(t, c)
	var taken []*pipe
	for x := c.pipes.take(); x != nil; x = c.pipes.take() {
		taken = append(taken, x)
	}
	if len(taken) != maxPipes {
		t.Errorf("%d pipes, want %d", len(taken), maxPipes)
	}
	done := rdma.NewFlag()
	if err := c.Write(ctx, rdma.Write{Src: src, Dst: dst.Desc(), Len: 4 << 20, Done: done.Set}); err != nil {
		t.Fatal(err)
	}
	if err := done.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(mem, source) {
		t.Error("the memory differs from the written bytes")
	}
	for _, x := range taken {
		c.pipes.give(x)
	}
}

// TestSplicedAmongCopied: copied vectors, in any number, come between spliced ones, on a socket
// that accepts only a part at a time.
func TestSplicedAmongCopied(t *testing.T) {
	testkit.VerifyNone(t)
	ours, theirs := tcpPair(t)
	defer theirs.Close()
	p := new(pipes)
	s := newSplicer(ours, p)
	rng := rand.New(rand.NewPCG(1, 2))
	read := make(chan []byte, 1)
	go func() {
		b, _ := io.ReadAll(theirs)
		read <- b
	}()
	// The socket refers to the sources until the peer has read them, so they must not change
	// before.
	var want []byte
	var sources [][]byte
	for range 8 {
		var vec [][]byte
		var large []bool
		for range 1 + rng.IntN(40) {
			n, splices := 1+rng.IntN(200), rng.IntN(3) == 0
			if splices {
				n = spliceBytes + rng.IntN(4<<20)
			} else if rng.IntN(4) == 0 {
				n = rng.IntN(spliceBytes)
			}
			if n == 0 {
				continue
			}
			b := make([]byte, n)
			for i := range b {
				b[i] = byte(len(want) + i>>3)
			}
			want, sources = append(want, b...), append(sources, b)
			vec, large = append(vec, b), append(large, splices)
		}
		if ok, err := s.write(vec, large); !ok || err != nil {
			t.Fatalf("written: %v, %v", ok, err)
		}
	}
	if err := ours.Close(); err != nil {
		t.Fatal(err)
	}
	got := <-read
	runtime.KeepAlive(sources)
	if !bytes.Equal(got, want) {
		t.Errorf("%d bytes arrived, want %d, or they differ", len(got), len(want))
	}
	p.close()
}

// tcpPair returns the two ends of a connection.
func tcpPair(t *testing.T) (ours, theirs net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if ours, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if theirs, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	return ours, theirs
}

// TestPipeOfDeadConnection: a write breaks off within a run. Its pipe still holds bytes and is
// not used again. The socket is reset, because its unsent data refers to memory that is
// returned to its owner.
func TestPipeOfDeadConnection(t *testing.T) {
	testkit.VerifyNone(t)
	ours, theirs := tcpPair(t)
	defer theirs.Close()
	p := new(pipes)
	s := newSplicer(ours, p)
	large := make([]byte, 64<<20) // more than both sockets hold
	failed := make(chan error, 1)
	go func() {
		_, err := s.write([][]byte{[]byte("head"), large}, []bool{false, true})
		failed <- err
	}()
	// The reader sees the beginning and stops reading.
	if _, err := theirs.Read(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	s.discard()
	defer s.forget()
	if err := ours.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-failed; err == nil {
		t.Error("the write of a closed connection ended without an error")
	}
	if p.made != len(p.free) {
		t.Errorf("%d pipes, %d free: one that holds bytes was kept, or leaked", p.made, len(p.free))
	}
	var err error
	for err == nil {
		_, err = theirs.Read(make([]byte, 1<<20))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the peer sees %v, want a reset", err)
	}
	p.close()
	if p.made != 0 {
		t.Errorf("%d pipes are open", p.made)
	}
}
