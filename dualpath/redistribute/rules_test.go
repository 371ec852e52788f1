package redistribute

import (
	"testing"

	"pgregory.net/rapid"
)

// TestRuleOfThumb: if a rule is sure, Decide gives the same result, on every fabric and for every
// cost of a token in the paper.
func TestRuleOfThumb(t *testing.T) {
	sure := 0
	rapid.Check(t, func(t *rapid.T) {
		m := anyModel(t)
		r := Request{
			Rows: rapid.IntRange(1, 1<<18).Draw(t, "rows"), Tokens: rapid.IntRange(8, 1<<16).Draw(t, "tokens"),
			Reuse: rapid.SampledFrom([]Reuse{Moved, Prefix, Selected}).Draw(t, "reuse"), Holders: 1,
			Steps: rapid.SampledFrom([]int{1, 1, 1, 30, 100}).Draw(t, "steps"), Trips: rapid.SampledFrom([]int{1, 1, 27}).Draw(t, "trips"),
			Requesters: rapid.IntRange(1, 16).Draw(t, "requesters"), NoRoute: rapid.Bool().Draw(t, "no route"),
		}
		switch rapid.IntRange(0, 3).Draw(t, "also ruled out") {
		case 1:
			r.NoFetch = true
		case 2:
			r.NoLocal = true
		}
		if rapid.Bool().Draw(t, "small") {
			r.Rows, r.Tokens = 1+r.Rows%DecodeRows, 8+r.Tokens%4096
		}
		if r.Reuse == Selected {
			r.Holders = rapid.IntRange(1, 8).Draw(t, "holders")
			m.Gather = rapid.SampledFrom([]Gather{{}, PrototypeGather()}).Draw(t, "gather")
		}
		rule := r.RuleOfThumb()
		if rule.Why == "" || (rule.Primitive == Route && r.NoRoute) || (rule.Primitive == Fetch && r.NoFetch) || (rule.Primitive == Local && r.NoLocal) {
			t.Fatalf("%+v: %+v", r, rule)
		}
		if !rule.Sure {
			return
		}
		sure++
		if d := decide(t, m, r); d.Winner != rule.Primitive {
			t.Fatalf("%+v: the rule %+v, the predicate %v: %+v", r, rule, d.Winner, d.Costs)
		}
	})
	if sure == 0 {
		t.Error("no rule gave a result")
	}
}

// TestRules55 checks each rule of section 5.5 as printed.
func TestRules55(t *testing.T) {
	for _, c := range []struct {
		r    Request
		want Primitive
	}{
		{Request{Rows: 256, Tokens: 2048}, Route},
		{Request{Rows: 256, Tokens: 2048, Steps: 500}, Fetch},
		{Request{Rows: 256, Tokens: 50, NoRoute: true}, Local},
		{Request{Rows: 256, Tokens: 2048, NoRoute: true}, Fetch},
		{Request{Rows: 200_000, Tokens: 2048}, Fetch},
		{Request{Rows: 200_000, Tokens: 50}, Local},
		{Request{Rows: 64, Tokens: 2048, Reuse: Selected, Holders: 7, Steps: 500}, Route},
	} {
		if got := c.r.RuleOfThumb(); got.Primitive != c.want {
			t.Errorf("%+v: %+v, want %v", c.r, got, c.want)
		}
	}
}
