package peer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// Driver is a Python process that answers calls by name.
type Driver struct{ lines *lineProcess }

// StartDriver writes the programs in drivers into dir, which must not exist, and starts the one
// whose file name is driver.
func StartDriver(ctx context.Context, python string, drivers fs.FS, dir, driver string, environ ...string) (*Driver, error) {
	if err := os.CopyFS(dir, drivers); err != nil {
		return nil, err
	}
	cmd := exec.Command(python, filepath.Join(dir, driver))
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PYTHONPATH="+dir, "PYTHONDONTWRITEBYTECODE=1",
		"PATH="+filepath.Dir(python)+string(os.PathListSeparator)+os.Getenv("PATH"),
		"PENSTOCK_ENGINE_PIPES=0,3") // requests on standard input, answers on the first extra file
	cmd.Env = append(cmd.Env, environ...)
	lines, err := startLines(cmd, func(answers *os.File) { cmd.ExtraFiles = []*os.File{answers} })
	if err != nil {
		return nil, err
	}
	d := &Driver{lines: lines}
	if err := lines.answer(ctx, &struct{}{}); err != nil {
		return nil, errors.Join(fmt.Errorf("%s %s: %w", python, driver, err), d.Close())
	}
	return d, nil
}

// Call calls a function of the driver. If the function fails, the error is the last line of the
// Python traceback.
func (d *Driver) Call(ctx context.Context, function string, arguments, into any) error {
	request := struct {
		Call      string `json:"call"`
		Arguments any    `json:"arguments"`
	}{function, arguments}
	var answer struct {
		Error string
		Value json.RawMessage
	}
	if err := d.lines.ask(ctx, request, &answer); err != nil {
		return err
	}
	if answer.Error != "" {
		text := strings.TrimSpace(answer.Error)
		return errors.New(text[strings.LastIndexByte(text, '\n')+1:])
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(answer.Value, into)
}

// Close ends the process and all processes that it has started.
func (d *Driver) Close() error { return d.lines.Close() }

// Engines is a process that has imported vLLM and forks engines. A forked engine shares only
// the imported modules with this process.
type Engines struct {
	*Driver
	// id is a prefix of the engines' ids, by which files left by a killed engine are found.
	id string
	// started counts the engines.
	started int
}

// StartEngines starts vLLM's driver as StartDriver does.
func StartEngines(ctx context.Context, python string, drivers fs.FS, dir string, environ ...string) (*Engines, error) {
	d, err := StartDriver(ctx, python, drivers, dir, "vllm_driver.py", environ...)
	if err != nil {
		return nil, err
	}
	return &Engines{Driver: d, id: fmt.Sprintf("penstock-bench-%d", d.lines.PID())}, nil
}

// Close ends the process and the engines that it forked. A killed engine leaves the file of
// vLLM's shared offloading memory; Close removes that file.
func (e *Engines) Close() error {
	err := e.Driver.Close()
	left, _ := filepath.Glob("/dev/shm/vllm_offload_" + e.id + "-*") // the pattern is valid
	for _, file := range left {
		err = errors.Join(err, os.Remove(file))
	}
	return err
}

// EngineOptions names an engine's model and the connector to its KV store.
type EngineOptions struct {
	// Model is the directory of the model.
	Model string
	// MaxTokens limits the length of a request, prompt and output together.
	MaxTokens int
	// Connector names a function of harness/vllm.py that returns the configuration of vLLM's KV
	// connector, and Arguments are the function's arguments. "": the engine has no connector.
	Connector string
	Arguments map[string]any
}

// Engine is one forked engine.
type Engine struct {
	engines *Engines
	name    string
	pid     int
}

// Start forks an engine and waits until it can serve.
func (e *Engines) Start(ctx context.Context, o EngineOptions) (*Engine, error) {
	e.started++
	g := &Engine{engines: e, name: strconv.Itoa(e.started)}
	var connector map[string]any
	if o.Connector != "" {
		arguments := map[string]any{"of": o.Connector}
		maps.Copy(arguments, o.Arguments)
		if err := e.Call(ctx, "configuration", arguments, &connector); err != nil {
			return nil, err
		}
		connector["engine_id"] = e.id + "-" + g.name
	}
	err := e.Call(ctx, "start", map[string]any{
		"name": g.name, "model": o.Model, "connector": connector, "options": map[string]any{"max_model_len": o.MaxTokens},
	}, nil)
	if err != nil {
		return nil, err
	}
	return g, e.Call(ctx, "pid", map[string]any{"name": g.name}, &g.pid)
}

// PID returns the process id of the engine.
func (g *Engine) PID() int { return g.pid }

// Turn is an engine's report about one request.
type Turn struct {
	Tokens []int
	// Cached is the number of prompt tokens whose KV came from the cache.
	Cached int
	// FirstToken is the time from the request to its first token, in seconds.
	FirstToken float64 `json:"first_token_seconds"`
}

// Turn serves one request, with greedy sampling. The engine has no other request at the same time.
func (g *Engine) Turn(ctx context.Context, prompt []int, output int) (t Turn, err error) {
	err = g.engines.Call(ctx, "call", map[string]any{"name": g.name, "function": "turn", "prompt": prompt, "output": output}, &t)
	if err == nil && (len(t.Tokens) != output || t.FirstToken <= 0) {
		err = fmt.Errorf("the engine made %d of %d tokens, the first after %v s", len(t.Tokens), output, t.FirstToken)
	}
	return t, err
}

// Stop waits until the engine's asynchronous stores have ended, and then ends the engine.
func (g *Engine) Stop(ctx context.Context) error {
	return g.engines.Call(ctx, "stop", map[string]any{"name": g.name}, nil)
}

// LMCache is an LMCache server. It caches KV in memory and stores it in files.
type LMCache struct {
	*Process
	// Port is the port to which the engine's connector connects.
	Port int
}

// LMCacheEnviron returns the environment for server and engines. It disables usage reports.
func LMCacheEnviron() []string {
	return []string{"LMCACHE_TRACK_USAGE=false", "LMCACHE_DISABLE_BANNER=1", "LMCACHE_LOG_LEVEL=WARNING"}
}

// StartLMCache starts a server that stores one file in dir for each chunk of tokens.
func StartLMCache(ctx context.Context, python, dir string, chunkTokens int) (*LMCache, error) {
	var ports [3]int
	for i := range ports {
		var err error
		if ports[i], err = freePort(); err != nil {
			return nil, err
		}
	}
	level2, err := json.Marshal(map[string]any{"type": "fs", "base_path": dir})
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(filepath.Join(filepath.Dir(python), "lmcache"), "server",
		"--host", "127.0.0.1", "--port", strconv.Itoa(ports[0]), "--http-host", "127.0.0.1", "--http-port", strconv.Itoa(ports[1]),
		"--prometheus-port", strconv.Itoa(ports[2]), "--chunk-size", strconv.Itoa(chunkTokens), "--l1-size-gb", "1", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto", "--l2-adapter", string(level2))
	cmd.Env = append(os.Environ(), LMCacheEnviron()...)
	l := &LMCache{Port: ports[0]}
	if l.Process, err = start(cmd); err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })() // it may have ended already
	for _, port := range ports[:2] {
		if err := l.waitPort(loopback(port)); err != nil {
			return nil, errors.Join(ctx.Err(), err, l.Close())
		}
	}
	return l, nil
}
