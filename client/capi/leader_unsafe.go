package main

// #include "penstock.h"
import "C"

import (
	"bytes"
	"unsafe"

	"github.com/penstock-kv/penstock/client/capi/binding"
	"github.com/penstock-kv/penstock/client/leader"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
)

// inLeader calls f with the leader of a handle. It reports an unknown handle, or the error of f, to
// the caller.
func inLeader(h C.uint64_t, to *C.penstock_error, f func(*binding.Leader) error) C.int32_t {
	l, err := library.Leader(binding.Handle(h))
	if err == nil {
		err = f(l)
	}
	return report(to, err)
}

// inAttempt calls f with the attempt of a handle. It reports an unknown handle, or the error of f,
// to the caller.
func inAttempt(h C.uint64_t, to *C.penstock_error, f func(*binding.Attempt) error) C.int32_t {
	a, err := library.Attempt(binding.Handle(h))
	if err == nil {
		err = f(a)
	}
	return report(to, err)
}

func plannerOf(p *C.penstock_planner) (binding.PlannerOptions, error) {
	if p == nil {
		return binding.PlannerOptions{}, invalid("planner is NULL")
	}
	if err := sized("penstock_planner", p.size, unsafe.Sizeof(*p)); err != nil {
		return binding.PlannerOptions{}, err
	}
	return binding.PlannerOptions{Address: text(p.address), Credentials: binding.Credentials{
		Token: text(p.token), TokenFile: text(p.token_file),
		CAFile: text(p.ca_file), CertFile: text(p.cert_file), KeyFile: text(p.key_file), Insecure: p.insecure != 0,
	}}, nil
}

// maxBytes is the largest size of the address and of the token of a member, in bytes.
const maxBytes = 1 << 16

func member(from *C.penstock_member) (binding.Member, error) {
	m, err := grown("penstock_member", from, from.size, unsafe.Offsetof(from.prefix_cache_blocks)) // version 1.10 ends before it
	if err != nil {
		return binding.Member{}, err
	}
	if m.address_bytes > 0 && m.address == nil || m.token_bytes > 0 && m.token == nil || m.address_bytes > maxBytes || m.token_bytes > maxBytes {
		return binding.Member{}, invalid("penstock_member: an address of %d bytes at %p, a token of %d bytes at %p", uint32(m.address_bytes), m.address, uint32(m.token_bytes), m.token)
	}
	out := binding.Member{
		Name: text(m.name), Address: C.GoBytes(m.address, C.int(m.address_bytes)), Token: C.GoBytes(m.token, C.int(m.token_bytes)),
		DeviceBlocks: int(m.device_blocks), PromptBlocks: int(m.prompt_blocks), PrefixCacheBlocks: int(m.prefix_cache_blocks),
		Footprint: traffic.Footprint{Buffer: int64(m.buffer_bytes), Block: int64(m.block_bytes), Sums: int64(m.sums_bytes), Request: int64(m.request_bytes)},
	}
	if f := out.Footprint; f.Buffer < 0 || f.Block < 0 || f.Sums < 0 || f.Request < 0 {
		return out, invalid("penstock_member: a buffer of more than 2^63-1 bytes")
	}
	return out, nil
}

//export goLeaderOpen
func goLeaderOpen(ns C.uint64_t, o *C.penstock_leader_options, out *handle, to *C.penstock_error) C.int32_t {
	return inNamespace(ns, to, func(n *binding.Namespace) error {
		if o == nil || out == nil {
			return invalid("penstock_leader_open: options or leader is NULL")
		}
		if err := sized("penstock_leader_options", o.size, unsafe.Sizeof(*o)); err != nil {
			return err
		}
		if o.n_members > 0 && o.members == nil || o.n_members > C.PENSTOCK_BATCH_MAX || o.role > C.PENSTOCK_ROLE_DECODE {
			return invalid("penstock_leader_options: %d members at %p, role %d", uint32(o.n_members), o.members, uint32(o.role))
		}
		planner, err := plannerOf(o.planner)
		if err != nil {
			return err
		}
		options := binding.LeaderOptions{
			Planner: planner, Group: text(o.group), Node: text(o.node), Role: leader.Role(o.role), FetchEvery: millis(o.fetch_every_ms), ReadRate: float64(o.read_rate),
		}
		for i := range int(o.n_members) {
			// Safety: the caller has n_members members of the first one's size. Before the second one is
			// read, member has refused a size that is out of range.
			from := (*C.penstock_member)(unsafe.Add(unsafe.Pointer(o.members), i*int(o.members.size)))
			if from.size != o.members.size {
				return invalid("penstock_leader_options: members of %d and %d bytes; all must have one size", uint64(o.members.size), uint64(from.size))
			}
			m, err := member(from)
			if err != nil {
				return err
			}
			options.Members = append(options.Members, m)
		}
		h, err := n.OpenLeader(options)
		if err == nil {
			*out = handle(h)
		}
		return err
	})
}

//export goLeaderClose
func goLeaderClose(l C.uint64_t, to *C.penstock_error) C.int32_t {
	return inLeader(l, to, (*binding.Leader).Close)
}

//export goLeaderAdd
func goLeaderAdd(l C.uint64_t, m *C.penstock_member, to *C.penstock_error) C.int32_t {
	return inLeader(l, to, func(l *binding.Leader) error {
		if m == nil {
			return invalid("penstock_leader_add: member is NULL")
		}
		in, err := member(m)
		if err != nil {
			return err
		}
		return l.Add(in)
	})
}

//export goLeaderRemove
func goLeaderRemove(l C.uint64_t, name *C.char, to *C.penstock_error) C.int32_t {
	return inLeader(l, to, func(l *binding.Leader) error {
		if name == nil {
			return invalid("penstock_leader_remove: name is NULL")
		}
		return l.Remove(text(name))
	})
}

//export goLeaderReportNICs
func goLeaderReportNICs(l C.uint64_t, engine *C.char, nics *C.penstock_nic, n C.uint32_t, to *C.penstock_error) C.int32_t {
	return inLeader(l, to, func(l *binding.Leader) error {
		if engine == nil || n > 0 && nics == nil || n > C.PENSTOCK_NICS_MAX {
			return invalid("penstock_leader_report_nics: engine at %p, %d NICs (at most %d) at %p", engine, uint32(n), C.PENSTOCK_NICS_MAX, nics)
		}
		var out []rdma.NIC
		for _, nic := range unsafe.Slice(nics, int(n)) {
			name := slice[byte](&nic.name[0], len(nic.name))
			end := bytes.IndexByte(name, 0)
			if end < 0 {
				return invalid("penstock_leader_report_nics: the name of a NIC has no zero byte")
			}
			out = append(out, rdma.NIC{Name: string(name[:end]), BytesOut: uint64(nic.bytes_out), BytesIn: uint64(nic.bytes_in)})
		}
		return l.ReportNICs(text(engine), out)
	})
}

// eventfd calls the function of, and writes the descriptor that it returns to the caller's variable
// fd.
func eventfd(fd *C.int32_t, of func() (int, error)) error {
	if fd == nil {
		return invalid("fd is NULL")
	}
	n, err := of()
	if err == nil {
		*fd = C.int32_t(n)
	}
	return err
}

//export goLeaderEventfd
func goLeaderEventfd(l C.uint64_t, fd *C.int32_t, to *C.penstock_error) C.int32_t {
	return inLeader(l, to, func(l *binding.Leader) error { return eventfd(fd, l.EventFD) })
}

//export goLeaderDrain
func goLeaderDrain(l C.uint64_t, actions *C.penstock_action, most C.uint32_t, n *C.uint32_t, to *C.penstock_error) C.int32_t {
	return inLeader(l, to, func(l *binding.Leader) error {
		if n == nil || actions == nil && most > 0 {
			return invalid("penstock_leader_drain: actions or n is NULL")
		}
		in := make([]binding.Action, min(int(most), drainMax))
		got, err := l.Drain(in)
		*n = C.uint32_t(got)
		out := unsafe.Slice(actions, got)
		for i, a := range in[:got] {
			out[i] = C.penstock_action{attempt: C.uint64_t(a.Attempt.Handle()), kind: C.uint32_t(a.Kind), part: partOf(a.Part)}
			if a.Kind == binding.ActionStart {
				s := a.Attempt.Start()
				out[i].start_bytes = C.uint64_t(writeStart(nil, &s))
			}
		}
		return err
	})
}

func partOf(p traffic.Part) C.penstock_part {
	return C.penstock_part{from: C.uint32_t(p.From), to: C.uint32_t(p.To)}
}

// layout writes data of variable size behind a structure in the caller's memory. If buf is nil, it
// only counts the bytes.
type layout struct {
	buf  []byte // nil: only count
	size int
}

// bytes writes b, followed by pad zero bytes, and returns the address of b in the caller's memory.
func (l *layout) bytes(b []byte, pad int) unsafe.Pointer {
	at := l.size
	l.size += (len(b) + pad + 7) &^ 7
	if l.buf == nil {
		return nil
	}
	clear(l.buf[at+copy(l.buf[at:], b) : l.size])
	return unsafe.Pointer(&l.buf[at])
}

func (l *layout) text(s string) *C.char { return (*C.char)(l.bytes([]byte(s), 1)) }

// writeStart writes s to buf, unless buf is nil, and returns its size. The pointers in the written
// structure point into buf, which is the caller's memory.
func writeStart(buf []byte, s *binding.Start) int {
	const size = unsafe.Sizeof(C.penstock_start{})
	l := layout{buf: buf, size: int(size)}
	out := C.penstock_start{
		size: C.uint64_t(size), name: l.text(s.Name), id: l.text(s.ID), ns: l.text(s.Namespace), engine: l.text(s.Engine),
		peer_engine: l.text(s.PeerEngine), peer_address: l.bytes(s.PeerAddress, 1), peer_token: l.bytes(s.PeerToken, 1),
		peer_address_bytes: C.uint32_t(len(s.PeerAddress)), peer_token_bytes: C.uint32_t(len(s.PeerToken)),
		epoch: C.uint64_t(s.Epoch), prompt_tokens: C.uint32_t(s.Prompt), output_tokens: C.uint32_t(s.Output), hit_blocks: C.uint32_t(s.Hit),
		n_parts: C.uint32_t(len(s.Parts)), payload: l.bytes(s.Payload, 1), payload_bytes: C.uint64_t(len(s.Payload)), n_ids: C.uint32_t(len(s.IDs)),
	}
	parts := make([]C.penstock_part, len(s.Parts))
	for i, p := range s.Parts {
		parts[i] = partOf(p)
	}
	out.parts = (*C.penstock_part)(l.bytes(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(parts))), len(parts)*int(unsafe.Sizeof(C.penstock_part{}))), 1))
	if s.IDs != nil {
		out.ids = (*C.uint8_t)(l.bytes(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s.IDs))), len(s.IDs)*kv.BlockIDSize), 1))
	}
	if s.Extra != nil {
		out.extra = l.text(string(s.Extra))
	}
	if buf != nil {
		*(*C.penstock_start)(unsafe.Pointer(&buf[0])) = out
	}
	return l.size
}

//export goAttemptDescribe
func goAttemptDescribe(a C.uint64_t, buf *C.penstock_start, room C.uint64_t, need *C.uint64_t, to *C.penstock_error) C.int32_t {
	return inAttempt(a, to, func(a *binding.Attempt) error {
		s := a.Start()
		n := writeStart(nil, &s)
		if need != nil {
			*need = C.uint64_t(n)
		}
		if buf == nil || uint64(room) < uint64(n) || uintptr(unsafe.Pointer(buf))%8 != 0 {
			return invalid("penstock_attempt_describe: buf is %p, cap is %d; want %d bytes, aligned to 8", buf, uint64(room), n)
		}
		writeStart(unsafe.Slice((*byte)(unsafe.Pointer(buf)), n), &s)
		return nil
	})
}

// part returns the part [from, until).
func part(from, until C.uint32_t) traffic.Part { return traffic.Part{From: int(from), To: int(until)} }

//export goAttemptProgress
func goAttemptProgress(a C.uint64_t, from, until, upto C.uint32_t, bytes C.uint64_t, to *C.penstock_error) C.int32_t {
	return inAttempt(a, to, func(a *binding.Attempt) error {
		return a.Progress(traffic.Progress{Part: part(from, until), Upto: int(upto), Bytes: int64(bytes)})
	})
}

//export goAttemptStopped
func goAttemptStopped(a C.uint64_t, from, until, upto, gone C.uint32_t, to *C.penstock_error) C.int32_t {
	return inAttempt(a, to, func(a *binding.Attempt) error {
		return a.Stopped(traffic.Stop{Part: part(from, until), Upto: int(upto), Gone: gone != 0})
	})
}

//export goAttemptPassed
func goAttemptPassed(a C.uint64_t, to *C.penstock_error) C.int32_t {
	return inAttempt(a, to, (*binding.Attempt).Passed)
}

//export goAttemptDone
func goAttemptDone(a C.uint64_t, failure *C.char, intact C.uint32_t, to *C.penstock_error) C.int32_t {
	return inAttempt(a, to, func(a *binding.Attempt) error {
		reason := text(failure)
		if failure != nil && reason == "" {
			reason = "the engine gave no reason"
		}
		return a.Done(reason, int(intact))
	})
}
