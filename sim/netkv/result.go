package netkv

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/penstock-kv/penstock/dualpath/netcost"
)

// Result has the measurements of one run.
type Result struct {
	// Requests is the number of measured requests.
	Requests int
	// TTFT, Transfer and TBT are means; P50, P95 and P99 are percentiles of the TTFT.
	TTFT, Transfer, TBT time.Duration
	P50, P95, P99       time.Duration
	// Times has the TTFTs, ascending.
	Times []time.Duration
	// SLO is the share of requests whose TTFT is within the objective. Goodput is the number of
	// these requests per second, Rate the number of all measured requests per second; both are
	// divided by the time from the first measured arrival to the last.
	SLO, Goodput, Rate float64
	// Tiers is the share of transfers by tier.
	Tiers [netcost.Tiers]float64
	// Hit is the share of the input tokens that the decode instances had cached, so that their KV
	// was not sent.
	Hit float64
	// Digest is equal for equal runs.
	Digest uint64
	// Events is the number of events of the run, Elapsed its virtual time.
	Events  uint64
	Elapsed time.Duration
}

// result computes the result of the run.
func (c *cluster) result() (*Result, error) {
	if c.unended > 0 || len(c.waiting) > 0 {
		return nil, fmt.Errorf("netkv: %d requests were never decoded, %d wait for room", c.unended, len(c.waiting))
	}
	measured := c.requests[c.o.Warmup:]
	res := &Result{Requests: len(measured), Digest: c.k.Digest(), Events: c.k.Fired(), Elapsed: c.k.Now()}
	n := float64(len(measured))
	var ttft, xfer, tbt, input, sent float64
	for _, r := range measured {
		ttft += r.ttft.Seconds()
		xfer += (r.landed - r.sent).Seconds()
		tbt += r.tbt.Seconds()
		res.Times = append(res.Times, r.ttft)
		res.Tiers[r.intent.Tier] += 1 / n
		input += float64(r.input)
		sent += r.intent.Bytes / float64(c.o.KVToken)
		if r.ttft <= c.o.SLO {
			res.SLO += 1 / n
		}
	}
	mean := func(sum float64) time.Duration { return time.Duration(sum / n * float64(time.Second)) }
	res.TTFT, res.Transfer, res.TBT = mean(ttft), mean(xfer), mean(tbt)
	res.Hit = 1 - sent/input
	slices.Sort(res.Times)
	res.P50, res.P95, res.P99 = percentile(res.Times, 0.50), percentile(res.Times, 0.95), percentile(res.Times, 0.99)
	if span := (measured[len(measured)-1].arrived - measured[0].arrived).Seconds(); span > 0 {
		res.Rate = n / span
		res.Goodput = res.Rate * res.SLO
	}
	return res, nil
}

// percentile returns the nearest-rank percentile of sorted times.
func percentile(sorted []time.Duration, q float64) time.Duration {
	return sorted[max(int(math.Ceil(q*float64(len(sorted))))-1, 0)]
}
