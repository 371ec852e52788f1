// Package qos defines how packets of the traffic classes of package rdma are marked. It also
// checks whether a fabric's configuration gives each class the right priority: high for model
// execution, low for cache traffic, as in the DualPath paper (section 5.1 and appendix A.1).
//
// It does not configure the fabric; an administrator does that with the files in deploy/qos. It
// does not measure traffic: it computes the shares of the bandwidth that the configured arbiters
// guarantee.
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
// An engine only marks packets. On a fabric that is not configured, the marks have no effect.
package qos
