package suite

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/bench"
	"github.com/penstock-kv/penstock/lab/bench/peer"
)

// ServerOptions configures the server suite.
type ServerOptions struct {
	// DiskBytes is the size of the data for the reads from disk. It must exceed the size of the
	// node's arena.
	DiskBytes int64
}

const (
	// hotBytes is the size of the data that all contenders read from memory.
	hotBytes = 64 << 20
	// landBytes is the size of the memory into which all contenders read.
	landBytes = 64 << 20

	oursName   = "penstock"
	iperfName  = "iperf3"
	streamName = "gRPC stream"
	redisName  = "Redis GET"
	netUnit    = "GiB/s"
)

// load is the number of connections (conns) and the number of requests in flight on each of them
// (each).
type load struct{ conns, each int }

func (l load) String() string { return fmt.Sprintf("%d × %d", l.conns, l.each) }

func (l load) depth() int { return l.conns * l.each }

// serverSuite is one run of the suite.
type serverSuite struct {
	*suiteRun
	opts ServerOptions
	dir  string
	land *arena.Arena
	node *served

	iperf *peer.Iperf
	redis *peer.Redis
	// notRun has, by program (iperf3, redis, fio), the reason why the program cannot run; "" if it
	// can.
	notRun    map[string]string
	fioMemory string
}

// Server measures reads from another process over gRPC and the data plane.
func Server(ctx context.Context, w World, o ServerOptions) (_ bench.Report, err error) {
	s := &serverSuite{suiteRun: newRun(w, "server"), opts: o, notRun: make(map[string]string)}
	if err := s.needSpace(o.DiskBytes + 4*gi); err != nil {
		return s.report, err
	}
	dir, remove, err := s.tempDir("server")
	if err != nil {
		return s.report, err
	}
	defer remove()
	s.dir = dir
	if s.land, err = newArena(landBytes); err != nil {
		return s.report, err
	}
	defer func() { err = errors.Join(err, s.land.Close()) }()
	note, restore := peer.UseCongestion()
	defer func() { err = errors.Join(err, restore()) }()
	s.setup("loopback; %s", note)
	s.setup("a × b: a connections with b reads in flight on each; everybody reads into the same %d MiB of %s; CPU is of both sides", landBytes/mib, pages(s.land))
	stop := s.startPeers()
	defer func() { err = errors.Join(err, stop()) }()
	defer func() {
		if s.node != nil {
			s.node.Kill()
		}
	}()
	err = s.all(ctx, step{"control call", s.control}, step{"reads from memory", s.fromMemory}, step{"reads from disk", s.fromDisk}, step{"cut through", s.cutThrough})
	return s.report, err
}

// startPeers starts the peers that are installed.
func (s *serverSuite) startPeers() (stop func() error) {
	var closers []func() error
	var err error
	if s.notRun[iperfName] = peer.Installed("iperf3", "iperf3"); s.notRun[iperfName] == "" {
		if s.iperf, err = peer.StartIperf(); err != nil {
			s.notRun[iperfName] = err.Error()
		} else {
			closers = append(closers, s.iperf.Close)
		}
	}
	if s.notRun[redisName] = peer.Installed("redis-server", "redis-server"); s.notRun[redisName] == "" {
		if s.redis, err = peer.StartRedis(); err != nil {
			s.notRun[redisName] = err.Error()
		} else {
			closers = append(closers, s.redis.Close)
		}
	}
	if s.notRun[fioName] = peer.Installed("fio", "fio"); s.notRun[fioName] == "" {
		memory, note, restore := peer.HugePages(64) // 16 × 4 MiB and fio's own buffers
		s.fioMemory = memory
		closers = append(closers, restore)
		s.setup("%s", note)
	}
	return func() error {
		var errs []error
		for _, c := range closers {
			errs = append(errs, c())
		}
		return errors.Join(errs...)
	}
}

// nodeFor returns the node from which the contenders read, and starts the node at the first call.
func (s *serverSuite) nodeFor(ctx context.Context) (*served, error) {
	if s.node != nil {
		return s.node, nil
	}
	// The arena holds the blocks that are read from memory, and only a small part of the blocks
	// that are read from disk.
	n, err := startServe(ctx, s.Exe, filepath.Join(s.dir, "node"), "--capacity", strconv.FormatInt(s.opts.DiskBytes+3*gi, 10), "--segment", "1GiB")
	if err != nil {
		return nil, err
	}
	s.node = n
	return n, nil
}

// control measures the cost of a call that moves no block. The call is sent as a message of the
// transfer engine. It is compared with the same call over gRPC, and with the same number of bytes
// sent back and forth on an open gRPC stream, which is the lower bound for a request over gRPC.
func (s *serverSuite) control(ctx context.Context) (err error) {
	const name = "one call without a block"
	if !s.wants(name) {
		return nil
	}
	node, err := s.nodeFor(ctx)
	if err != nil {
		return err
	}
	ns, err := s.stored(ctx, node, oneMiB(), oneMiB().blockBytes)
	if err != nil {
		return err
	}
	r, err := s.remote(ctx, node.listen, 1)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close(ctx)) }()
	const bytes = 64
	stream, err := peer.StartChild(s.Exe, os.Stderr, "bench", "child", "stream", "--block-bytes", strconv.Itoa(bytes))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stream.Close()) }()
	conn, err := peer.DialStream(stream.Ready)
	if err != nil {
		return err
	}
	defer conn.Close()
	get, err := conn.Open(ctx)
	if err != nil {
		return err
	}
	control, err := client.Dial(node.listen, client.DialOptions{})
	if err != nil {
		return err
	}
	defer control.Close()
	cache := pb.NewCacheClient(control)
	id := blockID(0)
	const match, overGRPC, echo = "client.Match of one block", "the same over gRPC", "gRPC stream, 64 bytes"
	return s.compare(ctx, bench.Comparison{
		Name: name, Unit: "calls/s",
		Contenders: []bench.Contender{
			{Name: match, Turn: func(ctx context.Context) (bench.Sample, error) {
				return times(s.Turn, func() (bool, error) {
					m, err := r.store.Match(ctx, client.MatchRequest{Namespace: ns, IDs: []kv.BlockID{blockID(0)}})
					if err == nil && m.Blocks != 1 {
						err = fmt.Errorf("bench: %d blocks matched", m.Blocks)
					}
					return ctx.Err() == nil, err
				})
			}},
			{Name: overGRPC, Turn: func(ctx context.Context) (bench.Sample, error) {
				return times(s.Turn, func() (bool, error) {
					m, err := cache.Match(ctx, &pb.MatchRequest{Namespace: ns.Name, BlockIds: id[:]})
					if err == nil && m.GetMatchedBlocks() != 1 {
						err = fmt.Errorf("bench: %d blocks matched", m.GetMatchedBlocks())
					}
					return ctx.Err() == nil, err
				})
			}},
			{Name: echo, Turn: func(ctx context.Context) (bench.Sample, error) {
				dst := make([]byte, bytes)
				return times(s.Turn, func() (bool, error) { return ctx.Err() == nil, get(0, dst) })
			}},
		},
		Measures: []bench.Measure{
			bench.Figure("p50 of a match", "µs", "p50 µs", match, bench.Target{}),
			bench.Ratio("p50, match / the same over gRPC", "p50 µs", match, overGRPC, bench.Target{}),
			bench.Ratio("p50, match / gRPC stream", "p50 µs", match, echo, bench.Target{}),
		},
	})
}

// fromMemory measures reads of blocks that are in the node's arena.
func (s *serverSuite) fromMemory(ctx context.Context) error {
	for _, m := range []model{oneMiB(), fourMiB()} {
		if err := s.modelFromMemory(ctx, m); err != nil {
			return err
		}
	}
	return nil
}

func memoryWork(m model, l load) string {
	return fmt.Sprintf("read %s from DRAM, %v", sizeName(m.blockBytes), l)
}

func loads() []load { return []load{{1, 1}, {1, 4}, {4, 4}} }

func (s *serverSuite) modelFromMemory(ctx context.Context, m model) (err error) {
	var names []string
	for _, l := range loads() {
		names = append(names, memoryWork(m, l))
	}
	names = append(names, prefixWork(m))
	if !s.wants(names...) {
		return nil
	}
	node, err := s.nodeFor(ctx)
	if err != nil {
		return err
	}
	s.Progress("storing " + sizeName(hotBytes) + " in blocks of " + sizeName(m.blockBytes))
	ns, err := s.stored(ctx, node, m, hotBytes)
	if err != nil {
		return err
	}
	stream, err := peer.StartChild(s.Exe, os.Stderr, "bench", "child", "stream", "--block-bytes", strconv.FormatInt(m.blockBytes, 10), "--bytes", strconv.Itoa(hotBytes))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stream.Close()) }()
	sink, err := peer.StartChild(s.Exe, os.Stderr, "bench", "child", "sink")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sink.Close()) }()
	if s.redis != nil {
		if err := s.fillRedis(ctx, m); err != nil {
			s.notRun[redisName] = err.Error()
		}
	}
	for _, l := range loads() {
		if err := s.memoryLoad(ctx, m, l, node, ns, stream, sink); err != nil {
			return err
		}
	}
	return s.memoryPrefix(ctx, m, node, ns, stream)
}

// prefixConns is the number of connections over which a prefix is read.
const prefixConns = 4

func prefixWork(m model) string {
	return fmt.Sprintf("read %s in blocks of %s from DRAM, one call", sizeName(hotBytes), sizeName(m.blockBytes))
}

// memoryPrefix measures reads of many blocks with one call of the client, as an engine loads a
// prefix. The cost of the call is spread over the blocks, and some blocks are verified while others
// are being transferred.
func (s *serverSuite) memoryPrefix(ctx context.Context, m model, node *served, ns kv.Namespace, stream *peer.Child) error {
	blocks := int(hotBytes / m.blockBytes)
	return s.compare(ctx, bench.Comparison{
		Name: prefixWork(m), Unit: netUnit,
		Contenders: []bench.Contender{
			{Name: oursName, Turn: s.prefixes(m, node, blocks)},
			{Name: iperfName, NotRun: s.notRun[iperfName], Turn: func(ctx context.Context) (bench.Sample, error) {
				return s.iperf.Run(ctx, peer.IperfLoad{Conns: prefixConns, WriteBytes: m.blockBytes}, s.Turn)
			}},
			{Name: streamName, Turn: s.streamReads(m, load{prefixConns, 4}, stream, blocks)},
		},
		Measures: []bench.Measure{
			bench.Ratio("bandwidth / iperf3", bench.Rate, oursName, iperfName, bench.Target{}),
			bench.Ratio("CPU / iperf3", bench.CPU, oursName, iperfName, bench.Target{}),
			bench.Ratio("bandwidth / gRPC stream", bench.Rate, oursName, streamName, bench.Target{}),
			bench.Ratio("CPU / gRPC stream", bench.CPU, oursName, streamName, bench.Target{}),
		},
		Notes: []string{fmt.Sprintf("the client over %d connections, as are the others; the gRPC stream has 4 requests under way on each", prefixConns)},
	})
}

// prefixes returns a turn (one measured run of a contender) that reads prompts of the given number
// of blocks, with one call at a time.
func (s *serverSuite) prefixes(m model, node *served, blocks int) func(context.Context) (bench.Sample, error) {
	return func(ctx context.Context) (_ bench.Sample, err error) {
		r, err := s.remote(ctx, node.listen, prefixConns)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, r.close(ctx)) }()
		ns, ids, err := r.chain(ctx, node.listen, m, blocks)
		if err != nil {
			return nil, err
		}
		read := func(int) (int64, error) {
			res, err := r.store.Read(ctx, client.ReadRequest{Namespace: ns, IDs: ids, Into: r.memory})
			if err == nil && res.Blocks != blocks {
				err = fmt.Errorf("bench: %d blocks of %d were read: %v, %s %s", res.Blocks, blocks, res.Outcome, res.Cut, res.Detail)
			}
			return int64(blocks) * m.blockBytes, err
		}
		if _, err := read(0); err != nil { // load the blocks into the node's memory
			return nil, err
		}
		return drive(ctx, s.Turn, 1, gi, []*peer.Process{node.Process}, read)
	}
}

// stored creates a namespace on the node and fills it.
func (s *serverSuite) stored(ctx context.Context, node *served, m model, bytes int64) (ns kv.Namespace, err error) {
	r, err := s.remote(ctx, node.listen, 4)
	if err != nil {
		return ns, err
	}
	defer func() { err = errors.Join(err, r.close(ctx)) }()
	return r.create(ctx, node.listen, m, bytes)
}

func (s *serverSuite) memoryLoad(ctx context.Context, m model, l load, node *served, ns kv.Namespace, stream, sink *peer.Child) error {
	blocks := int(hotBytes / m.blockBytes)
	name := memoryWork(m, l)
	return s.compare(ctx, bench.Comparison{
		Name: name, Unit: netUnit,
		Contenders: []bench.Contender{
			{Name: oursName, Turn: s.reads(m, l, node, ns, blocks, true)},
			{Name: iperfName, NotRun: s.notRun[iperfName], Turn: func(ctx context.Context) (bench.Sample, error) {
				return s.iperf.Run(ctx, peer.IperfLoad{Conns: l.conns, WriteBytes: m.blockBytes}, s.Turn)
			}},
			{Name: planeName, Turn: s.planeWrites(m, l, sink)},
			{Name: streamName, Turn: s.streamReads(m, l, stream, blocks)},
			{Name: redisName, NotRun: s.notRun[redisName], Turn: s.redisReads(m, l, blocks)},
		},
		Measures: []bench.Measure{
			bench.Ratio("bandwidth / iperf3", bench.Rate, oursName, iperfName, bench.AtLeast(0.85)),
			bench.Ratio("CPU / iperf3", bench.CPU, oursName, iperfName, bench.Target{}),
			bench.Ratio("transfer engine alone / iperf3, bandwidth", bench.Rate, planeName, iperfName, bench.Target{}),
			bench.Ratio("transfer engine alone / gRPC stream, bandwidth", bench.Rate, planeName, streamName, bench.Target{}),
			bench.Ratio("transfer engine alone / gRPC stream, CPU", bench.CPU, planeName, streamName, bench.Target{}),
			bench.Ratio("bandwidth / gRPC stream", bench.Rate, oursName, streamName, bench.AtLeast(2)),
			bench.Ratio("CPU / gRPC stream", bench.CPU, oursName, streamName, bench.AtMost(0.55)),
			bench.Ratio("bandwidth / Redis GET", bench.Rate, oursName, redisName, bench.AtLeast(1.1)),
			bench.Ratio("CPU / Redis GET", bench.CPU, oursName, redisName, bench.Target{}),
		},
	})
}

// reads returns a turn (one measured run of a contender) in which each caller reads its own blocks
// one after another; the client verifies every block. With warm, all blocks are read once before
// the measurement, so that the node has them in memory. Without warm, blocks are read in an order
// in which the node never has the next block in memory.
func (s *serverSuite) reads(m model, l load, node *served, ns kv.Namespace, blocks int, warm bool) func(context.Context) (bench.Sample, error) {
	var next atomic.Int64
	return func(ctx context.Context) (_ bench.Sample, err error) {
		r, err := s.remote(ctx, node.listen, l.conns)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, r.close(ctx)) }()
		for n := range blocks {
			if !warm {
				break
			}
			if err := r.read(ctx, ns, n, 0); err != nil {
				return nil, err
			}
		}
		turns := make([]int, l.depth())
		return drive(ctx, s.Turn, l.depth(), gi, []*peer.Process{node.Process}, func(i int) (int64, error) {
			n := int(next.Add(1)) % blocks
			turns[i]++
			return m.blockBytes, r.read(ctx, ns, n, place(i, turns[i], l.depth(), m.blockBytes))
		})
	}
}

// streamReads returns a turn (one measured run of a contender) like that of reads, but the callers
// read from child over gRPC streams.
func (s *serverSuite) streamReads(m model, l load, child *peer.Child, blocks int) func(context.Context) (bench.Sample, error) {
	return func(ctx context.Context) (_ bench.Sample, err error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		var gets []func(int, []byte) error
		for range l.conns {
			conn, err := peer.DialStream(child.Ready)
			if err != nil {
				return nil, err
			}
			defer conn.Close()
			for range l.each {
				get, err := conn.Open(ctx)
				if err != nil {
					return nil, err
				}
				gets = append(gets, get)
			}
		}
		rngs := make([]int, len(gets))
		return drive(ctx, s.Turn, len(gets), gi, []*peer.Process{child.Process}, func(i int) (int64, error) {
			rngs[i]++
			at := place(i, rngs[i], len(gets), m.blockBytes)
			return m.blockBytes, gets[i]((i+rngs[i]*len(gets))%blocks, s.land.Bytes()[at:][:m.blockBytes])
		})
	}
}

func redisKey(m model, n int) string { return fmt.Sprintf("%s:%d", m.name(), n) }

func (s *serverSuite) fillRedis(ctx context.Context, m model) error {
	c, err := s.redis.Conn(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	for n := range int(hotBytes / m.blockBytes) {
		if err := c.Set(redisKey(m, n), s.land.Bytes()[int64(n)*m.blockBytes:][:m.blockBytes]); err != nil {
			return err
		}
	}
	return nil
}

// redisReads returns a turn (one measured run of a contender) that keeps l.each GETs in flight on
// each connection to Redis.
func (s *serverSuite) redisReads(m model, l load, blocks int) func(context.Context) (bench.Sample, error) {
	return func(ctx context.Context) (_ bench.Sample, err error) {
		conns := make([]*peer.RedisConn, l.conns)
		asked := make([]int, l.conns)
		turns := make([]int, l.conns)
		ask := func(i int) error {
			asked[i]++
			return conns[i].Ask(redisKey(m, (i+asked[i]*l.conns)%blocks))
		}
		for i := range conns {
			if conns[i], err = s.redis.Conn(ctx); err != nil {
				return nil, err
			}
			defer conns[i].Close()
			for range l.each {
				if err := ask(i); err != nil {
					return nil, err
				}
			}
		}
		return drive(ctx, s.Turn, l.conns, gi, []*peer.Process{s.redis.Process}, func(i int) (int64, error) {
			turns[i]++
			at := place(i, turns[i], l.conns, m.blockBytes)
			if err := conns[i].Take(s.land.Bytes()[at:][:m.blockBytes]); err != nil {
				return 0, err
			}
			return m.blockBytes, ask(i)
		})
	}
}

// fromDisk measures reads of blocks that the node has only on disk.
func (s *serverSuite) fromDisk(ctx context.Context) error {
	for _, c := range []struct {
		m model
		l load
	}{{fourMiB(), load{1, 1}}, {fourMiB(), load{1, 4}}, {fourMiB(), load{4, 4}}, {oneMiB(), load{4, 4}}} {
		name := fmt.Sprintf("read %s from disk, %v", sizeName(c.m.blockBytes), c.l)
		if !s.wants(name) {
			continue
		}
		if err := s.diskLoad(ctx, name, c.m, c.l); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// bestFio returns the shapes with which fio is run to find its best rate on this disk.
func bestFio() []shape { return []shape{{4 * mib, 0, 1}, {1 * mib, 0, 4}} }

func (s *serverSuite) diskLoad(ctx context.Context, name string, m model, l load) error {
	node, err := s.nodeFor(ctx)
	if err != nil {
		return err
	}
	bytes := s.opts.DiskBytes
	if m != fourMiB() {
		bytes = 1 * gi
	}
	s.Progress("storing " + sizeName(bytes) + " in blocks of " + sizeName(m.blockBytes))
	ns, err := s.stored(ctx, node, m, bytes)
	if err != nil {
		return err
	}
	// fio reads a separate file, because the node's segments hold several block sizes, and parts of
	// the segments have never been written.
	file := filepath.Join(s.dir, "fio")
	if err := prewritten(file, 1*gi, s.land.Bytes()); err != nil {
		return err
	}
	defer os.Remove(file)
	fio := func(sh shape) func(context.Context) (bench.Sample, error) {
		return fioInGiB(peer.FioJob{
			RW: "randread", File: file, BlockBytes: sh.slotBytes, Depth: sh.depth, SizeBytes: 1 * gi, Memory: s.fioMemory, Time: s.Turn,
		})
	}
	c := bench.Comparison{
		Name: name, Unit: netUnit,
		Contenders: []bench.Contender{
			{Name: oursName, Turn: s.reads(m, l, node, ns, int(bytes/m.blockBytes), false)},
			{Name: iperfName, NotRun: s.notRun[iperfName], Turn: func(ctx context.Context) (bench.Sample, error) {
				return s.iperf.Run(ctx, peer.IperfLoad{Conns: l.conns, WriteBytes: m.blockBytes}, s.Turn)
			}},
			{Name: fioName, NotRun: s.notRun[fioName], Turn: fio(shape{m.blockBytes, 0, l.depth()})},
		},
	}
	for _, sh := range bestFio() {
		c.Contenders = append(c.Contenders, bench.Contender{Name: "fio " + sh.String(), NotRun: s.notRun[fioName], Turn: fio(sh)})
	}
	atLeast := func(v float64) bench.Target {
		if l.depth() < 4 || m != fourMiB() {
			return bench.Target{} // the design has a target only for four or more reads of 4 MiB
		}
		return bench.AtLeast(v)
	}
	c.Measures = []bench.Measure{
		{Name: "bandwidth / min(fio at that depth, iperf3)", Target: atLeast(0.9), Of: func(r bench.Round) (float64, bool) {
			ours, ok := r.Get(oursName, bench.Rate)
			net, ok2 := r.Get(iperfName, bench.Rate)
			disk, ok3 := r.Get(fioName, bench.Rate)
			return ours / min(net, disk), ok && ok2 && ok3
		}},
		{Name: "bandwidth / best fio", Target: atLeast(0.8), Of: func(r bench.Round) (float64, bool) {
			ours, ok := r.Get(oursName, bench.Rate)
			best, ok2 := r.Get(fioName, bench.Rate)
			for _, sh := range bestFio() {
				v, _ := r.Get("fio "+sh.String(), bench.Rate)
				best = max(best, v)
			}
			return ours / best, ok && ok2
		}},
	}
	return s.compare(ctx, c)
}

// fioInGiB returns a turn (one measured run of a contender) that runs fio and reports the rate in
// GiB/s.
func fioInGiB(j peer.FioJob) func(context.Context) (bench.Sample, error) {
	return func(ctx context.Context) (bench.Sample, error) {
		sample, err := j.Run(ctx)
		if err == nil {
			sample[bench.Rate] *= mib / float64(gi)
		}
		return sample, err
	}
}

// cutThrough compares reads of one large block from two nodes. One of the nodes sends the beginning
// of a block before it has read the block's end from disk.
func (s *serverSuite) cutThrough(ctx context.Context) error {
	const name = "read one 16 MiB block from disk"
	if !s.wants(name) {
		return nil
	}
	const through, forward = "cut through", "store and forward"
	const bytes = 1 * gi
	m := sixteenMiB()
	var contenders []bench.Contender
	for _, c := range []struct{ name, threshold string }{{through, "8MiB"}, {forward, "0"}} {
		node, err := startServe(ctx, s.Exe, filepath.Join(s.dir, strings.ReplaceAll(c.name, " ", "-")), "--capacity", "2GiB", "--segment", "256MiB", "--data-plane-cut-through", c.threshold)
		if err != nil {
			return err
		}
		defer node.Kill()
		s.Progress("storing " + sizeName(bytes) + " in blocks of " + sizeName(m.blockBytes))
		ns, err := s.stored(ctx, node, m, bytes)
		if err != nil {
			return err
		}
		contenders = append(contenders, bench.Contender{Name: c.name, Turn: s.oneByOne(m, node, ns, int(bytes/m.blockBytes))})
	}
	return s.compare(ctx, bench.Comparison{
		Name: name, Unit: "reads/s", Contenders: contenders,
		Measures: []bench.Measure{
			bench.Ratio("p50, cut through / store and forward", "p50 µs", through, forward, bench.AtMost(0.75)),
			bench.Ratio("p99, cut through / store and forward", "p99 µs", through, forward, bench.Target{}),
		},
	})
}

// oneByOne returns a turn (one measured run of a contender) that reads one block at a time and
// measures the duration of each read.
func (s *serverSuite) oneByOne(m model, node *served, ns kv.Namespace, blocks int) func(context.Context) (bench.Sample, error) {
	next := 0
	return func(ctx context.Context) (_ bench.Sample, err error) {
		r, err := s.remote(ctx, node.listen, 4)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, r.close(ctx)) }()
		return times(max(s.Turn, time.Second), func() (bool, error) {
			next++
			return ctx.Err() == nil, r.read(ctx, ns, next%blocks, place(0, next, 1, m.blockBytes))
		})
	}
}
