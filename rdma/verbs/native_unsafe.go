//go:build verbs && cgo && linux

package verbs

// #cgo LDFLAGS: -libverbs
// #cgo noescape pk_post
// #cgo nocallback pk_post
// #cgo noescape pk_poll
// #cgo nocallback pk_poll
// #cgo noescape pk_arm
// #cgo nocallback pk_arm
// #cgo noescape pk_cq_events
// #cgo nocallback pk_cq_events
// #cgo noescape pk_lend
// #cgo nocallback pk_lend
// #include <stdlib.h>
// #include "native.h"
import "C"

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Safety: C allocates every struct of libibverbs and of native.h. Each is freed exactly once, by
// the close method of its owner in this file, and Go keeps no slice over C memory beyond that.
// Addresses of Go memory are passed to C as numbers, with which the card reads and writes, only
// while the memory is pinned (memory.go).

const pollMax = C.PK_POLL_MAX

// The types and constants of card.go must have the sizes and values of native.h and libibverbs.
var (
	_ [C.sizeof_struct_pk_request]byte    = [unsafe.Sizeof(request{})]byte{}
	_ [C.sizeof_struct_pk_completion]byte = [unsafe.Sizeof(completion{})]byte{}

	_ [0]struct{} = [C.PK_POST_MAX ^ postMax]struct{}{}
	_ [0]struct{} = [C.PK_ID_IMM ^ idImm]struct{}{}
	_ [0]struct{} = [C.PK_ID_MSG ^ idMessage]struct{}{}
	_ [0]struct{} = [C.IBV_WC_RECV ^ gotMessage]struct{}{}
	_ [0]struct{} = [C.IBV_WC_RECV_RDMA_WITH_IMM ^ gotImmediate]struct{}{}
	_ [0]struct{} = [C.PK_WRITE ^ opWrite]struct{}{}
	_ [0]struct{} = [C.PK_WRITE_IMM ^ opWriteImm]struct{}{}
	_ [0]struct{} = [C.PK_SEND ^ opSend]struct{}{}

	_ [0]struct{} = [C.IBV_ACCESS_LOCAL_WRITE ^ rightLocalWrite]struct{}{}
	_ [0]struct{} = [C.IBV_ACCESS_REMOTE_WRITE ^ rightRemoteWrite]struct{}{}
	_ [0]struct{} = [C.IBV_ACCESS_MW_BIND ^ rightBind]struct{}{}
	_ [0]struct{} = [C.IBV_ACCESS_RELAXED_ORDERING ^ rightRelaxed]struct{}{}

	_ [0]struct{} = [C.IBV_EVENT_QP_FATAL ^ eventQPFatal]struct{}{}
	_ [0]struct{} = [C.IBV_EVENT_QP_REQ_ERR ^ eventQPRequest]struct{}{}
	_ [0]struct{} = [C.IBV_EVENT_QP_ACCESS_ERR ^ eventQPAccess]struct{}{}
	_ [0]struct{} = [C.IBV_EVENT_QP_LAST_WQE_REACHED ^ eventQPLast]struct{}{}
	_ [0]struct{} = [C.IBV_EVENT_CQ_ERR ^ eventCQ]struct{}{}
	_ [0]struct{} = [C.IBV_EVENT_SRQ_ERR ^ eventSRQ]struct{}{}
	_ [0]struct{} = [C.IBV_EVENT_DEVICE_FATAL ^ eventDeviceFatal]struct{}{}
	_ [0]struct{} = [C.IBV_EVENT_PORT_ERR ^ eventPortDown]struct{}{}
	_ [0]struct{} = [C.IBV_EVENT_GID_CHANGE ^ eventGIDChange]struct{}{}
	_ [0]struct{} = [C.IBV_EVENT_LID_CHANGE ^ eventLIDChange]struct{}{}
	_ [0]struct{} = [C.IBV_EVENT_PKEY_CHANGE ^ eventPKeyChange]struct{}{}

	_ [0]struct{} = [C.IBV_QPS_RESET ^ stateReset]struct{}{}
	_ [0]struct{} = [C.IBV_QPS_ERR ^ stateError]struct{}{}
)

var _ card = (*nic)(nil)

// eventText returns libibverbs' name of the event.
func (n *nic) eventText(e asyncEvent) string {
	return C.GoString(C.ibv_event_type_str(C.enum_ibv_event_type(e)))
}

// statusText returns libibverbs' name of the status.
func (n *nic) statusText(s wcStatus) string {
	return C.GoString(C.ibv_wc_status_str(C.enum_ibv_wc_status(s)))
}

// errnoOf returns the errno that a C call set, or EIO if the call set none.
func errnoOf(err error) error {
	if err == nil || errors.Is(err, syscall.Errno(0)) {
		return syscall.EIO
	}
	return err
}

// deviceNames returns the names of the RDMA devices of this machine.
func deviceNames() ([]string, error) {
	var n C.int
	list, err := C.ibv_get_device_list(&n)
	if list == nil {
		if errors.Is(err, syscall.ENOSYS) { // the kernel has no ib_uverbs, so there are no devices
			return nil, nil
		}
		return nil, fmt.Errorf("list of RDMA devices: %w", errnoOf(err))
	}
	defer C.ibv_free_device_list(list)
	var names []string
	for _, d := range unsafe.Slice(list, n) {
		names = append(names, C.GoString(C.ibv_get_device_name(d)))
	}
	return names, nil
}

// nic is one port of an open device. After start it includes the objects that the endpoints of the
// port share.
type nic struct {
	c    *C.struct_pk_nic
	port uint8
	// partitionRow is the row of the port's table that holds the partition key of queue pairs.
	partitionRow uint16
	// loop is the path from a queue pair of this port to itself.
	loop path
}

// errNoDevice: there is no device of that name.
var errNoDevice = errors.New("no such RDMA device")

// openNIC opens the device.
func openNIC(name string, port uint8) (*nic, error) {
	var count C.int
	list, err := C.ibv_get_device_list(&count)
	if list == nil {
		return nil, fmt.Errorf("list of RDMA devices: %w", errnoOf(err))
	}
	defer C.ibv_free_device_list(list)
	for _, d := range unsafe.Slice(list, count) {
		if C.GoString(C.ibv_get_device_name(d)) != name {
			continue
		}
		n := &nic{c: C.pk_nic_new(), port: port}
		if n.c == nil {
			return nil, syscall.ENOMEM
		}
		n.c.ctx, err = C.ibv_open_device(d)
		if n.c.ctx == nil {
			C.free(unsafe.Pointer(n.c))
			return nil, fmt.Errorf("open: %w", errnoOf(err))
		}
		return n, nil
	}
	return nil, errNoDevice
}

// device returns the capabilities of the device.
func (n *nic) device() (deviceAttr, error) {
	var a C.struct_ibv_device_attr
	if e := C.ibv_query_device(n.c.ctx, &a); e != 0 {
		return deviceAttr{}, fmt.Errorf("query device: %w", syscall.Errno(e))
	}
	return deviceAttr{
		maxQPWork: int(a.max_qp_wr), maxCQE: int(a.max_cqe), maxSRQWork: int(a.max_srq_wr),
		ports: uint8(a.phys_port_cnt), windows: a.device_cap_flags&C.IBV_DEVICE_MEM_WINDOW != 0 && a.max_mw > 0,
		vendor: uint32(a.vendor_id),
	}, nil
}

// portState returns the current state of the port.
func (n *nic) portState() (portAttr, error) {
	var a C.struct_ibv_port_attr
	if e := C.pk_port(n.c.ctx, C.uint8_t(n.port), &a); e != 0 {
		return portAttr{}, fmt.Errorf("query port %d: %w", n.port, syscall.Errno(e))
	}
	return portAttr{
		active: a.state == C.IBV_PORT_ACTIVE, mtu: uint8(a.active_mtu), lid: uint16(a.lid),
		layer: linkLayer(a.link_layer), maxMessage: uint32(a.max_msg_sz), pkeys: int(a.pkey_tbl_len),
	}, nil
}

// pkeys returns the first n rows of the port's table of partition keys.
func (n *nic) pkeys(rows int) ([]pkey, error) {
	table := make([]pkey, rows)
	for i := range table {
		var k C.__be16
		if e, err := C.ibv_query_pkey(n.c.ctx, C.uint8_t(n.port), C.int(i), &k); e != 0 {
			return nil, fmt.Errorf("query partition key %d: %w", i, errnoOf(err))
		}
		b := *(*[2]byte)(unsafe.Pointer(&k))
		table[i] = pkey(b[0])<<8 | pkey(b[1])
	}
	return table, nil
}

// gidTableMax is the largest number of rows of a GID table that are read. Cards have a few hundred
// rows, most of them empty.
const gidTableMax = 1024

// gids returns the port's GIDs that are not zero.
func (n *nic) gids() ([]gidEntry, error) {
	rows := make([]C.struct_ibv_gid_entry, gidTableMax)
	count, err := C.ibv_query_gid_table(n.c.ctx, &rows[0], gidTableMax, 0)
	if count < 0 {
		return nil, fmt.Errorf("query GIDs: %w", errnoOf(err))
	}
	var table []gidEntry
	for _, r := range rows[:count] {
		e := gidEntry{index: uint32(r.gid_index), kind: gidType(r.gid_type), gid: gid(r.gid)}
		if uint8(r.port_num) == n.port && e.gid != (gid{}) {
			table = append(table, e)
		}
	}
	return table, nil
}

// start creates the objects that endpoints share: the protection domain, a completion queue of cqe
// entries, and receive queues of immEntries and msgEntries. Queue pairs use the partition key in
// row partitionRow of the port's table.
func (n *nic) start(partitionRow uint16, cqe, immEntries, msgEntries int) error {
	n.partitionRow = partitionRow
	var err error
	if n.c.pd, err = C.ibv_alloc_pd(n.c.ctx); n.c.pd == nil {
		return fmt.Errorf("protection domain: %w", errnoOf(err))
	}
	if n.c.channel, err = C.ibv_create_comp_channel(n.c.ctx); n.c.channel == nil {
		return fmt.Errorf("completion channel: %w", errnoOf(err))
	}
	if n.c.cq, err = C.ibv_create_cq(n.c.ctx, C.int(cqe), nil, n.c.channel, 0); n.c.cq == nil {
		return fmt.Errorf("completion queue of %d entries: %w", cqe, errnoOf(err))
	}
	for _, q := range []struct {
		to      **C.struct_ibv_srq
		entries int
	}{{&n.c.imm, immEntries}, {&n.c.msg, msgEntries}} {
		var attr C.struct_ibv_srq_init_attr
		attr.attr.max_wr, attr.attr.max_sge = C.uint32_t(q.entries), 1
		if *q.to, err = C.ibv_create_srq(n.c.pd, &attr); *q.to == nil {
			return fmt.Errorf("shared receive queue of %d entries: %w", q.entries, errnoOf(err))
		}
	}
	for _, fd := range []C.int{n.c.ctx.async_fd, n.c.channel.fd} {
		if err := unix.SetNonblock(int(fd), true); err != nil {
			return fmt.Errorf("event channel: %w", err)
		}
	}
	if e := C.pk_refill(n.c, C.int(immEntries)); e != 0 {
		return fmt.Errorf("entries for immediates: %w", syscall.Errno(e))
	}
	return nil
}

// channels returns duplicates of the descriptors that signal completions and asynchronous events.
func (n *nic) channels() (completions, async int, err error) {
	completions, err = unix.FcntlInt(uintptr(n.c.channel.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return -1, -1, fmt.Errorf("completion channel: %w", err)
	}
	async, err = unix.FcntlInt(uintptr(n.c.ctx.async_fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return -1, -1, errors.Join(fmt.Errorf("asynchronous events: %w", err), unix.Close(completions))
	}
	return completions, async, nil
}

// resize makes the completion queue longer.
func (n *nic) resize(cqe int) error {
	if e := C.ibv_resize_cq(n.c.cq, C.int(cqe)); e != 0 {
		return fmt.Errorf("completion queue of %d entries: %w", cqe, syscall.Errno(e))
	}
	return nil
}

// close releases the device and the objects that start created. Queues and memory must have been
// closed.
func (n *nic) close() error {
	var errs []error
	check := func(what string, e C.int) {
		if e != 0 {
			errs = append(errs, fmt.Errorf("close %s: %w", what, syscall.Errno(e)))
		}
	}
	if n.c.bind != nil {
		check("bind queue pair", C.ibv_destroy_qp(n.c.bind))
	}
	for _, cq := range []*C.struct_ibv_cq{n.c.bind_cq, n.c.cq} {
		if cq != nil {
			check("completion queue", C.ibv_destroy_cq(cq))
		}
	}
	for _, srq := range []*C.struct_ibv_srq{n.c.imm, n.c.msg} {
		if srq != nil {
			check("shared receive queue", C.ibv_destroy_srq(srq))
		}
	}
	if n.c.channel != nil {
		check("completion channel", C.ibv_destroy_comp_channel(n.c.channel))
	}
	if n.c.pd != nil {
		check("protection domain", C.ibv_dealloc_pd(n.c.pd))
	}
	check("device", C.ibv_close_device(n.c.ctx))
	C.free(unsafe.Pointer(n.c))
	n.c = nil
	return errors.Join(errs...)
}

// poll reads completions; the slice is valid until the next call. It may return both completions
// and an error. After an error there are no further completions.
func (n *nic) poll() ([]completion, error) {
	k := C.pk_poll(n.c)
	if k < 0 {
		return nil, errors.New("poll of the completion queue failed")
	}
	done := (*[pollMax]completion)(unsafe.Pointer(&n.c.done))[:k]
	if n.c.failed != 0 {
		return done, fmt.Errorf("entries for immediates: %w", syscall.Errno(n.c.failed))
	}
	return done, nil
}

// arm requests an event at the next completion.
func (n *nic) arm() error {
	if e := C.pk_arm(n.c); e != 0 {
		return fmt.Errorf("arm the completion queue: %w", syscall.Errno(e))
	}
	return nil
}

// takeEvents consumes the completion channel's events and returns their number.
func (n *nic) takeEvents() int { return int(C.pk_cq_events(n.c)) }

// asyncEvent consumes one asynchronous event; ok is false if there is none. qpn is 0 if the event
// concerns no queue pair.
func (n *nic) asyncEvent() (e asyncEvent, qpn uint32, ok bool) {
	var q C.uint32_t
	t := C.pk_async(n.c, &q)
	return asyncEvent(t), uint32(q), t >= 0
}

// lend posts a message buffer.
func (n *nic) lend(slot uint32, addr uint64, size, lkey uint32) error {
	if e := C.pk_lend(n.c, C.uint64_t(idMessage|uint64(slot)), C.uint64_t(addr), C.uint32_t(size), C.uint32_t(lkey)); e != 0 {
		return fmt.Errorf("post a receive buffer: %w", syscall.Errno(e))
	}
	return nil
}

// keyed is memory registered with the card: a region, or a window of a region.
type keyed struct {
	mr *C.struct_ibv_mr
	mw *C.struct_ibv_mw
}

// register registers size bytes at addr with the card. It requests relaxed ordering, which
// libibverbs omits if the device does not support it.
func (n *nic) register(addr, size uint64, r rights) (registration, error) {
	mr, err := C.pk_reg(n.c.pd, C.uint64_t(addr), C.uint64_t(size), C.int(r))
	if mr == nil {
		return nil, errnoOf(err)
	}
	return keyed{mr: mr}, nil
}

// registerDMABuf registers the device memory of a dma-buf at the device's virtual address addr.
func (n *nic) registerDMABuf(fd int, off, size, addr uint64, r rights) (registration, error) {
	mr, err := C.ibv_reg_dmabuf_mr(n.c.pd, C.uint64_t(off), C.size_t(size), C.uint64_t(addr), C.int(fd), C.int(r))
	if mr == nil {
		return nil, errnoOf(err)
	}
	return keyed{mr: mr}, nil
}

// bindWaitMS is the longest time that the card may take to bind a window, in ms. It normally takes
// microseconds; a card that has failed never completes the request.
const bindWaitMS = 2000

// window makes a window of size bytes at addr of the registration of, with its own key. Calls must
// not overlap.
func (n *nic) window(of registration, addr, size uint64) (registration, error) {
	r := of.(keyed)
	mw, err := C.ibv_alloc_mw(n.c.pd, C.IBV_MW_TYPE_1)
	if mw == nil {
		return nil, fmt.Errorf("memory window: %w", errnoOf(err))
	}
	e := C.pk_bind(n.c, mw, r.mr, C.uint64_t(addr), C.uint64_t(size), bindWaitMS)
	if e == 0 {
		return keyed{mr: r.mr, mw: mw}, nil
	}
	err = fmt.Errorf("bind a memory window: %w", syscall.Errno(e))
	if e < 0 {
		err = fmt.Errorf("bind a memory window: %s (status %d)", n.statusText(wcStatus(-e)), -e)
	}
	C.ibv_dealloc_mw(mw)
	// The failed request has put the bind queue pair into the error state.
	return nil, errors.Join(err, n.restartBind())
}

// write writes size bytes from src to dst, with the key of to. It uses the bind queue pair, which
// is connected to itself. Calls must not overlap.
func (n *nic) write(from registration, src uint64, to registration, dst, size uint64) error {
	lkey, _ := from.keys()
	_, rkey := to.keys()
	e := C.pk_probe(n.c, C.uint64_t(src), C.uint32_t(lkey), C.uint64_t(dst), C.uint32_t(rkey), C.uint32_t(size), bindWaitMS)
	switch {
	case e > 0:
		return syscall.Errno(e)
	case e < 0:
		s := wcStatus(-e)
		return &wcError{status: s, text: n.statusText(s)}
	}
	return nil
}

// keys returns the local key and the remote key.
func (r keyed) keys() (local, remote uint32) {
	if r.mw != nil {
		return uint32(r.mr.lkey), uint32(r.mw.rkey)
	}
	return uint32(r.mr.lkey), uint32(r.mr.rkey)
}

// close invalidates the keys.
func (r keyed) close() error {
	e := C.int(0)
	if r.mw != nil {
		e = C.ibv_dealloc_mw(r.mw)
	} else {
		e = C.ibv_dereg_mr(r.mr)
	}
	if e != 0 {
		return syscall.Errno(e)
	}
	return nil
}

// startBind creates the queue pair on which memory windows are bound. Binding is a local
// operation, but only a connected queue pair can do it, so this queue pair is connected to itself.
func (n *nic) startBind(loop path) error {
	var err error
	if n.c.bind_cq, err = C.ibv_create_cq(n.c.ctx, 16, nil, nil, 0); n.c.bind_cq == nil {
		return fmt.Errorf("completion queue: %w", errnoOf(err))
	}
	if n.c.bind, err = n.newQP(n.c.bind_cq, n.c.msg, 16); err != nil {
		return err
	}
	n.loop = loop
	n.loop.remoteQPN = uint32(n.c.bind.qp_num)
	return n.restartBind()
}

// restartBind makes the bind queue pair usable, whatever its state.
func (n *nic) restartBind() error {
	if err := modify(n.c.bind, stateReset); err != nil {
		return err
	}
	if err := n.initQP(n.c.bind, rightRemoteWrite); err != nil {
		return err
	}
	return joinQP(n.c.bind, n.loop)
}

// newQP creates a reliably connected queue pair for depth requests. A request has a completion
// only if the request asks for one.
func (n *nic) newQP(cq *C.struct_ibv_cq, srq *C.struct_ibv_srq, depth int) (*C.struct_ibv_qp, error) {
	var attr C.struct_ibv_qp_init_attr
	attr.send_cq, attr.recv_cq, attr.srq, attr.qp_type = cq, cq, srq, C.IBV_QPT_RC
	attr.cap.max_send_wr, attr.cap.max_send_sge = C.uint32_t(depth), 1
	qp, err := C.ibv_create_qp(n.c.pd, &attr)
	if qp == nil {
		return nil, fmt.Errorf("queue pair of %d requests: %w", depth, errnoOf(err))
	}
	return qp, nil
}

// pairOf is a queue pair of an endpoint. It implements pair.
type pairOf struct {
	c   *C.struct_pk_queue
	qpn uint32
}

// newQueue creates a queue pair that consumes entries of the receive queue for immediates or of
// that for messages. The peer's access to memory is limited to the rights r.
func (n *nic) newQueue(depth int, messages bool, r rights) (*queue, error) {
	srq := n.c.imm
	if messages {
		srq = n.c.msg
	}
	qp, err := n.newQP(n.c.cq, srq, depth)
	if err != nil {
		return nil, err
	}
	if err := n.initQP(qp, r); err != nil {
		C.ibv_destroy_qp(qp)
		return nil, err
	}
	c := C.pk_queue_new(qp)
	if c == nil {
		C.ibv_destroy_qp(qp)
		return nil, syscall.ENOMEM
	}
	return newQueueOf(c, uint32(qp.qp_num)), nil
}

func newQueueOf(c *C.struct_pk_queue, qpn uint32) *queue {
	return &queue{pair: &pairOf{c: c, qpn: qpn}, requests: (*[postMax]request)(unsafe.Pointer(&c.req))[:], qpn: qpn, psn: rand.Uint32() & max24}
}

// newQueueWithoutCard returns a queue for tests: its requests can be filled in but not posted.
func newQueueWithoutCard() *queue { return newQueueOf(C.pk_queue_new(nil), 0) }

// modify moves the queue pair to the state s, which must need no further attributes.
func modify(qp *C.struct_ibv_qp, s qpState) error {
	var attr C.struct_ibv_qp_attr
	attr.qp_state = C.enum_ibv_qp_state(s)
	return modifyQP(qp, &attr, C.IBV_QP_STATE, "a plain state")
}

func modifyQP(qp *C.struct_ibv_qp, attr *C.struct_ibv_qp_attr, mask C.int, to string) error {
	if e := C.ibv_modify_qp(qp, attr, mask); e != 0 {
		return fmt.Errorf("move queue pair %#x to %s: %w", uint32(qp.qp_num), to, syscall.Errno(e))
	}
	return nil
}

// initQP moves a new queue pair to INIT. r are the rights of its peer to memory.
func (n *nic) initQP(qp *C.struct_ibv_qp, r rights) error {
	var attr C.struct_ibv_qp_attr
	attr.qp_state, attr.port_num, attr.pkey_index = C.IBV_QPS_INIT, C.uint8_t(n.port), C.uint16_t(n.partitionRow)
	attr.qp_access_flags = C.uint(r)
	return modifyQP(qp, &attr, C.IBV_QP_STATE|C.IBV_QP_PKEY_INDEX|C.IBV_QP_PORT|C.IBV_QP_ACCESS_FLAGS, "INIT")
}

// hopLimit is the largest number of routers that a packet may pass.
const hopLimit = 64

// joinQP moves a queue pair from INIT to RTR (ready to receive) and then to RTS (ready to send).
func joinQP(qp *C.struct_ibv_qp, p path) error {
	var attr C.struct_ibv_qp_attr
	attr.qp_state, attr.path_mtu, attr.min_rnr_timer = C.IBV_QPS_RTR, C.enum_ibv_mtu(p.mtu), C.uint8_t(p.rnrTimer)
	attr.dest_qp_num, attr.rq_psn = C.uint32_t(p.remoteQPN), C.uint32_t(p.remotePSN)
	ah := &attr.ah_attr
	ah.is_global, ah.port_num, ah.dlid, ah.sl = 1, C.uint8_t(p.port), C.uint16_t(p.remoteLID), C.uint8_t(p.marking.serviceLevel)
	ah.grh.sgid_index, ah.grh.hop_limit, ah.grh.traffic_class = C.uint8_t(p.gidIndex), hopLimit, C.uint8_t(p.marking.trafficClass)
	*(*gid)(unsafe.Pointer(&ah.grh.dgid)) = p.remoteGID
	const rtr = C.IBV_QP_STATE | C.IBV_QP_AV | C.IBV_QP_PATH_MTU | C.IBV_QP_DEST_QPN | C.IBV_QP_RQ_PSN | C.IBV_QP_MAX_DEST_RD_ATOMIC | C.IBV_QP_MIN_RNR_TIMER
	if err := modifyQP(qp, &attr, rtr, "RTR"); err != nil {
		return err
	}
	attr = C.struct_ibv_qp_attr{}
	attr.qp_state, attr.sq_psn, attr.timeout = C.IBV_QPS_RTS, C.uint32_t(p.localPSN), C.uint8_t(p.timeoutCode)
	attr.retry_cnt, attr.rnr_retry = C.uint8_t(p.retries), C.uint8_t(p.rnrTries)
	const rts = C.IBV_QP_STATE | C.IBV_QP_TIMEOUT | C.IBV_QP_RETRY_CNT | C.IBV_QP_RNR_RETRY | C.IBV_QP_SQ_PSN | C.IBV_QP_MAX_QP_RD_ATOMIC
	return modifyQP(qp, &attr, rts, "RTS")
}

// join connects the queue pair to the queue pair at the other end of p.
func (q *pairOf) join(p path) error { return joinQP(q.c.qp, p) }

// post posts the first n requests and returns how many the card accepted.
func (q *pairOf) post(n int) (int, error) {
	var e C.int
	k := C.pk_post(q.c, C.int(n), &e)
	if e != 0 {
		return int(k), fmt.Errorf("post: %w", syscall.Errno(e))
	}
	return int(k), nil
}

// modify moves the queue pair to the error state or resets it.
func (q *pairOf) modify(s qpState) error {
	if q.c.qp == nil {
		return nil
	}
	return modify(q.c.qp, s)
}

// destroy destroys the queue pair. close releases the other resources.
func (q *pairOf) destroy() error {
	if q.c == nil || q.c.qp == nil {
		return nil
	}
	e := C.ibv_destroy_qp(q.c.qp)
	q.c.qp = nil
	if e != 0 {
		return fmt.Errorf("destroy queue pair %#x: %w", q.qpn, syscall.Errno(e))
	}
	return nil
}

// close releases the queue pair. It may be called twice.
func (q *pairOf) close() error {
	err := q.destroy()
	if q.c != nil {
		C.free(unsafe.Pointer(q.c))
		q.c = nil
	}
	return err
}
