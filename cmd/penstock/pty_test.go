package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// pty is a pseudo-terminal and the text that it shows. A goroutine reads the output and applies it
// to the screen.
type pty struct {
	t             testing.TB
	master, slave *os.File
	reading       sync.WaitGroup

	mu      sync.Mutex
	screen  screenText
	changed chan struct{} // closed and replaced when the screen changes
}

// openPTY opens a pseudo-terminal with a size. It is closed when the test ends.
func openPTY(t testing.TB, columns, lines int) *pty {
	t.Helper()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	check(err)
	check(unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	check(err)
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	check(err)
	p := &pty{t: t, master: master, slave: slave, changed: make(chan struct{})}
	p.resize(columns, lines)
	p.reading.Go(p.read)
	t.Cleanup(func() {
		slave.Close()
		p.reading.Wait() // the master has no data after the last slave was closed
		master.Close()
	})
	return p
}

func (p *pty) resize(columns, lines int) {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.screen.columns, p.screen.lines = columns, lines
	if err := unix.IoctlSetWinsize(int(p.master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: uint16(columns), Row: uint16(lines)}); err != nil {
		p.t.Fatal(err)
	}
}

func (p *pty) read() {
	buf := make([]byte, 4096)
	for {
		n, err := p.master.Read(buf)
		p.mu.Lock()
		p.screen.write(string(buf[:n]))
		close(p.changed)
		p.changed = make(chan struct{})
		p.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// typed sends keys to the terminal.
func (p *pty) typed(keys string) {
	p.t.Helper()
	if _, err := p.master.WriteString(keys); err != nil {
		p.t.Fatal(err)
	}
}

// until waits until the screen satisfies a condition, and returns its text.
func (p *pty) until(what string, is func(screen string) bool) string {
	p.t.Helper()
	limit := time.After(time.Minute) // only a failure reaches it
	for {
		p.mu.Lock()
		text, changed := p.screen.String(), p.changed
		p.mu.Unlock()
		if is(text) {
			return text
		}
		select {
		case <-changed:
		case <-limit:
			p.t.Fatalf("no %s on the screen:\n%s", what, text)
		}
	}
}

// shows waits until the screen has all the texts.
func (p *pty) shows(texts ...string) string {
	p.t.Helper()
	return p.until(strings.Join(texts, " and "), func(screen string) bool {
		for _, text := range texts {
			if !strings.Contains(screen, text) {
				return false
			}
		}
		return true
	})
}

// mode returns the mode of the terminal.
func (p *pty) mode() unix.Termios {
	p.t.Helper()
	m, err := unix.IoctlGetTermios(int(p.slave.Fd()), unix.TCGETS)
	if err != nil {
		p.t.Fatal(err)
	}
	return *m
}

// state returns the state of the screen.
func (p *pty) state() screenText {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.screen
}

// start runs penstock in a process of its own whose terminal this is.
func (p *pty) start(environ []string, args ...string) *exec.Cmd {
	p.t.Helper()
	self, err := os.Executable()
	if err != nil {
		p.t.Fatal(err)
	}
	cmd := exec.Command(self, args...)
	cmd.Env = append(append(os.Environ(), childEnv, "TERM=xterm"), environ...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = p.slave, p.slave, p.slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill() // the test failed before the process ended
			_ = cmd.Wait()
		}
	})
	return cmd
}

// screenText is the screen of a terminal: the part of the VT100's control sequences that top uses.
// Any other sequence is kept in unknown. Without wrapping, text beyond the last column overwrites
// the last column.
type screenText struct {
	columns, lines int
	rows           [][]rune
	row, column    int
	// alternate, wraps and cursor are the modes of the terminal, as differences from the usual
	// ones: the alternate screen is shown, long lines are not wrapped, the cursor is hidden.
	alternate, clips, hidden bool
	colours                  int // number of sequences that set a colour
	overflow                 int // number of characters beyond the last column or line
	unknown                  []string
	pending                  string // the beginning of a sequence or of a character
}

func (s *screenText) write(text string) {
	in := s.pending + text
	s.pending = ""
	for len(in) > 0 {
		if !utf8.FullRuneInString(in) {
			s.pending = in
			return
		}
		switch r, n := utf8.DecodeRuneInString(in); r {
		case 0x1b:
			end := strings.IndexFunc(in[min(2, len(in)):], func(r rune) bool { return r >= 0x40 && r <= 0x7e })
			if end < 0 {
				s.pending = in
				return
			}
			s.control(in[1 : end+3])
			in = in[end+3:]
		case '\r':
			s.column = 0
			in = in[n:]
		case '\n':
			s.row++
			in = in[n:]
		default:
			s.put(r)
			in = in[n:]
		}
	}
}

func (s *screenText) put(r rune) {
	for len(s.rows) <= s.row {
		s.rows = append(s.rows, nil)
	}
	if s.column >= s.columns || s.row >= s.lines {
		s.overflow++
		s.column = max(0, s.columns-1)
	}
	for len(s.rows[s.row]) <= s.column {
		s.rows[s.row] = append(s.rows[s.row], ' ')
	}
	s.rows[s.row][s.column] = r
	s.column++
}

func (s *screenText) control(sequence string) {
	switch sequence {
	case "[H":
		s.row, s.column = 0, 0
	case "[2K":
		if s.row < len(s.rows) {
			s.rows[s.row] = nil
		}
	case "[J":
		if s.row < len(s.rows) {
			s.rows[s.row] = s.rows[s.row][:min(s.column, len(s.rows[s.row]))]
			s.rows = s.rows[:s.row+1]
		}
	case "[?1049h", "[?1049l":
		s.alternate = sequence == "[?1049h"
		s.rows, s.row, s.column = nil, 0, 0
	case "[?25l", "[?25h":
		s.hidden = sequence == "[?25l"
	case "[?7l", "[?7h":
		s.clips = sequence == "[?7l"
	case "[1m", "[7m", "[0m":
	case "[31m", "[33m", "[1;31m":
		s.colours++
	default:
		s.unknown = append(s.unknown, sequence)
	}
}

func (s *screenText) String() string {
	var b strings.Builder
	for _, row := range s.rows {
		b.WriteString(strings.TrimRight(string(row), " ") + "\n")
	}
	return b.String()
}
