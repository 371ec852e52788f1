// Package group is the engine core of every provider that drives NICs with
// queue pairs: fabric-lib's DomainGroup (section 3.2 and 3.4 of the paper).
// A provider implements Domain, one NIC; this package makes an rdma.Engine of
// one or several of them.
//
// It knows no hardware, and no provider knows sessions: which NIC carries what,
// what happens when one dies, how often an immediate is counted and who may
// still write to a revoked window is decided here, once for all.
//
// domaintest.Run is the conformance suite of Domain; rdmatest.Run that of the
// engine over it.
package group
