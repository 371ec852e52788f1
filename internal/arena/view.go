package arena

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/penstock-kv/penstock/internal/sys"
)

// A View is the Shared arena of another process, mapped read-only into this one.
type View struct {
	mem []byte
}

// Send sends msg, which must not be empty, and a read-only descriptor of a Shared arena over a unix
// socket. Receive takes both.
func (a *Arena) Send(conn *net.UnixConn, msg []byte) error {
	if a.region.file == nil {
		return errors.New("arena: only a Shared arena can be sent")
	}
	f, err := sys.Reopen(a.region.file)
	if err != nil {
		return fmt.Errorf("arena: %w", err)
	}
	return errors.Join(sys.SendFile(conn, msg, f), f.Close())
}

// Receive fills msg from a unix socket and maps the arena that came with the message. The View is
// nil if no arena came with the message. Receive refuses an arena of another user, because that
// user could change the bytes.
func Receive(conn *net.UnixConn, msg []byte) (*View, error) {
	f, err := ReceiveFile(conn, msg)
	if err != nil || f == nil {
		return nil, err
	}
	v, err := Map(int(f.Fd()))
	if closeErr := f.Close(); closeErr != nil && err == nil {
		return nil, errors.Join(closeErr, v.Close())
	}
	return v, err
}

// ReceiveFile is Receive without the mapping: it returns the memfd of the arena, for Map.
func ReceiveFile(conn *net.UnixConn, msg []byte) (*os.File, error) {
	f, err := sys.ReceiveFile(conn, msg)
	if err != nil || f == nil {
		return nil, err
	}
	uid, err := sys.PeerUID(conn)
	if err == nil && uid != uint32(os.Geteuid()) {
		err = fmt.Errorf("the process that listens on the socket runs as user %d, this process as user %d", uid, os.Geteuid())
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("arena: %w", err), f.Close())
	}
	return f, nil
}

// Map maps the arena of another process read-only; a write to the mapping faults. fd is the memfd
// of the arena as its owner sent it, and may be closed afterwards. Offsets in the mapping are those
// of Buffer.Offset. In its messages the owner announces the range that it lends and the end of the
// loan; the mapping itself does not prevent the owner from changing the bytes. Map checks that the
// owner cannot shrink the file.
func Map(fd int) (*View, error) {
	size, err := sys.FileSize(fd)
	if err != nil {
		return nil, fmt.Errorf("arena: map another's region: %w", err)
	}
	if size <= 0 || size%sys.HugePageSize != 0 || size > MaxSizeBytes {
		return nil, fmt.Errorf("arena: descriptor %d of %d bytes is not an arena's", fd, size)
	}
	sealed, err := sys.SizeSealed(fd)
	if err != nil {
		return nil, fmt.Errorf("arena: map another's region: %w", err)
	}
	if !sealed {
		return nil, fmt.Errorf("arena: descriptor %d is not an arena's: its owner could shrink it", fd)
	}
	mem, err := sys.MapSharedRead(fd, int(size))
	if err != nil {
		return nil, fmt.Errorf("arena: map another's region: %w", err)
	}
	v := &View{mem: mem}
	if err := populate(mem, sys.PopulateRead); err != nil {
		return nil, errors.Join(fmt.Errorf("arena: map another's region: %w", err), v.Close())
	}
	return v, nil
}

// Bytes returns the whole region; nil after Close.
func (v *View) Bytes() []byte { return v.mem }

// Close unmaps the region. It may be called twice.
func (v *View) Close() error {
	if v.mem == nil {
		return nil
	}
	mem := v.mem
	v.mem = nil
	return sys.Unmap(mem)
}
