package zmtp

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"
)

// ErrProtocol is wrapped by all errors for data that violates the protocol.
var ErrProtocol = errors.New("not ZMTP 3")

// Options are limits of the time and the memory that a peer can use.
type Options struct {
	// HandshakeTimeout is the maximum duration of the handshake. Default 10 s.
	HandshakeTimeout time.Duration
	// MessageBytes is the maximum size of a received message, in bytes. Default 64 KiB.
	MessageBytes int
}

// EnsureDefaults fills the fields that are zero.
func (o *Options) EnsureDefaults() {
	if o.HandshakeTimeout == 0 {
		o.HandshakeTimeout = 10 * time.Second
	}
	if o.MessageBytes == 0 {
		o.MessageBytes = 64 << 10
	}
}

const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4

	greetingBytes = 64
	// framesMax is the maximum number of frames of a received message.
	framesMax = 16
)

// greeting returns the first bytes that each end sends: a signature, version 3.0, the mechanism
// NULL, and as-server 0.
func greeting() []byte {
	g := make([]byte, greetingBytes)
	g[0], g[9] = 0xff, 0x7f
	g[10] = 3
	copy(g[12:], "NULL")
	return g
}

// Conn is a connection to a peer after the handshake. One goroutine may call Receive while another
// goroutine calls Send.
type Conn struct {
	net  net.Conn
	opts Options
	r    *bufio.Reader

	mu sync.Mutex // guards w, to which Receive writes replies to pings
	w  *bufio.Writer

	peer string
}

// writeBuffer is the size of the write buffer, in bytes. The buffer combines small messages into
// few system calls.
const writeBuffer = 64 << 10

// Handshake performs the handshake on a new connection. ours is the type of the socket at this end
// (PUB or ROUTER), and peers are the allowed types of the peer's socket. After an error the caller
// closes c.
func Handshake(c net.Conn, ours string, peers []string, o Options) (*Conn, error) {
	o.EnsureDefaults()
	z := &Conn{net: c, opts: o, r: bufio.NewReader(c), w: bufio.NewWriterSize(c, writeBuffer)}
	if err := c.SetDeadline(time.Now().Add(o.HandshakeTimeout)); err != nil {
		return nil, fmt.Errorf("zmtp: handshake: %w", err)
	}
	if err := z.handshake(ours); err != nil {
		return nil, fmt.Errorf("zmtp: handshake: %w", err)
	}
	if !slices.Contains(peers, z.peer) {
		// Send the reason to the peer before the connection ends.
		_ = z.command("ERROR", append([]byte{byte(len(wrongType))}, wrongType...))
		return nil, fmt.Errorf("zmtp: handshake: the peer's socket has type %q; want one of %q: %w", z.peer, peers, ErrProtocol)
	}
	if err := c.SetDeadline(time.Time{}); err != nil {
		return nil, fmt.Errorf("zmtp: handshake: %w", err)
	}
	return z, nil
}

const wrongType = "Invalid socket type"

func (z *Conn) handshake(ours string) error {
	ready := property(property(nil, "Socket-Type", ours), "Identity", "")
	if _, err := z.w.Write(greeting()); err != nil {
		return err
	}
	if err := z.Flush(); err != nil {
		return err
	}
	var g [greetingBytes]byte
	if _, err := io.ReadFull(z.r, g[:]); err != nil {
		return err
	}
	if g[0] != 0xff || g[9]&1 != 1 || g[10] < 3 {
		return fmt.Errorf("%w: greeting % x", ErrProtocol, g[:12])
	}
	if mechanism := string(bytes.TrimRight(g[12:32], "\x00")); mechanism != "NULL" {
		return fmt.Errorf("%w: security mechanism %q; want NULL", ErrProtocol, mechanism)
	}
	if err := z.command("READY", ready); err != nil {
		return err
	}
	flags, body, err := z.frame(z.opts.MessageBytes)
	if err != nil {
		return err
	}
	name, rest, ok := cutName(body)
	if flags&flagCommand == 0 || !ok || name != "READY" {
		return fmt.Errorf("%w: %q; want the command READY", ErrProtocol, body)
	}
	for len(rest) > 0 {
		var key string
		if key, rest, ok = cutName(rest); !ok || len(rest) < 4 {
			return fmt.Errorf("%w: a property of READY is cut short", ErrProtocol)
		}
		n := binary.BigEndian.Uint32(rest)
		if rest = rest[4:]; uint64(n) > uint64(len(rest)) {
			return fmt.Errorf("%w: a property of READY is cut short", ErrProtocol)
		}
		if key == "Socket-Type" {
			z.peer = string(rest[:n])
		}
		rest = rest[n:]
	}
	return nil
}

// property appends a property of READY.
func property(b []byte, name, value string) []byte {
	b = append(append(b, byte(len(name))), name...)
	return append(binary.BigEndian.AppendUint32(b, uint32(len(value))), value...)
}

// cutName reads a name that is preceded by its length in one byte, and returns the rest of b.
func cutName(b []byte) (name string, rest []byte, ok bool) {
	if len(b) == 0 || int(b[0]) > len(b)-1 {
		return "", nil, false
	}
	n := int(b[0])
	return string(b[1 : 1+n]), b[1+n:], true
}

// Peer returns the type of the peer's socket.
func (z *Conn) Peer() string { return z.peer }

// Net returns the underlying connection, for deadlines and addresses.
func (z *Conn) Net() net.Conn { return z.net }

// Close closes the connection. A concurrent Receive or Send fails. Messages that were not
// flushed are lost.
func (z *Conn) Close() error { return z.net.Close() }

// Send writes one message to the connection's buffer. The caller may change the frames
// when Send has returned. After an error a Conn must not be used.
func (z *Conn) Send(frames ...[]byte) error {
	z.mu.Lock()
	defer z.mu.Unlock()
	for i, f := range frames {
		var flags byte
		if i < len(frames)-1 {
			flags = flagMore
		}
		if err := z.writeFrame(flags, f); err != nil {
			return err
		}
	}
	return nil
}

// Flush writes the buffered messages to the connection.
func (z *Conn) Flush() error {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.w.Flush()
}

func (z *Conn) command(name string, body []byte) error {
	z.mu.Lock()
	defer z.mu.Unlock()
	b := append(append([]byte{byte(len(name))}, name...), body...)
	if err := z.writeFrame(flagCommand, b); err != nil {
		return err
	}
	return z.w.Flush()
}

// writeFrame writes one frame. mu is held.
func (z *Conn) writeFrame(flags byte, body []byte) error {
	var head [9]byte
	h := append(head[:0], flags, byte(len(body)))
	if len(body) > 255 {
		h = binary.BigEndian.AppendUint64(append(head[:0], flags|flagLong), uint64(len(body)))
	}
	if _, err := z.w.Write(h); err != nil {
		return err
	}
	_, err := z.w.Write(body)
	return err
}

// Receive returns the next message. It returns a subscription that the peer sends in the form of
// version 3.1 as a message of version 3.0: one frame with 01 or 00 and the topic.
func (z *Conn) Receive() ([][]byte, error) {
	var frames [][]byte
	left := z.opts.MessageBytes
	for {
		flags, body, err := z.frame(left)
		if err != nil {
			return nil, err
		}
		if flags&flagCommand != 0 {
			if len(frames) > 0 {
				return nil, fmt.Errorf("zmtp: receive: %w: a command within a message", ErrProtocol)
			}
			msg, err := z.commanded(body)
			if err != nil {
				return nil, err
			}
			if msg != nil {
				return [][]byte{msg}, nil
			}
			continue
		}
		left -= len(body)
		if frames = append(frames, body); flags&flagMore == 0 {
			return frames, nil
		}
		if len(frames) == framesMax {
			return nil, fmt.Errorf("zmtp: receive: %w: more than %d frames in a message", ErrProtocol, framesMax)
		}
	}
}

// commanded performs a command of the peer. If the command is a subscription, commanded returns the
// subscription as a message of version 3.0.
func (z *Conn) commanded(body []byte) ([]byte, error) {
	name, rest, ok := cutName(body)
	if !ok {
		return nil, fmt.Errorf("zmtp: receive: %w: a command without a name", ErrProtocol)
	}
	switch name {
	case "SUBSCRIBE":
		return append([]byte{1}, rest...), nil
	case "CANCEL":
		return append([]byte{0}, rest...), nil
	case "PING":
		if len(rest) < 2 {
			return nil, fmt.Errorf("zmtp: receive: %w: a PING without its time to live", ErrProtocol)
		}
		return nil, z.command("PONG", rest[2:])
	case "ERROR":
		return nil, fmt.Errorf("zmtp: receive: %w: the peer reports %q", ErrProtocol, rest)
	}
	return nil, nil // a command of a later version
}

// frame reads one frame of at most limit bytes.
func (z *Conn) frame(limit int) (flags byte, body []byte, err error) {
	if flags, err = z.r.ReadByte(); err != nil {
		return 0, nil, err
	}
	if flags&^(flagMore|flagLong|flagCommand) != 0 {
		return 0, nil, fmt.Errorf("zmtp: receive: %w: flags %#x", ErrProtocol, flags)
	}
	var size [8]byte
	field := size[7:]
	if flags&flagLong != 0 {
		field = size[:]
	}
	if _, err := io.ReadFull(z.r, field); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint64(size[:])
	if n > uint64(max(0, limit)) {
		return 0, nil, fmt.Errorf("zmtp: receive: %w: a frame of %d bytes; want at most %d", ErrProtocol, n, max(0, limit))
	}
	body = make([]byte, n)
	if _, err := io.ReadFull(z.r, body); err != nil {
		return 0, nil, err
	}
	return flags, body, nil
}
