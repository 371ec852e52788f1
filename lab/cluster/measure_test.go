package cluster

import (
	"math"
	"reflect"
	"strconv"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/lab/emulate"
)

// TestCount: the sums of all turns, and the mean parts of those that ended well.
func TestCount(t *testing.T) {
	turn := func(ms ...time.Duration) emulate.TurnResult {
		return emulate.TurnResult{
			Prompt: 100, Hit: 80, PrefillSide: 50, DecodeSide: 30, Replans: 1,
			Matched: ms[0] * time.Millisecond, Started: ms[1] * time.Millisecond, FirstToken: ms[2] * time.Millisecond, Took: ms[3] * time.Millisecond,
		}
	}
	turns := []Turn{{TurnResult: turn(1, 3, 6, 10)}, {TurnResult: turn(3, 7, 14, 20)}}
	for i := range 7 {
		turns = append(turns, Turn{TurnResult: turn(0, 0, 0, 50), Failed: true, Err: strconv.Itoa(i)})
	}
	var got Result
	got.count(turns)
	want := Result{
		Turns: 9, Failed: 7, Failures: []string{"0", "1", "2", "3", "4"}, PromptTokens: 900, HitTokens: 720, PrefillTokens: 450, DecodeTokens: 270, Replans: 9,
		Longest: 50 * time.Millisecond, MeanMatch: 2 * time.Millisecond, MeanQueue: 3 * time.Millisecond, MeanPrefill: 5 * time.Millisecond, MeanDecode: 5 * time.Millisecond,
		FirstTokenP50: 14 * time.Millisecond, FirstTokenP99: 14 * time.Millisecond,
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v\nwant %+v", got, want)
	}
	got = Result{}
	got.count(nil)
	if !reflect.DeepEqual(got, Result{}) {
		t.Errorf("without turns: %+v", got)
	}
}

// TestBalance: the mean of max/avg over the seconds of the first half in which the storage NICs
// were loaded. Compute NICs do not count.
func TestBalance(t *testing.T) {
	nics := []NIC{{"P0", true}, {"P0", false}, {"D0", true}, {"D0", false}}
	// Bytes that P0 and D0 receive in each second of the replay.
	perSecond := [][2]uint64{{900, 300}, {400, 400}, {10, 0}, {600, 600}, {1000, 0}, {1000, 0}, {1000, 0}, {1000, 0}, {0, 0}, {0, 0}}
	samples := []Sample{{Received: make([]uint64, 4)}}
	var p, d uint64
	for i, got := range perSecond {
		for quarter := range 4 {
			p, d = p+got[0]/4, d+got[1]/4
			samples = append(samples, Sample{At: time.Duration(i)*time.Second + time.Duration(quarter+1)*time.Second/4, Received: []uint64{p, 5 * p, d, 7 * d}})
		}
	}
	// Seconds 0, 1, 3 and 4; second 2 has less than 30 % of the load of second 0.
	if got, want := Balance(nics, samples, 10*time.Second), (1.5+1+1+2)/4; math.Abs(got-want) > 1e-9 {
		t.Errorf("%v, want %v", got, want)
	}
	if got := Balance(nics, samples[:3], 10*time.Second); got != 0 {
		t.Errorf("less than a second: %v", got)
	}
	if got := Balance(nics, nil, 10*time.Second); got != 0 {
		t.Errorf("without samples: %v", got)
	}
}

// TestBusyBalance: over prefill engines, whose compute took 1, 2 and 3 s.
func TestBusyBalance(t *testing.T) {
	c := &Cluster{counts: map[string]emulate.Counts{"D0": {Busy: time.Hour}}}
	add := func(kind Kind, name string) {
		c.engines = append(c.engines, &member{kind: kind, place: &place{name: name}})
	}
	add(KindDecode, "D0")
	if got := c.busyBalance(); got != 0 {
		t.Errorf("no prefill engine: %v", got)
	}
	for i := range 3 {
		name := "P" + strconv.Itoa(i)
		add(KindPrefill, name)
		c.counts[name] = emulate.Counts{Busy: time.Duration(i+1) * time.Second}
	}
	if got := c.busyBalance(); got != 1.5 {
		t.Errorf("%v, want 1.5", got)
	}
	if got := c.kindOf("P1"); got != KindPrefill {
		t.Errorf("P1 is %q", got)
	}
	if got := c.kindOf("P9"); got != "" {
		t.Errorf("P9 is %q", got)
	}
	if got := c.NICs(); len(got) != 8 || got[0].String() != "D0 SNIC" || got[7].String() != "P2 CNIC" {
		t.Errorf("NICs: %v", got)
	}
}
