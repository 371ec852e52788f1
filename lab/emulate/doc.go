// Package emulate is an inference cluster without GPUs. Its prefill and decode engines
// move KV exactly as real engines do, and do nothing else. The bytes are real and go
// through the production traffic manager, planner client and storage client. Compute is
// emulated: each layer takes a time from a fitted model.
//
// The package is for demos, tests and measurements of the storage tier. It generates no text.
// Compute times are those of a Model; they are not the times of any GPU.
//
//	Gateway ── Match ─► storage        session: one turn after another, each prompt is the whole context
//	   │
//	   └─ Submit ─► planner ── Assign, Start ─► Leader of a group ─► Engine: traffic.Prefill | traffic.Decode
//	                   ▲                            │                   │ every byte that reaches device
//	                   └────── fetch, progress ─────┘                   │ memory is compared with the content
//	                                                                    │ of its block (lab/content)
//
// "HBM" is host memory. EngineOptions.Copier selects how KV is copied into "HBM": by the CPU, or
// over the loopback of a NIC (rdma/copier).
//
// A prefill engine computes one batch at a time (dualpath/batch). A batch takes requests in the
// order in which their cached KV arrived in the buffer, up to the compute quota. The batch is
// computed layer by layer; a layer starts once its KV is on the device for every request of the
// batch. An engine whose device memory holds all layers of a request (Window: all) splits the
// request that exceeds the quota, as section 6.2 of the DualPath paper does. The next batch
// computes the next part of the request. The batch with the last part sends the request's KV to the
// decode engine:
//
//	queue     a ──────── b ──────────────── c ────
//	batch 1   a ──────── b ─────┤quota
//	batch 2                     ├────────── c ────
//
// An engine with a smaller window cannot split a request: a layer's pages are freed once
// the layer has been sent, and the next part would need the layer again. On such an engine
// a request that exceeds the quota is a batch of its own. A decode engine decodes one token
// of every request in each step.
//
// Package client/leader implements the leaders. Gateway replays its sessions through
// package client/gateway.
//
// Lock order: Engine.mu and Gateway.mu are never held together. Engine.mu is not held
// across a call to another package. Gateway.mu is held while Gateway.Done is called.
package emulate
