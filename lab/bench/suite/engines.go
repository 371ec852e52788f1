package suite

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/penstock-kv/penstock/lab/bench"
	"github.com/penstock-kv/penstock/lab/bench/peer"
)

// EnginesOptions configures the engines suite.
type EnginesOptions struct {
	// Pythons are paths of Python interpreters. The client of a store runs in the first interpreter
	// that has the client's package.
	Pythons []string
	// AreaBytes is the total size, in bytes, of the values that one pass of a worker puts or gets.
	// All comparisons together need a multiple of 128 MiB.
	AreaBytes int64
	// Turns configures the part that runs engines.
	Turns TurnsOptions
}

// Names of stores. The client of oursName (Penstock) uses the node's unix socket, because all
// stores run on this host. The node of overTCPName has no unix socket, so its client uses TCP.
const (
	overTCPName   = "Penstock over TCP"
	mooncakeName  = "Mooncake Store"
	lmcacheName   = "LMCache fs"
	lmcacheNative = "LMCache fs_native"
	hicacheName   = "HiCacheFile"
	redisPyName   = "redis-py"
	redisSockets  = "Redis by sockets"
	filesName     = "file per block"
	syncedName    = "file per block, synced"
)

// Commands that install the modules of clients, for use in error texts.
const (
	fromWheel  = "make wheel builds the package, and pip install bin/penstock-*.whl installs it"
	fromStores = ".ci/python-venv engines/stores.lock installs it"
	fromVLLM   = ".ci/python-venv engines/vllm.lock installs it"
	fromSGLang = ".ci/python-venv engines/sglang.lock installs it"
	fromPython = "every Python from 3.10 on has it"
)

// where is the operation of a comparison of stores: puts, or gets from memory or disk.
type where int

const (
	putValues where = iota
	getFromMemory
	getFromDisk
)

// storeLoad is the load of one comparison.
type storeLoad struct {
	where   where
	bytes   int64
	threads int
	batch   int
}

func (l storeLoad) String() string {
	verb := [...]string{putValues: "put %s", getFromMemory: "get %s from memory", getFromDisk: "get %s from disk"}[l.where]
	batch := "single"
	if l.batch > 1 {
		batch = fmt.Sprintf("batches of %d", l.batch)
	}
	return fmt.Sprintf(verb+", %s, %s", sizeName(l.bytes), plural(l.threads, "thread"), batch)
}

// storeLoads returns all comparisons. From disk, only the smallest and the largest load of
// each size are compared.
func storeLoads() (all []storeLoad) {
	for _, w := range []where{getFromMemory, getFromDisk, putValues} {
		for _, bytes := range []int64{1 * mib, 4 * mib} {
			for _, threads := range []int{1, 4} {
				for _, batch := range []int{1, 8} {
					if w != getFromDisk || (threads == 1) == (batch == 1) {
						all = append(all, storeLoad{w, bytes, threads, batch})
					}
				}
			}
		}
	}
	return all
}

// storeContender is a store that takes part in a comparison.
type storeContender struct {
	name   string
	worker *peer.StoreWorker
	// pids are the processes of the store's servers.
	pids []int
}

// takesPart reports whether a comparison includes this store. Mooncake and Redis run without a disk
// here, so they take part only in gets from memory and in puts. Flushed files differ from unflushed
// files only in puts.
func (c storeContender) takesPart(w where) bool {
	switch c.name {
	case mooncakeName, redisPyName, redisSockets:
		return w != getFromDisk
	case syncedName:
		return w == putValues
	}
	return true
}

// target returns the design's target for the ratio of Penstock's rate to the rate of another store.
func (l storeLoad) target(other string) bench.Target {
	switch other {
	case mooncakeName:
		return bench.AtLeast(3)
	case lmcacheName, lmcacheNative, hicacheName, filesName, syncedName:
		if l.where != getFromMemory { // a get from memory of these stores reads from the kernel's page cache
			return bench.AtLeast(3)
		}
	case redisPyName, redisSockets:
		if l.where == getFromMemory {
			return bench.AtLeast(1)
		}
	}
	return bench.Target{}
}

// enginesSuite is one run of the suite.
type enginesSuite struct {
	*suiteRun
	opts    EnginesOptions
	dir     string
	stores  peer.Stores
	loads   []storeLoad
	able    []storeContender
	closers []func() error

	iperf     *peer.Iperf
	fioMemory string
	fioFile   string
}

// Engines measures the stores in which inference engines keep KV: first the stores by
// themselves, then, in a section of the report, the stores under vLLM.
func Engines(ctx context.Context, w World, o EnginesOptions) (bench.Report, error) {
	report, err := stores(ctx, w, o)
	if err != nil {
		return report, err
	}
	section, err := turns(ctx, w, o.Pythons, o.Turns)
	if !section.Empty() {
		report.Sections = append(report.Sections, section)
	}
	return report, err
}

// stores measures Penstock and other stores through their Python clients, all with the same worker
// program.
func stores(ctx context.Context, w World, o EnginesOptions) (_ bench.Report, err error) {
	s := &enginesSuite{suiteRun: newRun(w, "engines"), opts: o}
	chosen := slices.ContainsFunc([]string{
		oursName, overTCPName, mooncakeName, lmcacheName, lmcacheNative, hicacheName, redisPyName, redisSockets, filesName, syncedName, iperfName, fioName,
	}, s.includes)
	for _, l := range storeLoads() {
		if chosen && s.wants(l.String()) {
			s.loads = append(s.loads, l)
		}
	}
	if len(s.loads) == 0 {
		return s.report, nil
	}
	if err := s.needSpace(o.AreaBytes * (s.penstocks()*s.nodeAreas() + s.peerAreas())); err != nil {
		return s.report, err
	}
	dir, remove, err := s.tempDir("engines")
	if err != nil {
		return s.report, err
	}
	defer remove()
	s.dir = dir
	if s.stores, err = peer.NewStores(filepath.Join(dir, "workers"), o.Pythons); err != nil {
		return s.report, err
	}
	defer func() {
		for _, c := range slices.Backward(s.closers) {
			err = errors.Join(err, c())
		}
	}()
	if slices.ContainsFunc([]string{mooncakeName, redisPyName, redisSockets}, s.includes) {
		note, restore := peer.UseCongestion()
		s.closers = append(s.closers, restore)
		s.setup("loopback; %s", note)
	}
	s.setup("each store is used by a process in Python; a pass moves %s; every byte of a get is compared after its pass; CPU is of client and servers", sizeName(o.AreaBytes))
	if err := s.startStores(ctx); err != nil {
		return s.report, err
	}
	if err := s.startLimits(); err != nil {
		return s.report, err
	}
	for _, l := range s.loads {
		if err := s.storeRow(ctx, l); err != nil {
			return s.report, err
		}
	}
	return s.report, nil
}

// Sizes of the node, in areas of AreaBytes. Gets from disk use two value sizes with coldAreas areas
// each; the arena holds half of the areas of one size.
const (
	coldAreas  = 8 // same as the worker's
	arenaAreas = 4
)

func (s *enginesSuite) readsDisk() bool {
	return slices.ContainsFunc(s.loads, func(l storeLoad) bool { return l.where == getFromDisk })
}

// nodeAreas returns the node's capacity, in areas: for the two value sizes of the gets, and for
// values of puts that the node has not reclaimed yet.
func (s *enginesSuite) nodeAreas() int64 {
	if s.readsDisk() {
		return 2*coldAreas + 8
	}
	return 8
}

// penstocks returns the number of Penstock nodes.
func (s *enginesSuite) penstocks() (n int64) {
	for _, name := range []string{oursName, overTCPName} {
		if s.includes(name) {
			n++
		}
	}
	return n
}

// peerAreas returns the disk space of the other stores, in areas: for each store the two value
// sizes of gets and one for puts, and for fio one file.
func (s *enginesSuite) peerAreas() (areas int64) {
	for _, name := range []string{lmcacheName, lmcacheNative, hicacheName, filesName, syncedName} {
		if s.includes(name) {
			areas += 3
		}
	}
	return areas + 1
}

// includes reports whether a contender was chosen.
func (s *suiteRun) includes(name string) bool {
	return s.Contenders == nil || s.Contenders.MatchString(name)
}

// startStores starts the chosen stores. The report names a store that cannot run here.
// Penstock must run: the other stores are compared with it.
func (s *enginesSuite) startStores(ctx context.Context) error {
	for _, name := range []string{oursName, overTCPName} {
		if !s.includes(name) {
			continue
		}
		c, err := s.startPenstock(ctx, name)
		if err != nil {
			return fmt.Errorf("bench: Penstock's own Python client: %w", err)
		}
		s.able = append(s.able, c)
	}
	for _, store := range []struct {
		name  string
		start func(context.Context) (storeContender, error)
	}{
		{mooncakeName, s.startMooncake},
		{lmcacheName, s.lmcache("fs")},
		{lmcacheNative, s.lmcache("fs_native")},
		{hicacheName, s.directory("hicache_store.py", nil, fromSGLang, "sglang", "torch")},
		{redisPyName, s.redis("redis_store.py", fromStores, "redis", "hiredis")},
		{redisSockets, s.redis("resp_store.py", fromPython, "socket")},
		{filesName, s.directory("file_store.py", nil, fromPython, "os")},
		{syncedName, s.directory("file_store.py", map[string]any{"sync": true}, fromPython, "os")},
	} {
		if !s.includes(store.name) {
			continue
		}
		s.Progress("starting " + store.name)
		c, err := store.start(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			s.report.NotRun = append(s.report.NotRun, bench.Missing{What: store.name, Why: err.Error()})
			continue
		}
		c.name = store.name
		s.able = append(s.able, c)
	}
	var clients []string
	for _, c := range s.able {
		clients = append(clients, c.name+" ("+c.worker.Client+")")
	}
	s.setup("clients: %s", strings.Join(clients, ", "))
	return nil
}

// worker starts a worker and registers the worker to be stopped at the end of the suite.
func (s *enginesSuite) worker(ctx context.Context, program string, options map[string]any, provider string, modules ...string) (storeContender, error) {
	python, err := s.stores.Python(ctx, provider, modules...)
	if err != nil {
		return storeContender{}, err
	}
	options["area_bytes"] = s.opts.AreaBytes
	w, err := s.stores.Start(ctx, python, program, options)
	if err != nil {
		return storeContender{}, err
	}
	s.closers = append(s.closers, w.Close)
	return storeContender{worker: w, pids: []int{}}, nil
}

func (s *enginesSuite) startPenstock(ctx context.Context, name string) (storeContender, error) {
	if _, err := s.stores.Python(ctx, fromWheel, "penstock"); err != nil {
		return storeContender{}, err
	}
	s.Progress("starting " + name)
	arenaBytes := arenaAreas * s.opts.AreaBytes
	flags := []string{"--arena", strconv.FormatInt(arenaBytes, 10), "--capacity", strconv.FormatInt(s.nodeAreas()*s.opts.AreaBytes, 10)}
	dir := filepath.Join(s.dir, strings.ReplaceAll(name, " ", "-"))
	if name == oursName {
		memory, _, restore := peer.HugePages(arenaBytes>>21 + 8)
		s.closers = append(s.closers, restore)
		pages := "reserved huge pages"
		if memory == "mmaphuge" {
			flags = append(flags, "--hugetlb")
		} else {
			pages = "4 KiB pages"
		}
		flags = append(flags, "--local-socket", dir+".sock")
		s.setup("%s: the engine copies from the node's arena, of %s, which it maps", name, pages)
	}
	node, err := startServe(ctx, s.Exe, dir, flags...)
	if err != nil {
		return storeContender{}, err
	}
	s.closers = append(s.closers, node.Close)
	c, err := s.worker(ctx, "penstock_store.py", map[string]any{"server": node.listen}, fromWheel, "penstock")
	c.name, c.pids = name, []int{node.PID()}
	return c, err
}

func (s *enginesSuite) startMooncake(ctx context.Context) (c storeContender, err error) {
	python, err := s.stores.Python(ctx, fromStores, "mooncake")
	if err != nil {
		return c, err
	}
	// Three of the eight areas hold values: two sizes for gets and one for puts. The rest is space
	// for values that Mooncake frees late.
	m, err := s.stores.StartMooncake(ctx, python, 8*s.opts.AreaBytes)
	if err != nil {
		return c, err
	}
	s.closers = append(s.closers, m.Close)
	w, err := m.Client(ctx, s.stores, python, s.opts.AreaBytes)
	if err != nil {
		return c, err
	}
	s.closers = append(s.closers, w.Close)
	return storeContender{worker: w, pids: m.PIDs()}, nil
}

// redis returns a function that starts a Redis server, one for each client program.
func (s *enginesSuite) redis(program, provider string, modules ...string) func(context.Context) (storeContender, error) {
	return func(ctx context.Context) (c storeContender, err error) {
		if why := peer.Installed("redis-server", "redis-server"); why != "" {
			return c, errors.New(why)
		}
		if _, err := s.stores.Python(ctx, provider, modules...); err != nil {
			return c, err
		}
		server, err := peer.StartRedis()
		if err != nil {
			return c, err
		}
		s.closers = append(s.closers, server.Close)
		threads := 1
		for _, l := range s.loads {
			threads = max(threads, l.threads)
		}
		c, err = s.worker(ctx, program, map[string]any{"port": server.Port(), "threads": threads}, provider, modules...)
		c.pids = []int{server.PID()}
		return c, err
	}
}

func (s *enginesSuite) lmcache(adapter string) func(context.Context) (storeContender, error) {
	return s.directory("lmcache_store.py", map[string]any{"adapter": adapter}, fromVLLM, "lmcache", "torch")
}

// directory returns a function that starts a store that keeps files in a directory.
func (s *enginesSuite) directory(program string, options map[string]any, provider string, modules ...string) func(context.Context) (storeContender, error) {
	return func(ctx context.Context) (storeContender, error) {
		dir, err := os.MkdirTemp(s.dir, "files-")
		if err != nil {
			return storeContender{}, err
		}
		all := map[string]any{"directory": dir}
		for k, v := range options {
			all[k] = v
		}
		return s.worker(ctx, program, all, provider, modules...)
	}
}

// startLimits starts iperf3, which measures the limit of the network, and prepares fio, which
// measures the limit of the disk.
func (s *enginesSuite) startLimits() error {
	if s.includes(iperfName) {
		why := peer.Installed("iperf3", "iperf3")
		if why == "" {
			var err error
			if s.iperf, err = peer.StartIperf(); err != nil {
				return err
			}
			s.closers = append(s.closers, s.iperf.Close)
		} else {
			s.report.NotRun = append(s.report.NotRun, bench.Missing{What: iperfName, Why: why})
		}
	}
	if !s.includes(fioName) || !slices.ContainsFunc(s.loads, func(l storeLoad) bool { return l.where != getFromMemory }) {
		return nil
	}
	if why := peer.Installed("fio", "fio"); why != "" {
		s.report.NotRun = append(s.report.NotRun, bench.Missing{What: fioName, Why: why})
		return nil
	}
	memory, note, restore := peer.HugePages(80) // 32 × 4 MiB and fio's own buffers
	s.closers = append(s.closers, restore)
	s.setup("%s", note)
	land, err := newArena(landBytes)
	if err != nil {
		return err
	}
	file := filepath.Join(s.dir, "fio")
	err = prewritten(file, max(s.opts.AreaBytes, landBytes), land.Bytes())
	if err := errors.Join(err, land.Close()); err != nil {
		return err
	}
	s.fioMemory, s.fioFile = memory, file
	return nil
}

// storeRow runs one comparison.
func (s *enginesSuite) storeRow(ctx context.Context, l storeLoad) error {
	c := bench.Comparison{Name: l.String(), Unit: netUnit}
	for _, k := range s.able {
		if !k.takesPart(l.where) {
			continue
		}
		c.Contenders = append(c.Contenders, bench.Contender{Name: k.name, Turn: s.storeTurn(k, l)})
		if k.name != oursName {
			c.Measures = append(c.Measures,
				bench.Ratio("bandwidth / "+k.name, bench.Rate, oursName, k.name, l.target(k.name)),
				bench.Ratio("CPU / "+k.name, bench.CPU, oursName, k.name, bench.Target{}))
		}
	}
	for _, k := range s.able {
		if target := l.target(k.name); target.Kind != "" && l.where == getFromMemory && s.runs(overTCPName) && k.takesPart(l.where) {
			c.Measures = append(c.Measures, bench.Ratio(overTCPName+" / "+k.name, bench.Rate, overTCPName, k.name, target))
		}
	}
	if s.iperf != nil {
		c.Contenders = append(c.Contenders, bench.Contender{Name: iperfName, Turn: func(ctx context.Context) (bench.Sample, error) {
			return s.iperf.Run(ctx, peer.IperfLoad{Conns: l.threads, WriteBytes: l.bytes}, s.Turn)
		}})
		c.Measures = append(c.Measures, bench.Ratio("bandwidth / "+iperfName, bench.Rate, oursName, iperfName, bench.Target{}))
	}
	if s.fioFile != "" && l.where != getFromMemory {
		c.Contenders = append(c.Contenders, bench.Contender{Name: fioName, Turn: s.fioTurn(l)})
		c.Measures = append(c.Measures, bench.Ratio("bandwidth / "+fioName, bench.Rate, oursName, fioName, bench.Target{}))
	}
	return s.compare(ctx, c)
}

// runs reports whether a store has been started.
func (s *enginesSuite) runs(name string) bool {
	return slices.ContainsFunc(s.able, func(c storeContender) bool { return c.name == name })
}

func (s *enginesSuite) storeTurn(c storeContender, l storeLoad) func(context.Context) (bench.Sample, error) {
	op := "get"
	if l.where == putValues {
		op = "put"
	}
	load := peer.StoreLoad{
		Op: op, Cold: l.where == getFromDisk, ValueBytes: l.bytes, Threads: l.threads, Batch: l.batch, Seconds: s.Turn.Seconds(), PIDs: c.pids,
	}
	return func(ctx context.Context) (bench.Sample, error) { return c.worker.Do(ctx, load) }
}

func (s *enginesSuite) fioTurn(l storeLoad) func(context.Context) (bench.Sample, error) {
	rw := "randread"
	if l.where == putValues {
		rw = "write"
	}
	return fioInGiB(peer.FioJob{
		RW: rw, File: s.fioFile, BlockBytes: l.bytes, Depth: l.threads * l.batch, SizeBytes: max(s.opts.AreaBytes, landBytes), Memory: s.fioMemory, Time: s.Turn,
	})
}
