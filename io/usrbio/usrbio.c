//go:build cgo && linux

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "usrbio.h"

int usrbio_load(usrbio_library *l, const char *path, char *why, size_t why_len) {
	struct {
		const char *name;
		void *field;
	} functions[] = {
		{"hf3fs_extract_mount_point", &l->extract_mount_point},
		{"hf3fs_iovcreate", &l->iovcreate},
		{"hf3fs_iovunlink", &l->iovunlink},
		{"hf3fs_iovdestroy", &l->iovdestroy},
		{"hf3fs_iorcreate4", &l->iorcreate4},
		{"hf3fs_iordestroy", &l->iordestroy},
		{"hf3fs_io_entries", &l->io_entries},
		{"hf3fs_reg_fd", &l->reg_fd},
		{"hf3fs_dereg_fd", &l->dereg_fd},
		{"hf3fs_prep_io", &l->prep_io},
		{"hf3fs_submit_ios", &l->submit_ios},
		{"hf3fs_wait_for_ios", &l->wait_for_ios},
	};
	// The library has threads and static objects of C++, so it stays loaded until the process ends.
	l->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
	if (l->handle == NULL) {
		snprintf(why, why_len, "%s", dlerror());
		return -1;
	}
	for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
		void *f = dlsym(l->handle, functions[i].name);
		if (f == NULL) {
			snprintf(why, why_len, "%s has no %s", path, functions[i].name);
			dlclose(l->handle);
			return -1;
		}
		memcpy(functions[i].field, &f, sizeof(f));
	}
	return 0;
}

int usrbio_mount_point(usrbio_library *l, char *mount_point, const char *path) {
	mount_point[0] = 0;
	// The result counts components of the path; only its sign and the string are used.
	int r = l->extract_mount_point(mount_point, USRBIO_PATH_MAX, path);
	return r < 0 || mount_point[0] == 0 ? -1 : 0;
}

int usrbio_iov_create(usrbio_library *l, usrbio_iov *iov, const char *mount_point, size_t size) {
	int r = l->iovcreate(iov, mount_point, size, 0, -1);
	if (r == 0) l->iovunlink(iov);
	return r;
}

void usrbio_iov_destroy(usrbio_library *l, usrbio_iov *iov) { l->iovdestroy(iov); }

int usrbio_ior_create(usrbio_library *l, usrbio_ior *ior, const char *mount_point, int entries, bool for_read) {
	// iordestroy does not find the registration of a ring with flags of 2 or more.
	return l->iorcreate4(ior, mount_point, entries, for_read, 0, 0, -1, 0);
}

void usrbio_ior_destroy(usrbio_library *l, usrbio_ior *ior) { l->iordestroy(ior); }

int usrbio_entries(usrbio_library *l, const usrbio_ior *ior) { return l->io_entries(ior); }

int usrbio_register(usrbio_library *l, int fd) {
	int r = l->reg_fd(fd, 0);
	return r > 0 ? r : 0;
}

void usrbio_deregister(usrbio_library *l, int fd) { l->dereg_fd(fd); }

int usrbio_submit(usrbio_library *l, const usrbio_ior *ior, const usrbio_iov *iov, usrbio_request *requests, size_t count) {
	size_t started = 0;
	int full = 0;
	for (size_t i = 0; i < count; i++) {
		usrbio_request *r = &requests[i];
		r->prepared = -EAGAIN;
		if (!full) r->prepared = l->prep_io(ior, iov, ior->for_read, iov->base + r->at, r->fd, r->offset, r->len, (const void *)(uintptr_t)r->id);
		full |= r->prepared == -EAGAIN;
		started += r->prepared >= 0;
	}
	return started == 0 ? 0 : l->submit_ios(ior);
}

int usrbio_wait(usrbio_library *l, const usrbio_ior *ior, usrbio_completion *completions, int milliseconds) {
	struct timespec until;
	usrbio_cqe cqes[USRBIO_WAIT_MAX];
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += milliseconds / 1000;
	until.tv_nsec += milliseconds % 1000 * 1000000L;
	if (until.tv_nsec >= 1000000000L) {
		until.tv_sec++;
		until.tv_nsec -= 1000000000L;
	}
	int n = l->wait_for_ios(ior, cqes, USRBIO_WAIT_MAX, 1, &until);
	for (int i = 0; i < n; i++) {
		completions[i].id = (uint64_t)(uintptr_t)cqes[i].userdata;
		completions[i].result = cqes[i].result;
	}
	return n;
}
