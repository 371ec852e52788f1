// Package datacenters is a PrfaaS system in virtual time: a cluster that only
// prefills, a cluster that prefills and decodes, and the link between them (PrfaaS,
// section 3). Package prfaas decides which cluster prefills, which prefixes are fetched,
// the threshold, and which instances prefill or decode; no server runs that package. The
// simulation has lengths and times only: no KV, and no failure of a machine.
//
//	                       ┌─► fetch a prefix over the link, or not ─► PrfaaS queue ─► N_prfaas instances ══ layer by layer ══╗
//	arrivals ─► Router ────┤   (sim/flow)                              FIFO            T_prefill(l)        link (sim/flow)    ║
//	   ▲          ▲        └─► fetch, or not ─► PD queue ─► N_p instances, T_prefill(l) ─── RDMA, no time ──┐                 ║
//	   │          │                             FIFO                                                        ▼                 ▼
//	   │     Short: every second                                                                  first token; decode queue, FIFO
//	   │     Long: every period ─► N_p, N_d                                                                 │
//	   └── next turn of the session ◄── L_out steps of T_decode ◄── N_d instances, BS_max at a time ◄───────┘
//
// # What is modelled
//
//   - Arrivals are Poisson at a rate, or a closed loop: a number of requests that is
//     always in the system, which is how the highest throughput is found. With
//     Turns above 1 a request is followed, after a think time, by another of its
//     session, whose prompt is the last one's, its answer and new tokens.
//   - An instance prefills one request at a time, in order of arrival, in T(l), l
//     being what no usable cache has. A PrfaaS instance stalls while the link is
//     TransfersMax requests behind: what it makes has to be kept somewhere.
//   - With Layers = n, KV crosses while it is made: all but the last layer's share
//     at the rate at which it is made at most, that share when the prefill ends. With
//     1, the KV crosses when the prefill has ended, as the TTFT of the paper's
//     Table 6 counts it.
//   - Decoding takes StepSeconds a token whatever the batch, as the paper's SLO-bound
//     constant does. Time to first token ends when the KV has arrived.
//   - The cluster that prefills keeps the whole blocks and a state at their end; what
//     crosses for decoding is dropped when the answer is done (PrfaaS, section 3.2).
//     Caches forget nothing.
//   - An instance that changes its role finishes what it does, then takes SwitchTime.
//
// One seed, one result: Result.Digest tells two runs apart. Streams: "arrivals",
// "lengths", "sessions". A run is one goroutine; there is no lock.
package datacenters
