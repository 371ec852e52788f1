package top

import (
	"encoding/json"
	"time"
)

// A Value is a number, or unknown. Its zero value is unknown.
type Value struct {
	Of    float64
	Known bool
}

// Known returns a known value.
func Known(of float64) Value { return Value{Of: of, Known: true} }

// Plus returns the sum of two values. An unknown value counts as 0, unless both are unknown.
func (v Value) Plus(w Value) Value {
	return Value{Of: v.Of + w.Of, Known: v.Known || w.Known}
}

// Over returns the quotient v/w. It is unknown if w is 0 or one of both is unknown.
func (v Value) Over(w Value) Value {
	if !v.Known || !w.Known || w.Of == 0 {
		return Value{}
	}
	return Known(v.Of / w.Of)
}

// MarshalJSON implements json.Marshaler. An unknown value is null.
func (v Value) MarshalJSON() ([]byte, error) {
	if !v.Known {
		return []byte("null"), nil
	}
	return json.Marshal(v.Of)
}

// Rates are the growth of Counters per second.
type Rates struct {
	ReadBlocks    Value `json:"read_blocks_per_second"`
	ReadBytes     Value `json:"read_bytes_per_second"`
	WrittenBlocks Value `json:"written_blocks_per_second"`
	WrittenBytes  Value `json:"written_bytes_per_second"`
	QueriedTokens Value `json:"queried_tokens_per_second"`
	HitTokens     Value `json:"hit_tokens_per_second"`
	EvictedBlocks Value `json:"evicted_blocks_per_second"`
	EvictedBytes  Value `json:"evicted_bytes_per_second"`
	// HitRate is the share of the queried tokens that were found; unknown if none were queried.
	HitRate Value `json:"hit_rate"`
}

// plus returns the sum of two rates. The hit rate is that of both together.
func (r Rates) plus(o Rates) Rates {
	sum := Rates{
		ReadBlocks: r.ReadBlocks.Plus(o.ReadBlocks), ReadBytes: r.ReadBytes.Plus(o.ReadBytes),
		WrittenBlocks: r.WrittenBlocks.Plus(o.WrittenBlocks), WrittenBytes: r.WrittenBytes.Plus(o.WrittenBytes),
		QueriedTokens: r.QueriedTokens.Plus(o.QueriedTokens), HitTokens: r.HitTokens.Plus(o.HitTokens),
		EvictedBlocks: r.EvictedBlocks.Plus(o.EvictedBlocks), EvictedBytes: r.EvictedBytes.Plus(o.EvictedBytes),
	}
	sum.HitRate = sum.HitTokens.Over(sum.QueriedTokens)
	return sum
}

// span is the time between two samples of one node. Its zero value means that the samples cannot be
// compared.
type span time.Duration

// shortestSpan is the shortest time from which a rate is computed. A node that was stopped for some
// time may answer two calls at once.
const shortestSpan = 10 * time.Millisecond

// rate returns the growth of a counter per second.
func (s span) rate(before, after uint64) Value {
	if s == 0 || after < before {
		return Value{}
	}
	return Known(float64(after-before) / time.Duration(s).Seconds())
}

// rates returns the growth of counters per second.
func (s span) rates(before, after *Counters) Rates {
	if s == 0 || before == nil || after == nil {
		return Rates{}
	}
	r := Rates{
		ReadBlocks: s.rate(before.ReadBlocks, after.ReadBlocks), ReadBytes: s.rate(before.ReadBytes, after.ReadBytes),
		WrittenBlocks: s.rate(before.WrittenBlocks, after.WrittenBlocks), WrittenBytes: s.rate(before.WrittenBytes, after.WrittenBytes),
		QueriedTokens: s.rate(before.QueriedTokens, after.QueriedTokens), HitTokens: s.rate(before.HitTokens, after.HitTokens),
		EvictedBlocks: s.rate(before.EvictedBlocks, after.EvictedBlocks), EvictedBytes: s.rate(before.EvictedBytes, after.EvictedBytes),
	}
	r.HitRate = r.HitTokens.Over(r.QueriedTokens)
	return r
}
