package options

import (
	"testing"
	"time"
)

func TestSetDefault(t *testing.T) {
	var unset time.Duration
	set := 3
	SetDefault(&unset, time.Second)
	SetDefault(&set, 4)
	if unset != time.Second || set != 3 {
		t.Errorf("%v and %d, want the default in place of zero alone", unset, set)
	}
}

func TestCheckRanges(t *testing.T) {
	limits := func(v int64) []Range { return []Range{{"Conns", 1, 1, 16}, {"PieceBytes", v, 2, 8}} }
	for v, want := range map[int64]string{
		1: "tcp: option PieceBytes is 1; it must be 2 to 8", 2: "", 8: "",
		9: "tcp: option PieceBytes is 9; it must be 2 to 8",
	} {
		got := ""
		if err := CheckRanges("tcp", limits(v)); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("PieceBytes %d: %q, want %q", v, got, want)
		}
	}
}
