// A CUDA driver for tests. Device memory is host memory. Copies are performed only when
// a later event is waited for, so a test that reads too early reads the old bytes.
// The environment variable FAKE_CUDA_FAIL injects a fault: "cuMemcpyAsync 3" makes the
// third call of this function fail. When the library is unloaded, it appends a line to
// the file FAKE_CUDA_REPORT, with the number of objects that were created and not
// released. FAKE_CUDA_DEVICE lists further device memory as
// "ADDRESS:BYTES,ADDRESS:BYTES" in hexadecimal, in whole pages of the machine. The CPU
// can access that memory only during a copy.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <pthread.h>
#include <sys/mman.h>

typedef struct copy {
	struct copy *next;
	uint64_t dst, src;
	size_t len;
} copy;

typedef struct {
	copy *first, **last;
} stream;

typedef struct {
	stream *at;
} event;

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static long open_things;

__attribute__((destructor)) static void report(void) {
	const char *path = getenv("FAKE_CUDA_REPORT");
	FILE *f = path == NULL ? NULL : fopen(path, "a");
	if (f == NULL) return;
	fprintf(f, "%ld left\n", open_things);
	fclose(f);
}

static void count(int n) {
	pthread_mutex_lock(&mu);
	open_things += n;
	pthread_mutex_unlock(&mu);
}

// Reports whether this call must fail (FAKE_CUDA_FAIL).
static int fails(const char *name, int *calls) {
	const char *spec = getenv("FAKE_CUDA_FAIL");
	char want[64];
	int nth = 0;
	++*calls;
	return spec != NULL && sscanf(spec, "%63s %d", want, &nth) == 2 && strcmp(want, name) == 0 && nth == *calls;
}

#define FAULT(name) do { static int calls; if (fails(name, &calls)) return 999; } while (0)

int cuInit(unsigned f) { FAULT("cuInit"); return 0; }
int cuDeviceGet(int *d, int i) { FAULT("cuDeviceGet"); if (i > 0) return 101; *d = i; return 0; }
int cuDeviceGetName(char *s, int n, int d) { snprintf(s, n, "fake GPU %d", d); return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { FAULT("cuDevicePrimaryCtxRetain"); static int context; *c = &context; count(1); return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { count(-1); return 0; }
static __thread void *current;
int cuCtxSetCurrent(void *c) { current = c; return 0; }
static int outside(void) { return current == NULL; }

int cuStreamCreate(void **s, unsigned f) {
	FAULT("cuStreamCreate");
	if (outside()) return 201;
	stream *x = calloc(1, sizeof(stream));
	x->last = &x->first;
	*s = x;
	count(1);
	return 0;
}
int cuStreamDestroy_v2(void *s) { if (outside()) return 201; free(s); count(-1); return 0; }

int cuEventCreate(void **e, unsigned f) {
	FAULT("cuEventCreate");
	if (outside()) return 201;
	*e = calloc(1, sizeof(event));
	count(1);
	return 0;
}
int cuEventDestroy_v2(void *e) { free(e); count(-1); return 0; }
int cuEventRecord(void *e, void *s) { FAULT("cuEventRecord"); if (outside()) return 201; ((event *)e)->at = s; return 0; }

// Allows or forbids access to the device memory of FAKE_CUDA_DEVICE that has address p.
static void guard(uint64_t p, int allow) {
	const char *at = getenv("FAKE_CUDA_DEVICE");
	while (at != NULL && *at != 0) {
		unsigned long long address, bytes;
		if (sscanf(at, "%llx:%llx", &address, &bytes) != 2) abort();
		if (p >= address && p - address < bytes && mprotect((void *)(uintptr_t)address, bytes, allow ? PROT_READ | PROT_WRITE : PROT_NONE) != 0) abort();
		at = strchr(at, ',');
		if (at != NULL) at++;
	}
}

int cuEventSynchronize(void *e) {
	FAULT("cuEventSynchronize");
	if (outside()) return 201;
	stream *s = ((event *)e)->at;
	if (s == NULL) return 0;
	pthread_mutex_lock(&mu);
	while (s->first != NULL) {
		copy *c = s->first;
		guard(c->dst, 1), guard(c->src, 1);
		memcpy((void *)(uintptr_t)c->dst, (void *)(uintptr_t)c->src, c->len);
		guard(c->dst, 0), guard(c->src, 0);
		s->first = c->next;
		free(c);
	}
	s->last = &s->first;
	pthread_mutex_unlock(&mu);
	return 0;
}

int cuMemAlloc_v2(uint64_t *p, size_t n) {
	FAULT("cuMemAlloc_v2");
	if (outside()) return 201;
	if (n == 0 || n > (size_t)1 << 32) return 2;
	*p = (uint64_t)(uintptr_t)malloc(n);
	count(1);
	return 0;
}
int cuMemFree_v2(uint64_t p) { FAULT("cuMemFree_v2"); free((void *)(uintptr_t)p); count(-1); return 0; }
int cuMemHostRegister_v2(void *p, size_t n, unsigned f) { FAULT("cuMemHostRegister_v2"); if (outside()) return 201; count(1); return 0; }
int cuMemHostUnregister(void *p) { count(-1); return 0; }

int cuMemcpyAsync(uint64_t dst, uint64_t src, size_t n, void *st) {
	FAULT("cuMemcpyAsync");
	if (outside()) return 201;
	stream *s = st;
	copy *c = malloc(sizeof(copy));
	c->next = NULL, c->dst = dst, c->src = src, c->len = n;
	pthread_mutex_lock(&mu);
	*s->last = c;
	s->last = &c->next;
	pthread_mutex_unlock(&mu);
	return 0;
}

int cuGetErrorString(int r, const char **s) {
	*s = r == 999 ? "made to fail" : r == 101 ? "invalid device ordinal" : r == 2 ? "out of memory" : NULL;
	return *s == NULL;
}
