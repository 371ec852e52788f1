package group

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/penstock-kv/penstock/rdma"
)

// Frames of the control connection; doc.go draws their layouts.
const (
	// frameHeader is the size of a frame's header: length 4 | type 1 | zero 3.
	frameHeader = 8
	// maxFrame bounds the payload of a frame.
	maxFrame = 64 << 10
)

// frameKind is the type of a frame.
type frameKind uint8

// Types of frames.
const (
	frameHeartbeat  frameKind = 1
	frameSetup      frameKind = 2
	frameLaneAddr   frameKind = 3
	frameLaneReady  frameKind = 4
	frameLaneDown   frameKind = 5
	frameQuery      frameKind = 6
	frameReason     frameKind = 7
	frameAck        frameKind = 8
	frameWithdraw   frameKind = 9
	frameWithdrawn  frameKind = 10
	frameForget     frameKind = 11
	frameCheckpoint frameKind = 12
	frameChecked    frameKind = 13
	frameLaneUp     frameKind = 14
)

// Sizes of fixed payloads and entries, in bytes.
const (
	laneReadySize  = 8
	laneDownSize   = 24
	tallySize      = 8
	querySize      = 40
	reasonSize     = 16
	ackSize        = 16
	keyEntrySize   = 16
	idSize         = 8
	checkpointSize = 16

	// maxTallies, maxAcks and maxKeys are the largest numbers of entries in one frame.
	maxTallies = 4096
	maxAcks    = 1024
	maxKeys    = MaxDomains
	// maxName is the largest length of a name in a setup, in bytes.
	maxName = 64
)

// errFrame is wrapped by every error that ends the session because of an invalid frame.
var errFrame = errors.New("malformed frame")

// le is the byte order of all integers on the control connection.
var le = binary.LittleEndian

// appendHeader begins a frame of n bytes of payload.
func appendHeader(b []byte, kind frameKind, n int) []byte {
	b = le.AppendUint32(b, uint32(n))
	return append(b, byte(kind), 0, 0, 0)
}

// decodeHeader reads a frame's header from b, which holds frameHeader bytes.
func decodeHeader(b []byte) (kind frameKind, n int, _ error) {
	size := le.Uint32(b)
	kind = frameKind(b[4])
	if size > maxFrame {
		return 0, 0, fmt.Errorf("frame of %d bytes, at most %d: %w", size, maxFrame, errFrame)
	}
	if b[5]|b[6]|b[7] != 0 {
		return 0, 0, fmt.Errorf("reserved bytes of a header are set: %w", errFrame)
	}
	if kind < frameHeartbeat || kind > frameLaneUp {
		return 0, 0, fmt.Errorf("frame of type %d: %w", kind, errFrame)
	}
	return kind, int(size), nil
}

// wantSize returns an error unless b holds exactly n bytes.
func wantSize(what string, b []byte, n int) error {
	if len(b) != n {
		return fmt.Errorf("%s of %d bytes, want %d: %w", what, len(b), n, errFrame)
	}
	return nil
}

// setup describes the sending engine. Each engine sends its setup before the lanes open.
type setup struct {
	// separate requests separate endpoints for each traffic class.
	separate bool
	// counted (Engine.counted) and provider must be the same at both engines.
	counted  bool
	provider string
	// nics are the names of the NICs, in the order in which the two engines pair them.
	nics []string
}

// Flags of a setup.
const (
	setupSeparate = 1
	setupCounted  = 2
)

// append appends the frame: flags 1 | provider length 1 | provider | NICs 1 |
// NICs x ( name length 1 | name ).
func (s *setup) append(b []byte) []byte {
	flags := byte(0)
	if s.separate {
		flags |= setupSeparate
	}
	if s.counted {
		flags |= setupCounted
	}
	p := append([]byte{flags, byte(len(s.provider))}, s.provider...)
	p = append(p, byte(len(s.nics)))
	for _, n := range s.nics {
		n = n[:min(len(n), maxName)]
		p = append(append(p, byte(len(n))), n...)
	}
	return append(appendHeader(b, frameSetup, len(p)), p...)
}

// decodeSetup reads a setup.
func decodeSetup(b []byte) (s setup, _ error) {
	r := fields{b: b}
	flags := r.byte()
	if flags&^(setupSeparate|setupCounted) != 0 {
		return s, fmt.Errorf("setup with flags %#x: %w", flags, errFrame)
	}
	s.separate, s.counted = flags&setupSeparate != 0, flags&setupCounted != 0
	s.provider = string(r.take(int(r.byte())))
	n := int(r.byte())
	if n < 1 || n > MaxDomains || len(s.provider) > maxName {
		return s, fmt.Errorf("setup with %d NICs of provider %.70q: %w", n, s.provider, errFrame)
	}
	for range n {
		name := r.take(int(r.byte()))
		if len(name) > maxName {
			return s, fmt.Errorf("setup with a name of %d bytes: %w", len(name), errFrame)
		}
		s.nics = append(s.nics, string(name))
	}
	return s, r.end("setup")
}

// laneAddr opens a lane. It holds the address of the sender's endpoint and the serial number of
// the sender's NIC, which selects the key in a Desc.
type laneAddr struct {
	lane   uint16
	epoch  uint32
	serial uint32
	addr   []byte
}

// append appends the frame: lane 2 | zero 2 | epoch 4 | serial 4 | address.
func (l *laneAddr) append(b []byte) []byte {
	b = appendHeader(b, frameLaneAddr, 12+len(l.addr))
	b = append(le.AppendUint16(b, l.lane), 0, 0)
	b = le.AppendUint32(b, l.epoch)
	b = le.AppendUint32(b, l.serial)
	return append(b, l.addr...)
}

// decodeLaneAddr reads a laneAddr, which keeps a copy of the address.
func decodeLaneAddr(b []byte) (l laneAddr, _ error) {
	r := fields{b: b}
	l.lane = r.uint16()
	zero := r.uint16()
	l.epoch, l.serial = r.uint32(), r.uint32()
	if r.short || zero != 0 || l.epoch == 0 || l.serial == 0 || len(r.b) > MaxEndpointAddr {
		return l, fmt.Errorf("lane %d, epoch %d, NIC %d, address of %d bytes: %w", l.lane, l.epoch, l.serial, len(r.b), errFrame)
	}
	l.addr = append([]byte(nil), r.b...)
	return l, nil
}

// laneReady reports that the sender's endpoint is connected. As a frame of type frameLaneUp it
// reports to the dialer that both endpoints are connected, so that the dialer may post too.
type laneReady struct {
	lane  uint16
	epoch uint32
}

// append appends the frame: lane 2 | zero 2 | epoch 4.
func (l *laneReady) append(b []byte, kind frameKind) []byte {
	b = appendHeader(b, kind, laneReadySize)
	b = append(le.AppendUint16(b, l.lane), 0, 0)
	return le.AppendUint32(b, l.epoch)
}

// decodeLaneReady reads a laneReady.
func decodeLaneReady(b []byte) (l laneReady, _ error) {
	if err := wantSize("ready lane", b, laneReadySize); err != nil {
		return l, err
	}
	l = laneReady{lane: le.Uint16(b), epoch: le.Uint32(b[4:])}
	if le.Uint16(b[2:]) != 0 || l.epoch == 0 {
		return l, fmt.Errorf("ready lane %d, epoch %d: %w", l.lane, l.epoch, errFrame)
	}
	return l, nil
}

// tally is how many times one immediate arrived.
type tally struct{ imm, count uint32 }

// laneDown reports that the sender has shut its endpoint and counted all immediates that arrived
// on it: the total, and, if Engine.counted is false, the number for each value since the last
// checkpoint. A long list takes several frames, and more is set in all but the last. worked: a
// Work of the sender had completed on the endpoint, so the lane is opened again immediately.
type laneDown struct {
	lane    uint16
	epoch   uint32
	more    bool
	worked  bool
	arrived uint64
	tallies []tally
}

// Flags of a laneDown.
const (
	downMore   = 1
	downWorked = 2
)

// append appends the frame: lane 2 | flags 1 | zero 1 | epoch 4 | arrived 8 |
// tallies 4 | zero 4 | tallies x ( imm 4 | count 4 ).
func (l *laneDown) append(b []byte) []byte {
	flags := byte(0)
	if l.more {
		flags |= downMore
	}
	if l.worked {
		flags |= downWorked
	}
	b = appendHeader(b, frameLaneDown, laneDownSize+len(l.tallies)*tallySize)
	b = append(le.AppendUint16(b, l.lane), flags, 0)
	b = le.AppendUint32(b, l.epoch)
	b = le.AppendUint64(b, l.arrived)
	b = le.AppendUint32(b, uint32(len(l.tallies)))
	b = le.AppendUint32(b, 0)
	for _, t := range l.tallies {
		b = le.AppendUint32(b, t.imm)
		b = le.AppendUint32(b, t.count)
	}
	return b
}

// decodeLaneDown reads a laneDown.
func decodeLaneDown(b []byte) (l laneDown, _ error) {
	r := fields{b: b}
	l.lane = r.uint16()
	flags, zero := r.byte(), r.byte()
	l.epoch, l.arrived = r.uint32(), r.uint64()
	n, zero2 := r.uint32(), r.uint32()
	if r.short || flags&^(downMore|downWorked) != 0 || zero != 0 || zero2 != 0 || l.epoch == 0 || n > maxTallies || len(r.b) != int(n)*tallySize {
		return l, fmt.Errorf("end of lane %d, epoch %d, %d tallies in %d bytes: %w", l.lane, l.epoch, n, len(b), errFrame)
	}
	l.more, l.worked = flags&downMore != 0, flags&downWorked != 0
	for range n {
		l.tallies = append(l.tallies, tally{r.uint32(), r.uint32()})
	}
	return l, nil
}

// reasonQuery asks the receiver why its NIC refused a write of n bytes at addr. op is the number of
// the sender's operation. serial is the number of the receiver's NIC, and key the key that was used
// there.
type reasonQuery struct {
	op      uint64
	serial  uint32
	key     uint64
	addr, n uint64
}

// append appends the frame: op 8 | serial 4 | zero 4 | key 8 | addr 8 | n 8.
func (w *reasonQuery) append(b []byte) []byte {
	b = appendHeader(b, frameQuery, querySize)
	b = le.AppendUint64(b, w.op)
	b = le.AppendUint32(b, w.serial)
	b = le.AppendUint32(b, 0)
	b = le.AppendUint64(b, w.key)
	b = le.AppendUint64(b, w.addr)
	return le.AppendUint64(b, w.n)
}

// decodeQuery reads a reasonQuery.
func decodeQuery(b []byte) (w reasonQuery, _ error) {
	if err := wantSize("question", b, querySize); err != nil {
		return w, err
	}
	if le.Uint32(b[12:]) != 0 {
		return w, fmt.Errorf("reserved bytes of a question are set: %w", errFrame)
	}
	return reasonQuery{op: le.Uint64(b), serial: le.Uint32(b[8:]), key: le.Uint64(b[16:]), addr: le.Uint64(b[24:]), n: le.Uint64(b[32:])}, nil
}

// reasonReply answers a reasonQuery. ReasonNone: the operation would be accepted.
type reasonReply struct {
	op     uint64
	reason rdma.Reason
}

// append appends the frame: op 8 | reason 1 | zero 7.
func (a *reasonReply) append(b []byte) []byte {
	b = appendHeader(b, frameReason, reasonSize)
	return appendAnswer(b, a.op, a.reason)
}

// appendAnswer appends id 8 | reason 1 | zero 7.
func appendAnswer(b []byte, id uint64, reason rdma.Reason) []byte {
	b = le.AppendUint64(b, id)
	return append(b, byte(reason), 0, 0, 0, 0, 0, 0, 0)
}

// decodeAnswer reads an answer, in the format of appendAnswer, from b, which holds ackSize bytes.
func decodeAnswer(b []byte) (id uint64, reason rdma.Reason, _ error) {
	v := le.Uint64(b[8:])
	if v > uint64(rdma.ReasonNoBuffer) {
		return 0, 0, fmt.Errorf("answer %#x: %w", v, errFrame)
	}
	return le.Uint64(b), rdma.Reason(v), nil
}

// decodeReason reads a reasonReply.
func decodeReason(b []byte) (a reasonReply, err error) {
	if err := wantSize("answer", b, reasonSize); err != nil {
		return a, err
	}
	a.op, a.reason, err = decodeAnswer(b)
	return a, err
}

// ack is the answer to the message with the sequence number seq.
type ack struct {
	seq    uint64
	reason rdma.Reason
}

// appendAcks appends the frame: entries x ( seq 8 | reason 1 | zero 7 ).
func appendAcks(b []byte, acks []ack) []byte {
	b = appendHeader(b, frameAck, len(acks)*ackSize)
	for _, a := range acks {
		b = appendAnswer(b, a.seq, a.reason)
	}
	return b
}

// decodeAcks reads acks, appending to dst.
func decodeAcks(b []byte, dst []ack) ([]ack, error) {
	if len(b) == 0 || len(b)%ackSize != 0 || len(b) > maxAcks*ackSize {
		return dst, fmt.Errorf("acks of %d bytes: %w", len(b), errFrame)
	}
	for ; len(b) > 0; b = b[ackSize:] {
		seq, reason, err := decodeAnswer(b)
		if err != nil {
			return dst, err
		}
		dst = append(dst, ack{seq, reason})
	}
	return dst, nil
}

// remoteKey identifies memory of a peer: the NIC's serial number, and the key on that NIC.
type remoteKey struct {
	serial uint32
	key    uint64
}

// withdraw asks the receiver to post no more writes with these keys, because their window is being
// revoked.
type withdraw struct {
	id   uint64
	keys []remoteKey
}

// append appends the frame: id 8 | entries x ( serial 4 | zero 4 | key 8 ).
func (w *withdraw) append(b []byte) []byte {
	b = appendHeader(b, frameWithdraw, idSize+len(w.keys)*keyEntrySize)
	b = le.AppendUint64(b, w.id)
	for _, k := range w.keys {
		b = le.AppendUint32(b, k.serial)
		b = le.AppendUint32(b, 0)
		b = le.AppendUint64(b, k.key)
	}
	return b
}

// decodeWithdraw reads a withdraw.
func decodeWithdraw(b []byte) (w withdraw, _ error) {
	n := (len(b) - idSize) / keyEntrySize
	if len(b) < idSize || (len(b)-idSize)%keyEntrySize != 0 || n < 1 || n > maxKeys {
		return w, fmt.Errorf("withdrawal of %d bytes: %w", len(b), errFrame)
	}
	w.id = le.Uint64(b)
	for b = b[idSize:]; len(b) > 0; b = b[keyEntrySize:] {
		if le.Uint32(b[4:]) != 0 {
			return w, fmt.Errorf("reserved bytes of a withdrawal are set: %w", errFrame)
		}
		w.keys = append(w.keys, remoteKey{le.Uint32(b), le.Uint64(b[8:])})
	}
	return w, nil
}

// appendID appends a frame of the kind withdrawn or forget, which has only the id of a withdraw
// frame (a request to use some memory keys no more).
func appendID(b []byte, kind frameKind, id uint64) []byte {
	return le.AppendUint64(appendHeader(b, kind, idSize), id)
}

// decodeID reads what appendID wrote.
func decodeID(b []byte) (uint64, error) {
	if err := wantSize("withdrawal", b, idSize); err != nil {
		return 0, err
	}
	return le.Uint64(b), nil
}

// checkpoint asks the receiver to clear its tallies of a lane once its count of arrived immediates
// reaches sent. The answer is a frame of type frameChecked with the same fields.
type checkpoint struct {
	lane  uint16
	epoch uint32
	sent  uint64
}

// append appends the frame: lane 2 | zero 2 | epoch 4 | sent 8.
func (c *checkpoint) append(b []byte, kind frameKind) []byte {
	b = appendHeader(b, kind, checkpointSize)
	b = append(le.AppendUint16(b, c.lane), 0, 0)
	b = le.AppendUint32(b, c.epoch)
	return le.AppendUint64(b, c.sent)
}

// decodeCheckpoint reads a checkpoint.
func decodeCheckpoint(b []byte) (c checkpoint, _ error) {
	if err := wantSize("checkpoint", b, checkpointSize); err != nil {
		return c, err
	}
	c = checkpoint{lane: le.Uint16(b), epoch: le.Uint32(b[4:]), sent: le.Uint64(b[8:])}
	if le.Uint16(b[2:]) != 0 || c.epoch == 0 {
		return c, fmt.Errorf("checkpoint of lane %d, epoch %d: %w", c.lane, c.epoch, errFrame)
	}
	return c, nil
}

// fields reads little-endian fields from a slice. After the slice is exhausted it returns
// zeroes and sets short.
type fields struct {
	b     []byte
	short bool
}

func (r *fields) take(n int) []byte {
	if r.short || n > len(r.b) {
		r.short = true
		return nil
	}
	out := r.b[:n]
	r.b = r.b[n:]
	return out
}

func (r *fields) byte() byte {
	if b := r.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (r *fields) uint16() uint16 {
	if b := r.take(2); b != nil {
		return le.Uint16(b)
	}
	return 0
}

func (r *fields) uint32() uint32 {
	if b := r.take(4); b != nil {
		return le.Uint32(b)
	}
	return 0
}

func (r *fields) uint64() uint64 {
	if b := r.take(8); b != nil {
		return le.Uint64(b)
	}
	return 0
}

// end returns an error if bytes were missing or are left over.
func (r *fields) end(what string) error {
	if r.short || len(r.b) != 0 {
		return fmt.Errorf("%s is too short or too long (%d bytes left): %w", what, len(r.b), errFrame)
	}
	return nil
}
