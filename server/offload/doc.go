// Package offload prefills long prompts in another datacenter: the threshold router of PrfaaS
// ("Prefill-as-a-Service", section 3.4.3) as a policy of the gateway of a prefill/decode cluster. The
// remote datacenter has engines that prefill (an OpenAI-compatible URL, for example another penstock
// gateway) and storage nodes in which they store KV. A link with a budget of bytes per second joins the
// two storages.
//
//	             │ uncached tokens ≤ t                        ┌── the gateway's planner, as without offload
//	request ─────┤                                            ▲
//	             │ > t ─► POST /v1/completions, 1 token ─► remote storage ══ link ══► local storage
//	             │          remote engines prefill          (relay, within the budget)
//	             │
//	             └ abundant, and remote storage has more of the prefix: the prefix crosses the link
//
// The request then goes to the planner like every other request, and finds the prompt in local storage.
// If a remote step fails or takes too long, the local cluster prefills the rest. No request fails because
// of the remote datacenter.
//
// The package does not copy KV to the remote datacenter: the remote engines use the prefixes that their
// storage has. It does not choose engines.
//
// # Weights
//
// KV is copied under the epoch that local storage has for the request. Both storages must give the same
// epoch number to the same weights, so an operator bumps both. If remote storage does not have the epoch,
// nothing is copied.
//
// # Bounds
//
// At most Options.InFlight requests are prefilled remotely at a time, each for at most Options.Timeout. None
// begins while the link needs longer than Options.BacklogMax for the bytes that wait for it. After a
// remote request or a copy failed, no request is sent for Options.DownFor. The other requests are
// prefilled locally.
//
// There is one lock, which is not held across a call.
package offload
