package trie

import (
	"errors"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/kv"
)

func TestPins(t *testing.T) {
	tr := openTest(t, Options{SlotBytes: func(kv.Geometry, int) int64 { return 10 }})
	defer closeTest(t, tr)
	ns := benchNamespace(t, tr)
	def := kv.Namespace{Name: "flat", Index: kv.IndexFlat, Geometry: kv.SingleGroup(61, 64, 656), Epoch: 1}
	flat, err := tr.Create(def)
	if err != nil {
		t.Fatal(err)
	}
	ids, keys := benchIDs(0)[:8], benchIDs(1)[:3]
	if _, err := tr.Put(nil, ns.ID, ns.Epoch, benchEntries(ids, 0), false); err != nil {
		t.Fatal(err)
	}
	entries := benchEntries(keys, 100)
	for i := range entries {
		entries[i].Parent = kv.BlockID{}
	}
	if _, err := tr.Put(nil, flat.ID, flat.Epoch, entries, false); err != nil {
		t.Fatal(err)
	}
	lease := func(ns kv.Namespace, ids []kv.BlockID, owner string, ttl time.Duration, now time.Time) LeaseID {
		m, err := tr.Match(ns.ID, ids, MatchOptions{Lease: true, TTL: ttl, Now: now, Owner: owner})
		if err != nil || m.Lease == 0 {
			t.Fatal(m, err)
		}
		return m.Lease
	}
	writer, err := tr.Hold(ns.ID, ns.Epoch, ids[3])
	if err != nil {
		t.Fatal(err)
	}
	long := lease(ns, ids, "a", 0, epoch0)
	short := lease(ns, ids[:3], "b", time.Minute, epoch0.Add(time.Second))
	other := lease(flat, keys, "c", 0, epoch0)
	want := map[LeaseID]Pin{
		long:  {Lease: long, Namespace: "bench", Epoch: 1, Owner: "a", Since: epoch0, Blocks: 8, Bytes: 80},
		short: {Lease: short, Namespace: "bench", Epoch: 1, Owner: "b", Since: epoch0.Add(time.Second), Expires: epoch0.Add(61 * time.Second), Blocks: 3, Bytes: 30},
		other: {Lease: other, Namespace: "flat", Epoch: 1, Owner: "c", Since: epoch0, Blocks: 3, Bytes: 30},
	}
	for _, c := range []struct {
		filter PinFilter
		want   []LeaseID
	}{
		{PinFilter{}, []LeaseID{long, short, other}},
		{PinFilter{Endless: true}, []LeaseID{long, other}},
		{PinFilter{Namespace: ns.ID}, []LeaseID{long, short}},
		{PinFilter{Namespace: ns.ID, Endless: true}, []LeaseID{long}},
	} {
		// The limit is 1, so that each call but the last returns a cursor.
		got := make(map[LeaseID]bool)
		for cursor, more := uint32(0), true; more; {
			var pins []Pin
			pins, cursor = tr.Pins(nil, c.filter, cursor, 1)
			for _, p := range pins {
				got[p.Lease] = true
				if w := want[p.Lease]; p.Owner != w.Owner || p.Namespace != w.Namespace || p.Epoch != w.Epoch || !p.Since.Equal(w.Since) ||
					!p.Expires.Equal(w.Expires) || p.Blocks != w.Blocks || p.Bytes != w.Bytes {
					t.Errorf("%+v; want %+v", p, w)
				}
			}
			more = cursor != 0
		}
		for _, id := range c.want {
			if !got[id] {
				t.Errorf("%+v: lease %d is missing", c.filter, id)
			}
		}
		if len(got) != len(c.want) {
			t.Errorf("%+v: %d leases; want %d", c.filter, len(got), len(c.want))
		}
	}
	for id, w := range want {
		if p, err := tr.Leased(id); err != nil || p.Namespace != w.Namespace || p.Owner != w.Owner || !p.Expires.Equal(w.Expires) {
			t.Errorf("lease %d is %+v, %v; want %+v", id, p, err, w)
		}
	}
	for name, id := range map[string]LeaseID{"a lease of a writer": writer, "a later lease in the same slot": long + 1<<32, "no lease": 0xffff} {
		if p, err := tr.Leased(id); !errors.Is(err, ErrLeaseUnknown) {
			t.Errorf("%s is %+v, %v", name, p, err)
		}
	}
	// Deleting the namespace ends its pins. Leases of readers and writers end as usual, and other
	// namespaces keep their pins.
	if err := tr.DeleteNamespace("bench"); err != nil {
		t.Fatal(err)
	}
	if err := tr.Release(long); !errors.Is(err, ErrLeaseUnknown) {
		t.Errorf("the pin of a deleted namespace: %v; want it ended", err)
	}
	if pins, _ := tr.Pins(nil, PinFilter{Endless: true}, 0, 10); len(pins) != 1 || pins[0].Lease != other {
		t.Errorf("pins %+v; want that of the other namespace", pins)
	}
	if p, err := tr.Leased(long); !errors.Is(err, ErrLeaseUnknown) {
		t.Errorf("the pin of a deleted namespace is %+v, %v", p, err)
	}
	if p, err := tr.Leased(short); err != nil || p.Namespace != "bench" {
		t.Errorf("a lease of a deleted namespace is %+v, %v", p, err)
	}
	for _, id := range []LeaseID{short, writer} {
		if err := tr.Release(id); err != nil {
			t.Errorf("lease %d: %v", id, err)
		}
	}
	gone, _, err := tr.ReclaimStep(nil, 100)
	if err != nil || len(gone) != len(ids) {
		t.Errorf("%d pieces reclaimed, %v; want %d", len(gone), err, len(ids))
	}
}
