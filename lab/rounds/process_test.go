package rounds

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A process is a node or a planner, in several lives of its process.
type process struct {
	t       *testing.T
	name    string
	args    []string
	logFile string

	// stopped is set between SIGSTOP and SIGCONT. cluster.mu guards it.
	stopped bool
	// down is set from a kill or stop by the test to the next start.
	down bool
	cmd  *exec.Cmd
	// clock is the wall clock of the process, nil where the test cannot change it. ahead is the offset with which
	// the process starts.
	clock *clock
	ahead time.Duration
	// ended is closed when the process has ended with the error err.
	ended chan struct{}
	err   error
}

// start starts the process. It does not wait until the process serves.
func (p *process) start() {
	p.t.Helper()
	log, err := os.OpenFile(p.logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(p.args[0], p.args[1:]...)
	cmd.Stderr = log
	// The program rejects environment variables with the prefix PENSTOCK_ that are not settings.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "PENSTOCK_") })
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if clocks {
		p.clock, err = startClocked(cmd, p.ahead)
	} else {
		err = cmd.Start()
	}
	if err != nil {
		p.t.Fatal(err)
	}
	p.down, p.cmd, p.ended = false, cmd, make(chan struct{})
	go func(ended chan struct{}) {
		p.err = cmd.Wait()
		close(ended)
	}(p.ended)
}

// jump changes the wall clock of the process, also in its next lives.
func (p *process) jump(ahead time.Duration) {
	p.t.Helper()
	p.ahead = ahead
	if err := p.clock.jump(ahead); err != nil {
		p.t.Fatalf("the clock of %s: %v", p.name, err)
	}
}

// running reports whether the process has not ended.
func (p *process) running() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

func (p *process) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Errorf("%v to %s: %v", s, p.name, err)
	}
}

// kill ends the process with SIGKILL, if it runs.
func (p *process) kill() {
	p.down = true
	_ = p.cmd.Process.Kill() // it may have ended
	<-p.ended
}

// stop ends the process with SIGTERM.
func (p *process) stop() error {
	p.down = true
	p.signal(syscall.SIGTERM)
	select {
	case <-p.ended:
		if p.err != nil {
			return fmt.Errorf("%s ended with %w", p.name, p.err)
		}
		return nil
	case <-time.After(limit):
		return fmt.Errorf("%s has not ended within %v of SIGTERM", p.name, limit)
	}
}
