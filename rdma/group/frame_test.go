package group

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/rdma"
)

// frames are one of each type, as bytes.
func frames() map[frameKind][]byte {
	var (
		st = setup{separate: true, counted: true, provider: "verbs", nics: []string{"mlx5_0", "mlx5_1"}}
		la = laneAddr{lane: 3, epoch: 7, serial: 2, addr: []byte("queue pair 17")}
		lr = laneReady{lane: 3, epoch: 7}
		ld = laneDown{lane: 3, epoch: 7, more: true, worked: true, arrived: 1 << 40, tallies: []tally{{5, 6}, {7, 8}}}
		wh = reasonQuery{op: 1<<32 | 5, serial: 2, key: 0xABCDEF, addr: 1 << 47, n: 4096}
		be = reasonReply{op: 1<<32 | 5, reason: rdma.ReasonBounds}
		wd = withdraw{id: 9, keys: []remoteKey{{1, 2}, {3, 4}}}
		cp = checkpoint{lane: 3, epoch: 7, sent: 4096}
	)
	return map[frameKind][]byte{
		frameHeartbeat: appendHeader(nil, frameHeartbeat, 0), frameSetup: st.append(nil), frameLaneAddr: la.append(nil),
		frameLaneReady: lr.append(nil, frameLaneReady), frameLaneDown: ld.append(nil), frameQuery: wh.append(nil), frameReason: be.append(nil),
		frameAck: appendAcks(nil, []ack{{1, rdma.ReasonNone}, {2, rdma.ReasonNoBuffer}}), frameWithdraw: wd.append(nil),
		frameWithdrawn: appendID(nil, frameWithdrawn, 9), frameForget: appendID(nil, frameForget, 9),
		frameCheckpoint: cp.append(nil, frameCheckpoint), frameChecked: cp.append(nil, frameChecked), frameLaneUp: lr.append(nil, frameLaneUp),
	}
}

// recode decodes the payload of a frame and encodes it again, header included.
func recode(kind frameKind, b []byte) ([]byte, error) {
	switch kind {
	case frameHeartbeat:
		return appendHeader(nil, kind, 0), wantSize("heartbeat", b, 0)
	case frameSetup:
		s, err := decodeSetup(b)
		return s.append(nil), err
	case frameLaneAddr:
		l, err := decodeLaneAddr(b)
		return l.append(nil), err
	case frameLaneReady, frameLaneUp:
		l, err := decodeLaneReady(b)
		return l.append(nil, kind), err
	case frameLaneDown:
		l, err := decodeLaneDown(b)
		return l.append(nil), err
	case frameQuery:
		w, err := decodeQuery(b)
		return w.append(nil), err
	case frameReason:
		a, err := decodeReason(b)
		return a.append(nil), err
	case frameAck:
		acks, err := decodeAcks(b, nil)
		return appendAcks(nil, acks), err
	case frameWithdraw:
		w, err := decodeWithdraw(b)
		return w.append(nil), err
	case frameWithdrawn, frameForget:
		id, err := decodeID(b)
		return appendID(nil, kind, id), err
	}
	c, err := decodeCheckpoint(b)
	return c.append(nil, kind), err
}

// TestFrames: each type decodes to its encoded value, and no truncated frame decodes.
func TestFrames(t *testing.T) {
	all := frames()
	if len(all) != int(frameLaneUp) {
		t.Fatalf("%d types of frames in the test, %d exist", len(all), frameLaneUp)
	}
	for kind, b := range all {
		got, n, err := decodeHeader(b)
		if err != nil || got != kind || n != len(b)-frameHeader {
			t.Fatalf("type %d: decoded as %d with %d bytes, %v", kind, got, n, err)
		}
		again, err := recode(kind, b[frameHeader:])
		if err != nil || !bytes.Equal(again, b) {
			t.Errorf("type %d: % x became % x, %v", kind, b, again, err)
		}
		for cut := frameHeader; cut < len(b); cut++ {
			p := b[frameHeader:cut]
			if _, err := recode(kind, p); err == nil {
				// A frame that ends in a list, or in bytes of variable length, is also valid when
				// shorter.
				open := kind == frameLaneAddr && len(p) >= 12 || kind == frameAck && len(p) == ackSize || kind == frameWithdraw && len(p) == idSize+keyEntrySize
				if !open {
					t.Errorf("type %d: %d of %d bytes decode", kind, cut, len(b))
				}
			} else if !errors.Is(err, errFrame) {
				t.Errorf("type %d: %v is no errFrame", kind, err)
			}
		}
	}
}

// TestFrameRefused: invalid frames are errors.
func TestFrameRefused(t *testing.T) {
	many := laneDown{lane: 1, epoch: 1, tallies: make([]tally, maxTallies+1)}
	for name, f := range map[string]struct {
		kind frameKind
		b    []byte
	}{
		"setup without a NIC":       {frameSetup, (&setup{provider: "x"}).append(nil)},
		"setup with too many":       {frameSetup, (&setup{provider: "x", nics: make([]string, MaxDomains+1)}).append(nil)},
		"address too long":          {frameLaneAddr, (&laneAddr{epoch: 1, serial: 1, addr: make([]byte, MaxEndpointAddr+1)}).append(nil)},
		"epoch zero":                {frameLaneReady, (&laneReady{}).append(nil, frameLaneReady)},
		"more tallies than allowed": {frameLaneDown, many.append(nil)},
		"no acks":                   {frameAck, appendAcks(nil, nil)},
		"reason unknown":            {frameReason, (&reasonReply{1, rdma.ReasonNoBuffer + 1}).append(nil)},
		"withdrawal of nothing":     {frameWithdraw, (&withdraw{id: 1}).append(nil)},
		"withdrawal of too much":    {frameWithdraw, (&withdraw{id: 1, keys: make([]remoteKey, maxKeys+1)}).append(nil)},
	} {
		if _, err := recode(f.kind, f.b[frameHeader:]); !errors.Is(err, errFrame) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, h := range [][]byte{{0, 0, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, byte(frameLaneUp) + 1, 0, 0, 0}, {1, 0, 1, 0, 1, 0, 0, 0}, {0, 0, 0, 0, 1, 0, 1, 0}} {
		if _, _, err := decodeHeader(h); !errors.Is(err, errFrame) {
			t.Errorf("header % x: %v", h, err)
		}
	}
}

// FuzzFrame: a frame that decodes encodes to the same bytes, and decoding never panics.
func FuzzFrame(f *testing.F) {
	for _, b := range frames() {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < frameHeader {
			return
		}
		kind, n, err := decodeHeader(b)
		if err != nil || len(b)-frameHeader != n {
			return
		}
		again, err := recode(kind, b[frameHeader:])
		if err == nil && !bytes.Equal(again, b) {
			t.Errorf("% x became % x", b, again)
		}
		if err != nil && !errors.Is(err, errFrame) {
			t.Errorf("%v is no errFrame", err)
		}
	})
}

// FuzzMessage: the same for messages in the buffers of NICs.
func FuzzMessage(f *testing.F) {
	f.Add(append([]byte{kindMessage, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0}, "hello"...))
	f.Add(append([]byte{kindImm, 0, 0, 0, 5, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0}, make([]byte, emptySize)...))
	f.Add(append([]byte{kindEmpty, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0}, make([]byte, emptySize)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeMessage(b)
		if err != nil {
			if !errors.Is(err, errFrame) {
				t.Errorf("%v is no errFrame", err)
			}
			return
		}
		if m.seq < m.low || m.seq-m.low >= sequenceWindow || m.kind != kindMessage && len(m.payload) != emptySize {
			t.Errorf("% x decoded as %+v", b, m)
		}
	})
}

// FuzzSession: a peer that proved the token and then sends arbitrary bytes on the control
// connection and in messages affects only its own session.
func FuzzSession(f *testing.F) {
	var all []byte
	for kind, b := range frames() {
		f.Add(b)
		if kind != frameSetup {
			all = append(all, b...)
		}
	}
	f.Add(all)
	la := laneAddr{lane: 0, epoch: 1, serial: 1, addr: []byte{1, 0, 0, 0}}
	ld := laneDown{lane: 0, epoch: 1, arrived: 5}
	f.Add(ld.append(la.append(nil)))
	f.Add(la.append(la.append(nil)))
	e := fuzzEngine(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		here, there := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, there) }()
		s := newSession(e, rdma.EngineID{1, byte(len(b))}, false, newStream(here), &setup{nics: []string{"a", "b"}})
		if err := e.activate(s); err != nil {
			t.Fatal(err)
		}
		if _, err := there.Write(b); err == nil && len(b) > messageHeader {
			s.received(b)
		}
		_ = there.Close()
		<-s.Removed
		if s.Why == nil || !errors.Is(s.Why, rdma.ErrPeerDied) {
			t.Errorf("the session ended with %v", s.Why)
		}
	})
}

// fuzzEngine returns an engine for a fuzz target that acts as its peer.
func fuzzEngine(t testing.TB) *Engine {
	network := &nullNet{eps: make(map[uint32]*nullEndpoint)}
	e, err := New(t.Context(), Options{Provider: "null", Domains: []Domain{newNullNIC(network)}, MaxMessage: 1 << 10, MessageBuffers: 2})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

// TestSerial: serialOf reads the number after '#' in an address.
func TestSerial(t *testing.T) {
	for text, want := range map[rdma.NetAddr]uint32{
		"#1": 1, "10.0.0.1:7000#12": 12, "tls://h:1#4294967295": ^uint32(0),
		"": 0, "10.0.0.1:7000": 0, "x#": 0, "x#0": 0, "x#-1": 0, "x#4294967296": 0, "x#1y": 0,
	} {
		if got, ok := serialOf(text); got != want && (ok || want != 0) || ok != (want != 0) {
			t.Errorf("%q is %d, %v", text, got, ok)
		}
	}
	for _, serial := range []uint32{1, 99} {
		a := addrOf("host:1", serial)
		got, _ := serialOf(a)
		where, _ := controlOf(a)
		if got != serial || where != "host:1" {
			t.Errorf("%q is %d at %q", a, got, where)
		}
	}
}

// TestOptions: Validate names the option that is out of range.
func TestOptions(t *testing.T) {
	good := func() Options {
		o := Options{Provider: "null", Domains: []Domain{nil}}
		o.EnsureDefaults()
		return o
	}
	if o := good(); o.Validate() != nil {
		t.Fatal(o.Validate())
	}
	for name, change := range map[string]func(*Options){
		"Domains":       func(o *Options) { o.Domains = nil },
		"Provider":      func(o *Options) { o.Provider = "" },
		"PieceBytes":    func(o *Options) { o.PieceBytes = 1 },
		"InFlightOps":   func(o *Options) { o.InFlightOps = MaxOps + 1 },
		"MaxMessage":    func(o *Options) { o.MaxMessage = 2 << 20 },
		"IdleTimeout":   func(o *Options) { o.IdleTimeout = o.HeartbeatInterval },
		"RevokeTimeout": func(o *Options) { o.RevokeTimeout = -1 },
		"SpinPolls":     func(o *Options) { o.SpinPolls = -2 },
	} {
		o := good()
		change(&o)
		if err := o.Validate(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
