package fabric

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/rdma/group"
)

// local is the description that an endpoint sends its peer before they connect, little-endian:
//
//	version 1 = 0xF2 | address format 4 | tag 4 | handshake key 8 | handshake address 8 |
//	provider length 1 | provider | endpoint length 1 | endpoint | hub length 1 | hub
//
// endpoint and hub are the addresses of the endpoint and of its domain's hub, in the provider's
// format (fi_getname). The tag identifies the endpoint: the peer sends it with its frames and
// immediates. Handshake key and address are the remote key and the address of a one-byte region
// that every peer may write (handshake.go).
type local struct {
	format    uint32
	tag       uint32
	handshake target
	provider  string
	endpoint  []byte
	hub       []byte
}

const (
	// localVersion is the first byte of the encoding.
	localVersion  = 0xF2
	localHead     = 25
	handshakeSize = 1
)

// maxName is the longest address or provider name, in bytes.
const maxName = 255

// errLocal: the bytes are not an encoded local.
var errLocal = errors.New("fabric: malformed endpoint address")

// append appends the encoding of l. Each part of l has at most maxName bytes.
func (l *local) append(b []byte) []byte {
	b = append(b, localVersion)
	b = binary.LittleEndian.AppendUint32(b, l.format)
	b = binary.LittleEndian.AppendUint32(b, l.tag)
	b = binary.LittleEndian.AppendUint64(b, l.handshake.key)
	b = binary.LittleEndian.AppendUint64(b, l.handshake.addr)
	for _, part := range [][]byte{[]byte(l.provider), l.endpoint, l.hub} {
		b = append(b, byte(len(part)))
		b = append(b, part...)
	}
	return b
}

// parseLocal decodes b, which must be the encoding of exactly one local. It keeps no reference to
// b.
func parseLocal(b []byte) (local, error) {
	if len(b) < localHead {
		return local{}, fmt.Errorf("%w: %d bytes", errLocal, len(b))
	}
	if b[0] != localVersion {
		return local{}, fmt.Errorf("%w: version %#x, want %#x", errLocal, b[0], localVersion)
	}
	le := binary.LittleEndian
	l := local{format: le.Uint32(b[1:]), tag: le.Uint32(b[5:]), handshake: target{key: le.Uint64(b[9:]), addr: le.Uint64(b[17:]), size: handshakeSize}}
	b = b[localHead:]
	var parts [3][]byte
	for i := range parts {
		if len(b) == 0 || len(b)-1 < int(b[0]) {
			return local{}, fmt.Errorf("%w: part %d ends early", errLocal, i)
		}
		parts[i] = append([]byte(nil), b[1:1+int(b[0])]...)
		b = b[1+int(b[0]):]
	}
	if len(b) != 0 {
		return local{}, fmt.Errorf("%w: %d bytes left over", errLocal, len(b))
	}
	l.provider, l.endpoint, l.hub = string(parts[0]), parts[1], parts[2]
	return l, nil
}

// frame is the format of every message to a hub, little-endian:
//
//	0       4      6       8     12    20
//	┌───────┬──────┬───────┬─────┬─────┬───────────┐
//	│ magic │ type │ count │ tag │ ref │ body      │
//	│ 4     │ 2    │ 2     │ 4   │ 8   │           │
//	└───────┴──────┴───────┴─────┴─────┴───────────┘
//	magic   "PFH1"
//	count   number of entries in the body; 0 for a message, whose body is its payload
//	tag     of the receiver's endpoint
//	ref     message: echoed in the receipt; key query: echoed in the answer;
//	        otherwise 0
type frame struct {
	kind     frameKind
	tag      uint32
	ref      uint64
	payload  []byte    // message; a slice of the parsed bytes
	targets  []target  // key query
	refused  []bool    // answer
	receipts []receipt // receipts
}

// frameKind is the type of a frame.
type frameKind uint16

const (
	// frameMessage carries the payload of an OpSend.
	frameMessage frameKind = 1
	// frameKeyQuery lists writes and queries which of them the receiver would refuse. Entries: key
	// 8 | address 8 | length 8.
	frameKeyQuery frameKind = 2
	// frameKeyReply answers a key query. An entry is 1 if the write would be refused, else 0.
	frameKeyReply frameKind = 3
	// frameReceipts carries the results of messages. Entries: ref 8 | status 1, a group.Status.
	frameReceipts frameKind = 4
	// frameClosed: the sender's endpoint is closed.
	frameClosed frameKind = 5
)

// target is the destination of a write at the peer.
type target struct{ key, addr, size uint64 }

// receipt is the result of the work with that ref.
type receipt struct {
	ref    uint64
	status group.Status
}

const (
	headLen    = 20
	targetLen  = 24
	receiptLen = 9
	// maxControl is the longest frame that is not a message, in bytes.
	maxControl = 4096
	// maxKeyQuery and maxReceipts are the largest numbers of entries in a frame of maxControl
	// bytes.
	maxKeyQuery = (maxControl - headLen) / targetLen
	maxReceipts = (maxControl - headLen) / receiptLen
)

// frameMagic begins every frame.
const frameMagic = "PFH1"

// errFrame: the bytes are not a frame.
var errFrame = errors.New("fabric: malformed frame")

// appendHead appends the header of f, whose body has count entries.
func (f *frame) appendHead(b []byte, count int) []byte {
	b = append(b, frameMagic...)
	b = binary.LittleEndian.AppendUint16(b, uint16(f.kind))
	b = binary.LittleEndian.AppendUint16(b, uint16(count))
	b = binary.LittleEndian.AppendUint32(b, f.tag)
	return binary.LittleEndian.AppendUint64(b, f.ref)
}

// append appends the encoding of f.
func (f *frame) append(b []byte) []byte {
	b = f.appendHead(b, len(f.targets)+len(f.refused)+len(f.receipts))
	for _, t := range f.targets {
		b = binary.LittleEndian.AppendUint64(b, t.key)
		b = binary.LittleEndian.AppendUint64(b, t.addr)
		b = binary.LittleEndian.AppendUint64(b, t.size)
	}
	for _, r := range f.refused {
		v := byte(0)
		if r {
			v = 1
		}
		b = append(b, v)
	}
	for _, r := range f.receipts {
		b = binary.LittleEndian.AppendUint64(b, r.ref)
		b = append(b, byte(r.status))
	}
	return append(b, f.payload...)
}

// parseFrame decodes b, which must be exactly one frame. The frame's payload is a part of b.
func parseFrame(b []byte) (frame, error) {
	if len(b) < headLen || string(b[:4]) != frameMagic {
		return frame{}, fmt.Errorf("%w: %d bytes without its magic", errFrame, len(b))
	}
	le := binary.LittleEndian
	f := frame{kind: frameKind(le.Uint16(b[4:])), tag: le.Uint32(b[8:]), ref: le.Uint64(b[12:])}
	if err := f.parseBody(int(le.Uint16(b[6:])), b[headLen:]); err != nil {
		return frame{}, err
	}
	if f.ref != 0 && (f.kind == frameReceipts || f.kind == frameClosed) {
		return frame{}, fmt.Errorf("%w: kind %d with ref %d, it has none", errFrame, f.kind, f.ref)
	}
	return f, nil
}

// parseBody decodes the bytes after the header.
func (f *frame) parseBody(count int, body []byte) error {
	entry, most := 0, 0
	switch f.kind {
	case frameMessage:
		f.payload = body
		body = nil
	case frameClosed:
	case frameKeyQuery:
		entry, most = targetLen, maxKeyQuery
	case frameKeyReply:
		entry, most = 1, maxKeyQuery
	case frameReceipts:
		entry, most = receiptLen, maxReceipts
	default:
		return fmt.Errorf("%w: kind %d", errFrame, f.kind)
	}
	if count > most || len(body) != count*entry {
		return fmt.Errorf("%w: kind %d, %d entries in %d bytes", errFrame, f.kind, count, len(body))
	}
	for i := range count {
		if err := f.parseEntry(body[i*entry:]); err != nil {
			return err
		}
	}
	return nil
}

// parseEntry decodes one entry of the body.
func (f *frame) parseEntry(b []byte) error {
	le := binary.LittleEndian
	switch f.kind {
	case frameKeyQuery:
		f.targets = append(f.targets, target{key: le.Uint64(b), addr: le.Uint64(b[8:]), size: le.Uint64(b[16:])})
	case frameKeyReply:
		if b[0] > 1 {
			return fmt.Errorf("%w: verdict %d", errFrame, b[0])
		}
		f.refused = append(f.refused, b[0] == 1)
	case frameReceipts:
		s := group.Status(b[8])
		if s != group.StatusOK && s != group.StatusNoBuffer {
			return fmt.Errorf("%w: receipt with status %d", errFrame, s)
		}
		f.receipts = append(f.receipts, receipt{ref: le.Uint64(b), status: s})
	}
	return nil
}
