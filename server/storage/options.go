package storage

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/penstock-kv/penstock/blockstore"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/options"
	"github.com/penstock-kv/penstock/server/metrics"
	"github.com/penstock-kv/penstock/trie"
)

// Sentinel errors, one for each reaction of a caller.
var (
	// ErrBusy: a limit was reached and the call had no effect. Drop the request or try again later.
	ErrBusy = errors.New("busy")
	// ErrReadOnly: the node takes no writes, because its volumes are full, below the free-space
	// floor, or failed. It serves reads.
	ErrReadOnly = errors.New("node takes no writes")
	// ErrDraining: the node is shutting down. Use another node.
	ErrDraining = errors.New("node is draining")
	// ErrReservation: the reservation does not exist. It expired, was committed or aborted, or was
	// never made.
	ErrReservation = errors.New("reservation unknown")
	// ErrRequest: the request is invalid independently of the node's content. Fix the caller.
	ErrRequest = errors.New("bad request")
	// ErrVolumeUnknown: the node has no such volume.
	ErrVolumeUnknown = blockstore.ErrVolumeUnknown
	// ErrVolumeState: the volume is not in a state that allows the operation. The error text names
	// the operation to do first.
	ErrVolumeState = blockstore.ErrVolumeState
	// ErrMismatch: the caller's geometry or epoch differs from the namespace's.
	ErrMismatch = errors.New("namespace differs")
)

// Options are the options of a Node. Index, Store, Arena and Metrics are required. The Node owns
// Index and Store, and Close closes them. Every other field has a default for its zero value.
type Options struct {
	Index   *trie.Trie
	Store   *blockstore.Store
	Arena   *arena.Arena
	Metrics *metrics.Node

	// Durability decides when Commit returns. With durability batch, SyncEvery is the interval at
	// which data and index are synced. Default 1 s.
	Durability blockstore.Durability
	SyncEvery  time.Duration
	// ReadsMax is the maximum number of Loads that read from one volume at a time. If another Load
	// requests pieces from that volume, these pieces are Busy. The maximum number of Loads in
	// progress on the node is ReadsMax multiplied by the number of volumes. As many further Loads
	// may wait; any other Load is Busy. Default 256.
	ReadsMax int
	// ReservationsMax is the maximum number of open reservations. Default 256.
	ReservationsMax int
	// LoadBytesMax and WriteBytesMax are the maximum payload, in bytes, of one Load and of one
	// Reserve. Default 64 MiB.
	LoadBytesMax, WriteBytesMax int64
	// ChainBlocksMax is the maximum length, in blocks, of the chain of one request. Default
	// 131,072.
	ChainBlocksMax int
	// LeaseTTLMax is the maximum duration of a lease that is not a pin. Default 10 min.
	LeaseTTLMax time.Duration
	// ReservationTTL is the maximum time between Reserve and Commit. Default 30 s.
	ReservationTTL time.Duration
	// QueueWait is the time for which a call waits for memory before it is Busy. Default 2 s.
	QueueWait time.Duration
	// ReadWait is the time for which a Load waits for a device to complete a read. After that the
	// pieces are misses. Default 5 s.
	ReadWait time.Duration
	// WriteWait is the time for which a Commit waits for a device to complete a write. After that
	// the pieces are written to another volume. Default 10 s.
	WriteWait time.Duration
	// EventHistory is the number of events that the event log keeps. Default 65,536.
	EventHistory int
	// ScrubBytesPerSecond limits the background scrubber; 0 turns it off.
	ScrubBytesPerSecond int64
	// RewriteBytesPerSecond is the rate at which the node writes blocks anew, on each volume, that are encrypted with an older key than
	// the newest one, or are plain on an encrypted volume. 0: such blocks stay until they are evicted or dropped.
	RewriteBytesPerSecond int64
	// CutThroughBytes is the piece size, in bytes, from which a piece is loaded in parts of whole
	// layers. The first part is then sent while later parts are read (docs/benchmarks.md, "cut
	// through"). Default 8 MiB. If negative, every piece is loaded as a whole.
	CutThroughBytes int64
	// HotBytes is the maximum size, in bytes, of the hot set: the part of the arena with the most
	// recently read pieces, whose next read needs no device. Other uses of the arena have priority.
	// Default: three quarters of the arena. If negative, there is no hot set.
	HotBytes int64
	// HotPrefix has the conditions on which a prefix is hot (Node.HotPrefixes). Default: no prefix is hot.
	HotPrefix HotOptions
	// LoanBytesMax is the maximum size, in bytes, of the arena memory that readers on this host may
	// keep (Part.Keep). A reader whose loan would exceed the maximum is Busy. Default: a quarter of
	// the arena.
	LoanBytesMax int64
	// IndexMoved is called when a complete and durable copy of the index exists in another
	// directory, dir. If IndexMoved returns nil, the copy replaces the index, and the next start
	// must open the index in dir. A nil IndexMoved is not called.
	IndexMoved func(dir string) error
	// CheckOnClose makes Close verify that index and store agree on every piece. The build tag
	// invariants always enables it.
	CheckOnClose bool
	// Logger receives messages that need an operator's action. Default: discard.
	Logger *slog.Logger
	// Now is the clock. Default: time.Now.
	Now func() time.Time
}

// EnsureDefaults sets the fields that are zero to their defaults.
func (o *Options) EnsureDefaults() {
	options.SetDefault(&o.SyncEvery, time.Second)
	options.SetDefault(&o.ReadsMax, 256)
	options.SetDefault(&o.ReservationsMax, 256)
	options.SetDefault(&o.LoadBytesMax, 64<<20)
	options.SetDefault(&o.WriteBytesMax, 64<<20)
	options.SetDefault(&o.ChainBlocksMax, 131072)
	options.SetDefault(&o.LeaseTTLMax, 10*time.Minute)
	options.SetDefault(&o.ReservationTTL, 30*time.Second)
	options.SetDefault(&o.QueueWait, 2*time.Second)
	options.SetDefault(&o.ReadWait, 5*time.Second)
	options.SetDefault(&o.WriteWait, 10*time.Second)
	options.SetDefault(&o.EventHistory, 65536)
	options.SetDefault(&o.CutThroughBytes, 8<<20)
	if o.HotBytes == 0 && o.Arena != nil {
		o.HotBytes = int64(len(o.Arena.Bytes())) * 3 / 4
	}
	if o.Arena != nil {
		o.LoanBytesMax = loanBytesMax(o.LoanBytesMax, o.Arena)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.IndexMoved == nil {
		o.IndexMoved = func(string) error { return nil }
	}
	if o.Now == nil {
		o.Now = time.Now
	}
}

// loanBytesMax returns Options.LoanBytesMax, or its default if it is 0.
func loanBytesMax(bytes int64, a *arena.Arena) int64 {
	if bytes == 0 {
		return int64(len(a.Bytes())) / 4
	}
	return bytes
}

// Validate returns an error for the first invalid field of o, or nil.
func (o *Options) Validate() error {
	switch {
	case o.Index == nil || o.Store == nil || o.Arena == nil || o.Metrics == nil:
		return errors.New("storage: Options.Index, Store, Arena and Metrics are required")
	case o.ReadsMax < 1 || o.ReservationsMax < 1 || o.ChainBlocksMax < 1 || o.EventHistory < 1:
		return fmt.Errorf("storage: limits of %d reads, %d reservations, %d blocks, %d events; each must be positive", o.ReadsMax, o.ReservationsMax, o.ChainBlocksMax, o.EventHistory)
	case o.SyncEvery <= 0 || o.LeaseTTLMax <= 0 || o.ReservationTTL <= 0 || o.QueueWait <= 0 || o.ReadWait <= 0 || o.WriteWait <= 0:
		return errors.New("storage: SyncEvery, LeaseTTLMax, ReservationTTL, QueueWait, ReadWait and WriteWait must be positive")
	case o.LoanBytesMax < 0 || o.LoanBytesMax > int64(len(o.Arena.Bytes())):
		return fmt.Errorf("storage: LoanBytesMax is %d bytes; give 0 to the arena's size, %d", o.LoanBytesMax, len(o.Arena.Bytes()))
	case o.ScrubBytesPerSecond < 0 || o.RewriteBytesPerSecond < 0:
		return fmt.Errorf("storage: ScrubBytesPerSecond is %d, RewriteBytesPerSecond %d; give 0 or more", o.ScrubBytesPerSecond, o.RewriteBytesPerSecond)
	}
	return nil
}
