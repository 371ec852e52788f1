// Package prfaas decides which requests of a cluster are prefilled in another
// datacenter, and how the cluster's machines are divided between prefill and
// decode. It is the model and the scheduler of PrfaaS ("Prefill-as-a-Service",
// sections 2.1, 2.3 and 3.4; equations 1 to 8).
//
// It is pure: no I/O, no clock, no goroutine, no lock, no randomness. It moves no KV: it decides
// where a request is prefilled and which KV must cross the link. sim/datacenters simulates the
// transfers in virtual time.
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
// l is the uncached part of a prompt, in tokens. Its distribution is a Lengths: a truncated
// log-normal with closed moments, or a sample. Costs are Curves over tokens: polynomials of at most
// the second degree, either one or one per segment, so that every expectation is exact.
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
