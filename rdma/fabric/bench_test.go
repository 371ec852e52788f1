//go:build fabric && cgo && linux

package fabric

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/group"
)

// benchSizes are rows of fabric-lib's Table 2 and sizes between them.
var benchSizes = []int{1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20}

// benchBytes is the number of bytes of one round, within benchOps operations.
const (
	benchBytes = 256 << 20
	benchOps   = 1 << 14
	benchDepth = 64 // writes in flight
)

// rounds returns the number of writes of a size in one round, and the number in flight.
func rounds(size int) (count, depth int) {
	count = max(16, min(benchBytes/size, benchOps))
	return count, max(1, min(benchDepth, (32<<20)/size))
}

// BenchmarkWrite compares writes of this engine into another process with the same writes by
// direct calls of the provider (testdata/peak.c), in alternation. of-peak is the ratio of the
// best rounds of each, because other load on the machine can only lower a rate.
func BenchmarkWrite(b *testing.B) {
	peak := startPeak(b)
	ours := startOurs(b)
	for _, size := range benchSizes {
		for _, paged := range []bool{false, true} {
			if paged && size > 64<<10 {
				continue // fabric-lib's pages are 1 to 64 KiB
			}
			name := map[bool]string{false: "single", true: "paged"}[paged]
			b.Run(fmt.Sprintf("%s/%dKiB", name, size>>10), func(b *testing.B) {
				count, depth := rounds(size)
				peak.run(b, size, count/4, depth) // warm up
				ours.run(b, size, count/4, depth, paged)
				theirs, own := time.Duration(1<<62), time.Duration(1<<62)
				for b.Loop() {
					theirs = min(theirs, peak.run(b, size, count, depth))
					own = min(own, ours.run(b, size, count, depth, paged))
				}
				b.ReportMetric(theirs.Seconds()/own.Seconds(), "of-peak")
				b.ReportMetric(float64(count)*float64(size)/own.Seconds()/1e9, "GB/s")
			})
		}
	}
}

// envPeak names testdata/peak.c compiled, for a machine without gcc.
const envPeak = "PENSTOCK_FABRIC_PEAK"

// peak is the provider alone: two processes of testdata/peak.c.
type peak struct{ source *process }

func startPeak(b *testing.B) *peak {
	b.Helper()
	bin := os.Getenv(envPeak)
	if bin == "" {
		bin = filepath.Join(b.TempDir(), "peak")
		if out, err := exec.Command("gcc", "-O2", "-o", bin, "testdata/peak.c", "-lfabric").CombinedOutput(); err != nil {
			b.Fatalf("compile testdata/peak.c: %v\n%s", err, out)
		}
	}
	major, minor := libraryVersion()
	name := candidates(provider, major, minor)[0]
	target := start(b, exec.Command(bin, "target", name, loopback.Addr, fmt.Sprint(sinkBytes)))
	args := append([]string{"source", name, loopback.Addr, fmt.Sprint(sinkBytes)}, strings.Fields(target.line(b))...)
	return &peak{start(b, exec.Command(bin, args...))}
}

func (p *peak) run(b *testing.B, size, count, depth int) time.Duration {
	b.Helper()
	if _, err := fmt.Fprintln(p.source.in, size, count, depth); err != nil {
		b.Fatal(err)
	}
	var seconds float64
	if _, err := fmt.Sscan(p.source.line(b), &seconds); err != nil {
		b.Fatal(err)
	}
	return time.Duration(seconds * float64(time.Second))
}

// ours is an engine that writes to a sink.
type ours struct {
	e    rdma.Engine
	src  rdma.Region
	dst  rdma.Desc
	ends chan error
	one  func(error)
	idx  []uint32
}

func startOurs(b *testing.B) *ours {
	b.Helper()
	dst, _ := startSink(b)
	e := engineOver(b, 1, group.Options{InFlightBytes: 1 << 30}, false)
	b.Cleanup(func() {
		if err := e.Close(); err != nil {
			b.Error(err)
		}
	})
	if _, err := e.Connect(b.Context(), dst.Addr(), rdma.Token(childToken)); err != nil {
		b.Fatal(err)
	}
	// Memory that was never written is one page of zeroes, which is always in the cache.
	src, err := e.Register(slices.Repeat([]byte{1}, sinkBytes), rdma.RegisterOptions{Local: true})
	if err != nil {
		b.Fatal(err)
	}
	o := &ours{e: e, src: src, dst: dst, ends: make(chan error, benchDepth)}
	o.one = func(err error) { o.ends <- err }
	for i := range uint32(benchDepth) {
		o.idx = append(o.idx, i*2) // no two are adjacent and would be merged
	}
	return o
}

// run submits count writes of size, depth in flight. With paged, in operations of depth pages,
// two of them in flight.
func (o *ours) run(b *testing.B, size, count, depth int, paged bool) time.Duration {
	b.Helper()
	ctx := context.Background()
	places := sinkBytes / size
	ops, inFlight := count, depth
	if paged {
		ops, inFlight = count/depth, 2
	}
	begin := time.Now()
	for posted, done := 0, 0; done < ops; {
		for posted < ops && posted-done < inFlight {
			var err error
			if paged {
				p := rdma.Pages{Indices: o.idx[:depth], Stride: uint64(size)}
				err = o.e.WritePaged(ctx, rdma.PagedWrite{PageLen: uint64(size), Src: o.src, SrcPages: p, Dst: o.dst, DstPages: p, Done: o.one})
			} else {
				off := uint64(posted%places) * uint64(size)
				err = o.e.Write(ctx, rdma.Write{Src: o.src, SrcOffset: off, Dst: o.dst, DstOffset: off, Len: uint64(size), Done: o.one})
			}
			if err != nil {
				b.Fatal(err)
			}
			posted++
		}
		if err := <-o.ends; err != nil {
			b.Fatal(err)
		}
		done++
	}
	return time.Since(begin)
}
