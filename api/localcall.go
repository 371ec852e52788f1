package api

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
)

// After the hello an engine may send calls (see Call) over the unix socket, and
// give loans back there. A stream has no messages, so each is preceded by its
// length:
//
//	0        4
//	│ length │ message      4 bytes, little endian
//
// Calls are answered in order, one reply each; returns have no answer.
//
// Before the first Write call the engine asks for memory with a message that is KindStage and
// nothing else. The answer is a Reply with the id 0. Without an error the memory's descriptor
// comes with its first byte (SCM_RIGHTS). The memory is the session's as long as the connection lasts.

// LocalFrameMax bounds a message on the socket, in bytes: as much as one of gRPC.
const LocalFrameMax = 16 << 20

// LocalFrameHeaderBytes is what precedes a message.
const LocalFrameHeaderBytes = 4

// PutLocalFrame fills in the length of a frame that was begun with
// LocalFrameHeaderBytes bytes and has got its message.
func PutLocalFrame(frame []byte) {
	binary.LittleEndian.PutUint32(frame, uint32(len(frame)-LocalFrameHeaderBytes))
}

// AppendReturn appends the frame that gives loans back.
func AppendReturn(dst []byte, loans []uint64) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, uint32(1+8*len(loans)))
	dst = append(dst, KindReturn)
	for _, n := range loans {
		dst = binary.LittleEndian.AppendUint64(dst, n)
	}
	return dst
}

// ParseReturn returns the numbers of the loans that a message of KindReturn gives
// back, appended to dst. Error: ErrCall.
func ParseReturn(dst []uint64, msg []byte) ([]uint64, error) {
	if len(msg)%8 != 1 || msg[0] != KindReturn {
		return dst, fmt.Errorf("api: %d bytes do not return loans: %w", len(msg), ErrCall)
	}
	for msg = msg[1:]; len(msg) > 0; msg = msg[8:] {
		dst = append(dst, binary.LittleEndian.Uint64(msg))
	}
	return dst, nil
}

// AppendStage appends the frame that asks for memory.
func AppendStage(dst []byte) []byte {
	return append(binary.LittleEndian.AppendUint32(dst, 1), KindStage)
}

// ReadLocalFrame reads one message, of one byte at least. It is the caller's.
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
	// Grown as it arrives: a length alone costs nothing.
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
