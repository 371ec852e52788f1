package blockio

import (
	"context"
	"errors"
	"fmt"
)

// Align is the alignment, in bytes, of every offset, length and address of a
// Request: the largest logical block size of the devices we know, and the page
// size.
const Align = 4096

// MaxBatch is the largest number of requests in one Do.
const MaxBatch = 1024

// Sentinels, by what the caller should do.
var (
	// ErrAlign: an offset, length, size or address is misaligned; fix the caller.
	ErrAlign = errors.New("offset, length or address is not a multiple of 4096")
	// ErrRange: the request reaches beyond the file's fixed size; fix the caller.
	ErrRange = errors.New("beyond the end of the file")
	// ErrClosed: the device or file is closed; stop.
	ErrClosed = errors.New("closed")
	// ErrNoSpace: the volume is full; stop writing, go on reading.
	ErrNoSpace = errors.New("no space left on volume")
	// ErrNotExist: no file of that name.
	ErrNotExist = errors.New("file does not exist")
	// ErrExist: a file of that name is there already.
	ErrExist = errors.New("file exists")
	// ErrOpen: the file is open on this device; close it first.
	ErrOpen = errors.New("file is open")
	// ErrRequest: no file, a file of another device, an unknown op, no buffers
	// or too many, too large a batch, a bad name or size; fix the caller.
	ErrRequest = errors.New("malformed request")
	// ErrUnsupported: this backend cannot run here; choose another.
	ErrUnsupported = errors.New("not supported here")
)

// Op is the direction of a Request.
type Op uint8

const (
	// Read fills the buffers from the file.
	Read Op = iota + 1
	// Write puts the buffers into the file.
	Write
)

// String returns "read" or "write".
func (o Op) String() string {
	switch o {
	case Read:
		return "read"
	case Write:
		return "write"
	}
	return fmt.Sprintf("Op(%d)", uint8(o))
}

// Request is one contiguous range of one file, to be read into or written from
// one or several buffers in turn.
type Request struct {
	Op     Op
	File   File
	Offset int64
	// Bufs are used one after the other; each starts at a multiple of Align and
	// has a length that is a positive multiple of Align. They should come from
	// an arena (off the Go heap, huge pages): other memory works, at half the
	// bandwidth (measured: docs/benchmarks.md). At most MaxVecs.
	Bufs [][]byte
	// Err is the outcome: nil means that every byte of every buffer was
	// transferred. Set by Do.
	Err error
}

// MaxVecs is the largest number of buffers in one Request (the kernel's
// UIO_MAXIOV).
const MaxVecs = 1024

// Len returns the number of bytes that the request moves.
func (r *Request) Len() int64 {
	var n int64
	for _, b := range r.Bufs {
		n += int64(len(b))
	}
	return n
}

// Check returns ErrRequest, ErrAlign or ErrRange, with the offending value, if
// the request may not be submitted. Every backend calls it first.
func (r *Request) Check() error {
	if r.File == nil || (r.Op != Read && r.Op != Write) || len(r.Bufs) == 0 || len(r.Bufs) > MaxVecs {
		return fmt.Errorf("blockio: %v with %d buffers (1 to %d), file %v: %w", r.Op, len(r.Bufs), MaxVecs, r.File, ErrRequest)
	}
	if r.Offset < 0 || r.Offset%Align != 0 {
		return fmt.Errorf("blockio: %v at offset %d: %w", r.Op, r.Offset, ErrAlign)
	}
	for i, b := range r.Bufs {
		if len(b) == 0 || len(b)%Align != 0 {
			return fmt.Errorf("blockio: %v with buffer %d of %d bytes: %w", r.Op, i, len(b), ErrAlign)
		}
		if !Aligned(b) {
			return fmt.Errorf("blockio: %v with buffer %d at %p: %w", r.Op, i, b, ErrAlign)
		}
	}
	if n := r.Len(); n > r.File.Size()-r.Offset {
		return fmt.Errorf("blockio: %v of %d bytes at %d of %s (%d bytes): %w", r.Op, n, r.Offset, r.File.Name(), r.File.Size(), ErrRange)
	}
	return nil
}

// File is one file of a volume, of a size fixed at creation.
type File interface {
	// Name returns the name given to Create or Open.
	Name() string
	// Size returns the size in bytes, a multiple of Align.
	Size() int64
	// Close releases the file. It waits for requests on it that are in flight,
	// and may be called twice. Closing the Device closes its files.
	Close() error
}

// Device is one volume: a flat directory of fixed-size files and the engine
// that reads and writes them. All methods may be called concurrently.
type Device interface {
	// Create makes a file of sizeBytes (a positive multiple of Align) and
	// reserves its space, so that later writes inside it cannot run out of
	// space. A fresh file reads as zeroes. ErrExist if the name is taken,
	// ErrNoSpace, with nothing left behind, if the space is not there. The file
	// survives a crash once Sync on it has returned; until then a crash may
	// leave no file, or one with a smaller Size (0 is possible). A name is 1 to
	// 64 of [a-z0-9._-] and does not start with a dot; see CheckName.
	Create(name string, sizeBytes int64) (File, error)
	// Open opens a file that Create made; ErrNotExist if there is none. A file
	// may be open several times; each File is closed on its own.
	Open(name string) (File, error)
	// Remove deletes a file; ErrOpen if it is open on this device. A crash may
	// bring it back until a Sync, of whatever files, has returned.
	Remove(name string) error
	// List returns the names of all files, sorted. Anything else that lies in
	// the directory (other names, subdirectories) is not listed.
	List() ([]string, error)

	// Do submits the requests as one batch and returns when every one has
	// completed; each has its outcome in Err. At most MaxBatch requests; none is
	// fine. Requests of one batch are not ordered among themselves. Do returns a
	// non-nil error, with nothing submitted and no Err set, only if the batch
	// could not be admitted: a malformed request, a closed device or file, or
	// ctx done before or while waiting for the device's in-flight budget. Once
	// admitted, the buffers are the device's until Do returns, also when ctx
	// ends meanwhile: there is no partial return. A short transfer is resumed by
	// the device, never reported as success; a read reaching a hole returns
	// zeroes. The buffers of a failed read hold nothing to rely on, and a failed
	// write may have changed any sector of its range.
	Do(ctx context.Context, batch []Request) error
	// Sync returns once everything that completed writes on the given files
	// put there is durable, with the files' existence and size, and every Remove
	// that returned before; no files means all open files. ctx is looked at
	// before the work starts, not during it. A failed Sync makes no promise
	// about any write since the last one that succeeded.
	Sync(ctx context.Context, files ...File) error

	// Lock takes the exclusive ownership of the volume for this process, until
	// Close or the process's end, and records identity (one line that tells a
	// person who it is) for others to read. If another holds it, the error is
	// an *OwnedError. A second Lock by the same Device is an error as well.
	Lock(identity string) error
	// Stat reports the file system's space.
	Stat() (SpaceStat, error)
	// Info says what the device is; it does not change.
	Info() Info
	// Stats returns counters since the start.
	Stats() Stats
	// Close refuses new work with ErrClosed, waits for what is in flight,
	// closes the files and releases the lock. It may be called twice.
	Close() error
}

// OwnedError is returned by Device.Lock when another process owns the volume.
type OwnedError struct {
	// Volume is the directory; Owner the identity that its owner recorded.
	Volume, Owner string
}

// Error names the volume and the owner and says what to do.
func (e *OwnedError) Error() string {
	return fmt.Sprintf("volume %s is in use by %s; stop that process or choose another --data directory", e.Volume, e.Owner)
}

// SpaceStat is the space of the file system that holds a volume, in bytes.
type SpaceStat struct {
	TotalBytes, FreeBytes int64
}

// Info describes a device.
type Info struct {
	// Backend is uring, posix, mem.
	Backend string
	// Path is the volume's directory.
	Path string
	// Direct is whether the page cache is bypassed; Detail says anything else
	// worth knowing ("SINGLE_ISSUER ring per worker", "tmpfs: no O_DIRECT").
	Direct bool
	Detail string
	// Volatile: the files are in memory; a restart of the machine loses them, synced
	// or not.
	Volatile bool
}

// Stats are counters of a device since its start.
type Stats struct {
	ReadRequests, ReadBytes, ReadFailures    uint64
	WriteRequests, WriteBytes, WriteFailures uint64
	Syncs, SyncFailures                      uint64
	// Resumed counts transfers that came back short and were continued.
	Resumed uint64
	// InFlightBytes is a gauge; InFlightLimitBytes is the adaptive budget.
	InFlightBytes, InFlightLimitBytes int64
}
