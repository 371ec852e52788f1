package storage

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/penstock-kv/penstock/kv"
)

func sequences(events []Event) (out []uint64) {
	for _, e := range events {
		out = append(out, e.Sequence)
	}
	return out
}

func TestEventLogReplaysAndReportsGaps(t *testing.T) {
	l := NewEventLog(4)
	for range 6 {
		l.Publish(Event{Kind: BlockStored})
	}
	for _, tc := range []struct {
		name  string
		after uint64
		limit int
		gap   bool
		want  []uint64
	}{
		{"all that is kept", 2, 10, false, []uint64{3, 4, 5, 6}},
		{"limited", 4, 1, false, []uint64{5}},
		{"some are lost", 0, 10, true, []uint64{2, 3, 4, 5, 6}},
		{"another run's number", 99, 10, true, []uint64{2, 3, 4, 5, 6}},
	} {
		events, err := l.After(t.Context(), tc.after, tc.limit)
		if err != nil {
			t.Fatal(err)
		}
		got := sequences(events)
		if len(got) != len(tc.want) || (events[0].Kind == Gap) != tc.gap {
			t.Errorf("%s: %v, first is gap: %v", tc.name, got, events[0].Kind == Gap)
			continue
		}
		for i := range got {
			if got[i] != tc.want[i] {
				t.Errorf("%s: %v; want %v", tc.name, got, tc.want)
			}
		}
	}
}

// A removal may name thousands of blocks, so the log must bound the ids and not only the events
// (bounded).
func TestEventLogIsBoundedInBlocks(t *testing.T) {
	const events, each = 64, 500
	l := NewEventLog(events)
	for range events {
		l.Publish(Event{Kind: BlockRemoved, IDs: make([]kv.BlockID, each)})
	}
	got, err := l.After(t.Context(), 0, 2*events)
	if err != nil {
		t.Fatal(err)
	}
	kept := 0
	for _, e := range got {
		kept += len(e.IDs)
	}
	if limit := events * eventIDs; kept > limit || kept < limit-each {
		t.Errorf("%d block ids are kept; want at most %d, and not much less", kept, limit)
	}
	if last := got[len(got)-1].Sequence; got[0].Kind != Gap || last != events {
		t.Errorf("first %v, last sequence %d; want a gap, and %d", got[0].Kind, last, events)
	}
	for i := 1; i < len(got); i++ {
		if got[i].Sequence != got[i-1].Sequence+1 {
			t.Errorf("%d follows %d", got[i].Sequence, got[i-1].Sequence)
		}
	}
	// The newest event is kept, even if it exceeds the bound.
	l.Publish(Event{Kind: BlockStored, IDs: make([]kv.BlockID, 2*events*eventIDs)})
	if got, err := l.After(t.Context(), events, 10); err != nil || len(got) != 1 || got[0].Kind != BlockStored {
		t.Errorf("after a large event: %d events, %v", len(got), err)
	}
}

func TestEventLogWakesConsumer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewEventLog(4)
		got := make(chan []Event, 1)
		go func() {
			events, _ := l.After(t.Context(), l.Last(), 10)
			got <- events
		}()
		synctest.Wait()
		l.Publish(Event{Kind: AllBlocksCleared})
		if events := <-got; len(events) != 1 || events[0].Kind != AllBlocksCleared {
			t.Fatalf("woken with %v", events)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := l.After(ctx, l.Last(), 10); !errors.Is(err, context.Canceled) {
			t.Fatalf("a cancelled wait returned %v", err)
		}
	})
}
