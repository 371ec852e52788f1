package posixio_test

import (
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/blockiotest"
	"github.com/penstock-kv/penstock/io/posixio"
)

// benchFilePages is the size of the file that benchmarks read: 512 MiB.
const benchFilePages = 512 << 20 / blockio.Align

// BenchmarkRead measures batches of one size at a given depth, and the same reads with bare preadv
// calls in as many goroutines. The ratio of the two is the cost of the device. CPU is reported in
// milliseconds per GiB.
func BenchmarkRead(b *testing.B) {
	mem, err := arena.New(arena.Options{SizeBytes: 64 << 20})
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := mem.Close(); err != nil {
			b.Error(err)
		}
	}()
	d := open(b, b.TempDir(), posixio.Options{})
	f := blockiotest.Create(b, d, "a", benchFilePages*blockio.Align)
	buf, err := mem.Alloc(b.Context(), 32<<20)
	if err != nil {
		b.Fatal(err)
	}
	defer buf.Release()
	written(b, d, f, buf.Bytes())
	for _, c := range []struct{ bytes, depth int }{{64 << 10, 16}, {1 << 20, 8}, {4 << 20, 4}, {4 << 20, 1}} {
		name := fmt.Sprintf("%dKiB-x%d", c.bytes>>10, c.depth)
		b.Run(name+"/device", func(b *testing.B) {
			batch := make([]blockio.Request, c.depth)
			measure(b, c.bytes*c.depth, func(round int) error {
				for i := range batch {
					batch[i] = blockio.Request{Op: blockio.Read, File: f, Offset: place(round*c.depth+i, c.bytes), Bufs: [][]byte{part(buf.Bytes(), i, c.bytes)}}
				}
				return d.Do(b.Context(), batch)
			})
		})
		b.Run(name+"/preadv", func(b *testing.B) {
			fd := f.(*posixio.File).FD()
			measure(b, c.bytes*c.depth, func(round int) error {
				var wg sync.WaitGroup
				for i := range c.depth {
					wg.Go(func() {
						if _, err := unix.Pread(fd, part(buf.Bytes(), i, c.bytes), place(round*c.depth+i, c.bytes)); err != nil {
							b.Error(err)
						}
					})
				}
				wg.Wait()
				return nil
			})
		})
	}
}

// BenchmarkReadRun reads sixteen adjacent pieces of 64 KiB, as the blocks of one sequence, into
// separate buffers.
func BenchmarkReadRun(b *testing.B) {
	d := open(b, b.TempDir(), posixio.Options{})
	f := blockiotest.Create(b, d, "a", 64<<20)
	mem, err := arena.New(arena.Options{SizeBytes: 4 << 20})
	if err != nil {
		b.Fatal(err)
	}
	defer mem.Close()
	const bytes, pieces = 64 << 10, 16
	written(b, d, f, mem.Bytes())
	batch := make([]blockio.Request, pieces)
	measure(b, bytes*pieces, func(round int) error {
		start := int64(round%64) << 20
		for i := range batch {
			batch[i] = blockio.Request{Op: blockio.Read, File: f, Offset: start + int64(i*bytes), Bufs: [][]byte{part(mem.Bytes(), 2*i, bytes)}}
		}
		return d.Do(b.Context(), batch)
	})
}

// written fills the file, because a read of unwritten space does not reach the disk.
func written(b *testing.B, d blockio.Device, f blockio.File, buf []byte) {
	b.Helper()
	for at := int64(0); at < f.Size(); at += int64(len(buf)) {
		batch := []blockio.Request{{Op: blockio.Write, File: f, Offset: at, Bufs: [][]byte{buf}}}
		if err := d.Do(b.Context(), batch); err != nil || batch[0].Err != nil {
			b.Fatal(err, batch[0].Err)
		}
	}
}

// place distributes reads over the file; each place is read once before any is read twice.
func place(i, bytes int) int64 {
	places := benchFilePages * blockio.Align / bytes
	return int64(i*7919%places) * int64(bytes)
}

func part(buf []byte, i, bytes int) []byte { return buf[i*bytes : (i+1)*bytes] }

func measure(b *testing.B, bytes int, do func(round int) error) {
	b.SetBytes(int64(bytes))
	before := cpu(b)
	round := 0
	for b.Loop() {
		if err := do(round); err != nil {
			b.Fatal(err)
		}
		round++
	}
	gib := float64(round) * float64(bytes) / (1 << 30)
	b.ReportMetric(float64((cpu(b)-before).Microseconds())/1000/gib, "cpu-ms/GiB")
}

// cpu returns the CPU time of this process.
func cpu(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkBudget reads 4 MiB pieces in eight goroutines: with the adaptive budget, and with one so
// large that everything is in flight. It reports the final limit, and the duration of an admitted
// read: by Little's law the bytes in flight divided by the throughput.
func BenchmarkBudget(b *testing.B) {
	for _, c := range []struct {
		name   string
		budget blockio.BudgetOptions
	}{
		{"adaptive", blockio.BudgetOptions{}},
		{"all-in-flight", blockio.BudgetOptions{MinBytes: 1 << 30, MaxBytes: 1 << 30}},
	} {
		b.Run(c.name, func(b *testing.B) {
			const bytes, clients = 4 << 20, 8
			d := open(b, b.TempDir(), posixio.Options{Budget: c.budget})
			f := blockiotest.Create(b, d, "a", benchFilePages*blockio.Align)
			mem, err := arena.New(arena.Options{SizeBytes: clients * bytes})
			if err != nil {
				b.Fatal(err)
			}
			defer mem.Close()
			written(b, d, f, mem.Bytes())
			measure(b, clients*bytes*8, func(round int) error {
				var wg sync.WaitGroup
				for w := range clients {
					wg.Go(func() {
						for i := range 8 {
							batch := []blockio.Request{{Op: blockio.Read, File: f, Offset: place(round*64+w*8+i, bytes), Bufs: [][]byte{part(mem.Bytes(), w, bytes)}}}
							if err := d.Do(b.Context(), batch); err != nil || batch[0].Err != nil {
								b.Error(err, batch[0].Err)
							}
						}
					})
				}
				wg.Wait()
				return nil
			})
			limit := min(d.Stats().InFlightLimitBytes, clients*bytes)
			perSecond := float64(b.N) * clients * bytes * 8 / b.Elapsed().Seconds()
			b.ReportMetric(float64(limit>>20), "limit-MiB")
			b.ReportMetric(float64(limit)/perSecond*1000, "in-device-ms")
		})
	}
}
