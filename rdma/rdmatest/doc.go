// Package rdmatest is the conformance suite of rdma.Engine: a provider is complete when Run passes.
// The suite has a case for each promise of package rdma. A bug found in one provider becomes a case
// for all of them. It is not a benchmark, and it depends on no provider.
//
//	func TestConformance(t *testing.T) {
//		rdmatest.Provider{Open: func(t testing.TB, c rdmatest.Config) rdma.Engine { … }, NICs: 2}.Run(t)
//	}
//
//	   client (does not listen) ── Connect ──► server (listens)
//	      └────────────── writes, both ways ──────────┘
//
// The suite skips cases for features that Provider does not declare, and reports the missing
// feature. Cases returns the cases for callers that run them in another way: simrdma runs them in
// virtual time, on thousands of networks.
//
// Lock order: there is no lock.
package rdmatest
