//go:build fabric && cgo && linux

package fabric

// quirks are properties of a provider that fi_getinfo does not report. They come from experiments
// or from the provider's documentation.
type quirks struct {
	// noSourceAddress: completions have no source address, or a wrong one.
	noSourceAddress bool
	// costlyWindows: registering a part of a region pins its pages again.
	costlyWindows bool
	// connects: the first work of an endpoint makes a connection between the endpoints. If an
	// endpoint is closed while such a connection is half open, the library uses freed memory
	// (handshake.go).
	connects bool
	// unmarked: the provider accepts a traffic class but does not mark packets.
	unmarked bool
}

// quirksOf returns the quirks of a provider, by its name in fi_getinfo.
func quirksOf(provider string) quirks {
	switch provider {
	case "net":
		return quirks{connects: true, unmarked: true}
	case "tcp": // net's successor, untested
		return quirks{connects: true}
	}
	// efa and other hardware
	return quirks{costlyWindows: true}
}

// candidates returns the library's names of a provider, best first. TCP with its own reliable
// datagrams is "tcp" from libfabric 1.18 on, and "net" before. The older "tcp;ofi_rxm" has to be
// named explicitly, because it takes 69 MiB for each endpoint.
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

// traits are the properties that a provider reports for an open domain.
type traits struct {
	provider, domain                                        string
	maxWrite, maxOrder                                      uint64
	ordersWrites, virtAddr, providerKeys, localKeys, source bool
	keyBytes, dataBytes, depth, recvDepth, fd               int
	format                                                  uint32
	// api is the version of libfabric whose behaviour the provider has, in the format of
	// FI_VERSION.
	api uint32
}
