package main

/*
#include <stdlib.h>
#include <string.h>
#include "penstock.h"

static inline void callLog(penstock_log f, void *arg, int32_t level, const char *line) { f(arg, level, line); }
*/
import "C"

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"math"
	"time"
	"unicode/utf8"
	"unsafe"

	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/client/capi/binding"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/copier"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// Safety: pointers come from callers, which follow the comments of penstock.h. The
// functions return an error for a nil pointer that must not be nil. They copy the memory
// behind a pointer before they return, except results and values of a batch (see package
// binding).

// library is the table of handles of the process. It is a package variable because the C
// interface has no context to pass it in.
var library = binding.NewLibrary()

// handle is the type of handles in C.
type handle = C.uint64_t

// report writes err to the caller's structure and returns the code of err.
func report(to *C.penstock_error, err error) C.int32_t {
	code := binding.CodeOf(err)
	if to == nil {
		return C.int32_t(code)
	}
	to.code = C.int32_t(code)
	text := ""
	if err != nil {
		text = err.Error()
	}
	fill(to.message[:], text)
	return C.int32_t(code)
}

// fill writes text to the caller's array, with a zero byte at the end. A text that is too long is
// cut.
func fill(to []C.char, text string) {
	room := unsafe.Slice((*byte)(unsafe.Pointer(&to[0])), len(to))
	n := copy(room[:len(room)-1], text)
	for n > 0 && n < len(text) && !utf8.RuneStart(text[n]) {
		n-- // cut before a character, not inside it
	}
	room[n] = 0
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %w", binding.ErrInvalid, fmt.Errorf(format, args...))
}

// sized returns an error if the caller's structure does not have the size that this version of the
// library expects.
func sized(what string, got C.uint64_t, want uintptr) error {
	if uint64(got) != uint64(want) {
		return invalid("%s.size is %d; want %d: set it to sizeof, and use the header of this library", what, uint64(got), want)
	}
	return nil
}

// grown returns a full copy of the caller's structure p, which has size bytes. The structure of an
// earlier version of the library is shorter, but it must have at least as many bytes as the
// argument first. The missing fields are zero in the copy.
func grown[T any](what string, p *T, size C.uint64_t, first uintptr) (whole T, err error) {
	want := unsafe.Sizeof(whole)
	if uint64(size) < uint64(first) || uint64(size) > uint64(want) {
		return whole, invalid("%s.size is %d; want %d: set it to sizeof, and use the header of this library", what, uint64(size), want)
	}
	// Safety: the caller's structure has size bytes, and whole has at least as many.
	copy(slice[byte](&whole, int(want)), slice[byte](p, int(size)))
	return whole, nil
}

func text(s *C.char) string {
	if s == nil {
		return ""
	}
	// C.GoString reads several bytes at once, some of them behind the zero byte, which
	// memcheck reports to users who run their program under it.
	return C.GoStringN(s, C.int(C.strlen(s)))
}

func millis(n C.uint32_t) time.Duration { return time.Duration(n) * time.Millisecond }

// limit converts the time limit of a call from milliseconds. PENSTOCK_NO_LIMIT means that the call
// has no limit.
func limit(ms C.uint32_t) time.Duration {
	if ms == C.PENSTOCK_NO_LIMIT {
		return binding.NoLimit
	}
	return millis(ms)
}

// slice returns the n elements at p.
func slice[T, C any](p *C, n int) []T { return unsafe.Slice((*T)(unsafe.Pointer(p)), n) }

// inStore calls f with the store of a handle. It reports an unknown handle, or the error of f, to
// the caller.
func inStore(h C.uint64_t, to *C.penstock_error, f func(*binding.Store) error) C.int32_t {
	s, err := library.Store(binding.Handle(h))
	if err == nil {
		err = f(s)
	}
	return report(to, err)
}

// inNamespace calls f with the namespace of a handle. It reports an unknown handle, or the error of
// f, to the caller.
func inNamespace(h C.uint64_t, to *C.penstock_error, f func(*binding.Namespace) error) C.int32_t {
	ns, err := library.Namespace(binding.Handle(h))
	if err == nil {
		err = f(ns)
	}
	return report(to, err)
}

//export goOpen
func goOpen(o *C.penstock_options, store *handle, to *C.penstock_error) C.int32_t {
	h, err := open(o, store)
	if err == nil {
		*store = handle(h)
	}
	return report(to, err)
}

func open(o *C.penstock_options, store *handle) (binding.Handle, error) {
	if o == nil || store == nil {
		return 0, invalid("penstock_open: options or store is NULL")
	}
	whole, err := grown("penstock_options", o, o.size, unsafe.Offsetof(o.discover)) // version 1.7 ends before discover
	if err != nil {
		return 0, err
	}
	o = &whole
	options := binding.Options{
		Servers: text(o.servers), Discover: o.discover != 0, Zone: text(o.zone),
		Credentials: binding.Credentials{
			Token: text(o.token), TokenFile: text(o.token_file),
			CAFile: text(o.ca_file), CertFile: text(o.cert_file), KeyFile: text(o.key_file), Insecure: o.insecure != 0,
		},
		LogLevel:    slog.Level(o.log_level),
		DialTimeout: millis(o.dial_timeout_ms), DeadFor: millis(o.dead_for_ms), Timeout: millis(o.timeout_ms),
		JobsMax: int(o.jobs_max), JobsParallel: int(o.jobs_parallel),
	}
	if f, arg := o.log, o.log_arg; f != nil {
		options.Log = func(level slog.Level, line string) {
			s := C.CString(line)
			defer C.free(unsafe.Pointer(s))
			C.callLog(f, arg, C.int32_t(level), s)
		}
	}
	conns := int(o.connections)
	options.Engine = func(ctx context.Context, t *tls.Config, log *slog.Logger) (rdma.Engine, error) {
		e, err := tcp.New(ctx, tcp.Options{TLS: t, Conns: conns, ZeroCopy: true, Logger: log})
		if err != nil {
			return nil, invalid("transfer engine: %w", err)
		}
		return e, nil
	}
	return library.Open(context.Background(), options)
}

//export goClose
func goClose(store C.uint64_t, to *C.penstock_error) C.int32_t {
	return inStore(store, to, (*binding.Store).Close)
}

//export goEnsure
func goEnsure(store C.uint64_t, d *C.penstock_definition, ns *handle, to *C.penstock_error) C.int32_t {
	return inStore(store, to, func(s *binding.Store) error {
		if d == nil || ns == nil {
			return invalid("penstock_ensure: definition or ns is NULL")
		}
		def, err := definition(d)
		if err != nil {
			return err
		}
		if d.keys > C.PENSTOCK_KEYS_IDS {
			return invalid("penstock_definition.keys is %d", uint32(d.keys))
		}
		h, err := s.Ensure(def, d.keys == C.PENSTOCK_KEYS_IDS)
		if err == nil {
			*ns = handle(h)
		}
		return err
	})
}

func definition(d *C.penstock_definition) (kv.Namespace, error) {
	if err := sized("penstock_definition", d.size, unsafe.Sizeof(*d)); err != nil {
		return kv.Namespace{}, err
	}
	def := kv.Namespace{
		Name: text(d.name), Tenant: text(d.tenant), Index: kv.IndexKind(d.index), QuotaBytes: int64(d.quota_bytes),
		Geometry: kv.Geometry{BlockTokens: int(d.block_tokens), DType: text(d.dtype), Layout: text(d.layout)},
	}
	if d.index > C.PENSTOCK_FLAT || d.n_groups > kv.MaxGroups || d.n_groups > 0 && d.groups == nil || d.salt_bytes > 0 && d.salt == nil || d.salt_bytes > 64 {
		return def, invalid("penstock_definition: index %d, %d groups at %p, %d bytes of salt at %p", uint32(d.index), uint32(d.n_groups), d.groups, uint32(d.salt_bytes), d.salt)
	}
	if d.salt_bytes > 0 {
		def.Salt = C.GoBytes(d.salt, C.int(d.salt_bytes))
	}
	for _, g := range unsafe.Slice(d.groups, int(d.n_groups)) {
		if g.kind > C.PENSTOCK_GROUP_STATE {
			return def, invalid("penstock_group.kind is %d", uint32(g.kind))
		}
		def.Geometry.Groups = append(def.Geometry.Groups, kv.Group{Kind: kv.GroupKind(g.kind), Layers: int(g.layers), TokenBytes: int(g.token_bytes), WindowTokens: int(g.window_tokens)})
	}
	return def, nil
}

//export goEpoch
func goEpoch(ns C.uint64_t, refresh C.uint32_t, epoch *C.uint64_t, to *C.penstock_error) C.int32_t {
	return inNamespace(ns, to, func(n *binding.Namespace) (err error) {
		e := n.Definition().Epoch
		if refresh != 0 {
			e, err = n.Refresh()
		}
		if err == nil && epoch != nil {
			*epoch = C.uint64_t(e)
		}
		return err
	})
}

//export goBumpKeep
func goBumpKeep(ns, next C.uint64_t, keep C.uint32_t, epoch *C.uint64_t, to *C.penstock_error) C.int32_t {
	return inNamespace(ns, to, func(n *binding.Namespace) error {
		if keep < 1 || keep > kv.MaxLive {
			return invalid("penstock_bump_keep: keep is %d; want 1 to %d", uint32(keep), kv.MaxLive)
		}
		e, err := n.Bump(kv.Epoch(next), int(keep))
		if epoch != nil && e != 0 {
			*epoch = C.uint64_t(e)
		}
		return err
	})
}

//export goPinEpoch
func goPinEpoch(ns, epoch C.uint64_t, ms C.uint32_t, pinned *C.uint64_t, lease *handle, to *C.penstock_error) C.int32_t {
	return inNamespace(ns, to, func(n *binding.Namespace) error {
		if lease == nil || ms == 0 {
			return invalid("penstock_pin_epoch: ms is %d, lease is %p; want a duration and a place for the lease", uint32(ms), lease)
		}
		e, h, err := n.PinEpoch(kv.Epoch(epoch), millis(ms))
		if err != nil {
			return err
		}
		if *lease = handle(h); pinned != nil {
			*pinned = C.uint64_t(e)
		}
		return nil
	})
}

//export goRetire
func goRetire(ns, epoch C.uint64_t, force C.uint32_t, to *C.penstock_error) C.int32_t {
	return inNamespace(ns, to, func(n *binding.Namespace) error { return n.Retire(kv.Epoch(epoch), force != 0) })
}

//export goRegister
func goRegister(store, addr, n C.uint64_t, memory *handle, to *C.penstock_error) C.int32_t {
	return inStore(store, to, func(s *binding.Store) error {
		if memory == nil {
			return invalid("penstock_register: memory is NULL")
		}
		h, err := s.Register(uint64(addr), uint64(n))
		if err == nil {
			*memory = handle(h)
		}
		return err
	})
}

//export goRegisterDevice
func goRegisterDevice(store C.uint64_t, o *C.penstock_device_options, address, n C.uint64_t, memory *handle, to *C.penstock_error) C.int32_t {
	return inStore(store, to, func(s *binding.Store) error {
		if o == nil || memory == nil {
			return invalid("penstock_register_device: options or memory is NULL")
		}
		if err := sized("penstock_device_options", o.size, unsafe.Sizeof(*o)); err != nil {
			return err
		}
		device := uint32(o.device)
		h, err := s.RegisterDevice(binding.DeviceOptions{Device: int(device), StagingBytes: uint64(o.staging_bytes), Open: openCUDA(device)}, uint64(address), uint64(n))
		if err == nil {
			*memory = handle(h)
		}
		return err
	})
}

// openCUDA returns a function that opens a device of the CUDA driver.
func openCUDA(device uint32) func() (copier.DeviceCopier, error) {
	return func() (copier.DeviceCopier, error) {
		return copier.NewCUDA(copier.CUDAOptions{Device: int(min(device, math.MaxInt32))})
	}
}

//export goCopyDevice
func goCopyDevice(device C.uint32_t, address, host, n C.uint64_t, toDevice C.uint32_t, to *C.penstock_error) C.int32_t {
	return report(to, binding.CopyDevice(openCUDA(uint32(device)), uint64(address), uint64(host), uint64(n), toDevice != 0))
}

//export goUnregister
func goUnregister(memory C.uint64_t, to *C.penstock_error) C.int32_t {
	m, err := library.Memory(binding.Handle(memory))
	if err == nil {
		err = m.Unregister()
	}
	return report(to, err)
}

// batch converts the caller's batch without copying its arrays.
func batch(op binding.Op, b *C.penstock_batch, results *C.uint8_t) (*binding.Batch, error) {
	if b == nil {
		return nil, invalid("the batch is NULL")
	}
	// The structure of version 1.0 ends before oldest_epoch, that of version 1.1 before key_epochs,
	// that of version 1.2 before first_layer, and that of version 1.3 before stream.
	hasOldest := uint64(b.size) != uint64(unsafe.Offsetof(b.oldest_epoch))
	hasEpochs := hasOldest && uint64(b.size) != uint64(unsafe.Offsetof(b.key_epochs))
	hasLayers := hasEpochs && uint64(b.size) != uint64(unsafe.Offsetof(b.first_layer))
	hasStream := hasLayers && uint64(b.size) != uint64(unsafe.Offsetof(b.stream))
	if hasStream {
		if err := sized("penstock_batch", b.size, unsafe.Sizeof(*b)); err != nil {
			return nil, err
		}
	}
	if b.n_keys == 0 || b.n_keys > C.PENSTOCK_BATCH_MAX || b.key_offsets == nil || b.flags >= 2*C.PENSTOCK_ON_STREAM {
		return nil, invalid("penstock_batch: %d keys (1 to %d), key_offsets %p, flags %#x", uint32(b.n_keys), C.PENSTOCK_BATCH_MAX, b.key_offsets, uint32(b.flags))
	}
	out := &binding.Batch{
		Epoch: kv.Epoch(b.epoch), Timeout: millis(b.timeout_ms), Lease: millis(b.lease_ms), AnyMemory: b.flags&C.PENSTOCK_ANY_MEMORY != 0,
		First: int(b.first), KeyOffsets: slice[uint32](b.key_offsets, int(b.n_keys)+1), Newest: b.flags&C.PENSTOCK_NEWEST != 0, Mix: b.flags&C.PENSTOCK_MIX != 0,
	}
	if hasOldest {
		out.Oldest = kv.Epoch(b.oldest_epoch)
	}
	if hasEpochs && b.key_epochs != nil {
		out.KeyEpochs = slice[kv.Epoch](b.key_epochs, int(b.n_keys))
	}
	if hasLayers {
		out.FirstLayer, out.Layers = int(b.first_layer), int(b.layers)
	}
	if b.flags&C.PENSTOCK_ON_STREAM != 0 {
		if !hasStream {
			return nil, invalid("penstock_batch: the flag PENSTOCK_ON_STREAM is set, and the structure has no stream")
		}
		out.OnStream, out.Stream = true, uint64(b.stream)
	}
	if total := out.KeyOffsets[b.n_keys]; total > C.PENSTOCK_BATCH_MAX*C.PENSTOCK_KEY_MAX || total > 0 && b.keys == nil {
		return nil, invalid("penstock_batch: %d bytes of keys at %p", total, b.keys)
	} else if total > 0 {
		out.Keys = unsafe.Slice((*byte)(b.keys), int(total))
	}
	n := int(b.n_keys)
	if op == binding.OpGet || op == binding.OpPut {
		var err error
		if n, err = pieces(out, b); err != nil {
			return nil, err
		}
	}
	if results != nil {
		out.Results = slice[byte](results, n)
	}
	return out, nil
}

// pieces converts the pieces of a get or put, and returns their number.
func pieces(out *binding.Batch, b *C.penstock_batch) (int, error) {
	if b.first > b.n_keys {
		return 0, invalid("penstock_batch.first is %d of %d keys", uint32(b.first), uint32(b.n_keys))
	}
	n := int(b.n_keys - b.first)
	switch {
	case b.piece_keys != nil:
		if n = int(b.n_pieces); n > C.PENSTOCK_BATCH_MAX {
			return 0, invalid("penstock_batch.n_pieces is %d; at most %d", n, C.PENSTOCK_BATCH_MAX)
		}
		out.PieceKeys = slice[uint32](b.piece_keys, n)
	case b.n_pieces != 0 && int(b.n_pieces) != n:
		return 0, invalid("penstock_batch.n_pieces is %d, for %d keys from first on, and piece_keys is NULL", uint32(b.n_pieces), n)
	}
	if b.piece_groups != nil {
		out.PieceGroups = slice[byte](b.piece_groups, n)
	}
	fragments := n
	if b.piece_fragments != nil {
		out.PieceFragments = slice[uint32](b.piece_fragments, n+1)
		if fragments = int(out.PieceFragments[n]); fragments > C.PENSTOCK_BATCH_MAX*kv.MaxLayers {
			return 0, invalid("penstock_batch.piece_fragments ends with %d", fragments)
		}
	}
	if fragments > 0 && (b.addresses == nil || b.lengths == nil) {
		return 0, invalid("penstock_batch: %d fragments, addresses %p, lengths %p", fragments, b.addresses, b.lengths)
	}
	out.Addresses, out.Lengths = slice[uint64](b.addresses, fragments), slice[uint64](b.lengths, fragments)
	return n, nil
}

// cuts maps the cuts of package client to those of penstock.h.
var cuts = map[client.Cut]C.uint32_t{
	client.CutComplete: C.PENSTOCK_CUT_COMPLETE, client.CutAbsent: C.PENSTOCK_CUT_ABSENT, client.CutEpoch: C.PENSTOCK_CUT_EPOCH,
	client.CutWindowMissing: C.PENSTOCK_CUT_GROUPS, client.CutStateMissing: C.PENSTOCK_CUT_GROUPS, client.CutLeaseDenied: C.PENSTOCK_CUT_LEASE,
	client.CutNodeDown: C.PENSTOCK_CUT_DOWN, client.CutBusy: C.PENSTOCK_CUT_BUSY, client.CutLost: C.PENSTOCK_CUT_LOST,
}

func putResult(out *C.penstock_result, r *binding.Result) C.int32_t {
	if out == nil {
		return C.int32_t(binding.CodeOf(r.Err))
	}
	out.job, out.op, out.n, out.ok, out.prefix = C.penstock_job(r.Job), C.uint32_t(r.Op), C.uint32_t(r.N), C.uint32_t(r.OK), C.uint32_t(r.Prefix)
	out.cut, out.reserved, out.bytes, out.epoch, out.lease = cuts[r.Cut], 0, C.uint64_t(r.Bytes), C.uint64_t(r.Epoch), C.penstock_lease(r.Lease)
	return report(&out.error, r.Err)
}

//export goRun
func goRun(ns C.uint64_t, op C.uint32_t, b *C.penstock_batch, results *C.uint8_t, out *C.penstock_result) C.int32_t {
	r := binding.Result{Op: binding.Op(op)}
	n, err := library.Namespace(binding.Handle(ns))
	if err == nil {
		var in *binding.Batch
		if in, err = batch(r.Op, b, results); err == nil && in.Lease > 0 && out == nil {
			err = invalid("penstock_match: lease_ms is set, and out is NULL")
		}
		if err == nil {
			r = n.Do(r.Op, in)
			return putResult(out, &r)
		}
	}
	r.Err = err
	return putResult(out, &r)
}

//export goSubmit
func goSubmit(ns C.uint64_t, op C.uint32_t, b *C.penstock_batch, results *C.uint8_t, job *handle, to *C.penstock_error) C.int32_t {
	return inNamespace(ns, to, func(n *binding.Namespace) error {
		if job == nil {
			return invalid("penstock_submit: job is NULL")
		}
		in, err := batch(binding.Op(op), b, results)
		if err != nil {
			return err
		}
		h, err := n.Submit(binding.Op(op), in)
		if err == nil {
			*job = handle(h)
		}
		return err
	})
}

//export goSubmitWait
func goSubmitWait(ns C.uint64_t, op C.uint32_t, b *C.penstock_batch, results *C.uint8_t, timeout C.uint32_t, job *handle, out *C.penstock_result, to *C.penstock_error) C.int32_t {
	return inNamespace(ns, to, func(n *binding.Namespace) error {
		if job == nil || out == nil {
			return invalid("penstock_submit_wait: job or out is NULL")
		}
		in, err := batch(binding.Op(op), b, results)
		if err != nil {
			return err
		}
		r, err := n.SubmitWait(binding.Op(op), in, limit(timeout), (*binding.Handle)(job))
		if err == nil {
			putResult(out, &r)
		}
		return err
	})
}

//export goCancel
func goCancel(store, job C.uint64_t, to *C.penstock_error) C.int32_t {
	return inStore(store, to, func(s *binding.Store) error { return s.Cancel(binding.Handle(job)) })
}

//export goEventfd
func goEventfd(store C.uint64_t, fd *C.int32_t, to *C.penstock_error) C.int32_t {
	return inStore(store, to, func(s *binding.Store) error { return eventfd(fd, s.EventFD) })
}

// drainMax is the largest number of entries that one drain call returns.
const drainMax = 1024

//export goDrain
func goDrain(store C.uint64_t, completions *C.penstock_result, most C.uint32_t, n *C.uint32_t, to *C.penstock_error) C.int32_t {
	return inStore(store, to, func(s *binding.Store) error {
		if n == nil || completions == nil && most > 0 {
			return invalid("penstock_drain: completions or n is NULL")
		}
		results := make([]binding.Result, min(int(most), drainMax))
		got, err := s.Drain(results)
		*n = C.uint32_t(got)
		for i := range results[:got] {
			putResult(&unsafe.Slice(completions, got)[i], &results[i])
		}
		return err
	})
}

//export goWait
func goWait(store, job C.uint64_t, timeout C.uint32_t, out *C.penstock_result, to *C.penstock_error) C.int32_t {
	return inStore(store, to, func(s *binding.Store) error {
		if out == nil {
			return invalid("penstock_wait: out is NULL")
		}
		r, err := s.Wait(binding.Handle(job), millis(timeout))
		if err == nil {
			putResult(out, &r)
		}
		return err
	})
}

//export goLeaseRenew
func goLeaseRenew(lease C.uint64_t, ms C.uint32_t, to *C.penstock_error) C.int32_t {
	l, err := library.Lease(binding.Handle(lease))
	if err == nil {
		err = l.Renew(millis(ms))
	}
	return report(to, err)
}

//export goLeaseRelease
func goLeaseRelease(lease C.uint64_t, to *C.penstock_error) C.int32_t {
	l, err := library.Lease(binding.Handle(lease))
	if err == nil {
		err = l.Release()
	}
	return report(to, err)
}

//export goKeyIDs
func goKeyIDs(ns C.uint64_t, keys unsafe.Pointer, offsets *C.uint32_t, n C.uint32_t, ids *C.uint8_t, to *C.penstock_error) C.int32_t {
	return inNamespace(ns, to, func(of *binding.Namespace) error {
		if offsets == nil || ids == nil || n == 0 || n > C.PENSTOCK_BATCH_MAX {
			return invalid("penstock_key_ids: %d keys (1 to %d), key_offsets %p, ids %p", uint32(n), C.PENSTOCK_BATCH_MAX, offsets, ids)
		}
		at := slice[uint32](offsets, int(n)+1)
		total := at[n]
		if total > C.PENSTOCK_BATCH_MAX*C.PENSTOCK_KEY_MAX || total > 0 && keys == nil {
			return invalid("penstock_key_ids: %d bytes of keys at %p", total, keys)
		}
		return of.KeyIDs(slice[kv.BlockID](ids, int(n)), unsafe.Slice((*byte)(keys), int(total)), at)
	})
}

//export goChain
func goChain(ns C.uint64_t, parent *C.uint8_t, extra unsafe.Pointer, extraBytes C.uint32_t, tokens *C.uint32_t, n C.uint32_t, ids *C.uint8_t, count *C.uint32_t, to *C.penstock_error) C.int32_t {
	return inNamespace(ns, to, func(of *binding.Namespace) error {
		if count == nil || n > 0 && tokens == nil || extraBytes > 0 && extra == nil {
			return invalid("penstock_chain: n_ids, tokens or extra is NULL")
		}
		blocks := int(n) / of.Definition().Geometry.BlockTokens
		if blocks > 0 && ids == nil {
			return invalid("penstock_chain: ids is NULL, for %d blocks", blocks)
		}
		var from *kv.BlockID
		if parent != nil {
			from = (*kv.BlockID)(unsafe.Pointer(parent))
		}
		made, err := of.Chain(slice[kv.BlockID](ids, blocks)[:0], from, unsafe.Slice((*byte)(extra), int(extraBytes)), slice[kv.Token](tokens, int(n)))
		*count = C.uint32_t(made)
		return err
	})
}

//export goStats
func goStats(store C.uint64_t, buf *C.char, room C.uint64_t, need *C.uint64_t, to *C.penstock_error) C.int32_t {
	return inStore(store, to, func(s *binding.Store) error {
		json, err := s.Status()
		if err != nil {
			return err
		}
		if need != nil {
			*need = C.uint64_t(len(json) + 1)
		}
		if buf == nil || uint64(room) < uint64(len(json)+1) {
			return invalid("penstock_stats: cap is %d; %d bytes are needed", uint64(room), len(json)+1)
		}
		out := unsafe.Slice((*byte)(unsafe.Pointer(buf)), len(json)+1)
		out[copy(out, json)] = 0
		return nil
	})
}
