//go:build fabric && cgo && linux

package fabric

/*
#cgo pkg-config: libfabric
#cgo noescape pf_flush
#cgo nocallback pf_flush
#cgo noescape pf_poll
#cgo nocallback pf_poll
#cgo noescape pf_try_wait
#cgo nocallback pf_try_wait
#include <stdlib.h>
#include "fabric.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"unsafe"
)

// Safety: libfabric keeps pointers only to C memory and to the payload of registrations. A
// runtime.Pinner pins the payload until its registration is closed. Addresses of payload are
// passed as integers, so cgo checks no pointers on the hot path.

// errAgain: the provider's queue is full at the moment.
var errAgain = errors.New("provider is full")

// errno returns the return value of a libfabric call as an error, nil for success.
func errno(call string, ret C.int) error {
	switch {
	case ret >= 0:
		return nil
	case ret == -C.FI_EAGAIN:
		return errAgain
	}
	return fmt.Errorf("%s: %s (%d)", call, faultText(int32(-ret)), int(-ret))
}

// faultText returns libfabric's text for the error code of a completion.
func faultText(code int32) string { return C.GoString(C.pf_strerror(C.int(code))) }

// libraryVersion returns the version of the loaded library.
func libraryVersion() (major, minor int) {
	v := uint32(C.pf_version())
	return int(v >> 16), int(v & 0xffff)
}

// apiVersion returns the version of libfabric whose behaviour is requested, in the format of
// FI_VERSION.
func apiVersion() uint32 {
	major, minor := requestedVersion(libraryVersion())
	return uint32(major)<<16 | uint32(minor)
}

// list returns the domains of a provider.
func list(provider string) ([]found, error) {
	p := C.CString(provider)
	defer C.free(unsafe.Pointer(p))
	const size = 64 << 10
	out := (*C.char)(C.malloc(size))
	defer C.free(unsafe.Pointer(out))
	ret := C.pf_list(C.uint32_t(apiVersion()), p, out, size)
	if ret == -C.FI_ENODATA {
		return nil, nil
	}
	if ret < 0 {
		return nil, fmt.Errorf("fabric: list domains of provider %q: %w", provider, errno("fi_getinfo", ret))
	}
	var all []found
	for line := range strings.Lines(C.GoString(out)) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), " ", 3)
		if len(f) == 3 {
			all = append(all, found{provider: f[0], domain: f[1], addr: f[2]})
		}
	}
	return all, nil
}

// native is an open domain of libfabric.
type native struct {
	d      *C.struct_pf_domain
	events []C.struct_pf_event // in C memory
	// ops and buffers belong to the hub, the endpoint for messages. First come hubRecvs receive
	// buffers of one frame each, then hubSends send buffers of maxControl bytes each.
	ops     *C.struct_pf_op
	buffers unsafe.Pointer
	frame   int
	reg     registration // of buffers, if the provider requires it
	// taken is the number of completions read so far.
	taken atomic.Uint64
}

// event is one completion as C reports it.
type event = C.struct_pf_event

// Kinds of events.
const (
	evWork    = C.PF_WORK
	evHubRecv = C.PF_HUB_RECV
	evHubSend = C.PF_HUB_SEND
	evRemote  = C.PF_REMOTE
)

// queueEvents is the length of the completion queue.
const queueEvents = 4096

// maxEvents is the largest number of completions that one poll returns.
const maxEvents = C.PF_EVENTS

// openNative opens one domain of one provider.
func openNative(provider, domain, addr string, depth int) (*native, traits, error) {
	text := [3]*C.char{C.CString(provider), C.CString(domain), C.CString(addr)}
	defer func() {
		for _, p := range text {
			C.free(unsafe.Pointer(p))
		}
	}()
	wish := C.struct_pf_wish{
		api:      C.uint32_t(apiVersion()),
		provider: text[0], domain: text[1], addr: text[2],
		tx_depth: C.uint32_t(depth), rx_depth: C.uint32_t(max(depth, hubRecvs)), cq_depth: queueEvents,
	}
	var what [C.PF_TEXT_MAX]C.char
	var ct C.struct_pf_traits
	n := &native{}
	if C.pf_open(&wish, &n.d, &ct, &what[0]) != 0 {
		return nil, traits{}, errors.New(C.GoString(&what[0]))
	}
	n.events = unsafe.Slice((*C.struct_pf_event)(C.calloc(maxEvents, C.sizeof_struct_pf_event)), maxEvents)
	return n, traits{
		provider: C.GoString(&ct.provider[0]), domain: C.GoString(&ct.domain[0]),
		maxWrite: uint64(ct.max_write), maxOrder: uint64(ct.max_order), ordersWrites: ct.msg_order != 0,
		virtAddr: ct.virt_addr != 0, providerKeys: ct.prov_key != 0, localKeys: ct.mr_local != 0,
		keyBytes: int(ct.key_bytes), dataBytes: int(ct.data_bytes), depth: int(ct.tx_depth), recvDepth: int(ct.rx_depth),
		format: uint32(ct.addr_format), source: ct.source != 0, fd: int(ct.fd), api: uint32(ct.api),
	}, nil
}

// Formats of socket addresses, which checkAddress parses.
const (
	formatIPv4 = C.FI_SOCKADDR_IN
	formatIPv6 = C.FI_SOCKADDR_IN6
)

// openHub opens the endpoint that receives messages and control frames, and returns its address.
func (n *native) openHub() ([]byte, error) {
	name := make([]byte, C.PF_NAME_MAX)
	size := C.size_t(len(name))
	var call *C.char
	if ret := C.pf_hub_open(n.d, (*C.uint8_t)(&name[0]), &size, &call); ret != 0 {
		return nil, errno(C.GoString(call), ret)
	}
	return name[:min(int(size), len(name))], nil
}

// hubRecvs and hubSends are the numbers of the hub's receive and send buffers. Each poll copies the
// arrived frames out of the receive buffers, so hubRecvs limits only the number of frames that
// arrive between two polls.
const (
	hubRecvs = 64
	hubSends = 32
)

// openBuffers allocates the hub's buffers and posts the receive buffers. frame is the length of
// the longest frame in bytes. key is the key for the registration of the buffers, or 0 if the
// provider requires no registration.
func (n *native) openBuffers(frame int, key uint64) error {
	size := hubRecvs*frame + hubSends*maxControl
	n.frame = frame
	n.ops = (*C.struct_pf_op)(C.calloc(hubRecvs+hubSends, C.sizeof_struct_pf_op))
	n.buffers = C.calloc(1, C.size_t(size))
	if key != 0 {
		var err error
		if n.reg, err = n.register(uintptr(n.buffers), uint64(size), false, key); err != nil {
			return err
		}
	}
	for i := range uint32(hubRecvs + hubSends) {
		op := n.op(i)
		op.slot, op.kind = C.uint32_t(i), evHubSend
		if i < hubRecvs {
			op.kind = evHubRecv
			if err := n.recv(i); err != nil {
				return err
			}
		}
	}
	return nil
}

func (n *native) op(i uint32) *C.struct_pf_op {
	return (*C.struct_pf_op)(unsafe.Add(unsafe.Pointer(n.ops), uintptr(i)*C.sizeof_struct_pf_op))
}

// buffer returns the hub's buffer i.
func (n *native) buffer(i uint32) []byte {
	if i < hubRecvs {
		return unsafe.Slice((*byte)(unsafe.Add(n.buffers, int(i)*n.frame)), n.frame)
	}
	return unsafe.Slice((*byte)(unsafe.Add(n.buffers, hubRecvs*n.frame+int(i-hubRecvs)*maxControl)), maxControl)
}

// recv posts receive buffer i.
func (n *native) recv(i uint32) error {
	b := n.buffer(i)
	return errno("fi_recv", C.pf_hub_recv(n.d, n.op(i), unsafe.Pointer(&b[0]), C.uint64_t(len(b)), n.reg.desc))
}

// send sends the first size bytes of send buffer i from the hub.
func (n *native) send(i uint32, size int, to uint64) error {
	return errno("fi_send", C.pf_hub_send(n.d, n.op(i), unsafe.Pointer(&n.buffer(i)[0]), C.uint64_t(size), n.reg.desc, C.uint64_t(to)))
}

// insert adds a peer's address to the provider.
func (n *native) insert(addr []byte) (uint64, error) {
	// A provider reads as many bytes as an address of its format has, even if addr is shorter, so
	// the padding must be readable.
	var padded [C.PF_NAME_MAX]byte
	copy(padded[:], addr)
	var out C.uint64_t
	if ret := C.pf_av_insert(n.d, (*C.uint8_t)(&padded[0]), &out); ret != 0 {
		return 0, errno("fi_av_insert", ret)
	}
	return uint64(out), nil
}

func (n *native) remove(addr uint64) error {
	return errno("fi_av_remove", C.pf_av_remove(n.d, C.uint64_t(addr)))
}

// poll makes progress and returns up to size completions, valid until the next
// call.
func (n *native) poll(size int) ([]event, error) {
	ret := C.pf_poll(n.d, &n.events[0], C.int(min(size, maxEvents)))
	if ret < 0 {
		return nil, errno("fi_cq_read", ret)
	}
	if ret > 0 {
		n.taken.Add(uint64(ret))
	}
	return n.events[:ret], nil
}

// tryWait returns true if the queue is empty and its descriptor will become readable at the next
// event.
func (n *native) tryWait() bool { return C.pf_try_wait(n.d) == 0 }

// clear resets the queue's descriptor, which otherwise stays readable after the queue has been
// emptied. It blocks for at most a millisecond.
func (n *native) clear() { C.pf_clear(n.d) }

// close releases the domain. Its endpoints and registrations must have been closed.
func (n *native) close() error {
	var err error
	if n.reg.mr != nil {
		err = n.reg.close()
	}
	err = errors.Join(err, errno("fi_close", C.pf_close(n.d)))
	C.free(unsafe.Pointer(&n.events[0]))
	C.free(unsafe.Pointer(n.ops))
	C.free(n.buffers)
	return err
}

// registration is memory registered with the provider.
type registration struct {
	mr   *C.struct_fid_mr
	desc unsafe.Pointer
	key  uint64
}

// register registers memory. key becomes the key of the registration, unless the provider chooses
// the keys.
func (n *native) register(addr uintptr, size uint64, remote bool, key uint64) (registration, error) {
	var r registration
	var k C.uint64_t
	flag := C.int(0)
	if remote {
		flag = 1
	}
	if ret := C.pf_mr_reg(n.d, C.uint64_t(addr), C.uint64_t(size), flag, C.uint64_t(key), &r.mr, &k, &r.desc); ret != 0 {
		return r, errno("fi_mr_reg", ret)
	}
	r.key = uint64(k)
	return r, nil
}

func (r registration) close() error { return errno("fi_close", C.pf_mr_close(r.mr)) }

// addressOf returns the address of mem. The address stays valid only if mem is pinned or outside of
// the Go heap.
func addressOf(mem []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(mem))) }

// pin pins mem.
func pin(p *runtime.Pinner, mem []byte) { p.Pin(unsafe.SliceData(mem)) }

// nativeEndpoint is an endpoint of libfabric with its ring of works.
type nativeEndpoint struct {
	e     *C.struct_pf_ep
	ring  []C.struct_pf_work
	heads []byte // headLen bytes for each slot
	// tail is the ring index of the next work; the C code advances the head.
	tail uint32
}

// openEndpoint opens an endpoint and returns its address. key is as in openBuffers.
func (n *native) openEndpoint(owner uint32, depth int, tclass uint32, key uint64) (*nativeEndpoint, []byte, error) {
	name := make([]byte, C.PF_NAME_MAX)
	size := C.size_t(len(name))
	var call *C.char
	e := &nativeEndpoint{}
	if ret := C.pf_ep_open(n.d, C.uint32_t(owner), C.uint32_t(depth), C.uint32_t(tclass), C.uint64_t(key),
		&e.e, (*C.uint8_t)(&name[0]), &size, &call); ret != 0 {
		return nil, nil, errno(C.GoString(call), ret)
	}
	e.ring = unsafe.Slice(e.e.ring, depth)
	e.heads = unsafe.Slice((*byte)(e.e.heads), depth*headLen)
	return e, name[:min(int(size), len(name))], nil
}

// join sets the destinations of works.
func (e *nativeEndpoint) join(peer, hub uint64) {
	e.e.peer, e.e.hub = C.fi_addr_t(peer), C.fi_addr_t(hub)
}

// put appends a write to the ring, which must not be full. slot identifies the write in its
// completion.
func (e *nativeEndpoint) put(slot uint32, buf uintptr, desc cpointer, size, addr, key, data uint64, withData bool) {
	w := e.next(slot, buf, desc, size)
	w.addr, w.key, w.data = C.uint64_t(addr), C.uint64_t(key), C.uint64_t(data)
	w.with_data, w.head = 0, 0
	if withData {
		w.with_data = 1
	}
}

// putFrame appends a frame for the peer's hub. The payload follows the frame's header, which head
// returns.
func (e *nativeEndpoint) putFrame(slot uint32, buf uintptr, desc cpointer, size uint64) {
	e.next(slot, buf, desc, size).head = headLen
}

// head returns the bytes of the header of the frame in slot.
func (e *nativeEndpoint) head(slot uint32) []byte {
	return e.heads[slot*headLen : (slot+1)*headLen : (slot+1)*headLen]
}

func (e *nativeEndpoint) next(slot uint32, buf uintptr, desc cpointer, size uint64) *C.struct_pf_work {
	w := &e.ring[e.tail]
	w.op = (*C.struct_pf_op)(unsafe.Add(unsafe.Pointer(e.e.ops), uintptr(slot)*C.sizeof_struct_pf_op))
	w.buf, w.len, w.desc = C.uint64_t(buf), C.uint64_t(size), desc
	if e.tail++; int(e.tail) == len(e.ring) {
		e.tail = 0
	}
	return w
}

// flush passes the works in the ring to the provider. added is the number of works that were put
// into the ring since the last call of flush or hold. left is the number of works that the provider
// did not accept.
func (e *nativeEndpoint) flush(added int) (left int, err error) {
	ret := C.pf_flush(e.e, C.uint32_t(added))
	return max(int(ret), 0), errno("post", ret)
}

// hold counts the added works as part of the ring, but passes no work to the provider. left is the
// number of works in the ring.
func (e *nativeEndpoint) hold(added int) (left int) {
	e.e.count += C.uint32_t(added)
	return int(e.e.count)
}

// stopListening makes the endpoint accept no further connections.
func (e *nativeEndpoint) stopListening() error {
	return errno("close the endpoint's listening socket", C.pf_ep_stop_listening(e.e))
}

// cut closes the endpoint. After that, the provider accesses no memory of the endpoint, and the
// ring is empty.
func (e *nativeEndpoint) cut() error {
	return errno("fi_close of an endpoint", C.pf_ep_cut(e.e))
}

// free releases the remaining memory of an endpoint that cut has closed.
func (e *nativeEndpoint) free() { C.pf_ep_free(e.e) }

// cpointer is an address in C memory that Go code passes through and never dereferences.
type cpointer = unsafe.Pointer

// The headers in C and in wire.go have the same length.
var _ [headLen]byte = [C.PF_HEAD]byte{}
