package rdma

// LandingRegion is a Region whose provider places payload with the CPU. It reports each placed
// range while the bytes are in the cache of the core that placed them. So the owner can compute a
// checksum at that moment without reading the bytes from memory again. A provider whose NIC writes
// without the CPU does not implement LandingRegion.
type LandingRegion interface {
	Region
	// WindowLanding makes a window as Window does. Whenever a peer's write has placed n bytes at
	// offset off in the window, the engine calls landed(off, n). Bytes that are written twice are
	// reported twice, and bytes of a write that fails later are reported too. The call comes after
	// the bytes are in place, before the write's immediate is counted, and not after Revoke has
	// returned nil. So a caller can compute a checksum of a range from the reports: if the reports
	// cover each byte of the range exactly once, the reported bytes are the current bytes.
	//
	// landed is called on the engine's own goroutines, concurrently and in any order. While landed
	// runs, the peer's following data waits. landed may read the bytes and must not block.
	WindowLanding(off, n uint64, landed func(off, n uint64), peers ...EngineID) (Window, error)
}
