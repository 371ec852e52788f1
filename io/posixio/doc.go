// Package posixio is the blockio.Device that runs anywhere on Linux: preadv and
// pwritev with O_DIRECT, called by the goroutine that wants the bytes. It is what
// Penstock falls back to where io_uring is refused (containers' default seccomp
// profile, gVisor), and the yardstick that io_uring has to beat.
//
// It caches nothing. Where the file system refuses O_DIRECT the page cache lies
// between, and Info says so.
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
// Dir holds everything of a volume but the transfers, and io/uring shares it.
//
// A transfer that comes back short is continued from the last whole 4096 bytes,
// EINTR and EAGAIN are tried again, and what makes no progress is an error. A
// file's space is reserved with fallocate, or where that is not supported by
// writing zeroes.
//
// A read does not change its file's access time (O_NOATIME): on ext4 that would make
// it wait for the journal, and so for a drive whose writes hang.
//
// Lock order: Dir.naming (held over the system calls that change names, which
// are rare; Do never takes it), then Dir.mu, which guards the table of open files.
// flusher.mu is held over one fdatasync, so that callers who wait for the same
// file share it; nothing is locked under it.
package posixio
