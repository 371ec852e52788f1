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

// segmentsMax is the largest number of arenas that a peer can make this process map.
const segmentsMax = 64

// segment is an arena of this process that peers map to read sources directly.
type segment struct {
	id    uint64
	arena *arena.Arena
	file  *os.File // read-only
}

// Share lets all present and later peers map a Shared arena, so that a peer reads sources in it
// without a system call. The caller keeps ownership of the arena and must close it after the
// domain. Every peer can read all of the arena.
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

// unshare undoes Share for later peers. A peer that has mapped the arena keeps the mapping until
// its endpoint is closed.
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

// locate returns the place from which peers read mem: a segment and an offset in the segment, or
// segment 0 and an address of this process.
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

// sendSegments sends every segment to a peer that has just connected, and registers the peer's
// endpoint for later segments.
func (d *Domain) sendSegments(e *endpoint) error {
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

// sendTimeout is the longest time for sending a message to a peer that does not read.
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

// takeSegment maps a segment of the peer.
func (e *endpoint) takeSegment(id uint64, fd int) error {
	if id == 0 || e.views[id] != nil || len(e.views) == segmentsMax {
		return fmt.Errorf("shm: the peer sent segment %d after %d others: its number is 0 or repeated, or there are too many", id, len(e.views))
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

// sameUser rejects processes of other users, because each of the two processes can read memory of
// the other.
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
