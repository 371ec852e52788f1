// Package rdmatest is the conformance suite of rdma.Engine: a provider conforms to the contract
// when Run passes. The suite has a case for each promise of package rdma. When a defect is found
// in one provider, a case is added for all providers. It is not a benchmark, and it depends on no
// provider.
//
//	func TestConformance(t *testing.T) {
//		rdmatest.Provider{Open: func(t testing.TB, c rdmatest.Config) rdma.Engine { … }, NICs: 2}.Run(t)
//	}
//
//	   client (does not listen) ── Connect ──► server (listens)
//	      └────────────── writes, both ways ──────────┘
//
// The suite skips cases for features that Provider does not declare, and reports the missing
// feature. Cases returns the cases for other callers: the tests of simrdma run them in virtual
// time, on thousands of networks.
//
// Lock order: there is no lock.
package rdmatest
