package suite

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/penstock-kv/penstock/internal/sys"
	"github.com/penstock-kv/penstock/internal/trace"
	"github.com/penstock-kv/penstock/lab/bench"
	"github.com/penstock-kv/penstock/lab/bench/peer"
	"github.com/penstock-kv/penstock/python/engines"
)

// TurnsOptions configures the part of the engines suite that runs engines.
type TurnsOptions struct {
	// Rounds is the number of rounds. No two rounds have a session in common.
	Rounds int
	// Sessions is the number of agent sessions in a round.
	Sessions int
	// PromptTokens is the maximum length of a session's prompts, in tokens.
	PromptTokens int
	// Traces is a directory with the agents' trace. If the trace is missing, the built-in trace is used.
	Traces string
}

// Validate returns an error if the suite cannot use a value.
func (o TurnsOptions) Validate() error {
	switch {
	case o.Rounds < 1 || o.Rounds > 100:
		return fmt.Errorf("--engine-rounds %d: must be 1 to 100", o.Rounds)
	case o.Sessions < 1 || o.Sessions > 1000:
		return fmt.Errorf("--sessions %d: must be 1 to 1000", o.Sessions)
	case o.PromptTokens < 256 || o.PromptTokens > 8192:
		return fmt.Errorf("--prompt %d: must be 256 to 8192", o.PromptTokens)
	}
	return nil
}

// turnsSection is the name of the section in the report.
const turnsSection = "engines-first-token"

// Names of contenders.
const (
	vllmName      = "vLLM"
	fsTierName    = "vLLM + fs tier"
	offloadName   = "vLLM + disk offload"
	lmcacheEngine = "vLLM + LMCache fs"
	lmcacheSmall  = "vLLM + LMCache fs, small chunks"
	tierName      = "vLLM + PenstockTier"
	connectorName = "vLLM + PenstockConnector"
	layersName    = "vLLM + PenstockConnector, layers"
)

// Names of comparisons.
const (
	firstTurn = "first token, first turn of a session"
	lastTurn  = "first token, last turn in a fresh engine"
)

// Metrics of turns.
const (
	firstTokenMedian = "first token ms"
	firstTokenLow    = "fastest ms"
	firstTokenHigh   = "slowest ms"
	recomputed       = "tokens recomputed"
	promptTokens     = "prompt tokens"
	turnsCPU         = "CPU s"
)

// The model has random weights in float32. Prefill of 1500 tokens takes about one second on
// two cores.
const (
	modelHidden = 512
	modelLayers = 8
	// kvTokenBytes is the size of K and V of a token: 2 heads of a quarter of the hidden size.
	kvTokenBytes = modelLayers * 2 * 2 * (modelHidden / 4) * 4
	// modelSpread is the spread of the random weights, chosen so that their effect on a layer's
	// output is the same as in the smaller model of the tests.
	modelSpread = 0.075
)

// cudaDevice is a file that exists if the NVIDIA driver is loaded.
const cudaDevice = "/dev/nvidiactl"

const (
	// sessionTurns is the number of served turns per session.
	sessionTurns = 3
	// outputTokens is the number of tokens that an engine generates in a turn.
	outputTokens = 8
	// lmcacheChunk is LMCache's default number of tokens per file. lmcacheBlock is the number of
	// tokens per block of vLLM; the other stores store such blocks.
	lmcacheChunk = 256
	lmcacheBlock = 32
)

// engineStore is a store in which an engine stores KV. If open is nil, the engine has no store.
type engineStore struct {
	name string
	// open starts the store for one engine, with no value in memory or in the page cache.
	open func(context.Context) (openStore, error)
	// rounds is the number of rounds whose KV is in the store: of each of their sessions, all turns
	// except the last. These are rounds 0 to rounds-1.
	rounds int
}

// openStore is a store that one engine uses.
type openStore struct {
	// connector and arguments are the fields of peer.EngineOptions.
	connector string
	arguments map[string]any
	// pids are the processes of the store's servers.
	pids []int
	// wait, if set, waits until the store has these prompts and all prompts of earlier calls.
	wait  func(ctx context.Context, prompts [][]int) error
	close func() error
}

// turnsSuite is one run of the part of the engines suite that runs engines.
type turnsSuite struct {
	*suiteRun
	opts    TurnsOptions
	dir     string
	python  string
	engines *peer.Engines
	model   string
	// sessions holds the prompts by session (of all rounds) and turn. tokens holds the output of
	// vLLM alone for the same turns.
	sessions [][][]int
	tokens   [][][]int
	// started is the number of engines started so far. It makes the warm-up prompts of the engines
	// differ.
	started int
}

// turns measures the time to the first token in turns of agent sessions, under vLLM alone
// and under vLLM with each store.
func turns(ctx context.Context, w World, pythons []string, o TurnsOptions) (bench.Report, error) {
	s := &turnsSuite{suiteRun: newRun(w, turnsSection), opts: o}
	all := []*engineStore{
		{name: vllmName},
		{name: fsTierName, open: s.openFsTier},
		{name: offloadName, open: s.openOffload},
		{name: lmcacheEngine, open: s.openLMCache(lmcacheChunk)},
		{name: lmcacheSmall, open: s.openLMCache(lmcacheBlock)},
		{name: tierName, open: s.openPenstock("tier", nil)},
		{name: connectorName, open: s.openPenstock("connector", nil)},
		// The contender above stores the same blocks in the same node, so this one uses another
		// namespace.
		{name: layersName, open: s.openPenstock("connector", map[string]any{"load": "layers", "namespace": "layers"})},
	}
	chosen := slices.DeleteFunc(all, func(c *engineStore) bool { return !s.includes(c.name) })
	if len(chosen) == 0 || !s.wants(firstTurn, lastTurn) {
		return s.report, nil
	}
	err := s.run(ctx, pythons, chosen)
	if ctx.Err() != nil {
		return s.report, cmp.Or(err, ctx.Err())
	}
	if err != nil {
		for _, c := range chosen {
			s.report.NotRun = append(s.report.NotRun, bench.Missing{What: c.name, Why: err.Error()})
		}
	}
	return s.report, nil
}

// run starts the process of the engines and runs the comparisons.
func (s *turnsSuite) run(ctx context.Context, pythons []string, chosen []*engineStore) (err error) {
	dir, remove, err := s.tempDir("turns")
	if err != nil {
		return err
	}
	defer remove()
	s.dir = dir
	// Each store holds the KV of the sessions once. The Penstock node holds this KV for each of
	// three connectors, and needs space for blocks that are not reclaimed yet.
	if err := s.needSpace(9*s.kvBytes() + 512*mib); err != nil {
		return err
	}
	found, err := peer.NewStores(filepath.Join(dir, "find"), pythons)
	if err != nil {
		return err
	}
	if s.python, err = found.Python(ctx, fromVLLM+", and "+fromWheel, "vllm", "penstock"); err != nil {
		return err
	}
	if err := s.startEngines(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.engines.Close()) }()
	if err := s.reference(ctx); err != nil {
		return err
	}
	for _, row := range []struct {
		name string
		turn func(context.Context, *engineStore, int) (bench.Sample, error)
	}{{firstTurn, s.storeRound}, {lastTurn, s.freshRound}} {
		if err := s.compareAfter(ctx, s.comparison(row.name, chosen, row.turn), 0); err != nil {
			return err
		}
	}
	return nil
}

// comparison returns one row of the report. Its measures are ratios to vLLM alone.
func (s *turnsSuite) comparison(name string, stores []*engineStore, turn func(context.Context, *engineStore, int) (bench.Sample, error)) bench.Comparison {
	c := bench.Comparison{Name: name, Rounds: s.opts.Rounds}
	for _, store := range stores {
		round := 0
		c.Contenders = append(c.Contenders, bench.Contender{Name: store.name, Turn: func(ctx context.Context) (bench.Sample, error) {
			round++
			return turn(ctx, store, round-1)
		}})
		if store.name == vllmName {
			continue
		}
		for _, m := range []struct{ name, metric string }{
			{"first token", firstTokenMedian}, {"tokens recomputed", recomputed}, {"CPU", turnsCPU},
		} {
			c.Measures = append(c.Measures, bench.Ratio(m.name+", "+store.name+" / "+vllmName, m.metric, store.name, vllmName, bench.Target{}))
		}
	}
	return c
}

// kvBytes returns the largest size of a store after all rounds, in bytes, including the
// prompts of warm-ups.
func (s *turnsSuite) kvBytes() int64 {
	prompts := s.opts.Rounds * (s.opts.Sessions*sessionTurns + 2)
	return int64(prompts) * int64(s.opts.PromptTokens+outputTokens) * kvTokenBytes
}

// traces returns a directory that has the agents' trace: the given one, or dir with the built-in trace.
func (s *suiteRun) traces(given, dir string) (string, error) {
	const name = "kv_cache_tester_agentic.jsonl.gz" // as in harness/sessions.py
	if _, err := os.Stat(filepath.Join(given, name)); given != "" && err == nil {
		s.setup("sessions are those of %s", name)
		return given, nil
	}
	s.setup("sessions are those of the %s", trace.SampleName)
	return dir, os.WriteFile(filepath.Join(dir, name), trace.SampleFile(), 0o600)
}

// startEngines imports vLLM, creates the model and scales the sessions.
func (s *turnsSuite) startEngines(ctx context.Context) (err error) {
	traces, err := s.traces(s.opts.Traces, s.dir)
	if err != nil {
		return err
	}
	s.Progress("importing vLLM")
	environ := append(peer.LMCacheEnviron(), "PENSTOCK_TRACES="+traces, "PYTHONHASHSEED=0")
	if s.engines, err = peer.StartEngines(ctx, s.python, engines.Files, filepath.Join(s.dir, "drivers"), environ...); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.engines.Close())
		}
	}()
	var version string
	if err := s.engines.Call(ctx, "version", struct{}{}, &version); err != nil {
		return err
	}
	err = s.engines.Call(ctx, "model", map[string]any{
		"directory": filepath.Join(s.dir, "model"), "hidden": modelHidden, "layers": modelLayers, "initializer_range": modelSpread,
		"positions": s.maxTokens(),
	}, &s.model)
	if err != nil {
		return err
	}
	s.setup("vLLM %s on the CPU; a Llama model of random weights: hidden size %d, %d layers, float32, %d KiB of KV a token", version, modelHidden, modelLayers, kvTokenBytes>>10)
	s.setup("a round has %d sessions of %d turns, prompts of %d tokens at most, %d tokens of output; every token is compared with vLLM alone", s.opts.Sessions, sessionTurns, s.opts.PromptTokens, outputTokens)
	return s.engines.Call(ctx, "sessions", map[string]any{
		"count": s.opts.Rounds * s.opts.Sessions, "turns": sessionTurns, "tokens": s.opts.PromptTokens,
	}, &s.sessions)
}

func (s *turnsSuite) maxTokens() int { return s.opts.PromptTokens + outputTokens }

// reference serves every turn of every session with vLLM alone, and keeps the generated tokens.
func (s *turnsSuite) reference(ctx context.Context) error {
	s.Progress("serving all sessions with vLLM alone, to get the expected tokens")
	engine, err := s.engines.Start(ctx, peer.EngineOptions{Model: s.model, MaxTokens: s.maxTokens()})
	if err != nil {
		return err
	}
	for _, prompts := range s.sessions {
		var tokens [][]int
		for _, prompt := range prompts {
			t, err := engine.Turn(ctx, prompt, outputTokens)
			if err != nil {
				return err
			}
			tokens = append(tokens, t.Tokens)
		}
		s.tokens = append(s.tokens, tokens)
	}
	return engine.Stop(ctx)
}

// servedTurn is the measurement of one turn: the engine's report, the length of the prompt in
// tokens, and the CPU time of the engine and the store's servers.
type servedTurn struct {
	peer.Turn
	prompt int
	cpu    time.Duration
}

// sampleOf combines the measurements of all turns into one sample.
func sampleOf(all []servedTurn) bench.Sample {
	var first []float64
	var computed, prompts int
	var cpu time.Duration
	for _, t := range all {
		first = append(first, t.FirstToken*1e3)
		computed += t.prompt - t.Cached
		prompts += t.prompt
		cpu += t.cpu
	}
	spread := bench.Summarize(first)
	return bench.Sample{
		firstTokenMedian: spread.Median, firstTokenLow: spread.Low, firstTokenHigh: spread.High,
		recomputed: float64(computed), promptTokens: float64(prompts), turnsCPU: cpu.Seconds(),
	}
}

// storeRound serves the sessions of a round in one engine, each without its last turn. The engine
// stores their KV. The sample covers only the first turns.
func (s *turnsSuite) storeRound(ctx context.Context, c *engineStore, round int) (_ bench.Sample, err error) {
	e, err := s.startEngine(ctx, c)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.stop(ctx)) }()
	var first []servedTurn
	var prompts [][]int
	for session := range s.round(round) {
		for turn := range sessionTurns - 1 {
			t, err := e.serve(ctx, session, turn)
			if err != nil {
				return nil, err
			}
			if turn == 0 {
				first = append(first, t)
			}
			prompts = append(prompts, s.sessions[session][turn])
		}
	}
	if e.store.wait != nil {
		if err := e.store.wait(ctx, append(prompts, e.warm)); err != nil {
			return nil, err
		}
	}
	c.rounds = round + 1
	return sampleOf(first), nil
}

// freshRound serves the last turn of a round's sessions in a new engine. The engine has no KV
// except in its store.
func (s *turnsSuite) freshRound(ctx context.Context, c *engineStore, round int) (_ bench.Sample, err error) {
	if c.open != nil && c.rounds <= round { // the comparison of first turns was not chosen
		if _, err := s.storeRound(ctx, c, round); err != nil {
			return nil, err
		}
	}
	e, err := s.startEngine(ctx, c)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.stop(ctx)) }()
	var last []servedTurn
	cached := 0
	for session := range s.round(round) {
		t, err := e.serve(ctx, session, sessionTurns-1)
		if err != nil {
			return nil, err
		}
		last = append(last, t)
		cached += t.Cached
	}
	if c.open != nil && cached == 0 {
		return nil, errors.New("the store delivered no token of any session")
	}
	return sampleOf(last), nil
}

// round yields the indices of a round's sessions.
func (s *turnsSuite) round(n int) iter.Seq[int] {
	return func(yield func(int) bool) {
		for i := range s.opts.Sessions {
			if !yield(n*s.opts.Sessions + i) {
				return
			}
		}
	}
}

// measuredEngine is an engine and the store that was opened for it.
type measuredEngine struct {
	*peer.Engine
	suite *turnsSuite
	store openStore
	// warm is the prompt of the warm-up request.
	warm []int
}

// startEngine opens a store and starts an engine on it.
func (s *turnsSuite) startEngine(ctx context.Context, c *engineStore) (_ *measuredEngine, err error) {
	e := &measuredEngine{suite: s}
	if c.open != nil {
		if e.store, err = c.open(ctx); err != nil {
			return nil, err
		}
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.stop(ctx))
		}
	}()
	e.Engine, err = s.engines.Start(ctx, peer.EngineOptions{Model: s.model, MaxTokens: s.maxTokens(), Connector: e.store.connector, Arguments: e.store.arguments})
	if err != nil {
		return nil, err
	}
	// The first request of an engine allocates memory that later requests reuse. No earlier
	// engine has stored a prompt that begins with these tokens.
	s.started++
	e.warm = slices.Repeat([]int{3 + s.started%500}, s.opts.PromptTokens/2)
	e.warm[1] = 3 + s.started/500
	_, err = e.Turn(ctx, e.warm, outputTokens)
	return e, err
}

// stop ends the engine and closes its store. If ctx has ended, the process that forked the engine
// has ended, and so has the engine.
func (e *measuredEngine) stop(ctx context.Context) (err error) {
	if e.Engine != nil && ctx.Err() == nil {
		err = e.Stop(ctx)
	}
	if e.store.close != nil {
		err = errors.Join(err, e.store.close())
	}
	return err
}

// serve serves a turn and compares the generated tokens with the tokens of vLLM alone.
func (e *measuredEngine) serve(ctx context.Context, session, turn int) (servedTurn, error) {
	pids := append([]int{e.PID()}, e.store.pids...)
	before, err := cpuOfPIDs(pids)
	if err != nil {
		return servedTurn{}, err
	}
	prompt := e.suite.sessions[session][turn]
	t, err := e.Turn(ctx, prompt, outputTokens)
	if err != nil {
		return servedTurn{}, err
	}
	after, err := cpuOfPIDs(pids)
	if err != nil {
		return servedTurn{}, err
	}
	if want := e.suite.tokens[session][turn]; !slices.Equal(t.Tokens, want) {
		return servedTurn{}, fmt.Errorf("WRONG TOKENS: session %d, turn %d: %v; vLLM alone makes %v", session, turn, t.Tokens, want)
	}
	return servedTurn{t, len(prompt), after - before}, nil
}

// cpuOfPIDs returns the processor time that processes have used.
func cpuOfPIDs(pids []int) (total time.Duration, err error) {
	for _, pid := range pids {
		cpu, err := peer.ProcessCPU(pid)
		if err != nil {
			return 0, err
		}
		total += cpu
	}
	return total, nil
}

func (s *turnsSuite) openFsTier(context.Context) (openStore, error) {
	dir := filepath.Join(s.dir, "fs-tier")
	return openStore{
		connector: "fs_tier", arguments: map[string]any{"directory": dir},
	}, dropFiles(dir)
}

func (s *turnsSuite) openOffload(context.Context) (openStore, error) {
	if _, err := os.Stat(cudaDevice); err != nil {
		return openStore{}, fmt.Errorf("vLLM's disk offload copies with CUDA streams, and this machine has no CUDA device: %w", err)
	}
	return openStore{
		connector: "disk_offload", arguments: map[string]any{"file": filepath.Join(s.dir, "offload")},
	}, nil
}

// openLMCache returns a function that starts an LMCache server.
func (s *turnsSuite) openLMCache(chunkTokens int) func(context.Context) (openStore, error) {
	return func(ctx context.Context) (openStore, error) {
		dir := filepath.Join(s.dir, fmt.Sprintf("lmcache-%d", chunkTokens))
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return openStore{}, err
		}
		before, err := countFiles(dir)
		if err != nil {
			return openStore{}, err
		}
		if err := dropFiles(dir); err != nil {
			return openStore{}, err
		}
		server, err := peer.StartLMCache(ctx, s.python, dir, chunkTokens)
		if err != nil {
			return openStore{}, err
		}
		return openStore{
			connector: "lmcache", arguments: map[string]any{"port": server.Port}, pids: []int{server.PID()}, close: server.Close,
			wait: func(ctx context.Context, prompts [][]int) error {
				return waitFiles(ctx, dir, before+countChunks(prompts, chunkTokens))
			},
		}, nil
	}
}

// countChunks returns the number of different chunks of the prompts. A chunk is identified by all
// tokens of the prompt up to the chunk's end.
func countChunks(prompts [][]int, chunkTokens int) int {
	chunks := make(map[string]bool)
	for _, prompt := range prompts {
		for n := chunkTokens; n <= len(prompt); n += chunkTokens {
			chunks[fmt.Sprint(prompt[:n])] = true
		}
	}
	return len(chunks)
}

// openPenstock returns a function that starts a Penstock node for an engine with the given
// connector. The nodes of all connectors use the same data directory, so only one node runs at a
// time. options are the connector's options.
func (s *turnsSuite) openPenstock(connector string, options map[string]any) func(context.Context) (openStore, error) {
	return func(ctx context.Context) (openStore, error) {
		node, err := startServe(ctx, s.Exe, filepath.Join(s.dir, "node"), "--capacity", strconv.FormatInt(4*s.kvBytes()+256*mib, 10))
		if err != nil {
			return openStore{}, err
		}
		arguments := map[string]any{"servers": node.listen}
		maps.Copy(arguments, options)
		return openStore{connector: connector, arguments: arguments, pids: []int{node.PID()}, close: node.Close}, nil
	}
}

// dropFiles removes the files below dir from the page cache. dir need not exist.
func dropFiles(dir string) error {
	return walkFiles(dir, func(path string) error {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		return errors.Join(sys.DropCache(f), f.Close())
	})
}

// countFiles returns the number of LMCache's complete files below dir.
func countFiles(dir string) (n int, err error) {
	err = walkFiles(dir, func(path string) error {
		if filepath.Ext(path) == ".data" {
			n++
		}
		return nil
	})
	return n, err
}

func walkFiles(dir string, do func(path string) error) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) { // a removed temporary file, or dir does not exist
			return nil
		}
		if err != nil || entry.IsDir() {
			return err
		}
		return do(path)
	})
}

// waitFiles waits until dir has the wanted number of LMCache's files.
func waitFiles(ctx context.Context, dir string, want int) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for {
		n, err := countFiles(dir)
		if err != nil || n >= want {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("LMCache has stored %d files of %d: %w", n, want, ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
}
