package kvevents

import (
	"reflect"
	"testing"
)

// FuzzRing compares a ring with a slice whose oldest elements are dropped.
func FuzzRing(f *testing.F) {
	f.Add([]byte{3, 9, 1, 200, 4, 250, 0, 5}, uint8(3), uint8(20))
	f.Add([]byte{255, 255, 255, 0, 0, 0}, uint8(1), uint8(0))
	f.Fuzz(func(t *testing.T, script []byte, size, bytesMax uint8) {
		r := newRing(max(1, int(size)), int64(bytesMax))
		var all []message
		oldest := 0 // index in all of the oldest kept message
		for _, op := range script {
			if op < 128 { // publish a message of op bytes
				m := message{seq: uint64(len(all)), payload: make([]byte, op)}
				r.publish("", m.payload)
				all = append(all, m)
				for kept := 0; ; oldest++ {
					kept = 0
					for _, m := range all[oldest:] {
						kept += len(m.payload)
					}
					if oldest == len(all)-1 || len(all)-oldest <= max(1, int(size)) && kept <= int(bytesMax) {
						break
					}
				}
				continue
			}
			from, limit := min(int(op-128), len(all)), int(op%7)+1
			want := all[max(from, oldest):]
			want = want[:min(limit, len(want))]
			p := r.read(uint64(from), limit)
			if int(p.lost) != max(0, oldest-from) || len(p.messages) != len(want) || len(want) > 0 && !reflect.DeepEqual(p.messages, want) || p.closed {
				t.Fatalf("read from %d: %+v; want %+v, lost %d", from, p, want, max(0, oldest-from))
			}
		}
		if got := r.place(); got != uint64(len(all)) {
			t.Fatalf("place %d after %d messages", got, len(all))
		}
	})
}

// TestRingWakes: the next message and close wake a reader that has all messages. After
// close the ring stores no message.
func TestRingWakes(t *testing.T) {
	r := newRing(2, 100)
	p := r.read(0, 1)
	r.publish("t", []byte("x"))
	<-p.more
	p = r.read(1, 1)
	r.close()
	r.close()
	<-p.more
	r.publish("t", []byte("late"))
	if p := r.read(0, 9); !p.closed || len(p.messages) != 1 || r.place() != 1 {
		t.Errorf("after close: %+v", p)
	}
}
