package handoff_test

import (
	"bufio"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/penstock-kv/penstock/api"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/server/handoff"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// node is a serving Listener.
type node struct {
	*handoff.Listener
	t     testing.TB
	arena *arena.Arena
}

func newNode(t testing.TB, edit func(*handoff.Options)) *node {
	t.Helper()
	return newNodeServing(t, edit, echo)
}

func newNodeServing(t testing.TB, edit func(*handoff.Options), handle handoff.Handler) *node {
	t.Helper()
	a, err := arena.New(arena.Options{SizeBytes: 1, Shared: true})
	if err != nil {
		t.Fatal(err)
	}
	o := handoff.Options{Path: filepath.Join(t.TempDir(), "local.sock"), Arena: a}
	if edit != nil {
		edit(&o)
	}
	l, err := handoff.Listen(o)
	if err != nil {
		t.Fatal(err)
	}
	n := &node{Listener: l, t: t, arena: a}
	served := make(chan error, 1)
	go func() { served <- l.Serve(handle) }()
	t.Cleanup(func() {
		if err := errors.Join(l.Close(), l.Close(), <-served, a.Close()); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return n
}

// echo replies with the session and the message.
func echo(_ context.Context, session api.LocalID, msg, dst []byte) []byte {
	return append(append(dst, session[:]...), msg...)
}

// frame is a message on the socket.
func frame(kind byte, payload string) []byte {
	f := append(make([]byte, api.LocalFrameHeaderBytes), kind)
	f = append(f, payload...)
	api.PutLocalFrame(f)
	return f
}

// engine is the engine's end of the socket.
type engine struct {
	conn  *net.UnixConn
	hello api.LocalHello
	view  *arena.View // nil: refused
}

func (n *node) connect() *engine {
	n.t.Helper()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: n.Path(), Net: "unix"})
	if err != nil {
		n.t.Fatal(err)
	}
	e := &engine{conn: conn}
	msg := make([]byte, api.LocalHelloBytes)
	if e.view, err = arena.Receive(conn, msg); err != nil {
		n.t.Fatal(err)
	}
	if err := e.hello.UnmarshalBinary(msg); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(e.hangUp)
	return e
}

func (e *engine) hangUp() {
	_ = e.conn.Close()
	if e.view != nil {
		_ = e.view.Close()
	}
}

// until yields the processor until f returns true.
func until(t testing.TB, what string, f func() bool) {
	t.Helper()
	for !f() {
		if t.Context().Err() != nil {
			t.Fatalf("%s: never", what)
		}
		runtime.Gosched()
	}
}

func (n *node) session(e *engine) *handoff.Session {
	n.t.Helper()
	s, err := n.Session(e.hello.Session[:])
	if err != nil {
		n.t.Fatal(err)
	}
	return s
}

// counter counts the calls of release.
type counter struct{ atomic.Int32 }

func (c *counter) release() { c.Add(1) }

func TestEngineSeesTheArena(t *testing.T) {
	n := newNode(t, nil)
	e := n.connect()
	if e.view == nil || e.hello.Status != api.LocalWelcome || e.hello.Node != n.ID() || e.hello.ArenaBytes != int64(len(e.view.Bytes())) {
		t.Fatalf("hello %+v, view %v", e.hello, e.view)
	}
	n.arena.Bytes()[4096] = 42
	if e.view.Bytes()[4096] != 42 {
		t.Error("the engine does not see what the node has written")
	}
	info, err := os.Stat(n.Path())
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket %v, %v; want mode 0600", info.Mode(), err)
	}
	if other := n.connect(); other.hello.Session == e.hello.Session {
		t.Error("two connections have one session")
	}
	until(t, "2 sessions", func() bool { s := n.Stats(); return s.Sessions == 2 && s.Connections == 2 })
}

func TestLoans(t *testing.T) {
	n := newNode(t, func(o *handoff.Options) { o.LoansMax = 3 })
	s := n.session(n.connect())
	var back counter
	open := func(number uint64) *handoff.Loan {
		t.Helper()
		l, err := s.Open(number)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	one := open(1)
	one.Add(back.release)
	one.Add(back.release)
	if _, err := s.Open(1); !errors.Is(err, handoff.ErrLoan) {
		t.Errorf("a number in use: %v", err)
	}
	open(2).End()
	open(2)
	open(3)
	if _, err := s.Open(4); !errors.Is(err, handoff.ErrFull) {
		t.Errorf("beyond LoansMax: %v", err)
	}
	if got := n.Stats().Loans; got != 3 {
		t.Errorf("%d loans; want 3", got)
	}
	s.Return([]uint64{1, 1, 99})
	s.Return([]uint64{1})
	one.End()
	if got := back.Load(); got != 2 {
		t.Errorf("2 pieces were released %d times", got)
	}
	// A read that is still running when its caller has returned the loan.
	one.Add(back.release)
	if got := back.Load(); got != 3 {
		t.Errorf("a piece that came late was kept")
	}
}

// TestCalls: calls over the socket are answered in order, loans can be returned there, and invalid
// messages end the session.
func TestCalls(t *testing.T) {
	n := newNode(t, nil)
	e := n.connect()
	in := bufio.NewReader(e.conn)
	for _, request := range []string{"", "one", strings.Repeat("x", 3<<20), "two"} {
		if _, err := e.conn.Write(frame(api.KindCall, request)); err != nil {
			t.Fatal(err)
		}
		msg, err := api.ReadLocalFrame(in)
		if err != nil || string(msg) != string(e.hello.Session[:])+"\x01"+request {
			t.Fatalf("a request of %d bytes: %d bytes, %v", len(request), len(msg), err)
		}
	}
	var back counter
	loan, err := n.session(e).Open(7)
	if err != nil {
		t.Fatal(err)
	}
	loan.Add(back.release)
	if _, err := e.conn.Write(api.AppendReturn(nil, []uint64{7})); err != nil {
		t.Fatal(err)
	}
	until(t, "the loan back", func() bool { return back.Load() == 1 })
	for name, bad := range map[string]string{
		"unknown kind": "\x01\x00\x00\x00\x09", "half a number": "\x02\x00\x00\x00\x02x", "staging memory with a tail": "\x02\x00\x00\x00\x04x", "a reply": "\x01\x00\x00\x00\x03", "no kind": "\x00\x00\x00\x00\x01", "huge": "\xff\xff\xff\xff\x01", "http": "GET / HTTP/1.1\r\n",
	} {
		e := n.connect()
		if _, err := e.conn.Write([]byte(bad)); err != nil {
			t.Fatal(err)
		}
		if _, err := api.ReadLocalFrame(bufio.NewReader(e.conn)); err == nil {
			t.Errorf("%s was answered", name)
		}
	}
}

// TestDeathEndsItsCall: the context of a call ends with the engine's connection, also if the engine has
// sent another message behind the call, and not with another engine's connection.
func TestDeathEndsItsCall(t *testing.T) {
	begun, ended := make(chan api.LocalID), make(chan api.LocalID, 2)
	n := newNodeServing(t, nil, func(ctx context.Context, session api.LocalID, _, dst []byte) []byte {
		begun <- session
		<-ctx.Done()
		ended <- session
		return dst
	})
	dying, living := n.connect(), n.connect()
	for _, e := range []*engine{dying, living} {
		if _, err := e.conn.Write(frame(api.KindCall, "")); err != nil {
			t.Fatal(err)
		}
		<-begun
		// A thread of the engine returns a loan while the call is in progress.
		if _, err := e.conn.Write(api.AppendReturn(nil, []uint64{7})); err != nil {
			t.Fatal(err)
		}
	}
	dying.hangUp()
	if id := <-ended; id != dying.hello.Session {
		t.Errorf("the call of %v ended; %v has died", id, dying.hello.Session)
	}
	if _, err := n.Session(living.hello.Session[:]); err != nil || len(ended) > 0 {
		t.Errorf("the other engine: session %v, %d calls ended", err, len(ended))
	}
	// Close ends the call of the other engine.
}

// TestDeathEndsItsReply: an engine that ends without reading a reply, which is longer than the socket has
// room for, ends its session and no other, and Close does not wait for such a reply.
func TestDeathEndsItsReply(t *testing.T) {
	answered := make(chan struct{}, 2)
	n := newNodeServing(t, nil, func(_ context.Context, _ api.LocalID, _, dst []byte) []byte {
		answered <- struct{}{}
		return append(dst, make([]byte, 8<<20)...)
	})
	dying, living := n.connect(), n.connect()
	for _, e := range []*engine{dying, living} {
		if _, err := e.conn.Write(frame(api.KindCall, "")); err != nil {
			t.Fatal(err)
		}
		<-answered
		// The first byte of the reply has come, and the node waits until the engine reads the rest.
		if _, err := e.conn.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	dying.hangUp()
	until(t, "the end of one session", func() bool { return n.Stats().Sessions == 1 })
	if _, err := n.Session(living.hello.Session[:]); err != nil {
		t.Errorf("the other session: %v", err)
	}
	living.hangUp()
	if err := n.Close(); err != nil {
		t.Error(err)
	}
}

// TestDeathReturnsLoans: the end of a connection returns all loans of its session and no others.
func TestDeathReturnsLoans(t *testing.T) {
	n := newNode(t, nil)
	dying, living := n.connect(), n.connect()
	var back, kept counter
	s := n.session(dying)
	for number := range uint64(10) {
		l, err := s.Open(number)
		if err != nil {
			t.Fatal(err)
		}
		l.Add(back.release)
		if l, err = n.session(living).Open(number); err != nil {
			t.Fatal(err)
		}
		l.Add(kept.release)
	}
	dying.hangUp()
	until(t, "10 returned loans", func() bool { return back.Load() == 10 })
	if kept.Load() != 0 {
		t.Error("another session's loans were returned")
	}
	if _, err := s.Open(11); !errors.Is(err, handoff.ErrSession) {
		t.Errorf("borrowed in a session that has ended: %v", err)
	}
	if _, err := n.Session(dying.hello.Session[:]); !errors.Is(err, handoff.ErrSession) {
		t.Errorf("found a session that has ended: %v", err)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	if kept.Load() != 10 {
		t.Errorf("%d of 10 loans returned at Close", kept.Load())
	}
}

// TestReturnsAndReadsRace: each release function is called once, by whichever call ends the loan.
func TestReturnsAndReadsRace(t *testing.T) {
	n := newNode(t, nil)
	e := n.connect()
	s := n.session(e)
	const loans, pieces = 100, 10
	var back counter
	var wg sync.WaitGroup
	open := make([]*handoff.Loan, loans)
	for number := range open {
		var err error
		if open[number], err = s.Open(uint64(number)); err != nil {
			t.Fatal(err)
		}
	}
	for number, l := range open {
		wg.Go(func() {
			for range pieces {
				l.Add(back.release)
			}
		})
		wg.Go(func() { s.Return([]uint64{uint64(number)}) })
		if number == loans/2 {
			wg.Go(func() { e.conn.Close() })
		}
		if number > loans/2 {
			l.End()
		}
	}
	wg.Wait()
	until(t, "all pieces back", func() bool { return back.Load() == loans*pieces })
}

func TestRefusals(t *testing.T) {
	t.Run("another user", func(t *testing.T) {
		stranger := uint32(os.Geteuid()) + 1
		n := newNode(t, func(o *handoff.Options) { o.UID = &stranger })
		if e := n.connect(); e.view != nil || e.hello.Status != api.LocalWrongUser || e.hello.Session != (api.LocalID{}) {
			t.Errorf("hello %+v, view %v", e.hello, e.view)
		}
		if s := n.Stats(); s.Sessions != 0 || s.Refused != 1 {
			t.Errorf("%+v", s)
		}
	})
	t.Run("too many", func(t *testing.T) {
		n := newNode(t, func(o *handoff.Options) { o.SessionsMax = 1 })
		n.connect()
		if e := n.connect(); e.view != nil || e.hello.Status != api.LocalFull {
			t.Errorf("hello %+v, view %v", e.hello, e.view)
		}
	})
	t.Run("session numbers", func(t *testing.T) {
		n := newNode(t, nil)
		n.connect()
		for _, id := range [][]byte{nil, make([]byte, 16), make([]byte, 17)} {
			if _, err := n.Session(id); !errors.Is(err, handoff.ErrSession) {
				t.Errorf("session %x: %v", id, err)
			}
		}
	})
	t.Run("options", func(t *testing.T) {
		private, err := arena.New(arena.Options{SizeBytes: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer private.Close()
		for _, o := range []handoff.Options{{}, {Path: "x"}, {Path: "x", Arena: private}} {
			if l, err := handoff.Listen(o); err == nil {
				t.Errorf("listens with %+v", o)
				l.Close()
			}
		}
	})
}

// TestAnotherUserIsRefused connects as another user with permission to open the socket.
func TestAnotherUserIsRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to become another user")
	}
	n := newNode(t, nil)
	if err := os.Chmod(n.Path(), 0o666); err != nil {
		t.Fatal(err)
	}
	for dir := filepath.Dir(n.Path()); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	done := make(chan error)
	var hello api.LocalHello
	go func() {
		// The thread with the other user id ends with this goroutine.
		runtime.LockOSThread()
		done <- func() error {
			const nobody = 65534
			if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, nobody, nobody, nobody); errno != 0 {
				return errno
			}
			fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer syscall.Close(fd)
			if err := syscall.Connect(fd, &syscall.SockaddrUnix{Name: n.Path()}); err != nil {
				return err
			}
			msg := make([]byte, api.LocalHelloBytes)
			read, oobn, _, _, err := syscall.Recvmsg(fd, msg, make([]byte, 64), 0)
			if err != nil {
				return err
			}
			if oobn != 0 {
				return errors.New("a descriptor came")
			}
			return hello.UnmarshalBinary(msg[:read])
		}()
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if hello.Status != api.LocalWrongUser {
		t.Errorf("hello to another user: %+v", hello)
	}
}

func TestSocketFile(t *testing.T) {
	n := newNode(t, nil)
	if _, err := handoff.Listen(handoff.Options{Path: n.Path(), Arena: n.arena}); !errors.Is(err, handoff.ErrInUse) {
		t.Errorf("a second node at the socket: %v", err)
	}
	// The socket file of a killed process.
	stale := filepath.Join(t.TempDir(), "stale.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	again, err := handoff.Listen(handoff.Options{Path: stale, Arena: n.arena})
	if err != nil {
		t.Fatalf("in place of a socket left behind: %v", err)
	}
	if err := again.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(stale); !os.IsNotExist(err) {
		t.Errorf("after Close the socket is still there: %v", err)
	}
	// A file that is not a socket is not removed.
	file := filepath.Join(t.TempDir(), "data")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := handoff.Listen(handoff.Options{Path: file, Arena: n.arena}); err == nil || !strings.Contains(err.Error(), "not the socket") {
		t.Errorf("in place of a file: %v", err)
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != "precious" {
		t.Errorf("the file holds %q, %v", b, err)
	}
}
