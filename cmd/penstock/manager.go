package main

import (
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// manager sends the state of this process to the service manager that started it (systemd), by the
// protocol of sd_notify(3): one datagram of VARIABLE=VALUE lines for each change. Without a service
// manager it sends nothing. All methods may be called concurrently.
type manager struct {
	// socket is the path of the service manager's socket, or @ and an abstract name. "": there is no
	// service manager.
	socket string
	log    *slog.Logger

	// mu orders the messages.
	mu sync.Mutex
	// stopped is set when stopping has been called. No message is sent afterwards.
	stopped bool
}

// statusBytes is the maximum length of a status.
const statusBytes = 1 << 10

// closeMargin is the time that closing the volumes may take after the drain.
const closeMargin = 3 * time.Minute

// notifyWithin limits the time of a message. A service manager that does not read its socket must
// not stop this process.
const notifyWithin = 5 * time.Second

// ready reports that the process serves.
func (m *manager) ready() { m.send("READY=1") }

// reloading reports that the process reads its configuration anew. reloaded ends the reload.
func (m *manager) reloading() {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		m.log.Warn("the monotonic clock cannot be read", "err", err)
		return
	}
	// A service manager distinguishes by the time the reload that it asked for from an earlier one.
	m.send(fmt.Sprintf("RELOADING=1\nMONOTONIC_USEC=%d", now.Nano()/1000))
}

// reloaded reports that a reload has ended, with its error if nothing was changed.
func (m *manager) reloaded(err error) {
	status := "the configuration was reloaded"
	if err != nil {
		lines := strings.NewReplacer(":\n", ": ", "\n", "; ").Replace(err.Error()) // a status is one line
		status = "the configuration was not reloaded: " + lines
	}
	// systemd ignores a message of more than 4096 bytes, and so the end of the reload. The log has the
	// whole error.
	if len(status) > statusBytes {
		status = strings.ToValidUTF8(status[:statusBytes], "") + "…"
	}
	m.send("READY=1\nSTATUS=" + status)
}

// stopping reports that the process drains, for at most within, and then ends. The message extends
// the service manager's own time limit (TimeoutStopSec), if that is shorter.
func (m *manager) stopping(within time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sendLocked(fmt.Sprintf("STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC=%d", (within + closeMargin).Microseconds()))
	m.stopped = true
}

func (m *manager) send(state string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sendLocked(state)
}

// sendLocked sends one message. It logs a failure, because the process serves without a service
// manager too.
func (m *manager) sendLocked(state string) {
	if m.socket == "" || m.stopped {
		return
	}
	if err := sendDatagram(m.socket, state); err != nil {
		m.log.Warn("the service manager was not notified", "state", state, "err", err)
	}
}

func sendDatagram(socket, text string) error {
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetWriteDeadline(time.Now().Add(notifyWithin)); err != nil {
		return err
	}
	_, err = conn.Write([]byte(text))
	return err
}
