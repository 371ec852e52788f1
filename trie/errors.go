package trie

import "errors"

// The sentinel errors differ in the reaction that they require of the caller. Callers compare with
// errors.Is.
var (
	// ErrClosed: the trie is closed; stop.
	ErrClosed = errors.New("trie: closed")
	// ErrBroken: the index refuses changes. Either its drive fails or hangs, or Pebble found the
	// index damaged; the error names the cause. Committed pieces stay matchable. After a fault of
	// the drive the index accepts changes again without a restart; after damage it needs a restart.
	ErrBroken = errors.New("trie: index cannot be written")
	// ErrNamespaceUnknown: no namespace has that name or id.
	ErrNamespaceUnknown = errors.New("namespace unknown")
	// ErrNamespaceExists: a namespace of that name exists. Create returns its definition with the
	// error, for comparison.
	ErrNamespaceExists = errors.New("namespace exists")
	// ErrTooManyNamespaces: Options.MaxNamespaces is reached, or too many retired
	// epochs wait for ReclaimStep.
	ErrTooManyNamespaces = errors.New("too many namespaces")
	// ErrEpoch: the epoch of a bump is not later than the newest epoch, or the requested epoch is
	// not live.
	ErrEpoch = errors.New("bad epoch")
	// ErrPinned: the epoch is pinned; release the pins, wait for their end, or force.
	ErrPinned = errors.New("epoch is pinned")
	// ErrEntry: an invalid entry: zero id, group out of range, or a parent in a flat namespace.
	ErrEntry = errors.New("bad entry")
	// ErrFull: the index has no free node number.
	ErrFull = errors.New("trie: index full")
	// ErrAbsent: no such block, piece or ref.
	ErrAbsent = errors.New("absent")
	// ErrLeaseUnknown: the lease expired, was released, or never existed.
	ErrLeaseUnknown = errors.New("lease unknown")
	// ErrTooManyLeases: MaxLeases or MaxPins is reached.
	ErrTooManyLeases = errors.New("too many leases")
	// ErrFormat: the directory holds an index of another format, or no index of Penstock.
	ErrFormat = errors.New("index format")
	// ErrForeign: the index was made for another store (Options.Owner). Move the index back to that
	// store, and rebuild the index of this store from its data.
	ErrForeign = errors.New("index of another store")
)
