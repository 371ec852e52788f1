package rounds

import (
	"errors"
	"io"
	"net"
	"sync"
)

// A wire is a listener that passes each of its connections to one address.
type wire struct {
	listener net.Listener
	to       string
	wg       sync.WaitGroup

	mu    sync.Mutex
	conns map[net.Conn]bool
	// passing is closed while bytes pass. refusing makes the wire end each new connection.
	passing  chan struct{}
	refusing bool
	// closed is closed when the wire ends.
	closed chan struct{}
}

// newWire listens on an address for connections to another one.
func newWire(listen, to string) (*wire, error) {
	l, err := net.Listen("tcp", listen)
	if err != nil {
		return nil, err
	}
	w := &wire{listener: l, to: to, conns: make(map[net.Conn]bool), passing: make(chan struct{}), closed: make(chan struct{})}
	close(w.passing)
	w.wg.Go(w.accept)
	return w, nil
}

func (w *wire) accept() {
	for {
		conn, err := w.listener.Accept()
		if err != nil {
			return
		}
		w.wg.Go(func() { w.carry(conn) })
	}
}

// keep reports whether the wire carries a connection. Otherwise it closes the connection.
func (w *wire) keep(conn net.Conn) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case <-w.closed:
	default:
		if !w.refusing {
			w.conns[conn] = true
			return true
		}
	}
	_ = conn.Close()
	return false
}

func (w *wire) drop(conn net.Conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.conns, conn)
	_ = conn.Close()
}

// carry passes the bytes of one connection in both directions.
func (w *wire) carry(near net.Conn) {
	if !w.keep(near) {
		return
	}
	defer w.drop(near)
	if !w.await() {
		return
	}
	far, err := net.Dial("tcp", w.to)
	if err != nil || !w.keep(far) {
		return // the process at the other end does not listen
	}
	defer w.drop(far)
	var other sync.WaitGroup
	other.Go(func() { w.pump(far, near) })
	w.pump(near, far)
	other.Wait()
}

// pump passes bytes in one direction. The end of one connection ends both, but not while the wire is cut.
func (w *wire) pump(to, from net.Conn) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if !w.await() {
			return
		}
		if n > 0 {
			if _, werr := to.Write(buf[:n]); werr != nil {
				err = errors.Join(err, werr)
			}
		}
		if err != nil {
			if errors.Is(err, io.EOF) {
				if half, ok := to.(*net.TCPConn); ok {
					_ = half.CloseWrite() // it may be closed
				}
				return
			}
			_, _ = to.Close(), from.Close() // they may be closed
			return
		}
	}
}

// await waits until bytes pass. It returns false when the wire ends.
func (w *wire) await() bool {
	w.mu.Lock()
	passing := w.passing
	w.mu.Unlock()
	select {
	case <-passing:
		return true
	case <-w.closed:
		return false
	}
}

// cut stops the bytes in both directions, as a network does that loses every packet. With refuse it
// also ends all connections, as a firewall does that rejects packets.
func (w *wire) cut(refuse bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.passing, w.refusing = make(chan struct{}), refuse
	for conn := range w.conns {
		if refuse {
			_ = conn.Close()
		}
	}
}

// mend passes the bytes again.
func (w *wire) mend() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.refusing = false
	close(w.passing)
}

func (w *wire) close() {
	w.mu.Lock()
	close(w.closed)
	for conn := range w.conns {
		_ = conn.Close()
	}
	w.mu.Unlock()
	_ = w.listener.Close()
	w.wg.Wait()
}
