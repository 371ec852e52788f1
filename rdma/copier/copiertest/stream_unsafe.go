//go:build cuda && cgo && linux

package copiertest

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct {
	void *library, *stream;
	int (*push)(void *), (*pop)(void **), (*create)(void **, unsigned), (*destroy)(void *);
	int (*copy)(uint64_t, uint64_t, size_t, void *), (*gate)(void *, int *);
	void (*open)(int *);
} engine;

static const char *engine_open(engine *e, const char *path) {
	struct { const char *name; void *field; } functions[] = {
		{"cuCtxPushCurrent_v2", &e->push}, {"cuCtxPopCurrent_v2", &e->pop},
		{"cuStreamCreate", &e->create}, {"cuStreamDestroy_v2", &e->destroy},
		{"cuMemcpyAsync", &e->copy}, {"fakeGate", &e->gate}, {"fakeOpen", &e->open},
	};
	e->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (e->library == NULL) return "the driver cannot be loaded";
	for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
		if ((*(void **)functions[i].field = dlsym(e->library, functions[i].name)) == NULL) return functions[i].name;
	}
	void *context;
	e->push(e);
	int failed = e->create(&e->stream, 0);
	e->pop(&context);
	return failed ? "cuStreamCreate" : NULL;
}

static void engine_copy(engine *e, uint64_t to, uint64_t from, size_t n) {
	void *context;
	e->push(e);
	e->copy(to, from, n, e->stream);
	e->pop(&context);
}

static void engine_gate(engine *e, int *gate) { e->gate(e->stream, gate); }
static void engine_pass(engine *e, int *gate) { e->open(gate); }

static void engine_close(engine *e) {
	void *context;
	e->push(e);
	e->destroy(e->stream);
	e->pop(&context);
	dlclose(e->library);
}
*/
import "C"

import (
	"sync"
	"testing"
	"unsafe"
)

// Stream is a stream of an inference engine in the process of the test.
type Stream struct{ engine *C.engine }

// NewStream returns a stream of the driver that Driver has returned. It is destroyed at the end of
// the test.
func NewStream(t testing.TB, driver string) *Stream {
	t.Helper()
	path := C.CString(driver)
	defer C.free(unsafe.Pointer(path))
	s := &Stream{(*C.engine)(C.calloc(1, C.sizeof_engine))}
	if failed := C.engine_open(s.engine, path); failed != nil {
		t.Fatal(C.GoString(failed))
	}
	t.Cleanup(func() {
		C.engine_close(s.engine)
		C.free(unsafe.Pointer(s.engine))
	})
	return s
}

// Handle is the driver's handle of the stream.
func (s *Stream) Handle() uint64 { return uint64(uintptr(s.engine.stream)) }

// Gate makes the stream wait until open is called, at the latest at the end of the test. open may be
// called twice.
func (s *Stream) Gate(t testing.TB) (open func()) {
	gate := (*C.int)(C.calloc(1, C.sizeof_int)) // not freed: a thread of the driver may be reading it
	open = sync.OnceFunc(func() { C.engine_pass(s.engine, gate) })
	t.Cleanup(open)
	C.engine_gate(s.engine, gate)
	return open
}

// Copy puts a copy of all bytes of a memory into the stream.
func (s *Stream) Copy(to, from Memory) {
	C.engine_copy(s.engine, C.uint64_t(to.Address), C.uint64_t(from.Address), C.size_t(min(len(to.Bytes), len(from.Bytes))))
}
