package peer

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/penstock-kv/penstock/internal/testkit"
)

// driver is a driver over the real harness, with functions that need no engine.
const driver = `
import os, sys
from harness import process

engines = {}

def start(name, model, connector, options):
    if model == "absent":
        raise RuntimeError("first line\nthere is no model")
    engines[name] = [model, connector, options]

def call(name, function, prompt, output):
    if function != "turn":
        raise ValueError(function)
    return {"tokens": prompt[:output], "cached": 1, "first_token_seconds": 0.5}

def leave():
    print("out of memory", flush=True)
    os._exit(3)

process.serve({
    "start": start, "call": call, "leave": leave,
    "pid": lambda name: os.getpid(),
    "stop": lambda name: engines.pop(name) and None,
    "started": lambda: engines,
    "configuration": lambda of, **arguments: {"kv_connector": of, **arguments},
})
`

func startDriver(t *testing.T) *Engines {
	t.Helper()
	python := testkit.Python(t)
	files := fstest.MapFS{"vllm_driver.py": {Data: []byte(driver)}}
	for _, name := range []string{"harness/__init__.py", "harness/process.py"} {
		text, err := fs.ReadFile(os.DirFS("../../../python/engines"), name)
		if err != nil {
			t.Fatal(err)
		}
		files[name] = &fstest.MapFile{Data: text}
	}
	e, err := StartEngines(t.Context(), python, files, filepath.Join(t.TempDir(), "drivers"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

// TestEngines: an engine is started with its configuration, serves turns, and is stopped.
func TestEngines(t *testing.T) {
	e := startDriver(t)
	g, err := e.Start(t.Context(), EngineOptions{Model: "m", MaxTokens: 64, Connector: "fs_tier", Arguments: map[string]any{"directory": "d"}})
	if err != nil {
		t.Fatal(err)
	}
	if g.PID() != e.lines.PID() { // this driver does not fork
		t.Errorf("pid %d, want %d", g.PID(), e.lines.PID())
	}
	var started map[string][]any
	if err := e.Call(t.Context(), "started", struct{}{}, &started); err != nil {
		t.Fatal(err)
	}
	connector := started["1"][1].(map[string]any)
	if started["1"][0] != "m" || connector["kv_connector"] != "fs_tier" || connector["directory"] != "d" || connector["engine_id"] != e.id+"-1" {
		t.Errorf("started %v", started)
	}
	turn, err := g.Turn(t.Context(), []int{7, 8, 9}, 2)
	if err != nil || len(turn.Tokens) != 2 || turn.Tokens[1] != 8 || turn.Cached != 1 || turn.FirstToken != 0.5 {
		t.Errorf("turn %+v, %v", turn, err)
	}
	if _, err := g.Turn(t.Context(), []int{7}, 2); err == nil || !strings.Contains(err.Error(), "made 1 of 2 tokens") {
		t.Errorf("a turn that lacks a token: %v", err)
	}
	if err := g.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	if err := g.Stop(t.Context()); err == nil || err.Error() != "KeyError: '1'" {
		t.Errorf("a second stop: %v", err)
	}
}

// TestEnginesFail: an engine that does not start is an error of one line, after which the
// others start. The process that ends leaves its output in the error.
func TestEnginesFail(t *testing.T) {
	e := startDriver(t)
	if _, err := e.Start(t.Context(), EngineOptions{Model: "absent"}); err == nil || err.Error() != "there is no model" {
		t.Errorf("error %v", err)
	}
	g, err := e.Start(t.Context(), EngineOptions{Model: "m"})
	if err != nil {
		t.Fatal(err)
	}
	err = e.Call(t.Context(), "leave", struct{}{}, nil)
	if err == nil || !strings.Contains(err.Error(), "exit status 3") || !strings.Contains(err.Error(), "out of memory") {
		t.Errorf("a driver that ended: %v", err)
	}
	if err := g.Stop(t.Context()); err == nil {
		t.Error("an engine was stopped without its driver")
	}
}

// TestEnginesEndWithContext: the end of its context ends the driver, and with it a call that
// has no answer yet. Close removes the shared memory of an engine that was killed.
func TestEnginesEndWithContext(t *testing.T) {
	var left string
	t.Cleanup(func() { // after Close
		if _, err := os.Stat(left); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left: %v", left, err)
		}
	})
	e := startDriver(t)
	left = "/dev/shm/vllm_offload_" + e.id + "-1.mmap"
	if err := os.WriteFile(left, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := e.lines.answer(ctx, &struct{}{}); err == nil || !strings.Contains(err.Error(), "context canceled") {
		t.Errorf("error %v", err)
	}
	<-e.lines.Exited()
}
