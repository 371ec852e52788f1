package shm

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"golang.org/x/sys/unix"
)

// The messages on the socket of an endpoint. First each endpoint sends a hello with two
// descriptors. Then each endpoint sends a message with a descriptor for each segment, until the
// socket is closed.
//
//	address  ─ magic 4 ─┬─ domain 16 ─┬─ endpoint 16 ─┐   Endpoint.Local
//	hello    ─ magic 4 ─┴─ kind 1 ─ to 16 ─ from 16 ─ probe 16 ─ where 8 ─   + ring, bell
//	segment  ─ magic 4 ─── kind 1 ─ id 8 ─                                   + arena
//
// domain names the abstract socket; to and from are the ids of endpoints. All are random numbers,
// which only the two engines that have proved the token to each other have. probe is a random
// number that is stored at the address where in the sender's memory.
const (
	magic = "psh1"

	addressBytes = 4 + 16 + 16
	helloBytes   = 4 + 1 + 16 + 16 + 16 + 8
	segmentBytes = 4 + 1 + 8

	kindHello   = 1
	kindSegment = 2
)

// id is a random number that names a domain or an endpoint.
type id [16]byte

func newID() id {
	var x id
	_, _ = rand.Read(x[:])
	return x
}

// address is the information that a peer needs to connect to an endpoint.
type address struct{ domain, endpoint id }

func (a address) encode() []byte {
	b := append(make([]byte, 0, addressBytes), magic...)
	b = append(b, a.domain[:]...)
	return append(b, a.endpoint[:]...)
}

func (a *address) decode(b []byte) error {
	if len(b) != addressBytes || string(b[:4]) != magic {
		return fmt.Errorf("shm: %d bytes are not an endpoint's address", len(b))
	}
	copy(a.domain[:], b[4:])
	copy(a.endpoint[:], b[20:])
	return nil
}

// socketName returns the name of a domain's abstract socket.
func socketName(domain id) *net.UnixAddr {
	return &net.UnixAddr{Net: "unixpacket", Name: fmt.Sprintf("@penstock-shm-%x", domain)}
}

// hello is the first message that each endpoint sends on the socket.
type hello struct {
	to, from, probe id
	where           uint64
}

func (h *hello) encode() []byte {
	b := append(make([]byte, 0, helloBytes), magic...)
	b = append(b, kindHello)
	b = append(b, h.to[:]...)
	b = append(b, h.from[:]...)
	b = append(b, h.probe[:]...)
	return binary.LittleEndian.AppendUint64(b, h.where)
}

func (h *hello) decode(b []byte) error {
	if len(b) != helloBytes || string(b[:4]) != magic || b[4] != kindHello {
		return fmt.Errorf("shm: %d bytes are not a hello", len(b))
	}
	copy(h.to[:], b[5:])
	copy(h.from[:], b[21:])
	copy(h.probe[:], b[37:])
	h.where = binary.LittleEndian.Uint64(b[53:])
	return nil
}

// segmentMessage carries the descriptor of an arena that the peer may map.
type segmentMessage struct{ id uint64 }

func (m *segmentMessage) encode() []byte {
	b := append(make([]byte, 0, segmentBytes), magic...)
	return binary.LittleEndian.AppendUint64(append(b, kindSegment), m.id)
}

func (m *segmentMessage) decode(b []byte) error {
	if len(b) != segmentBytes || string(b[:4]) != magic || b[4] != kindSegment {
		return fmt.Errorf("shm: %d bytes are not a segment's message", len(b))
	}
	m.id = binary.LittleEndian.Uint64(b[5:])
	return nil
}

// sendFiles sends one message with descriptors. The caller keeps ownership of the descriptors.
func sendFiles(conn *net.UnixConn, msg []byte, fds ...int) error {
	n, _, err := conn.WriteMsgUnix(msg, unix.UnixRights(fds...), nil)
	if err == nil && n != len(msg) {
		err = io.ErrShortWrite
	}
	return err
}

// receive reads one message into b. The message must have exactly want descriptors, which then
// belong to the caller of receive.
func receive(conn *net.UnixConn, b []byte, want int) (n int, fds []int, err error) {
	oob := make([]byte, unix.CmsgSpace(4*4))
	n, oobn, flags, _, err := conn.ReadMsgUnix(b, oob)
	if err == nil && n == 0 {
		err = io.EOF
	}
	if err != nil {
		return 0, nil, err
	}
	fds, err = descriptors(oob[:oobn])
	if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = errors.New("the message has more bytes or descriptors than any valid message")
	}
	if err == nil && len(fds) != want {
		err = fmt.Errorf("a message with %d descriptors, want %d", len(fds), want)
	}
	if err != nil {
		closeFDs(fds)
		return 0, nil, fmt.Errorf("shm: %w", err)
	}
	return n, fds, nil
}

// descriptors returns the descriptors that came with a message.
func descriptors(oob []byte) (fds []int, err error) {
	if len(oob) == 0 {
		return nil, nil
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for i := range messages {
		more, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return fds, err
		}
		fds = append(fds, more...)
	}
	return fds, nil
}

func closeFDs(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}
