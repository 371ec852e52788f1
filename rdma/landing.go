package rdma

// LandingRegion is a Region whose provider places payload with the CPU. It reports each placed
// range while the bytes are in the cache of the core that placed them. So the owner can compute a
// checksum at that moment without reading the bytes from memory again. A provider whose NIC writes
// without the CPU does not implement LandingRegion.
type LandingRegion interface {
	Region
	// WindowLanding makes a window as Window does, for the same peers. landed is called for every
	// run of n bytes, from offset off in the window, that a peer's write has placed. It is called
	// once for each time the bytes are written, even if the write fails later. The call comes
	// after the bytes are in place, before the write's immediate is counted, and not after Revoke
	// has returned nil. So a caller can compute a checksum of a range from the reports: if the
	// reports cover each byte of the range exactly once, the reported bytes are the current bytes.
	//
	// landed is called on the engine's own goroutines, concurrently and in any order. While it
	// runs, the peer's following data waits. It may read the bytes and must not block.
	WindowLanding(off, n uint64, landed func(off, n uint64), peers ...EngineID) (Window, error)
}
