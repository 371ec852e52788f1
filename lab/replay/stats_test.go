package replay

import (
	"testing"
	"time"
)

func TestLatencyIsByNearestRank(t *testing.T) {
	var all []time.Duration
	for i := 200; i > 0; i-- {
		all = append(all, time.Duration(i))
	}
	if got, want := latency(all), (Latency{Count: 200, P50: 100, P99: 198, Max: 200}); got != want {
		t.Errorf("of 1 to 200: %+v; want %+v", got, want)
	}
	if got, want := latency([]time.Duration{7}), (Latency{Count: 1, P50: 7, P99: 7, Max: 7}); got != want {
		t.Errorf("of one: %+v; want %+v", got, want)
	}
	if got := latency(nil); got != (Latency{}) {
		t.Errorf("of none: %+v", got)
	}
}

func TestResultPrintsItsCounts(t *testing.T) {
	r := Result{
		Requests: 2, AskedTokens: 128, HitTokens: 64, IdealTokens: 96, ReadBytes: 1 << 20, WrittenBytes: 3 << 20, Elapsed: 2 * time.Second,
		StoredBlocks: 3, RefusedBlocks: map[string]int64{"full": 1, "busy": 2},
	}
	const want = "requests=2 asked_tokens=128 hit_tokens=64 ideal_tokens=96 read=1.0 MiB written=3.0 MiB stored=3 existed=0 lost=0 mismatched=0 refused=[busy=2 full=1]"
	if got := r.String(); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if r.HitRatio() != 0.5 || r.IdealRatio() != 0.75 || r.BytesPerSecond() != 2<<20 || (Result{}).HitRatio() != 0 {
		t.Errorf("ratios: %v %v %v", r.HitRatio(), r.IdealRatio(), r.BytesPerSecond())
	}
}
