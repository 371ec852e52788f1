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

// Engines is a process that has imported vLLM and forks engines. A forked engine
// shares imported modules with this process, and nothing else.
type Engines struct {
	lines *lineProcess
	// id begins the ids of the engines, so that files left by a killed engine are found.
	id string
	// started numbers the engines.
	started int
}

// StartEngines writes the drivers into dir, which must not exist, and starts that of vLLM.
func StartEngines(ctx context.Context, python string, drivers fs.FS, dir string, environ ...string) (*Engines, error) {
	if err := os.CopyFS(dir, drivers); err != nil {
		return nil, err
	}
	cmd := exec.Command(python, filepath.Join(dir, "vllm_driver.py"))
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PYTHONPATH="+dir, "PYTHONDONTWRITEBYTECODE=1",
		"PATH="+filepath.Dir(python)+string(os.PathListSeparator)+os.Getenv("PATH"),
		"PENSTOCK_ENGINE_PIPES=0,3") // calls on the standard input, answers on the first extra file
	cmd.Env = append(cmd.Env, environ...)
	lines, err := startLines(cmd, func(answers *os.File) { cmd.ExtraFiles = []*os.File{answers} })
	if err != nil {
		return nil, err
	}
	e := &Engines{lines: lines, id: fmt.Sprintf("penstock-bench-%d", lines.PID())}
	if err := lines.answer(ctx, &struct{}{}); err != nil {
		return nil, errors.Join(fmt.Errorf("%s vllm_driver.py: %w", python, err), e.Close())
	}
	return e, nil
}

// Call calls a function of the driver. The error of a function that fails is the last
// line of its traceback.
func (e *Engines) Call(ctx context.Context, function string, arguments, into any) error {
	request := struct {
		Call      string `json:"call"`
		Arguments any    `json:"arguments"`
	}{function, arguments}
	var answer struct {
		Error string
		Value json.RawMessage
	}
	if err := e.lines.ask(ctx, request, &answer); err != nil {
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

// Close ends the process and the engines that it has forked. An engine that is killed
// leaves the file of the memory that vLLM's offloading shares, which Close removes.
func (e *Engines) Close() error {
	err := e.lines.Close()
	left, _ := filepath.Glob("/dev/shm/vllm_offload_" + e.id + "-*") // the pattern is right
	for _, file := range left {
		err = errors.Join(err, os.Remove(file))
	}
	return err
}

// EngineOptions name an engine's model and the connector to its store of KV.
type EngineOptions struct {
	// Model is the directory of the model.
	Model string
	// MaxTokens bounds a request: its prompt and its output.
	MaxTokens int
	// Connector names a function of harness/vllm.py that returns a configuration, and
	// Arguments are those of the function. Without a name the engine has no connector.
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

// PID is the engine's process.
func (g *Engine) PID() int { return g.pid }

// Turn is an engine's report about one request.
type Turn struct {
	Tokens []int
	// Cached is the tokens of the prompt that were not computed.
	Cached int
	// FirstToken is the seconds from the request to its first token.
	FirstToken float64 `json:"first_token_seconds"`
}

// Turn serves one request alone, greedy.
func (g *Engine) Turn(ctx context.Context, prompt []int, output int) (t Turn, err error) {
	err = g.engines.Call(ctx, "call", map[string]any{"name": g.name, "function": "turn", "prompt": prompt, "output": output}, &t)
	if err == nil && (len(t.Tokens) != output || t.FirstToken <= 0) {
		err = fmt.Errorf("the engine made %d of %d tokens, the first after %v s", len(t.Tokens), output, t.FirstToken)
	}
	return t, err
}

// Stop waits until the engine's asynchronous stores have ended, and ends the engine.
func (g *Engine) Stop(ctx context.Context) error {
	return g.engines.Call(ctx, "stop", map[string]any{"name": g.name}, nil)
}

// LMCache is a server of LMCache with the file system as its second level.
type LMCache struct {
	*Process
	// Port is that of the engine's connector.
	Port int
}

// LMCacheEnviron is for the server and for the engines: nothing is reported to anyone.
func LMCacheEnviron() []string {
	return []string{"LMCACHE_TRACK_USAGE=false", "LMCACHE_DISABLE_BANNER=1", "LMCACHE_LOG_LEVEL=WARNING"}
}

// StartLMCache starts a server that keeps a file in dir for each chunk of tokens.
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
