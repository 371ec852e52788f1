package suite

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/lab/bench"
	"github.com/penstock-kv/penstock/lab/bench/peer"
	"github.com/penstock-kv/penstock/rdma"
)

// RDMAOptions configures the rdma suite for one provider.
type RDMAOptions struct {
	// Provider is the provider's name. It is also passed to the process that is the target of the
	// writes.
	Provider string
	// NotRun, if set, is the reason why the provider cannot be measured here.
	NotRun string
	// Shared: the source memory of writes must be a shared arena.
	Shared bool
	// Open starts an engine.
	Open func(ctx context.Context, o EngineOptions) (rdma.Engine, error)
	// Conns is the number of connections, if the provider has connections.
	Conns int
	// Yardstick starts the hardware's own benchmark, with which the engine is compared.
	Yardstick func(ctx context.Context) (Yardstick, error)
	// Fraction is the target for the engine's rate of large or paged writes, as a fraction of the
	// Yardstick's rate; 0: no target.
	Fraction float64
	// Sockets: the provider uses sockets. Bare sockets over the same memory are then a contender
	// too. The target of the engine's rate relative to bare sockets is SocketsFraction, in the rows
	// that have the target Fraction.
	Sockets bool
	// Quick runs only some of the rows (rdmaRows), with at most two rounds.
	Quick bool
}

// EngineOptions describes an engine that the suite opens.
type EngineOptions struct {
	// Listen makes the engine accept peers with SinkToken, from this or another process. Dir is a
	// directory in which the engine may create a socket.
	Listen bool
	Dir    string
	Conns  int
	// Memory is the memory from which the engine writes.
	Memory *arena.Arena
	// OnPost, if set, is called when the engine has posted an operation to the NIC. An engine that
	// does not support this ignores OnPost.
	OnPost func()
}

// Yardstick is a benchmark of the hardware itself.
type Yardstick struct {
	Name string
	// Turn measures for about d, with at most the load's operations in flight.
	Turn func(ctx context.Context, d time.Duration, l Load) (bench.Sample, error)
	// Notes list the differences between the work of the benchmark and the work of the engine.
	Notes []string
	Close func() error
}

// Load describes the operations in flight: Depth operations of Bytes bytes, each in pages of Page
// bytes (0: in one piece).
type Load struct {
	Bytes int64
	Depth int
	Page  int64
}

// InFlight returns the number of bytes in flight.
func (l Load) InFlight() int64 { return l.Bytes * int64(l.Depth) }

// SocketsFraction is the target of an engine over sockets, as a fraction of the rate of bare
// sockets.
const SocketsFraction = 0.95

// socketsName is the contender that uses bare sockets.
const socketsName = "bare sockets"

// Names of metrics that only this suite has.
const (
	pagesMetric = "pages/s"
	callMetric  = "call ns"
	postMetric  = "first post ns"
	allocMetric = "allocations"
)

// rdmaRow is one row of the report: writes of bytes bytes each, in one piece or in pages.
type rdmaRow struct {
	bytes int64
	page  int64 // 0: a single write
	depth int   // writes in flight
	// saturates: the writes are large enough to reach the rate of the hardware's own benchmark
	// (Yardstick), so the target applies.
	saturates bool
}

func (row rdmaRow) load() Load { return Load{Bytes: row.bytes, Depth: row.depth, Page: row.page} }

// spread returns the number of connections, at most conns, over which bare sockets send the bytes
// in flight. It is the number that the engine uses: the engine cuts the bytes into pieces of 1 MiB,
// and each operation has at least one piece.
func (l Load) spread(conns int) int {
	return max(1, min(conns, max(l.Depth, int(l.InFlight()/mib))))
}

func (row rdmaRow) String() string {
	if row.page > 0 {
		return fmt.Sprintf("%d pages of %s, %d in flight", row.bytes/row.page, sizeName(row.page), row.depth)
	}
	return fmt.Sprintf("single write of %s, %d in flight", sizeName(row.bytes), row.depth)
}

// rdmaRows returns the rows of Table 2 of the fabric-lib paper (section 7.1): single writes one at
// a time, and paged writes. In addition it returns rows with several single writes in flight, which
// is the load of a storage node.
func rdmaRows(quick bool) (out []rdmaRow) {
	for _, bytes := range []int64{1 << 10, 64 << 10, 256 << 10, mib, 32 * mib} {
		if quick && bytes != 64<<10 && bytes != 32*mib {
			continue
		}
		out = append(out, rdmaRow{bytes: bytes, depth: 1, saturates: bytes >= 32*mib})
	}
	if !quick {
		out = append(out, rdmaRow{bytes: mib, depth: 8, saturates: true})
	}
	for _, page := range []int64{1 << 10, 8 << 10, 16 << 10, 64 << 10} {
		if quick && page != 1<<10 && page != 64<<10 {
			continue
		}
		out = append(out, rdmaRow{bytes: min(1024*page, 16*mib), page: page, depth: 4, saturates: page >= 64<<10})
	}
	return out
}

// rdmaSuite is one run of the suite.
type rdmaSuite struct {
	*suiteRun
	opts RDMAOptions
	dir  string
	land *arena.Arena
	yard Yardstick
}

// RDMASection returns the suite's name for a provider. Results are saved under this name, and the
// page has a table for each name, because each provider is compared with another program.
func RDMASection(provider string) string {
	if provider == "tcp" {
		return "rdma"
	}
	return "rdma-" + provider
}

// RDMA compares a transfer engine with the hardware's own benchmark. It reports the engine's rate
// divided by the benchmark's rate for each write size, the cost of a call, and the allocations per
// write.
func RDMA(ctx context.Context, w World, o RDMAOptions) (_ bench.Report, err error) {
	s := &rdmaSuite{suiteRun: newRun(w, RDMASection(o.Provider)), opts: o}
	s.setup("provider %s", o.Provider)
	if o.NotRun != "" {
		s.report.NotRun = append(s.report.NotRun, bench.Missing{What: o.Provider, Why: o.NotRun})
		return s.report, nil
	}
	if o.Quick {
		s.Rounds = min(s.Rounds, 2)
	}
	dir, remove, err := s.tempDir("rdma")
	if err != nil {
		return s.report, err
	}
	defer remove()
	s.dir = dir
	if s.land, err = arena.New(arena.Options{SizeBytes: landBytes, Shared: o.Shared}); err != nil {
		return s.report, err
	}
	defer func() { err = errors.Join(err, s.land.Close()) }()
	note, restore := peer.UseCongestion()
	defer func() { err = errors.Join(err, restore()) }()
	if o.Provider == "tcp" {
		s.setup("loopback; %s; %d connections", note, o.Conns)
	}
	s.setup("this process writes from %d MiB of %s into another's; CPU is of both; pages go to places in shuffled order, so that none can be merged", landBytes/mib, pages(s.land))
	if s.yard, err = o.Yardstick(ctx); err != nil {
		s.yard = Yardstick{Name: "yardstick", Close: func() error { return nil }}
		s.report.NotRun = append(s.report.NotRun, bench.Missing{What: "the hardware's benchmark", Why: err.Error()})
	}
	defer func() { err = errors.Join(err, s.yard.Close()) }()
	for _, note := range s.yard.Notes {
		s.setup("%s", note)
	}
	if o.Quick {
		s.setup("quick: %d rounds, the smallest and the largest writes", s.Rounds)
	}
	return s.report, s.all(ctx, step{"writes", s.writes}, step{"cost of a call", s.cost})
}

// writes compares each row with the yardstick.
func (s *rdmaSuite) writes(ctx context.Context) (err error) {
	rows := rdmaRows(s.opts.Quick)
	var names []string
	for _, row := range rows {
		names = append(names, row.String())
	}
	if !s.wants(names...) {
		return nil
	}
	sink, err := peer.StartChild(s.Exe, nil, "bench", "child", "rdma-sink", "--provider", s.opts.Provider, "--data", s.dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sink.Close()) }()
	raw, err := base64.StdEncoding.DecodeString(sink.Ready)
	if err != nil {
		return fmt.Errorf("bench: parse the sink's line %q: %w", sink.Ready, err)
	}
	var dst rdma.Desc
	if err := dst.UnmarshalBinary(raw); err != nil {
		return fmt.Errorf("bench: parse the sink's address: %w", err)
	}
	to, err := s.open(ctx, dst, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, to.close(ctx)) }()
	s.setup("%s", to.engine.Info().Detail)
	var bare *peer.Child
	if s.opts.Sockets {
		if bare, err = peer.StartChild(s.Exe, nil, "bench", "child", "sockets"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, bare.Close()) }()
		s.setup("%s: as many connections between the same memory of two processes, and nothing else; iperf3's two buffers stay in the cache", socketsName)
	}
	for _, row := range rows {
		target := bench.Target{}
		if row.saturates && s.opts.Fraction > 0 {
			target = bench.AtLeast(s.opts.Fraction)
		}
		c := bench.Comparison{Name: row.String(), Unit: netUnit, Contenders: []bench.Contender{
			{Name: oursName, Turn: func(ctx context.Context) (bench.Sample, error) {
				return to.drive(ctx, s.suiteRun, row, []*peer.Process{sink.Process})
			}},
		}}
		if s.yard.Turn != nil {
			c.Contenders = append(c.Contenders, bench.Contender{Name: s.yard.Name, Turn: func(ctx context.Context) (bench.Sample, error) {
				return s.yard.Turn(ctx, s.Turn, row.load())
			}})
			c.Measures = append(c.Measures, bench.Ratio("rate, of "+s.yard.Name, bench.Rate, oursName, s.yard.Name, target))
			if s.opts.Shared { // the yardstick copies as the engine does, so its processor time is comparable
				c.Measures = append(c.Measures, bench.Ratio("CPU, of "+s.yard.Name, bench.CPU, oursName, s.yard.Name, bench.Target{}))
			}
		}
		if bare != nil {
			s.addSockets(&c, bare, row)
		}
		if row.page > 0 {
			c.Measures = append(c.Measures, bench.Figure("pages", "/s", pagesMetric, oursName, bench.Target{}))
		}
		if err := s.compare(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

// addSockets adds bare sockets to a row. The row has the ratio of rates and the ratio of processor
// times, because other load on the machine changes rates but not processor times.
func (s *rdmaSuite) addSockets(c *bench.Comparison, bare *peer.Child, row rdmaRow) {
	conns := row.load().spread(s.opts.Conns)
	c.Contenders = append(c.Contenders, bench.Contender{Name: socketsName, Turn: func(ctx context.Context) (_ bench.Sample, err error) {
		k, err := peer.DialSockets(ctx, bare.Ready, s.land.Bytes()[:landBytes], conns, int(row.load().InFlight())/conns)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, k.Close()) }()
		return drive(ctx, s.Turn, conns, gi, []*peer.Process{bare.Process}, k.Write)
	}})
	target := bench.Target{}
	if row.saturates {
		target = bench.AtLeast(SocketsFraction)
	}
	c.Measures = append(c.Measures,
		bench.Ratio("rate, of "+socketsName, bench.Rate, oursName, socketsName, target),
		bench.Ratio("CPU, of "+socketsName, bench.CPU, oursName, socketsName, bench.Target{}),
	)
	if s.yard.Turn != nil {
		c.Measures = append(c.Measures, bench.Ratio("rate of "+socketsName+", of "+s.yard.Name, bench.Rate, socketsName, s.yard.Name, bench.Target{}))
	}
}

// stream is an engine that writes to one peer.
type stream struct {
	engine rdma.Engine
	src    rdma.Region
	dst    rdma.Desc
}

// open starts an engine and connects it to the owner of dst.
func (s *rdmaSuite) open(ctx context.Context, dst rdma.Desc, onPost func()) (_ *stream, err error) {
	e, err := s.opts.Open(ctx, EngineOptions{Dir: s.dir, Conns: s.opts.Conns, Memory: s.land, OnPost: onPost})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.Close())
		}
	}()
	if _, err := e.Connect(ctx, dst.Addr(), SinkToken()); err != nil {
		return nil, err
	}
	src, err := e.Register(s.land.Bytes()[:landBytes], rdma.RegisterOptions{Local: true})
	if err != nil {
		return nil, err
	}
	return &stream{e, src, dst}, nil
}

func (t *stream) close(ctx context.Context) error {
	return errors.Join(t.src.Close(ctx), t.engine.Close())
}

// drive writes for one turn.
func (t *stream) drive(ctx context.Context, s *suiteRun, row rdmaRow, others []*peer.Process) (bench.Sample, error) {
	lanes := make([]*lane, row.depth)
	for i := range lanes {
		lanes[i] = t.lane(i, row)
	}
	var writes atomic.Int64
	start := time.Now()
	sample, err := drive(ctx, s.Turn, row.depth, gi, others, func(i int) (int64, error) {
		writes.Add(1)
		return row.bytes, lanes[i].write(ctx)
	})
	if err != nil {
		return nil, err
	}
	if row.page > 0 {
		sample[pagesMetric] = float64(writes.Load()*row.bytes/row.page) / time.Since(start).Seconds()
	}
	return sample, nil
}

// lane submits one write after another. Its offset in the memory advances with each write. A row
// with depth d has d lanes, each with one write in flight.
type lane struct {
	t        *stream
	row      rdmaRow
	next     int
	step     int
	from, to []uint32
	done     chan error
	set      func(error)
}

// lane returns lane i of row.depth lanes.
func (t *stream) lane(i int, row rdmaRow) *lane {
	l := &lane{t: t, row: row, next: i, step: row.depth, done: make(chan error, 1)}
	l.set = func(err error) { l.done <- err }
	if row.page > 0 {
		n := int(row.bytes / row.page)
		for j, k := range rand.New(rand.NewPCG(1, uint64(n))).Perm(n) {
			l.from, l.to = append(l.from, uint32(j)), append(l.to, uint32(k))
		}
	}
	return l
}

// submit starts a write at the lane's next offset.
func (l *lane) submit(ctx context.Context) error {
	at := uint64(place(l.next, 0, 1, l.row.bytes))
	l.next += l.step
	if l.row.page == 0 {
		return l.t.engine.Write(ctx, rdma.Write{Src: l.t.src, SrcOffset: at, Dst: l.t.dst, DstOffset: at, Len: uint64(l.row.bytes), Done: l.set})
	}
	page := uint64(l.row.page)
	return l.t.engine.WritePaged(ctx, rdma.PagedWrite{
		PageLen: page, Src: l.t.src, SrcPages: rdma.Pages{Indices: l.from, Stride: page, Offset: at},
		Dst: l.t.dst, DstPages: rdma.Pages{Indices: l.to, Stride: page, Offset: at}, Done: l.set,
	})
}

// write submits a write and waits for its end.
func (l *lane) write(ctx context.Context) error {
	if err := l.submit(ctx); err != nil {
		return err
	}
	return <-l.done
}

// costWrites is the number of writes over which the cost of one write is averaged.
const costWrites = 4000

// cost measures the time and the allocations of a write. Sender and target are in this process, so
// the allocations of both count.
func (s *rdmaSuite) cost(ctx context.Context) (err error) {
	const name = "cost of a write of 1 KiB"
	if !s.wants(name) {
		return nil
	}
	target, err := s.opts.Open(ctx, EngineOptions{Listen: true, Dir: s.dir, Memory: s.land})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, target.Close()) }()
	memory, err := newArena(landBytes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, memory.Close()) }()
	region, err := target.Register(memory.Bytes()[:landBytes], rdma.RegisterOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, region.Close(ctx)) }()
	var posted atomic.Int64
	begin := time.Now()
	to, err := s.open(ctx, region.Desc(), func() { posted.CompareAndSwap(0, int64(time.Since(begin))) })
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, to.close(ctx)) }()
	single := to.lane(0, rdmaRow{bytes: 1 << 10, depth: 1})
	paged := to.lane(0, rdmaRow{bytes: 64 << 10, page: 1 << 10, depth: 1})
	c := bench.Comparison{Name: name, Contenders: []bench.Contender{{Name: oursName, Turn: func(ctx context.Context) (bench.Sample, error) {
		calls, posts, err := single.calls(ctx, begin, &posted)
		if err != nil {
			return nil, err
		}
		allocs, err := allocations(ctx, single, paged)
		sample := bench.Sample{callMetric: float64(bench.Quantile(calls, 0.5)), allocMetric: allocs}
		if len(posts) > 0 {
			sample[postMetric] = float64(bench.Quantile(posts, 0.5))
		}
		return sample, err
	}}}}
	returns := bench.Target{}
	if s.opts.Sockets {
		returns = bench.AtMost(1500)
	}
	c.Measures = []bench.Measure{
		bench.Figure("call until it returns", "ns", callMetric, oursName, returns),
		bench.Figure("call until the first post", "ns", postMetric, oursName, bench.AtMost(1500)),
		bench.Figure("allocations of a write and a paged one, both sides", "", allocMetric, oursName, bench.AtMost(0)),
	}
	c.Notes = []string{"medians; one write at a time, so that the NIC's queue is empty; the paper's 1.5 µs (section 7) is up to the first post"}
	if !s.opts.Sockets {
		c.Notes = append(c.Notes, "the caller posts by itself: what the call takes behind the first post is the provider's own")
	}
	return s.compare(ctx, c)
}

// calls measures writes one after another. It returns the duration of each call, and, if the engine
// supports OnPost, the time until the engine had set posted.
func (l *lane) calls(ctx context.Context, begin time.Time, posted *atomic.Int64) (calls, posts []time.Duration, _ error) {
	for range costWrites {
		posted.Store(0)
		start := time.Since(begin)
		err := l.submit(ctx)
		calls = append(calls, time.Since(begin)-start)
		if err == nil {
			err = <-l.done
		}
		if err != nil {
			return nil, nil, err
		}
		if at := posted.Load(); at > 0 {
			posts = append(posts, time.Duration(at)-start)
		}
	}
	return calls, posts, nil
}

// allocations returns the mean number of allocations while each lane does one write, rounded down.
// Rounding removes the runtime's own allocations, which are fewer than one per write.
func allocations(ctx context.Context, lanes ...*lane) (float64, error) {
	var before, after runtime.MemStats
	for i := range costWrites + 100 {
		if i == 100 { // the first writes fill pools that later writes reuse
			runtime.ReadMemStats(&before)
		}
		for _, l := range lanes {
			if err := l.write(ctx); err != nil {
				return 0, err
			}
		}
	}
	runtime.ReadMemStats(&after)
	return math.Floor(float64(after.Mallocs-before.Mallocs) / costWrites), nil
}
