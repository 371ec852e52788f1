package main

import (
	"strings"
	"testing"
)

// TestNegativeNumbers: a negative number is refused with its flag's name. It would otherwise mean
// no limit, or no work.
func TestNegativeNumbers(t *testing.T) {
	for _, args := range [][]string{
		{"status", "--timeout", "-5s"},
		{"scrub", "--timeout", "-1ns"},
		{"prefix", "match", "m", "--tokens-file", "x", "--timeout=-1h"},
		{"nic", "check", "--rate", "-100"},
		{"nic", "check", "--rate", "NaN"},
		{"nic", "check", "--interval", "-1s"},
		{"demo", "--rate", "-200"},
		{"events", "--count", "-1"},
		{"block", "list", "m", "--limit", "-1"},
		{"pin", "m", "--tokens-file", "x", "--ttl", "-1s"},
		{"bench", "index", "--rounds", "-1"},
		{"bench", "index", "--seconds", "-0.5"},
		{"trace", "replay", "x", "--concurrency", "-2"},
	} {
		r := penstock(t, "", nil, args...)
		if r.code != exitUsage || !strings.Contains(r.err, "must not be negative") {
			t.Errorf("%v: exit %d, %q", args, r.code, r.err)
		}
	}
	for _, args := range [][]string{{"scrub", "--rate", "-5MiB"}, {"evict", "--bytes", "-1"}} {
		if r := penstock(t, "", nil, args...); r.code != exitUsage || !strings.Contains(r.err, "not a size") {
			t.Errorf("%v: exit %d, %q", args, r.code, r.err)
		}
	}
}
