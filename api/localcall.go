package api

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
)

// After the hello (LocalHello) an engine may send calls (see Call) over the unix socket, and
// messages that end loans of the node's memory. A stream has no message boundaries, so each message
// is preceded by its length:
//
//	0        4
//	│ length │ message      4 bytes, little endian
//
// Calls are answered in order, with one reply each. A KindReturn has no answer.
//
// Before the first Write call the engine requests memory for the bytes of Write calls, with a
// message that consists only of KindStage. The answer is a Reply with the id 0. If its code is 0,
// the descriptor of the memory comes with the first byte of the reply (SCM_RIGHTS). The memory
// belongs to the session until the connection ends.

// LocalFrameMax is the maximum size of a message on the socket, in bytes. It is the same as the
// limit of gRPC.
const LocalFrameMax = 16 << 20

// LocalFrameHeaderBytes is the size of the length before a message.
const LocalFrameHeaderBytes = 4

// PutLocalFrame writes the length of the message into the first LocalFrameHeaderBytes bytes of the
// frame. The rest of the frame is the message.
func PutLocalFrame(frame []byte) {
	binary.LittleEndian.PutUint32(frame, uint32(len(frame)-LocalFrameHeaderBytes))
}

// AppendReturn appends the frame that ends the loans with the given numbers.
func AppendReturn(dst []byte, loans []uint64) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, uint32(1+8*len(loans)))
	dst = append(dst, KindReturn)
	for _, n := range loans {
		dst = binary.LittleEndian.AppendUint64(dst, n)
	}
	return dst
}

// ParseReturn parses a message of KindReturn. It appends the numbers of the loans that the message
// ends to dst and returns dst. An error wraps ErrCall.
func ParseReturn(dst []uint64, msg []byte) ([]uint64, error) {
	if len(msg)%8 != 1 || msg[0] != KindReturn {
		return dst, fmt.Errorf("api: a message of %d bytes is not a list of returned loans: %w", len(msg), ErrCall)
	}
	for msg = msg[1:]; len(msg) > 0; msg = msg[8:] {
		dst = append(dst, binary.LittleEndian.Uint64(msg))
	}
	return dst, nil
}

// AppendStage appends the frame that requests the memory for the bytes of Write calls.
func AppendStage(dst []byte) []byte {
	return append(binary.LittleEndian.AppendUint32(dst, 1), KindStage)
}

// ReadLocalFrame reads one message of at least one byte. The caller owns the result.
func ReadLocalFrame(r *bufio.Reader) (msg []byte, err error) {
	head, err := r.Peek(LocalFrameHeaderBytes)
	if err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint32(head)
	if n < 1 || n > LocalFrameMax {
		return nil, fmt.Errorf("a frame of %d bytes on the local socket: want 1 to %d", n, LocalFrameMax)
	}
	if _, err := r.Discard(LocalFrameHeaderBytes); err != nil {
		return nil, err
	}
	// The buffer grows as bytes arrive. So a frame that announces many bytes but sends few
	// allocates little.
	msg = make([]byte, 0, min(n, 64<<10))
	for uint32(len(msg)) < n {
		step := min(int(n)-len(msg), 1<<20)
		at := len(msg)
		msg = append(msg, make([]byte, step)...)
		if _, err := io.ReadFull(r, msg[at:]); err != nil {
			return nil, fmt.Errorf("a frame on the local socket was cut off: %w", err)
		}
	}
	return msg, nil
}
