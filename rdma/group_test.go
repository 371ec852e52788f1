package rdma

import (
	"context"
	"errors"
	"strings"
	"testing"
)

// listEngine accepts and records writes; after `takes` writes it returns an error.
type listEngine struct {
	Engine // no other method is called
	takes  int
	writes []Write
}

func (e *listEngine) Write(_ context.Context, w Write) error {
	if len(e.writes) == e.takes {
		return ErrNoPeer
	}
	e.writes = append(e.writes, w)
	return nil
}

// fixedRegion is a source with a given number of bytes.
type fixedRegion struct {
	Region
	n uint64
}

func (r fixedRegion) Len() uint64 { return r.n }

// ScatterOver submits one write per destination with all options of the scatter, and calls Done
// once with all errors.
func TestScatterOver(t *testing.T) {
	e := &listEngine{takes: 3}
	var ends []error
	done := func(err error) { ends = append(ends, err) }
	s := Scatter{Src: fixedRegion{n: 100}, Imm: ImmOf(9), Class: ClassCollective, Done: done}
	for i := range uint64(3) {
		s.Dsts = append(s.Dsts, ScatterDst{SrcOffset: i * 10, Dst: Desc{Engine: EngineID{byte(i)}, Len: 50}, DstOffset: i, Len: 10})
	}
	if err := ScatterOver(t.Context(), e, s); err != nil {
		t.Fatal(err)
	}
	for i, w := range e.writes {
		if w.SrcOffset != uint64(i)*10 || w.Dst.Engine != (EngineID{byte(i)}) || w.DstOffset != uint64(i) || w.Len != 10 || w.Imm != ImmOf(9) || w.Class != ClassCollective {
			t.Errorf("write %d: %+v", i, w)
		}
	}
	e.writes[1].Done(&RefusedError{Reason: ReasonBounds})
	e.writes[0].Done(nil)
	if len(ends) != 0 {
		t.Fatal("ended before all have")
	}
	e.writes[2].Done(ErrPeerDied)
	if len(ends) != 1 || !errors.Is(ends[0], ErrRefused) || !errors.Is(ends[0], ErrPeerDied) {
		t.Errorf("ended with %v", ends)
	}
}

// If a submission in the middle of a scatter fails, the remaining destinations end with its error.
// If the first fails, nothing was submitted.
func TestScatterOverFails(t *testing.T) {
	never := func(error) { t.Error("done was called although nothing was submitted") }
	dsts := []Desc{{Len: 1}, {Len: 1}, {Len: 1}}
	if err := BarrierOver(t.Context(), &listEngine{}, Barrier{Dsts: dsts, Done: never}); !errors.Is(err, ErrNoPeer) {
		t.Errorf("the first is not accepted: %v", err)
	}
	if err := BarrierOver(t.Context(), &listEngine{}, Barrier{Done: never}); !errors.Is(err, ErrRange) {
		t.Errorf("no destination: %v", err)
	}
	bad := Scatter{Src: fixedRegion{n: 10}, Dsts: []ScatterDst{{Dst: dsts[0], Len: 1}, {Dst: dsts[1], Len: 2}}, Done: never}
	if err := ScatterOver(t.Context(), &listEngine{takes: 9}, bad); !errors.Is(err, ErrRange) || !strings.Contains(err.Error(), "destination 1") {
		t.Errorf("out of range: %v", err)
	}
	e := &listEngine{takes: 1}
	var ends []error
	if err := BarrierOver(t.Context(), e, Barrier{Imm: 4, Class: ClassCollective, Dsts: dsts, Done: func(err error) { ends = append(ends, err) }}); err != nil {
		t.Fatal(err)
	}
	if v, ok := e.writes[0].Imm.Get(); !ok || v != 4 || e.writes[0].Class != ClassCollective {
		t.Errorf("write %+v", e.writes[0])
	}
	e.writes[0].Done(nil)
	if len(ends) != 1 || !errors.Is(ends[0], ErrNoPeer) {
		t.Errorf("ended with %v", ends)
	}
}

func TestClassString(t *testing.T) {
	for c, want := range map[Class]string{ClassKV: "kv", ClassCollective: "collective", 7: "class 7"} {
		if got := c.String(); got != want {
			t.Errorf("class %d prints %q", uint8(c), got)
		}
	}
}
