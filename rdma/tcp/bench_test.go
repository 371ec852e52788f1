package tcp

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/rdma"
)

// The benchmarks write over loopback from this process to another run of this test binary. One
// process for both ends would hide half of the scheduling cost.

// sinkEnv makes the test binary run the sink.
const sinkEnv = "PENSTOCK_TCP_TEST_SINK"

// TestMain runs the sink if sinkEnv is set, and a process of the lab if labRole is set.
func TestMain(m *testing.M) {
	if os.Getenv(senderEnv) != "" {
		fmt.Fprintln(os.Stderr, "sender:", runSender())
		os.Exit(1)
	}
	if role := os.Getenv(labRole); role != "" {
		if err := runLab(role); err != nil {
			fmt.Fprintln(os.Stderr, role+":", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Getenv(sinkEnv) != "" {
		if err := runSink(); err != nil {
			fmt.Fprintln(os.Stderr, "sink:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// testToken is the token of every engine in the tests.
const testToken = "0123456789abcdef"

// arenaBytes is the memory on each side of a benchmark. It is larger than the caches and
// accessed in sequence, as a store's arena is.
const arenaBytes = 64 << 20

// newArena returns touched memory outside of the Go heap, in huge pages if the kernel provides
// them.
func newArena(tb testing.TB, n int) []byte {
	mem, err := syscall.Mmap(-1, 0, n, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		tb.Fatalf("mmap %d bytes: %v", n, err)
	}
	_ = syscall.Madvise(mem, 14 /* MADV_HUGEPAGE */)
	for i := 0; i < n; i += 4096 {
		mem[i] = byte(i >> 12)
	}
	tb.Cleanup(func() { _ = syscall.Munmap(mem) })
	return mem
}

// runSink is the sink's process: it listens, registers an arena, prints its address and Desc,
// and ends when its standard input closes.
func runSink() error {
	tb := &sinkTB{}
	e, err := New(context.Background(), Options{Listen: "127.0.0.1:0", Token: rdma.Token(testToken)})
	if err != nil {
		return err
	}
	r, err := e.Register(newArena(tb, arenaBytes), rdma.RegisterOptions{})
	if err != nil {
		return err
	}
	b, err := r.Desc().MarshalBinary()
	if err != nil {
		return err
	}
	fmt.Println(base64.StdEncoding.EncodeToString(b))
	_, _ = io.Copy(io.Discard, os.Stdin)
	var ru syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &ru); err != nil {
		return err
	}
	fmt.Println(ru.Utime.Nano() + ru.Stime.Nano())
	return e.Close()
}

// sinkTB is a testing.TB for newArena in the sink.
type sinkTB struct{ testing.TB }

func (*sinkTB) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
func (*sinkTB) Cleanup(func())                    {}

// startSink starts the other process and returns the Desc of its memory. stop
// ends it and returns the CPU time it took.
func startSink(tb testing.TB) (_ rdma.Desc, stop func() time.Duration, _ *os.Process) {
	tb.Helper()
	exe, err := os.Executable()
	if err != nil {
		tb.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), sinkEnv+"=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		tb.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		tb.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	if !lines.Scan() {
		tb.Fatal("the sink printed no address")
	}
	raw, err := base64.StdEncoding.DecodeString(lines.Text())
	if err != nil {
		tb.Fatal(err)
	}
	var d rdma.Desc
	if err := d.UnmarshalBinary(raw); err != nil {
		tb.Fatal(err)
	}
	stopped := false
	var cpu time.Duration
	stop = func() time.Duration {
		if stopped {
			return cpu
		}
		stopped = true
		_ = in.Close()
		for lines.Scan() {
			if n, err := strconv.ParseInt(lines.Text(), 10, 64); err == nil {
				cpu = time.Duration(n)
			}
		}
		_ = cmd.Wait()
		return cpu
	}
	tb.Cleanup(func() { stop() })
	return d, stop, cmd.Process
}

// flow writes blocks of one size to a sink with a fixed number in flight.
type flow struct {
	e    *Engine
	src  rdma.Region
	dst  rdma.Desc
	size uint64
	// page, if not zero, makes each block a paged write of pages of that size,
	// in reverse order, so that no two neighbours merge.
	page  uint64
	depth int
	slots chan struct{}
	fails atomic.Int64
	done  func(error)
	next  uint64
	a, b  []uint32
	gib   float64 // set by measure
}

// newFlow connects an engine of its own to the sink.
func newFlow(tb testing.TB, dst rdma.Desc, conns int, size, page uint64, depth int, zeroCopy bool) *flow {
	tb.Helper()
	e, err := New(context.Background(), Options{Conns: conns, ZeroCopy: zeroCopy})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = e.Close() })
	return flowOf(tb, e, dst, size, page, depth)
}

// flowOf connects an engine to the sink.
func flowOf(tb testing.TB, e *Engine, dst rdma.Desc, size, page uint64, depth int) *flow {
	tb.Helper()
	if _, err := e.Connect(context.Background(), dst.Addr(), rdma.Token(testToken)); err != nil {
		tb.Fatal(err)
	}
	src, err := e.Register(newArena(tb, arenaBytes), rdma.RegisterOptions{Local: true})
	if err != nil {
		tb.Fatal(err)
	}
	f := &flow{e: e, src: src, dst: dst, size: size, page: page, depth: depth, slots: make(chan struct{}, depth)}
	f.done = func(err error) {
		if err != nil {
			f.fails.Add(1)
		}
		<-f.slots
	}
	return f
}

// one submits one block when a slot is free.
func (f *flow) one(ctx context.Context) error {
	f.slots <- struct{}{}
	off := f.next
	if f.next += f.size; f.next+f.size > arenaBytes {
		f.next = 0
	}
	if f.page == 0 {
		return f.e.Write(ctx, rdma.Write{Src: f.src, SrcOffset: off, Dst: f.dst, DstOffset: off, Len: f.size, Done: f.done})
	}
	if f.a == nil {
		for i := range uint32(f.size / f.page) {
			f.a = append(f.a, i)
			f.b = append(f.b, uint32(f.size/f.page)-1-i)
		}
	}
	return f.e.WritePaged(ctx, rdma.PagedWrite{
		PageLen: f.page, Src: f.src, SrcPages: rdma.Pages{Indices: f.a, Stride: f.page, Offset: off},
		Dst: f.dst, DstPages: rdma.Pages{Indices: f.b, Stride: f.page, Offset: off}, Done: f.done,
	})
}

// drain waits for the blocks in flight.
func (f *flow) drain(tb testing.TB) {
	for range f.depth {
		f.slots <- struct{}{}
	}
	for range f.depth {
		<-f.slots
	}
	if n := f.fails.Load(); n > 0 {
		tb.Fatalf("%d writes failed", n)
	}
}

// BenchmarkWrite measures the rate of single writes.
func BenchmarkWrite(b *testing.B) {
	for _, bm := range []struct {
		size  uint64
		conns int
		depth int
	}{
		{1 << 10, 4, 64}, {64 << 10, 4, 16}, {256 << 10, 4, 8}, {1 << 20, 1, 4}, {1 << 20, 4, 4}, {4 << 20, 1, 4}, {4 << 20, 4, 1}, {4 << 20, 4, 4}, {32 << 20, 4, 2},
	} {
		b.Run(fmt.Sprintf("size=%dKiB/conns=%d/depth=%d", bm.size>>10, bm.conns, bm.depth), func(b *testing.B) {
			runFlow(b, bm.conns, bm.size, 0, bm.depth)
		})
	}
}

// BenchmarkWritePaged measures the rate of paged writes of 1 MiB.
func BenchmarkWritePaged(b *testing.B) {
	for _, page := range []uint64{1 << 10, 16 << 10, 64 << 10} {
		b.Run(fmt.Sprintf("page=%dKiB", page>>10), func(b *testing.B) { runFlow(b, 4, 1<<20, page, 4) })
	}
}

// runFlow runs one benchmark.
func runFlow(b *testing.B, conns int, size, page uint64, depth int) {
	dst, stop, _ := startSink(b)
	f := newFlow(b, dst, conns, size, page, depth, false)
	b.SetBytes(int64(size))
	b.ReportAllocs()
	for b.Loop() {
		if err := f.one(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
	f.drain(b)
	stop()
}

// sample is one measurement: GiB per second, and CPU in ms per GiB.
type sample struct{ rate, cpu float64 }

// cpuTime returns the CPU time of this process.
func cpuTime(tb testing.TB) time.Duration {
	var ru syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &ru); err != nil {
		tb.Fatal(err)
	}
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}

// measure runs the flow for about d. The sample's CPU is that of this process alone.
func (f *flow) measure(tb testing.TB, d time.Duration) sample {
	start, cpu, n := time.Now(), cpuTime(tb), uint64(0)
	for time.Since(start) < d {
		if err := f.one(context.Background()); err != nil {
			tb.Fatal(err)
		}
		n++
	}
	f.drain(tb)
	gib := float64(n*f.size) / (1 << 30)
	f.gib += gib
	return sample{gib / time.Since(start).Seconds(), (cpuTime(tb) - cpu).Seconds() * 1e3 / gib}
}

// iperf runs iperf3 with the same connections and block size for a whole number of seconds. The
// sample's CPU is that of both sides.
func iperf(tb testing.TB, conns int, size uint64, d time.Duration, port int) sample {
	tb.Helper()
	server := exec.Command("iperf3", "-s", "-1", "-p", strconv.Itoa(port), "-B", "127.0.0.1", "--forceflush")
	out, err := server.StdoutPipe()
	if err != nil {
		tb.Fatal(err)
	}
	if err := server.Start(); err != nil {
		tb.Fatal(err)
	}
	defer func() { _ = server.Process.Kill(); _ = server.Wait() }()
	lines := bufio.NewScanner(out)
	for lines.Scan() && !strings.Contains(lines.Text(), "listening") {
	}
	go func() { _, _ = io.Copy(io.Discard, out) }()
	raw, err := exec.Command("iperf3", "-c", "127.0.0.1", "-p", strconv.Itoa(port), "-P", strconv.Itoa(conns),
		"-C", "cubic", "-l", strconv.FormatUint(min(size, 1<<20), 10), "-t", strconv.Itoa(int(d.Seconds())), "-J").Output()
	if err != nil {
		tb.Fatalf("iperf3: %v: %s", err, raw)
	}
	var r struct {
		End struct {
			Sum struct {
				Bytes   float64 `json:"bytes"`
				Seconds float64 `json:"seconds"`
			} `json:"sum_received"`
			CPU struct {
				Host   float64 `json:"host_total"`
				Remote float64 `json:"remote_total"`
			} `json:"cpu_utilization_percent"`
		}
	}
	if err := json.Unmarshal(raw, &r); err != nil {
		tb.Fatal(err)
	}
	gib, seconds := r.End.Sum.Bytes/(1<<30), r.End.Sum.Seconds
	return sample{gib / seconds, (r.End.CPU.Host + r.End.CPU.Remote) * 10 * seconds / gib}
}

// BenchmarkAgainstIperf3 alternates writes of this engine and iperf3 with the same number of
// connections. It reports the medians of the ratios of adjacent runs and of the CPU time of
// both sides per GiB.
func BenchmarkAgainstIperf3(b *testing.B) {
	if _, err := exec.LookPath("iperf3"); err != nil {
		b.Skip("iperf3 is not installed: apt-get install iperf3")
	}
	const round = time.Second
	for i, bm := range []struct {
		size     uint64
		conns    int
		zeroCopy bool
	}{{1 << 20, 1, false}, {1 << 20, 4, false}, {4 << 20, 1, false}, {4 << 20, 4, false}, {1 << 20, 1, true}, {1 << 20, 4, true}, {4 << 20, 1, true}, {4 << 20, 4, true}} {
		b.Run(fmt.Sprintf("size=%dMiB/conns=%d/zerocopy=%v", bm.size>>20, bm.conns, bm.zeroCopy), func(b *testing.B) {
			dst, stop, _ := startSink(b)
			f := newFlow(b, dst, bm.conns, bm.size, 0, 4, bm.zeroCopy)
			f.measure(b, round/4)
			var ratios, ours, theirs, ourCPU, theirCPU []float64
			for b.Loop() {
				x, y := iperf(b, bm.conns, bm.size, round, 29400+i), f.measure(b, round)
				ratios = append(ratios, y.rate/x.rate)
				ours, theirs = append(ours, y.rate), append(theirs, x.rate)
				ourCPU, theirCPU = append(ourCPU, y.cpu), append(theirCPU, x.cpu)
			}
			sink := stop().Seconds() * 1e3 / f.gib
			b.ReportMetric(median(ratios), "of-iperf3")
			b.ReportMetric(median(ours), "GiB/s")
			b.ReportMetric(median(theirs), "iperf3-GiB/s")
			b.ReportMetric(median(ourCPU)+sink, "cpu-ms/GiB")
			b.ReportMetric(median(theirCPU), "iperf3-cpu-ms/GiB")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// median returns the middle value.
func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}
