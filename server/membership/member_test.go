package membership

import (
	"testing"
	"time"
)

// TestRecordSame: a change of the number of hot prefixes, which may change each second, is written seldom, and changes of NICs and
// of volumes' states at once.
func TestRecordSame(t *testing.T) {
	const ttl = 10 * time.Second
	record := func(change func(*NodeRecord)) NodeRecord {
		r := NodeRecord{Member: Member{Name: "a", State: Serving, CapacityBytes: 1000}, Details: Details{
			NICs: []NIC{{Name: "eth0", Up: true}}, Volumes: []Volume{{Path: "/v", State: "ok", CapacityBytes: 1000, UsedBytes: 100}}, HotPrefixes: 1,
		}}
		change(&r)
		return r
	}
	was := record(func(*NodeRecord) {})
	for name, c := range map[string]struct {
		change func(*NodeRecord)
		age    time.Duration
		same   bool
	}{
		"no change":              {func(*NodeRecord) {}, time.Hour, true},
		"hot prefixes soon":      {func(r *NodeRecord) { r.HotPrefixes = 16 }, 4*ttl - 1, true},
		"hot prefixes later":     {func(r *NodeRecord) { r.HotPrefixes = 0 }, 4 * ttl, false},
		"a NIC":                  {func(r *NodeRecord) { r.NICs[0].Up = false }, 0, false},
		"the state of a volume":  {func(r *NodeRecord) { r.Volumes[0].State = "failed" }, 0, false},
		"a reason, and some use": {func(r *NodeRecord) { r.Volumes[0].Reason, r.Volumes[0].UsedBytes = "EIO", 110 }, time.Hour, true},
		"more use":               {func(r *NodeRecord) { r.Volumes[0].UsedBytes = 111 }, 0, false},
		"the state of the node":  {func(r *NodeRecord) { r.State = Stopping }, 0, false},
	} {
		if got := record(c.change).same(was, c.age, ttl); got != c.same {
			t.Errorf("%s after %v: the same is %v", name, c.age, got)
		}
	}
}
