package blockio_test

import (
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/io/blockio"
)

// fakeFile is a file without a device.
type fakeFile struct {
	size int64
	gate *blockio.Gate
}

func (f fakeFile) Name() string { return "fake" }
func (f fakeFile) Size() int64  { return f.size }
func (f fakeFile) Close() error { return nil }

// FuzzCheckName compares CheckName with a literal implementation of the contract's sentence.
func FuzzCheckName(f *testing.F) {
	for _, name := range []string{"", "a", ".a", "a.", "seg-0001", "A", "a/b", strings.Repeat("x", 64), strings.Repeat("x", 65), "ü", "a\x00"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		want := len(name) >= 1 && len(name) <= 64 && name[0] != '.' && strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789._-") == ""
		err := blockio.CheckName(name)
		if (err == nil) != want || err != nil && !errors.Is(err, blockio.ErrRequest) {
			t.Fatalf("CheckName(%q) = %v", name, err)
		}
	})
}

// FuzzCheck: no request causes a panic, and an accepted request lies inside its file.
func FuzzCheck(f *testing.F) {
	f.Add(byte(1), int64(0), int64(8192), uint16(4096), uint16(1))
	f.Add(byte(2), int64(-4096), int64(8192), uint16(4096), uint16(3))
	f.Add(byte(2), int64(1)<<62, int64(1)<<62, uint16(4096), uint16(1024))
	f.Add(byte(0), int64(512), int64(0), uint16(100), uint16(0))
	f.Fuzz(func(t *testing.T, op byte, offset, size int64, length, count uint16) {
		buf := testkit.AlignedBuffer(t, 1<<16)
		r := blockio.Request{Op: blockio.Op(op), File: fakeFile{size: size &^ (blockio.Align - 1)}, Offset: offset}
		for range count % (blockio.MaxVecs + 2) {
			r.Bufs = append(r.Bufs, buf[:length])
		}
		err := r.Check()
		if err == nil && (r.Offset < 0 || r.Offset+r.Len() > r.File.Size() || r.Len() == 0 || (r.Offset|r.Len())%blockio.Align != 0) {
			t.Fatalf("passed: %v of %d at %d in a file of %d", r.Op, r.Len(), r.Offset, r.File.Size())
		}
		known := errors.Is(err, blockio.ErrAlign) || errors.Is(err, blockio.ErrRange) || errors.Is(err, blockio.ErrRequest)
		if err != nil && !known {
			t.Fatalf("no sentinel: %v", err)
		}
	})
}

func TestCheckBatchNamesTheRequest(t *testing.T) {
	buf := testkit.AlignedBuffer(t, blockio.Align)
	f := fakeFile{size: blockio.Align}
	batch := []blockio.Request{
		{Op: blockio.Read, File: f, Bufs: [][]byte{buf}},
		{Op: blockio.Write, File: f, Offset: blockio.Align, Bufs: [][]byte{buf}},
	}
	err := blockio.CheckBatch(batch)
	if !errors.Is(err, blockio.ErrRange) {
		t.Fatal(err)
	}
	const want = "request 1 of 2: blockio: write of 4096 bytes at 4096 of fake (4096 bytes): beyond the end of the file"
	if err.Error() != want {
		t.Errorf("got  %q\nwant %q", err, want)
	}
}

// TestGateClosesBehindTheLast: under load, no Close returns while a user is inside, and no user
// enters afterwards.
func TestGateClosesBehindTheLast(t *testing.T) {
	for range 200 {
		var g blockio.Gate
		var inside, firsts atomic.Int64
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for g.Enter() {
					inside.Add(1)
					inside.Add(-1)
					g.Leave()
				}
			})
			wg.Go(func() {
				if g.Close() {
					firsts.Add(1)
				}
				if n := inside.Load(); n != 0 || !g.Closed() || g.Enter() {
					t.Errorf("%d inside after Close", n)
				}
			})
		}
		wg.Wait()
		if firsts.Load() != 1 {
			t.Fatalf("%d closers were the first", firsts.Load())
		}
	}
}

// TestEnterFilesIsAllOrNothing: a refused batch leaves every gate that it entered.
func TestEnterFilesIsAllOrNothing(t *testing.T) {
	open, closed := &blockio.Gate{}, &blockio.Gate{}
	closed.Close()
	gateOf := func(f blockio.File) *blockio.Gate { return f.(fakeFile).gate }
	batch := func(gates ...*blockio.Gate) (out []blockio.Request) {
		for _, g := range gates {
			out = append(out, blockio.Request{File: fakeFile{gate: g}})
		}
		return out
	}
	if err := blockio.EnterFiles(batch(open, open, closed), gateOf); !errors.Is(err, blockio.ErrClosed) || !strings.Contains(err.Error(), "request 2 of 3") {
		t.Errorf("a closed file: %v", err)
	}
	if err := blockio.EnterFiles(batch(open, nil), gateOf); !errors.Is(err, blockio.ErrRequest) {
		t.Errorf("another device's file: %v", err)
	}
	both := batch(open, open)
	if err := blockio.EnterFiles(both, gateOf); err != nil {
		t.Fatal(err)
	}
	blockio.LeaveFiles(both, gateOf)
	open.Close() // returns only if every Enter has its Leave
}

func TestIdentity(t *testing.T) {
	line := blockio.Identity(time.Date(2026, 1, 2, 3, 4, 5, 0, time.FixedZone("", 3600)))
	if !strings.Contains(line, "since 2026-01-02T02:04:05Z") || !strings.Contains(line, "pid ") || strings.ContainsAny(line, "\n\r") {
		t.Errorf("identity: %q", line)
	}
}

func FuzzOneLine(f *testing.F) {
	f.Add("penstock serve\n--data /x\x00")
	f.Add(strings.Repeat("ü", 400))
	f.Fuzz(func(t *testing.T, s string) {
		got := blockio.OneLine(s)
		if len(got) > 512 || strings.ContainsFunc(got, func(r rune) bool { return r < ' ' || r == 0x7f }) || got != blockio.OneLine(got) {
			t.Fatalf("OneLine(%q) = %q", s, got)
		}
		if utf8.ValidString(s) && !utf8.ValidString(got) {
			t.Fatalf("OneLine(%q) = %q cuts a letter", s, got)
		}
	})
}

func TestCounters(t *testing.T) {
	var c blockio.Counters
	buf := make([]byte, 2*blockio.Align)
	c.Done(&blockio.Request{Op: blockio.Read, Bufs: [][]byte{buf}})
	c.Done(&blockio.Request{Op: blockio.Read, Bufs: [][]byte{buf}, Err: errors.New("no")})
	c.Done(&blockio.Request{Op: blockio.Write, Bufs: [][]byte{buf, buf}})
	c.Synced(nil)
	c.Synced(errors.New("no"))
	c.Resumed()
	want := blockio.Stats{
		ReadRequests: 2, ReadBytes: 8192, ReadFailures: 1, WriteRequests: 1, WriteBytes: 16384, Syncs: 2, SyncFailures: 1, Resumed: 1,
	}
	if got := c.Stats(); got != want {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestOwnedErrorHasAdvice(t *testing.T) {
	err := &blockio.OwnedError{Volume: "/data", Owner: "penstock serve on node-1, pid 7"}
	const want = "volume /data is in use by penstock serve on node-1, pid 7; stop that process or choose another --data directory"
	if err.Error() != want {
		t.Errorf("got %q", err)
	}
}
