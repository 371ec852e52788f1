package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/top"
	"github.com/penstock-kv/penstock/internal/top/screen"
)

// watch redraws the table on a terminal until a key or ctx ends it. The terminal is restored in
// every case, also if a goroutine of watch panics.
func watch(ctx context.Context, o *observed, state screen.State, in, out *os.File, colour bool) (err error) {
	term, err := openTerminal(in, out, colour)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, term.restore()) }()
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, unix.SIGWINCH)
	defer signal.Stop(resized)
	keys, err := readKeys(in)
	if err != nil {
		return err
	}
	defer keys.stop()
	frames := takeFrames(ctx, o, state.Interval)
	defer frames.stop()

	var newest taken
	for {
		if !state.Paused {
			state.Frame, state.Taken = newest.frame, newest.at
		}
		if err := term.draw(&state); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case pressed, open := <-keys.pressed:
			if !open {
				if keys.panicked != nil {
					panic(keys.panicked)
				}
				return keys.err
			}
			for _, k := range pressed {
				if state.Press(k) {
					return nil
				}
			}
		case <-resized:
		case newest = <-frames.frames:
		case p := <-frames.panics:
			panic(p)
		}
	}
}

// taken is a frame with the time of its sample.
type taken struct {
	frame top.Frame
	at    time.Time
}

// frameSource takes samples in a goroutine, because a node may take long to answer.
type frameSource struct {
	frames chan taken
	// panics has the value of a panic of the goroutine, so that watch restores the terminal first.
	panics chan any
	cancel context.CancelFunc
	done   sync.WaitGroup
}

func takeFrames(ctx context.Context, o *observed, interval time.Duration) *frameSource {
	ctx, cancel := context.WithCancel(ctx)
	s := &frameSource{frames: make(chan taken), panics: make(chan any, 1), cancel: cancel}
	s.done.Go(func() {
		if p := caught(func() { s.run(ctx, o, interval) }); p != nil {
			s.panics <- p
		}
	})
	return s
}

// run sends a frame after each interval until ctx ends.
func (s *frameSource) run(ctx context.Context, o *observed, interval time.Duration) {
	var meter top.Meter
	started := time.Now()
	for {
		sample, err := o.sample(ctx, interval)
		if err != nil {
			return // watch ends with ctx
		}
		select {
		case s.frames <- taken{meter.Add(sample), time.Now()}:
		case <-ctx.Done():
			return
		}
		if !pause(ctx, untilTick(started, interval, time.Now())) {
			return
		}
	}
}

func (s *frameSource) stop() {
	s.cancel()
	s.done.Wait()
}

// keyReader reads the keys of a terminal in a goroutine.
type keyReader struct {
	// pressed is closed when the terminal ends. err is the reason then, or panicked the value of a
	// panic.
	pressed  chan []screen.Key
	err      error
	panicked any
	wake     [2]*os.File // a pipe: stop closes the second end
	stopped  chan struct{}
	done     sync.WaitGroup
}

func readKeys(in *os.File) (*keyReader, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("read keys: %w", err)
	}
	k := &keyReader{pressed: make(chan []screen.Key), wake: [2]*os.File{r, w}, stopped: make(chan struct{})}
	k.done.Go(func() {
		defer close(k.pressed)
		k.panicked = caught(func() { k.err = k.read(int(in.Fd()), int(r.Fd())) })
	})
	return k, nil
}

// read reads until stop is called, or the terminal ends. It polls first, because a read of a
// terminal cannot be cancelled.
func (k *keyReader) read(in, wake int) error {
	buf := make([]byte, 256)
	var rest []byte
	for {
		ready := []unix.PollFd{{Fd: int32(in), Events: unix.POLLIN}, {Fd: int32(wake), Events: unix.POLLIN}}
		if _, err := unix.Poll(ready, -1); err != nil {
			if errors.Is(err, unix.EINTR) {
				continue
			}
			return fmt.Errorf("read keys: %w", err)
		}
		if ready[1].Revents != 0 {
			return nil
		}
		n, err := unix.Read(in, buf)
		switch {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
			continue
		case err != nil:
			return fmt.Errorf("read keys: %w", err)
		case n == 0:
			return errors.New("read keys: the terminal was closed")
		}
		var keys []screen.Key
		keys, rest = screen.Keys(append(rest, buf[:n]...))
		select {
		case k.pressed <- keys:
		case <-k.stopped:
			return nil
		}
	}
}

func (k *keyReader) stop() {
	close(k.stopped)
	_ = k.wake[1].Close() // wakes the poll; a pipe has no errors at Close
	k.done.Wait()
	_ = k.wake[0].Close()
}

// terminal is a terminal whose keys arrive one by one, and whose screen watch draws.
type terminal struct {
	in, out *os.File
	saved   unix.Termios
	colour  bool
}

// The escape sequences that begin and end the drawing: the alternate screen, which keeps the text
// of the shell, no cursor, and no wrapping of long lines.
const (
	beginScreen = "\x1b[?1049h\x1b[?25l\x1b[?7l"
	endScreen   = "\x1b[?7h\x1b[?25h\x1b[?1049l"
)

// openTerminal prepares a terminal. Ctrl-C still sends SIGINT, which ends ctx of the command. The
// other keys with signals have no effect, because their signals would leave the terminal as it is.
func openTerminal(in, out *os.File, colour bool) (*terminal, error) {
	mode, err := unix.IoctlGetTermios(int(in.Fd()), unix.TCGETS)
	if err != nil {
		return nil, fmt.Errorf("terminal: %w", err)
	}
	t := &terminal{in: in, out: out, saved: *mode, colour: colour}
	mode.Lflag &^= unix.ICANON | unix.ECHO
	mode.Cc[unix.VMIN], mode.Cc[unix.VTIME] = 1, 0
	mode.Cc[unix.VSUSP], mode.Cc[unix.VQUIT] = 0, 0
	if err := unix.IoctlSetTermios(int(in.Fd()), unix.TCSETS, mode); err != nil {
		return nil, fmt.Errorf("terminal: %w", err)
	}
	if _, err := out.WriteString(beginScreen); err != nil {
		return nil, errors.Join(fmt.Errorf("terminal: %w", err), t.restore())
	}
	return t, nil
}

// restore gives the terminal back as openTerminal found it. Keys that were typed and not read are
// dropped, so that the shell does not get them.
func (t *terminal) restore() error {
	_, err := t.out.WriteString(endScreen)
	return errors.Join(err, unix.IoctlSetTermios(int(t.in.Fd()), unix.TCSETSF, &t.saved))
}

// The size that a terminal without a size gets.
const (
	usualColumns = 80
	usualLines   = 24
)

// draw draws the screen with one write. A line is erased before its text, because an erasure after
// a line as wide as the screen would erase its last character.
func (t *terminal) draw(state *screen.State) error {
	columns, lines := usualColumns, usualLines
	if size, err := unix.IoctlGetWinsize(int(t.out.Fd()), unix.TIOCGWINSZ); err == nil && size.Col > 0 && size.Row > 0 {
		columns, lines = int(size.Col), int(size.Row)
	}
	var b strings.Builder
	b.WriteString("\x1b[H")
	drawn := state.Lines(columns, lines)
	for i, line := range drawn {
		if i > 0 {
			b.WriteString("\r\n")
		}
		if i == len(drawn)-1 {
			b.WriteString("\x1b[J") // erases this line and those below it
		} else {
			b.WriteString("\x1b[2K")
		}
		b.WriteString(line.ANSI(t.colour))
	}
	_, err := t.out.WriteString(b.String())
	return err
}
