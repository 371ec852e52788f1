//go:build uring

package uring

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/io/blockio"
)

// BenchmarkBudget compares the adaptive budget with fixed ones while four goroutines read or write
// 4 MiB each, alone or beside two goroutines that use up the CPUs, in turns of half a second on one
// file. It reports the medians of the ratio of the rates, fixed over adaptive, and the limit of the
// adaptive budget.
func BenchmarkBudget(b *testing.B) {
	const size, clients = 4 << 20, 4
	requireRings(b)
	a, dir := written(b)
	for _, c := range []struct {
		op   blockio.Op
		busy int
	}{{blockio.Read, 0}, {blockio.Write, 0}, {blockio.Read, 2}, {blockio.Write, 2}} {
		b.Run(fmt.Sprintf("%v/busy=%d", c.op, c.busy), func(b *testing.B) {
			defer keepBusy(c.busy)()
			var lanes []*budgetLane
			for _, limit := range []int64{0, 4 << 20, 8 << 20, 12 << 20, 16 << 20} {
				d, err := Open(dir, Options{Budget: blockio.BudgetOptions{MinBytes: limit, MaxBytes: limit}, Regions: [][]byte{a.Bytes()}})
				if err != nil {
					b.Fatal(err)
				}
				defer d.Close()
				f, err := d.Open("data")
				if err != nil {
					b.Fatal(err)
				}
				lanes = append(lanes, &budgetLane{limit: limit, device: d, file: f})
			}
			for b.Loop() {
				for _, l := range lanes {
					l.turn(b, c.op, a.Bytes(), size, clients, 500*time.Millisecond)
				}
			}
			adaptive := lanes[0]
			slices.Sort(adaptive.limits)
			b.ReportMetric(float64(adaptive.limits[len(adaptive.limits)/2])/(1<<20), "limit-MiB")
			b.ReportMetric(medianOf(adaptive.rates)/(1<<30), "GiB/s")
			for _, l := range lanes[1:] {
				ratios := make([]float64, len(l.rates))
				for i, r := range l.rates {
					ratios[i] = r / adaptive.rates[i]
				}
				b.ReportMetric(medianOf(ratios), fmt.Sprintf("%dMiB/adaptive", l.limit>>20))
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

// budgetLane is one device of BenchmarkBudget.
type budgetLane struct {
	limit  int64
	device blockio.Device
	file   blockio.File
	rates  []float64 // bytes per second, by turn
	limits []int64   // the limit at the end of each turn
}

// turn keeps the given number of clients busy for about the time long.
func (l *budgetLane) turn(b *testing.B, op blockio.Op, mem []byte, size int64, clients int, long time.Duration) {
	var wg sync.WaitGroup
	counts := make([]int64, clients)
	start := time.Now()
	for c := range clients {
		wg.Go(func() {
			batch := []blockio.Request{{Op: op, File: l.file, Bufs: [][]byte{mem[int64(c)*size:][:size]}}}
			for time.Since(start) < long {
				batch[0].Offset = rand.Int64N(benchFileBytes/size) * size
				if err := l.device.Do(context.Background(), batch); err != nil || batch[0].Err != nil {
					b.Error(err, batch[0].Err)
					return
				}
				counts[c]++
			}
		})
	}
	wg.Wait()
	var n int64
	for _, c := range counts {
		n += c
	}
	l.rates = append(l.rates, float64(n*size)/time.Since(start).Seconds())
	l.limits = append(l.limits, l.device.Stats().InFlightLimitBytes)
}

func medianOf(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}
