// Package posixio is the blockio.Device that runs on any Linux. It uses preadv and pwritev with
// O_DIRECT, called by the goroutine that needs the bytes. Penstock falls back to posixio where
// io_uring is refused (by containers' default seccomp profile, by gVisor). It is also the baseline
// that io_uring must exceed.
//
// The package caches nothing. If the file system refuses O_DIRECT, I/O goes through the page cache,
// and Info reports that.
//
//	Do ─► spans ─► budget (bytes in flight) ─► the caller's goroutine: preadv / pwritev
//	        │         │                          ▲ the last span of the batch
//	        │         └── the other spans: up to Workers calls at a time
//	        └ requests that continue each other in one file become one call
//
//	Dir: a volume's directory
//	  LOCK            flock; holds the owner's identity
//	  a, seg-0001, …  one regular file for each blockio.File
//	  anything else   left alone: subdirectories, names outside the rule
//
// Dir has everything of a volume except the transfers, and io/uring shares it.
//
// A short transfer is continued from the last whole 4096 bytes. EINTR and EAGAIN are retried. A
// transfer without progress is an error. The space of a file is reserved with fallocate, or by
// writing zeroes if the file system does not support fallocate.
//
// A read does not change the access time of its file (O_NOATIME). On ext4 such a change makes the
// read wait for the journal, and so for a drive whose writes hang.
//
// Lock order: Dir.naming, then Dir.mu. Dir.naming is held during the system calls that change
// names, which are rare; Do never takes it. Dir.mu guards the table of open files. flusher.mu is
// held during one fdatasync, so that callers that wait for the same file share the call; no lock is
// taken under it.
package posixio
