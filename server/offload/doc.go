// Package offload prefills long prompts in another datacenter: the threshold router of PrfaaS
// ("Prefill-as-a-Service", section 3.4.3) as a policy of the gateway of a prefill/decode cluster. The
// other datacenter has engines that prefill (an OpenAI-compatible URL, for example another penstock
// gateway) and storage nodes in which they store KV. A link with a budget of bytes per second joins the
// two storages.
//
//	             │ uncached tokens ≤ t                        ┌── the gateway's planner, as without offload
//	request ─────┤                                            ▲
//	             │ > t ─► POST /v1/completions, 1 token ─► storage there ══ link ══► storage here
//	             │          engines there prefill           (relay, within the budget)
//	             │
//	             └ abundant, and storage there has more of the prefix: the prefix crosses the link
//
// The request then goes to the planner like each other one, and finds the prompt in storage here. If
// anything fails or takes too long, the cluster here prefills the rest: no request fails because of the
// other datacenter.
//
// It does not move KV from here to there: the engines there use the prefixes that their storage has. It
// makes no decision about engines.
//
// # Weights
//
// KV is copied under the epoch that storage here has for the request. Both storages must give the same
// number to the same weights: bump both. If storage there does not keep the epoch, nothing is copied.
//
// # Bounds
//
// At most Options.InFlight requests are prefilled there at a time, each for at most Options.Timeout, and
// none begins while the link needs longer than Options.BacklogMax for the bytes that wait for it. After a
// request that failed there, or on the link, no request goes there for Options.DownFor. Further requests are
// prefilled here.
//
// There is one lock, which is not held across a call.
package offload
