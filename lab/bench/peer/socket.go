package peer

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
)

// Bare sockets measure the cost of moving the same bytes with nothing but sockets. Each connection
// repeatedly writes one part of the source to the same part of the destination. The target answers
// with one byte when it has received a unit; the sender then sends the next unit. There are no
// headers, keys or bounds checks, and connections share nothing. iperf3 is faster, because it sends
// one buffer in the CPU cache into another and so does not read or write main memory.
//
//	connection:  at 8 | length 8 | unit 8      the part, and the size of an answered unit, in bytes
//	then:        unit bytes ──►   ◄── 1 byte   repeated from front to end of the part

// socketPieceBytes is the size of one write to a socket, the same as in the transfer engine.
const socketPieceBytes = 1 << 20

// socketHello is the size of the header that begins a connection.
const socketHello = 24

// ServeSockets serves connections that write to memory, until ctx ends. It calls ready with the
// address on which it listens.
func ServeSockets(ctx context.Context, memory []byte, ready func(addr string)) error {
	l, err := listen(ctx)
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	ready(l.Addr().String())
	var running sync.WaitGroup
	defer running.Wait()
	for {
		c, err := l.Accept()
		if ctx.Err() != nil {
			if err == nil {
				_ = c.Close() // the server is stopping
			}
			return nil
		}
		if err != nil {
			return err
		}
		running.Go(func() {
			defer context.AfterFunc(ctx, func() { _ = c.Close() })()
			defer c.Close()
			_ = fillFrom(c, memory) // the other end notices that the connection is closed
		})
	}
}

// fillFrom serves one connection at the target.
func fillFrom(c net.Conn, memory []byte) error {
	var hello [socketHello]byte
	if _, err := io.ReadFull(c, hello[:]); err != nil {
		return err
	}
	at, length, unit := binary.LittleEndian.Uint64(hello[:]), binary.LittleEndian.Uint64(hello[8:]), binary.LittleEndian.Uint64(hello[16:])
	if size := uint64(len(memory)); at > size || length > size-at || unit == 0 || unit > length {
		return fmt.Errorf("units of %d bytes into %d bytes at offset %d of a memory of %d bytes", unit, length, at, size)
	}
	part := memory[at : at+length]
	for next := 0; ; {
		place := unitAt(part, &next, int(unit))
		if _, err := io.ReadFull(c, place); err != nil {
			return err
		}
		if _, err := c.Write([]byte{0}); err != nil {
			return err
		}
	}
}

// unitAt returns the unit bytes of part at offset *next, and advances *next. It starts again at the
// beginning if fewer than unit bytes are left.
func unitAt(part []byte, next *int, unit int) []byte {
	if *next+unit > len(part) {
		*next = 0
	}
	u := part[*next : *next+unit]
	*next += unit
	return u
}

// Sockets are connections to ServeSockets.
type Sockets struct{ conns []socketConn }

// socketConn is one connection, used by one goroutine.
type socketConn struct {
	net.Conn
	part []byte
	next int
	unit int
}

// DialSockets makes conns connections to a target whose memory is as long as source. Each
// connection gets an equal part of both memories. unitBytes is the number of bytes that a
// connection has in flight.
func DialSockets(ctx context.Context, addr string, source []byte, conns, unitBytes int) (_ *Sockets, err error) {
	s := &Sockets{}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	length := len(source) / max(conns, 1)
	if conns < 1 || unitBytes < 1 || unitBytes > length {
		return nil, fmt.Errorf("bare sockets: %d connections with units of %d bytes do not fit a memory of %d bytes", conns, unitBytes, len(source))
	}
	for i := range conns {
		c, err := dial(ctx, addr)
		if err != nil {
			return nil, err
		}
		s.conns = append(s.conns, socketConn{Conn: c, part: source[i*length:][:length], unit: unitBytes})
		hello := binary.LittleEndian.AppendUint64(nil, uint64(i*length))
		hello = binary.LittleEndian.AppendUint64(hello, uint64(length))
		if _, err := c.Write(binary.LittleEndian.AppendUint64(hello, uint64(unitBytes))); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// Write sends the next unit of connection i, and returns its size when the target has
// received it.
func (s *Sockets) Write(i int) (int64, error) {
	c := &s.conns[i]
	for left := unitAt(c.part, &c.next, c.unit); len(left) > 0; {
		n, err := c.Conn.Write(left[:min(len(left), socketPieceBytes)])
		if err != nil {
			return 0, err
		}
		left = left[n:]
	}
	var answer [1]byte
	_, err := io.ReadFull(c, answer[:])
	return int64(c.unit), err
}

// Close closes the connections.
func (s *Sockets) Close() error {
	var errs []error
	for _, c := range s.conns {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}
