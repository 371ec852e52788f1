package cluster

import (
	"bytes"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock-kv/penstock/lab/netlab"
)

// TestShaper: both directions of all connections share a NIC's rate, a direction each. The time is
// that of a synctest bubble.
func TestShaper(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newShaper(8e6) // 10^6 bytes a second
		payload := bytes.Repeat([]byte("0123456789"), 50_000)
		// move sends the payload over two connections in one direction, and returns the time that it took.
		move := func(out bool) time.Duration {
			begin := time.Now()
			ended := make(chan []byte)
			for range 2 {
				near, far := net.Pipe()
				shaped := s.wrap(near)
				w, r := io.WriteCloser(shaped), io.Reader(far)
				if !out {
					w, r = far, shaped
				}
				go func() {
					if n, err := w.Write(payload); err != nil || n != len(payload) {
						t.Errorf("wrote %d bytes: %v", n, err)
					}
					_ = w.Close()
				}()
				go func() {
					got, err := io.ReadAll(r)
					if err != nil {
						t.Error(err)
					}
					ended <- got
				}()
			}
			for range 2 {
				if got := <-ended; !bytes.Equal(got, payload) {
					t.Errorf("%d bytes arrived", len(got))
				}
			}
			return time.Since(begin)
		}
		// A burst goes at once.
		want := time.Duration(1e6-shapeBurst) * time.Microsecond
		for _, out := range []bool{true, false} {
			if took := move(out); took < want-time.Millisecond || took > want+time.Millisecond {
				t.Errorf("out %v: %v, want %v", out, took, want)
			}
		}
		if got := s.counters(); got != (netlab.Counters{ReceivedBytes: 1e6, SentBytes: 1e6}) {
			t.Errorf("%+v", got)
		}
		s.setRate(80e6)
		time.Sleep(time.Minute) // virtual: the burst is there again
		if took := move(true); took < want/10-time.Millisecond || took > want/10+time.Millisecond {
			t.Errorf("at ten times the rate: %v, want %v", took, want/10)
		}
		free := newShaper(0)
		near, far := net.Pipe()
		go func() { _, _ = free.wrap(near).Write(payload); _ = near.Close() }()
		begin := time.Now()
		if got, err := io.ReadAll(far); err != nil || len(got) != len(payload) || time.Since(begin) != 0 {
			t.Errorf("without a limit: %d bytes in %v, %v", len(got), time.Since(begin), err)
		}
	})
}
