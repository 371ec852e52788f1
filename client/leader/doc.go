// Package leader is the session of a group of engines with the planner: one leader registers the
// engines of a machine, reports their state, and passes the requests to them that the planner
// assigns. An engine implements the interface Engine, so the package works with engines of any
// kind.
//
//	planner                       Leader                                Engine (one GPU)
//	   ◄── RegisterGroup ───────────┤  engines, and the requests held       │
//	   ◄── FetchWork ───────────────┤  each FetchEvery: load, device        │
//	   │                            │  memory and buffer of each engine,    │
//	   │                            │  reading queue of the machine         │
//	   ├── ASSIGN ──────────────────►  kept until START                     │
//	   ├── START ───────────────────►── Start(ctx, *Request) ───────────────► traffic.Prefill | traffic.Decode
//	   ├── READ, CUT, RECOMPUTE ────►── Read, Cut, Recompute ───────────────►
//	   ◄── ReadProgress ────────────┤◄─ Request.Progress, one a fetch ──────┤
//	   ◄── ReadStopped ─────────────┤◄─ Request.Stopped ────────────────────┤
//	   ├── DROP ────────────────────►── Cut ────────────────────────────────►
//	   ├── ABORT ───────────────────►── the end of ctx ─────────────────────►
//	   ◄── Finished | Failed ───────┤◄─ Request.Done(err) ──────────────────┤
//	   ├── CONFIRMED ───────────────►  the end of the attempt is forgotten   │
//	   ├── ANNOUNCE ────────────────►  kept for the next RegisterGroup
//	   ├── SWITCH ──────────────────►  Options.SwitchRole, then RegisterGroup or RoleRefused
//
// An engine moves KV with a traffic.Manager. Fields and methods of a Request can be used in its
// jobs without conversion:
//
//	func (e *engine) Start(ctx context.Context, r *leader.Request) {
//		go func() { r.Done(e.prefill(ctx, r)) }()
//	}
//
//	job := traffic.PrefillJob{Request: r.Name, Hit: r.Hit, Parts: r.Parts, Progress: r.Progress, Stopped: r.Stopped, …}
//
// An engine whose part needs more than Start, such as a request over HTTP with the prompt, must bound the
// wait for it and call Done with an error after that. Otherwise the other engine of the attempt waits
// until its own time limit.
//
// A request's payload comes from the gateway (package client/gateway defines it), and this package
// does not read it. The planner passes the address of an engine to the request's other engine. An
// address is JSON, with both fields in base64:
//
//	{"addr": rdma.Addr's encoding, "token": the compute NIC's token}
//
// # Sessions
//
// Run keeps a session until its context ends. When a session is lost, Run begins a new session. Its
// registration lists the requests that the engines hold, so that even a restarted planner, which
// has no state, lets these requests continue. A request that the planner had aborted is not listed.
//
// Messages in transit are lost when a session breaks. The next session replaces them:
//
//   - For each attempt, the registration has the number of the last action that has arrived. The
//     planner sends later actions again. The registration also has the parts of the cached prefix
//     that the engine has read, is reading or computes. A restarted planner compares these parts:
//     if the two engines of a request together do not have all of the prefix, it plans the request
//     again. Otherwise it takes over the reads in progress.
//   - The registration has the other engine of each attempt, and the highest number of all actions
//     that the leader has received. If only one of the two engines lists an attempt, a restarted
//     planner plans the request again.
//   - If the leader reconnects to the same planner process, it sends the last report about the
//     reads of each attempt again. A report has the number of the action that ordered the read, so
//     the planner counts each report once.
//   - The leader keeps the end of each attempt (Finished or Failed) until the planner has
//     confirmed it. The registration lists the request as ended, and the report is sent again.
//
// A planner of an earlier version sends no confirmations. With such a planner, the leader drops the
// report of an attempt's end as soon as the report is sent. If no group then lists the request in
// its registration, the planner plans the request again.
//
// When the context of Run ends, the leader closes the stream, and the planner plans the group's
// requests again at once. Then the contexts of all requests end.
//
// Add and Remove change the members of the group. The requests of a removed member end,
// and the planner plans them again; the requests of the other members continue.
//
// # Roles
//
// When an operator requests it, the planner orders a group to change its role. The planner gives
// the order when it has no request left on the group. The leader waits until its engines have also
// ended aborted requests, and then calls Options.SwitchRole. After this call, the leader registers
// the group in its new role, or reports why the engines keep the old role. A group without
// Options.SwitchRole has a fixed role, and the planner refuses to switch it.
//
// The state of a switch outlives the planner because the leader holds it:
//
//	state of the switch        what a registration has        a restarted planner
//	the group is drained       announced: the other role      drains the group, and orders the switch
//	the leader has the order   switching: the other role      assigns no request to the group
//	the engines have changed   role: the new role             uses the group in this role
//
// The planner announces a switch before it drains the group. The operator's call returns when the
// leader has the announcement or the order, so a switch whose call has succeeded is not lost with the
// planner. The leader holds the switch, and not a store such as etcd, for three reasons: the registration is
// the only source of the role already; a planner without etcd is restarted, too; and no record of a group
// remains when its leader has ended. A new leader of the group registers with Options.Role.
//
// # Bounds
//
// At most one progress report of each request waits; a newer one replaces it. Other reports wait in
// a queue until they can be sent. While maxReports reports wait, the leader handles no further
// action of the planner. So maxReports and the number of requests that the engines hold bound the
// queue. The leader keeps the end of each attempt until the planner has confirmed it; the planner
// does so before it assigns the request's memory to another request.
//
// The package does not choose engines or who reads a prefix (the planner does), and it moves no KV
// (package client/traffic does).
//
// Lock order: Leader.mu is the only lock. It is not held across a call of an engine or of the
// planner.
package leader
