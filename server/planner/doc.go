// Package planner is the planner node: it serves the planner of package dualpath, which does no
// I/O, over gRPC. It has the parts that dualpath does not have: a clock, a lock, names, sessions
// and queues.
//
// It makes no decisions itself, keeps nothing on disk, and moves no KV. After a restart it gets its
// state from the leaders of the groups when they reconnect. If no gateway submits a restored
// request again within Options.GatewayWait, the request is cancelled. With Options.Record it writes
// its events to a file for replay. A line is encoded under the lock and written after the lock is
// released.
//
//	gateway ── Submit ─► job ──────────┐  mu   ┌─────────────────┐
//	           ◄── updates ◄─ channel ─┤ ┌───► │ dualpath.Planner│
//	leader  ── Lead ─► messages ───────┼─┤Step └───────┬─────────┘
//	           ◄── actions ◄─ channel ─┘ └─── actions ─┘
//	ticker  ── Tick ───────────────────┤
//	admin   ── BumpWeights, SwitchRole ┘
//
// An event is one Step under one lock. The service puts the event's actions into the channels of
// their receivers before it releases the lock, so each leader gets its actions in the order of
// their numbers. No send on a channel blocks. If a gateway or a leader reads too slowly, its stream
// ends (RESOURCE_EXHAUSTED), and it reconnects. In the next session the planner sends the missed
// actions again, and the leader repeats the lost reports (package dualpath, "Broken sessions"). The
// action REGISTERED has a number that identifies this planner process. If a leader registers again
// with this number, the planner has every request that the leader lists, unless the request has
// ended.
//
// BumpWeights and SwitchRole do not wait for their effect. An operator observes it with repeated
// calls (dry_run) and with Roles, which also returns why a group kept its role at the last switch. The
// epochs of BumpWeights outlive an elected planner in its lease. A switch of a role outlives every
// planner, because the group's leader holds its state (package client/leader, "Roles"): SwitchRole
// returns when the leader has confirmed that it has the order, or an error after keepWithin.
//
// # Elected planners
//
// An Elected campaigns for the right to plan (Election, of which package membership has one by etcd).
// Each of its terms has a new Service, which gets its state as after a restart. A service plans and
// sends only while it holds its lease, so two planners never plan at the same time. The numbers of
// its actions begin with the term (firstSeq). A standby refuses all calls except Election.
//
//	standby ─ elected ─► New(Lease) ─► Service ─ lease lost, or not held ─► Close ─► Resign ─► standby
//
// # Bounds
//
// The following are bounded: requests (dualpath.Options.MaxQueue; further requests are rejected);
// the tenants in the response of Top; the names of engines, nodes, groups and namespaces (maxNames
// each); the engines of a group; the bytes of a tenant's name, of a payload, of all payloads, of an
// address and of a leader's refusal; the unsent actions of a leader and updates of a gateway; the
// lines and bytes of a record (which ends at the bound). The requests that a group lists when it
// registers count towards the bounds but are not refused, because the planner accepted them
// earlier.
//
// Also bounded is the number of namespaces whose epochs outlive a term (maxBumps).
//
// Lock order: Elected.mu, then Service.keeping, then Service.mu. Service.keeping is held during a call of the
// lease. No other lock is held across one, and none is held across a send on a stream.
package planner
