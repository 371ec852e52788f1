// Package rdmatest is the conformance suite of rdma.Engine: a provider is done
// when Run passes. Each promise of package rdma has a case here; a bug found in
// one provider becomes a case for all of them. It is not a benchmark and does
// not know any provider.
//
//	func TestConformance(t *testing.T) {
//		rdmatest.Provider{Open: func(t testing.TB, c rdmatest.Config) rdma.Engine { … }, NICs: 2}.Run(t)
//	}
//
//	   client (does not listen) ── Connect ──► server (listens)
//	      └────────────── writes, both ways ──────────┘
//
// What a provider does not claim in Provider is skipped, with what is missing.
// Cases returns the cases one by one, for those who run them in a way of their
// own: simrdma does, in virtual time, on thousands of networks.
//
// Lock order: none.
package rdmatest
