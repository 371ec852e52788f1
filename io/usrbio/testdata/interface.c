// Tests usrbio.c, and the facts about 3FS's C interface on which package usrbio relies, against the
// library argv[1] on the mount argv[2]. It is built with the sanitizers, and runs under valgrind.

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../usrbio.h"

#define CHECK(c) \
	do { \
		if (!(c)) { \
			fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #c); \
			exit(1); \
		} \
	} while (0)

#define PAGE 4096

static usrbio_library l;
static int (*iovcreate)(usrbio_iov *, const char *, size_t, size_t, int);
static int (*iovwrap)(usrbio_iov *, void *, const uint8_t *, const char *, size_t, size_t, int);
static int (*iovopen)(usrbio_iov *, const uint8_t *, const char *, size_t, size_t, int);
static int (*iorcreate4)(usrbio_ior *, const char *, int, bool, int, int, int, uint64_t);
static int (*punchhole)(int, int, const size_t *, const size_t *, size_t);

static void *function(const char *name) {
	void *f = dlsym(l.handle, name);
	CHECK(f != NULL);
	return f;
}

// transfer performs one request and returns its result.
static int64_t transfer(usrbio_ior *ior, usrbio_iov *iov, int fd, uint64_t at, uint64_t offset, uint64_t len) {
	usrbio_request r = {.at = at, .offset = offset, .len = len, .id = 7ull << 32 | 3, .fd = fd};
	usrbio_completion done[USRBIO_WAIT_MAX];
	CHECK(usrbio_submit(&l, ior, iov, &r, 1) == 0);
	if (r.prepared < 0) return r.prepared;
	int n;
	while ((n = usrbio_wait(&l, ior, done, 1000)) == 0) {}
	CHECK(n == 1 && done[0].id == r.id);
	return done[0].result;
}

int main(int argc, char **argv) {
	char why[512], mount[USRBIO_PATH_MAX], path[USRBIO_PATH_MAX + 64];
	CHECK(argc == 3);
	CHECK(usrbio_load(&l, "/nonexistent/library.so", why, sizeof why) == -1 && strstr(why, "/nonexistent/library.so"));
	CHECK(usrbio_load(&l, "libc.so.6", why, sizeof why) == -1 && strstr(why, "has no hf3fs_extract_mount_point"));
	CHECK(usrbio_load(&l, argv[1], why, sizeof why) == 0);
	iovcreate = (__typeof__(iovcreate))function("hf3fs_iovcreate");
	iovwrap = (__typeof__(iovwrap))function("hf3fs_iovwrap");
	iovopen = (__typeof__(iovopen))function("hf3fs_iovopen");
	iorcreate4 = (__typeof__(iorcreate4))function("hf3fs_iorcreate4");
	punchhole = (__typeof__(punchhole))function("hf3fs_punchhole");

	// The mount, from a path below it. The result of the library counts components, not bytes.
	snprintf(path, sizeof path, "%s/3fs-virt", argv[2]);
	CHECK(usrbio_mount_point(&l, mount, path) == 0 && strcmp(mount, argv[2]) == 0);
	CHECK(l.extract_mount_point(mount, sizeof mount, path) < (int)strlen(mount));
	CHECK(usrbio_mount_point(&l, mount, "/") == -1);
	CHECK(usrbio_mount_point(&l, mount, path) == 0);

	usrbio_ior reads, writes;
	usrbio_iov iov, other;
	CHECK(usrbio_ior_create(&l, &reads, mount, 2, true) == 0 && usrbio_entries(&l, &reads) == 2);
	CHECK(usrbio_ior_create(&l, &writes, mount, 2, false) == 0);
	CHECK(usrbio_iov_create(&l, &iov, mount, 8 * PAGE) == 0 && iov.size == 8 * PAGE && iov.block_size == 0);
	CHECK(iovopen(&other, (uint8_t *)iov.id, mount, 8 * PAGE, 0, -1) < 0); // it has no name any more

	snprintf(path, sizeof path, "%s/file", mount);
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600), plain = open("/dev/null", O_RDWR);
	CHECK(fd >= 0 && plain >= 0);
	CHECK(transfer(&writes, &iov, fd, 0, 0, PAGE) == -EBADF); // not registered
	CHECK(usrbio_register(&l, fd) == 0 && usrbio_register(&l, fd) == EINVAL && usrbio_register(&l, plain) == EBADF);

	memset(iov.base, 'x', 3 * PAGE);
	CHECK(transfer(&writes, &iov, fd, 0, PAGE, 3 * PAGE) == 3 * PAGE);
	CHECK(transfer(&reads, &iov, fd, 4 * PAGE, PAGE, 3 * PAGE) == 3 * PAGE && memcmp(iov.base, iov.base + 4 * PAGE, 3 * PAGE) == 0);
	CHECK(transfer(&reads, &iov, fd, 0, 3 * PAGE, 4 * PAGE) == PAGE); // the end of the file
	CHECK(transfer(&reads, &iov, fd, 0, 9 * PAGE, PAGE) == 0);
	CHECK(transfer(&reads, &iov, fd, 0, 0, 0) == -EINVAL);
	CHECK(transfer(&reads, &iov, fd, 7 * PAGE, 0, 2 * PAGE) == -EINVAL); // outside the buffer
	CHECK(l.prep_io(&reads, &iov, false, iov.base, fd, 0, PAGE, NULL) == -EINVAL); // the wrong direction

	// A full ring: the requests without room have -EAGAIN.
	usrbio_request many[4];
	usrbio_completion done[USRBIO_WAIT_MAX];
	for (int i = 0; i < 4; i++) many[i] = (usrbio_request){.at = (uint64_t)i * PAGE, .offset = PAGE, .len = PAGE, .id = i, .fd = fd};
	CHECK(usrbio_submit(&l, &reads, &iov, many, 4) == 0);
	CHECK(many[0].prepared >= 0 && many[1].prepared >= 0 && many[2].prepared == -EAGAIN && many[3].prepared == -EAGAIN);
	for (int n = 0, got; n < 2; n += got) CHECK((got = usrbio_wait(&l, &reads, done, 1000)) >= 0);
	CHECK(usrbio_wait(&l, &reads, done, 1) == 0); // the time ends

	// Memory of blocks, and memory that is registered already.
	CHECK(iovcreate(&other, mount, 8 * PAGE, 2 * PAGE, -1) == 0);
	CHECK(transfer(&reads, &other, fd, 2 * PAGE, PAGE, 2 * PAGE) == 2 * PAGE);
	CHECK(transfer(&reads, &other, fd, PAGE, PAGE, 2 * PAGE) == -EINVAL); // crosses a block
	usrbio_iov opened, wrapped;
	CHECK(iovopen(&opened, (uint8_t *)other.id, mount, 8 * PAGE, 2 * PAGE, -1) == 0);
	CHECK(memcmp(opened.base + 2 * PAGE, other.base + 2 * PAGE, 2 * PAGE) == 0);
	CHECK(iovwrap(&wrapped, opened.base, (uint8_t *)other.id, mount, 8 * PAGE, 2 * PAGE, -1) == 0);
	CHECK(transfer(&reads, &wrapped, fd, 0, PAGE, PAGE) == PAGE && other.base[0] == 'x');
	l.iovdestroy(&wrapped); // refused: the memory stays
	CHECK(opened.base[0] == 'x');
	l.iovdestroy(&opened);
	usrbio_iov_destroy(&l, &other);

	// io_depth: exactly n at a time, or at most n after a time.
	for (int depth = -2; depth <= 2; depth += 4) {
		usrbio_ior batches;
		usrbio_request two[2] = {many[0], many[1]};
		CHECK(iorcreate4(&batches, mount, 4, true, depth, 10, -1, 0) == 0);
		CHECK(usrbio_submit(&l, &batches, &iov, &two[0], 1) == 0 && two[0].prepared >= 0);
		int n = usrbio_wait(&l, &batches, done, depth < 0 ? 10000 : 20);
		CHECK(n == (depth < 0));
		CHECK(usrbio_submit(&l, &batches, &iov, &two[1], 1) == 0);
		for (int got; n < 2; n += got) CHECK((got = usrbio_wait(&l, &batches, done, 1000)) >= 0);
		usrbio_ior_destroy(&l, &batches);
	}

	// With flags of 2 or more, the registration of a ring is not found again.
	usrbio_ior flagged;
	char command[USRBIO_PATH_MAX + 64];
	CHECK(iorcreate4(&flagged, mount, 1, true, 0, 0, -1, 2) == 0);
	usrbio_ior_destroy(&l, &flagged);
	snprintf(command, sizeof command, "rm %s/3fs-virt/iovs/*.f10", mount);
	CHECK(system(command) == 0);
	CHECK(iorcreate4(&flagged, mount, 1, true, 0, -1, -1, 0) == -EINVAL);

	size_t from = PAGE, to = 2 * PAGE;
	CHECK(punchhole(fd, 1, &from, &to, 0) == 0);
	CHECK(transfer(&reads, &iov, fd, 0, PAGE, PAGE) == PAGE && iov.base[0] == 0);

	// A descriptor whose number is used again must have been deregistered.
	usrbio_deregister(&l, fd);
	close(fd);
	CHECK(open(path, O_RDONLY) == fd && usrbio_register(&l, fd) == 0);
	CHECK(transfer(&writes, &iov, fd, 0, 0, PAGE) == -EACCES);
	usrbio_deregister(&l, fd);
	close(fd);
	close(plain);
	usrbio_iov_destroy(&l, &iov);
	usrbio_ior_destroy(&l, &writes);
	usrbio_ior_destroy(&l, &reads);
	return 0;
}
