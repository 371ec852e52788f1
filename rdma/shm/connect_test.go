package shm

import (
	"bytes"
	"errors"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/sys"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// memfd creates a file in memory, optionally sealed against shrinking.
func memfd(t *testing.T, bytes int64, sealed bool) int {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err == nil {
		t.Cleanup(func() { _ = unix.Close(fd) })
		err = unix.Ftruncate(fd, bytes)
	}
	if err == nil && sealed {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK)
	}
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// TestForeignDescriptors: files that could be truncated under a mapping, have another size, or
// are not eventfds, end the Connect with an error that names the defect.
func TestForeignDescriptors(t *testing.T) {
	testkit.VerifyNone(t)
	d := openDomain(t)
	defer d.Close()
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(event)
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer closeFDs(pipe[:])
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for _, tc := range []struct {
		name       string
		ring, bell int
		want       string
	}{
		{"ring that can shrink", memfd(t, ringBytes, false), event, "size sealed: false"},
		{"short ring", memfd(t, ringBytes-sys.PageSize, true), event, "want 20480"},
		{"ring of no bytes", memfd(t, 0, true), event, "want 20480"},
		{"ring that is a device", int(null.Fd()), event, "the peer's ring"},
		{"bell that is a pipe", memfd(t, ringBytes, true), pipe[1], "not an eventfd"},
		{"bell that is a ring", memfd(t, ringBytes, true), memfd(t, ringBytes, true), "not an eventfd"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ep, err := d.NewEndpoint(1, rdma.ClassKV)
			if err != nil {
				t.Fatal(err)
			}
			defer ep.Close()
			e := ep.(*endpoint)
			conn, peer := strange(t, e)
			h := hello{to: e.id, from: peer.endpoint}
			if err := sendFiles(conn, h.encode(), tc.ring, tc.bell); err != nil {
				t.Fatal(err)
			}
			if err := ep.Connect(peer.encode()); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("connected: %v; want %q in it", err, tc.want)
			}
		})
	}
}

// strange opens a connection to the domain of e and acts as an endpoint with a greater number,
// so that e waits for it to dial.
func strange(t *testing.T, e *endpoint) (*net.UnixConn, address) {
	t.Helper()
	peer := address{endpoint: id{}}
	conn, err := net.DialUnix("unixpacket", nil, socketName(e.d.id))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn, peer
}

// TestStrangers: connections for no endpoint, or with invalid messages, are closed and leave no
// resources behind. A foreign segment ends its endpoint.
func TestStrangers(t *testing.T) {
	testkit.VerifyNone(t)
	d := openDomain(t)
	defer d.Close()
	fd := memfd(t, ringBytes, true)
	for name, send := range map[string]func(c *net.UnixConn) error{
		"nothing":         func(c *net.UnixConn) error { return c.CloseWrite() },
		"garbage":         func(c *net.UnixConn) error { return sendFiles(c, []byte("hello"), fd, fd) },
		"no descriptors":  func(c *net.UnixConn) error { _, err := c.Write(make([]byte, helloBytes)); return err },
		"one descriptor":  func(c *net.UnixConn) error { return sendFiles(c, make([]byte, helloBytes), fd) },
		"too many":        func(c *net.UnixConn) error { return sendFiles(c, make([]byte, helloBytes), fd, fd, fd, fd, fd, fd) },
		"too long":        func(c *net.UnixConn) error { return sendFiles(c, make([]byte, helloBytes+1), fd, fd) },
		"for no endpoint": func(c *net.UnixConn) error { return sendFiles(c, (&hello{to: newID()}).encode(), fd, fd) },
	} {
		conn, err := net.DialUnix("unixpacket", nil, socketName(d.id))
		if err != nil {
			t.Fatal(err)
		}
		if err := send(conn); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		_ = conn.SetReadDeadline(time.Now().Add(30 * time.Second))
		if n, err := conn.Read(make([]byte, 100)); n != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: %d bytes, %v; want the end of the connection", name, n, err)
		}
		_ = conn.Close()
	}
}

// TestForeignSegment: a segment that its owner could truncate, or that is sent twice, ends the
// endpoint.
func TestForeignSegment(t *testing.T) {
	testkit.VerifyNone(t)
	for name, tc := range map[string]struct {
		id     uint64
		bytes  int64
		sealed bool
		want   string
	}{
		"can shrink": {9, 2 << 20, false, "could shrink"},
		"no arena":   {9, 4096, true, "not an arena's"},
		"number 0":   {0, 2 << 20, true, "0 or repeated"},
		"twice":      {1, 2 << 20, true, "0 or repeated"},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := openDomain(t), openDomain(t)
			ea, eb := pair(t, a, b)
			if tc.id == 1 {
				if err := a.Share(openArena(t, 2<<20)); err != nil {
					t.Fatal(err)
				}
			}
			msg := segmentMessage{id: tc.id}
			if err := sendFiles(ea.conn, msg.encode(), memfd(t, tc.bytes, tc.sealed)); err != nil {
				t.Fatal(err)
			}
			dst := make([]group.Completion, 4)
			var polled group.Completion
			for polled.Kind == 0 {
				b.Wait()
				if n, err := b.Poll(dst); n > 0 || err != nil {
					polled = dst[0]
				}
			}
			if polled.Kind != group.KindBroken || polled.Err == nil || !strings.Contains(polled.Err.Error(), tc.want) {
				t.Errorf("polled %+v; want a break with %q in it", polled, tc.want)
			}
			for _, e := range []*endpoint{ea, eb} {
				if err := e.Close(); err != nil {
					t.Error(err)
				}
			}
			if err := errors.Join(a.Close(), b.Close()); err != nil {
				t.Error(err)
			}
		})
	}
}

// pair connects two endpoints.
func pair(t testing.TB, a, b *Domain) (*endpoint, *endpoint) {
	t.Helper()
	ea, err := a.NewEndpoint(1, rdma.ClassKV)
	if err != nil {
		t.Fatal(err)
	}
	eb, err := b.NewEndpoint(2, rdma.ClassKV)
	if err != nil {
		t.Fatal(err)
	}
	connected := make(chan error, 1)
	go func() { connected <- ea.Connect(eb.Local()) }()
	if err := errors.Join(eb.Connect(ea.Local()), <-connected); err != nil {
		t.Fatal(err)
	}
	return ea.(*endpoint), eb.(*endpoint)
}

// TestUnreadableSource: a source that the peer can't read is refused with an error that names
// the remedy, and the endpoint continues to work.
func TestUnreadableSource(t *testing.T) {
	testkit.VerifyNone(t)
	space := openArena(t, 2<<20)
	l := newLane(t, space.Bytes(), func(*Domain) {})
	l.eb.(*endpoint).forbid()
	var log bytes.Buffer
	l.a.log = slog.New(slog.NewTextHandler(&log, nil))
	poll := func(w group.Work) group.Completion {
		t.Helper()
		if n, err := l.ea.Post([]group.Work{w}); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		for {
			if n, err := l.a.Poll(l.polled); n > 0 || err != nil {
				return l.polled[0]
			}
			l.a.Wait()
		}
	}
	for range 3 {
		c := poll(group.Work{Op: group.OpWriteImm, Src: l.src, Len: 8, RemoteKey: l.dst.Key()})
		if c.Status != group.StatusRefused || c.Err == nil || !strings.Contains(c.Err.Error(), "Options.Shared") {
			t.Errorf("polled %+v", c)
		}
	}
	if n := strings.Count(log.String(), "Options.Shared"); n != 1 {
		t.Errorf("the log has %d lines:\n%s", n, log.String())
	}
	if c := poll(group.Work{Op: group.OpWrite, RemoteKey: l.dst.Key()}); c.Status != group.StatusOK {
		t.Errorf("the next Work: %+v", c)
	}
}

// forbid makes the peer's own memory unreadable, as a kernel with ptrace_scope 1 does.
func (e *endpoint) forbid() {
	e.d.pollMu.Lock()
	defer e.d.pollMu.Unlock()
	e.process.close()
}
