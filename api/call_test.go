package api

import (
	"bytes"
	"encoding/hex"
	"errors"
	"math"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// TestCallDrawing: the encoded bytes are those of the drawing.
func TestCallDrawing(t *testing.T) {
	c := Call{Method: MethodRead, ID: 0x0102, Timeout: time.Microsecond, ReplyMax: 4096, Trace: Trace{TraceID: [16]byte{0xaa, 15: 0xbb}, SpanID: [8]byte{0xcc, 7: 0xdd}, Sampled: true}}
	msg, err := c.Append(nil, &pb.ReadRequest{Namespace: "m"})
	const want = "01020100" + "00100000" + "0201000000000000" + "e803000000000000" + "aa0000000000000000000000000000bb" + "cc000000000000dd" + "0a016d"
	if err != nil || hex.EncodeToString(msg) != want {
		t.Fatalf("call %x, %v; want %s", msg, err, want)
	}
	got, request, err := ParseCall(msg)
	if err != nil || got != c || string(request) != "\x0a\x01m" {
		t.Errorf("parsed as %+v, %x, %v", got, request, err)
	}
	reply := append(Reply{ID: 0x0102, Code: 5, Immediates: 7}.Append(nil), "no"...)
	const wantReply = "03000100" + "05000000" + "07000000" + "00000000" + "0201000000000000" + "6e6f"
	if hex.EncodeToString(reply) != wantReply {
		t.Fatalf("reply %x; want %s", reply, wantReply)
	}
	if r, body, err := ParseReply(reply); err != nil || r != (Reply{ID: 0x0102, Code: 5, Immediates: 7}) || string(body) != "no" {
		t.Errorf("parsed as %+v, %q, %v", r, body, err)
	}
}

func TestCallRefused(t *testing.T) {
	good, err := Call{Method: MethodMatch, ReplyMax: 64}.Append(nil, &pb.MatchRequest{})
	if err != nil {
		t.Fatal(err)
	}
	reply := Reply{}.Append(nil)
	for name, edit := range map[string]func([]byte){
		"another kind":         func(b []byte) { b[0] = 9 },
		"no method":            func(b []byte) { b[1] = 0 },
		"unknown method":       func(b []byte) { b[1] = 7 },
		"unknown flag":         func(b []byte) { b[2] = 2 },
		"no room for a reply":  func(b []byte) { b[4] = ReplyHeaderBytes - 1 },
		"a timeout below zero": func(b []byte) { b[23] = 0x80 },
		"a reply, not a call":  func(b []byte) { copy(b, reply) },
	} {
		bad := bytes.Clone(good)
		edit(bad)
		if _, _, err := ParseCall(bad); !errors.Is(err, ErrCall) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for n := range good {
		if _, _, err := ParseCall(good[:n]); !errors.Is(err, ErrCall) {
			t.Errorf("cut off after %d bytes: %v", n, err)
		}
	}
	for n := range reply {
		if _, _, err := ParseReply(reply[:n]); !errors.Is(err, ErrCall) {
			t.Errorf("a reply cut off after %d bytes: %v", n, err)
		}
	}
	for _, i := range []int{0, 1, 2, 3, 12, 15} {
		bad := bytes.Clone(reply)
		bad[i] ^= 0x40
		if _, _, err := ParseReply(bad); !errors.Is(err, ErrCall) {
			t.Errorf("a reply with byte %d wrong: %v", i, err)
		}
	}
}

// FuzzCall: a message that parses is encoded to the same bytes, and every method has a request.
func FuzzCall(f *testing.F) {
	for _, m := range []Method{MethodMatch, MethodRead, MethodReserve, MethodCommit, MethodWrite, MethodExists} {
		b, err := Call{Method: m, ID: 9, Timeout: math.MaxInt64, ReplyMax: 24}.Append(nil, m.Request())
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		f.Add(b[:CallHeaderBytes-1])
	}
	f.Add(Reply{ID: 1, Code: 14, Immediates: 3}.Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		if c, request, err := ParseCall(b); err == nil {
			head, err := c.Append(nil, c.Method.Request())
			if err != nil || !bytes.Equal(append(head, request...), b) {
				t.Errorf("%x parses as %+v, which is %x, %v", b, c, head, err)
			}
			// Arbitrary bytes in place of the request cause an error and not a panic.
			_ = proto.Unmarshal(request, c.Method.Request())
		} else if !errors.Is(err, ErrCall) {
			t.Errorf("%v is not ErrCall", err)
		}
		if r, body, err := ParseReply(b); err == nil {
			if again := append(r.Append(nil), body...); !bytes.Equal(again, b) {
				t.Errorf("%x parses as %+v, which is %x", b, r, again)
			}
		} else if !errors.Is(err, ErrCall) {
			t.Errorf("%v is not ErrCall", err)
		}
	})
}
