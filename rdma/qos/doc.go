// Package qos says how the traffic classes of package rdma are marked on the
// wire, and judges whether a fabric's configuration gives each class the lane
// that it should have: model execution high, cache traffic low, as DualPath,
// section 5.1 and appendix A.1, has it.
//
// It configures nothing: the files in deploy/qos do, run by an administrator.
// It measures nothing either: what it computes is what the arbiters promise.
//
//	rdma.Class ──► Map ──► Lane{SL, DSCP, Priority}
//	                         │     │       └─ SO_PRIORITY, and a VLAN's priority
//	                         │     └───────── RoCE's traffic class, TCP's TOS
//	                         └─────────────── InfiniBand
//
//	              collective         kv               everything unmarked
//	InfiniBand    SL 0 ─► VL 0       SL 2 ─► VL 2     SL 0 ─► VL 0
//	RoCE, TCP     DSCP 26 ─► 3       DSCP 8 ─► 1      DSCP 0 ─► 0     (─► priority, TC)
//
//	port ◄── high arbiter: VL 0, 1, 3 ── until high_limit x 4096 B are spent, then one turn of
//	     ◄── low arbiter:  VL 2 (and the others)
//
// An engine marks, the fabric obeys or not: on a fabric that was not configured
// the marks do no harm and bring nothing.
package qos
