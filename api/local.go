package api

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// LocalID identifies one run of a node on its unix socket, or one session with the node: 128 random
// bits.
type LocalID [16]byte

// LocalStatus states whether a node lends its arena to the process that connected to its unix
// socket. Any value except LocalWelcome is the reason for a refusal.
type LocalStatus uint16

const (
	// LocalWelcome: the arena's descriptor comes with the hello.
	LocalWelcome LocalStatus = iota
	// LocalWrongUser: the caller's user differs from the node's.
	LocalWrongUser
	// LocalFull: the maximum number of sessions is open.
	LocalFull
)

// String returns the reason of a refusal, for errors.
func (s LocalStatus) String() string {
	switch s {
	case LocalWelcome:
		return "welcome"
	case LocalWrongUser:
		return "the node belongs to another user"
	case LocalFull:
		return "as many local sessions are open as the node allows"
	}
	return fmt.Sprintf("refused with status %d", uint16(s))
}

// LocalHello is the first message on a node's unix socket. The node sends it as soon as a process
// connects, with the arena's descriptor (SCM_RIGHTS) if the status is LocalWelcome. The session
// lasts as long as the connection.
//
//	0       8         10        12  16             24           40             56
//	│ magic │ version │ status  │ 0 │ arena bytes  │ node       │ session      │   little endian
type LocalHello struct {
	Status LocalStatus
	// ArenaBytes is the size of the arena.
	ArenaBytes int64
	// Node is DescribeResponse.local_id. It distinguishes two nodes on one host, and two runs of
	// one node.
	Node LocalID
	// Session is ReadRequest.local_session. Only the connected process receives it.
	Session LocalID
}

const (
	// LocalHelloBytes is the length of a hello of any version.
	LocalHelloBytes = 56
	localMagic      = "PNSTKLOC"
	localVersion    = 2
)

// ErrLocalHello is wrapped by every error about a hello.
var ErrLocalHello = errors.New("not the hello of a storage node's local socket")

// MarshalBinary implements encoding.BinaryMarshaler.
func (h LocalHello) MarshalBinary() ([]byte, error) {
	b := make([]byte, 0, LocalHelloBytes)
	b = append(b, localMagic...)
	b = binary.LittleEndian.AppendUint16(b, localVersion)
	b = binary.LittleEndian.AppendUint16(b, uint16(h.Status))
	b = binary.LittleEndian.AppendUint32(b, 0)
	b = binary.LittleEndian.AppendUint64(b, uint64(h.ArenaBytes))
	b = append(b, h.Node[:]...)
	return append(b, h.Session[:]...), nil
}

// UnmarshalBinary implements encoding.BinaryUnmarshaler.
func (h *LocalHello) UnmarshalBinary(b []byte) error {
	if len(b) != LocalHelloBytes || string(b[:8]) != localMagic {
		return fmt.Errorf("%d bytes without the magic %q: %w", len(b), localMagic, ErrLocalHello)
	}
	if v := binary.LittleEndian.Uint16(b[8:]); v != localVersion {
		return fmt.Errorf("version %d, this program has version %d: %w", v, localVersion, ErrLocalHello)
	}
	size := binary.LittleEndian.Uint64(b[16:])
	if size > 1<<62 || binary.LittleEndian.Uint32(b[12:]) != 0 {
		return fmt.Errorf("an arena of %d bytes, or reserved bytes that are not zero: %w", size, ErrLocalHello)
	}
	*h = LocalHello{
		Status:     LocalStatus(binary.LittleEndian.Uint16(b[10:])),
		ArenaBytes: int64(size),
		Node:       LocalID(b[24:40]),
		Session:    LocalID(b[40:56]),
	}
	return nil
}
