package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/cluster"
	"github.com/penstock-kv/penstock/server/config"
)

// serviceManager receives the messages of a process, as systemd does.
type serviceManager struct {
	t      *testing.T
	socket string
	conn   *net.UnixConn
}

// newServiceManager listens until the test ends.
func newServiceManager(t *testing.T, socket string) *serviceManager {
	t.Helper()
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return &serviceManager{t: t, socket: socket, conn: conn}
}

// next returns the next message.
func (m *serviceManager) next() string {
	m.t.Helper()
	if err := m.conn.SetReadDeadline(time.Now().Add(2 * time.Minute)); err != nil { // only a message that never comes reaches it
		m.t.Fatal(err)
	}
	var b [4096]byte
	n, err := m.conn.Read(b[:])
	if err != nil {
		m.t.Fatalf("no message: %v", err)
	}
	return string(b[:n])
}

// want fails unless the next message is text.
func (m *serviceManager) want(text string) {
	m.t.Helper()
	if got := m.next(); got != text {
		m.t.Fatalf("the message %q; want %q", got, text)
	}
}

// wantDrain receives the message with which a drain of some length begins.
func (m *serviceManager) wantDrain() {
	m.t.Helper()
	if got := m.next(); !strings.HasPrefix(got, "STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC=") {
		m.t.Fatalf("the drain begins with %q", got)
	}
}

// nothingMore fails if a message is left. All that could send one have ended.
func (m *serviceManager) nothingMore() {
	m.t.Helper()
	const last = "sent by the test"
	if err := sendDatagram(m.socket, last); err != nil {
		m.t.Fatal(err)
	}
	m.want(last)
}

// monotonic returns the clock of MONOTONIC_USEC.
func monotonic(t *testing.T) int64 {
	t.Helper()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		t.Fatal(err)
	}
	return now.Nano() / 1000
}

// TestServiceManagerIsNotified: node, planner and gateway, each in a process of its own, send READY
// when they answer, RELOADING and READY around a reload that applies or refuses the configuration,
// and STOPPING when SIGTERM makes them drain.
func TestServiceManagerIsNotified(t *testing.T) {
	engine := textEngine(t, "an answer")
	for _, c := range []struct {
		kind string
		args []string
		// settings are in the configuration file at the start, applied by a reload, and refused by one.
		settings, applied, refused string
		refusal                    string
	}{
		{"serve", small(t.TempDir() + "/volume")[1:], "", "limits:\n  writes: 100\n", "limits:\n  event_history: 77\n", "limits.event_history: 65536 → 77"},
		{"planner", []string{"--http", "127.0.0.1:0"}, "", "log:\n  level: debug\n", "schedule:\n  max_queue: 77\n", "schedule.max_queue: 0 → 77"},
		{"gateway", []string{"--http", "127.0.0.1:0", "--engine", engine}, "", "log:\n  level: debug\n", "max_queue: 77\n", "max_queue: 1024 → 77"},
	} {
		t.Run(c.kind, func(t *testing.T) {
			// The socket of a system's manager has a path, and that of a container may be abstract.
			socket := filepath.Join(t.TempDir(), "notify")
			if c.kind == "planner" {
				socket = "@" + socket
			}
			m := newServiceManager(t, socket)
			dir, listen := t.TempDir(), testkit.Port(t)
			file := writeFile(t, dir, "settings.yaml", []byte(c.settings))
			args := append(append([]string{c.kind}, c.args...), "--listen", listen, "--log-format", "json", "--config", file)
			type started struct {
				process *cluster.Process
				err     error
			}
			start := make(chan started, 1)
			go func() {
				p, err := cluster.StartProcess(t.Context(), cluster.ProcessOptions{Name: c.kind, Args: args, Env: append(os.Environ(), childEnv, "NOTIFY_SOCKET="+socket)})
				start <- started{p, err}
			}()
			m.want("READY=1")
			if conn, err := net.Dial("tcp", listen); err != nil {
				t.Errorf("it does not listen when it reports that it is ready: %v", err)
			} else {
				_ = conn.Close() // it was only to see that it connects
			}
			s := <-start
			if s.err != nil {
				t.Fatal(s.err)
			}
			p := s.process

			for _, r := range []struct{ settings, status string }{
				{c.applied, "STATUS=the configuration was reloaded"},
				{c.refused, "STATUS=the configuration was not reloaded: a restart is necessary, and nothing was applied: " + c.refusal},
				{c.applied, "STATUS=the configuration was reloaded"},
			} {
				writeFile(t, dir, "settings.yaml", []byte(r.settings))
				before := monotonic(t)
				if err := p.Signal(syscall.SIGHUP); err != nil {
					t.Fatal(err)
				}
				text, ok := strings.CutPrefix(m.next(), "RELOADING=1\nMONOTONIC_USEC=")
				at, err := strconv.ParseInt(text, 10, 64)
				if after := monotonic(t); !ok || err != nil || at < before || at > after {
					t.Errorf("a reload begins with the time %q; want one from %d to %d", text, before, after)
				}
				if got := m.next(); !strings.HasPrefix(got, "READY=1\n"+r.status) || strings.Count(got, "\n") != 1 {
					t.Errorf("a reload ends with %q; want READY=1 and %q", got, r.status)
				}
				if c.kind != "serve" {
					continue
				}
				differs := penstock(t, "", nil, "config", "diff", "--server", listen)
				if want := map[bool]int{true: exitOK, false: exitFailed}[r.settings == c.applied]; differs.code != want {
					t.Errorf("after READY, config diff: exit %d, want %d\n%s%s", differs.code, want, differs.out, differs.err)
				}
			}

			if err := p.Stop(); err != nil {
				t.Error(err)
			}
			m.wantDrain()
			m.nothingMore()
		})
	}
}

// TestStoppingPrecedesTheDrain: the service manager has the message before shutdown begins, also
// when a listener has failed. A reload that ends during the drain sends nothing.
func TestStoppingPrecedesTheDrain(t *testing.T) {
	for _, failed := range []error{nil, fmt.Errorf("the listener failed")} {
		m := newServiceManager(t, "@"+filepath.Join(t.TempDir(), "notify"))
		log := slog.New(slog.DiscardHandler)
		l, err := newLive(config.Auth{}, newLevel(config.Log{}), config.Duration(time.Minute), &manager{socket: m.socket, log: log})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		serve := func() error {
			if failed == nil {
				cancel()
				<-ended
			}
			return failed
		}
		_ = serveUntil(ctx, log, l, serve, func(context.Context) error { // its error is that of serve
			defer close(ended)
			m.want("STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC=240000000") // a minute, and closeMargin
			l.manager.reloading()
			l.manager.reloaded(nil)
			return nil
		})
		cancel()
		m.nothingMore()
	}
}

// TestLongStatus: the end of a reload fits the messages that systemd reads, however long its error is.
func TestLongStatus(t *testing.T) {
	m := newServiceManager(t, "@"+filepath.Join(t.TempDir(), "notify"))
	(&manager{socket: m.socket, log: slog.New(slog.DiscardHandler)}).reloaded(errors.New(strings.Repeat("decode=http://[::1]:8000 → ", 1000)))
	got := m.next()
	if !strings.HasPrefix(got, "READY=1\nSTATUS=the configuration was not reloaded: decode=") || len(got) > 2048 || !utf8.ValidString(got) {
		t.Errorf("the message has %d bytes: %.100q", len(got), got)
	}
}

// TestNoServiceManager: a node serves if its service manager cannot be reached, and logs the
// failure.
func TestNoServiceManager(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "absent")
	s, r := tryServed(t, []string{"NOTIFY_SOCKET=" + socket}, small(t.TempDir()+"/volume")...)
	if s == nil {
		t.Fatalf("exit %d\n%s", r.code, r.err)
	}
	s.run("status").must(t)
	if log := s.stop().err; !strings.Contains(log, "the service manager was not notified") || !strings.Contains(log, socket) {
		t.Errorf("the log does not have the failure:\n%s", log)
	}
}
