package suite

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/penstock-kv/penstock/internal/testkit"
	"github.com/penstock-kv/penstock/lab/bench"
	"github.com/penstock-kv/penstock/lab/bench/peer"
	"github.com/penstock-kv/penstock/python/engines"
)

// driver serves turns over the real harness without an engine. The tokens of a prompt are
// its last ones. A prompt is cached if any engine on the same directory had the one before.
const driver = `
import os, pathlib
from harness import process

directories = {}

def configuration(of, directory):
    pathlib.Path(directory).mkdir(exist_ok=True)
    return {"directory": directory}

def start(name, model, connector, options):
    directories[name] = connector and pathlib.Path(connector["directory"])

def call(name, function, prompt, output):
    directory = directories[name]
    if directory is None:
        return {"tokens": prompt[-output:], "cached": 0, "first_token_seconds": 0.001 * len(prompt)}
    before = directory / "-".join(map(str, prompt[:-8]))
    cached = len(prompt) - 8 if before.exists() else 0
    (directory / "-".join(map(str, prompt))).touch()
    tokens = prompt[-output:]
    if (directory / "wrong").exists():
        tokens[0] += 1
    return {"tokens": tokens, "cached": cached, "first_token_seconds": 0.001 * (len(prompt) - cached)}

process.serve({
    "configuration": configuration, "start": start, "call": call,
    "pid": lambda name: os.getpid(), "stop": lambda name: directories.pop(name) and None,
})
`

// startTurns returns a suite with two rounds of two sessions, whose engines are of driver.
func startTurns(t *testing.T) *turnsSuite {
	t.Helper()
	python := testkit.Python(t)
	files := fstest.MapFS{"vllm_driver.py": {Data: []byte(driver)}}
	for _, name := range []string{"harness/__init__.py", "harness/process.py"} {
		text, err := fs.ReadFile(engines.Files, name)
		if err != nil {
			t.Fatal(err)
		}
		files[name] = &fstest.MapFile{Data: text}
	}
	s := &turnsSuite{suiteRun: newRun(testWorld(t), turnsSection), opts: TurnsOptions{Rounds: 2, Sessions: 2, PromptTokens: 32}, dir: t.TempDir()}
	s.Progress = func(string) {}
	var err error
	if s.engines, err = peer.StartEngines(t.Context(), python, files, filepath.Join(s.dir, "drivers")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.engines.Close(); err != nil {
			t.Error(err)
		}
	})
	for session := range s.opts.Rounds * s.opts.Sessions {
		var prompts [][]int
		var prompt []int
		for turn := range sessionTurns {
			for i := range 8 {
				prompt = append(prompt, 1000*session+100*turn+i)
			}
			prompts = append(prompts, append([]int{}, prompt...))
		}
		s.sessions = append(s.sessions, prompts)
	}
	if err := s.reference(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

// TestTurns: in a fresh engine the last turn of each session computes the tokens that its
// prompt adds, and vLLM alone computes all tokens. The report has ratios to vLLM alone.
func TestTurns(t *testing.T) {
	s := startTurns(t)
	stores := []*engineStore{{name: vllmName}, {name: fsTierName, open: s.openFsTier}}
	if err := s.compareAfter(t.Context(), s.comparison(lastTurn, stores, s.freshRound), 0); err != nil {
		t.Fatal(err)
	}
	res := s.report.Results[0]
	if res.Rounds != 2 || len(res.NotRun) != 0 || len(res.Absolute) != 2 {
		t.Fatalf("result %+v", res)
	}
	for i, want := range []float64{48, 16} { // two sessions: prompts of 24 tokens, of which 8 are new
		m := res.Absolute[i].Metrics
		if m[recomputed].Median != want || m[promptTokens].Median != 48 || m[firstTokenMedian].Median != want/2 || m[turnsCPU].Median < 0 {
			t.Errorf("%s: %v", res.Absolute[i].Contender, m)
		}
	}
	third := 1.0 / 3
	if len(res.Measures) != 3 || res.Measures[0].Name != "first token, vLLM + fs tier / vLLM" || res.Measures[0].Median-third > 1e-9 || third-res.Measures[0].Median > 1e-9 {
		t.Errorf("measures %+v", res.Measures)
	}
}

// TestTurnsCompareTokens: a store with which an engine makes another token, and one that
// delivers nothing, are left out and named.
func TestTurnsCompareTokens(t *testing.T) {
	s := startTurns(t)
	wrong := filepath.Join(s.dir, "fs-tier", "wrong")
	if err := os.MkdirAll(filepath.Dir(wrong), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(wrong, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	calls := 0
	forgets := func(context.Context) (openStore, error) { // each engine has a directory of its own
		calls++
		return openStore{connector: "fs_tier", arguments: map[string]any{"directory": filepath.Join(s.dir, "own", string(rune('a'+calls)))}}, nil
	}
	if err := os.Mkdir(filepath.Join(s.dir, "own"), 0o700); err != nil {
		t.Fatal(err)
	}
	stores := []*engineStore{{name: fsTierName, open: s.openFsTier}, {name: tierName, open: forgets}}
	if err := s.compareAfter(t.Context(), s.comparison(lastTurn, stores, s.freshRound), 0); err != nil {
		t.Fatal(err)
	}
	why := make(map[string]string)
	for _, m := range s.report.Results[0].NotRun {
		why[m.What] = m.Why
	}
	if len(why) != 2 || !strings.Contains(why[fsTierName], "WRONG TOKENS: session 0, turn 0: [1 1 2 3") || !strings.Contains(why[tierName], "the store delivered no token") {
		t.Errorf("not run: %v", why)
	}
}

// TestTurnsWithoutVLLM: without the packages each engine is named with the commands that
// install them, in a section of its own.
func TestTurnsWithoutVLLM(t *testing.T) {
	w := testWorld(t)
	w.Only = regexp.MustCompile("^first token")
	python := filepath.Join(t.TempDir(), "python") // it finds no module
	if err := os.WriteFile(python, []byte("#!/bin/sh\nexit 1\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	r, err := Engines(t.Context(), w, EnginesOptions{Pythons: []string{python}, AreaBytes: 4 << 20, Turns: TurnsOptions{Rounds: 1, Sessions: 1, PromptTokens: 256}})
	if err != nil || !r.Empty() || len(r.Sections) != 1 {
		t.Fatalf("report %+v, %v", r, err)
	}
	section := r.Sections[0]
	if section.Suite != turnsSection || len(section.NotRun) != 8 {
		t.Errorf("section %+v", section)
	}
	for _, m := range section.NotRun {
		if !strings.Contains(m.Why, "the module vllm or penstock is in none") || !strings.Contains(m.Why, "engines/vllm.lock") || !strings.Contains(m.Why, "make wheel") {
			t.Errorf("%s: %s", m.What, m.Why)
		}
	}
	w.Contenders = regexp.MustCompile("^no such store$")
	if r, err := Engines(t.Context(), w, EnginesOptions{Pythons: []string{python}}); err != nil || len(r.Sections) != 0 {
		t.Errorf("no contender: %+v, %v", r, err)
	}
}

// TestTurnsDriver: the functions that the suite calls by name are in the driver.
func TestTurnsDriver(t *testing.T) {
	configurations, err := fs.ReadFile(engines.Files, "harness/vllm.py")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"connector", "tier", "fs_tier", "disk_offload", "lmcache"} {
		if !strings.Contains(string(configurations), "\ndef "+name+"(") {
			t.Errorf("harness/vllm.py has no function %s", name)
		}
	}
	text, err := fs.ReadFile(engines.Files, "vllm_driver.py")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"version", "model", "sessions", "configuration", "start", "pid", "call", "stop"} {
		if !strings.Contains(string(text), `"`+name+`": `) {
			t.Errorf("vllm_driver.py does not serve %s", name)
		}
	}
	if _, err := fs.Stat(engines.Files, "vllm_copy_spec.py"); err != nil {
		t.Error(err)
	}
}

// TestSampleOf: the median and the extremes of the first tokens, and the sums of the rest.
func TestSampleOf(t *testing.T) {
	turn := func(ms float64, prompt, cached int) servedTurn {
		return servedTurn{peer.Turn{Cached: cached, FirstToken: ms / 1e3}, prompt, 500 * time.Millisecond}
	}
	got := sampleOf([]servedTurn{turn(400, 100, 96), turn(100, 50, 0), turn(300, 10, 0)})
	want := bench.Sample{firstTokenMedian: 300, firstTokenLow: 100, firstTokenHigh: 400, recomputed: 64, promptTokens: 160, turnsCPU: 1.5}
	for metric, v := range want {
		if got[metric] != v {
			t.Errorf("%s is %v, want %v", metric, got[metric], v)
		}
	}
	if len(got) != len(want) {
		t.Errorf("sample %v", got)
	}
}

// TestWaitFiles: files that are whole count, and chunks that prompts share count once.
func TestWaitFiles(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a.data", "b.data", "c.data.tmp"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := waitFiles(t.Context(), dir, 2); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := waitFiles(ctx, dir, 3); err == nil || !strings.Contains(err.Error(), "2 files of 3") {
		t.Errorf("error %v", err)
	}
	if err := dropFiles(dir); err != nil {
		t.Error(err)
	}
	if err := dropFiles(filepath.Join(dir, "absent")); err != nil {
		t.Error(err)
	}
	if n := countChunks([][]int{{1, 2, 3, 4, 5}, {1, 2, 3, 9}, {1}}, 2); n != 3 {
		t.Errorf("%d chunks, want 3", n)
	}
}

// TestTurnsOptions: each value that cannot be used is named with its flag.
func TestTurnsOptions(t *testing.T) {
	good := TurnsOptions{Rounds: 2, Sessions: 4, PromptTokens: 1536}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for flag, change := range map[string]func(*TurnsOptions){
		"--engine-rounds 0": func(o *TurnsOptions) { o.Rounds = 0 },
		"--sessions 0":      func(o *TurnsOptions) { o.Sessions = 0 },
		"--prompt 100":      func(o *TurnsOptions) { o.PromptTokens = 100 },
	} {
		o := good
		change(&o)
		if err := o.Validate(); err == nil || !strings.HasPrefix(err.Error(), flag+":") {
			t.Errorf("%s: %v", flag, err)
		}
	}
}
