// Package datacenters is a PrfaaS system in virtual time: a cluster that only prefills (the PrfaaS
// cluster), a cluster that prefills and decodes (the PD cluster), and the link between them (PrfaaS
// paper, section 3). Package dualpath/prfaas decides which cluster prefills a request, which cached
// prefixes are fetched over the link, the threshold, and which instances prefill or decode. The
// gateway (server/offload) runs the same router. The simulation has lengths and times, but no KV
// and no failures.
//
//	                       ┌─► fetch a prefix over the link, or not ─► PrfaaS queue ─► N_prfaas instances ══ layer by layer ══╗
//	arrivals ─► Router ────┤   (sim/flow)                              FIFO            T_prefill(l)        link (sim/flow)    ║
//	   ▲          ▲        └─► fetch, or not ─► PD queue ─► N_p instances, T_prefill(l) ─── RDMA, no time ──┐                 ║
//	   │          │                             FIFO                                                        ▼                 ▼
//	   │     Short: every second                                                                  first token; decode queue, FIFO
//	   │     Long: every period ─► N_p, N_d                                                                 │
//	   └── next turn of the session ◄── L_out steps of T_decode ◄── N_d instances, BS_max at a time ◄───────┘
//
// # The model
//
//   - Arrivals are Poisson at a rate, or a closed loop with a constant number of requests in the
//     system, which shows the highest throughput. With Turns above 1, a request is followed, after
//     a think time, by another one of its session. Its prompt consists of the last prompt, its
//     answer and new tokens.
//   - An instance prefills one request at a time, in order of arrival. A prefill takes T_prefill(l),
//     where l is the number of tokens that no usable cache has. A PrfaaS instance stalls while
//     TransfersMax requests wait for the link, because the memory for their KV is bounded.
//   - With Layers = n, KV is transferred in n parts. All parts except the last are transferred
//     during the prefill, at most at the rate at which they are computed. The last part is
//     transferred after the prefill. With Layers = 1, all KV is transferred after the prefill, as
//     in the TTFT of the paper's Table 6.
//   - Decoding of a token takes T_decode (StepSeconds) for every batch size up to BS_max. The paper
//     likewise uses a constant, which its SLO bounds. An answer has L_out tokens (OutputTokens). A
//     request has its first token when its KV has arrived at the PD cluster.
//   - The cluster that prefills a request caches the KV of the whole blocks and the recurrent state
//     at their end. The PD cluster drops KV that crossed the link for decoding when the answer is
//     complete (PrfaaS, section 3.2). Caches have no capacity limit.
//   - An instance completes its requests before it changes its role; the change takes SwitchTime.
//
// One seed has one result: equal values of Result.Digest mean equal runs. The random streams are
// "arrivals", "lengths" and "sessions". A run uses one goroutine, and there is no lock.
package datacenters
