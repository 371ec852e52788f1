package main

// #include "penstock.h"
import "C"

import (
	"cmp"
	"slices"
	"unsafe"

	"github.com/penstock-kv/penstock/client/capi/binding"
	"github.com/penstock-kv/penstock/client/gateway"
	"github.com/penstock-kv/penstock/kv"
)

// inGateway calls f with the gateway of a handle. It reports an unknown handle, or the error of f,
// to the caller.
func inGateway(h C.uint64_t, to *C.penstock_error, f func(*binding.Gateway) error) C.int32_t {
	g, err := library.Gateway(binding.Handle(h))
	if err == nil {
		err = f(g)
	}
	return report(to, err)
}

//export goGatewayOpen
func goGatewayOpen(ns C.uint64_t, o *C.penstock_gateway_options, out *handle, to *C.penstock_error) C.int32_t {
	return inNamespace(ns, to, func(n *binding.Namespace) error {
		if o == nil || out == nil {
			return invalid("penstock_gateway_open: options or gateway is NULL")
		}
		if err := sized("penstock_gateway_options", o.size, unsafe.Sizeof(*o)); err != nil {
			return err
		}
		planner, err := plannerOf(o.planner)
		if err != nil {
			return err
		}
		h, err := n.OpenGateway(binding.GatewayOptions{Planner: planner, Epoch: kv.Epoch(o.epoch), RequestsMax: int(o.requests_max)})
		if err == nil {
			*out = handle(h)
		}
		return err
	})
}

//export goGatewayClose
func goGatewayClose(g C.uint64_t, to *C.penstock_error) C.int32_t {
	return inGateway(g, to, (*binding.Gateway).Close)
}

// maxPrompt is the largest number of tokens, and of ids, of a prompt.
const maxPrompt = 1 << 28

// promptOf copies the caller's prompt.
func promptOf(p *C.penstock_prompt) (r gateway.Request, err error) {
	if err := sized("penstock_prompt", p.size, unsafe.Sizeof(*p)); err != nil {
		return r, err
	}
	if p.n_tokens > 0 && p.tokens == nil || p.n_ids > 0 && p.ids == nil || p.n_resident > 0 && p.resident == nil || p.n_tokens > maxPrompt || p.n_ids > maxPrompt || p.n_resident > 64 {
		return r, invalid("penstock_prompt: %d tokens at %p, %d ids at %p, %d resident (at most 64) at %p",
			uint32(p.n_tokens), p.tokens, uint32(p.n_ids), p.ids, uint32(p.n_resident), p.resident)
	}
	r = gateway.Request{ID: text(p.id), Prompt: int(p.prompt_tokens), Output: int(p.output_tokens), Deadline: millis(p.deadline_ms)}
	if p.n_tokens > 0 {
		r.Tokens = slice[kv.Token](p.tokens, int(p.n_tokens)) // Submit does not keep it
	}
	if p.n_ids > 0 {
		r.IDs = slices.Clone(slice[kv.BlockID](p.ids, int(p.n_ids)))
	}
	if p.extra != nil {
		r.Extra = []byte(text(p.extra))
	}
	for _, h := range unsafe.Slice(p.resident, int(p.n_resident)) {
		r.Resident = append(r.Resident, gateway.Resident{Engine: text(h.engine), Tokens: int(h.tokens)})
	}
	return r, nil
}

//export goGatewaySubmit
func goGatewaySubmit(g C.uint64_t, p *C.penstock_prompt, request *handle, to *C.penstock_error) C.int32_t {
	return inGateway(g, to, func(g *binding.Gateway) error {
		if p == nil || request == nil {
			return invalid("penstock_gateway_submit: prompt or request is NULL")
		}
		r, err := promptOf(p)
		if err != nil {
			return err
		}
		h, err := g.Submit(r)
		if err == nil {
			*request = handle(h)
		}
		return err
	})
}

//export goRequestCancel
func goRequestCancel(request C.uint64_t, to *C.penstock_error) C.int32_t {
	r, err := library.Request(binding.Handle(request))
	if err == nil {
		err = r.Cancel()
	}
	return report(to, err)
}

//export goGatewayEventfd
func goGatewayEventfd(g C.uint64_t, fd *C.int32_t, to *C.penstock_error) C.int32_t {
	return inGateway(g, to, func(g *binding.Gateway) error { return eventfd(fd, g.EventFD) })
}

// kinds maps the kinds of package gateway to those of penstock.h. A failure has kind 0.
var kinds = map[gateway.Kind]C.uint32_t{
	0: C.PENSTOCK_EVENT_FAILED, gateway.Matched: C.PENSTOCK_EVENT_MATCHED, gateway.Waiting: C.PENSTOCK_EVENT_WAITING,
	gateway.Accepted: C.PENSTOCK_EVENT_ACCEPTED, gateway.Started: C.PENSTOCK_EVENT_STARTED, gateway.Prefilled: C.PENSTOCK_EVENT_PREFILLED,
	gateway.Replanned: C.PENSTOCK_EVENT_REPLANNED, gateway.Done: C.PENSTOCK_EVENT_DONE,
}

//export goGatewayDrain
func goGatewayDrain(g C.uint64_t, events *C.penstock_event, most C.uint32_t, n *C.uint32_t, to *C.penstock_error) C.int32_t {
	return inGateway(g, to, func(g *binding.Gateway) error {
		if n == nil || events == nil && most > 0 {
			return invalid("penstock_gateway_drain: events or n is NULL")
		}
		in := make([]binding.Event, min(int(most), drainMax))
		got, err := g.Drain(in)
		*n = C.uint32_t(got)
		out := unsafe.Slice(events, got)
		for i, e := range in[:got] {
			o := &out[i]
			*o = C.penstock_event{
				request: C.uint64_t(e.Request), kind: kinds[e.Kind], hit_tokens: C.uint32_t(e.Hit), epoch: C.uint64_t(e.Epoch),
				read_by_prefill: C.uint32_t(e.ReadByPrefill), read_by_decode: C.uint32_t(e.ReadByDecode),
			}
			fill(o.prefill[:], e.Prefill)
			fill(o.decode[:], e.Decode)
			if report(&o.error, e.Err); e.Err == nil {
				fill(o.error.message[:], cmp.Or(e.Reason, e.Attempt))
			}
		}
		return err
	})
}
