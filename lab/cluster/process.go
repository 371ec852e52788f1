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

// Ready is the line that a process logs when it is ready to serve.
type Ready struct {
	Message    string `json:"msg"`
	Listen     string `json:"listen"`
	DataListen string `json:"data_listen"`
	HTTP       string `json:"http"`
}

// ProcessOptions describes a process to start.
type ProcessOptions struct {
	// Name is used in errors, for example "the node".
	Name string
	// Args are the arguments of this binary. The process must log JSON lines (--log-format json),
	// and one line must report that it is ready.
	Args []string
	Env  []string
	// Start starts the command; nil: exec.Cmd.Start.
	Start func(*exec.Cmd) error
	// Line is called with each line of standard output. If Line is set, the process has a standard
	// input too: Say writes to the input, and First is its first line.
	Line  func([]byte)
	First any
}

// Process is a child process of this process.
type Process struct {
	// Ready is the line that the process logged when it was ready.
	Ready Ready

	name  string
	cmd   *exec.Cmd
	stdin io.WriteCloser
	log   *Log
	// over is closed when the process has ended and ended is set.
	over  chan struct{}
	ended error
}

const (
	// startWithin limits the time of a start, stopWithin the time of a clean stop.
	startWithin = 2 * time.Minute
	stopWithin  = time.Minute
)

// StartProcess runs this program with args and waits until it is ready.
func StartProcess(ctx context.Context, o ProcessOptions) (*Process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &Process{name: o.Name, cmd: exec.Command(self, o.Args...), log: &Log{}, over: make(chan struct{})}
	p.cmd.Env = o.Env
	// The child gets its own process group, so Ctrl-C reaches only the parent, which then
	// stops its children. A parent that is killed cannot do that, so the kernel kills them.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
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
		// A failed exec.Cmd.Start closes the pipes; another start function does not.
		for _, end := range []any{p.stdin, stdout, stderr, p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr} {
			if end, ok := end.(io.Closer); ok {
				_ = end.Close()
			}
		}
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
		return fmt.Errorf("%s does not read its input (%w):\n%s", p.name, err, p.log)
	}
	return nil
}

// Over returns a channel that is closed when the process has ended.
func (p *Process) Over() <-chan struct{} { return p.over }

// Err returns the error with which the process ended; nil if the process succeeded or still runs.
func (p *Process) Err() error {
	select {
	case <-p.over:
		return p.ended
	default:
		return nil
	}
}

// Signal sends a signal to the process. It does nothing if the process has ended.
func (p *Process) Signal(sig os.Signal) error {
	if err := p.cmd.Process.Signal(sig); !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

// Stop sends SIGTERM to the process. If the process does not end in time, Stop kills it.
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

// CPU returns the processor time of a process that has ended.
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

// logLines is the number of log lines that are shown when a process fails.
const logLines = 20

// Follow reads the log to its end and sends the line that reports readiness to ready.
func (t *Log) Follow(r io.Reader, ready chan<- Ready) {
	eachLine(r, func(line []byte) {
		t.mu.Lock()
		t.lines = append(t.lines, string(line))
		t.lines = t.lines[max(0, len(t.lines)-logLines):]
		t.mu.Unlock()
		// The line is stored before it is sent to ready, so the receiver finds it in the log.
		var entry Ready
		if json.Unmarshal(line, &entry) == nil && entry.Message == "ready" {
			select {
			case ready <- entry:
			default: // ready is sent once
			}
		}
	})
}

// eachLine calls f with each line. f must not keep the line.
func eachLine(r io.Reader, f func([]byte)) {
	scanner := bufio.NewScanner(r)
	scanner.Buffer(nil, maxLine)
	for scanner.Scan() {
		f(scanner.Bytes())
	}
	// After a line that is too long, the scanner stops. The remaining output is discarded;
	// otherwise the process would block on a full pipe.
	_, _ = io.Copy(io.Discard, r)
}

// maxLine limits the length of a line, in bytes.
const maxLine = 8 << 20

// String returns the kept lines.
func (t *Log) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.Join(t.lines, "\n")
}
