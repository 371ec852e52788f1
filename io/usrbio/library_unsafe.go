//go:build cgo && linux

package usrbio

// #cgo LDFLAGS: -ldl
// #cgo noescape usrbio_submit
// #cgo nocallback usrbio_submit
// #include <stdlib.h>
// #include "usrbio.h"
import "C"

import (
	"fmt"
	"syscall"
	"unsafe"

	"github.com/penstock-kv/penstock/io/blockio"
)

// Safety: the structures of the library are C memory, freed by the close method of their owner. Go
// has no slice over shared memory after the owner's close. The arrays that are passed to C during a
// call contain no pointers.

// request has C's layout, so a slice of requests can be passed to C.
type request struct {
	// at is the offset in the shared buffer, and offset the one in the file.
	at, offset, len uint64
	// id is returned in the completion.
	id uint64
	fd int32
	// prepared is negative, an errno, if the request was not prepared.
	prepared int32
}

// completion has C's layout.
type completion struct {
	id uint64
	// result is a number of bytes, or a negative errno.
	result int64
}

var (
	_ [C.sizeof_usrbio_request]byte    = [unsafe.Sizeof(request{})]byte{}
	_ [C.sizeof_usrbio_completion]byte = [unsafe.Sizeof(completion{})]byte{}
)

// waitMax is the largest number of completions of one wait.
const waitMax = C.USRBIO_WAIT_MAX

// library is 3FS's client library. It stays loaded until the process ends.
type library struct{ c *C.usrbio_library }

// load loads the library. It fails with blockio.ErrUnsupported; the text names the missing library or function.
func load(path string) (*library, error) {
	l := &library{c: (*C.usrbio_library)(C.calloc(1, C.sizeof_usrbio_library))}
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	why := make([]C.char, 512)
	if C.usrbio_load(l.c, name, &why[0], C.size_t(len(why))) != 0 {
		l.close()
		return nil, fmt.Errorf("usrbio: load 3FS's client library: %s (install it, and name its directory in LD_LIBRARY_PATH or ld.so.conf): %w",
			C.GoString(&why[0]), blockio.ErrUnsupported)
	}
	return l, nil
}

// close frees the table of functions.
func (l *library) close() { C.free(unsafe.Pointer(l.c)) }

// mountPoint returns the mount of 3FS that dir is on.
func (l *library) mountPoint(dir string) (mount string, ok bool) {
	path := C.CString(dir)
	defer C.free(unsafe.Pointer(path))
	out := make([]C.char, C.USRBIO_PATH_MAX)
	if C.usrbio_mount_point(l.c, &out[0], path) != 0 {
		return "", false
	}
	return C.GoString(&out[0]), true
}

// sharedBuffer is memory that 3FS's daemon can read and write.
type sharedBuffer struct {
	lib *library
	iov *C.usrbio_iov
	// mem is the memory, not of the Go heap.
	mem []byte
}

func (l *library) newBuffer(mount string, sizeBytes int) (*sharedBuffer, error) {
	b := &sharedBuffer{lib: l, iov: (*C.usrbio_iov)(C.calloc(1, C.sizeof_usrbio_iov))}
	path := C.CString(mount)
	defer C.free(unsafe.Pointer(path))
	if err := fromErrno(C.usrbio_iov_create(l.c, b.iov, path, C.size_t(sizeBytes))); err != nil {
		C.free(unsafe.Pointer(b.iov))
		return nil, fmt.Errorf("usrbio: %d bytes of shared memory for %s: %w", sizeBytes, mount, err)
	}
	b.mem = unsafe.Slice((*byte)(unsafe.Pointer(b.iov.base)), sizeBytes)
	return b, nil
}

// close unmaps the memory. No request may be in flight.
func (b *sharedBuffer) close() {
	b.mem = nil
	C.usrbio_iov_destroy(b.lib.c, b.iov)
	C.free(unsafe.Pointer(b.iov))
}

// nativeRing is a ring of the library.
type nativeRing struct {
	lib *library
	ior *C.usrbio_ior
}

func (l *library) newRing(mount string, entries int, read bool) (*nativeRing, error) {
	r := &nativeRing{lib: l, ior: (*C.usrbio_ior)(C.calloc(1, C.sizeof_usrbio_ior))}
	path := C.CString(mount)
	defer C.free(unsafe.Pointer(path))
	if err := fromErrno(C.usrbio_ior_create(l.c, r.ior, path, C.int(entries), C.bool(read))); err != nil {
		C.free(unsafe.Pointer(r.ior))
		return nil, fmt.Errorf("usrbio: ring of %d entries for %s: %w", entries, mount, err)
	}
	return r, nil
}

// close destroys the ring. No request may be in flight, and no wait in progress.
func (r *nativeRing) close() {
	C.usrbio_ior_destroy(r.lib.c, r.ior)
	C.free(unsafe.Pointer(r.ior))
}

// entries returns the largest number of requests in flight.
func (r *nativeRing) entries() int { return int(C.usrbio_entries(r.lib.c, r.ior)) }

// submit prepares and starts the requests, whose memory is in b. One goroutine at a time may call
// it. The outcome of each preparation is in prepared; an error means that the library may not have
// started the requests that were prepared.
func (r *nativeRing) submit(b *sharedBuffer, requests []request) error {
	first := (*C.usrbio_request)(unsafe.Pointer(unsafe.SliceData(requests)))
	return fromErrno(C.usrbio_submit(r.lib.c, r.ior, b.iov, first, C.size_t(len(requests))))
}

// wait returns the completions that are there, after at most the given time. One goroutine at a
// time may call it.
func (r *nativeRing) wait(done *[waitMax]completion, milliseconds int) ([]completion, error) {
	n := C.usrbio_wait(r.lib.c, r.ior, (*C.usrbio_completion)(unsafe.Pointer(done)), C.int(milliseconds))
	if n < 0 {
		return nil, fromErrno(n)
	}
	return done[:n], nil
}

// register registers a descriptor, before its first transfer.
func (l *library) register(fd int) error {
	if e := C.usrbio_register(l.c, C.int(fd)); e != 0 {
		return fmt.Errorf("register a descriptor with 3FS's library: %w", syscall.Errno(e))
	}
	return nil
}

// deregister ends register. The descriptor must still be open.
func (l *library) deregister(fd int) { C.usrbio_deregister(l.c, C.int(fd)) }

// fromErrno returns the error of a result that is negative if the call failed.
func fromErrno(result C.int) error {
	if result < 0 {
		return syscall.Errno(-result)
	}
	return nil
}
