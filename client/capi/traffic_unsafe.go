package main

// #include "penstock.h"
import "C"

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"log/slog"
	"math"
	"slices"
	"unsafe"

	"github.com/penstock-kv/penstock/client/capi/binding"
	"github.com/penstock-kv/penstock/client/traffic"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/tcp"
)

// inTraffic calls f with the traffic manager of a handle. It reports an unknown handle, or the
// error of f, to the caller.
func inTraffic(h C.uint64_t, to *C.penstock_error, f func(*binding.Traffic) error) C.int32_t {
	t, err := library.Traffic(binding.Handle(h))
	if err == nil {
		err = f(t)
	}
	return report(to, err)
}

// inTransfer calls f with the transfer of a handle. It reports an unknown handle, or the error of
// f, to the caller.
func inTransfer(h C.uint64_t, to *C.penstock_error, f func(*binding.Transfer) error) C.int32_t {
	x, err := library.Transfer(binding.Handle(h))
	if err == nil {
		err = f(x)
	}
	return report(to, err)
}

const (
	// maxToken is the size of penstock_traffic_description.token.
	maxToken = len(C.penstock_traffic_description{}.token)
	// randomToken is the length of the token that a traffic manager makes if the caller gives none.
	randomToken = 32
	// maxPages is the largest number of device pages in a call: of the longest prompt in 128 page tables.
	maxPages = traffic.MaxBlocks * 128
)

//export goTrafficOpen
func goTrafficOpen(ns C.uint64_t, o *C.penstock_traffic_options, out *handle, to *C.penstock_error) C.int32_t {
	return inNamespace(ns, to, func(n *binding.Namespace) error {
		if o == nil || out == nil {
			return invalid("penstock_traffic_open: options or traffic is NULL")
		}
		options, err := trafficOptions(o)
		if err != nil {
			return err
		}
		h, err := n.OpenTraffic(options)
		if err == nil {
			*out = handle(h)
		}
		return err
	})
}

// trafficOptions copies the caller's options.
func trafficOptions(from *C.penstock_traffic_options) (out binding.TrafficOptions, err error) {
	o, err := grown("penstock_traffic_options", from, from.size, unsafe.Offsetof(from.cuda))
	if err != nil {
		return out, err
	}
	switch {
	case o.n_bases > 0 && o.bases == nil || o.n_bases > kv.MaxLayers:
		return out, invalid("penstock_traffic_options: %d bases at %p", uint32(o.n_bases), o.bases)
	case o.n_order > 0 && o.order == nil || o.n_order > kv.MaxLayers:
		return out, invalid("penstock_traffic_options: an order of %d layers at %p", uint32(o.n_order), o.order)
	case o.n_tables > 0 && o.tables == nil || o.n_tables > kv.MaxLayers:
		return out, invalid("penstock_traffic_options: page tables of %d layers at %p", uint32(o.n_tables), o.tables)
	case o.token_bytes > 0 && o.token == nil || int(o.token_bytes) > maxToken:
		return out, invalid("penstock_traffic_options: a token of %d bytes (at most %d) at %p", uint32(o.token_bytes), maxToken, o.token)
	case o.verify > math.MaxInt32:
		return out, invalid("penstock_traffic_options: verify is %d; it must be 0, 1 or a number up to 2^31-1", uint32(o.verify))
	case o.buffer_bytes > math.MaxInt64 || o.append_bytes > math.MaxInt64:
		return out, invalid("penstock_traffic_options: a buffer of more than 2^63-1 bytes")
	}
	token := rdma.Token(C.GoBytes(o.token, C.int(o.token_bytes)))
	if len(token) == 0 {
		token = make(rdma.Token, randomToken)
		_, _ = rand.Read(token) // rand.Read never fails
	}
	options := tcp.Options{Listen: text(o.listen), Advertise: text(o.advertise), Token: token, Conns: int(o.connections), ZeroCopy: true}
	if options.Listen == "" {
		options.Listen = "127.0.0.1:0"
	}
	out = binding.TrafficOptions{
		Compute: func(ctx context.Context, secure *tls.Config, log *slog.Logger) (rdma.Engine, error) {
			options.TLS, options.TLSOnly, options.Logger = secure, secure != nil, log
			e, err := tcp.New(ctx, options)
			if err != nil {
				return nil, invalid("compute NIC: %w", err)
			}
			return e, nil
		},
		Token: token, Address: uint64(uintptr(o.memory)), Bytes: uint64(o.memory_bytes),
		Bases: slices.Clone(slice[uint64](o.bases, int(o.n_bases))), Stride: uint64(o.stride), Pages: int(o.pages),
		BufferBytes: int64(o.buffer_bytes), AppendBytes: int64(o.append_bytes), PersistMax: int(o.persist_max), TransfersMax: int(o.transfers_max),
		Verify: traffic.Verify(o.verify), CAFile: text(o.ca_file), CertFile: text(o.cert_file), KeyFile: text(o.key_file),
	}
	for _, l := range slice[uint32](o.order, int(o.n_order)) {
		out.Order = append(out.Order, int(l))
	}
	for _, t := range slice[uint32](o.tables, int(o.n_tables)) {
		out.Tables = append(out.Tables, int(t))
	}
	if o.cuda > 0 {
		out.Copier = openCUDA(uint32(o.cuda) - 1)
	}
	return out, nil
}

//export goTrafficClose
func goTrafficClose(t C.uint64_t, to *C.penstock_error) C.int32_t {
	return inTraffic(t, to, (*binding.Traffic).Close)
}

//export goTrafficFollow
func goTrafficFollow(t C.uint64_t, stream C.uint64_t, to *C.penstock_error) C.int32_t {
	return inTraffic(t, to, func(t *binding.Traffic) error { return t.FollowStream(uint64(stream)) })
}

//export goTrafficDescribe
func goTrafficDescribe(t C.uint64_t, out *C.penstock_traffic_description, to *C.penstock_error) C.int32_t {
	return inTraffic(t, to, func(t *binding.Traffic) error {
		if out == nil {
			return invalid("penstock_traffic_describe: description is NULL")
		}
		if err := sized("penstock_traffic_description", out.size, unsafe.Sizeof(*out)); err != nil {
			return err
		}
		d, err := t.Describe()
		if err != nil {
			return err
		}
		f := d.Footprint
		*out = C.penstock_traffic_description{
			size: out.size, address_bytes: C.uint32_t(len(d.Address)), token_bytes: C.uint32_t(len(d.Token)),
			buffer_bytes: C.uint64_t(f.Buffer), block_bytes: C.uint64_t(f.Block), sums_bytes: C.uint64_t(f.Sums), request_bytes: C.uint64_t(f.Request),
		}
		fill(out.address[:], string(d.Address))
		copy(slice[byte](&out.token[0], maxToken), d.Token)
		return nil
	})
}

// transferOptions are a copy of the caller's options.
type transferOptions struct {
	request     string
	ids         []kv.BlockID
	parts       []traffic.Part
	pages       []uint32
	blocks, hit int
	peer        traffic.Peer
}

func transferOf(call string, o *C.penstock_transfer_options, out *handle) (x transferOptions, err error) {
	if o == nil || out == nil {
		return x, invalid("%s: options or transfer is NULL", call)
	}
	if err := sized("penstock_transfer_options", o.size, unsafe.Sizeof(*o)); err != nil {
		return x, err
	}
	switch {
	case o.n_ids > 0 && o.ids == nil || o.n_ids > maxPrompt || o.n_parts > 0 && o.parts == nil || o.n_parts > traffic.MaxBlocks || o.n_pages > 0 && o.pages == nil || o.n_pages > maxPages:
		return x, invalid("penstock_transfer_options: %d ids at %p, %d parts at %p, %d pages at %p", uint32(o.n_ids), o.ids, uint32(o.n_parts), o.parts, uint32(o.n_pages), o.pages)
	case o.peer_address_bytes > 0 && o.peer_address == nil || o.peer_token_bytes > 0 && o.peer_token == nil || o.peer_address_bytes > maxBytes || o.peer_token_bytes > maxBytes:
		return x, invalid("penstock_transfer_options: an address of %d bytes at %p, a token of %d bytes at %p", uint32(o.peer_address_bytes), o.peer_address, uint32(o.peer_token_bytes), o.peer_token)
	}
	x = transferOptions{
		request: text(o.request), ids: slices.Clone(slice[kv.BlockID](o.ids, int(o.n_ids))), pages: slices.Clone(slice[uint32](o.pages, int(o.n_pages))),
		blocks: int(o.blocks), hit: int(o.hit_blocks), peer: traffic.Peer{Token: C.GoBytes(o.peer_token, C.int(o.peer_token_bytes))},
	}
	if address := C.GoBytes(o.peer_address, C.int(o.peer_address_bytes)); len(address) > 0 {
		x.peer.Addr.NICs = []rdma.NetAddr{rdma.NetAddr(address)}
	}
	for _, p := range unsafe.Slice(o.parts, int(o.n_parts)) {
		x.parts = append(x.parts, part(p.from, p.to))
	}
	return x, nil
}

//export goTrafficPrefill
func goTrafficPrefill(t C.uint64_t, o *C.penstock_transfer_options, out *handle, to *C.penstock_error) C.int32_t {
	return inTraffic(t, to, func(t *binding.Traffic) error {
		x, err := transferOf("penstock_traffic_prefill", o, out)
		if err != nil {
			return err
		}
		h, err := t.Prefill(traffic.PrefillJob{
			Request: x.request, IDs: x.ids, Epoch: kv.Epoch(o.epoch), Blocks: x.blocks, Hit: x.hit, Parts: x.parts, Pages: x.pages,
		}, millis(o.timeout_ms))
		if err == nil {
			*out = handle(h)
		}
		return err
	})
}

//export goTrafficDecode
func goTrafficDecode(t C.uint64_t, o *C.penstock_transfer_options, out *handle, to *C.penstock_error) C.int32_t {
	return inTraffic(t, to, func(t *binding.Traffic) error {
		x, err := transferOf("penstock_traffic_decode", o, out)
		if err != nil {
			return err
		}
		h, err := t.Decode(traffic.DecodeJob{
			Request: x.request, IDs: x.ids, Epoch: kv.Epoch(o.epoch), Blocks: x.blocks, Hit: x.hit, Parts: x.parts, Pages: x.pages,
			Peer: x.peer, NoPersist: o.no_persist != 0, Resident: int(o.resident_blocks),
		}, millis(o.timeout_ms))
		if err == nil {
			*out = handle(h)
		}
		return err
	})
}

//export goTransferRead
func goTransferRead(x C.uint64_t, from, until C.uint32_t, to *C.penstock_error) C.int32_t {
	return inTransfer(x, to, func(x *binding.Transfer) error { return x.Read(part(from, until)) })
}

//export goTransferCut
func goTransferCut(x C.uint64_t, to *C.penstock_error) C.int32_t {
	return inTransfer(x, to, (*binding.Transfer).Cut)
}

//export goTransferRecompute
func goTransferRecompute(x C.uint64_t, from, until C.uint32_t, to *C.penstock_error) C.int32_t {
	return inTransfer(x, to, func(x *binding.Transfer) error { return x.Recompute(part(from, until)) })
}

//export goTransferAddPages
func goTransferAddPages(x C.uint64_t, pages *C.uint32_t, n C.uint32_t, to *C.penstock_error) C.int32_t {
	return inTransfer(x, to, func(x *binding.Transfer) error {
		if n > 0 && pages == nil || n > maxPages {
			return invalid("penstock_transfer_add_pages: %d pages at %p", uint32(n), pages)
		}
		return x.AddPages(slices.Clone(slice[uint32](pages, int(n))))
	})
}

//export goTransferComputed
func goTransferComputed(x C.uint64_t, layer, block C.uint32_t, to *C.penstock_error) C.int32_t {
	return inTransfer(x, to, func(x *binding.Transfer) error { return x.Computed(int(layer), int(block)) })
}

//export goTransferLayer
func goTransferLayer(x C.uint64_t, layer, timeout C.uint32_t, to *C.penstock_error) C.int32_t {
	return inTransfer(x, to, func(x *binding.Transfer) error { return x.Layer(int(layer), limit(timeout)) })
}

//export goTransferFinish
func goTransferFinish(x C.uint64_t, to *C.penstock_error) C.int32_t {
	return inTransfer(x, to, (*binding.Transfer).Finish)
}

//export goTransferCancel
func goTransferCancel(x C.uint64_t, to *C.penstock_error) C.int32_t {
	return inTransfer(x, to, (*binding.Transfer).Cancel)
}

//export goTrafficAppend
func goTrafficAppend(t C.uint64_t, request *C.char, ids *C.uint8_t, n C.uint32_t, epoch C.uint64_t, pages *C.uint32_t, nPages, timeout C.uint32_t, to *C.penstock_error) C.int32_t {
	return inTraffic(t, to, func(t *binding.Traffic) error {
		if ids == nil || n == 0 || n > traffic.MaxBlocks {
			return invalid("penstock_traffic_append: %d ids (1 to %d) at %p", uint32(n), traffic.MaxBlocks, ids)
		}
		if pages == nil || nPages > kv.MaxLayers {
			return invalid("penstock_traffic_append_pages: %d pages (1 to %d) at %p", uint32(nPages), kv.MaxLayers, pages)
		}
		return t.Append(text(request), slice[kv.BlockID](ids, int(n)), kv.Epoch(epoch), limit(timeout), slices.Clone(slice[uint32](pages, int(nPages)))...)
	})
}

//export goTrafficSettle
func goTrafficSettle(t C.uint64_t, id *C.uint8_t, timeout C.uint32_t, to *C.penstock_error) C.int32_t {
	return inTraffic(t, to, func(t *binding.Traffic) error {
		if id == nil {
			return invalid("penstock_traffic_settle: id is NULL")
		}
		return t.Settle(slice[kv.BlockID](id, 1)[0], limit(timeout))
	})
}

//export goTrafficNICs
func goTrafficNICs(t C.uint64_t, nics *C.penstock_nic, most C.uint32_t, n *C.uint32_t, to *C.penstock_error) C.int32_t {
	return inTraffic(t, to, func(t *binding.Traffic) error {
		if n == nil || nics == nil && most > 0 {
			return invalid("penstock_traffic_nics: nics or n is NULL")
		}
		list, err := t.NICs()
		if err != nil {
			return err
		}
		list = list[:min(len(list), int(most))]
		*n = C.uint32_t(len(list))
		out := unsafe.Slice(nics, len(list))
		for i, nic := range list {
			out[i] = C.penstock_nic{bytes_out: C.uint64_t(nic.BytesOut), bytes_in: C.uint64_t(nic.BytesIn)}
			fill(out[i].name[:], nic.Name)
		}
		return nil
	})
}

//export goTrafficEventfd
func goTrafficEventfd(t C.uint64_t, fd *C.int32_t, to *C.penstock_error) C.int32_t {
	return inTraffic(t, to, func(t *binding.Traffic) error { return eventfd(fd, t.EventFD) })
}

//export goTrafficDrain
func goTrafficDrain(t C.uint64_t, events *C.penstock_transfer_event, most C.uint32_t, n *C.uint32_t, to *C.penstock_error) C.int32_t {
	return inTraffic(t, to, func(t *binding.Traffic) error {
		if n == nil || events == nil && most > 0 {
			return invalid("penstock_traffic_drain: events or n is NULL")
		}
		in := make([]binding.TransferEvent, min(int(most), drainMax))
		got, err := t.Drain(in)
		*n = C.uint32_t(got)
		out := unsafe.Slice(events, got)
		for i, e := range in[:got] {
			out[i] = C.penstock_transfer_event{
				transfer: C.penstock_transfer(e.Transfer), kind: C.uint32_t(e.Kind), first_miss: C.uint32_t(e.FirstMiss), part: partOf(e.Part),
				upto: C.uint32_t(e.Upto), bytes: C.uint64_t(e.Bytes), intact: C.uint32_t(e.Intact),
			}
			if e.Gone {
				out[i].gone = 1
			}
			if e.Kind == binding.TransferFailed {
				report(&out[i].error, e.Err)
			} else if e.Err != nil {
				fill(out[i].error.message[:], e.Err.Error())
			}
		}
		return err
	})
}
