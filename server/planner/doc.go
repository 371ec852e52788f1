// Package planner is the planner node: the pure planner of package dualpath
// behind gRPC. It owns what dualpath must not have: a clock, a lock, names,
// sessions and queues.
//
// It decides nothing itself, keeps nothing on disk, and moves no KV. After a
// restart it knows what the leaders of the groups tell it when they come back.
// Options.Record has its events written down, for replaying them elsewhere: a line
// is made under the lock and written outside of it.
//
//	gateway ── Submit ─► job ──────────┐  mu   ┌─────────────────┐
//	           ◄── updates ◄─ channel ─┤ ┌───► │ dualpath.Planner│
//	leader  ── Lead ─► messages ───────┼─┤Step └───────┬─────────┘
//	           ◄── actions ◄─ channel ─┘ └─── actions ─┘
//	ticker  ── Tick ───────────────────┤
//	admin   ── BumpWeights, SwitchRole ┘
//
// An event is one Step under one lock; its actions are put into the channels of
// those concerned before the lock is released, so each leader has them in the
// order of their numbers. No channel is waited for: a gateway or a leader that
// does not take what it is sent loses its stream (RESOURCE_EXHAUSTED) and comes
// back. What a leader missed is sent again in its next session, and its reports that were
// lost are repeated (package dualpath, "Broken sessions"). REGISTERED has the number of this
// run of the planner. A leader that returns with the number holds no request that this
// planner does not have, unless the request has ended.
//
// BumpWeights and SwitchRole answer at once. An operator follows what they began by asking again
// (dry_run) and by Roles, which has the reason why a group kept its role until the next switch.
//
// # Bounds
//
// Requests (dualpath.Options.MaxQueue, then rejected: the queue is full), bytes of a tenant's
// name, tenants in the answer of Top, names
// of engines, nodes, groups and namespaces (maxNames each), engines of a group,
// bytes of a payload, of all payloads, of an address and of a leader's refusal, unsent actions of a leader, unsent
// updates of a gateway, lines and bytes of a record (it ends). What a group holds when
// it registers counts, and is not refused for it: it was accepted once.
//
// Lock order: Service.mu alone. It is never held across a send on a stream.
package planner
