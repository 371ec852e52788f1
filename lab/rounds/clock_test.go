package rounds

import (
	"bufio"
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A clock is the wall clock of one process. The kernel has one wall clock for all processes, and Go
// programs read it with the function clock_gettime of the vDSO, which the kernel maps into each process.
// startClocked replaces that function in the memory of the process:
//
//	vDSO   __vdso_clock_gettime:  jmp code
//	       …
//	       end of the image:      code    the system call clock_gettime; for CLOCK_REALTIME it adds offset
//	                              offset  seconds
//
// The monotonic clock is that of the kernel, as after a clock was set.
type clock struct {
	pid    int
	offset int64 // address in the process
}

var (
	// errNoClocks is the error where the processor or the kernel does not allow the test to change clocks.
	errNoClocks = errors.New("clocks of processes cannot be changed here")
	// errVDSO is the error where the vDSO has no clock_gettime, or no room for the code.
	errVDSO = errors.New("the vDSO of this kernel does not fit")
)

// noClocks returns the reason why startClocked or jump does not work on this machine, nil if they work.
var noClocks = sync.OnceValue(func() error {
	if runtime.GOARCH != "amd64" {
		return fmt.Errorf("%w: the machine code is for amd64; this processor is %s", errNoClocks, runtime.GOARCH)
	}
	p, err := startTimes(0)
	if err != nil {
		return err
	}
	// A kernel may allow writes to a process only while the process is traced.
	if err := p.clock.jump(time.Hour); err != nil {
		return errors.Join(fmt.Errorf("%w: writing without ptrace: %w", errNoClocks, err), p.kill())
	}
	return p.kill()
})

// startClocked starts a process whose wall clock can jump. The clock has the offset from the first
// instruction of the process on.
func startClocked(cmd *exec.Cmd, offset time.Duration) (*clock, error) {
	// Only the thread that started the process may trace it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Ptrace = true
	if err := cmd.Start(); err != nil {
		if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOSYS) {
			err = fmt.Errorf("%w: ptrace: %w", errNoClocks, err)
		}
		return nil, err
	}
	c := &clock{pid: cmd.Process.Pid}
	if err := c.install(offset); err != nil {
		return nil, errors.Join(fmt.Errorf("the clock of process %d: %w", c.pid, err), cmd.Process.Kill(), cmd.Wait())
	}
	return c, nil
}

// install waits until the kernel has loaded the program, replaces the function, and lets the process run.
func (c *clock) install(offset time.Duration) error {
	var status syscall.WaitStatus
	for {
		_, err := syscall.Wait4(c.pid, &status, 0, nil)
		if err == nil {
			break
		}
		if !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
	if !status.Stopped() { // a filter of system calls has killed the process
		return fmt.Errorf("%w: ptrace: the process has not stopped at its exec: status %#x", errNoClocks, status)
	}
	if err := c.replace(); err != nil {
		return err
	}
	if err := c.jump(offset); err != nil {
		return err
	}
	return syscall.PtraceDetach(c.pid)
}

// replace writes the function into the vDSO of the process.
func (c *clock) replace() error {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", c.pid))
	if err != nil {
		return err
	}
	var first, end int64
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, "[vdso]") {
			if _, err := fmt.Sscanf(line, "%x-%x", &first, &end); err != nil {
				return err
			}
		}
	}
	if end == 0 {
		return fmt.Errorf("%w: there is none", errVDSO)
	}
	image := make([]byte, end-first)
	// The address is right, so an error is a refusal. The write changes nothing.
	if err := errors.Join(c.read(first, image), c.write(first, image[:1])); err != nil {
		return fmt.Errorf("%w: %w", errNoClocks, err)
	}
	file, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return err
	}
	symbols, err := file.DynamicSymbols()
	if err != nil {
		return err
	}
	var entry int64
	for _, s := range symbols {
		if s.Name == "__vdso_clock_gettime" {
			entry = int64(s.Value)
		}
	}
	if entry == 0 {
		return fmt.Errorf("%w: it has no __vdso_clock_gettime", errVDSO)
	}
	code := []byte{
		0xb8, 0xe4, 0, 0, 0, // mov eax, SYS_clock_gettime
		0x0f, 0x05, // syscall
		0x85, 0xff, // test edi, edi: CLOCK_REALTIME is 0
		0x75, 0x0a, // jnz to ret
		0x48, 0x8b, 0x0d, 0, 0, 0, 0, // mov rcx, [offset]
		0x48, 0x01, 0x0e, // add [rsi], rcx
		0xc3, // ret
	}
	const offsetAt = 32
	// The instruction at byte 11 ends at byte 18, and addresses are relative to its end.
	binary.LittleEndian.PutUint32(code[14:], offsetAt-18)
	used := int64(len(bytes.TrimRight(image, "\x00")))
	at := (used + 15) &^ 15
	if at+offsetAt+8 > int64(len(image)) {
		return fmt.Errorf("%w: it has %d bytes, and its image takes %d", errVDSO, len(image), used)
	}
	jump := binary.LittleEndian.AppendUint32([]byte{0xe9}, uint32(at-entry-5)) // jmp, relative to its end
	c.offset = first + at + offsetAt
	return errors.Join(c.write(first+at, code), c.write(first+entry, jump))
}

// read reads the memory of the process.
func (c *clock) read(at int64, b []byte) error {
	mem, err := os.Open(fmt.Sprintf("/proc/%d/mem", c.pid))
	if err != nil {
		return err
	}
	_, err = mem.ReadAt(b, at)
	return errors.Join(err, mem.Close())
}

// write writes into the process. The kernel copies a page of the vDSO for this process first.
func (c *clock) write(at int64, b []byte) error {
	mem, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", c.pid), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = mem.WriteAt(b, at)
	return errors.Join(err, mem.Close())
}

// jump sets the difference between the wall clock of the process and that of the kernel, in whole seconds.
func (c *clock) jump(offset time.Duration) error {
	return c.write(c.offset, binary.LittleEndian.AppendUint64(nil, uint64(int64(offset/time.Second))))
}

// times is a process that runs writeTimes.
type times struct {
	cmd   *exec.Cmd
	clock *clock
	in    io.WriteCloser
	out   io.ReadCloser
}

// startTimes starts TestClock in a process whose clock has the offset.
func startTimes(offset time.Duration) (p *times, err error) {
	p = &times{cmd: exec.Command(os.Args[0], "-test.run=^TestClock$")}
	p.cmd.Env, p.cmd.Stderr = append(os.Environ(), "PENSTOCK_CLOCK_CHILD=1"), os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if p.out, err = p.cmd.StdoutPipe(); err != nil {
		return nil, err
	}
	if p.clock, err = startClocked(p.cmd, offset); err != nil {
		return nil, err
	}
	return p, nil
}

// kill ends the process.
func (p *times) kill() error {
	err := p.cmd.Process.Kill()
	_ = p.cmd.Wait() // it was killed
	return err
}

// TestClock: the wall clock of a process jumps, and its monotonic clock does not.
func TestClock(t *testing.T) {
	if os.Getenv("PENSTOCK_CLOCK_CHILD") != "" {
		writeTimes(os.Stdin, os.Stdout)
		return
	}
	if err := noClocks(); err != nil {
		unavailable := errors.Is(err, errNoClocks) || errors.Is(err, errVDSO)
		if unavailable && (runtime.GOARCH != "amd64" || os.Getenv("CI") != "true") {
			t.Skipf("this test needs amd64, ptrace, and a vDSO with clock_gettime: %v", err)
		}
		t.Fatal(err)
	}
	p, err := startTimes(-24 * time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.kill() }) // it may have ended
	lines := bufio.NewScanner(p.out)
	const near = 10 * time.Minute
	for _, offset := range []time.Duration{-24 * time.Hour, 0, time.Hour, 10 * 365 * 24 * time.Hour, -time.Hour} {
		if err := p.clock.jump(offset); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(p.in, "\n"); err != nil {
			t.Fatal(err)
		}
		if !lines.Scan() {
			t.Fatalf("the process has ended: %v", lines.Err())
		}
		wall, passed, _ := strings.Cut(lines.Text(), " ")
		seconds, err := strconv.ParseInt(wall, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		if d := time.Unix(seconds, 0).Sub(time.Now().Add(offset)).Abs(); d > near {
			t.Errorf("with the offset %v the clock differs by %v", offset, d)
		}
		if d, err := time.ParseDuration(passed); err != nil || d < 0 || d > near {
			t.Errorf("with the offset %v the monotonic clock is at %q", offset, passed)
		}
	}
	if err := errors.Join(p.in.Close(), p.cmd.Wait()); err != nil {
		t.Error(err)
	}
}

// writeTimes writes, for each line that it reads, the wall clock and the time that has passed by the
// monotonic clock.
func writeTimes(in io.Reader, out io.Writer) {
	began := time.Now()
	for lines := bufio.NewScanner(in); lines.Scan(); {
		fmt.Fprintln(out, time.Now().Unix(), time.Since(began))
	}
}
