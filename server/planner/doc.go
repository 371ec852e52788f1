// Package planner is the planner node: the pure planner of package dualpath
// behind gRPC. It has the parts that dualpath must not have: a clock, a lock, names,
// sessions and queues.
//
// It makes no decisions itself, keeps nothing on disk, and moves no KV. After a
// restart it gets its state from the leaders of the groups when they reconnect. A
// request that no gateway takes over within Options.GatewayWait is cancelled.
// With Options.Record it writes its events to a file for replay: a line is made
// under the lock and written outside it.
//
//	gateway ── Submit ─► job ──────────┐  mu   ┌─────────────────┐
//	           ◄── updates ◄─ channel ─┤ ┌───► │ dualpath.Planner│
//	leader  ── Lead ─► messages ───────┼─┤Step └───────┬─────────┘
//	           ◄── actions ◄─ channel ─┘ └─── actions ─┘
//	ticker  ── Tick ───────────────────┤
//	admin   ── BumpWeights, SwitchRole ┘
//
// An event is one Step under one lock. The service puts the event's actions into the
// channels of their receivers before it releases the lock, so each leader gets its
// actions in the order of their numbers. No send on a channel blocks: a gateway or a
// leader that reads too slowly loses its stream (RESOURCE_EXHAUSTED) and reconnects.
// In the next session the planner sends the missed actions again, and the leader
// repeats the lost reports (package dualpath, "Broken sessions"). REGISTERED has the
// number of this run of the planner. A leader that returns with the number holds no
// request that this planner lacks, unless the request has ended.
//
// BumpWeights and SwitchRole return at once. An operator follows their effect with
// repeated calls (dry_run) and with Roles, which has the reason why a group kept its
// role at the last switch.
//
// # Bounds
//
// Requests (dualpath.Options.MaxQueue; when the queue is full they are rejected), bytes
// of a tenant's name, tenants in the response of Top, names of engines, nodes, groups
// and namespaces (maxNames each), engines of a group, bytes of a payload, of all
// payloads, of an address and of a leader's refusal, unsent actions of a leader, unsent
// updates of a gateway, lines and bytes of a record (which then ends). The requests that
// a group holds when it registers count towards the bounds but are not refused, because
// they were accepted before.
//
// Lock order: Service.mu alone. It is never held across a send on a stream.
package planner
