// Package prfaas decides which requests of a cluster are prefilled in another datacenter, and how
// the cluster's machines are divided between prefill and decode. It implements the model and the
// scheduler of the paper "Prefill-as-a-Service" (PrfaaS; sections 2.1, 2.3 and 3.4, equations 1 to
// 8). A PrfaaS cluster only prefills; the PD cluster prefills and decodes.
//
// The package is pure: no I/O, no clock, no goroutine, no lock, no randomness. It moves no KV. It
// decides where a request is prefilled and which KV must cross the link between the clusters.
// sim/datacenters simulates the transfers in virtual time.
//
//	                    ┌────────────── PrfaaS clusters: N_prfaas instances, T_prefill(l) ──┐
//	             l > t  │                                                  S_kv(l) ≤ B_out  │
//	request ── Router ──┤                                                                   ├──► decode: N_d instances,
//	             l ≤ t  │                                                                   │    BS_max / (T_decode L_out)
//	                    └────────────── PD cluster, prefill: N_p instances ─────────────────┘
//
//	seconds      Short   utilization and queue of the egress link, its capacity ─► threshold t, scarce or abundant
//	minutes      Long    lengths and rate of the traffic                        ─► N_p, N_d and t
//	once         Optimize                                                       ─► the best t, N_p, N_d
//
// # Lengths
//
// l is the length of the uncached part of a prompt, in tokens. A Lengths is the distribution of l:
// a truncated log-normal distribution, whose moments have a closed form, or a sample. Costs are
// Curves over tokens: polynomials of at most the second degree, one for all lengths or one per
// segment. So every expectation is exact.
//
// # Profiles
//
// A Profile has the measurements of one model: sizes and times at some lengths. Profiles are YAML
// data (profiles/*.yaml are built in); no formula depends on a particular model.
//
// # Units
//
// Tokens, seconds, bytes, requests per second; rates of links in bytes per second. K is 1000
// tokens, as in the paper's tables.
package prfaas
