package storage

import (
	"context"
	"sync"
	"time"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/trie"
)

// EventKind is the kind of an Event.
type EventKind uint8

const (
	// BlockStored: the blocks in IDs became matchable. Parent is the id of the block before the
	// first of these blocks.
	BlockStored EventKind = iota + 1
	// BlockRemoved: blocks are no longer matchable.
	BlockRemoved
	// AllBlocksCleared: no block of Epoch in Namespace is matchable any more, because the epoch was
	// retired (by RetireEpoch or a bump) or the namespace was deleted.
	AllBlocksCleared
	// Gap: the log has dropped events that this consumer has not read.
	Gap
	// VolumeState: a volume changed its state.
	VolumeState
)

// Event is a change of the stored blocks, for routers that keep an index of the node, or a change
// of a volume's state, for operators.
type Event struct {
	// Sequence grows by one with each event of this run of the node.
	Sequence  uint64
	Kind      EventKind
	Namespace string
	Epoch     kv.Epoch
	IDs       []kv.BlockID
	Parent    kv.BlockID
	// Reason is the reason for a removal: evicted, deleted, epoch, corrupt, delivered, or volume
	// for blocks on a removed volume.
	Reason string
	Time   time.Time
	// Volume is set only for VolumeState.
	Volume *blockstore.VolumeChange
}

// eventIDs is the number of block ids for which the log has room, divided by the number of events
// that the log keeps. With the default of 65,536 events, the ids take up to 16 MiB.
const eventIDs = 16

// An EventLog keeps the newest events in a ring, and wakes waiting consumers. The numbers of events
// and of their block ids are limited. Publish never waits for a consumer.
type EventLog struct {
	mu   sync.Mutex
	ring []Event
	// The ring holds the events with the numbers [oldest, next). ids is the number of block ids in
	// these events. Invariant: next-oldest ≤ len(ring), and ids ≤ eventIDs·len(ring) unless the
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

// Last returns the sequence number of the newest event, or 0 if there is none.
func (l *EventLog) Last() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.next - 1
}

// After returns up to limit events after sequence number seq. It waits until there is an event. If
// some of the events were dropped, or seq is from another run of the node, the first returned event
// is a Gap, whose Sequence is the number of the last lost event.
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

// changes has the changes of the index that have not been published. The index calls note for each
// change under its own lock, so the list has the order of the changes. Every call that changes the
// index publishes all noted changes before it returns. So the events of one block are in the order
// of its changes, even if another call publishes them.
type changes struct {
	// publishing is locked while a call takes the changes and publishes them. It is locked before
	// mu.
	publishing sync.Mutex

	mu    sync.Mutex
	noted []trie.Change
}

// note is the callback for trie.Trie.OnChange.
func (c *changes) note(x trie.Change) {
	c.mu.Lock()
	c.noted = append(c.noted, x)
	c.mu.Unlock()
}

// take returns the changes noted since the last call.
func (c *changes) take() []trie.Change {
	c.mu.Lock()
	defer c.mu.Unlock()
	noted := c.noted
	c.noted = nil
	return noted
}

// publishChanges publishes the noted changes of the index.
func (n *Node) publishChanges() {
	n.changes.publishing.Lock()
	defer n.changes.publishing.Unlock()
	for rest := n.changes.take(); len(rest) > 0; {
		count := sameEvent(rest)
		n.events.Publish(n.eventOf(rest[:count]))
		rest = rest[count:]
	}
}

// sameEvent returns the number of changes, from the first of all on, that one event can report.
func sameEvent(all []trie.Change) int {
	first := &all[0]
	if first.Kind == trie.SpaceCleared {
		return 1
	}
	n := 1
	for ; n < len(all) && n < eventBlocks; n++ {
		x := &all[n]
		same := x.Kind == first.Kind && x.Why == first.Why && x.Namespace == first.Namespace && x.Epoch == first.Epoch
		follows := x.Kind != trie.BlockAdded || x.Index == kv.IndexFlat || x.Parent == all[n-1].ID
		if !same || !follows {
			break
		}
	}
	return n
}

// eventOf returns the event for the changes that sameEvent has grouped.
func (n *Node) eventOf(changes []trie.Change) Event {
	first := &changes[0]
	e := Event{Namespace: first.Namespace, Epoch: first.Epoch, Time: n.opts.Now()}
	switch first.Kind {
	case trie.BlockAdded:
		e.Kind, e.Parent = BlockStored, first.Parent
	case trie.BlockRemoved:
		e.Kind, e.Reason = BlockRemoved, removedWhy[first.Why]
	case trie.SpaceCleared:
		e.Kind, e.Reason = AllBlocksCleared, whyEpoch
		if first.Why == trie.Deleted {
			e.Reason = whyDeleted
		}
		return e
	}
	e.IDs = make([]kv.BlockID, len(changes))
	for i := range changes {
		e.IDs[i] = changes[i].ID
	}
	return e
}
