package tcp

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/handshake"
)

// FuzzHeader: a header that decodes encodes to the same bytes and is within the limits that the
// reader relies on.
func FuzzHeader(f *testing.F) {
	for _, h := range []header{
		{kind: frameWrite, frames: 1, op: 1, key: 2, offset: 3, length: 4, flags: flagImm, imm: 5},
		{kind: frameWrite, frames: maxFrames, runs: maxRuns, length: maxPiece, tableSum: 7},
		{kind: frameAck, length: ackSize}, {kind: frameMessage, op: 9, length: maxMessage}, {kind: frameHeartbeat},
		{kind: frameDown, frames: 3, piece: 1 << 20},
	} {
		f.Add(h.raw(), true)
	}
	f.Fuzz(func(t *testing.T, b []byte, seal bool) {
		if len(b) < headerSize {
			return
		}
		b = b[:headerSize]
		if seal { // make the checksum valid
			binary.LittleEndian.PutUint32(b[60:], tableSum(b[:60]))
		}
		var h header
		if h.decode(b) != nil {
			return
		}
		if !bytes.Equal(h.raw(), b) {
			t.Fatalf("% x decodes to %+v, which encodes to % x", b, h, h.raw())
		}
		if h.length > maxPiece || h.runs > maxRuns || (h.kind == frameAck && h.length > maxAcks*ackSize) {
			t.Fatalf("beyond the limits: %+v", h)
		}
	})
}

// FuzzTable: a table that decodes has the same runs as in a naive decoder, and their lengths
// add up.
func FuzzTable(f *testing.F) {
	table := make([]byte, 2*runSize)
	putSpan(table, span{5, 16})
	putSpan(table[runSize:], span{1 << 40, 3})
	f.Add(table, uint64(19))
	f.Fuzz(func(t *testing.T, table []byte, length uint64) {
		table = table[:len(table)/runSize*runSize]
		h := header{kind: frameWrite, length: length, tableSum: tableSum(table)}
		spans, err := h.decodeTable(table, nil)
		if err != nil {
			return
		}
		var sum uint64
		for i, s := range spans {
			if s.offset != binary.LittleEndian.Uint64(table[i*runSize:]) || s.length != binary.LittleEndian.Uint64(table[i*runSize+8:]) {
				t.Fatalf("run %d is %+v", i, s)
			}
			if sum+s.length < sum {
				t.Fatal("the lengths overflow")
			}
			sum += s.length
		}
		if sum != length || len(spans) != len(table)/runSize {
			t.Fatalf("%d runs of %d bytes for a frame of %d", len(spans), sum, length)
		}
	})
}

// FuzzLayout: the runs and frames of a paged write carry the pages that a naive loop copies,
// within the limits of a frame.
func FuzzLayout(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 9, 8, 7}, uint16(100), uint16(100), uint16(120), uint16(1000))
	f.Add([]byte{0, 0, 0}, uint16(1), uint16(0), uint16(1), uint16(1))
	f.Fuzz(func(t *testing.T, index []byte, pageLen, srcStride, dstStride, piece uint16) {
		if piece == 0 || len(index) > 2000 {
			return
		}
		mem := make([]byte, 256*int(srcStride)+int(pageLen))
		for i := range mem {
			mem[i] = byte(i * 31 >> 2)
		}
		size := 256*uint64(dstStride) + uint64(pageLen)
		w := rdma.PagedWrite{PageLen: uint64(pageLen), Dst: rdma.Desc{Len: size}}
		w.SrcPages.Stride, w.DstPages.Stride = uint64(srcStride), uint64(dstStride)
		// Destinations that overlap have no defined outcome.
		if dstStride < pageLen {
			w.DstPages.Stride = uint64(pageLen)
			w.Dst.Len = 257 * uint64(pageLen)
		}
		seen := make(map[uint32]bool)
		want := make([]byte, w.Dst.Len)
		for i, x := range index {
			d := uint32(byte(i*7) ^ x)
			if seen[d] {
				continue
			}
			seen[d] = true
			w.SrcPages.Indices = append(w.SrcPages.Indices, uint32(x))
			w.DstPages.Indices = append(w.DstPages.Indices, d)
			at := uint64(d) * w.DstPages.Stride
			copy(want[at:at+w.PageLen], mem[uint64(x)*w.SrcPages.Stride:])
		}
		o := &op{mem: mem}
		if err := o.layPages(&w, uint64(piece)); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, w.Dst.Len)
		lo := uint32(0)
		for i, hi := range o.cuts {
			n := uint64(0)
			for _, r := range o.Runs[lo:hi] {
				copy(got[r.Dst:r.Dst+r.N], mem[r.Src:r.Src+r.N])
				n += r.N
			}
			if n > uint64(piece) || hi-lo > maxRuns || (n == 0 && len(o.cuts) > 1) {
				t.Fatalf("frame %d has %d runs and %d bytes", i, hi-lo, n)
			}
			lo = hi
		}
		if int(lo) != len(o.Runs) || !bytes.Equal(got, want) {
			t.Fatal("the frames do not carry the pages")
		}
	})
}

// FuzzHandshake: no bytes of an unauthenticated peer open a session or stop the engine.
func FuzzHandshake(f *testing.F) {
	e := newServer(f, Options{HandshakeTimeout: 5 * time.Second})
	hello := append(protocol.Hello[:], make([]byte, handshake.HelloSize+protocol.MoreBytes-4)...)
	hello[8] = 1 // its engine
	f.Add(bytes.Clone(hello))
	f.Add(append(hello, make([]byte, handshake.ProofSize)...))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		pour(t, e, nil, b)
		if len(e.Peers()) != 0 {
			t.Fatal("a stranger has a session")
		}
	})
}

// pour writes b on a connection, closes the write side, and reads until the engine closes the
// other.
func pour(t *testing.T, e *Engine, nc net.Conn, b []byte) {
	t.Helper()
	if nc == nil {
		var err error
		if nc, err = net.Dial("tcp", string(e.nics[0].addr)); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = nc.Close() }()
	}
	_ = nc.SetDeadline(time.Now().Add(30 * time.Second))
	_, _ = nc.Write(b) // the engine may close before the end of b
	_ = nc.(*net.TCPConn).CloseWrite()
	if _, err := io.Copy(io.Discard, nc); os.IsTimeout(err) {
		t.Fatal("the engine does not release the window")
	}
}

// FuzzFrames: a peer that holds the token and sends arbitrary frames changes no byte outside of
// its window. script is a list of frames: a byte that selects the valid parts of the frame,
// then its fields.
func FuzzFrames(f *testing.F) {
	e := newServer(f, Options{})
	const n = 1 << 16
	mem := make([]byte, 3*n)
	r, err := e.Register(mem, rdma.RegisterOptions{Local: true})
	if err != nil {
		f.Fatal(err)
	}
	win, err := r.Window(n, n)
	if err != nil {
		f.Fatal(err)
	}
	if err := e.Recv(2, 100, func(rdma.EngineID, []byte) {}); err != nil {
		f.Fatal(err)
	}
	key := win.Desc().NICs[0].Key
	f.Add([]byte{0xff, 1, 1, 0, 1, 0, 0, 0, 16, 1, 2, 3})
	f.Add(bytes.Repeat([]byte{0xff, 1, 2, 0x40, 1, 0xff, 0, 0, 3}, 20))
	f.Add(bytes.Repeat([]byte{0xfe, 3, 0, 0, 0, 0, 0, 0, 200}, 5))
	f.Add(bytes.Repeat([]byte{0xff, 1, 0, 0, 0x0a, 4, 0, 0, 3}, 4))
	f.Add([]byte{0xff, 5, 0, 0, 0, 0, 0, 0, 0})
	f.Add([]byte("no frame, but text that is longer than one header"))
	f.Fuzz(func(t *testing.T, script []byte) {
		p := newRawPeer(t, e, 1)
		defer func() { _ = p.conns[0].Close() }()
		pour(t, e, p.conns[0], stream(script, key))
		for i := range n {
			if mem[i] != 0 || mem[2*n+i] != 0 {
				t.Fatalf("byte %d outside of the window was written", i)
			}
		}
	})
}

// stream turns a script into bytes for a connection.
func stream(script []byte, key uint64) []byte {
	var out []byte
	for len(script) >= 9 {
		ok, s := script[0], script[1:9]
		script = script[9:]
		h := header{
			kind: s[0], flags: s[1] & 3, runs: uint16(s[2] & 3), frames: uint32(s[3] & 7), piece: uint32(s[3]>>3) & 7, op: uint64(s[4]>>2&3)<<32 | uint64(s[4]&3), imm: uint32(s[4]),
			offset: uint64(s[5])<<8 + uint64(s[6]), length: uint64(s[7]) << (s[6] & 15), key: key,
		}
		if ok&1 == 0 {
			h.key++
		}
		if ok&2 == 0 {
			h.offset <<= 40
		}
		if h.runs > 0 && ok&4 != 0 {
			h.offset = 0
		}
		table := make([]byte, int(h.runs)*runSize)
		left := h.length
		for i := range int(h.runs) {
			take := left / 2
			if i == int(h.runs)-1 {
				take = left
			}
			putSpan(table[i*runSize:], span{uint64(s[5]) << (s[4] & 31) * uint64(i), take})
			left -= take
		}
		h.tableSum = tableSum(table)
		if ok&8 == 0 {
			h.tableSum++
		}
		b := h.raw()
		if ok&16 == 0 {
			b[s[7]&63]++
		}
		out = append(out, b...)
		out = append(out, table...)
		if payload := min(h.length, 1<<20); ok&32 != 0 {
			out = append(out, bytes.Repeat([]byte{0x5A}, int(payload))...)
		}
	}
	return append(out, script...)
}
