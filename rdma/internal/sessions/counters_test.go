package sessions

import (
	"errors"
	"reflect"
	"sync/atomic"
	"testing"

	"github.com/penstock-kv/penstock/rdma"
)

// Every counter is copied to the field of rdma.Stats with its name.
func TestStatsHasEveryCounter(t *testing.T) {
	var c Counters
	v := reflect.ValueOf(&c).Elem()
	for i := range v.NumField() {
		if n, ok := v.Field(i).Addr().Interface().(*atomic.Uint64); ok {
			n.Store(uint64(i + 1))
		}
	}
	for i := range c.RefusedIn {
		c.RefusedIn[i].Store(uint64(100 + i))
	}
	st := c.Stats(rdma.NewImmCounters(1), []rdma.Peer{{InFlightOps: 2, InFlightBytes: 30}, {InFlightOps: 3, InFlightBytes: 40}})
	got := reflect.ValueOf(st)
	for i := range v.NumField() {
		name := v.Type().Field(i).Name
		if name == "RefusedIn" {
			continue
		}
		if n := got.FieldByName(name).Uint(); n != uint64(i+1) {
			t.Errorf("Stats.%s is %d, the counter %d", name, n, i+1)
		}
	}
	for i, n := range st.RefusedIn {
		if uint64(n) != uint64(100+i) {
			t.Errorf("Stats.RefusedIn[%d] is %d, the counter %d", i, n, 100+i)
		}
	}
	if st.InFlightOps != 5 || st.InFlightBytes != 70 {
		t.Errorf("%d operations of %d bytes in flight, want 5 of 70", st.InFlightOps, st.InFlightBytes)
	}
}

// An operation is counted once, by its kind and its result. A failed write adds no bytes.
func TestEnded(t *testing.T) {
	var c Counters
	c.SendEnded(nil)
	c.WriteEnded(7, nil)
	c.WriteEnded(7, nil)
	for range 3 {
		c.SendEnded(errors.New("refused"))
	}
	for range 4 {
		c.WriteEnded(7, errors.New("refused"))
	}
	got := [...]uint64{c.SendsOut.Load(), c.WritesOut.Load(), c.WriteBytesOut.Load(), c.SendFailuresOut.Load(), c.WriteFailuresOut.Load()}
	if want := [...]uint64{1, 2, 14, 3, 4}; got != want {
		t.Errorf("sends, writes, bytes, failed sends, failed writes are %v, want %v", got, want)
	}
}
