package tcp

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"net"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
)

// TestScattered: frames of many runs of any size, received in parts of any size, are placed as
// a copy in the sender's order would place them. Bytes after a frame are read as the next
// frame. The owner of a landing window is notified of each byte as often as it is placed,
// including the bytes of a frame that breaks off.
func TestScattered(t *testing.T) {
	testkit.Long(t, "12 seeds over 8 MiB, compared byte by byte")
	testkit.VerifyNone(t)
	const size = 8 << 20
	for seed := range uint64(12) {
		rng := rand.New(rand.NewPCG(seed, 7))
		down := make(chan struct{})
		e := newServer(t, Options{OnPeerDown: func(rdma.EngineID, error) { close(down) }})
		mem, want := make([]byte, size), make([]byte, size)
		r, err := e.Register(mem, rdma.RegisterOptions{Local: true})
		if err != nil {
			t.Fatal(err)
		}
		landed, wantLanded := make([]uint8, size), make([]uint8, size)
		var report func(off, n uint64)
		if seed%3 > 0 {
			report = func(off, n uint64) { countBytes(landed[off : off+n]) }
		}
		w, err := r.(rdma.LandingRegion).WindowLanding(0, size, report)
		if err != nil {
			t.Fatal(err)
		}
		key := w.Desc().NICs[0].Key
		var stream []byte
		const frames = 24
		for i := range uint32(frames) {
			// From one run to as many as a frame may have, from a byte to more than
			// the read-ahead; where two overlap, the later one wins.
			runs := []int{1, 2, 17, maxRuns}[rng.IntN(4)]
			longest := []int{100, 5000, 3 * readAhead}[rng.IntN(3)]
			h := header{kind: frameWrite, frames: 1, op: 1<<32 | uint64(i), key: key, runs: uint16(runs)}
			table := make([]byte, runs*runSize)
			var payload []byte
			for j := range runs {
				b := make([]byte, rng.IntN(longest+1))
				for k := 0; k+8 <= len(b); k += 8 {
					binary.LittleEndian.PutUint64(b[k:], rng.Uint64())
				}
				at := rng.IntN(size - len(b))
				copy(want[at:], b)
				countBytes(wantLanded[at : at+len(b)])
				putSpan(table[j*runSize:], span{uint64(at), uint64(len(b))})
				payload = append(payload, b...)
			}
			h.length, h.tableSum = uint64(len(payload)), tableSum(table)
			stream = append(append(append(stream, h.raw()...), table...), payload...)
		}
		p := newRawPeer(t, e, 1)
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			for rest := stream; len(rest) > 0; {
				n := min(len(rest), 1+rng.IntN(1<<uint(4+rng.IntN(16))))
				if _, err := p.conns[0].Write(rest[:n]); err != nil {
					t.Errorf("seed %d: write: %v", seed, err)
					return
				}
				rest = rest[n:]
			}
		}()
		acks := 0
		for acks < frames {
			h, b := p.next(0)
			if h.kind != frameAck {
				t.Fatalf("seed %d: frame of type %d", seed, h.kind)
			}
			for ; len(b) > 0; b = b[ackSize:] {
				a, err := decodeAck(b)
				if err != nil || a.status != rdma.ReasonNone {
					t.Fatalf("seed %d: ack %+v, %v", seed, a, err)
				}
				acks++
			}
		}
		<-sent
		// The first part of a frame that does not continue.
		const part = 300 << 10
		h := header{kind: frameWrite, frames: 1, op: 2 << 32, key: key, offset: 5, length: 2 * part}
		broken := append(h.raw(), bytes.Repeat([]byte{7}, part)...)
		copy(want[5:], broken[headerSize:])
		countBytes(wantLanded[5 : 5+part])
		if _, err := p.conns[0].Write(broken); err != nil {
			t.Fatalf("seed %d: write: %v", seed, err)
		}
		// Close only this direction: a reset would drop data that is still to be read.
		if err := p.conns[0].(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatalf("seed %d: close: %v", seed, err)
		}
		<-down
		if err := w.Revoke(t.Context()); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(mem, want) {
			t.Fatalf("seed %d: the memory differs from the written bytes", seed)
		}
		if report == nil {
			clear(wantLanded)
		}
		if !bytes.Equal(landed, wantLanded) {
			t.Fatalf("seed %d: the window's owner was not notified of placed bytes", seed)
		}
		if err := r.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

func countBytes(b []uint8) {
	for i := range b {
		b[i]++
	}
}
