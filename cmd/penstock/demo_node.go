package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/sys"
	"github.com/penstock-kv/penstock/lab/cluster"
	"github.com/penstock-kv/penstock/server/config"
)

// demoNodeFlags are the flags of the demo of a node.
type demoNodeFlags struct {
	replay   replayFlags
	dir      string
	capacity int64
	io       string
	trace    string
}

func newDemoNodeCommand(w world) *cobra.Command {
	d := demoNodeFlags{replay: replayDefaults(), capacity: demoCapacity, trace: sampleWord}
	d.replay.requests = demoRequests
	cmd := &cobra.Command{
		Use:   "node",
		Short: "Start a node on a temporary directory and replay a real trace on it",
		Long: `Start a storage node on a temporary directory, replay part of a real agentic trace
against it with real bytes, compare every returned byte, and print the measurements.
The capacity is smaller than the trace, so that blocks are evicted. Everything is
removed at the end.

The exit code is 1 if a byte differs or the node needs more memory than its budget.`,
		Args: args(cobra.NoArgs),
	}
	d.replay.add(cmd)
	cmd.Flags().StringVar(&d.dir, "dir", "", "directory for the temporary directory (default: the system's)")
	cmd.Flags().Var(sizeFlag{&d.capacity}, "capacity", "capacity of the node")
	cmd.Flags().StringVar(&d.io, "io", "auto", "I/O backend: auto, uring, posix or usrbio (3FS)")
	completeValues(cmd, "io", "auto", "uring", "posix", "usrbio")
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
	// demoRequests is the default number of requests; they take less than a minute on two cores.
	demoRequests = 400
	// demoCapacity is the capacity in bytes; it holds about a quarter of the blocks of
	// demoRequests.
	demoCapacity = 1280 << 20
	// Sizes of the arena and of the index's cache. The node's memory budget is their sum plus the
	// fixed part of every node. The demo checks that the node stays within the budget.
	demoArena      = 160 << 20
	demoIndexCache = 16 << 20
)

// demoNodeReport is the output of the demo.
type demoNodeReport struct {
	report
	IO                string `json:"io"`
	IOReason          string `json:"io_reason"`
	CapacityBytes     int64  `json:"capacity_bytes"`
	RSSBytes          int64  `json:"rss_bytes"`
	MemoryBudgetBytes int64  `json:"memory_budget_bytes"`
}

// failed reports whether a block was wrong or the node's memory exceeded its budget.
func (r *demoNodeReport) failed() bool {
	return r.MismatchedBlocks > 0 || r.RSSBytes > r.MemoryBudgetBytes
}

func (r *demoNodeReport) print(t *table) {
	t.pair("node", fmt.Sprintf("io %s, capacity %s", because(r.IO, r.IOReason), size(r.CapacityBytes)))
	r.report.print(t)
	verdict := "within"
	if r.RSSBytes > r.MemoryBudgetBytes {
		verdict = "ABOVE"
	}
	t.pair("memory", fmt.Sprintf("the node's RSS was at most %s, %s its budget of %s", size(r.RSSBytes), verdict, size(r.MemoryBudgetBytes)))
}

// run starts the node, replays the trace and removes the files.
func (d *demoNodeFlags) run(cmd *cobra.Command, w world) (_ *demoNodeReport, err error) {
	ctx := cmd.Context()
	if err := haveSpace(d.dir, d.capacity+demoSpare, "a smaller --capacity"); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(d.dir, "penstock-demo-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	node, err := cluster.StartProcess(ctx, cluster.ProcessOptions{Name: "the node", Args: d.serveArgs(dir), Env: withoutSettings(w.environ)})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, node.Stop()) }()
	c := &connection{servers: node.Ready.Listen, timeout: 30 * time.Second}
	conn, err := c.dial(node.Ready.Listen)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	a := admin{AdminClient: pb.NewAdminClient(conn), conn: conn}
	watched := watchMemory(ctx, a)
	r := &demoNodeReport{}
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

// demoSpare is the free space that the file system needs in addition to the stored bytes.
const demoSpare = 128 << 20

// haveSpace returns an error if the file system of dir has less than bytes free. An empty dir means
// the system's directory for temporary files. The error contains hint: a way to need less space.
func haveSpace(dir string, bytes int64, hint string) error {
	if dir == "" {
		dir = os.TempDir()
	}
	_, free, err := sys.Space(dir)
	if err != nil {
		return usagef("--dir %s: %w", dir, err)
	}
	if free < bytes {
		return fmt.Errorf("%s has %s free and the demo needs %s: name another directory with --dir, or %s", dir, size(free), size(bytes), hint)
	}
	return nil
}

// serveArgs returns the arguments of the demo's node: free ports on loopback, a small arena, and a
// log in JSON.
func (d *demoNodeFlags) serveArgs(dir string) []string {
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

// withoutSettings returns the environment without Penstock's variables, so that the demo does not
// depend on the user's settings of nodes and clients.
func withoutSettings(environ []string) []string {
	return slices.DeleteFunc(slices.Clone(environ), func(s string) bool { return strings.HasPrefix(s, config.EnvPrefix) })
}

// memoryWatch polls a node's memory.
type memoryWatch struct {
	stop context.CancelFunc
	done chan struct{}
	last *pb.StatusResponse
	peak int64
}

// watchEvery is the polling interval.
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
