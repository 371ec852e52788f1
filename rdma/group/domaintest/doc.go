// Package domaintest is the conformance suite of group.Domain: a provider's NIC is complete
// when Run passes. Each promise of group/domain.go has a case here. The package measures
// nothing, contains no code for a particular provider, and does not test sessions; rdmatest
// does.
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
