// Package usrbiotest has a library with the C interface of 3FS's client library, for tests on
// machines without 3FS. It performs the requests itself, with threads that read and write the
// registered files with pread and pwrite, in shared memory below /dev/shm.
//
// It has not been compared with a real 3FS. Its behaviour is that of the public header and of the
// public implementation (deepseek-ai/3FS, src/lib/api).
//
//	usrbio.Open ─ dlopen ─► testdata/standin.c, built by gcc ─► ring ─► 4 threads ─► pread, pwrite
//	                             ▲                                                       │
//	Control: a mapped file ──────┘ which requests fail, and how                          ▼
//	Mount:   a directory with 3fs-virt, or a FUSE mount of type fuse.hf3fs (bindfs) ◄── files
//
// The library uses freedoms of the interface that a caller may not expect: it starts every other
// request before it is submitted, completes requests out of order, compares the size of a path's
// buffer with the number of the path's components, keeps a copy of each registered descriptor, and
// misses the registration of a ring with flags of 2 or more when it destroys the ring. As 3FS's
// daemon does, another process removes the registrations of a process that was killed.
//
// There is no lock in this package.
package usrbiotest
