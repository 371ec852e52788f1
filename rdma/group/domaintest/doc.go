// Package domaintest is the conformance suite of group.Domain. An implementation of Domain
// conforms to the contract when Run passes. Each guarantee that group/domain.go documents has a
// case here. The package does not measure performance and contains no code for a particular
// provider. Sessions are tested by package rdmatest.
//
//	func TestDomain(t *testing.T) {
//		domaintest.Run(t, func(t testing.TB) domaintest.Pair { … })
//	}
//
//	   Domain A ── endpoints ── Domain B
//	     ▲                        ▲
//	   poller                   poller      one goroutine each, as in the engine:
//	     └──► completions ◄───────┘         Poll until no completion is left, then Wait
//
// Lock order: nic.mu is the only lock. No Domain is called while it is held.
package domaintest
