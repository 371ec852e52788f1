package storage

import (
	"context"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/kv"
)

// EventKind says what an Event reports.
type EventKind uint8

const (
	// BlockStored: blocks became matchable. Parent is the block before the first.
	BlockStored EventKind = iota + 1
	// BlockRemoved: blocks are no longer matchable.
	BlockRemoved
	// AllBlocksCleared: no block of the namespace's earlier epochs is matchable.
	AllBlocksCleared
	// Gap: events that the consumer has not read are no longer kept.
	Gap
	// VolumeState: a volume changed its state.
	VolumeState
)

// Event is a change of the blocks that the node holds, for routers with their own
// index, or a change of the state of a volume, for operators.
type Event struct {
	// Sequence grows by one with each event of this run of the node.
	Sequence  uint64
	Kind      EventKind
	Namespace string
	Epoch     kv.Epoch
	IDs       []kv.BlockID
	Parent    kv.BlockID
	// Reason is why blocks were removed: evicted, deleted, epoch, corrupt, delivered,
	// or volume, for blocks on a volume that was removed.
	Reason string
	Time   time.Time
	// Volume is set for VolumeState only.
	Volume *blockstore.VolumeChange
}

// eventIDs is how many block ids the log keeps for each event that it keeps, on
// average: 16 MiB for the default of 65,536 events.
const eventIDs = 16

// An EventLog keeps the newest events in a ring and wakes those who wait for
// more. It is bounded in events and in the blocks that they name. Publishing
// never waits for a consumer.
type EventLog struct {
	mu   sync.Mutex
	ring []Event
	// The ring holds the events [oldest, next), which name ids blocks.
	// Invariant: next-oldest ≤ len(ring); ids ≤ eventIDs·len(ring), unless the
	// newest event alone has more.
	oldest, next uint64
	ids          int
	more         chan struct{}
}

// NewEventLog returns a log that keeps at most the last n events.
func NewEventLog(n int) *EventLog {
	return &EventLog{ring: make([]Event, max(1, n)), oldest: 1, next: 1, more: make(chan struct{})}
}

// Publish numbers and stores e and wakes the consumers.
func (l *EventLog) Publish(e Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := uint64(len(l.ring))
	for l.oldest < l.next && (l.next-l.oldest == n || l.ids+len(e.IDs) > eventIDs*len(l.ring)) {
		old := &l.ring[l.oldest%n]
		l.ids -= len(old.IDs)
		*old = Event{}
		l.oldest++
	}
	e.Sequence = l.next
	l.ring[l.next%n] = e
	l.ids += len(e.IDs)
	l.next++
	close(l.more)
	l.more = make(chan struct{})
}

// Last returns the sequence number of the newest event, 0 if there is none.
func (l *EventLog) Last() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.next - 1
}

// After returns up to limit events that follow sequence number seq, waiting for
// one if there is none yet. If some of them are no longer kept, or seq is from
// another run of the node, the first one returned is a Gap whose Sequence is the
// number of the last event lost.
func (l *EventLog) After(ctx context.Context, seq uint64, limit int) ([]Event, error) {
	for {
		events, more := l.after(seq, limit)
		if len(events) > 0 {
			return events, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-more:
		}
	}
}

func (l *EventLog) after(seq uint64, limit int) ([]Event, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var events []Event
	if seq >= l.next || seq+1 < l.oldest {
		seq = l.oldest - 1
		events = append(events, Event{Sequence: seq, Kind: Gap})
	}
	for s := seq + 1; s < l.next && len(events) < limit; s++ {
		events = append(events, l.ring[s%uint64(len(l.ring))])
	}
	return events, l.more
}
