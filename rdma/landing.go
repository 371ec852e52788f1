package rdma

// LandingRegion is a Region whose provider places payload with the CPU, and says
// so while the bytes are in the cache of the core that placed them: whoever sums
// them then does not fetch them from memory once more. A provider whose NIC writes
// past the CPU does not offer it.
type LandingRegion interface {
	Region
	// WindowLanding is Window, for the same peers. landed is called with every run of n bytes, from off
	// in the window, that a peer's write has put there: once for each time that they
	// were written, also by a write that then fails; after they are in place, before
	// the immediate of their write is counted, and not after Revoke has returned nil.
	// So whoever was told of exactly n bytes of a range of n, and of none since, has
	// seen the range as it is.
	//
	// It is called on the engine's own goroutines, several at once and in any order,
	// and holds up what the peer sends: it may read the bytes, and must not wait.
	WindowLanding(off, n uint64, landed func(off, n uint64), peers ...EngineID) (Window, error)
}
