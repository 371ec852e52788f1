package client

import (
	"context"
	"errors"
	"time"

	"github.com/penstock-kv/penstock/kv"
)

var errNotYet = errors.New("client: not written yet")

// Match finds the longest cached prefix of a chain, and leases it if asked.
func (s *Store) Match(ctx context.Context, req MatchRequest) (MatchResult, error) {
	return MatchResult{}, errNotYet
}

// Read loads pieces of a chain into the caller's memory and verifies them.
func (s *Store) Read(ctx context.Context, req ReadRequest) (ReadResult, error) {
	return ReadResult{}, errNotYet
}

// Write stores blocks from the caller's memory.
func (s *Store) Write(ctx context.Context, req WriteRequest) (WriteResult, error) {
	return WriteResult{}, errNotYet
}

// ReadBatch reads several sequences, BatchParallel at a time. The results are in
// the order of reqs; the first error ends the batch.
func (s *Store) ReadBatch(ctx context.Context, reqs []ReadRequest) ([]ReadResult, error) {
	return nil, errNotYet
}

// WriteBatch writes several sequences, BatchParallel at a time. The results are
// in the order of reqs; the first error ends the batch.
func (s *Store) WriteBatch(ctx context.Context, reqs []WriteRequest) ([]WriteResult, error) {
	return nil, errNotYet
}

// Delivered drops blocks of class Transfer that have reached their reader, and
// returns how many.
func (s *Store) Delivered(ctx context.Context, ns kv.Namespace, ids []kv.BlockID) (int, error) {
	return 0, errNotYet
}

// Renew makes the lease end ttl from now.
func (l *Lease) Renew(ctx context.Context, ttl time.Duration) error { return errNotYet }

// Release ends the lease. Releasing one that has ended is no error.
func (l *Lease) Release(ctx context.Context) error { return errNotYet }

// IDs returns the number that each node gave to its part of the lease, in order
// of servers: what `penstock unpin` takes.
func (l *Lease) IDs() []uint64 { return nil }

// EventKind says what an Event reports.
type EventKind uint8

const (
	// BlockStored: blocks became matchable.
	BlockStored EventKind = iota + 1
	// BlockRemoved: blocks are no longer matchable.
	BlockRemoved
	// AllBlocksCleared: no block of the namespace's earlier epochs is matchable.
	AllBlocksCleared
	// Gap: events were lost, or the node restarted; resynchronise.
	Gap
)

// Event is one change of what a node holds.
type Event struct {
	Server    string
	Sequence  uint64
	Kind      EventKind
	Namespace string
	Epoch     kv.Epoch
	IDs       []kv.BlockID
	Parent    kv.BlockID
	Reason    string
	Time      time.Time
}

// EventsRequest says which events are wanted.
type EventsRequest struct {
	// Namespace to report; empty means all.
	Namespace string
	// After is the last sequence number seen, by server; a server that is not
	// in it begins with what happens from now on.
	After map[string]uint64
}

// Events calls fn for each change on each node until ctx ends or fn fails; it
// returns the error of either. fn is called by one goroutine at a time, in the
// order of each node's events. A connection that breaks is opened again, and
// what may have been missed is reported as a Gap.
func (s *Store) Events(ctx context.Context, req EventsRequest, fn func(Event) error) error {
	return errNotYet
}
