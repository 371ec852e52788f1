package emulate

import (
	"testing"
	"time"

	"github.com/penstock-kv/penstock/dualpath/batch"
)

func TestModel(t *testing.T) {
	m := Model{Layers: 10, Attention: batch.Model{PerToken: 1e-5, PerPair: 2e-9}, Linear: 1e-4, Base: time.Millisecond, PerRequest: time.Microsecond}
	m.EnsureDefaults()
	if err := m.Validate(); err != nil {
		t.Fatal(err)
	}
	// 400 tokens after 30,000: 28.16 ms of attention, 40 ms of the rest.
	if got := m.Layer([]batch.Item{{Cached: 30_000, Compute: 400}}); (got - 6816*time.Microsecond).Abs() > time.Microsecond {
		t.Errorf("a layer takes %v", got)
	}
	if got := m.DecodeStep(5); got != 1005*time.Microsecond {
		t.Errorf("a decode step takes %v", got)
	}
	big := batch.Item{Cached: 0, Compute: 100_000}
	small := batch.Item{Cached: 1000, Compute: 100}
	for _, tc := range []struct {
		queue      []batch.Item
		whole, cut int // requests in the batch
	}{{nil, 0, 0}, {[]batch.Item{big}, 1, 1}, {[]batch.Item{small, small, big, small}, 2, 3}, {[]batch.Item{small, small}, 2, 2}} {
		if got := m.take(tc.queue, false, nil); len(got) != tc.whole {
			t.Errorf("%v: a batch of %v, want %d requests", tc.queue, got, tc.whole)
		}
		got := m.take(tc.queue, true, nil)
		if len(got) != tc.cut {
			t.Errorf("%v: a batch of %v, want %d requests", tc.queue, got, tc.cut)
		}
		took := 0.0
		for _, c := range got {
			took += m.Attention.Seconds(tc.queue[c.Index].Cached, c.Compute)
		}
		if took > m.Quota.Seconds() {
			t.Errorf("%v: a batch of %v takes %v s of %v", tc.queue, got, took, m.Quota)
		}
	}
	m.Quota = time.Nanosecond
	if got := m.take([]batch.Item{big}, true, nil); len(got) != 1 || got[0].Compute != 1 {
		t.Errorf("a quota below a token: %v", got)
	}
	if (&Model{}).Validate() == nil {
		t.Error("a model without layers was accepted")
	}
}
