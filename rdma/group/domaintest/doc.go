// Package domaintest is the conformance suite of group.Domain: a NIC of a
// provider is done when Run passes. Each promise of group/domain.go has a case
// here. It is not a benchmark, does not know any provider, and does not look at
// sessions: those are rdmatest's.
//
//	func TestDomain(t *testing.T) {
//		domaintest.Run(t, func(t testing.TB) domaintest.Pair { … })
//	}
//
//	   NIC A ── endpoints ── NIC B
//	     ▲                     ▲
//	   poller                poller         one goroutine each, as the engine has:
//	     └──► what was polled ◄┘            Poll until nothing is left, then Wait
//
// Lock order: nic.mu is the only lock, never held while a Domain is called.
package domaintest
