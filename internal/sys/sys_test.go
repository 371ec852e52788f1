package sys

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestMappings(t *testing.T) {
	b, err := MapAnon(2*HugePageSize, false)
	if err != nil {
		t.Fatal(err)
	}
	if address(b)%HugePageSize != 0 || len(b) != 2*HugePageSize {
		t.Errorf("mapping of %d bytes at %#x", len(b), address(b))
	}
	if err := AdviseHuge(b); err != nil {
		t.Error(err)
	}
	if err := Populate(b); err != nil {
		t.Error(err)
	}
	if err := DontDump(b); err != nil {
		t.Error(err)
	}
	huge, err := HugeBytes(b)
	if err != nil || huge < 0 || huge > int64(len(b)) {
		t.Errorf("HugeBytes = %d, %v", huge, err)
	}
	touch(b)
	b[0], b[len(b)-1] = 1, 1
	if err := Unmap(b); err != nil {
		t.Error(err)
	}
}

func TestMapAnonRefuses(t *testing.T) {
	if _, err := MapAnon(1<<46, false); err == nil {
		t.Error("mapped 64 TiB")
	}
	pool, err := ReadHugePages()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := MapAnon(int(pool.Free+1)*HugePageSize, true); err == nil {
		t.Errorf("mapped %d reserved pages of %d", pool.Free+1, pool.Free)
	}
}

func TestMemfdIsSealed(t *testing.T) {
	f, err := Memfd("sealed", HugePageSize, false)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(0); err == nil {
		t.Error("a memfd could be truncated under its mapping")
	}
	if n, err := FileSize(int(f.Fd())); n != HugePageSize || err != nil {
		t.Errorf("size %d, %v", n, err)
	}
	b, err := MapShared(int(f.Fd()), HugePageSize)
	if err != nil {
		t.Fatal(err)
	}
	if err := Unmap(b); err != nil {
		t.Error(err)
	}
}

func TestSumHuge(t *testing.T) {
	const smaps = `00400000-00600000 rw-p 00000000 00:00 0
AnonHugePages:      2048 kB
ShmemPmdMapped:        0 kB
00600000-00a00000 rw-p 00000000 00:00 0 name with: colon
Size:               4096 kB
AnonHugePages:      4096 kB
00a00000-00c00000 rw-s 00000000 00:01 7 /memfd:x (deleted)
ShmemPmdMapped:     2048 kB
VmFlags: rd wr
01000000-01200000 rw-p 00000000 00:00 0
Private_Hugetlb:    2048 kB
`
	for _, c := range []struct{ start, end, want uint64 }{
		{0x400000, 0x600000, 2 << 20},
		{0x600000, 0xc00000, 6 << 20},
		{0x600000, 0x800000, 2 << 20}, // half of a mapping: at most its length counts
		{0x1000000, 0x1200000, 2 << 20},
		{0x2000000, 0x2200000, 0},
	} {
		got, err := sumHuge(strings.NewReader(smaps), c.start, c.end)
		if err != nil || uint64(got) != c.want {
			t.Errorf("[%#x,%#x): %d, %v; want %d", c.start, c.end, got, err, c.want)
		}
	}
}

// FuzzParsers passes arbitrary texts to the parsers of /proc files.
func FuzzParsers(f *testing.F) {
	f.Add("VmRSS:\t 12 kB\n", uint64(0), uint64(4096))
	f.Add("0-1000 rw-p\nAnonHugePages: 4 kB\n", uint64(0), uint64(4096))
	f.Fuzz(func(t *testing.T, text string, start, end uint64) {
		if m, err := parseStatus([]byte(text)); err == nil && (m.RSSBytes < 0 || m.HugeTLBBytes < 0) {
			t.Errorf("negative memory: %+v", m)
		}
		start, end = start>>1, end>>1
		if n, err := sumHuge(strings.NewReader(text), start, end); err == nil && start <= end && n < 0 {
			t.Errorf("negative huge pages: %d", n)
		}
	})
}

func TestMemory(t *testing.T) {
	m, err := ReadMemory()
	if err != nil || m.RSSBytes <= 0 {
		t.Errorf("memory of this process: %+v, %v", m, err)
	}
	got, err := parseStatus([]byte("Name:\tx\nVmHWM:\t 16 kB\nVmRSS:\t  12 kB\nHugetlbPages:\t 2048 kB\n"))
	if want := (Memory{RSSBytes: 12 << 10, HugeTLBBytes: 2 << 20, PeakRSSBytes: 16 << 10}); err != nil || got != want {
		t.Errorf("parsed %+v, %v; want %+v", got, err, want)
	}
	for _, bad := range []string{"", "VmRSS: x kB\n", "VmRSS: 12\n", "VmRSS: -1 kB\n"} {
		if _, err := parseStatus([]byte(bad)); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

func TestSpace(t *testing.T) {
	total, free, err := Space(t.TempDir())
	if err != nil || total <= 0 || free < 0 || free > total {
		t.Errorf("space %d of %d, %v", free, total, err)
	}
	if _, _, err := Space("/nonexistent"); err == nil {
		t.Error("a path that does not exist has space")
	}
}

func TestDropCache(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	if err := DropCache(f); err != nil {
		t.Error(err)
	}
	f.Close()
	if err := DropCache(f); err == nil {
		t.Error("a closed file was accepted")
	}
}

func TestCongestion(t *testing.T) {
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var d net.Dialer
	d.SetMultipathTCP(false)
	c, err := d.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := SetCongestion(raw, "reno"); err != nil { // every kernel has reno
		t.Fatal(err)
	}
	if got, err := Congestion(raw); got != "reno" || err != nil {
		t.Errorf("congestion control %q, %v", got, err)
	}
	if err := SetCongestion(raw, "no-such"); err == nil {
		t.Error("an unknown algorithm was accepted")
	}
}

// TestHugeBytesAgree compares the two ways to count huge pages, for mappings with and without
// huge pages, and for parts of them.
func TestHugeBytesAgree(t *testing.T) {
	const pages = 80 // more regions than one call of PAGEMAP_SCAN returns
	b, err := MapAnon(pages*HugePageSize, false)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := Unmap(b); err != nil {
			t.Error(err)
		}
	}()
	// Every second page may become a huge one.
	for i := 0; i < pages; i += 2 {
		if err := AdviseHuge(b[i*HugePageSize:][:HugePageSize]); err != nil {
			t.Fatal(err)
		}
		if err := Populate(b[i*HugePageSize:][:HugePageSize]); err != nil {
			t.Fatal(err)
		}
	}
	start := address(b)
	compared := false
	for range 100 { // khugepaged may change pages between the two
		n, err := scanHuge(start, start+uint64(len(b)))
		if errors.Is(err, unix.ENOTTY) {
			if os.Getenv("CI") == "true" {
				t.Fatal("CI on a kernel without PAGEMAP_SCAN, which Linux has since 6.7")
			}
			t.Skip("needs Linux 6.7 for PAGEMAP_SCAN")
		}
		want, smapsErr := hugeInSmaps(start, start+uint64(len(b)))
		if err != nil || smapsErr != nil {
			t.Fatal(err, smapsErr)
		}
		if compared = n == want; compared {
			t.Logf("%d MiB of %d MiB are huge pages", n>>20, len(b)>>20)
			break
		}
	}
	if !compared {
		t.Error("PAGEMAP_SCAN and smaps never agreed")
	}
	for i := range 2 {
		n, err := scanHuge(start+uint64(i)*HugePageSize, start+uint64(i+1)*HugePageSize)
		if err != nil || n > HugePageSize || i == 1 && n != 0 {
			t.Errorf("page %d: %d bytes, %v", i, n, err)
		}
	}
}

// socketPair returns both ends of a connection over a unix socket, which are closed when the test ends.
func socketPair(t *testing.T) (conn, peer *net.UnixConn) {
	t.Helper()
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if conn, err = net.DialUnix("unix", nil, listener.Addr().(*net.UnixAddr)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if peer, err = listener.AcceptUnix(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = peer.Close() })
	return conn, peer
}

// TestBlockingSocket: a socket for blocking calls is not in the runtime's poller, times out, passes
// messages, and its reads end when another goroutine ends them.
func TestBlockingSocket(t *testing.T) {
	conn, peer := socketPair(t)
	if raw, err := conn.SyscallConn(); err != nil || !polled(t, raw) {
		t.Fatalf("the poller of this runtime does not show its sockets: %v", err)
	}
	file, err := Blocking(conn, 10*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if raw, err := file.SyscallConn(); err != nil || polled(t, raw) {
		t.Errorf("the socket is in the poller: %v", err)
	}
	if _, err := conn.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the connection was left open: %v", err)
	}
	buf := make([]byte, 8)
	if n, err := file.Read(buf); !errors.Is(err, syscall.EAGAIN) {
		t.Errorf("without a message: %d bytes, %v", n, err)
	}
	if _, err := peer.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if n, err := file.Read(buf); err != nil || string(buf[:n]) != "hello" {
		t.Errorf("%q, %v", buf[:n], err)
	}
	if _, err := file.Write([]byte("back")); err != nil {
		t.Fatal(err)
	}
	if n, err := peer.Read(buf); err != nil || string(buf[:n]) != "back" {
		t.Errorf("%q, %v", buf[:n], err)
	}
	ended := make(chan error, 1)
	go func() {
		for {
			if _, err := file.Read(buf); !errors.Is(err, syscall.EAGAIN) {
				ended <- err
				return
			}
		}
	}()
	if err := EndReads(file); err != nil {
		t.Error(err)
	}
	if err := <-ended; !errors.Is(err, io.EOF) {
		t.Errorf("the read ended with %v; want the end of the stream", err)
	}
	if err := file.Close(); err != nil {
		t.Error(err)
	}
	if err := EndReads(file); err == nil {
		t.Error("the reads of a closed socket were ended")
	}
}

// TestWriteNow: WriteNow writes as much as the socket has room for and does not wait for the reader.
// The bytes arrive in order. It fails if the reader has gone.
func TestWriteNow(t *testing.T) {
	conn, peer := socketPair(t)
	msg := make([]byte, 64<<20)
	for i := range msg {
		msg[i] = byte(i>>12 + i)
	}
	sent := 0
	for {
		n, err := WriteNow(conn, msg[sent:])
		if err != nil {
			t.Fatal(err)
		}
		if sent += n; n == 0 {
			break
		}
	}
	if sent == 0 || sent == len(msg) {
		t.Fatalf("%d of %d bytes were sent to a peer that does not read", sent, len(msg))
	}
	got := make([]byte, sent)
	if _, err := io.ReadFull(peer, got); err != nil || !bytes.Equal(got, msg[:sent]) {
		t.Errorf("the peer got other bytes, %v", err)
	}
	if n, err := WriteNow(conn, msg[:5]); err != nil || n != 5 {
		t.Errorf("after the peer has read: %d bytes, %v", n, err)
	}
	peer.Close()
	if _, err := WriteNow(conn, msg[:5]); !errors.Is(err, syscall.EPIPE) {
		t.Errorf("to a closed socket: %v; want EPIPE", err)
	}
}

// TestAwaitHangUp: AwaitHangUp waits for the end of a socket, whether or not the socket has unread bytes,
// and reads none of them. A read deadline ends the wait.
func TestAwaitHangUp(t *testing.T) {
	for _, unread := range []string{"", "unread"} {
		conn, peer := socketPair(t)
		ended := make(chan error, 1)
		wait := func() { ended <- AwaitHangUp(conn) }
		go wait()
		if _, err := io.WriteString(peer, unread); err != nil {
			t.Fatal(err)
		}
		if err := conn.SetReadDeadline(time.Unix(1, 0)); err != nil {
			t.Fatal(err)
		}
		if err := <-ended; !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%q unread, after the deadline: %v", unread, err)
		}
		if err := conn.SetReadDeadline(time.Time{}); err != nil {
			t.Fatal(err)
		}
		go wait()
		peer.Close()
		if err := <-ended; err != nil {
			t.Errorf("%q unread, after the peer has closed: %v", unread, err)
		}
		if got, err := io.ReadAll(conn); string(got) != unread || err != nil {
			t.Errorf("%q was read after the wait, %v; want %q", got, err, unread)
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		if err := AwaitHangUp(conn); !errors.Is(err, net.ErrClosed) {
			t.Errorf("a closed socket: %v", err)
		}
	}
}

// polled reports whether an epoll instance of this process watches the socket.
func polled(t *testing.T, raw syscall.RawConn) bool {
	t.Helper()
	var stat unix.Stat_t
	var err error
	if cerr := raw.Control(func(fd uintptr) { err = unix.Fstat(int(fd), &stat) }); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	files, err := filepath.Glob("/proc/self/fdinfo/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		info, err := os.ReadFile(f)
		if err != nil {
			continue // the descriptor of this loop
		}
		for line := range strings.Lines(string(info)) {
			if strings.HasPrefix(line, "tfd:") && strings.Contains(line, fmt.Sprintf(" ino:%x ", stat.Ino)) {
				return true
			}
		}
	}
	return false
}

// TestSinceBoot: the clock advances at least as far as the monotonic clock of package time.
func TestSinceBoot(t *testing.T) {
	var before unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &before); err != nil {
		t.Fatal(err)
	}
	first := SinceBoot()
	if first < time.Duration(before.Nano()) {
		t.Errorf("%v since boot, and the monotonic clock was at %v before", first, time.Duration(before.Nano()))
	}
	began := time.Now()
	for time.Since(began) < time.Millisecond {
		continue
	}
	if d := SinceBoot() - first; d < time.Millisecond {
		t.Errorf("the clock advanced by %v in a millisecond", d)
	}
}
