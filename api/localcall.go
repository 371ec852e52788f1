package api

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
)

// After the hello an engine may send its Read calls over the unix socket, which
// costs a fraction of a gRPC call, and give loans back there. Each frame is
//
//	0        4      5
//	│ length │ kind │ payload      length counts kind and payload; little endian
//
// Reads are answered in order, one LocalReply each; returns have no answer.
const (
	// LocalRead carries a ReadRequest (protobuf).
	LocalRead = 1
	// LocalReturn carries the numbers of loans, 8 bytes each.
	LocalReturn = 2
	// LocalReply carries, 4 bytes, a gRPC code, and then a ReadResponse
	// (protobuf) if that is 0, else what is wrong, as text.
	LocalReply = 3
)

// LocalFrameMax bounds a frame, in bytes: as much as a gRPC message.
const LocalFrameMax = 16 << 20

// localFrameHeader is the length of length and kind.
const localFrameHeader = 5

// AppendLocalFrame appends the header of a frame with so many bytes of payload.
func AppendLocalFrame(dst []byte, kind byte, payloadBytes int) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, uint32(payloadBytes+1))
	return append(dst, kind)
}

// ReadLocalFrame reads one frame. The payload is valid as long as the caller
// wants.
func ReadLocalFrame(r *bufio.Reader) (kind byte, payload []byte, err error) {
	head, err := r.Peek(localFrameHeader)
	if err != nil {
		return 0, nil, err
	}
	n := binary.LittleEndian.Uint32(head)
	kind = head[4]
	if n < 1 || n > LocalFrameMax {
		return 0, nil, fmt.Errorf("a frame of %d bytes on the local socket: want 1 to %d", n, LocalFrameMax)
	}
	if _, err := r.Discard(localFrameHeader); err != nil {
		return 0, nil, err
	}
	// Grown as it arrives: a length alone costs nothing.
	payload = make([]byte, 0, min(n-1, 64<<10))
	for uint32(len(payload)) < n-1 {
		step := min(int(n-1)-len(payload), 1<<20)
		at := len(payload)
		payload = append(payload, make([]byte, step)...)
		if _, err := io.ReadFull(r, payload[at:]); err != nil {
			return 0, nil, fmt.Errorf("a frame on the local socket was cut off: %w", err)
		}
	}
	return kind, payload, nil
}
