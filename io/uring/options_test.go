package uring

import "testing"

func TestOptions(t *testing.T) {
	var o Options
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		t.Errorf("the zero value: %v", err)
	}
	for _, bad := range []Options{
		{Wait: WaitAuto + 1},
		{Rings: -1},
		{AutoThreshold: -1},
		{Entries: 3},
		{SharedEntries: 2 * entriesMax},
		{Regions: [][]byte{nil}},
		{Regions: [][]byte{make([]byte, 100)}},
	} {
		bad.EnsureDefaults()
		if err := bad.Validate(); err == nil {
			t.Errorf("accepted %+v", bad)
		}
	}
	for w, want := range map[Wait]string{WaitCaller: "caller", WaitShared: "shared", WaitAuto: "auto", 9: "Wait(9)"} {
		if got := w.String(); got != want {
			t.Errorf("%d is %q; want %q", w, got, want)
		}
	}
}
