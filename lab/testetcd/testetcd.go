// Package testetcd runs etcd for a test: Debian's etcd, one or several members on loopback ports,
// which a test can kill, pause and start again. Only tests import the package.
package testetcd

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
)

// Etcd is an etcd cluster.
type Etcd struct {
	// Endpoints are the client addresses of the members, host:port.
	Endpoints []string

	t       testing.TB
	peers   []string
	program string
	dir     string
	running []*exec.Cmd // nil: the member is not running
}

// Start starts an etcd cluster of n members. The members are killed when the test ends.
func Start(t testing.TB, n int) *Etcd {
	t.Helper()
	e := &Etcd{t: t, program: testkit.Program(t, "etcd", "etcd-server"), running: make([]*exec.Cmd, n)}
	// The data is in memory. etcd syncs each write, so with a busy disk the cluster would lose its
	// leader.
	dir, err := os.MkdirTemp("/dev/shm", "penstock-etcd-")
	if err != nil {
		t.Fatal(err)
	}
	e.dir = dir
	t.Cleanup(func() {
		for i := range e.running {
			e.Kill(i)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	for range n {
		e.Endpoints = append(e.Endpoints, testkit.Port(t))
		e.peers = append(e.peers, testkit.Port(t))
	}
	for i := range n {
		e.Run(i)
	}
	e.Await()
	return e
}

// Run starts the member i, with the data that it had.
func (e *Etcd) Run(i int) {
	e.t.Helper()
	var cluster []string
	for k, peer := range e.peers {
		cluster = append(cluster, fmt.Sprintf("m%d=http://%s", k, peer))
	}
	log, err := os.OpenFile(filepath.Join(e.dir, fmt.Sprintf("m%d.log", i)), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		e.t.Fatal(err)
	}
	defer log.Close()
	client, peer := "http://"+e.Endpoints[i], "http://"+e.peers[i]
	cmd := exec.Command(e.program, "--name", fmt.Sprintf("m%d", i), "--data-dir", filepath.Join(e.dir, fmt.Sprintf("m%d", i)),
		"--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
		"--initial-cluster", strings.Join(cluster, ","), "--initial-cluster-state", "new", "--logger", "zap")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		e.t.Fatal(err)
	}
	e.running[i] = cmd
}

// Kill ends the member i with SIGKILL, if it is running.
func (e *Etcd) Kill(i int) {
	e.t.Helper()
	cmd := e.running[i]
	if cmd == nil {
		return
	}
	e.running[i] = nil
	if err := cmd.Process.Kill(); err != nil {
		e.t.Error(err)
	}
	_ = cmd.Wait() // it was killed
}

// Pause stops the member i in place; Resume continues it.
func (e *Etcd) Pause(i int) { e.signal(i, syscall.SIGSTOP) }

// Resume continues the member i after Pause.
func (e *Etcd) Resume(i int) { e.signal(i, syscall.SIGCONT) }

func (e *Etcd) signal(i int, s syscall.Signal) {
	e.t.Helper()
	if err := e.running[i].Process.Signal(s); err != nil {
		e.t.Error(err)
	}
}

// Await waits until every running member accepts connections.
func (e *Etcd) Await() {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	var dialer net.Dialer
	for i, cmd := range e.running {
		for cmd != nil {
			conn, err := dialer.DialContext(ctx, "tcp", e.Endpoints[i])
			if err == nil {
				_ = conn.Close()
				break
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				log, _ := os.ReadFile(filepath.Join(e.dir, fmt.Sprintf("m%d.log", i)))
				e.t.Fatalf("etcd member %d: %v\n%s", i, err, log)
			}
		}
	}
}
