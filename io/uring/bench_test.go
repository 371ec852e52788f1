//go:build uring

package uring

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/pawelgaczynski/giouring"
	"golang.org/x/sys/unix"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/io/blockiotest"
	"github.com/penstock-kv/penstock/io/posixio"
)

// BenchmarkRead reads at random from a file of 1 GiB that was written before, with O_DIRECT into
// huge pages, with a given number of requests in flight: as one batch, or from as many goroutines.
// It reports the CPU time of this process and the bandwidth. The figures of docs/benchmarks.md
// compare backends within one run only.
func BenchmarkRead(b *testing.B) { benchmark(b, blockio.Read) }

// BenchmarkWrite is the same for writes.
func BenchmarkWrite(b *testing.B) { benchmark(b, blockio.Write) }

const benchFileBytes = 1 << 30

func benchmark(b *testing.B, op blockio.Op) {
	requireRings(b)
	a, dir := written(b)
	// All variants have the same depth: the budget never limits.
	fixed := blockio.BudgetOptions{MinBytes: 1 << 30, MaxBytes: 1 << 30}
	regions := [][]byte{a.Bytes()}
	for _, shape := range []struct{ size, depth int }{{64 << 10, 16}, {1 << 20, 8}, {4 << 20, 4}, {4 << 20, 1}} {
		for _, clients := range []bool{false, true} {
			if clients && shape.depth == 1 {
				continue
			}
			for _, e := range []struct {
				name string
				open func() (blockio.Device, error)
			}{
				{"posix", func() (blockio.Device, error) { return posixio.Open(dir, posixio.Options{Budget: fixed}) }},
				{"caller", func() (blockio.Device, error) { return Open(dir, Options{Budget: fixed}) }},
				{"caller+fixed", func() (blockio.Device, error) { return Open(dir, Options{Budget: fixed, Regions: regions}) }},
				{"shared", func() (blockio.Device, error) { return Open(dir, Options{Budget: fixed, Wait: WaitShared}) }},
				{"auto+fixed", func() (blockio.Device, error) {
					return Open(dir, Options{Budget: fixed, Wait: WaitAuto, Regions: regions})
				}},
				{"shared+fixed", func() (blockio.Device, error) {
					return Open(dir, Options{Budget: fixed, Wait: WaitShared, Regions: regions})
				}},
			} {
				as := "batch"
				if clients {
					as = "clients"
				}
				b.Run(fmt.Sprintf("%dK/qd%d/%s/%s", shape.size>>10, shape.depth, as, e.name), func(b *testing.B) {
					d, err := e.open()
					if err != nil {
						b.Fatal(err)
					}
					defer d.Close()
					f, err := d.Open("data")
					if err != nil {
						b.Fatal(err)
					}
					batch := make([]blockio.Request, shape.depth)
					for i := range batch {
						batch[i] = blockio.Request{Op: op, File: f, Bufs: [][]byte{a.Bytes()[i*shape.size:][:shape.size]}}
					}
					b.SetBytes(int64(shape.size))
					before := cpuSeconds(b)
					if clients {
						runClients(b, d, batch)
					} else {
						runBatches(b, d, batch)
					}
					cpu := cpuSeconds(b) - before
					gib := float64(b.N) * float64(shape.size) / (1 << 30)
					b.ReportMetric(cpu*1e3/gib, "cpu-ms/GiB")
				})
			}
		}
	}
}

// written returns an arena, and a directory with the file, all of which is written, so that no
// benchmark includes the cost of first writes.
func written(b *testing.B) (*arena.Arena, string) {
	b.Helper()
	a, err := arena.New(arena.Options{SizeBytes: 64 << 20})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { a.Close() })
	mem, dir := a.Bytes(), b.TempDir()
	d, err := posixio.Open(dir, posixio.Options{})
	if err != nil {
		b.Fatal(err)
	}
	defer d.Close()
	f := blockiotest.Create(b, d, "data", benchFileBytes)
	for i := range mem {
		mem[i] = byte(i * 7)
	}
	for off := int64(0); off < benchFileBytes; off += int64(len(mem)) {
		if err := blockiotest.One(b, d, blockio.Write, f, off, mem); err != nil {
			b.Fatal(err)
		}
	}
	return a, dir
}

// runBatches performs b.N requests, len(batch) at a time.
func runBatches(b *testing.B, d blockio.Device, batch []blockio.Request) {
	for done := 0; done < b.N; done += len(batch) {
		part := batch[:min(len(batch), b.N-done)]
		for i := range part {
			part[i].Offset = randomOffset(len(part[i].Bufs[0]))
		}
		perform(b, d, part)
	}
}

// runClients performs b.N requests, one at a time in each of len(batch) goroutines.
func runClients(b *testing.B, d blockio.Device, batch []blockio.Request) {
	var wg sync.WaitGroup
	var next atomic.Int64
	for i := range batch {
		wg.Go(func() {
			for next.Add(1) <= int64(b.N) {
				batch[i].Offset = randomOffset(len(batch[i].Bufs[0]))
				perform(b, d, batch[i:i+1])
			}
		})
	}
	wg.Wait()
}

func perform(b *testing.B, d blockio.Device, batch []blockio.Request) {
	if err := d.Do(context.Background(), batch); err != nil {
		b.Error(err)
	}
	for i := range batch {
		if batch[i].Err != nil {
			b.Error(batch[i].Err)
		}
	}
}

func randomOffset(size int) int64 {
	return rand.Int64N(benchFileBytes/int64(size)) * int64(size)
}

// cpuSeconds returns the CPU time of this process, user and system.
func cpuSeconds(b *testing.B) float64 {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

// BenchmarkBusy reads 4 MiB from each of 4 goroutines while two others use up the CPUs. It measures
// the cost of a wait through the scheduler on busy CPUs.
func BenchmarkBusy(b *testing.B) {
	requireRings(b)
	a, dir := written(b)
	fixed := blockio.BudgetOptions{MinBytes: 1 << 30, MaxBytes: 1 << 30}
	for name, open := range map[string]func() (blockio.Device, error){
		"posix":  func() (blockio.Device, error) { return posixio.Open(dir, posixio.Options{Budget: fixed}) },
		"caller": func() (blockio.Device, error) { return Open(dir, Options{Budget: fixed}) },
		"shared": func() (blockio.Device, error) { return Open(dir, Options{Budget: fixed, Wait: WaitShared}) },
	} {
		b.Run(name, func(b *testing.B) {
			d, err := open()
			if err != nil {
				b.Fatal(err)
			}
			defer d.Close()
			f, err := d.Open("data")
			if err != nil {
				b.Fatal(err)
			}
			stop := keepBusy(runtime.GOMAXPROCS(0))
			batch := make([]blockio.Request, 4)
			for i := range batch {
				batch[i] = blockio.Request{Op: blockio.Read, File: f, Bufs: [][]byte{a.Bytes()[i<<22:][:4<<20]}}
			}
			b.SetBytes(4 << 20)
			b.ResetTimer()
			runClients(b, d, batch)
			b.StopTimer()
			stop()
		})
	}
}

// keepBusy runs n goroutines that use up the CPUs until stop is called.
func keepBusy(n int) (stop func()) {
	var stopped atomic.Bool
	var busy sync.WaitGroup
	for range n {
		busy.Go(func() {
			for n := 0; !stopped.Load(); n++ {
				_ = n
			}
		})
	}
	return func() {
		stopped.Store(true)
		busy.Wait()
	}
}

// BenchmarkRegisteredFile measures 16 reads of 64 KiB on a bare ring, through a descriptor and
// through a registered file. The difference is the gain of a registration.
func BenchmarkRegisteredFile(b *testing.B) {
	requireRings(b)
	a, dir := written(b)
	fd, err := unix.Open(dir+"/data", unix.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { unix.Close(fd) })
	for _, registered := range []bool{false, true} {
		b.Run(fmt.Sprintf("registered=%t", registered), func(b *testing.B) {
			r, err := newRing(16)
			if err != nil {
				b.Fatal(err)
			}
			defer r.close()
			if err := errors.Join(r.registerFiles([]int32{int32(fd)}), r.registerBuffers([][]byte{a.Bytes()})); err != nil {
				b.Fatal(err)
			}
			const size, depth = 64 << 10, 16
			b.SetBytes(size * depth)
			before := cpuSeconds(b)
			for b.Loop() {
				for i := range depth {
					e := r.next()
					buf := a.Bytes()[i*size:][:size]
					if registered {
						prepareSpan(e, false, 0, buf, randomOffset(size), 0)
						e.Flags |= giouring.SqeFixedFile
					} else {
						prepareSpan(e, false, fd, buf, randomOffset(size), 0)
					}
				}
				for done := uint32(0); done < depth; {
					if err := r.enter(depth - done); err != nil {
						b.Fatal(err)
					}
					done += r.reap(func(_ uint64, res int32) {
						if res != size {
							b.Fatalf("result %d", res)
						}
					})
				}
			}
			b.ReportMetric((cpuSeconds(b)-before)*1e3/(float64(b.N)*size*depth/(1<<30)), "cpu-ms/GiB")
		})
	}
}
