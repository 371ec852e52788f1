// Package rdmatest is the conformance suite of rdma.Engine: a provider is done
// when Run passes. Each promise of package rdma has a case here; a bug found in
// one provider becomes a case for all of them. It is not a benchmark and does
// not know any provider.
//
//	func TestConformance(t *testing.T) {
//		rdmatest.Run(t, func(t testing.TB, c rdmatest.Config) rdma.Engine { … })
//	}
//
//	   client (does not listen) ── Connect ──► server (listens)
//	      └────────────── writes, both ways ──────────┘
//
// Lock order: none.
package rdmatest
