package peer

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/penstock-kv/penstock/lab/bench"
)

// storeFiles are the programs of the workers: Python programs that put values into one store and
// get the values back (stores/worker.py describes the protocol).
//
//go:embed stores/*.py
var storeFiles embed.FS

// Stores starts the workers. dir is the directory with their programs.
type Stores struct {
	dir string
	// pythons are the Python interpreters whose packages may be used, the preferred one first.
	pythons []string
}

// NewStores writes the workers' programs into dir, which must not exist.
func NewStores(dir string, pythons []string) (Stores, error) {
	s := Stores{dir, pythons}
	entries, err := storeFiles.ReadDir("stores")
	if err != nil {
		return s, err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return s, err
	}
	for _, e := range entries {
		text, err := storeFiles.ReadFile("stores/" + e.Name())
		if err != nil {
			return s, err
		}
		if err := os.WriteFile(filepath.Join(dir, e.Name()), text, 0o600); err != nil {
			return s, err
		}
	}
	return s, nil
}

// findModules is a Python program that exits with 0 if the interpreter finds all modules. A
// directory that only has the name of a module has no origin, and does not count.
const findModules = `
import importlib.util, sys
specs = [importlib.util.find_spec(name) for name in sys.argv[1:]]
sys.exit(any(spec is None or spec.origin is None for spec in specs))
`

// Python returns the first interpreter that has all modules. If none has, the error names the
// modules and the interpreters, and contains provider: how to install the modules.
func (s Stores) Python(ctx context.Context, provider string, modules ...string) (string, error) {
	for _, python := range s.pythons {
		cmd := exec.CommandContext(ctx, python, append([]string{"-c", findModules}, modules...)...)
		cmd.Dir = s.dir
		err := cmd.Run()
		if err == nil {
			return exec.LookPath(python)
		}
		var exit *exec.ExitError
		if !errors.As(err, &exit) {
			return "", fmt.Errorf("--python %s: %w", python, err)
		}
	}
	return "", fmt.Errorf("the module %s is in none of the interpreters %s; %s", strings.Join(modules, " or "), strings.Join(s.pythons, ", "), provider)
}

// StoreWorker is a process with the client of one store.
type StoreWorker struct {
	*lineProcess
	// Client is the name and version of the client.
	Client string
}

// StoreLoad is the request for one turn of a worker.
type StoreLoad struct {
	// Op is "get" or "put".
	Op string `json:"op"`
	// Cold: gets must read their values from the disk.
	Cold       bool  `json:"cold"`
	ValueBytes int64 `json:"value_bytes"`
	Threads    int   `json:"threads"`
	// Batch is the number of values per call.
	Batch   int     `json:"batch"`
	Seconds float64 `json:"seconds"`
	// PIDs are the processes of the store's servers, whose processor time is included.
	PIDs []int `json:"pids"`
}

// Start starts the program of a worker and waits until its client is connected.
func (s Stores) Start(ctx context.Context, python, program string, options any, environ ...string) (_ *StoreWorker, err error) {
	text, err := json.Marshal(options)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(python, filepath.Join(s.dir, program), string(text))
	cmd.Dir = s.dir
	cmd.Env = append(os.Environ(), environ...)
	w := &StoreWorker{}
	if w.lineProcess, err = startLines(cmd, func(answers *os.File) { cmd.Stdout = answers }); err != nil {
		return nil, err
	}
	var ready struct{ Client string }
	if err := w.answer(ctx, &ready); err != nil {
		return nil, errors.Join(fmt.Errorf("%s %s: %w", python, program, err), w.Close())
	}
	w.Client = ready.Client
	return w, nil
}

// Do makes the worker run the load. It returns the rate in GiB/s and the processor time of
// the worker and the store's servers.
func (w *StoreWorker) Do(ctx context.Context, l StoreLoad) (bench.Sample, error) {
	var a struct {
		Error   string
		Bytes   int64
		Seconds float64
		CPU     float64 `json:"cpu_seconds"`
	}
	if err := w.ask(ctx, l, &a); err != nil {
		return nil, err
	}
	if a.Error != "" {
		return nil, errors.New(a.Error)
	}
	if a.Bytes == 0 || a.Seconds <= 0 {
		return nil, fmt.Errorf("the worker moved %d bytes in %v s", a.Bytes, a.Seconds)
	}
	gib := float64(a.Bytes) / (1 << 30)
	return bench.Sample{bench.Rate: gib / a.Seconds, bench.CPU: a.CPU * 1e3 / gib}, nil
}

// Mooncake is a Mooncake Store: the master, and a process that owns the memory.
type Mooncake struct {
	master  *Process
	segment *StoreWorker
	// addr is the address of the master.
	addr string
}

// mooncakeEnviron returns the environment with which Mooncake's clients on one host use TCP, as
// clients on different hosts do, and log less.
func mooncakeEnviron() []string { return []string{"MC_STORE_MEMCPY=0", "GLOG_minloglevel=1"} }

// StartMooncake starts the master and a segment of segmentBytes.
func (s Stores) StartMooncake(ctx context.Context, python string, segmentBytes int64) (_ *Mooncake, err error) {
	var ports [3]int
	for i := range ports {
		if ports[i], err = freePort(); err != nil {
			return nil, err
		}
	}
	m := &Mooncake{addr: loopback(ports[0])}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.Close())
		}
	}()
	m.master, err = start(exec.Command(filepath.Join(filepath.Dir(python), "mooncake_master"),
		"--rpc_address=127.0.0.1", "--rpc_port="+strconv.Itoa(ports[0]), "--metrics_port="+strconv.Itoa(ports[1])))
	if err != nil {
		m.master = nil
		return nil, err
	}
	if err := m.master.waitPort(m.addr); err != nil {
		return nil, err
	}
	m.segment, err = s.Start(ctx, python, "mooncake_segment.py",
		map[string]any{"address": loopback(ports[2]), "master": m.addr, "segment_bytes": segmentBytes}, mooncakeEnviron()...)
	return m, err
}

// Client starts a worker with a client of this store.
func (m *Mooncake) Client(ctx context.Context, s Stores, python string, areaBytes int64) (*StoreWorker, error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	return s.Start(ctx, python, "mooncake_store.py",
		map[string]any{"address": loopback(port), "master": m.addr, "area_bytes": areaBytes}, mooncakeEnviron()...)
}

// PIDs returns the processes whose processor time is included.
func (m *Mooncake) PIDs() []int { return []int{m.master.PID(), m.segment.PID()} }

// Close ends both processes.
func (m *Mooncake) Close() error {
	var errs []error
	if m.segment != nil {
		errs = append(errs, m.segment.Close())
	}
	if m.master != nil {
		errs = append(errs, m.master.Close())
	}
	return errors.Join(errs...)
}
