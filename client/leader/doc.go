// Package leader is the session of a group of engines with the planner: one leader
// registers the engines of a machine, reports their state, and gives them the requests
// that the planner assigns. An engine implements Engine. The package works with
// engines of any kind.
//
//	planner                       Leader                                Engine (one GPU)
//	   ◄── RegisterGroup ───────────┤  engines, and the requests held       │
//	   ◄── FetchWork ───────────────┤  each FetchEvery: load, device        │
//	   │                            │  memory and buffer of each engine,    │
//	   │                            │  reading queue of the machine         │
//	   ├── ASSIGN ──────────────────►  remembered                           │
//	   ├── START ───────────────────►── Start(ctx, *Request) ───────────────► traffic.Prefill | traffic.Decode
//	   ├── READ, CUT, RECOMPUTE ────►── Read, Cut, Recompute ───────────────►
//	   ◄── ReadProgress ────────────┤◄─ Request.Progress, one a fetch ──────┤
//	   ◄── ReadStopped ─────────────┤◄─ Request.Stopped ────────────────────┤
//	   ├── DROP ────────────────────►── Cut ────────────────────────────────►
//	   ├── ABORT ───────────────────►── the end of ctx ─────────────────────►
//	   ◄── Finished | Failed ───────┤◄─ Request.Done(err) ──────────────────┤
//	   ├── CONFIRMED ───────────────►  the end of the attempt is forgotten   │
//	   ├── SWITCH ──────────────────►  Options.SwitchRole, then RegisterGroup or RoleRefused
//
// An engine moves KV with a traffic.Manager, whose jobs take the fields and the methods
// of a Request as they are:
//
//	func (e *engine) Start(ctx context.Context, r *leader.Request) {
//		go func() { r.Done(e.prefill(ctx, r)) }()
//	}
//
//	job := traffic.PrefillJob{Request: r.Name, Hit: r.Hit, Parts: r.Parts, Progress: r.Progress, Stopped: r.Stopped, …}
//
// A request's payload comes from the gateway and is opaque here; client/gateway
// defines it. The address of an engine, which the planner passes to the engine on the
// other side, is JSON, with both fields in base64:
//
//	{"addr": rdma.Addr's encoding, "token": the compute NIC's token}
//
// # Sessions
//
// Run keeps a session until its context ends. When a session is lost, Run begins another
// one, and its registration lists the requests that the engines hold, so that a planner
// without state (it was restarted) lets them go on. A request that the planner had
// aborted is not listed.
//
// Messages that were under way when a session broke are lost. The next session makes up for
// them:
//
//   - The registration has the number of the last action about each attempt. The planner
//     sends the actions after it again. It also has the parts of the cached prefix that the
//     engine has read, is reading or computes: a planner that was restarted plans a request
//     again if its engines do not bring all of the prefix. It takes over the reads under way.
//   - The registration has the engine on the other side of each attempt, and the highest
//     number among all actions that the leader has taken. A planner that was restarted finds
//     an attempt that one of its engines does not have, and plans the request again.
//   - The leader sends the last report about each attempt's reads again, if it meets the
//     planner that it sent the report to. Reports have the number of the action that ordered
//     the read, so the planner takes each one once.
//   - The leader keeps the end of each attempt (Finished or Failed) until the planner has
//     confirmed it. The registration lists the request as ended, and the report is sent again.
//
// A planner of an earlier version confirms nothing. Then a report counts as taken when it was
// sent, and the planner is planning a request again if no group holds it.
//
// When the context of Run ends, the leader closes the stream in order, and the planner
// plans the group's requests again at once. Then the contexts of all requests end.
//
// Add and Remove change the members of the group. The requests of a removed member end,
// and the planner plans them again; the requests of the other members continue.
//
// # Roles
//
// The planner has a group change its role when an operator asks for it, and the group has no
// request then. The leader waits until its engines have ended aborted requests too, and calls
// Options.SwitchRole. After it the leader registers the group in its new role, or reports why the
// engines keep the old one. If the session breaks meanwhile, the next registration names the role
// that the engines change to, so a planner that was restarted gives them no request. A group
// without Options.SwitchRole has a fixed role, and the planner refuses to switch it.
//
// # Bounds
//
// Reports of progress are merged: a request has one at a time. Other reports wait in a
// queue while the planner does not take them. While maxReports wait, the leader takes no
// further action of the planner, so the queue is bounded by that and by the requests
// that the engines hold. An end waits for its confirmation, which the planner sends before
// it gives the memory of the request to another one.
//
// The package chooses no engine and no reader (the planner does), moves no KV
// (client/traffic does) and computes nothing.
//
// Lock order: Leader.mu alone, which is not held across a call of an engine or of the
// planner.
package leader
