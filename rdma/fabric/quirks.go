//go:build fabric && cgo && linux

package fabric

// quirks are what fi_getinfo does not tell of a provider, found by trying it or
// in its documentation.
type quirks struct {
	// sourceLies: there is no source address beside a completion, or none to be
	// trusted.
	sourceLies bool
	// dearWindows: registering a part pins its pages again.
	dearWindows bool
	// connects: there is a connection under the endpoint, made by the first work.
	// Closing an endpoint while one to it is half made makes the library touch
	// memory that it has freed (meet.go).
	connects bool
	// unmarked: a traffic class is taken and changes nothing of the packets.
	unmarked bool
}

// quirksOf returns what is known of a provider, by the name that fi_getinfo
// gives it.
func quirksOf(provider string) quirks {
	switch provider {
	case "net":
		return quirks{connects: true, unmarked: true}
	case "tcp": // net's successor: not tried
		return quirks{connects: true}
	}
	// efa, and whatever else has hardware behind it.
	return quirks{dearWindows: true}
}

// candidates are the names under which the library may know a provider, best
// first. TCP with reliable datagrams of its own is "tcp" from libfabric 1.18 on
// and "net" before that; the older "tcp;ofi_rxm" is not tried by itself: it
// takes 69 MiB an endpoint.
func candidates(provider string, major, minor int) []string {
	if provider != "tcp" {
		return []string{provider}
	}
	if major > 1 || minor >= 18 {
		return []string{"tcp"}
	}
	return []string{"net"}
}

// found is a domain that the library lists.
type found struct{ provider, domain, addr string }

// traits are what a provider says of an open domain.
type traits struct {
	provider, domain                                        string
	maxWrite, maxOrder                                      uint64
	ordersWrites, virtAddr, providerKeys, localKeys, source bool
	keyBytes, dataBytes, depth, recvDepth, fd               int
	format                                                  uint32
}
