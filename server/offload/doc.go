// Package offload prefills long prompts in another datacenter: the threshold router of PrfaaS
// ("Prefill-as-a-Service", section 3.4.3) as a policy of the gateway of a prefill/decode cluster.
// The remote datacenter has engines that prefill (an OpenAI-compatible URL, for example another
// penstock gateway) and storage nodes in which they store KV. A link with a budget of bytes per
// second joins the storage nodes of the two datacenters.
//
//	             │ uncached tokens ≤ t                        ┌── the gateway's planner, as without offload
//	request ─────┤                                            ▲
//	             │ > t ─► POST /v1/completions, 1 token ─► remote storage ══ link ══► local storage
//	             │          remote engines prefill          (relay, within the budget)
//	             │
//	             └ abundant, and remote storage has more of the prefix: the prefix crosses the link
//
// The request then goes to the planner like every other request, and finds the prompt in local
// storage. If a remote prefill or a copy fails or takes too long, the local cluster prefills the
// tokens that are missing in local storage. No request fails because of the remote datacenter.
//
// The package does not copy KV to the remote datacenter: the remote engines use the prefixes that
// remote storage has. It does not choose engines.
//
// # Weights
//
// KV is copied under the epoch that local storage has for the request. An epoch number must mean
// the same weights in both storages, so an operator must begin each new epoch in both. If remote
// storage does not have the epoch, nothing is copied.
//
// # Bounds
//
// At most Options.InFlight requests are prefilled remotely at a time, each for at most
// Options.Timeout. No remote prefill begins while the link needs longer than Options.BacklogMax for
// the bytes that wait for it, and none begins within Options.DownFor after a remote request or a
// copy has failed. In these cases requests are prefilled locally.
//
// The package has one lock, which is not held across a call.
package offload
