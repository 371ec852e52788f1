package copier

import (
	"fmt"
	"testing"
	"time"
)

// BenchmarkSubmit measures the time that Submit takes per span, and the time of the whole
// batch, for spans of 4 KiB. DualPath, section 5.2: cudaMemcpyAsync 5 to 7 µs, an RDMA write
// about 1 µs, less with doorbell batching.
func BenchmarkSubmit(b *testing.B) {
	for _, i := range implementations()[:3] {
		for _, count := range []int{1, 16, 256} {
			b.Run(i.name+"/"+sizeName(count), func(b *testing.B) { benchmarkSubmit(b, i.open(b), count) })
		}
	}
}

// sizeName names a batch of count spans.
func sizeName(count int) string { return fmt.Sprintf("spans=%d", count) }

func benchmarkSubmit(b *testing.B, c Copier, count int) {
	const page = 4096
	src, dst := make([]byte, count*page), make([]byte, count*page)
	from, to := register(b, c, src), register(b, c, dst)
	spans := make([]Span, count)
	for i := range spans {
		spans[i] = Span{Src: uint64(i) * page, Dst: uint64(i) * page, Len: page}
	}
	ended := make(chan error, 1)
	batch := Batch{Src: from, Dst: to, Spans: spans, Done: func(err error) { ended <- err }}
	var inSubmit clock
	b.SetBytes(int64(count * page))
	b.ReportAllocs()
	for b.Loop() {
		inSubmit.start()
		err := c.Submit(b.Context(), batch)
		inSubmit.stop()
		if err != nil {
			b.Fatal(err)
		}
		if err := <-ended; err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(inSubmit.total.Nanoseconds())/float64(b.N*count), "submit-ns/span")
}

// clock sums intervals.
type clock struct {
	begin time.Time
	total time.Duration
}

func (c *clock) start() { c.begin = time.Now() }

func (c *clock) stop() { c.total += time.Since(c.begin) }
