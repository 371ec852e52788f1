// Package emulate is an inference cluster without GPUs: prefill and decode engines
// that do everything real ones do with KV, and nothing else. The bytes are real and
// go through the production traffic manager, planner client and storage client;
// compute is a fitted time per layer.
//
// It is for demos, tests and measurements of the storage tier. It generates no
// text, and its times are those of its Model, not of any GPU.
//
//	Gateway ── Match ─► storage        session: turn after turn, each prompt the whole context
//	   │
//	   └─ Submit ─► planner ── Assign, Start ─► Leader of a group ─► Engine: traffic.Prefill | traffic.Decode
//	                   ▲                            │                   │ every byte that reaches device
//	                   └────── fetch, progress ─────┘                   │ memory is compared with what its
//	                                                                    │ block must hold (lab/content)
//
// "HBM" is host memory; EngineOptions.Copier says how KV gets there, by the CPU or
// over the loopback of a NIC (rdma/copier).
//
// A prefill engine computes one batch at a time: requests whose hit KV has come to
// a buffer, in that order, up to the compute quota (dualpath/batch), layer by layer,
// each layer once it is on the device for every request of the batch. An engine
// whose device memory holds all layers of a request (Window: all) cuts the request
// that exceeds the quota, as DualPath section 6.2 does, and goes on with it in the
// next batch; its KV goes to the decode engine in the last one:
//
//	queue     a ──────── b ──────────────── c ────
//	batch 1   a ──────── b ─────┤quota
//	batch 2                     ├────────── c ────
//
// With a window of fewer layers it cannot: a layer's pages are given back once it has
// been sent on, and the next part would need the layer again. There a request that
// exceeds the quota is a batch of its own. A decode engine decodes all its requests
// in every step.
//
// Leaders are of package client/leader. Gateway replays its sessions through package
// client/gateway.
//
// Lock order: Engine.mu and Gateway.mu are never held together. Engine.mu is not held
// across a call, Gateway.mu is held while Gateway.Done is called.
package emulate
