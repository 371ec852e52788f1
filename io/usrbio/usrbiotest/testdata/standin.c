// A library with the C interface of 3FS's libhf3fs_api_shared.so, for tests on machines without 3FS.
// Its daemon is a few threads of the process, which read and write the registered files with pread
// and pwrite. doc.go of package usrbiotest describes the faults.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

struct hf3fs_iov {
	uint8_t *base;
	void *iovh;
	char id[16];
	char mount_point[256];
	size_t size;
	size_t block_size;
	int numa;
};

struct hf3fs_ior {
	struct hf3fs_iov iov;
	void *iorh;
	char mount_point[256];
	bool for_read;
	int io_depth;
	int priority;
	int timeout;
	uint64_t flags;
};

struct hf3fs_cqe {
	int32_t index;
	int32_t reserved;
	int64_t result;
	const void *userdata;
};

// The words of the control file, in the order of the constants in control_unsafe.go.
enum { KIND, OP, SKIP, COUNT, ARG, HOLES, RELEASE, COUNTERS = 16 };
enum { PREPARED = COUNTERS, COMPLETED, SUBMITTED, HITS, IN_FLIGHT, PEAK, CROSSED, DESTROYED, FDS, IOVS, RINGS, WORDS };
enum { NONE, ERRNO, SHORT, SLOW, STUCK, LONG, FOREIGN, FULL, REFUSED_SUBMIT, REFUSED_WAIT, REFUSED_IOV, REFUSED_FD, REFUSED_RING };
enum { ANY, READ, WRITE };

static _Atomic int64_t no_control[WORDS];
static _Atomic int64_t *control = no_control;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; // guards files, pipe and links

__attribute__((constructor)) static void start(void) {
	const char *path = getenv("STANDIN_HF3FS_CONTROL");
	int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
	if (fd < 0) return;
	void *m = mmap(NULL, WORDS * sizeof(*control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (m != MAP_FAILED) control = m;
	close(fd);
}

static void count(int word, int64_t n) { atomic_fetch_add(&control[word], n); }

// fault reports whether the present operation is to fail in the way kind.
static bool fault(int kind, int op) {
	if (control[KIND] != kind || (control[OP] != ANY && op != ANY && control[OP] != op)) return false;
	if (atomic_fetch_sub(&control[SKIP], 1) > 0) return false;
	if (atomic_fetch_sub(&control[COUNT], 1) <= 0) return false;
	count(HITS, 1);
	return true;
}

// below reports whether the path is the directory or below it.
static bool below(const char *path, const char *dir) {
	size_t n = strlen(dir);
	return strncmp(path, dir, n) == 0 && (path[n] == '/' || path[n] == 0 || (n > 0 && dir[n - 1] == '/'));
}

// each_mount calls f for each mount of 3FS, with its device (0:0 for a directory of the variable
// STANDIN_HF3FS_MOUNTS, which stands for a mount), until f returns true.
static bool each_mount(bool (*f)(void *, const char *, unsigned, unsigned), void *arg) {
	char line[8192], at[4096], type[64];
	const char *extra = getenv("STANDIN_HF3FS_MOUNTS"), *hook = getenv("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP");
	while (extra && *extra) {
		size_t n = strcspn(extra, ":");
		snprintf(at, sizeof at, "%.*s", (int)n, extra);
		if (f(arg, at, 0, 0)) return true;
		extra += n + (extra[n] == ':');
	}
	FILE *mounts = fopen("/proc/self/mountinfo", "re");
	if (!mounts) return false;
	bool stop = false;
	while (!stop && fgets(line, sizeof line, mounts)) {
		unsigned major, minor;
		char *rest = strstr(line, " - ");
		if (!rest || sscanf(line, "%*d %*d %u:%u %*s %4095s", &major, &minor, at) != 3 || sscanf(rest, " - %63s", type) != 1) continue;
		if (strcmp(type, "fuse.hf3fs") != 0 && !(hook && strcmp(hook, "yes") == 0)) continue;
		stop = f(arg, at, major, minor);
	}
	fclose(mounts);
	return stop;
}

struct find_fd {
	struct stat st;
	char path[4096];
};

static bool holds_fd(void *arg, const char *at, unsigned major, unsigned minor) {
	struct find_fd *f = arg;
	if (major == 0 && minor == 0) return below(f->path, at);
	return f->st.st_dev == makedev(major, minor);
}

bool hf3fs_is_hf3fs(int fd) {
	struct find_fd f;
	char link[64];
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	ssize_t n = readlink(link, f.path, sizeof f.path - 1);
	if (n < 0 || fstat(fd, &f.st) < 0) return false;
	f.path[n] = 0;
	return each_mount(holds_fd, &f);
}

struct find_path {
	char path[4096], best[4096];
};

static bool longest(void *arg, const char *at, unsigned major, unsigned minor) {
	struct find_path *f = arg;
	char virt[4200];
	(void)major, (void)minor;
	snprintf(virt, sizeof virt, "%s/3fs-virt", at);
	if (below(f->path, at) && access(virt, F_OK) == 0 && strlen(at) > strlen(f->best)) strcpy(f->best, at);
	return false;
}

int hf3fs_extract_mount_point(char *mount_point, int size, const char *path) {
	struct find_path f = {.best = ""};
	if (!realpath(path, f.path)) return -1;
	each_mount(longest, &f);
	if (!f.best[0]) return -1;
	int components = 1; // the root
	for (const char *p = f.best; *p; p++) components += *p == '/' && p[1];
	// The size is compared with the number of components, and the result is based on it.
	if (components < size) strcpy(mount_point, f.best);
	return components + 1;
}

// shm is a piece of shared memory.
struct shm {
	char name[64], link[1024];
	void *map;
	size_t size;
	bool named;
	_Atomic int in_flight; // requests that use the memory
};

static char *hex(const char *id, char *out) {
	for (int i = 0; i < 16; i++) sprintf(out + 2 * i, "%02x", (unsigned char)id[i]);
	return out;
}

// forget_at_end makes another process, which ends after this one, remove the path, as the daemon
// removes the registrations of a process that has ended.
static void forget_at_end(const char *path) {
	static int to = -1;
	pthread_mutex_lock(&lock);
	if (to < 0) {
		int ends[2];
		if (pipe2(ends, O_CLOEXEC) == 0) {
			extern char **environ;
			pid_t pid;
			posix_spawn_file_actions_t a;
			char *argv[] = {"sh", "-c", "trap '' INT TERM; while IFS= read -r p; do set -- \"$@\" \"$p\"; done; rm -f -- \"$@\"", "sh", NULL};
			posix_spawn_file_actions_init(&a);
			posix_spawn_file_actions_adddup2(&a, ends[0], 0);
			posix_spawn_file_actions_addopen(&a, 1, "/dev/null", O_WRONLY, 0);
			posix_spawn_file_actions_addopen(&a, 2, "/dev/null", O_WRONLY, 0);
			if (posix_spawn(&pid, "/bin/sh", &a, NULL, argv, environ) == 0) to = ends[1];
			else close(ends[1]);
			posix_spawn_file_actions_destroy(&a);
			close(ends[0]);
		}
	}
	if (to >= 0) dprintf(to, "%s\n", path);
	pthread_mutex_unlock(&lock);
}

static void unname(struct shm *s) {
	if (s->named) shm_unlink(s->name);
	s->named = false;
}

static int create(struct hf3fs_iov *iov, const char *mount, size_t size, size_t block, int numa, const char *suffix) {
	char id[33];
	if (!iov || !mount || !*mount || strlen(mount) >= sizeof iov->mount_point) return -EINVAL;
	if (fault(REFUSED_IOV, ANY)) return -(int)control[ARG];
	struct shm *s = calloc(1, sizeof *s);
	if (getrandom(iov->id, sizeof iov->id, 0) != sizeof iov->id) abort();
	snprintf(s->name, sizeof s->name, "/hf3fs-iov-%s", hex(iov->id, id));
	int fd = shm_open(s->name, O_RDWR | O_CREAT | O_EXCL, 0600);
	if (fd < 0 || ftruncate(fd, size) < 0) goto no_memory;
	s->map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (s->map == MAP_FAILED) goto no_memory;
	close(fd);
	s->named = true;
	s->size = size;
	char target[128], b[32] = "";
	if (block) snprintf(b, sizeof b, ".b%zu", block);
	snprintf(target, sizeof target, "/dev/shm%s", s->name);
	snprintf(s->link, sizeof s->link, "%s/3fs-virt/iovs/%s%s%s", mount, id, b, suffix);
	forget_at_end(target);
	forget_at_end(s->link);
	if (symlink(target, s->link) < 0) {
		int e = errno;
		unname(s);
		munmap(s->map, size);
		free(s);
		return -e;
	}
	iov->base = s->map;
	iov->iovh = s;
	strcpy(iov->mount_point, mount);
	iov->size = size;
	iov->block_size = block;
	iov->numa = numa;
	count(IOVS, 1);
	return 0;
no_memory:
	if (fd >= 0) {
		close(fd);
		shm_unlink(s->name);
	}
	free(s);
	return -EIO;
}

int hf3fs_iovcreate(struct hf3fs_iov *iov, const char *mount, size_t size, size_t block, int numa) {
	return create(iov, mount, size, block, numa, "");
}

int hf3fs_iovopen(struct hf3fs_iov *iov, const uint8_t id[16], const char *mount, size_t size, size_t block, int numa) {
	char text[33], link[1024], path[4096], b[32] = "";
	if (block) snprintf(b, sizeof b, ".b%zu", block);
	snprintf(link, sizeof link, "%s/3fs-virt/iovs/%s%s", mount, hex((const char *)id, text), b);
	if (!realpath(link, path)) return -errno;
	if (!below(path, "/dev/shm")) return -EINVAL;
	int fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0) return -EIO;
	void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (map == MAP_FAILED) return -EIO;
	struct shm *s = calloc(1, sizeof *s);
	s->map = map;
	s->size = size;
	memcpy(iov->id, id, sizeof iov->id);
	iov->base = map;
	iov->iovh = s;
	strcpy(iov->mount_point, mount);
	iov->size = size;
	iov->block_size = block;
	iov->numa = numa;
	count(IOVS, 1);
	return 0;
}

int hf3fs_iovwrap(struct hf3fs_iov *iov, void *base, const uint8_t id[16], const char *mount, size_t size, size_t block, int numa) {
	if (!iov || strlen(mount) >= sizeof iov->mount_point) return -EINVAL;
	iov->iovh = NULL;
	iov->base = base;
	memcpy(iov->id, id, sizeof iov->id);
	strcpy(iov->mount_point, mount);
	iov->size = size;
	iov->block_size = block;
	iov->numa = numa;
	return 0;
}

void hf3fs_iovunlink(struct hf3fs_iov *iov) {
	if (iov && iov->iovh) unname(iov->iovh);
}

void hf3fs_iovdestroy(struct hf3fs_iov *iov) {
	if (!iov || !iov->iovh) return; // memory of iovwrap
	struct shm *s = iov->iovh;
	if (s->in_flight > 0) count(DESTROYED, 1);
	unname(s);
	unlink(s->link);
	munmap(s->map, s->size);
	free(s);
	iov->iovh = NULL;
	count(IOVS, -1);
}

// file is a registered descriptor.
struct file {
	int fd, dup, status, refs; // refs is guarded by lock
};

#define FILES (1 << 16)
static struct file *files[FILES]; // at the index of the descriptor and of its copy

static void drop(struct file *f) {
	pthread_mutex_lock(&lock);
	bool last = --f->refs == 0;
	pthread_mutex_unlock(&lock);
	if (!last) return;
	close(f->dup);
	free(f);
	count(FDS, -1);
}

int hf3fs_reg_fd(int fd, uint64_t flags) {
	(void)flags;
	if (fault(REFUSED_FD, ANY)) return control[ARG];
	if (fd < 0 || fd >= FILES || !hf3fs_is_hf3fs(fd)) return EBADF;
	int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0), status = fcntl(fd, F_GETFL);
	if (copy < 0) return errno;
	pthread_mutex_lock(&lock);
	if (files[fd] || copy >= FILES || files[copy]) {
		pthread_mutex_unlock(&lock);
		close(copy);
		return EINVAL;
	}
	struct file *f = malloc(sizeof *f);
	*f = (struct file){fd, copy, status, 1};
	files[fd] = files[copy] = f;
	pthread_mutex_unlock(&lock);
	count(FDS, 1);
	return -copy;
}

void hf3fs_dereg_fd(int fd) {
	if (fd < 0 || fd >= FILES || !hf3fs_is_hf3fs(fd)) return;
	pthread_mutex_lock(&lock);
	struct file *f = files[fd];
	if (f) files[f->fd] = files[f->dup] = NULL;
	pthread_mutex_unlock(&lock);
	if (f) drop(f);
}

struct request {
	int slot;
	struct file *file;
	struct shm *memory; // NULL for memory of iovwrap
	uint8_t *ptr;
	size_t at, block, off;
	uint64_t len;
	const void *userdata;
	bool submitted;
	int64_t result;
	struct timespec since;
	struct request *next;
};

struct list {
	struct request *first, *last;
	int n;
};

static void push(struct list *l, struct request *r) {
	r->next = NULL;
	if (l->n++ == 0) l->first = r;
	else l->last->next = r;
	l->last = r;
}

static struct request *pop(struct list *l) {
	struct request *r = l->first;
	if (!r) return NULL;
	l->first = r->next;
	l->n--;
	return r;
}

#define WORKERS 4

struct ring {
	pthread_mutex_t lock;
	pthread_cond_t work, done;
	int entries, depth, timeout;
	bool for_read, stop;
	int *slots, free; // the free slots
	struct list waiting, running, held, completed;
	int busy; // requests prepared whose completion was not returned
	pthread_t workers[WORKERS];
};

static int64_t milliseconds_since(const struct timespec *t) {
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (now.tv_sec - t->tv_sec) * 1000 + (now.tv_nsec - t->tv_nsec) / 1000000;
}

// admit moves requests from waiting to running by the rule of io_depth.
static void admit(struct ring *r) {
	while (r->held.n && control[KIND] != STUCK) push(&r->running, pop(&r->held));
	while (r->held.n && atomic_load(&control[RELEASE]) > 0) {
		count(RELEASE, -1);
		push(&r->running, pop(&r->held));
	}
	int n = 0;
	if (r->depth == 0) {
		// The daemon may start a request before it is submitted. Every other one does so here.
		struct list rest = {0};
		for (struct request *q; (q = pop(&r->waiting));) push(q->submitted || q->slot % 2 ? &r->running : &rest, q);
		r->waiting = rest;
		return;
	}
	while (r->waiting.n > 0) {
		if (r->depth > 0) n = r->waiting.n >= r->depth ? r->depth : 0;
		else if (r->waiting.n >= -r->depth) n = -r->depth;
		else n = milliseconds_since(&r->waiting.first->since) >= r->timeout ? r->waiting.n : 0;
		if (n == 0) return;
		while (n-- > 0) push(&r->running, pop(&r->waiting));
	}
}

static int64_t perform(struct ring *r, struct request *q) {
	int op = r->for_read ? READ : WRITE;
	uint64_t len = q->len;
	if (q->block && q->at / q->block != (q->at + q->len - 1) / q->block) {
		count(CROSSED, 1);
		return -EINVAL;
	}
	if (fault(ERRNO, op)) return -control[ARG];
	if (fault(SLOW, op)) usleep(control[ARG]);
	if (fault(SHORT, op) && (uint64_t)control[ARG] < len) len = control[ARG];
	if (r->for_read && control[HOLES]) {
		off_t hole = lseek(q->file->dup, q->off, SEEK_HOLE);
		if (hole >= 0 && (uint64_t)hole < q->off + len) len = hole - q->off;
	}
	if (len == 0) return 0;
	ssize_t n;
	// With O_DIRECT the kernel moves whole pages; a short result then reports a part of them.
	uint64_t whole = (len + 4095) & ~4095ull;
	if (whole > q->len) whole = q->len;
	if (r->for_read) n = pread(q->file->dup, q->ptr, whole, q->off);
	else n = pwrite(q->file->dup, q->ptr, whole, q->off);
	if (n < 0) return -errno;
	return (uint64_t)n < len ? n : (int64_t)len;
}

static void *work(void *arg) {
	struct ring *r = arg;
	pthread_mutex_lock(&r->lock);
	for (;;) {
		admit(r);
		struct request *q = pop(&r->running);
		if (!q && r->stop) break;
		if (!q) {
			struct timespec t;
			clock_gettime(CLOCK_REALTIME, &t);
			t.tv_nsec += 2000000;
			if (t.tv_nsec >= 1000000000) t.tv_sec++, t.tv_nsec -= 1000000000;
			if (r->held.n || (r->waiting.n && r->depth < 0)) pthread_cond_timedwait(&r->work, &r->lock, &t);
			else pthread_cond_wait(&r->work, &r->lock);
			continue;
		}
		if (fault(STUCK, r->for_read ? READ : WRITE)) {
			push(&r->held, q);
			continue;
		}
		pthread_mutex_unlock(&r->lock);
		q->result = perform(r, q);
		if (fault(LONG, ANY)) q->result = q->len + 4096;
		if (fault(FOREIGN, ANY)) q->userdata = (const void *)((uintptr_t)q->userdata ^ (control[ARG] ? (uintptr_t)control[ARG] : 1ull << 40));
		pthread_mutex_lock(&r->lock);
		push(&r->completed, q);
		count(COMPLETED, 1);
		count(IN_FLIGHT, -1);
		if (q->memory) atomic_fetch_sub(&q->memory->in_flight, 1);
		pthread_cond_broadcast(&r->done);
	}
	pthread_mutex_unlock(&r->lock);
	return NULL;
}

size_t hf3fs_ior_size(int entries) { return 16 + 32 + 96 * ((size_t)entries + 1) + 4096; }

static int ior_create(struct hf3fs_ior *ior, const char *mount, int entries, bool for_read, int depth, int priority, int timeout, int numa, uint64_t flags) {
	char suffix[160], bits[66] = "", *b = bits;
	if (!ior || !mount || !*mount || timeout < 0 || entries < 1) return -EINVAL;
	if (fault(REFUSED_RING, for_read ? READ : WRITE)) return -(int)control[ARG];
	bool any = false;
	for (int i = 63; flags && i >= 0; i--) {
		any |= flags >> i & 1;
		if (any) *b++ = '0' + (flags >> i & 1);
	}
	*b = 0;
	snprintf(suffix, sizeof suffix, ".%c%d%s.t%d%s%s", for_read ? 'r' : 'w', depth, priority < 0 ? ".ph" : priority > 0 ? ".pl" : "", timeout, flags ? ".f" : "", bits);
	int e = create(&ior->iov, mount, hf3fs_ior_size(entries), 0, numa, suffix);
	if (e < 0) return e;
	unname(ior->iov.iovh);
	if (flags >= 2) { // the library looks for the flags in decimal when it removes the link
		struct shm *s = ior->iov.iovh;
		snprintf(s->link + strlen(s->link) - strlen(bits), 24, "%llu", (unsigned long long)flags);
	}
	struct ring *r = calloc(1, sizeof *r);
	pthread_mutex_init(&r->lock, NULL);
	pthread_cond_init(&r->work, NULL);
	pthread_cond_init(&r->done, NULL);
	r->entries = r->free = entries;
	r->depth = depth;
	r->timeout = timeout;
	r->for_read = for_read;
	r->slots = calloc(entries, sizeof *r->slots);
	for (int i = 0; i < entries; i++) r->slots[i] = i;
	for (int i = 0; i < WORKERS; i++) {
		if (pthread_create(&r->workers[i], NULL, work, r) != 0) abort();
	}
	ior->iorh = r;
	strcpy(ior->mount_point, mount);
	ior->for_read = for_read;
	ior->io_depth = depth;
	ior->priority = priority;
	ior->timeout = timeout;
	ior->flags = flags;
	count(RINGS, 1);
	return 0;
}

int hf3fs_iorcreate(struct hf3fs_ior *ior, const char *mount, int entries, bool for_read, int depth, int numa) {
	return ior_create(ior, mount, entries, for_read, depth, 0, 0, numa, 0);
}

int hf3fs_iorcreate2(struct hf3fs_ior *ior, const char *mount, int entries, bool for_read, int depth, int priority, int numa) {
	return ior_create(ior, mount, entries, for_read, depth, priority, 0, numa, 0);
}

int hf3fs_iorcreate3(struct hf3fs_ior *ior, const char *mount, int entries, bool for_read, int depth, int priority, int timeout, int numa) {
	return ior_create(ior, mount, entries, for_read, depth, priority, timeout, numa, 0);
}

int hf3fs_iorcreate4(struct hf3fs_ior *ior, const char *mount, int entries, bool for_read, int depth, int timeout, int numa, uint64_t flags) {
	return ior_create(ior, mount, entries, for_read, depth, 0, timeout, numa, flags);
}

static void discard(struct list *l) {
	for (struct request *q; (q = pop(l));) {
		drop(q->file);
		free(q);
	}
}

void hf3fs_iordestroy(struct hf3fs_ior *ior) {
	if (!ior || !ior->iorh) return;
	struct ring *r = ior->iorh;
	pthread_mutex_lock(&r->lock);
	if (r->busy > 0) count(DESTROYED, 1);
	r->stop = true;
	pthread_cond_broadcast(&r->work);
	pthread_mutex_unlock(&r->lock);
	for (int i = 0; i < WORKERS; i++) pthread_join(r->workers[i], NULL);
	discard(&r->waiting);
	discard(&r->held);
	discard(&r->completed);
	pthread_cond_destroy(&r->work);
	pthread_cond_destroy(&r->done);
	pthread_mutex_destroy(&r->lock);
	free(r->slots);
	free(r);
	ior->iorh = NULL;
	hf3fs_iovdestroy(&ior->iov);
	count(RINGS, -1);
}

int hf3fs_io_entries(const struct hf3fs_ior *ior) { return ((struct ring *)ior->iorh)->entries; }

int hf3fs_prep_io(const struct hf3fs_ior *ior, const struct hf3fs_iov *iov, bool read, void *ptr, int fd, size_t off, uint64_t len, const void *userdata) {
	if (!ior || !ior->iorh || read != ior->for_read || !iov || !ptr || !iov->base || len == 0 || fd == INT_MIN) return -EINVAL;
	struct ring *r = ior->iorh;
	uintptr_t at = (uintptr_t)ptr - (uintptr_t)iov->base;
	if ((uintptr_t)ptr < (uintptr_t)iov->base || at > iov->size || len > iov->size - at) return -EINVAL;
	fd = fd < 0 ? -fd : fd;
	if (fd >= FILES) return -EINVAL;
	pthread_mutex_lock(&lock);
	struct file *f = files[fd];
	if (f) f->refs++;
	pthread_mutex_unlock(&lock);
	if (!f) return -EBADF;
	int mode = f->status & O_ACCMODE, slot = -EAGAIN;
	if (mode == (read ? O_WRONLY : O_RDONLY)) {
		drop(f);
		return -EACCES;
	}
	pthread_mutex_lock(&r->lock);
	if (r->free > 0 && !fault(FULL, read ? READ : WRITE)) {
		slot = r->slots[--r->free];
		struct request *q = calloc(1, sizeof *q);
		*q = (struct request){.slot = slot, .file = f, .memory = iov->iovh, .ptr = ptr, .at = at, .block = iov->block_size, .off = off, .len = len, .userdata = userdata};
		clock_gettime(CLOCK_MONOTONIC, &q->since);
		if (q->memory) atomic_fetch_add(&q->memory->in_flight, 1);
		r->busy++;
		count(PREPARED, 1);
		count(IN_FLIGHT, 1);
		int64_t now = control[IN_FLIGHT], peak = control[PEAK];
		while (now > peak && !atomic_compare_exchange_weak(&control[PEAK], &peak, now)) {}
		push(&r->waiting, q);
		pthread_cond_signal(&r->work);
	}
	pthread_mutex_unlock(&r->lock);
	if (slot < 0) drop(f);
	return slot;
}

int hf3fs_submit_ios(const struct hf3fs_ior *ior) {
	if (!ior || !ior->iorh) return -EINVAL;
	struct ring *r = ior->iorh;
	if (fault(REFUSED_SUBMIT, r->for_read ? READ : WRITE)) return -(int)control[ARG];
	pthread_mutex_lock(&r->lock);
	for (struct request *q = r->waiting.first; q; q = q->next) q->submitted = true;
	pthread_cond_broadcast(&r->work);
	pthread_mutex_unlock(&r->lock);
	count(SUBMITTED, 1);
	return 0;
}

int hf3fs_wait_for_ios(const struct hf3fs_ior *ior, struct hf3fs_cqe *cqes, int cqec, int min, const struct timespec *until) {
	if (cqec <= 0 || !ior || !ior->iorh) return -EINVAL;
	struct ring *r = ior->iorh;
	if (min > cqec) min = cqec;
	int n = 0;
	pthread_mutex_lock(&r->lock);
	for (;;) {
		if (fault(REFUSED_WAIT, r->for_read ? READ : WRITE)) {
			n = -(int)control[ARG];
			break;
		}
		// Every other completion is taken out of order.
		while (n < cqec && r->completed.n > 0) {
			if (r->completed.n > 1 && n % 2 == 0) push(&r->completed, pop(&r->completed));
			struct request *q = pop(&r->completed);
			cqes[n++] = (struct hf3fs_cqe){q->slot, 0, q->result, q->userdata};
			r->slots[r->free++] = q->slot;
			r->busy--;
			drop(q->file);
			free(q);
		}
		if (n >= min) break;
		if (!until) pthread_cond_wait(&r->done, &r->lock);
		else if (pthread_cond_timedwait(&r->done, &r->lock, until) == ETIMEDOUT && r->completed.n == 0) break;
	}
	pthread_mutex_unlock(&r->lock);
	return n;
}

int hf3fs_hardlink(const char *target, const char *link_name) { return link(target, link_name) == 0 ? 0 : errno; }

int hf3fs_punchhole(int fd, int n, const size_t *start, const size_t *end, size_t flags) {
	(void)flags;
	if (n < 0 || n > 1000) return EINVAL;
	for (int i = 0; i < n; i++) {
		if (fallocate(fd, 1 | 2, start[i], end[i] - start[i]) < 0) return errno; // keep the size, punch a hole
	}
	return 0;
}
