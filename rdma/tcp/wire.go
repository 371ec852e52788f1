package tcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/penstock-kv/penstock/rdma"
	"github.com/penstock-kv/penstock/rdma/internal/handshake"
)

// Sizes on the wire, in bytes; doc.go draws the layouts.
const (
	headerSize = 64
	runSize    = 16
	ackSize    = 16
	// maxRuns is the largest number of runs in the table of one write frame, maxAcks the largest
	// number of entries of one ack frame.
	maxRuns = 256
	maxAcks = 512
	// maxMessage is the largest message, in bytes. The receiver's buffers may be smaller.
	maxMessage = 1 << 20
	// maxFrames is the largest number of frames of one operation: MaxPages pages that each have
	// their own frame, or a large single write (1<<20 x 64 KiB).
	maxFrames = 1 << 20
)

// frameMagic is "PNS" and the version of the framing, as a little-endian number.
const frameMagic = uint32('P') | uint32('N')<<8 | uint32('S')<<16 | 3<<24

// Types of frames.
const (
	frameWrite     = 1
	frameAck       = 2
	frameMessage   = 3
	frameHeartbeat = 4
	frameDown      = 5
)

// Flags. flagImm: the imm field is valid. flagAckMayWait: the ack may be delayed to share a write
// with another frame.
const (
	flagImm        = 1
	flagAckMayWait = 2
)

// errFrame is wrapped by every error after which the stream cannot be decoded any further.
var errFrame = errors.New("malformed frame")

// castagnoli is the table of CRC-32C, which has its own instruction on amd64
// and arm64.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// header is the decoded header of a frame.
type header struct {
	kind, flags                  uint8
	runs                         uint16
	imm, frames, tableSum, piece uint32
	op, key, offset, length      uint64
}

// encode writes h to b, which holds headerSize bytes.
func (h *header) encode(b []byte) {
	_ = b[headerSize-1]
	le := binary.LittleEndian
	le.PutUint32(b[0:], frameMagic)
	b[4], b[5] = h.kind, h.flags
	le.PutUint16(b[6:], h.runs)
	le.PutUint32(b[8:], h.imm)
	le.PutUint32(b[12:], h.frames)
	le.PutUint64(b[16:], h.op)
	le.PutUint64(b[24:], h.key)
	le.PutUint64(b[32:], h.offset)
	le.PutUint64(b[40:], h.length)
	le.PutUint32(b[48:], h.tableSum)
	le.PutUint32(b[52:], h.piece)
	le.PutUint32(b[56:], 0)
	le.PutUint32(b[60:], crc32.Checksum(b[:60], castagnoli))
}

// decode reads a header from b, which holds headerSize bytes. It performs all checks that do not
// depend on the session.
func (h *header) decode(b []byte) error {
	_ = b[headerSize-1]
	le := binary.LittleEndian
	if m := le.Uint32(b[0:]); m != frameMagic {
		return fmt.Errorf("magic %#x, want %#x: %w", m, frameMagic, errFrame)
	}
	if got, want := crc32.Checksum(b[:60], castagnoli), le.Uint32(b[60:]); got != want {
		return fmt.Errorf("header checksum %#x, header has %#x: %w", got, want, errFrame)
	}
	if le.Uint32(b[56:]) != 0 {
		return fmt.Errorf("reserved bytes are set: %w", errFrame)
	}
	*h = header{
		kind: b[4], flags: b[5],
		runs: le.Uint16(b[6:]), imm: le.Uint32(b[8:]), frames: le.Uint32(b[12:]),
		op: le.Uint64(b[16:]), key: le.Uint64(b[24:]), offset: le.Uint64(b[32:]), length: le.Uint64(b[40:]),
		tableSum: le.Uint32(b[48:]), piece: le.Uint32(b[52:]),
	}
	return h.check()
}

// check returns an error if the fields are inconsistent.
func (h *header) check() error {
	ok := false
	switch h.kind {
	case frameWrite:
		ok = h.flags&^flagImm == 0 && h.runs <= maxRuns && h.frames <= maxFrames && h.piece < h.frames &&
			h.length <= maxPiece && (h.runs == 0 || h.offset == 0)
	case frameAck:
		ok = h.length > 0 && h.length%ackSize == 0 && h.length <= maxAcks*ackSize && *h == header{kind: h.kind, length: h.length}
	case frameMessage:
		ok = h.flags&^flagAckMayWait == 0 && h.length <= maxMessage && *h == header{kind: h.kind, flags: h.flags, length: h.length, op: h.op}
	case frameHeartbeat:
		ok = *h == header{kind: h.kind}
	case frameDown:
		// In this frame, the field frames is the number of the rail and the field piece its
		// generation.
		ok = h.frames < MaxNICs && *h == header{kind: h.kind, frames: h.frames, piece: h.piece}
	default:
		return fmt.Errorf("frame of type %d: %w", h.kind, errFrame)
	}
	if !ok {
		return fmt.Errorf("frame of type %d with flags %#x, %d runs, piece %d of %d, length %d, offset %d: %w",
			h.kind, h.flags, h.runs, h.piece, h.frames, h.length, h.offset, errFrame)
	}
	return nil
}

// span is one entry of a frame's table: the offset and length of a contiguous run at the target.
type span struct{ offset, length uint64 }

// putSpan encodes s to b.
func putSpan(b []byte, s span) {
	binary.LittleEndian.PutUint64(b, s.offset)
	binary.LittleEndian.PutUint64(b[8:], s.length)
}

// decodeTable appends the entries of the table of h to spans, having checked
// the table against the header.
func (h *header) decodeTable(table []byte, spans []span) ([]span, error) {
	if got := crc32.Checksum(table, castagnoli); got != h.tableSum {
		return spans, fmt.Errorf("table checksum %#x, header has %#x: %w", got, h.tableSum, errFrame)
	}
	left := h.length
	for b := table; len(b) >= runSize; b = b[runSize:] {
		s := span{binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])}
		if s.length > left {
			return spans, fmt.Errorf("table has more than the frame's %d bytes: %w", h.length, errFrame)
		}
		left -= s.length
		spans = append(spans, s)
	}
	if left != 0 {
		return spans, fmt.Errorf("table has %d bytes less than the frame's %d: %w", left, h.length, errFrame)
	}
	return spans, nil
}

// ack is the result of one operation of the peer.
type ack struct {
	op     uint64
	status rdma.Reason
}

// put encodes a to b.
func (a ack) put(b []byte) {
	binary.LittleEndian.PutUint64(b, a.op)
	binary.LittleEndian.PutUint64(b[8:], uint64(a.status))
}

// decodeAck reads one entry of an ack frame.
func decodeAck(b []byte) (ack, error) {
	status := binary.LittleEndian.Uint64(b[8:])
	if status > uint64(rdma.ReasonNoBuffer) {
		return ack{}, fmt.Errorf("ack with status %d: %w", status, errFrame)
	}
	return ack{binary.LittleEndian.Uint64(b), rdma.Reason(status)}, nil
}

// protocol is the first bytes that each engine sends on a connection: "PRD" from the dialer, "PRC"
// from the acceptor, then the version of the frames.
var protocol = handshake.Protocol{Hello: [4]byte{'P', 'R', 'D', '3'}, Challenge: [4]byte{'P', 'R', 'C', '3'}, MoreBytes: 16}

// hello opens a connection. The connection has number index among the conns connections of one
// lane of a rail.
type hello struct {
	index, conns int
	engine       rdma.EngineID
	session      [16]byte
	lane, lanes  int
	rail, rails  int
	generation   uint32
}

// encode returns h in the handshake's format.
func (h *hello) encode() handshake.Hello {
	more := append(make([]byte, 0, protocol.MoreBytes), byte(h.lane), byte(h.lanes), byte(h.rail), byte(h.rails))
	more = binary.LittleEndian.AppendUint32(more, h.generation)
	return handshake.Hello{
		Param:  uint32(uint16(h.index)) | uint32(uint16(h.conns))<<16,
		Engine: h.engine, Session: h.session, More: append(more, make([]byte, 8)...),
	}
}

// decode reads h from the handshake's hello.
func (h *hello) decode(from *handshake.Hello) error {
	*h = hello{
		index: int(uint16(from.Param)), conns: int(from.Param >> 16), engine: from.Engine, session: from.Session,
		lane: int(from.More[0]), lanes: int(from.More[1]), rail: int(from.More[2]), rails: int(from.More[3]),
		generation: binary.LittleEndian.Uint32(from.More[4:]),
	}
	if h.conns < 1 || h.conns > MaxConns+1 || h.index >= h.conns ||
		h.lanes < 1 || h.lanes > rdma.Classes || h.lane >= h.lanes ||
		h.rails < 1 || h.rails > MaxNICs || h.rail >= h.rails || h.generation == 0 || binary.LittleEndian.Uint64(from.More[8:]) != 0 {
		return fmt.Errorf("hello for connection %d of %d in lane %d of %d on rail %d of %d, generation %d, engine %v: %w",
			h.index, h.conns, h.lane, h.lanes, h.rail, h.rails, h.generation, h.engine, errFrame)
	}
	return nil
}

// slot is the connection's index among all connections of its rail.
func (h *hello) slot() int { return h.lane*h.conns + h.index }
