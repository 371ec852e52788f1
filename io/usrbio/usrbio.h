// The functions of 3FS's client library that package usrbio uses, looked up in the library at run
// time, and the structures of its C interface (hf3fs_usrbio.h).

#ifndef USRBIO_H
#define USRBIO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

// A buffer of shared memory.
typedef struct {
	uint8_t *base;
	void *handle;
	char id[16];
	char mount_point[256];
	size_t size;
	size_t block_size;
	int numa;
} usrbio_iov;

// A ring, for reads or for writes.
typedef struct {
	usrbio_iov iov;
	void *handle;
	char mount_point[256];
	bool for_read;
	int io_depth;
	int priority;
	int timeout;
	uint64_t flags;
} usrbio_ior;

// The completion of a request: the number of bytes, or a negative errno.
typedef struct {
	int32_t index;
	int32_t reserved;
	int64_t result;
	const void *userdata;
} usrbio_cqe;

_Static_assert(sizeof(usrbio_iov) == 312 && offsetof(usrbio_iov, mount_point) == 32 && offsetof(usrbio_iov, size) == 288 &&
	offsetof(usrbio_iov, block_size) == 296 && offsetof(usrbio_iov, numa) == 304, "struct hf3fs_iov");
_Static_assert(sizeof(usrbio_ior) == 600 && offsetof(usrbio_ior, handle) == 312 && offsetof(usrbio_ior, mount_point) == 320 &&
	offsetof(usrbio_ior, for_read) == 576 && offsetof(usrbio_ior, io_depth) == 580 && offsetof(usrbio_ior, priority) == 584 &&
	offsetof(usrbio_ior, timeout) == 588 && offsetof(usrbio_ior, flags) == 592, "struct hf3fs_ior");
_Static_assert(sizeof(usrbio_cqe) == 24 && offsetof(usrbio_cqe, result) == 8 && offsetof(usrbio_cqe, userdata) == 16, "struct hf3fs_cqe");

typedef struct {
	void *handle;
	int (*extract_mount_point)(char *, int, const char *);
	int (*iovcreate)(usrbio_iov *, const char *, size_t, size_t, int);
	void (*iovunlink)(usrbio_iov *);
	void (*iovdestroy)(usrbio_iov *);
	int (*iorcreate4)(usrbio_ior *, const char *, int, bool, int, int, int, uint64_t);
	void (*iordestroy)(usrbio_ior *);
	int (*io_entries)(const usrbio_ior *);
	int (*reg_fd)(int, uint64_t);
	void (*dereg_fd)(int);
	int (*prep_io)(const usrbio_ior *, const usrbio_iov *, bool, void *, int, size_t, uint64_t, const void *);
	int (*submit_ios)(const usrbio_ior *);
	int (*wait_for_ios)(const usrbio_ior *, usrbio_cqe *, int, int, const struct timespec *);
} usrbio_library;

// A request and the result of its preparation: a slot of the ring, or a negative errno.
typedef struct {
	uint64_t at;  // offset in the buffer
	uint64_t offset; // offset in the file
	uint64_t len;
	uint64_t id; // the completion has the same id
	int32_t fd;
	int32_t prepared;
} usrbio_request;

// A completion.
typedef struct {
	uint64_t id;
	int64_t result;
} usrbio_completion;

// The largest number of completions that usrbio_wait returns.
#define USRBIO_WAIT_MAX 64

// The size of the buffer that usrbio_mount_point fills. The library counts components of the path,
// and not bytes, when it checks the size, so the buffer has the longest path of Linux.
#define USRBIO_PATH_MAX 4096

// Loads the library. On failure it writes into why which library or function is missing.
int usrbio_load(usrbio_library *, const char *path, char *why, size_t why_len);

// Writes into mount_point the mount of 3FS that path is on. It returns -1 if there is none.
int usrbio_mount_point(usrbio_library *, char *mount_point, const char *path);

// Creates a buffer and removes its name below /dev/shm. The daemon maps the buffer when it is
// registered, so the name is not needed afterwards, and no file is left if the process is killed.
int usrbio_iov_create(usrbio_library *, usrbio_iov *, const char *mount_point, size_t size);
void usrbio_iov_destroy(usrbio_library *, usrbio_iov *);

// Creates a ring whose daemon starts each request at once (io_depth 0).
int usrbio_ior_create(usrbio_library *, usrbio_ior *, const char *mount_point, int entries, bool for_read);
void usrbio_ior_destroy(usrbio_library *, usrbio_ior *);
int usrbio_entries(usrbio_library *, const usrbio_ior *);

// Registers a descriptor. It returns 0 or a positive errno.
int usrbio_register(usrbio_library *, int fd);
void usrbio_deregister(usrbio_library *, int fd);

// Prepares count requests and starts the prepared requests. Preparation ends at the first
// request for which the ring has no room: prepared of that request and of the following ones is
// -EAGAIN. The result is 0, or the negative errno of the start.
int usrbio_submit(usrbio_library *, const usrbio_ior *, const usrbio_iov *, usrbio_request *, size_t count);

// Waits at most milliseconds for a completion. It returns the number of completions, at most
// USRBIO_WAIT_MAX, or a negative errno.
int usrbio_wait(usrbio_library *, const usrbio_ior *, usrbio_completion *, int milliseconds);

#endif
