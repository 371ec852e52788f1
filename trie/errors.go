package trie

import "errors"

// Sentinels, one for each decision a caller can take. Ask with errors.Is.
var (
	// ErrClosed: the trie is closed; stop.
	ErrClosed = errors.New("trie: closed")
	// ErrBroken: the index refuses changes. Either its drive fails or hangs, or Pebble
	// found the index damaged; the error names the cause. Committed pieces stay
	// matchable. After a fault of the drive the index accepts changes again by itself;
	// after damage it needs a restart.
	ErrBroken = errors.New("trie: index cannot be written")
	// ErrNamespaceUnknown: no namespace of that name or id.
	ErrNamespaceUnknown = errors.New("namespace unknown")
	// ErrNamespaceExists: a namespace of that name is there already. Create
	// returns it along with the error; compare the definitions.
	ErrNamespaceExists = errors.New("namespace exists")
	// ErrTooManyNamespaces: Options.MaxNamespaces is reached, or too many retired
	// epochs wait for ReclaimStep.
	ErrTooManyNamespaces = errors.New("too many namespaces")
	// ErrEpoch: a bump to an epoch that is not later, or an epoch that is not live.
	ErrEpoch = errors.New("bad epoch")
	// ErrPinned: the epoch is pinned; release the pins, wait for their end, or force.
	ErrPinned = errors.New("epoch is pinned")
	// ErrEntry: an entry that cannot be: zero id, group out of range, a parent in
	// a flat namespace.
	ErrEntry = errors.New("bad entry")
	// ErrFull: the index holds as many pieces as it can number.
	ErrFull = errors.New("trie: index full")
	// ErrAbsent: no such block, piece or ref.
	ErrAbsent = errors.New("absent")
	// ErrLeaseUnknown: the lease expired, was released, or never was.
	ErrLeaseUnknown = errors.New("lease unknown")
	// ErrTooManyLeases: MaxLeases or MaxPins is reached.
	ErrTooManyLeases = errors.New("too many leases")
	// ErrFormat: the directory holds an index of another format or none of ours.
	ErrFormat = errors.New("index format")
	// ErrForeign: the index was made for another store (Options.Owner); put it back
	// where it belongs, and make this store's anew from its data.
	ErrForeign = errors.New("index of another store")
)
