// Package usrbio is the blockio.Device on a mount of 3FS, DeepSeek's distributed file system. It
// moves bytes through 3FS's user-space I/O, which keeps the kernel's FUSE out of the data path. It
// loads 3FS's client library, libhf3fs_api_shared.so, when a device is opened. The build needs cgo
// and Linux, and neither the library nor its header. Without cgo, Open returns
// blockio.ErrUnsupported. The package has been tested with the library of usrbiotest, and not with
// a real 3FS.
//
//	Do(batch) ─ check ─ gates ─ parts of at most SlotBytes ─ budget ─ a slot each
//	                                                                    │
//	      write: copy into the slot ─► prep_io, submit_ios ─► ring ─► 3FS's FUSE daemon ─► storage
//	       read: copy from the slot ◄─ the waiting goroutine, wait_for_ios ◄─┘      │
//	                                            slot: shared memory ◄───────────────┘
//
//	one device:   read ring:   slot 0 … slot 31 ┐
//	              write ring:  slot 0 … slot 31 ┴─ one buffer of shared memory (iov)
//
// Names, locks, sizes, reservation of space and durability go through the mount: the package uses
// posixio.Dir for them, as uring does. Sync is fdatasync through the mount, because a ring has no
// such request. Each open file is registered with the library until just before its descriptor is
// closed.
//
// # Memory
//
// Bytes are copied between the caller's buffers and memory of the device. They are not moved in
// place, because 3FS's daemon must map the memory by a name below /dev/shm, for writing, and the
// registration belongs to one mount. The arena's memory has no name: it is anonymous, or a memfd
// that is sealed against further writable mappings so that clients can map it. An arena with a name
// below /dev/shm would lose that seal and the huge pages, and any process of the user could
// truncate it, which is a SIGBUS in this one. The library has iovwrap for memory that is registered
// already, so it does not remove these conditions.
//
// A slot is a place in a ring together with its piece of the memory, so a ring is never full for a
// request that has a slot. A longer request is divided into parts that are in flight together.
//
// The name of the buffer below /dev/shm is removed as soon as the daemon has mapped it, and that of
// a ring by the library. So a process that is killed leaves no file there. 3FS's daemon removes the
// registrations (the links in 3fs-virt/iovs of the mount) of a process that has ended.
//
// # Completions
//
// One goroutine for each ring waits in the library, and only while requests are in flight. The
// userdata of a request is a number: the index of its slot, and a turn that is odd while the request
// is in flight.
//
// A short completion is continued at the last whole page. A ring ends a read at the end of the file
// and at a hole alike. So if a read made no progress, the rest of the part is read through the
// mount, which reads a hole as zeroes. EAGAIN and EINTR are retried a limited number of times.
//
// A request whose completion does not arrive keeps its Do, as in the other backends: the contract
// has no partial return. The watch of package blockstore declares the volume hung.
//
// If the library fails to submit or to wait, or completes a request that is not in flight, the ring
// has failed: its requests in flight and all later ones fail at once. Close then leaves the rings
// and the memory as they are, because the daemon may still use them.
//
// # Limits
//
// 3FS's interface has neither a way to discard data that blockio.Device would offer, nor a request
// for several buffers; a request with many buffers is still one request to 3FS, because of the copy.
// The priority of the rings is normal.
//
// Lock order: ring.mu is a leaf. It is held while requests are prepared, because the library allows
// one thread at a time for that.
package usrbio
