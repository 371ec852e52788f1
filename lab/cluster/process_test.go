package cluster

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
)

// TestMain runs the child processes of TestProcess too, which StartProcess starts with this binary.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "child" {
		os.Exit(child(os.Args[2]))
	}
	testkit.Main(m)
}

// child is a process that logs that it is ready and repeats its standard input, or that fails.
func child(kind string) int {
	for i := range 2 * logLines {
		fmt.Fprintf(os.Stderr, "line %d\n", i)
	}
	if kind == "fails" {
		fmt.Fprintln(os.Stderr, "the disk is gone")
		return 3
	}
	if kind == "has a child" {
		return parent()
	}
	fmt.Fprintln(os.Stderr, `{"msg":"ready","listen":"127.0.0.1:1","data_listen":"127.0.0.1:2","http":"127.0.0.1:3"}`)
	if kind == "waits" {
		for {
			_ = syscall.Pause()
		}
	}
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		if in.Text() == `"long"` {
			fmt.Println(strings.Repeat("x", maxLine+1))
		}
		fmt.Println(in.Text())
	}
	if kind == "ends badly" {
		return 4
	}
	return 0
}

// parent is a process that starts a child, writes a line to descriptor 3, which the child has too, and waits.
func parent() int {
	shared := os.NewFile(3, "pipe")
	_, err := StartProcess(context.Background(), ProcessOptions{Name: "the child", Args: []string{"child", "waits"}, Start: func(cmd *exec.Cmd) error {
		cmd.ExtraFiles = []*os.File{shared}
		return cmd.Start()
	}})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Fprintln(shared, "started")
	for {
		_ = syscall.Pause()
	}
}

// startChild starts a child whose lines go to a channel.
func startChild(t *testing.T, kind string) (*Process, chan string, error) {
	lines := make(chan string, 16)
	p, err := StartProcess(t.Context(), ProcessOptions{
		Name: "the child", Args: []string{"child", kind}, First: "first", Line: func(line []byte) { lines <- string(line) },
	})
	return p, lines, err
}

func TestProcess(t *testing.T) {
	p, lines, err := startChild(t, "echo")
	if err != nil {
		t.Fatal(err)
	}
	if want := (Ready{"ready", "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"}); p.Ready != want {
		t.Errorf("ready with %+v", p.Ready)
	}
	if err := p.Say(map[string]int{"a": 1}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"first"`, `{"a":1}`} {
		if got := <-lines; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if err := p.Say(make(chan int)); err == nil {
		t.Error("a channel was sent as JSON")
	}
	// A line that is too long ends the lines, and the process can still write.
	if err := p.Say("long"); err != nil {
		t.Fatal(err)
	}
	if p.Err() != nil || p.CPU() != 0 {
		t.Errorf("while it runs: %v, %v", p.Err(), p.CPU())
	}
	if n := strings.Count(p.Log(), "\n"); n != logLines-1 || strings.Contains(p.Log(), "line 1\n") {
		t.Errorf("%d lines of the log are kept:\n%s", n+1, p.Log())
	}
	if err := p.Signal(syscall.SIGCONT); err != nil {
		t.Error(err)
	}
	// SIGTERM ends the child, which has no handler.
	if err := p.Stop(); err == nil || !strings.Contains(err.Error(), "terminated") {
		t.Errorf("Stop: %v", err)
	}
	<-p.Over()
	if p.CPU() == 0 {
		t.Error("an ended process took no CPU time")
	}
	if err := errors.Join(p.Signal(os.Interrupt), p.Kill()); err != nil {
		t.Errorf("an ended process: %v", err)
	}
	if err := p.Say("more"); err == nil || !strings.Contains(err.Error(), "the child does not read its input") {
		t.Errorf("Say to an ended process: %v", err)
	}
}

// TestProcessFails: the error of a start has the end of the log, and a start that fails leaves no pipe.
func TestProcessFails(t *testing.T) {
	// The collector closes files without references, and would hide files that a start leaves open.
	percent := debug.SetGCPercent(-1)
	t.Cleanup(func() { debug.SetGCPercent(percent) })
	testkit.VerifyNone(t)
	_, _, err := startChild(t, "fails")
	if err == nil || !strings.Contains(err.Error(), "the child ended before it was ready") || !strings.Contains(err.Error(), "exit status 3") || !strings.Contains(err.Error(), "the disk is gone") {
		t.Errorf("%v", err)
	}
	refused := errors.New("no place to run")
	if _, err := StartProcess(t.Context(), ProcessOptions{Start: func(*exec.Cmd) error { return refused }, Line: func([]byte) {}}); !errors.Is(err, refused) {
		t.Errorf("%v", err)
	}
	p, lines, err := startChild(t, "ends badly")
	if err != nil {
		t.Fatal(err)
	}
	<-lines
	if err := p.stdin.Close(); err != nil {
		t.Fatal(err)
	}
	<-p.Over()
	if p.Err() == nil || !strings.Contains(p.Err().Error(), "exit status 4") {
		t.Errorf("%v", p.Err())
	}
}

// TestParentKilled: a process ends when its parent is killed.
func TestParentKilled(t *testing.T) {
	ours, theirs, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ours.Close() })
	cmd := exec.Command(os.Args[0], "child", "has a child")
	cmd.ExtraFiles = []*os.File{theirs}
	if err := errors.Join(cmd.Start(), theirs.Close()); err != nil {
		t.Fatal(err)
	}
	from := bufio.NewReader(ours)
	line, err := from.ReadString('\n')
	if err := errors.Join(err, cmd.Process.Kill()); err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	_ = cmd.Wait() // it was killed
	// The pipe has no writer when both processes have ended.
	if err := ours.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := from.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("the child of a killed process still runs: %v", err)
	}
}

// TestProcessCancelled: a start that is given up leaves no process.
func TestProcessCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var started *exec.Cmd
	_, err := StartProcess(ctx, ProcessOptions{Name: "sleep", Start: func(c *exec.Cmd) error {
		c.Path, c.Args = "/bin/sleep", []string{"sleep", "1000"}
		started = c
		defer cancel()
		return c.Start()
	}})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if started.ProcessState == nil || started.ProcessState.ExitCode() == 0 {
		t.Errorf("the process ended with %v", started.ProcessState)
	}
}

// TestFlipStored: bits change in segment files only, one each.
func TestFlipStored(t *testing.T) {
	c := &Cluster{spec: Spec{Dir: t.TempDir()}}
	rng := newRand()
	if n, err := c.FlipStored(1, rng); err == nil || n != 0 {
		t.Errorf("without a segment: %d, %v", n, err)
	}
	volume := c.spec.Dir + "/volume"
	if err := os.Mkdir(volume, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, size := range map[string]int{"segment-1": 1000, "segment-2": 0, "superblock": 1000} {
		if err := os.WriteFile(volume+"/"+name, make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n, err := c.FlipStored(40, rng)
	if err != nil || n < 1 || n >= 40 {
		t.Errorf("%d of 40 bits changed; one of two segments is empty: %v", n, err)
	}
	changed := 0
	for _, name := range []string{"segment-1", "segment-2", "superblock"} {
		b, err := os.ReadFile(volume + "/" + name)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range b {
			if x != 0 {
				changed++
				if name != "segment-1" {
					t.Errorf("%s has changed", name)
				}
			}
		}
	}
	if changed == 0 || changed > n {
		t.Errorf("%d bytes of the segment differ after %d flips", changed, n)
	}
}

// TestAbsent: orders to processes that are not there, or do not run, are errors that name them.
func TestAbsent(t *testing.T) {
	newMember := func(name string) *member { return &member{place: &place{name: name}} }
	c := &Cluster{storage: newMember("storage"), planner: newMember("planner"), gateway: newMember("gateway"), engines: []*member{newMember("P0")}}
	for what, err := range map[string]error{
		"kill P9": c.Kill("P9"), "kill P0": c.Kill("P0"), "pause P9": c.Pause("P9"), "resume P0": c.Resume("P0"), "restart P9": c.Restart(t.Context(), "P9"),
		"flip P9": c.FlipBuffer("P9", time.Second, 1), "flip P0": c.FlipBuffer("P0", time.Second, 1),
		"rate P9": c.SetRate(NIC{Node: "P9"}, 1e6), "rate planner": c.SetRate(NIC{Node: "planner", Storage: true}, 1e6), "plug P9": c.Plug(NIC{Node: "P9"}, true),
	} {
		if name := what[strings.Index(what, " ")+1:]; err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := c.Burst(t.Context(), Bursts{From: "P0", To: "P0", Bytes: 1}); err == nil || !strings.Contains(err.Error(), "both must be running engines") {
		t.Errorf("bursts: %v", err)
	}
	if _, err := c.BumpWeights(t.Context()); err == nil || !strings.Contains(err.Error(), "gateway") {
		t.Errorf("new weights: %v", err)
	}
	if _, _, err := c.Replay(t.Context(), nil, 1); err == nil || !strings.Contains(err.Error(), "gateway") {
		t.Errorf("replay: %v", err)
	}
}
