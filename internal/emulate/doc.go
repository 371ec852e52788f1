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
//	                                                                    │ block must hold (internal/content)
//
// "HBM" is host memory; EngineOptions.Copier says how KV gets there, by the CPU or
// over the loopback of a NIC (rdma/copier).
//
// A prefill engine computes one batch at a time: requests whose hit KV has come to
// a buffer, in that order, up to the compute quota (dualpath/batch), layer by layer,
// each layer once it is on the device for every request of the batch. It does not
// cut a request in chunks: one that exceeds the quota is a batch of its own. A decode
// engine decodes all its requests in every step.
//
// Lock order: Leader.mu, then engine.mu; neither is held across a call.
package emulate
