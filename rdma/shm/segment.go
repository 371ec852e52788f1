package shm

import (
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/internal/sys"
)

// segmentsMax bounds the arenas that a peer may have us map.
const segmentsMax = 64

// segment is an arena of ours that peers map to read from.
type segment struct {
	id    uint64
	arena *arena.Arena
	file  *os.File // read-only
}

// Share gives peers, those there are and those to come, the memory of a Shared
// arena to read from: sources that lie in it need no system call. The arena
// stays the caller's, and is closed after the domain. Whoever is a peer can read
// all of it.
func (d *Domain) Share(a *arena.Arena) error {
	fd := a.FD()
	if fd < 0 {
		return errors.New("shm: only an arena made with Options.Shared can be shared")
	}
	f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return fmt.Errorf("shm: share an arena: %w", err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return errors.Join(errClosed, f.Close())
	}
	if len(d.segments) == segmentsMax {
		return errors.Join(fmt.Errorf("shm: %d arenas are shared already", segmentsMax), f.Close())
	}
	d.segmentIDs++
	s := segment{id: d.segmentIDs, arena: a, file: f}
	d.segments = append(d.segments, s)
	for e := range d.connected {
		if err := sendSegment(e.conn, s); err != nil {
			e.broke(err)
		}
	}
	return nil
}

// unshare ends what Share began, as far as that is possible: peers that have
// mapped the arena keep it until their endpoint is closed.
func (d *Domain) unshare(a *arena.Arena) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i, s := range d.segments {
		if s.arena == a {
			_ = s.file.Close()
			d.segments = append(d.segments[:i], d.segments[i+1:]...)
			return
		}
	}
}

// locate says where peers read mem: in which segment at which offset, or, with 0,
// at which address of this process.
func (d *Domain) locate(mem []byte) (id, offset uint64) {
	at := addressOf(mem)
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.segments {
		b := s.arena.Bytes()
		start := addressOf(b)
		if at >= start && at-start <= uint64(len(b)) && uint64(len(mem)) <= uint64(len(b))-(at-start) {
			return s.id, at - start
		}
	}
	return 0, at
}

// welcome tells a peer that has just connected of every segment, and of those to
// come.
func (d *Domain) welcome(e *endpoint) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return errClosed
	}
	for _, s := range d.segments {
		if err := sendSegment(e.conn, s); err != nil {
			return err
		}
	}
	d.connected[e] = struct{}{}
	return nil
}

// sendTimeout bounds a message to a peer that does not read.
const sendTimeout = 5 * time.Second

// sendSegment sends the number and the descriptor of a segment.
func sendSegment(conn *net.UnixConn, s segment) error {
	_ = conn.SetWriteDeadline(time.Now().Add(sendTimeout))
	msg := segmentMessage{id: s.id}
	if err := sendFiles(conn, msg.encode(), int(s.file.Fd())); err != nil {
		return fmt.Errorf("shm: send a segment: %w", err)
	}
	return nil
}

// takeSegment maps a segment of the peer's.
func (e *endpoint) takeSegment(id uint64, fd int) error {
	if id == 0 || e.views[id] != nil || len(e.views) == segmentsMax {
		return fmt.Errorf("shm: the peer's segment %d, of %d: 0, twice, or too many", id, len(e.views))
	}
	v, err := arena.Map(fd)
	if err != nil {
		return fmt.Errorf("shm: the peer's segment: %w", err)
	}
	e.recvMu.Lock()
	e.views[id] = v
	e.recvMu.Unlock()
	e.stalled.Store(false)
	e.d.Wake()
	return nil
}

// sameUser refuses processes of other users: each side gives the other its
// memory to read.
func sameUser(conn *net.UnixConn) error {
	uid, err := sys.PeerUID(conn)
	if err != nil {
		return fmt.Errorf("shm: %w", err)
	}
	if own := os.Geteuid(); uid != uint32(own) {
		return fmt.Errorf("shm: the peer is user %d, this process user %d: both must be the same", uid, own)
	}
	return nil
}
