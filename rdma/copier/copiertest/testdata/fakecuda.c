// A CUDA driver for tests. Device memory is host memory. Copies are performed only when
// a later event is waited for, so a test that reads too early reads the old bytes. A stream waits for
// the events of another one, and for gates (fakeGate), which a test opens.
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

typedef struct stream stream;

// A step of a stream: a copy, a wait until another stream has done its steps before upto, or a gate.
typedef struct step {
	struct step *next;
	uint64_t dst, src;
	size_t len;
	stream *of;
	uint64_t upto;
	int *gate;
} step;

// The steps before number done are done, and those before number end are in the stream.
struct stream {
	step *first, **last;
	uint64_t done, end;
	int runs;
};

typedef struct {
	stream *of;
	uint64_t upto;
} event;

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static long open_things;
static stream default_stream = {.last = &default_stream.first};

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
static __thread void *contexts[8];
static __thread int depth;
int cuCtxPushCurrent_v2(void *c) { if (depth == 8) return 1; contexts[depth++] = c; return 0; }
int cuCtxPopCurrent_v2(void **c) { if (depth == 0) return 201; *c = contexts[--depth]; return 0; }
static int outside(void) { return depth == 0; }
static stream *stream_of(void *s) { return s == NULL ? &default_stream : s; }

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
int cuEventRecord(void *e, void *s) {
	FAULT("cuEventRecord");
	if (outside()) return 201;
	event *x = e;
	pthread_mutex_lock(&mu);
	x->of = stream_of(s), x->upto = x->of->end;
	pthread_mutex_unlock(&mu);
	return 0;
}

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

// Performs the steps of a stream before number upto. The caller holds mu.
static void advance(stream *s, uint64_t upto) {
	while (s->done < upto) {
		if (s->runs) { // on another thread
			pthread_cond_wait(&changed, &mu);
			continue;
		}
		s->runs = 1;
		step *c = s->first;
		if (c->of != NULL) advance(c->of, c->upto);
		while (c->gate != NULL && !*c->gate) pthread_cond_wait(&changed, &mu);
		if (c->len > 0) {
			guard(c->dst, 1), guard(c->src, 1);
			memcpy((void *)(uintptr_t)c->dst, (void *)(uintptr_t)c->src, c->len);
			guard(c->dst, 0), guard(c->src, 0);
		}
		if ((s->first = c->next) == NULL) s->last = &s->first;
		free(c);
		s->done++, s->runs = 0;
		pthread_cond_broadcast(&changed);
	}
}

int cuEventSynchronize(void *e) {
	FAULT("cuEventSynchronize");
	if (outside()) return 201;
	event *x = e;
	pthread_mutex_lock(&mu);
	if (x->of != NULL) advance(x->of, x->upto);
	pthread_mutex_unlock(&mu);
	return 0;
}

int cuStreamSynchronize(void *s) {
	FAULT("cuStreamSynchronize");
	if (outside()) return 201;
	pthread_mutex_lock(&mu);
	advance(stream_of(s), stream_of(s)->end);
	pthread_mutex_unlock(&mu);
	return 0;
}

static int add(void *to, step c) {
	stream *s = stream_of(to);
	step *x = malloc(sizeof(step));
	*x = c;
	pthread_mutex_lock(&mu);
	*s->last = x;
	s->last = &x->next;
	s->end++;
	pthread_mutex_unlock(&mu);
	return 0;
}

int cuStreamWaitEvent(void *s, void *e, unsigned f) {
	FAULT("cuStreamWaitEvent");
	if (outside()) return 201;
	event *x = e;
	return x->of == NULL ? 0 : add(s, (step){.of = x->of, .upto = x->upto});
}

// Makes a stream wait until fakeOpen opens the gate. It is for tests: no driver has it.
int fakeGate(void *s, int *gate) { return add(s, (step){.gate = gate}); }
void fakeOpen(int *gate) {
	pthread_mutex_lock(&mu);
	*gate = 1;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&mu);
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

int cuMemcpyAsync(uint64_t dst, uint64_t src, size_t n, void *s) {
	FAULT("cuMemcpyAsync");
	if (outside()) return 201;
	return add(s, (step){.dst = dst, .src = src, .len = n});
}

int cuGetErrorString(int r, const char **s) {
	*s = r == 999 ? "made to fail" : r == 101 ? "invalid device ordinal" : r == 2 ? "out of memory" : NULL;
	return *s == NULL;
}
