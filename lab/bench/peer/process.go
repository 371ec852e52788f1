package peer

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// SelfCPU returns the processor time of this process.
func SelfCPU() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0 // cannot fail with these arguments
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// ProcessCPU returns the processor time of another process, including its threads that have
// ended.
func ProcessCPU(pid int) (time.Duration, error) {
	// The clock id of a process: linux/posix-timers.h, CPUCLOCK_SCHED.
	clock := int32(^pid<<3 | 2)
	var t unix.Timespec
	if err := unix.ClockGettime(clock, &t); err != nil {
		return 0, fmt.Errorf("processor time of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()), nil
}

// Installed returns "" if the program is installed, otherwise a reason for the report.
func Installed(program, debian string) string {
	if _, err := exec.LookPath(program); err != nil {
		return fmt.Sprintf("%s is not installed (apt-get install %s)", program, debian)
	}
	return ""
}

// Process is a program that runs until Close.
type Process struct {
	cmd    *exec.Cmd
	stderr bytes.Buffer
	exited chan struct{}
	err    error
}

// start starts the command. The kernel kills it if this process dies.
func start(cmd *exec.Cmd) (*Process, error) {
	p := &Process{cmd: cmd, exited: make(chan struct{})}
	if cmd.Stderr == nil {
		cmd.Stderr = &p.stderr
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error, 1)
	go func() {
		// The kernel kills the child when the thread that started the child ends, so this thread
		// must live as long as the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			p.err = cmd.Wait()
			close(p.exited)
		}
	}()
	return p, <-started
}

// Start starts the program exe with its standard output and error in output. The process runs until
// Close or Kill.
func Start(output io.Writer, exe string, args ...string) (*Process, error) {
	cmd := exec.Command(exe, args...)
	cmd.Stdout, cmd.Stderr = output, output
	return start(cmd)
}

// Exited returns a channel that is closed when the process has ended.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// PID returns the process id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// CPU returns the processor time of the process.
func (p *Process) CPU() (time.Duration, error) { return ProcessCPU(p.PID()) }

// Kill kills the process (SIGKILL) and waits until it has ended.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill() // it may have ended already
	<-p.exited
}

// Close sends SIGTERM to the process, and kills it after ten seconds.
func (p *Process) Close() error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-p.exited:
	case <-time.After(10 * time.Second):
		p.Kill()
	}
	return nil
}

// waitPort waits until the address accepts connections. It returns an error if the process
// ends before that.
func (p *Process) waitPort(addr string) error {
	for {
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err == nil {
			return c.Close()
		}
		select {
		case <-p.exited:
			return fmt.Errorf("%s ended before it listened on %s: %w: %s", p.cmd.Path, addr, p.err, strings.TrimSpace(p.stderr.String()))
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// loopback returns the address of a port on this host.
func loopback(port int) string { return "127.0.0.1:" + strconv.Itoa(port) }

// freePort returns a free port of the loopback interface.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// Child is a process of this binary that prints one line on its standard output when it is
// ready.
type Child struct {
	*Process
	stdin io.Closer
	// Ready is that line.
	Ready string
}

// StartChild runs exe with args and waits for the line that reports that the child is ready.
// output, if set, gets the child's standard error.
func StartChild(exe string, output io.Writer, args ...string) (*Child, error) {
	cmd := exec.Command(exe, args...)
	cmd.Stderr = output
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	cmd.Stdout = w
	p, err := start(cmd)
	w.Close()
	if err != nil {
		return nil, err
	}
	line, err := readLine(r)
	if err != nil {
		p.Kill()
		return nil, fmt.Errorf("%s %s: the process ended before it was ready: %w: %s", exe, strings.Join(args, " "), err, strings.TrimSpace(p.stderr.String()))
	}
	return &Child{Process: p, stdin: in, Ready: line}, nil
}

// Close closes the child's standard input and ends the child.
func (c *Child) Close() error {
	_ = c.stdin.Close() // already closed if the child has ended
	return c.Process.Close()
}

// readLine reads one short line byte by byte, so that it does not consume bytes after the line.
func readLine(r io.Reader) (string, error) {
	var line []byte
	for b := make([]byte, 1); ; {
		if _, err := io.ReadFull(r, b); err != nil {
			return "", err
		}
		if b[0] == '\n' {
			return string(line), nil
		}
		line = append(line, b[0])
	}
}
