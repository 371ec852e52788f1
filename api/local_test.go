package api

import (
	"bufio"
	"bytes"
	"errors"
	"testing"
)

func TestLocalHello(t *testing.T) {
	want := LocalHello{Status: LocalFull, ArenaBytes: 256 << 20, Node: LocalID{1, 2}, Session: LocalID{15: 9}}
	b, err := want.MarshalBinary()
	if err != nil || len(b) != LocalHelloBytes {
		t.Fatalf("%d bytes, %v", len(b), err)
	}
	var got LocalHello
	if err := got.UnmarshalBinary(b); err != nil || got != want {
		t.Errorf("%+v became %+v, %v", want, got, err)
	}
	for _, s := range []LocalStatus{LocalWelcome, LocalWrongUser, LocalFull, 77} {
		if s.String() == "" {
			t.Errorf("status %d has no text", s)
		}
	}
}

// FuzzLocalHello: a hello that decodes is encoded to the same bytes.
func FuzzLocalHello(f *testing.F) {
	b, _ := LocalHello{ArenaBytes: 1 << 21, Node: LocalID{7}}.MarshalBinary()
	f.Add(b)
	f.Add(b[:55])
	f.Add([]byte("PNSTKLOC\x02"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var h LocalHello
		if err := h.UnmarshalBinary(b); err != nil {
			if !errors.Is(err, ErrLocalHello) {
				t.Errorf("%v is not ErrLocalHello", err)
			}
			return
		}
		if again, _ := h.MarshalBinary(); h.ArenaBytes < 0 || !bytes.Equal(again, b) {
			t.Errorf("%x decodes to %+v, which encodes to %x", b, h, again)
		}
	})
}

// FuzzLocalFrame: a frame is read as the message that was framed, and other bytes are refused.
func FuzzLocalFrame(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 2})
	f.Add(AppendReturn(nil, []uint64{1, 1 << 60}))
	f.Add([]byte{3, 0, 0, 0, 1, 'a', 'b', 9})
	f.Add([]byte{0, 0, 0, 0, 1})
	f.Add([]byte{255, 255, 255, 255, 1})
	f.Add(AppendStage(AppendReturn(nil, nil)))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bufio.NewReader(bytes.NewReader(b))
		var again []byte
		for {
			msg, err := ReadLocalFrame(r)
			if err != nil {
				break
			}
			frame := append(make([]byte, LocalFrameHeaderBytes), msg...)
			PutLocalFrame(frame)
			again = append(again, frame...)
			if loans, err := ParseReturn(nil, msg); err == nil && !bytes.Equal(AppendReturn(nil, loans), frame) {
				t.Errorf("%x returns %v, which is %x", msg, loans, AppendReturn(nil, loans))
			}
		}
		if !bytes.HasPrefix(b, again) {
			t.Errorf("%x was read as %x", b, again)
		}
	})
}
