package verbs

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// endpointAddr is the description of an endpoint that its peer needs to connect to it.
type endpointAddr struct {
	// writeQPN and messageQPN are the numbers of the endpoint's two queue pairs. writePSN and
	// messagePSN are the packet sequence numbers with which the queue pairs start to send. All
	// have 24 bits.
	writeQPN, messageQPN uint32
	writePSN, messagePSN uint32
	gid                  gid
	// lid is the port's local identifier on an InfiniBand subnet, 0 on Ethernet.
	lid uint16
	// mtu is the port's active MTU as an ibv_mtu code: 256 bytes << (mtu-1).
	mtu   uint8
	layer linkLayer
}

// gid is a global identifier, in the form of an IPv6 address.
type gid [16]byte

// linkLayer is the link layer of a port, with the values of ibv_port_attr.
type linkLayer uint8

// The link layers of a port.
const (
	layerInfiniBand linkLayer = 1
	layerEthernet   linkLayer = 2
)

// String returns "InfiniBand" or "Ethernet".
func (l linkLayer) String() string {
	switch l {
	case layerInfiniBand:
		return "InfiniBand"
	case layerEthernet:
		return "Ethernet"
	}
	return fmt.Sprintf("link layer %d", uint8(l))
}

const (
	addrVersion = 1
	addrLen     = 1 + 4*4 + 16 + 2 + 1 + 1
	max24       = 1<<24 - 1
)

// append appends the encoding, little-endian:
//
//	version 1 = 1 | write QPN 4 | message QPN 4 | write PSN 4 | message PSN 4 | GID 16 | LID 2 | MTU 1 | link layer 1
func (a endpointAddr) append(b []byte) []byte {
	b = append(b, addrVersion)
	for _, v := range [...]uint32{a.writeQPN, a.messageQPN, a.writePSN, a.messagePSN} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	b = append(b, a.gid[:]...)
	b = binary.LittleEndian.AppendUint16(b, a.lid)
	return append(b, a.mtu, byte(a.layer))
}

// errAddr: the bytes are not an encoded endpointAddr.
var errAddr = errors.New("not an endpoint's address")

// parseAddr decodes an encoding made by append. It rejects values that no queue pair can have.
func parseAddr(b []byte) (endpointAddr, error) {
	var a endpointAddr
	if len(b) != addrLen {
		return a, fmt.Errorf("%w: %d bytes, want %d", errAddr, len(b), addrLen)
	}
	if b[0] != addrVersion {
		return a, fmt.Errorf("%w: version %d, want %d", errAddr, b[0], addrVersion)
	}
	b = b[1:]
	for _, v := range [...]*uint32{&a.writeQPN, &a.messageQPN, &a.writePSN, &a.messagePSN} {
		*v, b = binary.LittleEndian.Uint32(b), b[4:]
		if *v > max24 {
			return a, fmt.Errorf("%w: %#x has more than 24 bits", errAddr, *v)
		}
	}
	b = b[copy(a.gid[:], b):]
	a.lid, a.mtu, a.layer = binary.LittleEndian.Uint16(b), b[2], linkLayer(b[3])
	if a.mtu < 1 || a.mtu > 5 {
		return a, fmt.Errorf("%w: MTU code %d, want 1 to 5", errAddr, a.mtu)
	}
	if a.layer != layerInfiniBand && a.layer != layerEthernet {
		return a, fmt.Errorf("%w: %v", errAddr, a.layer)
	}
	return a, nil
}
