// The functions of the CUDA driver API that package copier uses, looked up in the library at run time.

#ifndef COPIER_CUDA_SHIM_H
#define COPIER_CUDA_SHIM_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
	void *library;
	int (*init)(unsigned);
	int (*device_get)(int *, int);
	int (*device_name)(char *, int, int);
	int (*context_retain)(void **, int);
	int (*context_release)(int);
	int (*context_push)(void *);
	int (*context_pop)(void **);
	int (*stream_create)(void **, unsigned);
	int (*stream_destroy)(void *);
	int (*event_create)(void **, unsigned);
	int (*event_destroy)(void *);
	int (*event_record)(void *, void *);
	int (*event_wait)(void *);
	int (*stream_wait)(void *, void *, unsigned);
	int (*stream_synchronize)(void *);
	int (*mem_alloc)(uint64_t *, size_t);
	int (*mem_free)(uint64_t);
	int (*host_register)(void *, size_t, unsigned);
	int (*host_unregister)(void *);
	int (*memcpy_async)(uint64_t, uint64_t, size_t, void *);
	int (*error_string)(int, const char **);
} copier_cuda;

// The fields of Go's Span, in the same order.
typedef struct {
	uint64_t src, dst, len;
} copier_span;

// Loads the library. On failure it writes into why which library or function is missing.
int copier_cuda_load(copier_cuda *, const char *path, char *why, size_t why_len);

// Retains the primary context of the device and creates a stream in this context.
int copier_cuda_open(copier_cuda *, int device, void **context, void **stream, int *cu_device, char *name, int name_len);
int copier_cuda_close(copier_cuda *, int cu_device, void *context, void *stream);
void copier_cuda_unload(copier_cuda *);

// Starts count copies and records event after them. The copies wait, on the device, for the event
// after, unless it is NULL. *started is the number of copies that were started. The event is
// recorded even if a copy could not be started.
int copier_cuda_submit(copier_cuda *, void *context, void *stream, void *after, void *event, uint64_t src, uint64_t dst,
	const copier_span *spans, size_t count, size_t *started);

// Creates an event and records it in a stream of another library.
int copier_cuda_mark(copier_cuda *, void *context, uint64_t stream, void **event);

int copier_cuda_event(copier_cuda *, void *context, void **event);
int copier_cuda_event_free(copier_cuda *, void *context, void *event);
int copier_cuda_wait(copier_cuda *, void *context, void *event);
// Waits for all work that the stream has.
int copier_cuda_drain(copier_cuda *, void *context, void *stream);
int copier_cuda_alloc(copier_cuda *, void *context, uint64_t *address, size_t len);
int copier_cuda_free(copier_cuda *, void *context, uint64_t address);
int copier_cuda_pin(copier_cuda *, void *context, uint64_t address, size_t len);
int copier_cuda_unpin(copier_cuda *, void *context, uint64_t address);
const char *copier_cuda_error(copier_cuda *, int result);

#endif
