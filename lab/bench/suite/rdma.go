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

// RDMAOptions are those of the rdma suite: one provider, as the command opens it.
type RDMAOptions struct {
	// Provider is its name, for the other process too.
	Provider string
	// NotRun, if set, is why the provider cannot be measured here.
	NotRun string
	// Shared: the memory that is written from must be a shared arena.
	Shared bool
	// Open starts an engine.
	Open func(ctx context.Context, o EngineOptions) (rdma.Engine, error)
	// Conns is the number of connections, where the provider has such.
	Conns int
	// Yardstick starts what the same hardware is measured with.
	Yardstick func(ctx context.Context) (Yardstick, error)
	// Fraction of the yardstick that is asked for where writes are large or paged;
	// 0: nothing is.
	Fraction float64
	// Sockets: the provider is sockets, so that bare ones over the same memory take
	// part, of which SocketsFraction is asked for where Fraction is.
	Sockets bool
	// Quick leaves out what lies between the smallest and the largest.
	Quick bool
}

// EngineOptions are what the suite asks of an engine.
type EngineOptions struct {
	// Listen makes it reachable, with SinkToken, for the other process or in this
	// one; Dir is where it may make a socket.
	Listen bool
	Dir    string
	Conns  int
	// Memory is what it writes from.
	Memory *arena.Arena
	// OnPost, if set, is to be called when an operation is handed to the NIC. An
	// engine that cannot ignores it.
	OnPost func()
}

// Yardstick is the hardware's own benchmark.
type Yardstick struct {
	Name string
	// Turn measures for about d, with no more in flight than the load has.
	Turn func(ctx context.Context, d time.Duration, l Load) (bench.Sample, error)
	// Notes say in what it differs from our work.
	Notes []string
	Close func() error
}

// Load is what a row has in flight: Depth operations of Bytes, each in pages of
// Page bytes (0: in one piece).
type Load struct {
	Bytes int64
	Depth int
	Page  int64
}

// InFlight is how many bytes that are.
func (l Load) InFlight() int64 { return l.Bytes * int64(l.Depth) }

// SocketsFraction is what is asked of an engine over sockets, of bare ones.
const SocketsFraction = 0.95

// socketsName is the bare sockets.
const socketsName = "bare sockets"

// Names of the metrics that only this suite has.
const (
	pagesMetric = "pages/s"
	callMetric  = "call ns"
	postMetric  = "first post ns"
	allocMetric = "allocations"
)

// rdmaRow is one row: a single write, or one of many pages.
type rdmaRow struct {
	bytes int64
	page  int64 // 0: a single write
	depth int   // writes in flight
	// saturates: large enough that the yardstick's rate is asked for.
	saturates bool
}

func (row rdmaRow) load() Load { return Load{Bytes: row.bytes, Depth: row.depth, Page: row.page} }

// spread is over how many of conns connections bare sockets carry what is in
// flight: pieces of 1 MiB, as the engine cuts them, and one at least for each
// operation.
func (l Load) spread(conns int) int {
	return max(1, min(conns, max(l.Depth, int(l.InFlight()/mib))))
}

func (row rdmaRow) String() string {
	if row.page > 0 {
		return fmt.Sprintf("%d pages of %s, %d in flight", row.bytes/row.page, sizeName(row.page), row.depth)
	}
	return fmt.Sprintf("single write of %s, %d in flight", sizeName(row.bytes), row.depth)
}

// rdmaRows are the rows of fabric-lib's Table 2 (section 7.1): one single write
// at a time, and paged writes; and single writes as a storage node has them, some
// in flight.
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

// rdmaSuite is one run.
type rdmaSuite struct {
	*suiteRun
	opts RDMAOptions
	dir  string
	land *arena.Arena
	yard Yardstick
}

// RDMASection is the suite's name for a provider, by which results are saved and
// a page has its place for them: each provider has a peer of its own, so that
// their tables are not one.
func RDMASection(provider string) string {
	if provider == "tcp" {
		return "rdma"
	}
	return "rdma-" + provider
}

// RDMA measures a transfer engine against the hardware's own benchmark: how much
// of its rate writes of each size reach, what a call costs, and what it allocates.
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
		return fmt.Errorf("bench: the sink says %q: %w", sink.Ready, err)
	}
	var dst rdma.Desc
	if err := dst.UnmarshalBinary(raw); err != nil {
		return fmt.Errorf("bench: the sink's address: %w", err)
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
			if s.opts.Shared { // it copies, as we do: so its processor time is a yardstick too
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

// addSockets makes bare sockets take part in a row. Of processor time a busy
// machine takes nothing away, so that its ratio stands beside the rate's.
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

// lane is one write after the other, through the memory.
type lane struct {
	t        *stream
	row      rdmaRow
	next     int
	step     int
	from, to []uint32
	done     chan error
	set      func(error)
}

// lane returns lane i of a row's depth.
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

// submit begins a write at the lane's next place.
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

// write is a write, to its end.
func (l *lane) write(ctx context.Context) error {
	if err := l.submit(ctx); err != nil {
		return err
	}
	return <-l.done
}

// costWrites is how many writes the cost of one is taken over.
const costWrites = 4000

// cost measures what a call takes and allocates, on both sides: sender and target
// are in this process here.
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

// calls times writes one after the other: how long the call took, and how long it
// was until posted was set, where the engine does that.
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

// allocations is the mean number for one write of each lane, whole ones: what the
// runtime allocates now and then by itself is less than one a write.
func allocations(ctx context.Context, lanes ...*lane) (float64, error) {
	var before, after runtime.MemStats
	for i := range costWrites + 100 {
		if i == 100 { // the first fill what is used again
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
