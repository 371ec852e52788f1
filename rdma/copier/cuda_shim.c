//go:build cuda && cgo && linux

#include <dlfcn.h>
#include <stdio.h>

#include "cuda_shim.h"

// Flags of cuda.h.
#define STREAM_NON_BLOCKING 1
#define EVENT_BLOCKING_SYNC 1
#define EVENT_DISABLE_TIMING 2
#define HOST_REGISTER_PORTABLE 1

int copier_cuda_load(copier_cuda *c, const char *path, char *why, size_t why_len) {
	// Functions with the suffix _v2 have the ABI since CUDA 4, with sizes of 64 bits.
	struct {
		const char *name;
		void *field;
	} functions[] = {
		{"cuInit", &c->init},
		{"cuDeviceGet", &c->device_get},
		{"cuDeviceGetName", &c->device_name},
		{"cuDevicePrimaryCtxRetain", &c->context_retain},
		{"cuDevicePrimaryCtxRelease_v2", &c->context_release},
		{"cuCtxPushCurrent_v2", &c->context_push},
		{"cuCtxPopCurrent_v2", &c->context_pop},
		{"cuStreamCreate", &c->stream_create},
		{"cuStreamDestroy_v2", &c->stream_destroy},
		{"cuEventCreate", &c->event_create},
		{"cuEventDestroy_v2", &c->event_destroy},
		{"cuEventRecord", &c->event_record},
		{"cuEventSynchronize", &c->event_wait},
		{"cuStreamWaitEvent", &c->stream_wait},
		{"cuStreamSynchronize", &c->stream_synchronize},
		{"cuMemAlloc_v2", &c->mem_alloc},
		{"cuMemFree_v2", &c->mem_free},
		{"cuMemHostRegister_v2", &c->host_register},
		{"cuMemHostUnregister", &c->host_unregister},
		{"cuMemcpyAsync", &c->memcpy_async},
		{"cuGetErrorString", &c->error_string},
	};
	c->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (c->library == NULL) {
		snprintf(why, why_len, "%s", dlerror());
		return -1;
	}
	for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
		void *f = dlsym(c->library, functions[i].name);
		if (f == NULL) {
			snprintf(why, why_len, "%s has no %s", path, functions[i].name);
			dlclose(c->library);
			return -1;
		}
		*(void **)functions[i].field = f;
	}
	return 0;
}

const char *copier_cuda_error(copier_cuda *c, int result) {
	const char *text = NULL;
	if (c->error_string(result, &text) != 0 || text == NULL) {
		return "unknown error";
	}
	return text;
}

// The context is current for a thread. Each function pushes it and pops it, because Go may run the
// next call on another thread, and the thread of a caller of the library keeps its own context.
static int enter(copier_cuda *c, void *context) { return c->context_push(context); }

static int leave(copier_cuda *c, int result) {
	void *context;
	int popped = c->context_pop(&context);
	return result != 0 ? result : popped;
}

#define IN_CONTEXT(c, context, call)      \
	do {                                  \
		int entered = enter(c, context);  \
		if (entered != 0) return entered; \
		return leave(c, call);            \
	} while (0)

int copier_cuda_open(copier_cuda *c, int device, void **context, void **stream, int *cu_device, char *name, int name_len) {
	int r = c->init(0);
	if (r == 0) r = c->device_get(cu_device, device);
	if (r == 0) r = c->device_name(name, name_len, *cu_device);
	if (r == 0) r = c->context_retain(context, *cu_device);
	if (r != 0) return r;
	r = enter(c, *context);
	if (r == 0) r = leave(c, c->stream_create(stream, STREAM_NON_BLOCKING));
	if (r != 0) c->context_release(*cu_device);
	return r;
}

int copier_cuda_close(copier_cuda *c, int cu_device, void *context, void *stream) {
	int r = enter(c, context);
	if (r == 0) r = leave(c, c->stream_destroy(stream));
	int released = c->context_release(cu_device);
	return r != 0 ? r : released;
}

void copier_cuda_unload(copier_cuda *c) { dlclose(c->library); }

int copier_cuda_submit(copier_cuda *c, void *context, void *stream, void *after, void *event, uint64_t src, uint64_t dst,
	const copier_span *spans, size_t count, size_t *started) {
	*started = 0;
	int r = enter(c, context);
	if (r != 0) return r;
	if (after != NULL) r = c->stream_wait(stream, after, 0);
	while (r == 0 && *started < count) {
		const copier_span *s = &spans[*started];
		if (s->len > 0) r = c->memcpy_async(dst + s->dst, src + s->src, s->len, stream);
		if (r == 0) ++*started;
	}
	// The event is recorded even after a failure: the copies that were started are still in progress.
	int recorded = c->event_record(event, stream);
	return leave(c, r != 0 ? r : recorded);
}

int copier_cuda_mark(copier_cuda *c, void *context, uint64_t stream, void **event) {
	int r = enter(c, context);
	if (r != 0) return r;
	r = c->event_create(event, EVENT_DISABLE_TIMING);
	if (r != 0) return leave(c, r);
	r = c->event_record(*event, (void *)(uintptr_t)stream);
	if (r != 0) c->event_destroy(*event);
	return leave(c, r);
}

int copier_cuda_event(copier_cuda *c, void *context, void **event) {
	IN_CONTEXT(c, context, c->event_create(event, EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING));
}

int copier_cuda_event_free(copier_cuda *c, void *context, void *event) { IN_CONTEXT(c, context, c->event_destroy(event)); }

int copier_cuda_wait(copier_cuda *c, void *context, void *event) { IN_CONTEXT(c, context, c->event_wait(event)); }

int copier_cuda_drain(copier_cuda *c, void *context, void *stream) { IN_CONTEXT(c, context, c->stream_synchronize(stream)); }

int copier_cuda_alloc(copier_cuda *c, void *context, uint64_t *address, size_t len) { IN_CONTEXT(c, context, c->mem_alloc(address, len)); }

int copier_cuda_free(copier_cuda *c, void *context, uint64_t address) { IN_CONTEXT(c, context, c->mem_free(address)); }

int copier_cuda_pin(copier_cuda *c, void *context, uint64_t address, size_t len) {
	IN_CONTEXT(c, context, c->host_register((void *)(uintptr_t)address, len, HOST_REGISTER_PORTABLE));
}

int copier_cuda_unpin(copier_cuda *c, void *context, uint64_t address) {
	IN_CONTEXT(c, context, c->host_unregister((void *)(uintptr_t)address));
}
