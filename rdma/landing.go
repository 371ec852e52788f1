package rdma

// LandingRegion is a Region whose provider places payload with the CPU. It reports each placed
// range while the bytes are in the cache of the core that placed them. So a checksum computed
// then need not read the bytes from memory again. A provider whose NIC writes without the CPU
// does not implement it.
type LandingRegion interface {
	Region
	// WindowLanding is Window, for the same peers. landed is called for every run of n bytes, from
	// offset off in the window, that a peer's write has placed. It is called once for each time
	// the bytes are written, even if the write fails later. The call comes after the bytes are in
	// place, before the write's immediate is counted, and not after Revoke has returned nil. So
	// if exactly n bytes of a range of n bytes have been reported, and none since, the bytes that
	// the reports covered are the current bytes of the range.
	//
	// landed is called on the engine's own goroutines, concurrently and in any order, and delays
	// the peer's following data. It may read the bytes and must not block.
	WindowLanding(off, n uint64, landed func(off, n uint64), peers ...EngineID) (Window, error)
}
