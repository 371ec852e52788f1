package blockio

import (
	"context"
	"errors"
	"fmt"
)

// Align is the alignment, in bytes, of every offset, length and address of a Request. It is the
// page size, and the largest logical block size of common devices.
const Align = 4096

// MaxBatch is the largest number of requests in one Do.
const MaxBatch = 1024

// The sentinel errors differ in the reaction that they require of the caller.
var (
	// ErrAlign: an offset, length, size or address is misaligned. Fix the caller.
	ErrAlign = errors.New("offset, length or address is not a multiple of 4096")
	// ErrRange: the request reaches beyond the file's fixed size. Fix the caller.
	ErrRange = errors.New("beyond the end of the file")
	// ErrClosed: the device or file is closed. The caller stops.
	ErrClosed = errors.New("closed")
	// ErrNoSpace: the volume is full. Stop writing; reads still work.
	ErrNoSpace = errors.New("no space left on volume")
	// ErrNotExist: there is no file with that name.
	ErrNotExist = errors.New("file does not exist")
	// ErrExist: a file with that name exists.
	ErrExist = errors.New("file exists")
	// ErrOpen: the file is open on this device. Close it first.
	ErrOpen = errors.New("file is open")
	// ErrRequest: the request has no file, a file of another device, an unknown op, no buffers or
	// too many, or a bad name or size, or its batch is too large. Fix the caller.
	ErrRequest = errors.New("malformed request")
	// ErrUnsupported: this backend cannot run on this system. Choose another backend.
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

// Request is one contiguous range of one file. It is read into, or written from, one or several
// buffers in order.
type Request struct {
	Op     Op
	File   File
	Offset int64
	// Bufs are used one after the other, at most MaxVecs of them. Each starts at a multiple of
	// Align, and its length is a positive multiple of Align. The buffers should come from an arena
	// (outside the Go heap, in huge pages); other memory has half the bandwidth
	// (docs/benchmarks.md).
	Bufs [][]byte
	// Err is the outcome, set by Do: nil means that every byte of every buffer was transferred.
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

// Check returns ErrRequest, ErrAlign or ErrRange if the request may not be submitted. The error
// contains the wrong value. Every backend calls Check first.
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
	// Close releases the file. It waits for requests on the file that are in flight, and may be
	// called twice. Closing the Device closes its files.
	Close() error
}

// Device is one volume: a flat directory of fixed-size files and the engine
// that reads and writes them. All methods may be called concurrently.
type Device interface {
	// Create makes a file of sizeBytes (a positive multiple of Align) and reserves its space, so
	// that later writes inside the file cannot run out of space. A new file reads as zeroes. Create
	// returns ErrExist if the name is taken. It returns ErrNoSpace, and leaves no file, if there is
	// not enough space. The file survives a crash after a Sync of the file has returned. Before
	// that, a crash may leave no file, or one with a smaller Size (possibly 0). A name has 1 to 64
	// characters of [a-z0-9._-] and does not start with a dot; see CheckName.
	Create(name string, sizeBytes int64) (File, error)
	// Open opens a file that Create made. It returns ErrNotExist if there is none. A file may be
	// open several times; each File is closed separately.
	Open(name string) (File, error)
	// Remove deletes a file. It returns ErrOpen if the file is open on this device. A crash may
	// restore the file until a Sync, of any files, has returned.
	Remove(name string) error
	// List returns the names of all files, sorted. Other entries of the directory (other names,
	// subdirectories) are not listed.
	List() ([]string, error)

	// Do submits the requests as one batch and returns when every request has completed, with its
	// outcome in Err. A batch has 0 to MaxBatch requests, in no order among themselves. Do returns
	// an error only if the batch was not admitted: a request is malformed, the device or a file is
	// closed, or ctx ended before or during the wait for the device's in-flight budget. Nothing is
	// submitted then, and no Err is set. After admission the device owns the buffers until Do
	// returns, also if ctx ends meanwhile: there is no partial return. The device resumes a short
	// transfer and never reports it as success. A read of a hole returns zeroes. The buffers of a
	// failed read are undefined, and a failed write may have changed any sector of its range.
	Do(ctx context.Context, batch []Request) error
	// Sync returns when all completed writes to the given files are durable, with the existence and
	// the size of these files, and when every Remove that returned before the call is durable. No
	// files means all open files. ctx is checked before the work starts, not during it. After a
	// failed Sync, any write since the last successful Sync may not be durable.
	Sync(ctx context.Context, files ...File) error

	// Lock takes exclusive ownership of the volume for this process, until Close or the end of the
	// process. It records identity, one line by which an operator recognises the process, where
	// other processes can read it. If another process owns the volume, the error is an *OwnedError.
	// A second Lock by the same Device is an error as well.
	Lock(identity string) error
	// Stat returns the file system's space.
	Stat() (SpaceStat, error)
	// Info describes the device; the result is constant.
	Info() Info
	// Stats returns counters since the start.
	Stats() Stats
	// Close refuses new work with ErrClosed, waits for work in flight, closes the files and
	// releases the lock. It may be called twice.
	Close() error
}

// OwnedError is returned by Device.Lock when another process owns the volume.
type OwnedError struct {
	// Volume is the directory; Owner is the identity that the owner recorded.
	Volume, Owner string
}

// Error names the volume and the owner and proposes a remedy.
func (e *OwnedError) Error() string {
	return fmt.Sprintf("volume %s is in use by %s; stop that process or choose another --data directory", e.Volume, e.Owner)
}

// SpaceStat is the space of the file system that holds a volume, in bytes.
type SpaceStat struct {
	TotalBytes, FreeBytes int64
}

// Info describes a device.
type Info struct {
	// Backend is uring, posix, usrbio or mem.
	Backend string
	// Path is the volume's directory.
	Path string
	// Direct is set if requests bypass the page cache. Detail has further information about the
	// mode ("ext4, O_DIRECT", "tmpfs, page cache").
	Direct bool
	Detail string
	// Volatile is set if the files are in memory: a restart of the machine loses them, synced or
	// not.
	Volatile bool
}

// Stats are counters of a device since its start.
type Stats struct {
	ReadRequests, ReadBytes, ReadFailures    uint64
	WriteRequests, WriteBytes, WriteFailures uint64
	Syncs, SyncFailures                      uint64
	// Resumed counts short transfers whose remaining bytes the device transferred with a further
	// request.
	Resumed uint64
	// InFlightBytes is the number of bytes in flight, and InFlightLimitBytes the present limit of
	// the adaptive budget.
	InFlightBytes, InFlightLimitBytes int64
}
