package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/server/config"
)

// demoFlags are what a demo can be told.
type demoFlags struct {
	replay   replayFlags
	dir      string
	capacity int64
	io       string
	trace    string
}

func newDemoCommand(w world) *cobra.Command {
	d := demoFlags{replay: replayDefaults(), capacity: demoCapacity, trace: sampleWord}
	d.replay.requests = demoRequests
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Start a node on a temporary directory and replay a real trace on it",
		Long: `Start a storage node on a temporary directory, replay part of a real agentic trace
against it with real bytes, compare every byte that comes back, and print what was
seen. The capacity is smaller than the trace, so that blocks are evicted. Everything
is removed at the end.

The exit code is 1 if a byte differs or the node needs more memory than its budget.`,
		Args: args(cobra.NoArgs),
	}
	d.replay.add(cmd)
	cmd.Flags().StringVar(&d.dir, "dir", "", "make the temporary directory in this one (default: the system's)")
	cmd.Flags().Var(sizeFlag{&d.capacity}, "capacity", "capacity of the node")
	cmd.Flags().StringVar(&d.io, "io", "auto", "how the node drives its disk: auto, uring or posix")
	cmd.Flags().StringVar(&d.trace, "trace", d.trace, "replay this trace instead of the sample")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		r, err := d.run(cmd, w)
		if r != nil {
			if err := outputOf(cmd).emit(r, r.print); err != nil {
				return err
			}
		}
		if err == nil && r.failed() {
			err = errReported
		}
		return err
	}
	return cmd
}

const (
	// demoRequests take less than a minute on two cores.
	demoRequests = 400
	// demoCapacity holds about a quarter of the blocks of demoRequests.
	demoCapacity = 1280 << 20
	// The node of the demo is small: its budget, which is checked, is these two
	// and what every node has for itself.
	demoArena      = 160 << 20
	demoIndexCache = 16 << 20
)

// demoReport is what the demo prints.
type demoReport struct {
	report
	IO                string `json:"io"`
	IOReason          string `json:"io_reason"`
	CapacityBytes     int64  `json:"capacity_bytes"`
	RSSBytes          int64  `json:"rss_bytes"`
	MemoryBudgetBytes int64  `json:"memory_budget_bytes"`
}

// failed reports whether a promise was broken.
func (r *demoReport) failed() bool {
	return r.MismatchedBlocks > 0 || r.RSSBytes > r.MemoryBudgetBytes
}

func (r *demoReport) print(t *table) {
	t.pair("node", fmt.Sprintf("io %s, capacity %s", because(r.IO, r.IOReason), size(r.CapacityBytes)))
	r.report.print(t)
	verdict := "within"
	if r.RSSBytes > r.MemoryBudgetBytes {
		verdict = "ABOVE"
	}
	t.pair("memory", fmt.Sprintf("the node's RSS was at most %s, %s its budget of %s", size(r.RSSBytes), verdict, size(r.MemoryBudgetBytes)))
}

// run starts the node, replays and cleans up.
func (d *demoFlags) run(cmd *cobra.Command, w world) (_ *demoReport, err error) {
	ctx := cmd.Context()
	dir, err := os.MkdirTemp(d.dir, "penstock-demo-")
	if err != nil {
		return nil, err
	}
	if err := haveSpace(dir, d.capacity+demoSpare); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	node, err := startChild(ctx, w, d.serveArgs(dir))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, node.stop()) }()
	c := &connection{servers: node.ready.Listen, timeout: 30 * time.Second}
	conn, err := c.dial(node.ready.Listen)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	a := admin{AdminClient: pb.NewAdminClient(conn), conn: conn}
	watched := watchMemory(ctx, a)
	r := &demoReport{}
	err = c.data(cmd, func(ctx context.Context, s *client.Store) error {
		run := replayRun{world: w, flags: d.replay, store: s, admin: a, name: d.trace}
		rep, err := run.run(ctx)
		if rep != nil {
			r.report = *rep
		}
		return err
	})
	last := watched.end()
	if r.Requests == 0 || last == nil {
		return nil, err
	}
	r.IO, r.IOReason, r.CapacityBytes = last.GetIo(), last.GetIoReason(), last.GetCapacityBytes()
	r.RSSBytes, r.MemoryBudgetBytes = watched.peak, last.GetMemoryBudgetBytes()
	return r, err
}

// demoSpare is what the file system must have free besides the capacity.
const demoSpare = 128 << 20

// haveSpace fails if the file system of dir has less than so much free.
func haveSpace(dir string, bytes int64) error {
	var fs syscall.Statfs_t
	if err := syscall.Statfs(dir, &fs); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	if free := int64(fs.Bavail) * fs.Bsize; free < bytes {
		return fmt.Errorf("%s has %s free and the demo needs %s: name another directory with --dir, or a smaller --capacity", dir, size(free), size(bytes))
	}
	return nil
}

// serveArgs are the command line of the demo's node: free ports of loopback, a
// small arena, and a log that can be read by a program.
func (d *demoFlags) serveArgs(dir string) []string {
	return []string{
		"serve",
		"--data", filepath.Join(dir, "volume"),
		"--capacity", fmt.Sprint(d.capacity),
		"--listen", "127.0.0.1:0", "--data-listen", "127.0.0.1:0", "--http", "127.0.0.1:0",
		"--io", d.io,
		"--arena", fmt.Sprint(demoArena), "--index-cache", fmt.Sprint(demoIndexCache),
		"--free-floor", "64MiB", "--node", "demo",
		"--log-format", "json",
	}
}

// childReady is the line that a node logs when it is ready.
type childReady struct {
	Message    string `json:"msg"`
	Listen     string `json:"listen"`
	DataListen string `json:"data_listen"`
	HTTP       string `json:"http"`
}

// child is a node in a process of its own.
type child struct {
	cmd   *exec.Cmd
	ready childReady
	log   *tail
	done  chan error
}

// startChild runs this very binary with args and waits until it is ready.
func startChild(ctx context.Context, w world, args []string) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &child{cmd: exec.Command(self, args...), log: &tail{}, done: make(chan error, 1)}
	c.cmd.Env = withoutSettings(w.environ)
	// A group of its own: Ctrl-C is for the demo, which then stops its node.
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stderr, err := c.cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	ready := make(chan childReady, 1)
	go func() {
		c.log.follow(stderr, ready)
		c.done <- c.cmd.Wait()
	}()
	select {
	case c.ready = <-ready:
		return c, nil
	case err := <-c.done:
		return nil, fmt.Errorf("the node ended before it was ready (%w):\n%s", err, c.log)
	case <-time.After(childStart):
		return nil, errors.Join(fmt.Errorf("the node was not ready within %v:\n%s", childStart, c.log), c.stop())
	case <-ctx.Done():
		return nil, errors.Join(context.Cause(ctx), c.stop())
	}
}

const (
	// childStart bounds a start, childStop a clean stop.
	childStart = 30 * time.Second
	childStop  = 20 * time.Second
)

// stop ends the node, cleanly if it can.
func (c *child) stop() error {
	if err := c.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case err := <-c.done:
		if err != nil {
			return fmt.Errorf("the node ended with %w:\n%s", err, c.log)
		}
		return nil
	case <-time.After(childStop):
		err := c.cmd.Process.Kill()
		<-c.done
		return errors.Join(fmt.Errorf("the node did not stop within %v and was killed:\n%s", childStop, c.log), err)
	}
}

// withoutSettings is the environment without what would configure a node or a
// client: the demo is the same for everybody.
func withoutSettings(environ []string) []string {
	return slices.DeleteFunc(slices.Clone(environ), func(s string) bool { return strings.HasPrefix(s, config.EnvPrefix) })
}

// tail keeps the last lines of a log.
type tail struct {
	mu    sync.Mutex
	lines []string
}

// tailLines is how much of a node's log is shown when it fails.
const tailLines = 20

// follow reads the log to its end and sends the line that says ready.
func (t *tail) follow(r io.Reader, ready chan<- childReady) {
	scanner := bufio.NewScanner(r)
	scanner.Buffer(nil, 1<<20)
	for scanner.Scan() {
		line := scanner.Text()
		var entry childReady
		if json.Unmarshal([]byte(line), &entry) == nil && entry.Message == "ready" {
			select {
			case ready <- entry:
			default: // it says so once
			}
		}
		t.mu.Lock()
		t.lines = append(t.lines, line)
		t.lines = t.lines[max(0, len(t.lines)-tailLines):]
		t.mu.Unlock()
	}
	// Whatever was too long for the scanner must still be read, or the node
	// would wait for us.
	_, _ = io.Copy(io.Discard, r)
}

// String returns the lines.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.Join(t.lines, "\n")
}

// memoryWatch asks a node for its memory while something else goes on.
type memoryWatch struct {
	stop context.CancelFunc
	done chan struct{}
	last *pb.StatusResponse
	peak int64
}

// watchEvery is the time between two looks.
const watchEvery = 500 * time.Millisecond

func watchMemory(ctx context.Context, a admin) *memoryWatch {
	ctx, stop := context.WithCancel(ctx)
	m := &memoryWatch{stop: stop, done: make(chan struct{})}
	go func() {
		defer close(m.done)
		tick := time.NewTicker(watchEvery)
		defer tick.Stop()
		for {
			if s, err := a.Status(ctx, &pb.StatusRequest{}); err == nil {
				m.last, m.peak = s, max(m.peak, s.GetRssBytes())
			}
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}()
	return m
}

// end stops watching and returns the last status, nil if there was none.
func (m *memoryWatch) end() *pb.StatusResponse {
	m.stop()
	<-m.done
	return m.last
}
