//go:build verbs && cgo && linux

package verbs

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// BenchmarkFill measures Post's cost in Go per Work: adding it to the ring and filling in the
// request. It needs no card.
func BenchmarkFill(b *testing.B) {
	q := newQueueWithoutCard()
	defer q.close()
	e := &endpoint{}
	l := &lane{e: e, q: q, ring: newRing(256)}
	e.lanes = [2]*lane{l, {e: e}}
	m := &memory{base: 1 << 20, size: 1 << 30, lkey: 1}
	works := make([]group.Work, 32)
	for i := range works {
		works[i] = group.Work{Cookie: uint64(i), Op: group.OpWrite, Src: m, SrcOff: uint64(i) << 10, Len: 1 << 10, RemoteAddr: 1 << 30, RemoteKey: 5}
	}
	b.ReportAllocs()
	for b.Loop() {
		l.fill(works)
		for range works {
			l.ring.end()
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(works)), "ns/work")
}

// TestWriteAllocatesNothing: a write allocates nothing on either side. An error or a closure
// per Work, or a completion queue that grows, would break it.
func TestWriteAllocatesNothing(t *testing.T) {
	names := ports(t, 1)
	ctx := testContext(t)
	target := closing(t, startEngine(t, names[:1], true, group.Options{Token: rdma.Token(testToken)}))
	sender := closing(t, startEngine(t, names[:1], false, group.Options{}))
	if _, err := sender.Connect(ctx, target.Addr(), rdma.Token(testToken)); err != nil {
		t.Fatal(err)
	}
	const n = 4 << 10
	src, err := sender.Register(make([]byte, n), rdma.RegisterOptions{Local: true})
	if err != nil {
		t.Fatal(err)
	}
	dst, err := target.Register(make([]byte, n), rdma.RegisterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	w := rdma.Write{Src: src, Dst: dst.Desc(), Len: n, Done: func(err error) { ended <- err }}
	write := func() {
		if err := sender.Write(ctx, w); err != nil {
			t.Fatal(err)
		}
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
	for range 300 {
		write() // everything that grows has grown
	}
	if a := testing.AllocsPerRun(500, write); a >= 0.5 {
		t.Errorf("%.2f allocations for each write", a)
	}
}

// BenchmarkToPost measures the time from the call of Write to the call of the card's library,
// fabric-lib's "time to first post". Figures from emulated CPUs are not comparable with others.
func BenchmarkToPost(b *testing.B) {
	names := ports(b, 1)
	ctx := testContext(b)
	target := closing(b, startEngine(b, names[:1], true, group.Options{Token: rdma.Token(testToken)}))
	sender := closing(b, startEngine(b, names[:1], false, group.Options{Detail: watched}))
	if _, err := sender.Connect(ctx, target.Addr(), rdma.Token(testToken)); err != nil {
		b.Fatal(err)
	}
	src, err := sender.Register(make([]byte, 64), rdma.RegisterOptions{Local: true})
	if err != nil {
		b.Fatal(err)
	}
	dst, err := target.Register(make([]byte, 64), rdma.RegisterOptions{})
	if err != nil {
		b.Fatal(err)
	}
	ended := make(chan error, 1)
	w := rdma.Write{Src: src, Dst: dst.Desc(), Len: 64, Done: func(err error) { ended <- err }}
	var called time.Time
	var waits []time.Duration
	sender.firstPost = func() { waits = append(waits, time.Since(called)) }
	for b.Loop() {
		called = time.Now()
		if err := sender.Write(ctx, w); err != nil {
			b.Fatal(err)
		}
		if err := <-ended; err != nil {
			b.Fatal(err)
		}
	}
	slices.Sort(waits)
	b.ReportMetric(float64(waits[len(waits)/2].Nanoseconds()), "ns-to-post-p50")
}

// row is one line of the comparison with ib_write_bw, after fabric-lib's Table 2: single writes
// one at a time, and paged ones with ib_write_bw's default number in flight.
type row struct {
	page  bool
	bytes int
}

func (r row) name() string {
	kind := "single"
	if r.page {
		kind = "paged"
	}
	if r.bytes >= 1<<20 {
		return fmt.Sprintf("%s/%dMiB", kind, r.bytes>>20)
	}
	return fmt.Sprintf("%s/%dKiB", kind, r.bytes>>10)
}

// depthPaged is ib_write_bw's default depth.
const depthPaged = 128

// BenchmarkAgainstIBWriteBW alternates both over the same two ports: the engine in two
// processes, and ib_write_bw in two. x-ib_write_bw is the median of the rounds' ratios (target:
// 0.9).
//
// rdma_rxe accepts messages up to 8 MiB, so a write of 32 MiB is compared with four messages in
// sequence.
func BenchmarkAgainstIBWriteBW(b *testing.B) {
	rows := []row{
		{false, 64 << 10}, {false, 256 << 10}, {false, 1 << 20}, {false, 8 << 20}, {false, 32 << 20},
		{true, 1 << 10}, {true, 8 << 10}, {true, 16 << 10}, {true, 64 << 10},
	}
	for _, r := range rows {
		b.Run(r.name(), func(b *testing.B) { r.compare(b) })
	}
}

// compareBytes is the number of bytes of each round: a second or two on emulated CPUs.
const compareBytes = 16 << 20

func (r row) compare(b *testing.B) {
	names := ports(b, 2)
	if _, err := exec.LookPath("ib_write_bw"); err != nil {
		if os.Getenv(envLab) != "" {
			b.Fatal("in the lab, and no ib_write_bw")
		}
		b.Skip("no ib_write_bw in PATH (package perftest) to compare with")
	}
	f := newFlow(b, names[0], names[1])
	total := max(compareBytes, r.bytes)
	if r.page && r.bytes < 8<<10 {
		total /= 4
	}
	message, depth := min(r.bytes, 8<<20), 1
	if r.page {
		depth = depthPaged
	}
	f.run(b, r, total) // warm up connections and memory
	var ratios, rates []float64
	for b.Loop() {
		peer := ibWriteBW(b, names[0], names[1], message, max(total/message, 5), depth)
		ours := f.run(b, r, total)
		ratios, rates = append(ratios, ours/peer), append(rates, ours)
	}
	b.ReportMetric(median(ratios), "x-ib_write_bw")
	b.ReportMetric(median(rates)/1e6, "MB/s")
	if r.page {
		b.ReportMetric(median(rates)/float64(r.bytes), "pages/s")
	}
	b.ReportMetric(0, "ns/op") // a round includes both
}

func median(x []float64) float64 {
	slices.Sort(x)
	return x[len(x)/2]
}

// flow writes to another process.
type flow struct {
	e   *killable
	src rdma.Region
	dst rdma.Desc
}

func newFlow(b *testing.B, from, to string) *flow {
	b.Helper()
	ctx := testContext(b)
	d, err := decodeDesc(startChild(b, "sink", to).line(b))
	if err != nil {
		b.Fatal(err)
	}
	f := &flow{e: closing(b, startEngine(b, []string{from}, false, group.Options{})), dst: d}
	if _, err := f.e.Connect(ctx, d.Addr(), rdma.Token(testToken)); err != nil {
		b.Fatal(err)
	}
	if f.src, err = f.e.Register(make([]byte, d.Len), rdma.RegisterOptions{Local: true}); err != nil {
		b.Fatal(err)
	}
	return f
}

// run moves total bytes and returns bytes per second.
func (f *flow) run(b *testing.B, r row, total int) float64 {
	b.Helper()
	ctx := testContext(b)
	began := time.Now()
	if !r.page {
		ended := make(chan error, 1)
		for sent := 0; sent < total; sent += r.bytes {
			w := rdma.Write{Src: f.src, Dst: f.dst, Len: uint64(r.bytes), Done: func(err error) { ended <- err }}
			if err := f.e.Write(ctx, w); err != nil {
				b.Fatal(err)
			}
			if err := <-ended; err != nil {
				b.Fatal(err)
			}
		}
		return float64(total) / time.Since(began).Seconds()
	}
	// Pages are not in order, so that no two are merged. Two operations in flight keep the card
	// busy while one ends.
	const inFlight = 2
	var idx []uint32
	for _, i := range rand.Perm(min(total, int(f.dst.Len)) / r.bytes / inFlight) {
		idx = append(idx, uint32(i))
	}
	pages := rdma.Pages{Indices: idx, Stride: uint64(r.bytes)}
	ended := make(chan error, inFlight)
	sent, flying := 0, 0
	for sent < total || flying > 0 {
		if sent < total && flying < inFlight {
			w := rdma.PagedWrite{PageLen: uint64(r.bytes), Src: f.src, SrcPages: pages, Dst: f.dst, DstPages: pages, Done: func(err error) { ended <- err }}
			if err := f.e.WritePaged(ctx, w); err != nil {
				b.Fatal(err)
			}
			sent, flying = sent+len(idx)*r.bytes, flying+1
			continue
		}
		if err := <-ended; err != nil {
			b.Fatal(err)
		}
		flying--
	}
	return float64(sent) / time.Since(began).Seconds()
}

// ibWriteBW measures with ib_write_bw and returns bytes per second. ib_write_bw counts CPU
// cycles and first measures the length of a cycle. On busy emulated CPUs that may fail, and it
// reports 0. ibWriteBW then runs it again, for minutes, because a comparison is required where
// ib_write_bw can run.
func ibWriteBW(b *testing.B, from, to string, size, iterations, depth int) float64 {
	b.Helper()
	for began := time.Now(); time.Since(began) < testTimeout; {
		if rate := askIBWriteBW(b, from, to, size, iterations, depth); rate > 0 {
			return rate
		}
	}
	b.Fatalf("ib_write_bw printed no rate in %v: the CPUs are too busy", testTimeout)
	return 0
}

// askIBWriteBW runs the card vendors' own benchmark over the two ports once.
func askIBWriteBW(b *testing.B, from, to string, size, iterations, depth int) float64 {
	b.Helper()
	// On rdma_rxe it retries for ever if an answer is lost permanently.
	ctx, cancel := context.WithTimeout(b.Context(), testTimeout)
	defer cancel()
	args := []string{"-s", strconv.Itoa(size), "-n", strconv.Itoa(iterations), "-t", strconv.Itoa(depth), "--report_gbits", "-F"}
	server := exec.CommandContext(ctx, "ib_write_bw", append([]string{"-d", to}, args...)...)
	var log bytes.Buffer
	server.Stdout, server.Stderr = &log, &log
	if err := server.Start(); err != nil {
		b.Fatal(err)
	}
	defer func() {
		_ = server.Process.Kill()
		_ = server.Wait()
	}()
	// The server does not report that it listens, so the client retries until it does.
	for deadline := time.Now().Add(time.Minute); ; {
		out, err := exec.CommandContext(ctx, "ib_write_bw", append(append([]string{"-d", from}, args...), "127.0.0.1")...).CombinedOutput()
		if err == nil {
			rate, err := parseIBWriteBW(string(out))
			if err != nil {
				b.Fatalf("%v in:\n%s", err, out)
			}
			return rate
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			b.Fatalf("ib_write_bw %v: %v\n%s\nserver:\n%s", args, err, out, log.String())
		}
	}
}

// parseIBWriteBW returns the average of the one line of figures, in bytes per
// second: "#bytes #iterations BW-peak[Gb/sec] BW-average[Gb/sec] MsgRate[Mpps]".
func parseIBWriteBW(text string) (float64, error) {
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) != 5 {
			continue
		}
		if _, err := strconv.Atoi(f[0]); err != nil {
			continue
		}
		gbit, err := strconv.ParseFloat(f[3], 64)
		if err != nil || gbit < 0 {
			return 0, fmt.Errorf("average %q", f[3])
		}
		return gbit * 1e9 / 8, nil
	}
	return 0, fmt.Errorf("no line of figures")
}
