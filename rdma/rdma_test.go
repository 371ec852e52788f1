package rdma

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
)

func TestDescEncoding(t *testing.T) {
	d := Desc{
		Engine: EngineID{1, 2, 3, 15: 16}, Base: 0x1122334455667788, Len: 99,
		NICs: []NICKey{{"10.0.0.1:7421", 0xfeedface}, {"", 1}, {NetAddr(strings.Repeat("x", MaxNetAddr)), 2}},
	}
	b, err := d.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	// The first fields, as documented at Desc.AppendBinary.
	want := "d1 01020300000000000000000000000010 8877665544332211 6300000000000000 03 0d"
	if got := fmt.Sprintf("%x %x %x %x %x %x", b[:1], b[1:17], b[17:25], b[25:33], b[33:34], b[34:35]); got != want {
		t.Errorf("encoded as\n%s, want\n%s", got, want)
	}
	var back Desc
	if err := back.UnmarshalBinary(b); err != nil || !reflect.DeepEqual(back, d) {
		t.Errorf("decoded %+v, %v", back, err)
	}
	if a := d.Addr(); a.Engine != d.Engine || len(a.NICs) != 2 {
		t.Errorf("address %+v", a)
	}
	for i := range b {
		if err := new(Desc).UnmarshalBinary(b[:i]); !errors.Is(err, ErrMalformed) {
			t.Fatalf("the first %d bytes decode: %v", i, err)
		}
	}
	if err := new(Desc).UnmarshalBinary(append(b, 0)); !errors.Is(err, ErrMalformed) {
		t.Errorf("a byte too many: %v", err)
	}
	d.Peers = []EngineID{{7}, {8, 15: 9}}
	named, err := d.MarshalBinary()
	if err != nil || !bytes.Equal(named[:len(b)], b) || len(named) != len(b)+2*16 {
		t.Errorf("with two peers: %d bytes after %d (%v)", len(named), len(b), err)
	}
	if err := back.UnmarshalBinary(named); err != nil || !reflect.DeepEqual(back, d) {
		t.Errorf("decoded %+v, %v", back, err)
	}
	for i := len(b) + 1; i < len(named); i++ {
		if err := new(Desc).UnmarshalBinary(named[:i]); i != len(b)+16 && !errors.Is(err, ErrMalformed) {
			t.Fatalf("the first %d bytes of %d decode: %v", i, len(named), err)
		}
	}
	d.NICs[0].Addr += NetAddr(b)
	if _, err := d.MarshalBinary(); !errors.Is(err, ErrRange) {
		t.Errorf("address too long: %v", err)
	}
	d.NICs = make([]NICKey, MaxNICs+1)
	if _, err := d.MarshalBinary(); !errors.Is(err, ErrRange) {
		t.Errorf("too many NICs: %v", err)
	}
}

func TestAddrEncoding(t *testing.T) {
	a := Addr{Engine: EngineID{9}, NICs: []NetAddr{"[::1]:7421", "host:1"}}
	b, err := a.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	var back Addr
	if err := back.UnmarshalBinary(b); err != nil || !reflect.DeepEqual(back, a) {
		t.Errorf("decoded %+v, %v", back, err)
	}
	for i := range b {
		if err := new(Addr).UnmarshalBinary(b[:i]); !errors.Is(err, ErrMalformed) {
			t.Fatalf("the first %d bytes decode: %v", i, err)
		}
	}
	other := append([]byte{b[0] + 1}, b[1:]...)
	if err := new(Addr).UnmarshalBinary(other); !errors.Is(err, ErrVersion) {
		t.Errorf("an address of another version: %v", err)
	}
	if _, err := (Addr{NICs: make([]NetAddr, MaxNICs+1)}).MarshalBinary(); !errors.Is(err, ErrRange) {
		t.Errorf("too many NICs: %v", err)
	}
	if _, err := (Addr{NICs: []NetAddr{NetAddr(strings.Repeat("x", 256))}}).MarshalBinary(); !errors.Is(err, ErrRange) {
		t.Errorf("address too long: %v", err)
	}
}

// FuzzDesc: bytes that decode encode to the same bytes, for both encodings.
func FuzzDesc(f *testing.F) {
	b, _ := Desc{NICs: []NICKey{{"a:1", 2}}}.MarshalBinary()
	f.Add(b)
	b, _ = Desc{NICs: []NICKey{{"a:1", 2}}, Peers: []EngineID{{3}}}.MarshalBinary()
	f.Add(b)
	b, _ = Addr{NICs: []NetAddr{"a:1"}}.MarshalBinary()
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		var d Desc
		if d.UnmarshalBinary(b) == nil {
			if out, err := d.MarshalBinary(); err != nil || !bytes.Equal(out, b) {
				t.Fatalf("% x decodes to %+v and encodes to % x, %v", b, d, out, err)
			}
		}
		var a Addr
		if a.UnmarshalBinary(b) == nil {
			if out, err := a.MarshalBinary(); err != nil || !bytes.Equal(out, b) {
				t.Fatalf("% x decodes to %+v and encodes to % x, %v", b, a, out, err)
			}
		}
	})
}

func TestToken(t *testing.T) {
	secret := "0123456789abcdef"
	tok, err := ParseToken(secret)
	if err != nil {
		t.Fatal(err)
	}
	for _, format := range []string{"%v", "%s", "%q", "%x", "%+v", "%#v", "%d"} {
		if out := fmt.Sprintf(format, tok); out != "token(16 bytes)" {
			t.Errorf("%s prints %s", format, out)
		}
	}
	for _, text := range []string{"hex:30313233343536373839616263646566", "base64:MDEyMzQ1Njc4OWFiY2RlZg=="} {
		if tok, err := ParseToken(text); err != nil || string(tok) != secret {
			t.Errorf("%s is %q, %v", text, string(tok), err)
		}
	}
	for _, text := range []string{"", "short", "hex:3031", "hex:zz", "base64:!"} {
		if _, err := ParseToken(text); err == nil {
			t.Errorf("%q is a token", text)
		} else if text != "" && strings.Contains(err.Error(), text) {
			t.Errorf("the error contains the secret: %v", err)
		}
	}
}

func TestReasonAndRefused(t *testing.T) {
	for r := ReasonNone; r <= ReasonNoBuffer+1; r++ {
		if r.String() == "" {
			t.Errorf("reason %d has no text", r)
		}
	}
	err := fmt.Errorf("more: %w", &RefusedError{Peer: EngineID{0xab}, Reason: ReasonBounds})
	if !errors.Is(err, ErrRefused) || err.Error() != "more: rdma: refused by ab000000: outside the bounds of the key" {
		t.Error(err)
	}
}

func TestPagesAt(t *testing.T) {
	p := Pages{Indices: []uint32{0, 3, ^uint32(0)}, Stride: 100, Offset: 7}
	for _, c := range []struct {
		i             int
		pageLen, size uint64
		want          uint64
		ok            bool
	}{{0, 10, 17, 7, true}, {0, 10, 16, 0, false}, {1, 1, 308, 307, true}, {1, 1, 307, 0, false}, {2, 0, ^uint64(0), 429496729507, true}, {0, ^uint64(0), ^uint64(0), 0, false}} {
		got, err := p.At(c.i, c.pageLen, c.size)
		if (err == nil) != c.ok || got != c.want || (err != nil && !errors.Is(err, ErrRange)) {
			t.Errorf("page %d of %d bytes in %d: %d, %v", c.i, c.pageLen, c.size, got, err)
		}
	}
	p.Stride = 1 << 40
	if _, err := p.At(2, 0, ^uint64(0)); !errors.Is(err, ErrRange) {
		t.Errorf("overflow: %v", err)
	}
}

func TestFlag(t *testing.T) {
	f := NewFlag()
	if set, _ := f.Poll(); set {
		t.Error("a new flag is set")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := f.Wait(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("wait: %v", err)
	}
	f.Set(ErrBusy)
	if set, err := f.Poll(); !set || !errors.Is(err, ErrBusy) {
		t.Errorf("poll: %v, %v", set, err)
	}
	if err := f.Wait(t.Context()); !errors.Is(err, ErrBusy) {
		t.Errorf("wait: %v", err)
	}
}

// immModel is the simplest model that counts immediates: lists.
type immModel struct {
	max     int
	early   []immEvent // each counted immediate that is not expected
	waiting map[uint32]*immWait
	ended   []string
}

type immEvent struct {
	imm, peer uint32 // peer caused the first of this imm
}

type immWait struct {
	id, left int
	from     uint32
}

// firstPeer returns the peer that caused the first early event of imm.
func (m *immModel) firstPeer(imm uint32) (uint32, bool) {
	for _, e := range m.early {
		if e.imm == imm {
			return e.peer, true
		}
	}
	return 0, false
}

func (m *immModel) count(peer, imm uint32) {
	if w := m.waiting[imm]; w != nil {
		if w.left--; w.left == 0 {
			delete(m.waiting, imm)
			m.ended = append(m.ended, fmt.Sprint(w.id, " ok"))
		}
		return
	}
	owner, known := m.firstPeer(imm)
	if !known {
		owner = peer
		mine := make(map[uint32]bool)
		for _, e := range m.early {
			if e.peer == peer {
				mine[e.imm] = true
			}
		}
		if len(mine) >= m.max {
			return
		}
	}
	m.early = append(m.early, immEvent{imm, owner})
}

func (m *immModel) expect(id int, imm uint32, n int, from uint32, dead map[uint32]bool) bool {
	if m.waiting[imm] != nil {
		return false
	}
	have := 0
	for _, e := range m.early {
		if e.imm == imm {
			have++
		}
	}
	var rest []immEvent
	drop := min(have, n)
	for _, e := range m.early {
		if e.imm == imm && drop > 0 {
			drop--
			continue
		}
		rest = append(rest, e)
	}
	m.early = rest
	switch {
	case have >= n:
		m.ended = append(m.ended, fmt.Sprint(id, " ok"))
	case dead[from]:
		m.ended = append(m.ended, fmt.Sprint(id, " died"))
	default:
		m.waiting[imm] = &immWait{id, n - have, from}
	}
	return true
}

func (m *immModel) cancel(id int) {
	for imm, w := range m.waiting {
		if w.id == id {
			delete(m.waiting, imm)
			m.ended = append(m.ended, fmt.Sprint(id, " cancelled"))
		}
	}
}

func (m *immModel) die(peer uint32) {
	for imm := range uint32(8) {
		if w := m.waiting[imm]; w != nil && w.from == peer {
			delete(m.waiting, imm)
			m.ended = append(m.ended, fmt.Sprint(w.id, " died"))
		}
	}
	var rest []immEvent
	for _, e := range m.early {
		if e.peer != peer {
			rest = append(rest, e)
		}
	}
	m.early = rest
}

// FuzzImmCounters: counters and model agree on how every expectation ends, and each ends once. A
// byte is an action: 2 bits select the action, 3 bits the immediate, 1 bit the peer, 2 bits the
// count.
func FuzzImmCounters(f *testing.F) {
	f.Add([]byte{0, 1, 0x40, 0x41, 0x80, 0xc0})
	f.Add([]byte("\x00\x04\x08\x0c\x40\x44\x43\x03\x03\x03\xc0\xc4\x40"))
	f.Fuzz(func(t *testing.T, script []byte) {
		c := NewImmCounters(3)
		m := &immModel{max: 3, waiting: make(map[uint32]*immWait)}
		dead := make(map[uint32]bool)
		ends := make(map[string]int)
		var all []*Expectation
		for _, b := range script {
			imm, peer, n := uint32(b>>2)&7, uint32(b>>5)&1, int(b&3)
			id := EngineID{byte(peer)}
			switch b >> 6 {
			case 0:
				c.Count(id, imm)
				m.count(peer, imm)
			case 1:
				me := len(all)
				e, err := c.Expect(Expect{Imm: imm, Count: uint32(n), From: []EngineID{id}, Done: func(err error) {
					word := map[bool]string{true: "ok"}[err == nil]
					if errors.Is(err, ErrPeerDied) {
						word = "died"
					} else if errors.Is(err, ErrCanceled) {
						word = "cancelled"
					}
					ends[fmt.Sprint(me, " ", word)]++
				}}, func(id EngineID) bool { return !dead[uint32(id[0])] })
				if ok := m.expect(me, imm, n, peer, dead); ok != (err == nil) {
					t.Fatalf("expect %d: %v, the model has %v", imm, err, ok)
				}
				all = append(all, e)
			case 2:
				if me := int(b&0x3f) % max(len(all), 1); me < len(all) && all[me] != nil {
					all[me].Cancel()
					m.cancel(me)
				}
			case 3:
				if n == 0 {
					dead[peer] = false // a new session
					continue
				}
				dead[peer] = true
				c.PeerDied(id, ErrPeerDied)
				m.die(peer)
			}
			want := make(map[string]int)
			for _, s := range m.ended {
				want[s]++
			}
			if !reflect.DeepEqual(ends, want) {
				t.Fatalf("ended: %v, the model has %v", ends, want)
			}
			if len(c.early) > 2*3 || len(c.waiting) != len(m.waiting) {
				t.Fatalf("%d kept, %d waiting, the model has %d", len(c.early), len(c.waiting), len(m.waiting))
			}
		}
		c.Close()
		c.Count(EngineID{}, 1)
		for i, e := range all {
			if e != nil && e.Cancel() {
				t.Fatalf("expectation %d outlived Close", i)
			}
		}
	})
}
