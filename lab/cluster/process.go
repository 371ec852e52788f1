package cluster

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Ready is the line that a process logs when it serves.
type Ready struct {
	Message    string `json:"msg"`
	Listen     string `json:"listen"`
	DataListen string `json:"data_listen"`
	HTTP       string `json:"http"`
}

// ProcessOptions say what is run, and where.
type ProcessOptions struct {
	// Name is for errors: "the node".
	Name string
	// Args of this very binary. Its log must be JSON lines (--log-format json), one
	// of which says that it is ready.
	Args []string
	Env  []string
	// Start starts the command; nil: exec.Cmd.Start, here.
	Start func(*exec.Cmd) error
	// Line takes each line of standard output. A process with a Line has a
	// standard input too, which Say writes to; First is said at once.
	Line  func([]byte)
	First any
}

// Process is a child of this one.
type Process struct {
	// Ready is what it said when it served.
	Ready Ready

	name  string
	cmd   *exec.Cmd
	stdin io.WriteCloser
	log   *Log
	// over is closed when the process has ended, with ended set.
	over  chan struct{}
	ended error
}

const (
	// startWithin bounds a start, stopWithin a clean stop.
	startWithin = 2 * time.Minute
	stopWithin  = time.Minute
)

// StartProcess runs this very binary with args and waits until it is ready.
func StartProcess(ctx context.Context, o ProcessOptions) (*Process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &Process{name: o.Name, cmd: exec.Command(self, o.Args...), log: &Log{}, over: make(chan struct{})}
	p.cmd.Env = o.Env
	// A group of its own: Ctrl-C is for the parent, which then stops its children.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	var stdout io.Reader
	if o.Line != nil {
		if stdout, err = p.cmd.StdoutPipe(); err == nil {
			p.stdin, err = p.cmd.StdinPipe()
		}
		if err != nil {
			return nil, err
		}
	}
	start := o.Start
	if start == nil {
		start = (*exec.Cmd).Start
	}
	if err := start(p.cmd); err != nil {
		return nil, err
	}
	ready := make(chan Ready, 1)
	var reading sync.WaitGroup
	reading.Go(func() { p.log.Follow(stderr, ready) })
	if stdout != nil {
		reading.Go(func() { eachLine(stdout, o.Line) })
	}
	go func() {
		reading.Wait()
		p.ended = p.cmd.Wait()
		close(p.over)
	}()
	if o.First != nil {
		if err := p.Say(o.First); err != nil {
			return nil, errors.Join(err, p.Kill())
		}
	}
	select {
	case p.Ready = <-ready:
		return p, nil
	case <-p.over:
		return nil, fmt.Errorf("%s ended before it was ready (%w):\n%s", p.name, p.ended, p.log)
	case <-time.After(startWithin):
		return nil, errors.Join(fmt.Errorf("%s was not ready within %v:\n%s", p.name, startWithin, p.log), p.Stop())
	case <-ctx.Done():
		return nil, errors.Join(context.Cause(ctx), p.Stop())
	}
}

// Say writes a value to the process's standard input, as one JSON line.
func (p *Process) Say(v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if _, err := p.stdin.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("%s does not listen (%w):\n%s", p.name, err, p.log)
	}
	return nil
}

// Over is closed when the process has ended.
func (p *Process) Over() <-chan struct{} { return p.over }

// Err is how the process ended, nil if well or not yet.
func (p *Process) Err() error {
	select {
	case <-p.over:
		return p.ended
	default:
		return nil
	}
}

// Signal sends a signal to the process, if it has not ended.
func (p *Process) Signal(sig os.Signal) error {
	if err := p.cmd.Process.Signal(sig); !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

// Stop ends the process, cleanly if it can.
func (p *Process) Stop() error {
	if err := p.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	if p.stdin != nil {
		_ = p.stdin.Close()
	}
	select {
	case <-p.over:
		if p.ended != nil {
			return fmt.Errorf("%s ended with %w:\n%s", p.name, p.ended, p.log)
		}
		return nil
	case <-time.After(stopWithin):
		err := p.Kill()
		return errors.Join(fmt.Errorf("%s did not stop within %v and was killed:\n%s", p.name, stopWithin, p.log), err)
	}
}

// Kill ends the process at once, as a crash would (SIGKILL).
func (p *Process) Kill() error {
	err := p.cmd.Process.Kill()
	<-p.over
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// CPU is the processor time that an ended process took.
func (p *Process) CPU() time.Duration {
	select {
	case <-p.over:
		if s := p.cmd.ProcessState; s != nil {
			return s.UserTime() + s.SystemTime()
		}
	default:
	}
	return 0
}

// Log returns the last lines that the process logged.
func (p *Process) Log() string { return p.log.String() }

// Log keeps the last lines of a process's log.
type Log struct {
	mu    sync.Mutex
	lines []string
}

// logLines is how much of a process's log is shown when it fails.
const logLines = 20

// Follow reads the log to its end and sends the line that says ready.
func (t *Log) Follow(r io.Reader, ready chan<- Ready) {
	eachLine(r, func(line []byte) {
		t.mu.Lock()
		t.lines = append(t.lines, string(line))
		t.lines = t.lines[max(0, len(t.lines)-logLines):]
		t.mu.Unlock()
		// Who has been told finds the line in the log.
		var entry Ready
		if json.Unmarshal(line, &entry) == nil && entry.Message == "ready" {
			select {
			case ready <- entry:
			default: // it says so once
			}
		}
	})
}

// eachLine calls f with each line, which f must not keep.
func eachLine(r io.Reader, f func([]byte)) {
	scanner := bufio.NewScanner(r)
	scanner.Buffer(nil, maxLine)
	for scanner.Scan() {
		f(scanner.Bytes())
	}
	// Whatever was too long for the scanner must still be read, or the process
	// would wait for us.
	_, _ = io.Copy(io.Discard, r)
}

// maxLine bounds a line of a process.
const maxLine = 8 << 20

// String returns the lines.
func (t *Log) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.Join(t.lines, "\n")
}
